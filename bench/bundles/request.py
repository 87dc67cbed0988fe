"""``steadymoe bundle``: what a bundle holds, its audit, rollouts of another trainer, and a trainer's own answers."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.text import visible


def add(verbs: Any) -> None:
    """Add the verb and its own verbs to the parser of the command line."""
    verb = verbs.add_parser("bundle", help="frozen rollouts, also of another trainer: docs/bundle.md")
    inner = verb.add_subparsers(dest="what", required=True)
    for name, told in (
        ("show", "check a bundle and say what it holds"),
        ("audit", "what each loss asks of the log-probabilities of a bundle"),
        ("conform", "check another trainer's answers to the bundle of conformance: docs/conformance.md"),
    ):
        sub = inner.add_parser(name, help=told)
        sub.add_argument("folder", type=Path, help="the folder of the bundle")
        if name == "audit":
            sub.add_argument("--algorithms", required=True, metavar="A,B", help="names of algorithms or presets")
            sub.add_argument(
                "--advantage", help="a name in conf/advantage (default: the bundle's own, or group_mean_std)"
            )
            sub.add_argument("--csv", type=Path, metavar="FILE", help="write every estimate too, to this new file")
        if name == "conform":
            sub.add_argument("answers", type=Path, help="the safetensors file with the trainer's answers")
    sub = inner.add_parser("convert", help="make a bundle of a JSONL or parquet file, a line for each response")
    sub.add_argument("file", type=Path, help="rollouts of another trainer, .jsonl or .parquet")
    sub.add_argument("folder", type=Path, help="the new folder of the bundle")
    sub.add_argument("--map", default="", metavar="THEIRS=OURS,…", help="columns with other names")
    sub.add_argument("--names", choices=("trl", "verl"), help="the names of this trainer's batch")
    sub.add_argument("--model", required=True, help="the name of the model")
    sub.add_argument("--experts", type=int, help="the number of experts of a layer; needed for routes")
    for name in ("task", "engine", "revision"):
        sub.add_argument(f"--{name}", help=f"for the manifest: the {name}")
    sub.add_argument("--staleness", type=int, help="for the manifest: updates between sampling and current policy")


def answer(arguments: argparse.Namespace) -> int:
    """The exit code: 0, or 1 where a trainer's answers do not conform. Raises BadBundle for bad input."""
    verbs = {"show": _show, "audit": _audit, "conform": _conform, "convert": _convert}
    return verbs[arguments.what](arguments)


def _show(arguments: argparse.Namespace) -> int:
    from steadymoe.bench.bundles import bundle_files

    bundle = bundle_files.read(arguments.folder)
    for name, value in vars(bundle.about).items():
        print(visible(f"{name}: {'–' if value is None else value}"))
    print(", ".join(f"{letter} = {size}" for letter, size in bundle.sizes.items()) + f", G = {bundle.responses}")
    print(f"{len(bundle.rows_of_minibatches())} mini-batches, {int(bundle.mask_BT.sum())} response tokens")
    print(f"fields: {', '.join(name for name, _ in bundle.tensors())}")
    return 0


def _audit(arguments: argparse.Namespace) -> int:
    from steadymoe.bench.bundles import bundle_files, of_logprobs

    if arguments.csv is not None:
        bundle_files.refuse_existing(arguments.csv)
    advantage = of_logprobs.advantage(arguments.advantage)
    bundle = bundle_files.read(arguments.folder)
    named = of_logprobs.losses([name.strip() for name in arguments.algorithms.split(",")], bundle, advantage)
    audited = of_logprobs.audit(bundle, named, advantage)
    print(of_logprobs.text(audited))
    if arguments.csv is not None:
        atomic_files.write(arguments.csv, partial(of_logprobs.table(audited).to_csv, index=False))
        print(visible(f"wrote {arguments.csv}"))
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from steadymoe.bench.bundles import bundle_files, convert
    from steadymoe.bench.bundles.bundle import About

    bundle_files.refuse_existing(arguments.folder)
    about = About(
        made_by=f"steadymoe bundle convert {arguments.file.name}",
        model=arguments.model,
        **{name: getattr(arguments, name) for name in ("experts", "task", "engine", "revision", "staleness")},
    )
    bundle, left_out = convert.convert(arguments.file, about, convert.names(arguments.names, arguments.map))
    bundle_files.write(bundle, arguments.folder)
    if left_out:
        print(visible(f"left out: {', '.join(left_out)}"))
    print(visible(f"wrote {arguments.folder}"))
    return 0


def _conform(arguments: argparse.Namespace) -> int:
    from steadymoe.bench.bundles import conformance

    found = conformance.check(arguments.folder, arguments.answers)
    for each in found:
        print(each.line)
    return 0 if all(each.passed for each in found) else 1
