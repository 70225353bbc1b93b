"""Runs a recipe, and returns what was measured at each cell of its table."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from vflsec.base.errors import UsageError
from vflsec.core.method import Trained
from vflsec.papers.grid import (
    Grid,
    Place,
    Table,
    Trainings,
    expect_measure,
    prepare_evaluation,
    prepare_trainings,
)
from vflsec.papers.recipe import ATTACKED, Asked, Recipe
from vflsec.results.analysis.groups import USABLE
from vflsec.results.analysis.results import Leak, Summary
from vflsec.results.analysis.summary import summarize
from vflsec.results.metrics import METRICS
from vflsec.results.records.schema import Block, Record, Result
from vflsec.run.cell import Cell
from vflsec.run.federation import get_partition
from vflsec.run.job import Evaluation
from vflsec.run.plan import Trial
from vflsec.run.runner import load_cell
from vflsec.run.store import CellFacts, Store


class CellValues(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured at one cell: a number for each seed that gave one; of a leak also what is inferred alone."""

    row: int
    column: int
    by_seed: dict[int, float]
    metric: str = ""
    alone: dict[int, float] = {}


class TableEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of the table.

    Attributes:
        printed: in the paper; None where it has no value.
        measured: the mean over seeds; None where no seed gave a number. Its interval, from ``low`` to ``high``, ends at
            0 and 1.
        difference: measured less printed; None on data that stand in for the paper's, and for hours, which are of
            another machine.
        against: the row whose values were taken away, paired by seed; empty if ``measured`` is the value itself.
        by_seed: the value of each seed itself.
        alone: of a leak, what the adversary reaches without joining, by seed.
    """

    group: str
    row: str
    column: str
    printed: float | None
    measured: float | None
    low: float | None
    high: float | None
    difference: float | None
    seeds: int
    metric: str
    by_seed: dict[int, float]
    measure: str = "utility"
    against: str = ""
    alone: dict[int, float] = {}

    @property
    def worse(self) -> bool | None:
        """Whether a change is for the worse, a larger leak or a smaller utility; None if it is not told from 0."""
        if not self.against or self.low is None or self.high is None or self.low <= 0 <= self.high:
            return None
        return (self.low > 0) == (self.measure == "leak")


class Guessing(NamedTuple):
    """What an attack reaches and what is reached without it, by seed and in the mean."""

    metric: str
    by_seed: dict[int, float]
    alone_by_seed: dict[int, float]
    chance: float | None


class RecipeGrid(Grid):
    """The measurements of a recipe: which are to be made, and how.

    Args:
        recipe: of the table.
        store: where trainings and results are kept; a second run computes what is missing.
    """

    def __init__(self, recipe: Recipe, store: Store) -> None:
        """Check every cell of the table; nothing is computed."""
        super().__init__(store)
        self.recipe = recipe
        made: dict[bytes, Trainings | Evaluation] = {}
        for i, row in enumerate(recipe.rows):
            for j, column in enumerate(recipe.columns):
                for settings in recipe.list_trials(row, column):
                    part = self._prepare(settings, made)
                    if isinstance(part, Evaluation):
                        _check_asked(recipe.get_question(row, column), part)
                    self.parts.setdefault((i, j), []).append(part)
                if len(self.parts[i, j]) > 1:
                    _expect_validation(self.parts[i, j])

    def _prepare(self, settings: Table, made: dict[bytes, Trainings | Evaluation]) -> Trainings | Evaluation:
        """Return what is computed for ``settings``, prepared once; of all attacks those on labels."""
        key = msgspec.json.encode(settings, order="deterministic")
        if key not in made:
            seeds = self.recipe.seeds
            if self.recipe.has_attacks:
                made[key] = prepare_evaluation(settings, seeds, target="labels")
            else:
                made[key] = prepare_trainings(settings, seeds)
        return made[key]

    def measure(self) -> list[CellValues]:
        """Return what the store has for each cell of the table."""
        records = self.store.records()
        summaries: dict[int, Summary] = {}
        for parts in self.parts.values():
            for part in parts:
                if isinstance(part, Evaluation) and id(part) not in summaries:
                    summaries[id(part)] = summarize(part.manifest, records, out="")
        return [
            self._measure_trainings(place, records)
            if isinstance(parts[0], Trainings)
            else self._measure_evaluations(place, records, summaries)
            for place, parts in self.parts.items()
        ]

    def get_question(self, place: Place) -> Asked:
        """Return what is measured at a cell of the table."""
        return self.recipe.get_question(self.recipe.rows[place[0]], self.recipe.columns[place[1]])

    def _measure_trainings(self, place: Place, records: Mapping[str, Record]) -> CellValues:
        asked, values = self.get_question(place), {}
        metric = asked.metric
        for rows in zip(*(part.trials() for part in self.parts[place]), strict=True):  # of one seed
            done = {row.key: record for row in rows if isinstance(record := records.get(row.key), Result)}
            row = self.choose([row for row in rows if row.key in done])
            if row is None or (record := done[row.key]).status != "ok" or record.utility is None:
                continue
            value: float | None
            if asked.measure == "hours":
                value = self._measure_hours(row.cell, asked.phase)
            elif asked.measure == "megabytes":
                value = record.reached["paper_bytes"] / 2**20 if "paper_bytes" in record.reached else None
            else:
                value, metric = read_metric(record.utility, metric, row.cell.dataset.name)
            if value is not None:
                values[row.seed] = value
        return CellValues(row=place[0], column=place[1], by_seed=values, metric=metric)

    def choose(self, rows: list[Trial]) -> Trial | None:
        """Return the trial with the best metric on validation rows; test rows play no part."""
        if len(rows) < 2:
            return rows[0] if rows else None
        return max(rows, key=lambda row: self._validate(row.cell))

    def _validate(self, cell: Cell) -> float:
        """Return the headline metric on validation rows; negative infinity where training failed."""
        trained = self.load(cell)
        if trained is None:
            return -math.inf
        labels = trained.federation.active.labels["val"].cpu().numpy()
        return METRICS[trained.federation.metric](trained.predict("val").detach().cpu().numpy(), labels)

    def load(self, cell: Cell) -> Trained | None:
        """Return a trained federation; None if the store has none, or no number is of it."""
        stored = self.store.cell(cell.key)
        facts = stored.read()
        if not isinstance(facts, CellFacts) or facts.status != "ok":
            return None
        return load_cell(cell, stored.path, facts.history, "cpu")

    def _measure_hours(self, cell: Cell, phase: str) -> float | None:
        facts = self.store.cell(cell.key).read()
        spent = facts.phase_seconds if isinstance(facts, CellFacts) else {}
        seconds = spent.get(phase) if phase else sum(spent.values())
        return None if seconds is None else seconds / 3600

    def _measure_evaluations(
        self, place: Place, records: Mapping[str, Record], summaries: Mapping[int, Summary]
    ) -> CellValues:
        """Return for each seed the values of the evaluation that validates best without the compared defenses."""
        parts = self.parts[place]
        values = [self._measure_evaluation(place, part, records, summaries[id(part)]) for part in parts]
        if len(parts) == 1:
            return values[0]
        honest = [{row.seed: row for row in part.trials() if not row.strength} for part in parts]
        chosen = {
            seed: values[max(range(len(parts)), key=lambda k: self._validate(honest[k][seed].cell))]
            for seed in honest[0]
        }
        by_seed = {seed: cell.by_seed[seed] for seed, cell in chosen.items() if seed in cell.by_seed}
        alone = {seed: cell.alone[seed] for seed, cell in chosen.items() if seed in cell.alone}
        most = max(values, key=lambda cell: len(cell.by_seed))  # which has a metric, if any does
        return msgspec.structs.replace(most, by_seed=by_seed, alone=alone)

    def _measure_evaluation(
        self, place: Place, part: Trainings | Evaluation, records: Mapping[str, Record], summary: Summary
    ) -> CellValues:
        asked = self.get_question(place)
        by_seed, metric = self._read_cell(asked, part, records, summary)
        leak = _find_leak(asked, summary)
        alone = dict(leak.alone_by_seed) if leak and asked.measure == "leak" and not asked.metric else {}
        if self.recipe.against and asked.measure == "leak":
            base = alone or dict.fromkeys(by_seed, (leak.chance if leak else None) or 0.0)
            by_seed, alone = {seed: value - base[seed] for seed, value in by_seed.items() if seed in base}, {}
        return CellValues(row=place[0], column=place[1], by_seed=by_seed, metric=metric, alone=alone)

    def _read_cell(
        self, asked: Asked, part: Trainings | Evaluation, records: Mapping[str, Record], summary: Summary
    ) -> tuple[dict[int, float], str]:
        """Return a number for each seed, and its metric, from the records of one evaluation."""
        if asked.measure == "cap" and asked.metric:
            return self._read_cap(asked, part, records), asked.metric
        if asked.measure == "cap":
            cap = next((cap for cap in summary.cap if cap.attack == asked.attack), None)
            return (dict(cap.by_seed) if cap else {}), summary.metric
        if asked.measure == "alone" or (asked.measure == "leak" and not asked.metric):
            leak = _find_leak(asked, summary)
            by_seed = {} if leak is None else leak.alone_by_seed if asked.measure == "alone" else leak.by_seed
            return dict(by_seed), leak.metric if leak else ""
        values: dict[int, float] = {}
        metric = asked.metric
        for row in part.trials():
            record = records.get(row.key)
            acts = row.attack is not None and row.attack.make().acts_in_training
            wanted = row.label == asked.attack or (asked.measure == "utility" and not acts)
            if not _is_match(asked, row.strength, row.defense) or not wanted or not isinstance(record, Result):
                continue
            block = record.utility if asked.measure == "utility" else record.leak.get("test")
            if block is not None and not record.control and record.status in USABLE:
                values[row.seed], metric = read_metric(block, metric, row.cell.dataset.name)
        return values, metric

    def _read_cap(self, asked: Asked, part: Trainings | Evaluation, records: Mapping[str, Record]) -> dict[int, float]:
        """Return CAP with the leak in the metric that is asked for, of each seed with a number at every strength."""
        products = dict[int, list[float]]()
        rows = [row for row in part.trials() if row.strength and row.label == asked.attack]
        rows = [row for row in rows if row.defense == (asked.defense or rows[0].defense)]
        for row in rows:
            record = records.get(row.key)
            if isinstance(record, Result) and record.status in USABLE and record.utility and "test" in record.leak:
                leak, _ = read_metric(record.leak["test"], asked.metric, row.cell.dataset.name)
                products.setdefault(row.seed, []).append(record.utility.headline * (1 - leak))
        strengths = len({row.strength for row in rows})
        return {seed: sum(values) / strengths for seed, values in products.items() if len(values) == strengths}


def read_metric(block: Block, metric: str, dataset: str) -> tuple[float, str]:
    """Return a metric of a block, by default its headline, and the name of the metric.

    Raises:
        UsageError: it has no such metric.
    """
    metric = metric or block.metric
    if metric not in block.metrics:
        raise UsageError(f"expected a metric of {dataset}, got {metric}; known: {', '.join(block.metrics)}")
    return block.metrics[metric], metric


def _find_leak(asked: Asked, summary: Summary) -> Leak | Guessing | None:
    """Return the leak by the attack that is asked for, at its strength; on integrity, the success of its trigger."""
    if asked.target == "integrity":
        for d in summary.integrity:
            if d.attack == asked.attack and _is_match(asked, d.strength, d.defense):
                return Guessing(d.success.metric, d.success_by_seed, d.chance_by_seed, d.chance)
        return None
    points = (p for p in (*summary.points, *summary.worst) if p.target == asked.target and p.attack == asked.attack)
    point = next((p for p in points if _is_match(asked, p.strength, p.defense)), None)
    return None if point is None else point.leak_train if asked.guessed == "train" else point.leak


def _is_match(asked: Asked, strength: float, defense: str) -> bool:
    return strength == asked.strength and (not strength or asked.defense in ("", defense))


def _expect_validation(parts: Sequence[Trainings | Evaluation]) -> None:
    """Raise UsageError unless there are validation rows to choose by."""
    for part in parts:
        if not len(get_partition(next(iter(part.trials())).cell).labels["val"]):
            raise UsageError("expected validation rows to choose between trials, got none: raise data.validation")


def _check_asked(asked: Asked, part: Evaluation) -> None:
    """Raise UsageError unless an evaluation gives what is asked of it."""
    if asked.measure == "cap" and asked.metric and asked.attack == "worst":
        raise UsageError(f"expected one attack for CAP in {asked.metric}, got worst: name one, or leave out the metric")
    attack = asked.attack if asked.measure in ATTACKED else ""
    expect_measure(part.spec, asked.measure, attack, None if asked.measure == "cap" else asked.strength)
