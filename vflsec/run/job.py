"""A job: what is computed in one results folder, from its settings to its records."""

from __future__ import annotations

import copy
import inspect
import math
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import chain, product
from pathlib import Path
from statistics import median
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from vflsec.base.checks import count
from vflsec.base.errors import UsageError, VflsecError
from vflsec.core.defense import Defense
from vflsec.core.federation import Federation
from vflsec.core.method import Method
from vflsec.data.encode import densify
from vflsec.data.partition import Partition, PartyData
from vflsec.results.analysis.gates import check_limits
from vflsec.results.records.folder import home, is_sweep, read_manifest, read_records, with_given_names, write_sweep
from vflsec.results.records.manifest import (
    AttackEntry,
    BaselineEntry,
    Manifest,
    Provenance,
    RowEntry,
    RunLimits,
    Sweep,
    SweepPoint,
    to_text,
)
from vflsec.results.records.schema import FAILED, Record, Result
from vflsec.run import engine as engines
from vflsec.run import spec as specs
from vflsec.run.cell import Technique
from vflsec.run.engine import Plan
from vflsec.run.federation import build_models, partition_of
from vflsec.run.mounting import is_baseline
from vflsec.run.plan import (
    Baseline,
    Names,
    Trial,
    asked_of,
    baselines,
    find_dataset,
    names_of,
    resolve,
    training_cell,
    trials,
    with_standard_names,
)
from vflsec.run.spec import EvalSpec
from vflsec.run.store import StageDone, Store, environment, writing

MOST_POINTS = 1000


class JobPart(Protocol):
    """What a job computes: one evaluation or audit, resolved and checked."""

    @property
    def manifest(self) -> Manifest:
        """What a report must know about it."""

    @property
    def left_out(self) -> Mapping[str, str]:
        """Why ``all`` does not stand for some attacks."""

    @property
    def values(self) -> Mapping[str, Any]:
        """The settings in which it differs from the other parts, by path."""

    def to_toml(self) -> str:
        """Return the settings as the text of ``spec.toml``."""

    def trials(self) -> Iterable[Trial]:
        """Return all results with the federation."""

    def baselines(self) -> Iterable[Baseline]:
        """Return all results without it."""


class Evaluation(NamedTuple):
    """One evaluation, resolved and checked.

    Attributes:
        spec: with every attack by its name, and standard names of parties.
        names: what the data call themselves and the parties.
        left_out: why ``all`` does not stand for some attacks.
        manifest: what a report must know.
        values: of the settings in which it differs from other points of a sweep, by path.
    """

    spec: EvalSpec
    names: Names
    left_out: Mapping[str, str]
    manifest: Manifest
    values: Mapping[str, Any] = {}

    def to_toml(self) -> str:
        """Return the settings as the text of ``spec.toml``."""
        return specs.to_toml(self.spec)

    def trials(self) -> Iterator[Trial]:
        """Yield all results with the federation."""
        return trials(self.spec)

    def baselines(self) -> Iterator[Baseline]:
        """Yield all results without it."""
        return baselines(self.spec)

    def with_seeds(self, seeds: int, until: float) -> Evaluation:
        """Return the evaluation of so many seeds, of as many as the width ``until`` of intervals takes."""
        spec = msgspec.structs.replace(self.spec, seeds=seeds)
        manifest = manifest_of(spec, self.manifest.provenance.command, self.names)
        return self._replace(spec=spec, manifest=msgspec.structs.replace(manifest, until=until))


PartType = TypeVar("PartType", bound=JobPart)


def prepare(spec: EvalSpec, command: Sequence[str] = (), values: Mapping[str, Any] | None = None) -> Evaluation:
    """Return a checked evaluation; nothing is trained or written.

    Args:
        spec: as it was read; ``all`` stands for every attack, and parties have the names of the data.
        command: the words of the command line.
        values: of the settings in which it differs from other points of a sweep.

    Raises:
        UsageError: a name is unknown, settings cannot be met, or no attack can be mounted.
        DataError: the dataset cannot be read.
        InsufficientView: an attack that its adversary cannot mount.
    """
    names = names_of(spec)
    spec, left_out = engines.every_attack(with_standard_names(spec, names))
    engines.check(spec)
    return Evaluation(spec, names, left_out, manifest_of(spec, command, names), values or {})


