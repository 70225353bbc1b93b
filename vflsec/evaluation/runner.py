"""One cell, from settings to records: train or reload, build the View, attack it, score the Guess."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from threadpoolctl import threadpool_limits
from torch.nn import functional as F

from vflsec.core import registry
from vflsec.core.attack import Attack
from vflsec.core.errors import BadGuess, Diverged, VflsecError
from vflsec.core.message import Kind, Message, Transcript
from vflsec.core.method import Progress, Trained, load_states
from vflsec.core.seeds import derive
from vflsec.core.view import Need, View
from vflsec.evaluation.adversary import adversary, alone, draw_auxiliary, fold_score, secret_of, view_of
from vflsec.evaluation.plan import Cell, Prior, Row
from vflsec.evaluation.score import measure, score
from vflsec.evaluation.spec import AttackSpec, AuxSpec
from vflsec.evaluation.store import CellFolder, Record, Store
from vflsec.evaluation.world import build_method, build_world

COLLAPSED = 1e-6
"""A model whose log-probabilities vary by less than this over the test rows says the same of everybody."""

_KINDS = {Need.GRADIENTS: Kind.GRADIENT, Need.EMBEDDINGS: Kind.EMBEDDING}


_ONE_AT_A_TIME = Lock()
"""Layers draw their first weights from torch's global stream, so two threads of a process must take turns."""


class Task(NamedTuple):
    """Work for one process: the missing results of one cell, or the missing priors of one seed and method."""

    cell: Cell
    rows: Sequence[Row]
    priors: Sequence[Prior]
    adversary: str
    aux: AuxSpec


def run(task: Task, folder: Path, device: str) -> list[Record]:
    """Return one record for each row and prior of ``task``, in order.

    What went wrong in a cell becomes the status of its records; what is wrong with the settings is raised.
    """
    with _ONE_AT_A_TIME, one_thread():
        if task.priors:
            return [_prior(prior, task, device) for prior in task.priors]
        return _results(task, Store(folder).cell(task.cell.key), device)


