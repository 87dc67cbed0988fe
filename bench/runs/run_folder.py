"""The state of run folders: their facts, status, damage and lock, the plan, and what is refused, resumed or redone.

A run's ``run.json`` may come from another machine or trainer, so it is checked before anything else reads it.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from filelock import FileLock, Timeout
from pydantic import AliasPath, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, TypeAdapter, ValidationError

from steadymoe.bench.runs import identity, provenance
from steadymoe.bench.statistics.collapse import Rule
from steadymoe.bench.support import files
from steadymoe.bench.support.errors import ConfigError, UserError
from steadymoe.bench.training import columns

if TYPE_CHECKING:
    from steadymoe.bench.runs.compose import Run

_Ended = Literal["finished", "collapsed", "diverged"]
# A run with one of these statuses is complete and never changes.
ENDED: tuple[str, ...] = get_args(_Ended)
# The config groups whose choices a run names.
GROUPS = ("algorithm", "correction", "routing", "engine", "model", "task", "optimizer")
# The largest count, and the most steps that a run may lack at its end: tables add rows for them.
MAX_COUNT, _MAX_LOST = 10**9, 10**6
# The longest name, and any other text.
_MAX_NAME, MAX_TEXT = 1000, 10**5

_Name = Annotated[StrictStr, Field(max_length=_MAX_NAME)]
_Count = Annotated[StrictInt, Field(ge=1, le=MAX_COUNT)]
_Size = Annotated[StrictInt, Field(ge=0, le=2**63 - 1)]
_Number = Annotated[StrictFloat, Field(ge=0, le=1e12)]
_Object = dict[str, Any]


def _at(place: str) -> Any:
    return Field(validation_alias=AliasPath(*place.split(".")))


@dataclass(frozen=True)
class _Revision:
    commit: StrictStr
    changed: bool


@dataclass(frozen=True)
class _End:
    reason: StrictStr
    step: _Count


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What the suite reads of a ``run.json``, its own or another trainer's; other facts are bounded in size alone."""

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    status: Literal[_Ended, "running", "interrupted", "failed"]
    experiment: _Name
    algorithm: _Name
    correction: _Name
    routing: _Name
    engine: _Name
    model: _Name
    task: _Name
    optimizer: _Name | None = None  # other trainers name none
    origin: _Name | None = None  # the other trainer
    axes: _Object
    axes_name: _Name
    seed: _Size
    command: StrictStr
    config_hash: StrictStr
    config_hash_without_seed: StrictStr
    algorithm_code: StrictStr
    training_version: _Size
    versions: _Object
    machine: _Object
    cpu: Annotated[StrictStr, _at("machine.cpu")]
    revision: _Revision | None
    wall_seconds: _Number
    error: StrictStr | None = None
    tables: _Object | None = None
    tokens: _Size | None = None
    progress: _Object | None = None
    step: Annotated[_Size | None, _at("progress.step")] = None
    of_steps: Annotated[_Size | None, _at("progress.steps")] = None
    seconds_per_step: Annotated[_Number | None, _at("progress.seconds_per_step")] = None
    diverged: _End | None
    parameters: _Size | None = None
    active_parameters: _Size | None = None
    moe_layers: _Size | None = None
    experts: _Size | None = None
    top_k: _Size | None = None
    updates: Annotated[_Count, _at("config.updates")]
    updates_per_rollout: Annotated[_Count, _at("config.updates_per_rollout")]
    minibatch_prompts: Annotated[_Count, _at("config.minibatch_prompts")]
    responses: Annotated[_Count, _at("config.rollout.responses")]
    device: Annotated[StrictStr, _at("config.device")]
    learning_rate: Annotated[_Number, _at("config.optimizer.learning_rate")]
    engine_config: Annotated[_Object, _at("config.engine")]
    strength: Annotated[StrictFloat | None, Field(ge=-1e12, le=1e12), _at("config.engine.strength")] = None
    back_end: Annotated[StrictStr | None, _at("config.experts")] = None
    collapse: Annotated[_Object | None, _at("config.collapse")] = None


_FACTS = TypeAdapter(_Facts)