class Job(Generic[PartType]):
    """What is computed in one results folder: an evaluation, an audit, or every point of a sweep.

    ``vflsec eval``, ``vflsec audit``, ``vflsec.evaluate`` and ``vflsec.sweep`` are jobs.

    Args:
        folder: of the results.
        parts: with all their trials; of a sweep one for each point.
        axes: of a sweep, the values of each setting by its path; None for one evaluation or audit.
        paired: whether these values belong together in their order.

    Raises:
        UsageError: the folder holds something else.
    """

    def __init__(
        self,
        folder: Path,
        parts: Sequence[PartType],
        axes: Mapping[str, Sequence[Any]] | None = None,
        *,
        paired: bool = False,
    ) -> None:
        expect_kind(folder, sweep=axes is not None)
        self.store, self.parts = Store(folder), parts
        named = [SweepPoint(name=f"{k}-{_name(part)}", values=dict(part.values)) for k, part in enumerate(parts)]
        self.sweep = None
        if axes is not None:
            self.sweep = Sweep(axes={path: list(values) for path, values in axes.items()}, paired=paired, points=named)

    @property
    def left_out(self) -> list[str]:
        """Why ``all`` does not stand for some attacks, in lines."""
        return list(dict.fromkeys(line for part in self.parts for line in engines.reasons(part.left_out)))

    def check(self, max_leak: Mapping[str, float] | None = None, *, fresh: bool = False) -> None:
        """Raise unless the limits are on attacks that are run, and the folder may take the results."""
        for part in self.parts:
            check_limits(with_given_names(part.manifest, {})[0], max_leak or {})
        if fresh:
            self.store.expect_evaluation()
        elif self.sweep is None:
            self.store.expect_same(self.parts[0].manifest)

    def plan(self, *, keep: bool = False, fresh: bool = False) -> Plan:
        """Return what is to be computed; of a ``fresh`` job all. With ``keep``, guesses on rows are kept."""
        wanted = chain.from_iterable(part.trials() for part in self.parts)
        alone = chain.from_iterable(part.baselines() for part in self.parts)
        return engines.plan_trials(wanted, alone, None if fresh else self.store, keep=keep)

    @contextmanager
    def opened(
        self, limits: RunLimits | None = None, *, fresh: bool = False, retry_errors: bool = False
    ) -> Iterator[None]:
        """Lock the folder for writing, drop what is to be computed anew, and keep the limits of this run."""
        with self.store.lock():
            if fresh:
                self.store.clear()
            self.store.trim()
            if retry_errors:
                self.store.forget_failures()
            if limits is not None:
                self.store.write_limits(limits)
            yield

    def run(
        self, todo: Plan, *, jobs: int = 1, device: str = "cpu", engine: str = "local"
    ) -> Iterator[Record | StageDone]:
        """Write the settings, and return the records of ``todo`` as they are computed and stored."""
        if self.sweep is not None:
            with writing(self.store.folder):
                write_sweep(self.store.folder, self.sweep)
        points = [point.name for point in self.sweep.points] if self.sweep else [""]
        for part, point in zip(self.parts, points, strict=True):
            self.store.write_settings(part.to_toml(), part.manifest, point)
        return engines.evaluate(todo, self.store, jobs=jobs, device=device, engine=engine)


def expect_kind(folder: Path, *, sweep: bool) -> None:
    """Raise UsageError if ``folder`` holds a sweep where one evaluation is expected, or the other way round.

    Also if it is a point of a sweep, whose results are those of the sweep.
    """
    if home(folder) != folder:
        of = f"a point of the sweep in {home(folder)}"
        raise UsageError(f"expected a folder of its own, got {of}: choose another --out")
    if sweep and (folder / "manifest.json").exists():
        raise UsageError(f"expected a folder for a sweep, got {folder} with an evaluation: choose another --out")
    if not sweep and is_sweep(folder):
        raise UsageError(f"expected a folder for an evaluation, got {folder} with a sweep: choose another --out")


