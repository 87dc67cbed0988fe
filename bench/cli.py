"""The command ``steadymoe``: run, report, figures, claims, status, speed."""

import argparse
import signal
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console

# How often a sweep goes on by itself after one of its workers was killed.
_RELAUNCHES = 3
_RUN_HELP = "train: `steadymoe run algorithm=gspo model=tiny seed=0`; every other word is a Hydra override, -m sweeps"


def main() -> None:
    """Entry point: exit code 0, 1 if a run failed, 2 for a request that cannot be met, 130 if interrupted."""
    words = sys.argv[1:]
    if words[:1] == ["run"]:  # the rest is Hydra's, also what argparse would take for its own
        sys.exit(_run(words[1:]))
    if words[:1] == ["speed"]:
        from steadymoe.bench.speed.run import main as speed

        speed(words[1:])
        return
    parser = argparse.ArgumentParser(prog="steadymoe", description="Is this RL algorithm stable on MoE models?")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("run", help=_RUN_HELP)
    verbs.add_parser("speed", help="what a step costs, beside TRL and plain transformers: `steadymoe speed --help`")
    for verb, what in (
        ("report", "tables, figures and report.html from recorded runs"),
        ("figures", "one or several figures: `steadymoe figures --list`, `steadymoe figures fig05`"),
        ("claims", "the verdicts of the reference study on what papers claim: docs/protocol.md"),
        ("status", "what is on disk"),
    ):
        sub = verbs.add_parser(verb, help=what)
        sub.add_argument("--results", type=Path, default=Path("results"), help="results folder (default: results)")
        if verb == "report":
            sub.add_argument("--experiment", help="only this experiment (default: all)")
            instead = sub.add_mutually_exclusive_group()
            instead.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what figures need, without the runs")
            instead.add_argument(
                "--export", choices=("parquet", "csv"), help="write every number as one tidy table instead"
            )
        if verb == "figures":
            sub.add_argument("figures", nargs="*", metavar="figure", help="id or name")
            sub.add_argument("--list", action="store_true", help="every figure, and whether its data are on disk")
            sub.add_argument("--experiment", help="draw from this experiment (default: the figure's own)")
        if verb in ("report", "figures"):
            sub.add_argument("--arms", metavar="A,B", help="only these arms, by name or algorithm (default: all)")
        if verb != "status":
            group = instead if verb == "report" else sub
            shown = {"report": "; svg always", "claims": "; png always"}.get(verb, "")
            group.add_argument("--format", default="png,svg,pdf", help=f"some of png,svg,pdf{shown} (default: all)")
        if verb == "claims":
            sub.add_argument("--page", type=Path, help="where the page goes (default: claims.md below the results)")
    arguments = parser.parse_args(words)
    if arguments.verb == "figures":
        sys.exit(_figures(arguments))
    if arguments.verb == "claims":
        sys.exit(_claims(arguments))
    if arguments.verb == "status":
        sys.exit(_status(arguments.results))
    sys.exit(_report(arguments))


def _run(words: list[str]) -> int:
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    from steadymoe.bench import compose, progress, record, run, sweep

    only_failed = "--retry-failed" in words
    try:
        multirun, prints, overrides = _flags([word for word in words if word != "--retry-failed"])
        if "--help" in prints:
            run.launch(prints)
            return 0
        runs = compose.plan(overrides, multirun)
        if prints:
            run.launch([*prints, *overrides])
            return 0
        sweep.refuse_absent_cluster(overrides)
        for each in runs:
            run.refuse_other_config(each)
        _make_folder(Path(runs[0].config["results_dir"]))
        sweep.remember(runs)
    except (compose.ConfigError, ValueError, OSError) as error:
        print(f"steadymoe: {error}", file=sys.stderr)
        return 2
    console = Console()
    before = {each.folder: record.status(each.folder) for each in runs}
    if only_failed:
        skipped = [each for each in runs if before[each.folder] not in (*record.ENDED, "failed")]
        overrides = [*overrides, "retry=failed"]
        if skipped:
            console.print(f"{len(skipped)} of {len(runs)} runs have not failed and are left for a run of all")
        runs = [each for each in runs if each not in skipped]
    lost = False
    waiting = [each for each in runs if before[each.folder] not in record.ENDED]
    if len(waiting) < len(runs):
        console.print(f"{len(runs) - len(waiting)} of {len(runs)} runs have ended before and are left as they are")
    if waiting:
        # A batch system's way to end a job is treated as Ctrl-C: the workers are stopped too.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with progress.watch(runs, console):
                for left in range(_RELAUNCHES, -1, -1):
                    try:
                        run.launch(["-m", *overrides] if multirun else overrides)
                        break
                    except TerminatedWorkerError:  # the others are ended with it, and go on from their checkpoints
                        further = "the sweep goes on" if left else "once too often; the same command goes on"
                        print(f"steadymoe: a worker was killed (out of memory?); {further}", file=sys.stderr)
        except sweep.lost() as error:
            lost = True
            why = next(iter(str(error).strip().splitlines()), type(error).__name__)
            print(f"steadymoe: the launcher has lost a job; the others may go on. {why}", file=sys.stderr)
        except KeyboardInterrupt:
            print("steadymoe: interrupted; the same command goes on from the last checkpoints", file=sys.stderr)
            return 130
    statuses = {each.folder: record.status(each.folder) for each in runs}
    counts = Counter(statuses.values())
    console.print(", ".join(f"{counts[name]} {name}" for name in sorted(counts)), highlight=False)
    results, experiment = runs[0].config["results_dir"], runs[0].config["experiment_name"]
    failed = [each for each in runs if statuses[each.folder] not in (*record.ENDED, "running")]
    for each in failed:
        facts = record.read_run(each.folder) or {}
        last = (facts.get("error") or "").strip().splitlines()[-1:]
        print(f"steadymoe: {statuses[each.folder]}: {' '.join(last)}", file=sys.stderr)
        print(f"  again: {each.command}", file=sys.stderr)
    where = "" if results == "results" else f" --results {results}"
    console.print(f"next: steadymoe report --experiment {experiment}{where}", highlight=False, soft_wrap=True)
    return 1 if failed or lost else 0


