"""A grid of experiments in one store: at each place several trainings, or an evaluation with attacks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch
from joblib import Parallel, delayed

from vflsec.base import files
from vflsec.base.checks import unknown
from vflsec.base.errors import UsageError
from vflsec.core.method import Trained
from vflsec.results.metrics import METRICS
from vflsec.results.records.schema import Record
from vflsec.run import engine, training
from vflsec.run import spec as specs
from vflsec.run.cell import Cell
from vflsec.run.engine import Plan
from vflsec.run.job import Evaluation, manifest_of
from vflsec.run.plan import Names, resolve, training_cell
from vflsec.run.spec import EvalSpec
from vflsec.run.store import CellFacts, StageDone, Store

Table = dict[str, Any]
Place = tuple[int, int]


class Grid:
    """Trainings and evaluations by their place in a table.

    Args:
        store: where trainings and results are kept; a second run computes what is missing.

    Attributes:
        validated: keys of the trainings that are kept with their metric on validation rows.
    """

    def __init__(self, store: Store) -> None:
        for name in ("sweep.json", "manifest.json"):
            if (store.folder / name).exists():
                raise UsageError(f"expected a folder of its own, got {store.folder} with {name}: name another")
        self.store = store
        self.trainings: dict[Place, list[Cell]] = {}
        self.points: dict[Place, Evaluation] = {}
        self.validated: set[str] = set()

    @property
    def different_cells(self) -> dict[str, Cell]:
        """The different trainings by key."""
        return {cell.key: cell for own in self.trainings.values() for cell in own}

    @property
    def different_points(self) -> list[Evaluation]:
        """The different evaluations."""
        return list({id(one.spec): one for one in self.points.values()}.values())

    def missing(self) -> int:
        """Return the number of trainings and results that are to be computed."""
        return len(self._open_cells()) + self.plan().missing

    def plan(self) -> Plan:
        """Return what is to be computed with attacks."""
        parts = self.different_points
        wanted, alone = ([part.trials() for part in parts], [part.baselines() for part in parts])
        return engine.plan_trials(chain(*wanted), chain(*alone), self.store)

    def compute(self, *, jobs: int, device: str) -> Iterator[Record | StageDone | str]:
        """Compute what is missing; yield each record, or the name of each training."""
        todo = self._open_cells()
        yield from Parallel(n_jobs=min(jobs, max(1, len(todo))), return_as="generator", batch_size=1)(
            delayed(_train)(cell, self.store.folder, device, validated=cell.key in self.validated) for cell in todo
        )
        yield from engine.evaluate(self.plan(), self.store, jobs=jobs, device=device)

    def facts(self, cell: Cell) -> CellFacts | None:
        """Return the facts of a training; None if the store has none."""
        found = self.store.cell(cell.key).read()
        return found if isinstance(found, CellFacts) else None

    def _open_cells(self) -> list[Cell]:
        cells = self.different_cells.items()
        return [cell for key, cell in cells if not _is_done(self.facts(cell), validated=key in self.validated)]


def merged(*tables: Mapping[str, Any]) -> Table:
    """Return tables of settings in one, of which the later win."""
    found: Table = {}
    for table in tables:
        for key, value in table.items():
            both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
            found[key] = merged(found[key], value) if both else copy.deepcopy(value)
    return found


def trainings(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """Return the checked training of each seed."""
    spec = specs.read_training(settings)
    engine.check_training(spec)
    return [training_cell(spec, spec.methods[0], seed) for seed in range(seeds)]


def evaluation(settings: Mapping[str, Any], seeds: int, target: str = "") -> EvalSpec:
    """Return a checked evaluation; ``all`` means the attacks on ``target``, if there is one."""
    spec = specs.read({**settings, "seeds": seeds})
    if any(attack.name == engine.ALL for attack in spec.attacks):
        spec, _ = engine.every_attack(spec)
        if target:
            attacks = tuple(attack for attack in spec.attacks if resolve(attack).kind.target == target)
            spec = msgspec.structs.replace(spec, attacks=attacks)
    engine.check(spec)
    return spec


def point(spec: EvalSpec, values: Mapping[str, Any]) -> Evaluation:
    """Return a checked evaluation with the values that tell it from others."""
    return Evaluation(spec, Names(""), {}, manifest_of(spec), dict(values))


def strengths(spec: EvalSpec) -> set[float]:
    """Return all strengths of an evaluation, 0 among them."""
    return {0.0, *(strength for defense in spec.defenses for strength in spec.strengths_of(defense))}


def expect_attack(spec: EvalSpec, attack: str) -> None:
    """Raise UsageError unless the evaluation has a leak of this name."""
    names = (*spec.labels, *(one.name for one in spec.attacks), "worst")
    if attack not in names:
        raise UsageError(unknown("attack", attack, spec.labels))


def _is_done(facts: CellFacts | None, *, validated: bool) -> bool:
    return facts is not None and (not validated or facts.validation is not None or facts.status != "ok")


def _train(cell: Cell, folder: Path, device: str, *, validated: bool) -> str:
    """Train one cell and keep it, with its metric on validation rows if ``validated``, unless the folder has it."""
    store = Store(folder)
    stored = store.cell(cell.key)
    facts = stored.read()
    if not _is_done(facts if isinstance(facts, CellFacts) else None, validated=validated):
        with training.limit_threads():
            trained, made = training.train(cell, device, store=store)
            if trained and validated:
                made.validation = validation(trained)
        stored.remove()  # a training that was kept without that metric
        stored.write(made, lambda path: trained.save(path) if trained else path.mkdir())
        files.discard(stored.partial)
    return f"{cell.dataset.name}, {cell.method.name}, seed {cell.seed}"


def validation(trained: Trained) -> float:
    """Return the headline metric on validation rows.

    Raises:
        UsageError: there are none.
    """
    federation = trained.federation
    labels = federation.active.labels.get("val", torch.empty(0)).cpu().numpy()
    if not len(labels):
        raise UsageError("expected validation rows to choose between trials, got none: raise data.validation")
    return METRICS[federation.metric](trained.predict("val").detach().cpu().numpy(), labels)
