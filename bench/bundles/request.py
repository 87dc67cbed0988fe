"""``steadymoe bundle``: what a bundle holds, its audit, rollouts of another trainer, and a trainer's own answers."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.text import visible


def add(verbs: Any) -> None:
    """Add the verb and its own verbs to the parser of the command line."""
    inner = verbs.add_parser("bundle", help="frozen rollouts, also of another trainer: docs/bundle.md").add_subparsers(
        dest="what", required=True
    )
    show = inner.add_parser("show", help="check a bundle and say what it holds")
    audit = inner.add_parser("audit", help="what each loss asks of the log-probabilities of a bundle")
    for verb in (show, audit):
        verb.add_argument("bundle", type=Path, help="the file of the bundle")
    audit.add_argument("--algorithms", required=True, metavar="A,B", help="names of algorithms or presets")
    audit.add_argument("--advantage", help="a name in conf/advantage (default: the bundle's own, or group_mean_std)")
    audit.add_argument("--csv", type=Path, metavar="FILE", help="write every estimate too, to this new file")
    convert = inner.add_parser("convert", help="make a bundle of a JSONL or parquet file, a line for each response")
    convert.add_argument("file", type=Path, help="rollouts of another trainer, .jsonl or .parquet")
    convert.add_argument("bundle", type=Path, help="the new file of the bundle, .safetensors")
    convert.add_argument("--map", default="", metavar="THEIRS=OURS,…", help="columns with other names")
    convert.add_argument("--names", choices=("trl", "verl"), help="the names of this trainer's batch")
    convert.add_argument("--model", required=True, help="the name of the model")
    conform = inner.add_parser("conform", help="check another trainer's answers: docs/bundle.md")
    conform.add_argument("folder", type=Path, help="the folder of conformance")
    conform.add_argument("answers", type=Path, help="the safetensors file with the trainer's answers")


def answer(arguments: argparse.Namespace) -> int:
    """The exit code: 0, or 1 where a trainer's answers do not conform. Raises BadBundle for bad input."""
    verbs = {"show": _show, "audit": _audit, "conform": _conform, "convert": _convert}
    return verbs[arguments.what](arguments)


def _show(arguments: argparse.Namespace) -> int:
    from steadymoe.bench.bundles import bundle as bundles

    bundle = bundles.read(arguments.bundle)
    for name, value in bundle.about.items():
        print(visible(f"{name}: {value}"))
    print(", ".join(f"{letter} = {size}" for letter, size in bundle.sizes.items()) + f", G = {bundle.responses}")
    print(f"{len(bundle.rows_of_minibatches())} mini-batches, {int(bundle.mask_BT.sum())} response tokens")
    print(f"fields: {', '.join(bundle.tensors)}")
    return 0


def _audit(arguments: argparse.Namespace) -> int:
    from steadymoe.bench.bundles import bundle as bundles
    from steadymoe.bench.bundles import of_logprobs

    if arguments.csv is not None:
        bundles.refuse_existing(arguments.csv)
    advantage = of_logprobs.advantage(arguments.advantage)
    bundle = bundles.read(arguments.bundle)
    named = of_logprobs.losses([name.strip() for name in arguments.algorithms.split(",")], bundle, advantage)
    audited = of_logprobs.audit(bundle, named, advantage)
    print(of_logprobs.text(audited))
    if arguments.csv is not None:
        atomic_files.write(arguments.csv, partial(audited.to_csv, index=False))
        print(visible(f"wrote {arguments.csv}"))
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from steadymoe.bench.bundles import bundle as bundles
    from steadymoe.bench.bundles import convert

    bundles.refuse_existing(arguments.bundle)
    about = {"made_by": f"steadymoe bundle convert {arguments.file.name}", "model": arguments.model}
    renamed = convert.names(arguments.names, arguments.map)
    bundle, left_out = convert.convert(arguments.file, about, renamed)
    bundles.write(bundle, arguments.bundle)
    if left_out:
        print(visible(f"left out: {', '.join(left_out)}"))
    print(visible(f"wrote {arguments.bundle}"))
    return 0


def _conform(arguments: argparse.Namespace) -> int:
    from steadymoe.bench.bundles import conformance

    found = conformance.check(arguments.folder, arguments.answers)
    for each in found:
        print(each.line)
    return 0 if all(each.passed for each in found) else 1
