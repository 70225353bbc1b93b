"""Runs what is missing, in this process or in several, and writes each result before it is shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

from joblib import Parallel, delayed

from vflsec.core import registry
from vflsec.core.checks import unknown
from vflsec.core.errors import UsageError
from vflsec.core.method import Method
from vflsec.core.view import Need
from vflsec.evaluation import runner
from vflsec.evaluation.plan import Prior, Row, priors, rows
from vflsec.evaluation.runner import Task
from vflsec.evaluation.spec import EvalSpec
from vflsec.evaluation.store import Record, Store
from vflsec.evaluation.world import load_dataset

Item = TypeVar("Item", Row, Prior)


class Plan(NamedTuple):
    """What an evaluation consists of, and what of it is still to be computed.

    Attributes:
        rows: all results wanted.
        priors: all priors wanted.
        tasks: the missing ones, as work for processes.
        cached: how many are already there.
        missing: how many are not.
    """

    rows: list[Row]
    priors: list[Prior]
    tasks: list[Task]
    cached: int
    missing: int


def plan(spec: EvalSpec, store: Store | None) -> Plan:
    """Return the plan of ``spec``, which has passed ``check``, less what ``store`` holds."""
    done = store.records() if store else {}
    wanted_rows, wanted_priors = _unique(rows(spec)), _unique(priors(spec))
    open_rows = [row for row in wanted_rows if row.key not in done]
    open_priors = [prior for prior in wanted_priors if prior.key not in done]
    tasks = [
        Task(cell=group[0].cell, rows=(), priors=group, adversary=spec.adversary, aux=spec.aux)
        for group in _groups(open_priors)
    ]
    tasks += [
        Task(cell=group[0].cell, rows=group, priors=(), adversary=spec.adversary, aux=spec.aux)
        for group in _groups(open_rows)
    ]
    tasks.sort(key=lambda task: task.cell.seed)  # stable: the cells of one seed share their split
    total, missing = len(wanted_rows) + len(wanted_priors), len(open_rows) + len(open_priors)
    return Plan(wanted_rows, wanted_priors, tasks, total - missing, missing)


def check(spec: EvalSpec) -> None:
    """Raise unless every name, option and need of ``spec`` can be met; trains nothing and writes nothing.

    Raises:
        UsageError: an unknown name or option.
        DataError: the dataset cannot be read.
        InsufficientView: an attack that its adversary cannot mount.
    """
    for defense in (*spec.defenses, *spec.fixed):
        at = {"at": list(defense.at)} if defense.at else {}
        registry.build("defenses", defense.name, defense.strength, **at, **defense.options)
    parties = [party.name for party in load_dataset(spec.dataset, **spec.data.options).parties]
    if spec.adversary not in parties:
        raise UsageError(unknown("adversary", spec.adversary, parties))
    side = "active" if spec.adversary == "active" else "passive"
    for name in spec.methods:
        method = registry.build("methods", name, spec.train, spec.model, **spec.method.get(name, {}))
        assert isinstance(method, Method)
        shown = method.shows[side] - (frozenset() if spec.aux.n else {Need.AUX_LABELS})
        for attack in spec.attacks:
            runner.build_attack(attack).check(side, shown)


def evaluate(todo: Plan, store: Store, *, jobs: int = 1, device: str = "cpu") -> Iterator[Record]:
    """Compute the missing results, yielding each after it is on the disk, always in the order of the plan.

    The order, and every number but the timings, is the same for any ``jobs``, and after an interruption.
    """
    if not todo.tasks:
        return
    for records in _map(todo.tasks, store.folder, jobs, device):
        for record in records:
            store.append(record)
            yield record


def _map(tasks: list[Task], folder: Path, jobs: int, device: str) -> Iterable[list[Record]]:
    if jobs == 1 or len(tasks) == 1:
        return (runner.run(task, folder, device) for task in tasks)
    parallel = Parallel(n_jobs=min(jobs, len(tasks)), return_as="generator", batch_size=1)
    return parallel(delayed(runner.run)(task, folder, device) for task in tasks)  # type: ignore[no-any-return]


def _unique(wanted: Iterable[Item]) -> list[Item]:
    return list({item.key: item for item in wanted}.values())


def _groups(items: list[Item]) -> list[list[Item]]:
    ordered = sorted(items, key=lambda item: item.seed)
    return [list(group) for _, group in groupby(ordered, key=lambda item: item.cell.key)]
