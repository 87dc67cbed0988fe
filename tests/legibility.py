"""What cannot be read in a figure."""

import itertools

from matplotlib.legend import Legend
from matplotlib.text import Text

from steadymoe.bench.report.figures import style


def hidden_ticks(figure: style.DataFigure) -> set[Text]:
    """Return the labels of ticks beyond the limits of their axis, which are not drawn."""
    unseen = set()
    for axis in figure.axes:
        for each in (axis.xaxis, axis.yaxis):
            low, high = sorted(each.get_view_interval())
            every = [*each.get_major_ticks(), *each.get_minor_ticks()]
            unseen |= {
                label
                for tick in every
                for label in (tick.label1, tick.label2)
                if not low - 1e-9 <= tick.get_loc() <= high + 1e-9
            }
    return unseen


def faults(figure: style.DataFigure) -> list[str]:
    unseen, found = hidden_ticks(figure), []
    shown = [each for each in figure.findobj(Text) if each.get_text().strip() and each.get_visible()]
    boxes = [(each.get_text(), each.get_window_extent().padded(-1)) for each in shown if each not in unseen]
    for (one, first), (other, second) in itertools.combinations(boxes, 2):
        if first.overlaps(second):
            found.append(f"{one!r} lies over {other!r}")
    panels = [axis.get_window_extent() for axis in figure.axes]
    legends = [legend.get_window_extent().padded(-1) for legend in figure.findobj(Legend)]
    found += ["a legend lies over a panel" for box, panel in itertools.product(legends, panels) if box.overlaps(panel)]
    for name, box in boxes:
        if box.x0 < -1 or box.x1 > figure.bbox.x1 + 1:
            found.append(f"{name!r} stands out")
        for panel in panels:
            inside = panel.x0 <= (box.x0 + box.x1) / 2 <= panel.x1 and panel.y0 <= (box.y0 + box.y1) / 2 <= panel.y1
            if box.overlaps(panel.padded(-1)) and not inside:
                found.append(f"{name!r} lies over a panel")
    share = sum(panel.width * panel.height for panel in panels) / (figure.bbox.width * figure.bbox.height)
    return found if share >= 0.3 else [*found, f"panels have {share:.2f} of the figure"]
