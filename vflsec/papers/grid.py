"""A grid of experiments in one store, from settings in TOML files: trainings, or evaluations with attacks."""

import copy
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from vflsec.base import files
from vflsec.base.checks import describe_unknown
from vflsec.base.errors import UsageError
from vflsec.results.records.schema import Record
from vflsec.run import engine
from vflsec.run import spec as specs
from vflsec.run.describe import build_manifest
from vflsec.run.engine import Plan
from vflsec.run.job import Evaluation
from vflsec.run.plan import (
    Baseline,
    Names,
    Trial,
    build_cell,
    choose_settings,
    make_training,
    resolve,
)
from vflsec.run.spec import EvalSpec
from vflsec.run.store import StageDone, Store

Table = dict[str, Any]
Place = tuple[int, int]
T = TypeVar("T")


class Trainings(NamedTuple):
    """A training of each seed without an attack, which runs as an evaluation does."""

    spec: EvalSpec

    def trials(self) -> Iterator[Trial]:
        """Yield all results, which have no attack."""
        method = self.spec.methods[0]
        for seed in range(self.spec.seeds):
            yield make_training(self.spec, method, build_cell(self.spec, method, seed))

    def baselines(self) -> tuple[Baseline, ...]:
        """Return no results, since no attack has any without the federation."""
        return ()


class Grid:
    """Trainings and evaluations by their place in a table.

    Args:
        store: where trainings and results are kept; a second run computes what is missing.

    Attributes:
        parts: what is computed for each place; a place of several chooses one of them for each seed.
    """

    def __init__(self, store: Store) -> None:
        for name in ("sweep.json", "manifest.json"):
            if (store.folder / name).exists():
                raise UsageError(f"expected a folder of its own, got {store.folder} with {name}: name another")
        self.store = store
        self.parts: dict[Place, list[Trainings | Evaluation]] = {}

    def plan(self, kind: Any = Trainings | Evaluation) -> Plan:
        """Return what is to be computed of one kind of parts, or of both."""
        every = (part for parts in self.parts.values() for part in parts if isinstance(part, kind))
        parts = {id(part): part for part in every}.values()
        wanted, alone = ([part.trials() for part in parts], [part.baselines() for part in parts])
        return engine.plan_trials(chain(*wanted), chain(*alone), self.store)

    def missing(self) -> int:
        """Return the number of trainings and results that are to be computed."""
        return self.plan().missing

    def compute(self, *, jobs: int, device: str) -> Iterator[Record | StageDone]:
        """Compute what is missing; yield each record."""
        for kind in (Trainings, Evaluation):  # in this order, since evaluations use the trainings that are there
            yield from engine.evaluate(self.plan(kind), self.store, jobs=jobs, device=device)

    def records(self) -> dict[str, Record]:
        """Return the results in the store that belong to this grid, by key."""
        todo = self.plan()
        keys = {*(row.key for row in todo.rows), *(baseline.key for baseline in todo.baselines)}
        return {key: record for key, record in self.store.records().items() if key in keys}

    def seconds(self) -> float:
        """Return the time of all trainings, with the phases and trials that they share, and attacks, in the store."""
        done = self.store.records()
        rows = [choose_settings(row, done) for row in self.plan().rows]
        keys = {key for row in rows for key in (row.cell.key, *map(row.cell.stage_key, row.cell.stages))}
        trained = [self.store.cell(key).read() for key in keys]
        attacked = sum(record.seconds.get("attack", 0.0) for record in self.records().values())
        tuned = {row.cell.key: row.tuning.seconds for row in rows if row.tuning}
        return attacked + sum(tuned.values()) + sum(facts.seconds for facts in trained if facts)


def merge_tables(*tables: Mapping[str, Any]) -> Table:
    """Return tables of settings in one, of which the later win."""
    result: Table = {}
    for table in tables:
        for key, value in table.items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = merge_tables(result[key], value) if both else copy.deepcopy(value)
    return result


def prepare_trainings(settings: Mapping[str, Any], seeds: int) -> Trainings:
    """Return the checked training of each seed.

    Raises:
        UsageError: a setting that training does not have, or several methods.
    """
    spec = specs.read_training(settings, tuned=True)
    engine.check_training(spec)
    engine.check_tuning(spec)
    return Trainings(msgspec.structs.replace(spec, seeds=seeds))


def prepare_evaluation(settings: Mapping[str, Any], seeds: int, target: str = "") -> Evaluation:
    """Return a checked evaluation; ``all`` means the attacks on ``target``, if there is one."""
    spec = specs.read({**settings, "seeds": seeds})
    if any(attack.name == engine.ALL for attack in spec.attacks):
        spec, _ = engine.expand_attacks(spec)
        if target:
            attacks = tuple(attack for attack in spec.attacks if resolve(attack).kind.target == target)
            spec = msgspec.structs.replace(spec, attacks=attacks)
    engine.check(spec)
    return Evaluation(spec, Names(""), {}, build_manifest(spec))


def expect_measure(spec: EvalSpec, measure: str, attack: str, strength: float | None) -> None:
    """Raise UsageError unless an evaluation has a leak by ``attack``, and the strength; CAP needs several of these."""
    strengths = {0.0, *(strength for defense in spec.defenses for strength in spec.list_strengths(defense))}
    names = (*spec.labels, *(known.name for known in spec.attacks), "worst")
    if attack and attack not in names:
        raise UsageError(describe_unknown("attack", attack, spec.labels))
    if measure in ("cap", "calibrated") and len(strengths) == 1:
        raise UsageError("expected a defense with strengths in settings.defenses for CAP, got none")
    if strength is not None and strength not in strengths:
        raise UsageError(f"expected strength among {sorted(strengths)}, got {strength:g}")


def list_names(folder: Path) -> list[str]:
    """Return the names of the files in a folder."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def read_bundled(folder: Path, kind: str, name: str) -> Table:
    """Return the settings of a ``kind`` in a folder that comes with vflsec.

    Raises:
        UsageError: no such name.
    """
    if name not in list_names(folder):
        raise UsageError(describe_unknown(kind, name, list_names(folder)))
    return files.parse_toml((folder / f"{name}.toml").read_text(encoding="utf-8"))


def read_table(folder: Path, kind: str, name: str) -> Table:
    """Return the settings of a ``kind`` by name, or from a TOML file.

    Raises:
        UsageError: no such name or file, or no TOML.
    """
    return specs.read_toml(Path(name)) if name.endswith(".toml") else read_bundled(folder, kind, name)


def convert(name: str, table: Table, structure: type[T]) -> T:
    """Return settings as a checked structure.

    Raises:
        UsageError: they are wrong; the message begins with ``name``.
    """
    try:
        return msgspec.convert(table, structure)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"{name}: {error}") from None
