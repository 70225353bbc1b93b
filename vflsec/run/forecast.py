"""What an evaluation will do, before it does it: the shape of each training, and the time by past results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import NamedTuple

from vflsec.base.checks import count
from vflsec.base.errors import VflsecError
from vflsec.core.federation import Federation
from vflsec.core.method import Method
from vflsec.results.records.folder import read_manifest, read_records
from vflsec.results.records.schema import FAILED, Record, Result
from vflsec.run.engine import Plan
from vflsec.run.federation import build_federation, build_method
from vflsec.run.plan import training_cell
from vflsec.run.spec import EvalSpec

MOST_FOLDERS = 50
"""Folders whose past results are read, the newest first."""


def shapes(spec: EvalSpec) -> Iterator[str]:
    """Yield a line for each method: the rows, epochs and networks of one training.

    Raises:
        DataError: the dataset cannot be read.
    """
    for label in spec.methods:
        cell = training_cell(spec, label, seed=0)
        federation, method = build_federation(cell, "cpu"), build_method(cell)
        method.build(federation)
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
