"""What an evaluation would compute, in words: its networks, and the time by past results."""

from collections import defaultdict
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
from vflsec.run.federation import build_models
from vflsec.run.plan import build_cell
from vflsec.run.spec import EvalSpec

MAX_FOLDERS = 50
"""Folders whose past results are read, the newest first."""


def describe_networks(spec: EvalSpec) -> Iterator[str]:
    """Yield a line for each method: the rows, epochs and networks of one training."""
    for label in spec.methods:
        cell = build_cell(spec, label, seed=0)
        federation, method = build_models(cell, "cpu")
        rows = len(federation.active.labels["train"])
        if not method.receives:
            yield f"{label}: {rows:,} labeled rows, without messages"
            continue
        if not method.embeds:
            yield f"{label}: {rows:,} labeled rows, without networks; settings of train and model are not read"
            continue
        train = getattr(method, "train_spec", cell.train)  # whose default may be the method's
        epochs = count(train.count_epochs(rows), "epoch")
        networks = "; ".join(_list_networks(method, federation))
        steps = f"{epochs} of batches of {train.batch}"
        yield f"{label}: {rows:,} labeled rows, {steps}; {cell.model.encoder}: {networks}"


def _list_networks(method: Method, federation: Federation) -> Iterator[str]:
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


def forecast_time(todo: Plan, past: Iterable[Record]) -> Forecast:
    """Return the time for what ``todo`` lacks, by medians of ``past`` results of equal method, defense and attack."""
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    records = [record for record in past if record.status not in FAILED]
    for record in records:
        if isinstance(record, Result):
            names = [defense.partition(":")[0] for defense in record.defenses]
            for like in (record.method, " ".join([record.method, *names])):
                times["train", like].append(record.seconds.get("train", 0.0))
            if shadows := record.budget.get("shadows"):
                times["shadow", record.method].append(record.seconds.get("shadows", 0.0) / shadows)
        if record.attack is not None:
            times["attack", record.attack.name].append(record.seconds.get("attack", 0.0))
    typical = {key: median(values) for key, values in times.items()}
    seconds, unlike = forecast_time(todo.trials, records).seconds if todo.trials else 0.0, []
    for group in todo.groups:
        method = group.cell.method.name
        seconds += len(group.shadows or ()) * typical.get(("shadow", method), typical.get(("train", method), 0.0))
    for task in todo.tasks:
        attacks = [*(row.attack for row in task.rows), *(baseline.attack for baseline in task.baselines)]
        wanted = [("attack", attack.name) for attack in attacks if attack]
        if task.rows:
            method = task.rows[0].method
            exact = " ".join([method, *(defense.name for defense in task.cell.defenses)])
            wanted.append(("train", exact if ("train", exact) in typical else method))
        seconds += sum(typical.get(key, 0.0) for key in wanted)
        unlike += [name for kind, name in wanted if (kind, name) not in typical]
    return Forecast(seconds, list(dict.fromkeys(unlike)), len(records))


def read_past_results(folder: Path, dataset: str) -> Iterator[Record]:
    """Yield the results in ``folder`` and in the folders beside it that are on the same dataset."""
    beside = [path for path in folder.parent.glob("*/records.jsonl") if path.parent != folder]
    newest = sorted(beside, key=lambda path: path.stat().st_mtime, reverse=True)
    for path in [folder / "records.jsonl", *newest[:MAX_FOLDERS]]:
        try:
            if path.is_file() and read_manifest(path.parent).dataset == dataset:
                yield from read_records(path.parent).values()
        except VflsecError:  # another version's, or damaged: a forecast can do without it
            continue