@contextmanager
def one_thread() -> Iterator[None]:
    """Give torch and the linear algebra one thread: sums, and so records, do not depend on cores or ``--jobs``."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def train(
    cell: Cell, device: str, progress: Progress = lambda *_: None, tap: Callable[[Message], None] | None = None
) -> tuple[Trained | None, Record]:
    """Train ``cell`` and return it with its facts: status, utility, loss by epoch, traffic, seconds.

    A diverged training gives no model and no number.
    """
    began = time.perf_counter()
    world, method = build_world(cell, device), build_method(cell)
    if tap:
        world.channel.taps.append(tap)
    facts: Record = {"status": "ok", "utility": None, "history": {}, "error": None}
    trained = None
    try:
        trained = method.fit(world, progress)
        facts["history"] = dict(trained.history)
        logits = trained.predict("test")
        if float(F.log_softmax(logits, dim=1).std(dim=0).max()) < COLLAPSED:
            facts |= {"status": "collapsed", "error": "the model predicts the same for every test row"}
        seed = derive(cell.seed, "bootstrap")
        facts["utility"] = measure(logits, world.active.labels["test"], world.metric, seed)
    except Diverged as error:
        trained = None
        facts |= {"status": "diverged", "error": str(error)}
    facts["traffic"] = [[*route, nbytes] for route, nbytes in world.channel.traffic.items()]
    facts["seconds"] = time.perf_counter() - began
    return trained, facts


def _results(task: Task, stored: CellFolder, device: str) -> list[Record]:
    attacks = [build_attack(row.attack) for row in task.rows]
    kinds = frozenset(_KINDS[need] for attack in attacks for need in attack.needs if need in _KINDS)
    try:
        trained, facts, messages = _trained(task, kinds, stored, device)
    except VflsecError:
        raise
    except Exception as error:  # noqa: BLE001  (whatever happens in one cell must not cost the others)
        facts = {"status": "error", "error": _line(error), "utility": None, "traffic": [], "seconds": 0.0}
        trained, messages = None, ()
    return [
        _result(row, attack, task, trained, facts, messages, device)
        for row, attack in zip(task.rows, attacks, strict=True)
    ]


def _trained(
    task: Task, kinds: frozenset[Kind], stored: CellFolder, device: str
) -> tuple[Trained | None, Record, tuple[Message, ...]]:
    """Reload the cell; train it if there is none, or if an attack reads messages, of which no copy is kept."""
    facts = stored.read()
    if facts and not kinds:
        if facts["status"] == "diverged":
            return None, facts, ()
        world, method = build_world(task.cell, device), build_method(task.cell)
        method.build(world)
        load_states(world, stored.path)
        return Trained(method, world, facts["history"]), facts, ()
    transcript = Transcript(frozenset(task.adversary.split("+")), kinds)
    trained, facts = train(task.cell, device, tap=transcript)
    stored.write(facts, lambda folder: trained.save(folder) if trained else folder.mkdir())
    return trained, facts, tuple(transcript.messages)


def _result(
    row: Row,
    attack: Attack,
    task: Task,
    trained: Trained | None,
    facts: Record,
    messages: tuple[Message, ...],
    device: str,
) -> Record:
    traffic = facts["traffic"]
    record: Record = {
        "kind": "result",
        "key": row.key,
        "cell": row.cell.key,
        "method": row.method,
        "defenses": [f"{d.label}:{d.strength:g}" for d in row.cell.defenses],
        "seed": row.seed,
        "adversary": task.adversary,
        "attack": {"name": row.attack.name, "options": row.attack.options, "repr": repr(attack)},
        "status": facts["status"],
        "error": facts["error"],
        "utility": facts["utility"] if facts["status"] == "ok" else None,
        "leak": None,
        "fold": None,
        "budget": {},
        "device": device,
        "nbytes": sum(nbytes for phase, *_, nbytes in traffic if phase != "predict"),
        "traffic": traffic,
        "seconds": {"train": facts["seconds"]},
    }
    if trained and facts["status"] == "ok":
        record |= _attacked(attack, trained, task, messages, record)
    return record


def _attacked(
    attack: Attack, trained: Trained, task: Task, messages: tuple[Message, ...], record: Record
) -> dict[str, Any]:
    """Run ``attack`` on the trained world and return what changes in its record."""
    world, began = trained.world, time.perf_counter()
    aux = draw_auxiliary(world.active.labels["train"], world.n_classes, task.aux, world.seed)
    wanted = {_KINDS[need] for need in attack.needs if need in _KINDS}  # not what other attacks had recorded
    own = tuple(message for message in messages if message.kind in wanted)
    changes = _guarded(attack, view_of(trained, adversary(world, task.adversary), aux, own), trained, task.aux)
    return {**changes, "seconds": {**record["seconds"], "attack": time.perf_counter() - began}}


def _guarded(attack: Attack, view: View, trained: Trained, aux: AuxSpec) -> dict[str, Any]:
    """Attack and score; what goes wrong in one attack is its status and must not cost the others."""
    try:
        return _scored(attack, view, trained, aux)
    except VflsecError as error:
        if not isinstance(error, BadGuess):
            raise
        return {"status": "error", "error": _line(error)}
    except Exception as error:  # noqa: BLE001
        return {"status": "error", "error": _line(error)}


def _scored(attack: Attack, view: View, trained: Trained, aux: AuxSpec) -> dict[str, Any]:
    world = trained.world
    seed = derive(world.seed, "attack", attack.name)
    guess = attack(view, seed=seed)
    bootstrap = derive(world.seed, "bootstrap")
    return {
        "status": "unconverged" if guess.converged is False else "ok",
        "leak": score(guess, secret_of(world), headline=world.metric, exclude=view.aux_rows, seed=bootstrap),
        "fold": fold_score(attack, view, world.metric, aux.folds, seed),
        "budget": dict(guess.budget),
    }


def attacked_once(attack: Attack, trained: Trained, party: str, aux: AuxSpec) -> dict[str, dict[str, Any]]:
    """Return the leak by split of one attack on a federation trained elsewhere, of which no messages were kept."""
    world = trained.world
    rows = draw_auxiliary(world.active.labels["train"], world.n_classes, aux, world.seed)
    view = view_of(trained, adversary(world, party), rows)
    leak: dict[str, dict[str, Any]] = _scored(attack, view, trained, aux)["leak"]
    return leak


def _prior(prior: Prior, task: Task, device: str) -> Record:
    """Run what the adversary could have done alone; it needs the data and the model's shape, but no training."""
    began = time.perf_counter()
    world, method = build_world(prior.cell, device), build_method(prior.cell)
    method.build(world)
    attack = build_attack(prior.attack)
    own = attack if prior.attack.name == "logistic" else attack.alone()
    record: Record = {
        "kind": "prior",
        "key": prior.key,
        "method": prior.cell.method,
        "seed": prior.seed,
        "adversary": task.adversary,
        "attack": {"name": prior.attack.name, "options": prior.attack.options, "repr": repr(own)},
        "status": "ok",
        "error": None,
        "leak": None,
        "fold": None,
        "budget": {},
    }
    if own and task.aux.n:
        aux = draw_auxiliary(world.active.labels["train"], world.n_classes, task.aux, world.seed)
        trained = Trained(method, world, {})
        view = alone(view_of(trained, adversary(world, task.adversary), aux), world.seed)
        record |= _guarded(own, view, trained, task.aux)
    return {**record, "seconds": {"attack": time.perf_counter() - began}}


def build_attack(spec: AttackSpec) -> Attack:
    """Return the attack that ``spec`` names."""
    attack = registry.build("attacks", spec.name, **spec.options)
    assert isinstance(attack, Attack)
    return attack


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
