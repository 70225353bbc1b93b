"""Runs what is missing, in this process or in several, and writes each result before it is shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import torch
from joblib import Parallel, delayed

from vflsec.core.defense import Defense
from vflsec.core.errors import UsageError
from vflsec.core.method import Method, World
from vflsec.core.view import Need
from vflsec.evaluation import runner
from vflsec.evaluation.adversary import adversary, draw_auxiliary
from vflsec.evaluation.plan import Prior, Row, priors, rows, training_cell
from vflsec.evaluation.runner import Task
from vflsec.evaluation.spec import EvalSpec
from vflsec.evaluation.store import Record, Store
from vflsec.evaluation.world import build_defense, build_method, build_world

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

    The data are split, and the models built, as for seed 0; so what too few rows make impossible is found here.

    Raises:
        UsageError: an unknown name or option, or more asked of the data than there is.
        DataError: the dataset cannot be read.
        InsufficientView: an attack that its adversary cannot mount.
    """
    attacks = [runner.build_attack(attack) for attack in spec.attacks]
    for method, world in _built(spec):
        party = adversary(world, spec.adversary)
        side = "active" if party.active else "passive"
        shown = method.shows[side] - (frozenset() if spec.aux.n else {Need.AUX_LABELS})
        for attack in attacks:
            attack.check(side, shown)
        draw_auxiliary(world.active.labels["train"], world.n_classes, spec.aux, world.seed)


def check_training(spec: EvalSpec) -> None:
    """Check as ``check`` does, without what concerns attacks.

    Raises:
        UsageError: an unknown name or option, more asked of the data than there is, or a defence that never acts.
        DataError: the dataset cannot be read.
    """
    for _ in _built(spec):
        pass


def _built(spec: EvalSpec) -> Iterator[tuple[Method, World]]:
    """Yield each checked method with its world for seed 0, built and not trained."""
    swept = [msgspec.structs.replace(d, strength=s) for d in spec.defenses for s in (0.0, *spec.strengths)]
    defenses = [build_defense(defense) for defense in (*swept, *spec.fixed)]
    for name in spec.methods:
        cell = training_cell(spec, name, seed=0)
        method = build_method(cell)
        for defense in defenses:
            _check_sent(defense, method)
        world = build_world(cell, "cpu")
        method.build(world)
        method.check(world)
        yield method, world


def _check_sent(defense: Defense, method: Method) -> None:
    """Raise UsageError if ``defense`` is to act on what ``method`` never sends: it would change nothing there."""
    never = sorted(defense.at - method.sends)
    if never:
        raise UsageError(
            f"defense {defense.name} acts at {', '.join(never)}, but method {method.name} sends only "
            f"{', '.join(sorted(method.sends))}: choose another --at"
        )


def evaluate(
    todo: Plan, store: Store, *, jobs: int = 1, device: str = "cpu", engine: str = "local"
) -> Iterator[Record]:
    """Compute the missing results, yielding each after it is on the disk, always in the order of the plan.

    The order, and every number but the timings, is the same for any ``jobs`` and ``engine``, and after an interruption.

    Args:
        todo: the plan.
        store: where results go.
        jobs: processes of the local engine.
        device: ``cpu`` or ``cuda``.
        engine: ``local``, or ``dask:ADDRESS`` of a running scheduler whose workers have vflsec and the same data.

    Raises:
        UsageError: no scheduler at that address, or dask is not installed.
    """
    if not todo.tasks:
        return
    if engine == "local":
        results = _locally(todo.tasks, store.folder, jobs, device)
    else:
        results = _on_dask(todo.tasks, store.folder, engine.removeprefix("dask:"), device)
    for records in results:
        for record in records:
            store.append(record)
            yield record


def check_engine(engine: str) -> None:
    """Raise UsageError unless ``engine`` is ``local`` or ``dask:ADDRESS``."""
    if engine != "local" and not (engine.startswith("dask:") and engine != "dask:"):
        raise UsageError(f"expected --engine local or dask:ADDRESS, got {engine!r}")


def check_device(device: str, *, here: bool = True) -> None:
    """Raise UsageError unless ``device`` is one to compute on; if ``here``, unless this machine has it."""
    kind, _, index = device.partition(":")
    gpus = torch.cuda.device_count()
    if device == "cpu" or (kind == "cuda" and (index or "0").isdigit() and (not here or int(index or 0) < gpus)):
        return
    raise UsageError(f"expected --device cpu, or cuda where torch finds a GPU ({gpus} here), got {device!r}")


def _on_dask(tasks: list[Task], folder: Path, address: str, device: str) -> Iterator[list[Record]]:
    """Run on a scheduler's workers. Records come back here; trained models stay in the workers' own folder."""
    try:
        from distributed import Client
    except ImportError:
        raise UsageError("--engine dask:ADDRESS needs distributed: pip install 'vflsec[dask]'") from None
    try:
        client = Client(address, timeout=10)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise UsageError(f"expected a dask scheduler at {address}, found none: {error}") from None
    with client:
        futures = [client.submit(runner.run, task, folder.resolve(), device, pure=False) for task in tasks]
        for future in futures:
            yield future.result()


def _locally(tasks: list[Task], folder: Path, jobs: int, device: str) -> Iterable[list[Record]]:
    if jobs == 1 or len(tasks) == 1:
        return (runner.run(task, folder, device) for task in tasks)
    parallel = Parallel(n_jobs=min(jobs, len(tasks)), return_as="generator", batch_size=1)
    return parallel(delayed(runner.run)(task, folder, device) for task in tasks)  # type: ignore[no-any-return]


def _unique(wanted: Iterable[Item]) -> list[Item]:
    return list({item.key: item for item in wanted}.values())


def _groups(items: list[Item]) -> list[list[Item]]:
    ordered = sorted(items, key=lambda item: item.seed)
    return [list(group) for _, group in groupby(ordered, key=lambda item: item.cell.key)]