class Damaged(UserError, ValueError):
    """A file on disk is damaged; the message is one line and names the file."""


def read(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in ``file``, or None without such a file. Raises Damaged for anything else."""
    try:
        facts = files.read_json(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise Damaged(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(facts, dict):
        raise Damaged(f"{file} must hold an object, got {type(facts).__name__}")
    return facts


def read_run(folder: Path) -> dict[str, Any] | None:
    """Return the ``run.json`` of a run folder, or None without one. Raises Damaged (a ValueError) if it is no run's."""
    facts = read(folder / "run.json")
    if facts is not None and (why := _invalid(facts)) is not None:
        raise Damaged(f"{folder / 'run.json'} has no valid {why}")
    return facts


def known(folder: Path) -> dict[str, Any]:
    """Return the ``run.json`` of a run folder; empty if there is none or if it is damaged."""
    try:
        return read_run(folder) or {}
    except Damaged:
        return {}


def _invalid(facts: dict[str, Any]) -> str | None:
    try:
        run = _FACTS.validate_python(facts)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    if rule(run.collapse or {}) is None:
        return "config.collapse"
    if run.diverged is not None and not 0 <= rollouts(facts) - run.diverged.step <= _MAX_LOST:
        return "diverged: it lies outside the run"
    large = next((name for name, value in facts.items() if not _is_bounded([name, value])), None)
    return None if large is None else f"{large[:_MAX_NAME]}: a text is too long, or a number too large"


def rollouts(facts: Mapping[str, Any]) -> int:
    """Return the number of rollouts of a run, ended or not, from its ``run.json``."""
    return -(-int(facts["config"]["updates"]) // int(facts["config"]["updates_per_rollout"]))


def _is_bounded(value: Any) -> bool:
    """Return whether the texts, keys and whole numbers in a value of JSON are of bounded size."""
    if isinstance(value, dict):
        return all(len(key) <= _MAX_NAME for key in value) and all(map(_is_bounded, value.values()))
    if isinstance(value, list):
        return all(map(_is_bounded, value))
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    return not isinstance(value, int) or abs(value) < 2**63


def rule(numbers: Mapping[str, Any]) -> Rule | None:
    """Return the rule of collapse with these numbers; None for unknown keys or numbers out of bounds."""
    is_known = numbers.keys() <= {field.name for field in fields(Rule)}
    is_rule = is_known and all(type(value) in (int, float) and 0 <= value <= MAX_COUNT for value in numbers.values())
    return Rule(**numbers) if is_rule else None


@dataclass(frozen=True)
class State:
    """A run's folder as it stands."""

    status: str
    """One of ``ENDED``, or ``failed``, ``running``, ``interrupted``, ``missing``, ``damaged``."""
    facts: dict[str, Any]
    """The run's ``run.json``; empty if there is none or if it is damaged."""
    damage: str | None
    """Why the run is damaged: its ``run.json`` is no run's, or it has ended and its tables are not whole."""

    @property
    def has_ended(self) -> bool:
        """Whether the run is complete: such a run never changes."""
        return self.status in ENDED


States = Mapping[Path, State]
"""Run folder → state."""


def read_state(folder: Path) -> State:
    """Read the state of a run from its folder: ``run.json``, lock, and the checksums of its tables."""
    try:
        facts = read_run(folder)
    except Damaged as error:
        return State("damaged", {}, str(error))
    if facts is None:
        return State("missing", {}, None)
    damage = _damaged_table(folder, facts) if facts["status"] in ENDED else None
    return State(current_status(folder, facts) if damage is None else "damaged", facts, damage)


def current_status(folder: Path, facts: Mapping[str, Any]) -> str:
    """Return the status of a run by its ``run.json`` and its lock, without a look at its tables."""
    if facts["status"] == "running" and not is_held(folder):
        return "interrupted"  # it was killed before it could write its status
    return str(facts["status"])


def final_status(diverged: Mapping[str, Any] | None) -> str:
    """Return the status of an ended run from the fact ``diverged``: by the rule it collapsed, else it diverged."""
    if diverged is None:
        return "finished"
    return "diverged" if diverged["reason"] == "not finite" else "collapsed"


def read_states(folders: Iterable[Path]) -> dict[Path, State]:
    """Return run folder → state. Of a run and its copies one folder has it; the others are damaged.

    A run belongs where its facts say: a copy would count as a further seed.
    """
    states = {folder: read_state(folder) for folder in folders}
    places = {folder: _place(state.facts) for folder, state in states.items() if state.facts}
    first: dict[tuple[str, ...], Path] = {}
    for folder in sorted(places, key=lambda run: (run.parts[-len(places[run]) :] != places[run], run)):
        if (original := first.setdefault(places[folder], folder)) != folder:
            states[folder] = State("damaged", {}, f"it is a copy of the run in {original}")
    return states


def _place(facts: Mapping[str, Any]) -> tuple[str, ...]:
    names = (facts[key] for key in ("experiment", "algorithm", "model", "task", "axes_name"))
    return (*filter(None, names), f"seed={facts['seed']}")


def _damaged_table(folder: Path, facts: Mapping[str, Any]) -> str | None:
    if facts.get("tables") is None:
        return "it has no checksums of its tables"
    for table in columns.TABLES:
        path = folder / f"{table}.parquet"
        try:
            if checksum(path) != facts["tables"].get(table):
                return f"{path.name} has changed since the run wrote it"
        except FileNotFoundError:
            return f"there is no {path.name}"
        except OSError as error:
            return f"{path.name} cannot be read: {error.strerror or error}"
    return None


def checksum(path: Path) -> str:
    """Return the first 16 hex digits of the SHA-256 of a file's bytes. Raises OSError if it cannot be read."""
    with files.opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def weights_path(folder: Path, step: int) -> Path:
    """Return the path of the weights that ``checkpoint_keep`` keeps in a run's folder."""
    return folder / f"weights-{step}.safetensors"


def hold(folder: Path, seconds: float = 0) -> FileLock:
    """Return the folder's lock, for ``with``. Raises filelock.Timeout if another process has it for ``seconds``."""
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(files.replaceable(folder / ".lock"), timeout=seconds)


def is_held(folder: Path) -> bool:
    """Return whether a process holds the folder. Nothing is written."""
    lock = folder / ".lock"
    if lock.is_symlink() or not lock.is_file():
        return False  # FileLock would create the file, or empty what a link names
    try:
        with FileLock(lock, timeout=0):
            return False
    except (Timeout, OSError):  # OSError: no permission to take the lock, so the recorded status counts
        return True


def refuse_others(runs: Sequence["Run"], may_redo: bool = False) -> States:
    """Return run folder → state. Raises ConfigError as ``state_of`` does."""
    with provenance.unchanging():
        return {run.folder: state_of(run, may_redo) for run in runs}


def state_of(run: "Run", may_redo: bool = True) -> State:
    """Return the state of the run's folder.

    Raises ConfigError if it holds a run of another config or, without ``may_redo``, a run that other code has ended.
    """
    state = read_state(run.folder)
    if (other := _other_config(run, state)) is not None:
        raise ConfigError(
            f"{run.folder} holds results of {other}; choose another experiment_name, or remove that folder"
        )
    if state.has_ended and not may_redo and (code := provenance.difference(state.facts).code) is not None:
        raise ConfigError(f"{run.folder} was made with {code}; add --redo, or choose another experiment_name")
    return state


def describe(runs: Sequence["Run"], states: States) -> list[str]:
    """Return lines on the runs that are skipped because they have finished, and on those rerun because of damage."""
    lines = []
    if ended := [run for run in runs if states[run.folder].has_ended]:
        lines.append(f"{len(ended)} of {len(runs)} runs have already finished and are skipped")
        with provenance.unchanging():
            unknown = [why for run in ended if (why := provenance.difference(states[run.folder].facts).unknown)]
        if unknown:
            reasons = "; ".join(dict.fromkeys(unknown))
            lines.append(f"the code of {len(unknown)} of them cannot be compared ({reasons})")
        if lacking := sum(map(_lacks_weights, ended)):
            step = runs[0].config.kept_rollout
            lines.append(f"{lacking} of them lack the weights of step {step}; --redo creates them")
    damaged = [(run.folder, why) for run in runs if (why := states[run.folder].damage) is not None]
    return lines + [f"rerunning damaged {folder} ({why})" for folder, why in damaged]


def stale(run: "Run") -> str | None:
    """Return why to rerun a run; None if there is no reason, or if it has not ended.

    Another config is a reason too: only ``steadymoe score`` redoes such a run.
    """
    state = read_state(run.folder)
    if (other := _other_config(run, state)) is not None or not state.has_ended:
        return other
    lacking = f"the weights of step {run.config.kept_rollout} were not kept" if _lacks_weights(run) else None
    return provenance.difference(state.facts).stale or lacking


def _other_config(run: "Run", state: State) -> str | None:
    if not state.facts or state.facts["config_hash"] == run.config_hash:
        return None
    return f"another config ({identity.difference(state.facts['config'], run.plain)})"


def _lacks_weights(run: "Run") -> bool:
    step = run.config.kept_rollout
    return step is not None and not weights_path(run.folder, step).exists()


def redo(runs: Sequence["Run"]) -> list[str]:
    """Move the ``stale`` ones among ``runs`` to ``results/replaced``, so that they are rerun; return a line for each.

    No command reads the place where they go.
    """
    lines = []
    for run, why in [(run, why) for run in runs if (why := stale(run)) is not None]:
        with suppress(Timeout), hold(run.folder):
            if stale(run) == why:  # False if another process has begun it again meanwhile
                place = move_away(run.folder, Path(run.config.results_dir), "replaced")
                lines.append(f"rerunning {run.folder} ({why}); the old run is in {place}")
    return lines


def move_away(folder: Path, results: Path, where: str) -> Path:
    """Move the content of ``folder``, except its lock, to a new folder below ``results/where``; return that folder."""
    below = folder.relative_to(results.absolute() / "runs")
    copies = files.folder(results.absolute(), where, *below.parts)
    place = next(place for number in count(1) if not (place := copies / str(number)).exists())
    place.mkdir()
    for path in sorted(folder.iterdir(), key=lambda path: path.name != "run.json"):  # without it the rest is no run
        if path.name != ".lock":
            path.replace(place / path.name)
    return place


def add_to_plan(runs: Sequence["Run"], sweep: str | None = None) -> None:
    """Add ``runs`` to the plans of their experiments, ``results/runs/<experiment>/plan.json``; no entry is removed.

    A plan has a command for each run: the last ``sweep``, which makes all of ``runs``, or else the run's own. One that
    cannot be read is kept next to the new one, as ``plan.json.damaged``. Raises ConfigError for what cannot be written.
    """
    for experiment in {run.config.experiment_name for run in runs}:
        ours = [run for run in runs if run.config.experiment_name == experiment]
        results = ours[0].config.results_dir
        try:
            folder = files.folder(Path(results).absolute(), "runs", experiment)
            plan = folder / "plan.json"
            with FileLock(files.replaceable(folder / ".plan.lock")):
                before, why = planned(folder)
                if why is not None:
                    plan.replace(plan.with_name("plan.json.damaged"))
                commands = {str(run.folder.relative_to(folder)): sweep or run.command for run in ours}
                after = before | commands if sweep else commands | before
                if after != before:
                    files.write_json(plan, after)
        except OSError as error:
            raise ConfigError(f"results_dir={results} cannot be written: {error}") from error


def planned(experiment: Path) -> tuple[dict[str, str], str | None]:
    """Return run folder → command for every run ever planned below ``experiment``, and why the plan is unreadable.

    Names that lead out of the experiment's folder are dropped.
    """
    file = experiment / "plan.json"
    try:
        commands = read(file) or {}
    except Damaged as error:
        return {}, str(error)
    if not all(isinstance(command, str) for command in commands.values()):
        return {}, f"{file} is not a list of runs and their commands"
    inside = (name for name in commands if not Path(name).is_absolute() and ".." not in Path(name).parts)
    return {name: commands[name] for name in inside if "\0" not in name}, None