def points(axes: Mapping[str, Sequence[Any]], *, paired: bool) -> list[dict[str, Any]]:
    """Return the values of each point by path: every combination, or the first of each axis, the second, and so on.

    Raises:
        UsageError: an axis without values, twice the same value, too many points, or pairs of unequal length.
    """
    for path, values in axes.items():
        if not values or any(value in values[:k] for k, value in enumerate(values)):
            raise UsageError(f"expected different values for {path}, got {list(values)}")
    if paired and len({len(values) for values in axes.values()}) > 1:
        sizes = ", ".join(f"{len(values)} of {path}" for path, values in axes.items())
        raise UsageError(f"expected as many values of each setting with --paired, got {sizes}")
    combined = list(zip(*axes.values(), strict=True) if paired else product(*axes.values()))
    if len(combined) > MOST_POINTS:
        raise UsageError(f"expected at most {MOST_POINTS} points, got {len(combined)}: sweep fewer values")
    return [dict(zip(axes, values, strict=True)) for values in combined]


def settings_at(settings: Mapping[str, Any], values: Mapping[str, Any]) -> EvalSpec:
    """Return the evaluation at one point.

    Raises:
        UsageError: a setting that does not exist, or does not take its value.
    """
    chosen: dict[str, Any] = copy.deepcopy(dict(settings))
    for path, value in values.items():
        specs.put(chosen, _with_method(path, chosen), value, path)
    return specs.read(chosen)


def _with_method(path: str, settings: Mapping[str, Any]) -> str:
    """Return ``method.gamma`` with the name of the method, of which there must be a single one."""
    kind, _, rest = path.partition(".")
    named: Iterable[str] = settings.get("methods", EvalSpec().methods)
    methods = [specs.parse_method(text).name for text in named]
    if kind != "method" or rest.partition(".")[0] in {*methods, *specs.method_names()}:
        return path
    if len(methods) != 1:
        raise UsageError(f"expected method.NAME.{rest} for one of {', '.join(methods)}, got {path}")
    return f"method.{methods[0]}.{rest}"


def prepare_sweep(
    settings: Mapping[str, Any], axes: Mapping[str, Sequence[Any]], *, paired: bool, command: Sequence[str] = ()
) -> list[Evaluation]:
    """Return the points of a sweep, after checking each; nothing is computed or written.

    Raises:
        UsageError: as of ``points``, ``settings_at`` and ``prepare``.
        DataError: the dataset of a point cannot be read.
        InsufficientView: an attack that cannot be mounted at a point.
    """
    return [prepare(settings_at(settings, values), command, values) for values in points(axes, paired=paired)]


def title(first: Evaluation, axes: Iterable[str]) -> str:
    """Return a name for the folder of a sweep."""
    return f"{first.spec.name}-by-{'-'.join(path.rpartition('.')[2] for path in axes)}"


def _name(part: JobPart) -> str:
    """Return ``n_labeled=200,gamma=0.5``, which is the name of a folder."""
    text = ",".join(f"{path.rpartition('.')[2]}={to_text(value)}" for path, value in part.values.items())
    return re.sub(r"[^\w.,=+-]", "_", text).encode()[:100].decode(errors="ignore")


def manifest_of(spec: EvalSpec, command: Sequence[str] = (), names: Names | None = None) -> Manifest:
    """Return the manifest of ``spec``, which has passed its checks.

    Args:
        spec: the evaluation.
        command: the words of the command line.
        names: what the data call themselves and each party; None for the names that vflsec uses.
    """
    data = partition_of(training_cell(spec, spec.methods[0], 0))
    methods = [resolve(spec.method_of(label)) for label in spec.methods]
    defenses = [resolve(defense) for defense in (*spec.defenses, *spec.fixed)]
    attacks = [resolve(attack) for attack in spec.attacks]
    return Manifest(
        dataset=spec.dataset,
        adversary=spec.adversary,
        seeds=spec.seeds,
        target=spec.train.target,
        selected_on_test=spec.train.select == "paper_best_on_test",
        attacks=[attack_entry(a, b, spec.adversary, data) for a, b in zip(attacks, spec.labels, strict=True)],
        **entries(trials(spec), baselines(spec)),
        settings=msgspec.to_builtins(spec),
        provenance=provenance(
            {"methods": methods, "defenses": defenses, "attacks": attacks},
            {spec.dataset: find_dataset(spec.dataset).key(spec.data)},
            command,
        ),
        title=names.dataset if names else "",
        names=dict(names.parties) if names else {},
        techniques=_declared(methods) | _declared(defenses),
        used=data.used,
        data_notes=list(data.warnings),
    )


