"""A job: what is computed in one results folder, from its settings to its records."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, product
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from vflsec.base.errors import UsageError
from vflsec.results.analysis.gates import check_limits
from vflsec.results.records.folder import find_home, is_sweep, with_given_names, write_sweep
from vflsec.results.records.manifest import Manifest, RunLimits, Sweep, SweepPoint, to_text
from vflsec.results.records.schema import Record
from vflsec.run import engine as engines
from vflsec.run import spec as specs
from vflsec.run.describe import build_manifest
from vflsec.run.engine import Engine, Plan
from vflsec.run.plan import Baseline, Names, Trial, get_names, list_baselines, list_trials, with_standard_names
from vflsec.run.spec import EvalSpec
from vflsec.run.store import StageDone, Store, guard_writing


class JobPart(Protocol):
    """What a job computes: one evaluation or audit, resolved and checked."""

    @property
    def manifest(self) -> Manifest:
        """What a report must know about it."""

    @property
    def exclusions(self) -> Mapping[str, str]:
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
    """One evaluation, resolved and checked."""

    spec: EvalSpec
    names: Names
    exclusions: Mapping[str, str]
    manifest: Manifest
    values: Mapping[str, Any] = {}

    def to_toml(self) -> str:
        """Return the settings as the text of ``spec.toml``."""
        return specs.to_toml(self.spec)

    def trials(self) -> Iterator[Trial]:
        """Yield all results with the federation."""
        return list_trials(self.spec)

    def baselines(self) -> Iterator[Baseline]:
        """Yield all results without it."""
        return list_baselines(self.spec)

    def with_seeds(self, seeds: int, until: float) -> Evaluation:
        """Return the evaluation of so many seeds, of as many as the width ``until`` of intervals takes."""
        spec = msgspec.structs.replace(self.spec, seeds=seeds)
        manifest = build_manifest(spec, self.manifest.provenance.command, self.names)
        manifest = msgspec.structs.replace(manifest, until=until, exclusions=self.manifest.exclusions)
        return self._replace(spec=spec, manifest=manifest)


PartType = TypeVar("PartType", bound=JobPart)

MAX_POINTS = 1000


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
    names = get_names(spec)
    spec, exclusions = engines.expand_attacks(with_standard_names(spec, names))
    engines.check(spec)
    manifest = msgspec.structs.replace(build_manifest(spec, command, names), exclusions=exclusions)
    return Evaluation(spec, names, exclusions, manifest, values or {})


def list_points(axes: Mapping[str, Sequence[Any]], *, paired: bool) -> list[dict[str, Any]]:
    """Return the values of each point by path: every combination, or the first of each axis, the second, and so on."""
    for path, values in axes.items():
        if not values or any(value in values[:k] for k, value in enumerate(values)):
            raise UsageError(f"expected different values for {path}, got {list(values)}")
    if paired and len({len(values) for values in axes.values()}) > 1:
        sizes = ", ".join(f"{len(values)} of {path}" for path, values in axes.items())
        raise UsageError(f"expected as many values of each setting with --paired, got {sizes}")
    combined = list(zip(*axes.values(), strict=True) if paired else product(*axes.values()))
    if len(combined) > MAX_POINTS:
        raise UsageError(f"expected at most {MAX_POINTS} points, got {len(combined)}: sweep fewer values")
    return [dict(zip(axes, values, strict=True)) for values in combined]


def read_point(settings: Mapping[str, Any], values: Mapping[str, Any]) -> EvalSpec:
    """Return the evaluation at one point."""
    chosen: dict[str, Any] = copy.deepcopy(dict(settings))
    for path, value in values.items():
        specs.put(chosen, _with_method(path, chosen), value, path)
    return specs.read(chosen)


def _with_method(path: str, settings: Mapping[str, Any]) -> str:
    """Return ``method.gamma`` with the name of the method, of which there must be a single one."""
    kind, _, rest = path.partition(".")
    named: Iterable[str] = settings.get("methods", EvalSpec().methods)
    methods = [specs.parse_method(text).name for text in named]
    if kind != "method" or rest.partition(".")[0] in {*methods, *specs.list_methods()}:
        return path
    if len(methods) != 1:
        raise UsageError(f"expected method.NAME.{rest} for one of {', '.join(methods)}, got {path}")
    return f"method.{methods[0]}.{rest}"


def prepare_sweep(
    settings: Mapping[str, Any], axes: Mapping[str, Sequence[Any]], *, paired: bool, command: Sequence[str] = ()
) -> list[Evaluation]:
    """Return the points of a sweep, after checking each; nothing is computed or written."""
    return [prepare(read_point(settings, values), command, values) for values in list_points(axes, paired=paired)]


def name_sweep(first: Evaluation, axes: Iterable[str]) -> str:
    """Return a name for the folder of a sweep."""
    return f"{first.spec.name}-by-{'-'.join(path.rpartition('.')[2] for path in axes)}"


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
    def exclusions(self) -> list[str]:
        """Why ``all`` does not stand for some attacks, in lines."""
        return list(dict.fromkeys(line for part in self.parts for line in engines.list_reasons(part.exclusions)))

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
    def open(
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
        self, todo: Plan, *, jobs: int = 1, device: str = "cpu", engine: Engine = "local"
    ) -> Iterator[Record | StageDone]:
        """Write the settings, and return the records of ``todo`` as they are computed and stored."""
        if self.sweep is not None:
            with guard_writing(self.store.folder):
                write_sweep(self.store.folder, self.sweep)
        points = [point.name for point in self.sweep.points] if self.sweep else [""]
        for part, point in zip(self.parts, points, strict=True):
            self.store.write_settings(part.to_toml(), part.manifest, point)
        return engines.evaluate(todo, self.store, jobs=jobs, device=device, engine=engine)


def expect_kind(folder: Path, *, sweep: bool) -> None:
    """Raise UsageError if ``folder`` holds a sweep where one evaluation is expected, or the other way round.

    Also if it is a point of a sweep, whose results are those of the sweep.
    """
    if find_home(folder) != folder:
        of = f"a point of the sweep in {find_home(folder)}"
        raise UsageError(f"expected a folder of its own, got {of}: choose another --out")
    if sweep and (folder / "manifest.json").exists():
        raise UsageError(f"expected a folder for a sweep, got {folder} with an evaluation: choose another --out")
    if not sweep and is_sweep(folder):
        raise UsageError(f"expected a folder for an evaluation, got {folder} with a sweep: choose another --out")


def _name(part: JobPart) -> str:
    """Return ``n_labeled=200,gamma=0.5``, which is the name of a folder."""
    text = ",".join(f"{path.rpartition('.')[2]}={to_text(value)}" for path, value in part.values.items())
    return re.sub(r"[^\w.,=+-]", "_", text).encode()[:100].decode(errors="ignore")