def _make_folder(results: Path) -> None:
    from steadymoe.bench.compose import ConfigError

    try:
        results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"results_dir={results} cannot be written: {error}") from error


def _flags(words: list[str]) -> tuple[bool, list[str], list[str]]:
    """Whether to sweep, the flags that only print (as Hydra takes them), and the overrides."""
    from steadymoe.bench.compose import ConfigError

    multirun, prints, overrides = False, [], []
    rest = iter(words)
    for word in rest:
        if word in ("-m", "--multirun"):
            multirun = True
        elif word in ("-h", "--help"):
            prints = ["--help"]
        elif word in ("--cfg", "--info"):
            prints += [word, next(rest, "job" if word == "--cfg" else "all")]
        elif word.startswith("-"):
            raise ConfigError(
                f"{word} is no flag of steadymoe run; "
                "it takes -m, --retry-failed, --cfg job, --info all, --help, key=value"
            )
        else:
            overrides.append(word)
    return multirun, prints, overrides


def _report(arguments: argparse.Namespace) -> int:
    from steadymoe.bench import draw, report

    results, experiment = arguments.results, arguments.experiment
    try:
        if arguments.export is not None:
            print(f"wrote {report.export(results, experiment, arguments.export)}")
            return 0
        if arguments.keep is not None:
            for path in report.keep(results, experiment, arguments.keep):
                print(f"wrote {path}")
            return 0
        made = report.make(results, experiment, _formats(arguments), _arms(arguments))
    except (report.NothingToReport, draw.CannotDraw) as error:
        print(f"steadymoe: {error}", file=sys.stderr)
        return 2
    print(made.table)
    for path in made.files:
        print(f"wrote {path}")
    for line in made.missing:
        print(line)
    return 0


def _figures(arguments: argparse.Namespace) -> int:
    from steadymoe.bench import draw

    try:
        if arguments.list or not arguments.figures:
            print(draw.listing(arguments.results).to_markdown(index=False))
            return 0
        formats = _formats(arguments)
        for paper in draw.find(arguments.figures):
            for path in draw.make(paper, arguments.results, arguments.experiment, formats, _arms(arguments)):
                print(f"wrote {path}")
    except draw.CannotDraw as error:
        print(f"steadymoe: {error}", file=sys.stderr)
        return 2
    return 0


def _claims(arguments: argparse.Namespace) -> int:
    from steadymoe.bench import draw
    from steadymoe.bench.claims import page, study

    try:
        to = arguments.page or arguments.results / "claims.md"
        written = page.make(arguments.results, to, _formats(arguments))
    except draw.CannotDraw as error:
        print(f"steadymoe: {error}", file=sys.stderr)
        return 2
    except study.NotRun as missing:
        print(
            f"steadymoe: no ended runs of {missing} below {arguments.results}; run them: make reference",
            file=sys.stderr,
        )
        return 2
    for path in written:
        print(f"wrote {path}")
    return 0


def _formats(arguments: argparse.Namespace) -> list[str]:
    """Of figures, in the order given. Raises CannotDraw for one that there is not."""
    from steadymoe.bench import draw, figures

    formats: list[str] = arguments.format.split(",")
    if not set(formats) <= set(figures.FORMATS):
        raise draw.CannotDraw(f"--format takes {', '.join(figures.FORMATS)}; got {arguments.format}")
    return formats


def _arms(arguments: argparse.Namespace) -> list[str] | None:
    """The arms that are asked for, None for all."""
    return None if arguments.arms is None else [name.strip() for name in arguments.arms.split(",")]


def _status(results: Path) -> int:
    from steadymoe.bench import status

    print("\n".join(status.lines(results)))
    return 0


if __name__ == "__main__":
    main()
