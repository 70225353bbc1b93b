"""One cell trained: its stages come from the store where they are there; status, utility and traffic are its facts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits
from torch.nn import functional as F

from vflsec.core.checkpoint import Checkpoint
from vflsec.core.errors import Diverged
from vflsec.core.federation import Federation, load_states, save_states
from vflsec.core.integrity import integrity_attacks
from vflsec.core.message import Kind, Route, Transcript
from vflsec.core.method import Method, Progress, Trained
from vflsec.core.seeds import derive
from vflsec.experiment.cell import Cell
from vflsec.experiment.facts import CellFacts, StageFacts
from vflsec.experiment.federation import build_federation, build_method
from vflsec.experiment.score import measure
from vflsec.experiment.store import Store

COLLAPSED = 1e-6
"""A model whose log-probabilities vary by less than this over the test rows says the same of everybody."""

COLLAPSED_SPREAD = 0.01
"""A party whose scaled embeddings lie this close to their mean, of at most 1, says the same of everybody."""


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
    cell: Cell,
    device: str,
    progress: Progress = lambda *_: None,
    *,
    store: Store | None = None,
    tap: Transcript | None = None,
    record: Path | None = None,
    abroad: bool = False,
) -> tuple[Trained | None, CellFacts]:
    """Train ``cell`` and return it with its facts: status, utility, loss by epoch, traffic, seconds.

    A diverged training gives no model and no number.

    Args:
        cell: what to train.
        device: ``cpu`` or ``cuda``.
        progress: called with phase, epochs done, epochs in all.
        store: where stages are kept; without it they are run.
        tap: what an adversary hears; a stage in which it would hear something is run again, for no message is stored.
        abroad: whether the adversary also listens in phases that speak of the source's people.
        record: a folder in which to record what both roles of each encrypted boundary see, for ``vflsec audit``.
    """
    began = time.perf_counter()
    federation, method = build_federation(cell, device), build_method(cell)
    if tap:
        deaf = frozenset() if abroad else method.source_phases
        federation.channel.taps.append(lambda message: None if message.phase in deaf else tap(message))
    facts = CellFacts()
    trained = None
    try:
        method.build(federation)
        facts.notes = method.notes(federation)
        if record:
            method.record(record)
        history: dict[str, Sequence[float | None]] = {}
        for phase in cell.stages:
            heard = bool(tap and tap.kinds & method.messages[phase] and (abroad or phase not in method.source_phases))
            stage = advance(cell, phase, method, federation, store=store, afresh=heard, progress=progress)
            history[phase], facts.spread[phase] = stage.history, stage.spread
        last = method.phases[-1]
        history[last] = method.run(last, federation, progress)
        trained = Trained(method, federation, history)
        facts.history, facts.reached = history, federation.reached
        logits = trained.predict("test")
        facts.spread[last] = spreads(method, federation)
        honest = {
            name: x for name, x in facts.spread[last].items() if name not in integrity_attacks(federation.malicious)
        }
        fallen = collapse(honest)
        if float(F.log_softmax(logits, dim=1).std(dim=0).max()) < COLLAPSED:
            fallen = "the model predicts the same for every test row"
        if fallen:
            facts.status, facts.error = "collapsed", fallen
        facts.utility = measure(
            logits, federation.active.labels["test"], federation.metric, derive(cell.seed, "bootstrap")
        )
    except Diverged as error:
        trained = None
        facts.status, facts.error = "diverged", str(error)
    finally:
        method.close()
    facts.traffic = [(*route, nbytes) for route, nbytes in federation.channel.traffic.items()]
    facts.releases = list(federation.channel.releases())
    facts.seconds = time.perf_counter() - began
    return trained, facts


def advance(
    cell: Cell,
    phase: str,
    method: Method,
    federation: Federation,
    *,
    store: Store | None,
    afresh: bool = False,
    progress: Progress = lambda *_: None,
) -> StageFacts:
    """Bring ``federation`` to the end of a stage, from the store where it is there; return the stage's facts.

    A killed stage goes on after its last finished global iteration.

    Raises:
        Diverged: now, or when it was run.
    """
    folder = store.cell(cell.stage_key(phase)) if store else None
    stored = folder.read() if folder else None
    if folder and stored and not afresh:
        assert isinstance(stored, StageFacts)
        if stored.status == "diverged":
            raise Diverged(stored.error or "")
        load_states(federation, folder.path)
        federation.channel.traffic.update({Route(a, b, c, Kind(kind)): n for a, b, c, kind, n in stored.traffic})
        federation.channel.earlier += stored.releases
        return stored
    federation.checkpoint = Checkpoint(folder.partial if folder and not afresh else None)
    began, before = time.perf_counter(), Counter(federation.channel.traffic)
    facts = StageFacts(stage=phase)
    try:
        facts.history = method.run(phase, federation, progress)
        facts.spread = spreads(method, federation)
    except Diverged as error:
        facts.status, facts.error = "diverged", str(error)
        raise
    finally:
        if folder and not stored and (facts.history or facts.error):
            facts.traffic = [(*route, n) for route, n in (federation.channel.traffic - before).items()]
            facts.releases = [found for found in federation.channel.releases() if found.phase == phase]
            facts.seconds = time.perf_counter() - began
            folder.write(facts, lambda path: save_states(federation, path, method.stored_modules))
            federation.checkpoint.remove()
    return facts


def spreads(method: Method, federation: Federation) -> dict[str, float]:
    """Return, by party, how far its embeddings of test rows lie apart: 0 where it says the same of everybody.

    Rows are scaled to length one; the root mean square distance to their mean is 1 at most. SimSiam (section 4.1)
    watches the same quantity for collapse.
    """
    found = {}
    for party in federation.parties.values() if method.visible_to else ():
        with torch.no_grad():
            h = F.normalize(method.representation(party).eval()(party.features["test"]), dim=1)
        found[party.name] = float((h - h.mean(dim=0)).square().sum(dim=1).mean().sqrt())
    return found


def collapse(spread: Mapping[str, float | None]) -> str | None:
    """Return the error if a party's representation has collapsed."""
    fallen = [name for name, value in spread.items() if not (value or 0.0) > COLLAPSED_SPREAD]
    if not fallen:
        return None
    return f"the representation of {', '.join(fallen)} is the same for every test row"
