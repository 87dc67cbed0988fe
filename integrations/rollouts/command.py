"""``steadymoe-integrations audit`` and ``conformance``: another trainer's rollouts, and its route replay."""

from functools import partial
from pathlib import Path

from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.arguments import Parser
from steadymoe.bench.support.text import visible
from steadymoe.integrations.rollouts import audit, bundle, conformance

FIXTURE = Path("results/reference/conformance")
_AUDIT = """Print each loss's gradient with respect to the log-probabilities of another trainer's rollouts.

  steadymoe-integrations audit rollouts.jsonl --algorithms grpo,gspo

FILE has one row per response: integrations/rollouts.md lists the columns."""
_CONFORMANCE = """Check another trainer's tensors: is its ratio 1 before any update, does it replay routes?

  steadymoe-integrations conformance tensors.safetensors

integrations/rollouts.md lists the tensors."""


def audit_main(words: list[str]) -> int:
    """Audit a file of rollouts; return the exit code. Raises UserError for a damaged file or an unknown name."""
    parser = _parser("audit", _AUDIT)
    parser.add_argument("file", type=Path, metavar="FILE", help="a .jsonl or .parquet file, one row per response")
    parser.add_argument("--algorithms", metavar="A,B", default="grpo,gspo", help="algorithms or presets, by name")
    parser.add_argument("--advantage", metavar="NAME", help="from conf/advantage (default: the file's, else GRPO's)")
    parser.add_argument("--names", choices=("trl", "verl"), help="column names of this trainer's batch")
    parser.add_argument("--map", action="append", default=[], metavar="OURS=THEIRS", help="rename a column; repeatable")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write every estimate to this file")
    arguments = parser.parse_args(words)
    advantage = audit.load_advantage(arguments.advantage)
    rollouts, ignored = bundle.read(arguments.file, bundle.names(arguments.names, arguments.map))
    losses = audit.losses([name.strip() for name in arguments.algorithms.split(",")])
    audited = audit.audit(rollouts, losses, advantage)
    print(audit.text(audited))
    if ignored:
        print(visible(f"ignored columns: {', '.join(ignored)}"))
    if arguments.csv is not None:
        atomic_files.write(arguments.csv.resolve(), partial(audited.to_csv, index=False))
        print(visible(f"wrote {arguments.csv}"))
    return 0


def conformance_main(words: list[str]) -> int:
    """Check a file of tensors; return 0, or 1 if a property fails. Raises UserError for a damaged file."""
    parser = _parser("conformance", _CONFORMANCE)
    parser.add_argument("tensors", type=Path, metavar="TENSORS", help="the trainer's tensors (.safetensors)")
    parser.add_argument("--fixture", type=Path, default=FIXTURE, help=f"the fixture's folder (default: {FIXTURE})")
    arguments = parser.parse_args(words)
    findings = conformance.check(arguments.fixture, arguments.tensors)
    for finding in findings:
        print(finding.line)
    return 0 if all(finding.passed for finding in findings) else 1


def _parser(name: str, description: str) -> Parser:
    return Parser(prog=f"steadymoe-integrations {name}", description=description, allow_abbrev=False)
