"""The former name of ``write.html``, until every room uses that."""

from steadymoe.bench.report.write import html as render

__all__ = ["render"]