def attack_entry(attack: Technique, label: str, adversary: str, data: Partition) -> AttackEntry:
    """Return what a report must know of an attack of ``adversary``."""
    details, baseline = about(attack, adversary, data), is_baseline(attack)
    return AttackEntry(label=label, name=attack.name, target=asked_of(attack), baseline=baseline, **details)


def about(attack: Technique, party: str, data: Partition) -> dict[str, Any]:
    """Return ``victim``, ``column`` and ``above`` of an attack, as far as it has them.

    ``above`` is the median of the column in training rows, in its own units: a number is inferred as above it or not.
    """
    if not attack.takes("victim"):
        return {}
    others = [name for name in data.parties if name not in party.split("+")]
    victim = attack.spec.options.get("victim") or next(iter(others), "")
    column = attack.spec.options.get("column") or ""
    above = _median(data.parties[victim], column) if column and victim in data.parties else None
    return {"victim": victim, "column": column, "above": above}


def _median(party: PartyData, name: str) -> float | None:
    """Return the median that splits a number, in its own units; None for a category."""
    learned = party.encoder.get(name, {})
    place = next((column.start for column in party.layout.columns if column.name == name), None)
    if place is None or not learned.get("inverse"):
        return None
    values = np.sort(densify(party.features["train"][:, place : place + 1]).ravel().astype(float))
    median = learned["mean"] + values[(len(values) - 1) // 2] / learned["inverse"]
    if learned.get("signed_log"):
        return float(f"{np.sign(median) * np.expm1(abs(median)):.6g}")
    return float(round(median, 6 + math.floor(math.log10(learned["inverse"])))) + 0.0  # features have seven digits


def _declared(techniques: Iterable[Technique]) -> dict[str, str]:
    """Return the declared name of each class from a file, unless another one has it."""
    names = {technique.name: technique.kind.name for technique in techniques}
    times = Counter(names.values())
    return {name: declared for name, declared in names.items() if ".py:" in name and times[declared] == 1}


def entries(trials: Iterable[Trial], baselines: Iterable[Baseline]) -> dict[str, Any]:
    """Return what a report must know of trials and baselines: ``rows`` and ``baselines`` of a manifest."""
    return {
        "rows": [
            RowEntry(method=row.method, defense=row.defense, strength=row.strength, seed=row.seed, attack=row.label,
                     key=row.key, control=row.control)
            for row in trials
        ],
        "baselines": [
            BaselineEntry(method=baseline.method, label=baseline.label, target=asked_of(baseline.attack),
                          seed=baseline.seed, key=baseline.key)
            for baseline in baselines
        ],
    }  # fmt: skip


def provenance(
    techniques: Mapping[str, Iterable[Technique]], dataset: Mapping[str, Any], command: Sequence[str] = ()
) -> Provenance:
    """Return where the records of an evaluation come from.

    Args:
        techniques: methods, defenses and attacks, by group.
        dataset: the identity of the dataset by its name.
        command: the words of the command line.
    """
    named = {group: {technique.name: technique for technique in some} for group, some in techniques.items()}
    sources = {group: {name: technique.identity for name, technique in some.items()} for group, some in named.items()}
    return Provenance(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        command=list(command),
        versions=environment(),
        commit=commit(),
        sources={"dataset": dict(dataset), **sources},
        cards={group: {name: _sentence(known.kind) for name, known in some.items()} for group, some in named.items()},
    )


def _sentence(kind: Any) -> str:
    """Return the first sentence of a card, and for a defense what it guarantees."""
    first = (inspect.getdoc(kind) or "").split("\n")[0]
    return f"{first} Guarantee: {kind.guarantee}." if issubclass(kind, Defense) else first


def commit() -> str | None:
    """Return the commit of the source tree of this package; None if it is installed from elsewhere."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        shown = subprocess.run(  # noqa: S603  (nothing of it comes from a file)
            ["git", "-C", str(root), "rev-parse", "HEAD"],  # noqa: S607  (git is looked up on the path)
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return shown.stdout.strip()


MOST_FOLDERS = 50
"""Folders whose past results are read, the newest first."""


def shapes(spec: EvalSpec) -> Iterator[str]:
    """Yield a line for each method: the rows, epochs and networks of one training.

    Raises:
        DataError: the dataset cannot be read.
    """
    for label in spec.methods:
        cell = training_cell(spec, label, seed=0)
        federation, method = build_models(cell, "cpu")
        rows = len(federation.active.labels["train"])
        if not method.visible_to:
            yield f"{label}: {rows:,} labeled rows, without messages"
            continue
        if not method.embeds:
            yield f"{label}: {rows:,} labeled rows, without networks; settings of train and model are not read"
            continue
        epochs = count(cell.train.n_epochs(rows), "epoch")
        networks = "; ".join(_networks(method, federation))
        steps = f"{epochs} of batches of {cell.train.batch}"
        yield f"{label}: {rows:,} labeled rows, {steps}; {cell.model.encoder}: {networks}"


def _networks(method: Method, federation: Federation) -> Iterator[str]:
    """Yield for each party the columns, the width of its embedding, and the number of its weights."""
    for party in federation.parties.values():
        width = getattr(method.representation(party), "width", None)
        cut = f" -> {width}" if width else ""
        weights = sum(p.numel() for module in party.modules.values() for p in module.parameters())
        yield f"{federation.names.get(party.name, party.name)} {party.n_features}{cut} ({count(weights, 'weight')})"


class Forecast(NamedTuple):
    """The time that missing results will take on one process.

    Attributes:
        seconds: of those results that are like past ones.
        unlike: attacks and methods of which there is no past result.
        past: the number of past results that were read.
    """

    seconds: float
    unlike: list[str]
    past: int

    def text(self, jobs: int) -> str:
        """Return the forecast in words."""
        if not self.past:
            return "time: unknown, since no results on this dataset lie beside this folder; try --seeds 1 first"
        shown = timedelta(seconds=round(self.seconds / jobs))
        least = "at least " if self.unlike else "about "
        without = f"; no past result of {', '.join(self.unlike)}" if self.unlike else ""
        return f"time: {least}{shown} with --jobs {jobs}, by {count(self.past, 'past result')}{without}"


def forecast(todo: Plan, past: Iterable[Record]) -> Forecast:
    """Return the time for what ``todo`` lacks, by medians of ``past`` results of equal method, defense and attack."""
    trainings: dict[str, list[float]] = {}
    attacks: dict[str, list[float]] = {}
    shadows: dict[str, list[float]] = {}
    number = 0
    for record in past:
        if record.status in FAILED:
            continue
        number += 1
        if isinstance(record, Result):
            names = [defense.partition(":")[0] for defense in record.defenses]
            for like in (record.method, " ".join([record.method, *names])):
                trainings.setdefault(like, []).append(record.seconds.get("train", 0.0))
            if record.budget.get("shadows"):
                each = record.seconds.get("shadows", 0.0) / record.budget["shadows"]
                shadows.setdefault(record.method, []).append(each)
        if record.attack is not None:
            attacks.setdefault(record.attack.name, []).append(record.seconds.get("attack", 0.0))
    seconds, unlike = 0.0, []
    for task in todo.groups:
        before = shadows.get(task.cell.method.name) or trainings.get(task.cell.method.name)
        seconds += median(before) * len(task.shadows) if task.shadows and before else 0.0
    for task in todo.tasks:
        wanted = [row.attack.name for row in task.rows if row.attack] + [
            baseline.attack.name for baseline in task.baselines
        ]
        if task.rows:
            exact = " ".join([task.rows[0].method, *(defense.name for defense in task.cell.defenses)])
            wanted_training = trainings.get(exact) or trainings.get(task.rows[0].method)
            seconds += median(wanted_training) if wanted_training else 0.0
            unlike += [] if wanted_training else [task.rows[0].method]
        seconds += sum(median(attacks[name]) for name in wanted if name in attacks)
        unlike += [name for name in wanted if name not in attacks]
    return Forecast(seconds, list(dict.fromkeys(unlike)), number)


def past_results(folder: Path, dataset: str) -> Iterator[Record]:
    """Yield the results in ``folder`` and in the folders beside it that are on the same dataset."""
    beside = [path for path in folder.parent.glob("*/records.jsonl") if path.parent != folder]
    newest = sorted(beside, key=lambda path: path.stat().st_mtime, reverse=True)
    for path in [folder / "records.jsonl", *newest[:MOST_FOLDERS]]:
        try:
            if path.is_file() and read_manifest(path.parent).dataset == dataset:
                yield from read_records(path.parent).values()
        except VflsecError:  # another version's, or damaged: a forecast can do without it
            continue
