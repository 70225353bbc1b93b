"""Trains one cell, from stored stages if there are any; status, utility and traffic are its facts."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits
from torch.nn import functional as F

from vflsec.core.checkpoint import Checkpoint
from vflsec.core.errors import Diverged, UsageError, VflsecError
from vflsec.core.federation import Federation, load_states, save_states
from vflsec.core.integrity import integrity_attacks
from vflsec.core.message import Kind, Route, Transcript
from vflsec.core.method import Method, Progress, Trained
from vflsec.core.metrics import METRICS
from vflsec.core.party import Party
from vflsec.core.seeds import derive
from vflsec.core.sparse_rows import matrix_of
from vflsec.data.encode import side_by_side
from vflsec.data.quick import quick_utility
from vflsec.experiment.cell import Cell
from vflsec.experiment.facts import CellFacts, StageFacts
from vflsec.experiment.federation import build_federation, build_method
from vflsec.experiment.score import measure
from vflsec.experiment.store import Store

COLLAPSED = 1e-6
"""A model whose log-probabilities vary by less than this over the test rows has collapsed."""

SECONDS_BETWEEN_CHECKPOINTS = 1.0
"""Of the last phase, whose epochs may be shorter than a write to the disk."""

COLLAPSED_SPREAD = 0.01
"""Embeddings whose spread, at most 1, is not above this have collapsed."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread in torch and linear algebra, so that records do not depend on cores or ``--jobs``."""
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
    with_source: bool = False,
) -> tuple[Trained | None, CellFacts]:
    """Train ``cell`` and return it with its facts; if it diverged, there is no model and no number.

    Args:
        cell: what to train.
        device: ``cpu`` or ``cuda``.
        progress: called with phase, epochs done, epochs in all.
        store: of stages, and of the state of an interrupted phase; without it all are run.
        tap: records the adversary's messages. They are never stored, so a phase that sends any is run as a whole.
        with_source: whether the adversary also records phases that are about the source's rows.
        record: a folder in which to record what both roles of each encrypted boundary see, for ``vflsec audit``.
    """
    began = time.perf_counter()
    federation, method = build_federation(cell, device), build_method(cell)
    unrecorded = frozenset() if with_source else method.source_phases
    if tap:
        federation.channel.taps.append(lambda message: None if message.phase in unrecorded else tap(message))
    facts, trained = CellFacts(), None
    try:
        method.build(federation)
        facts.notes = method.notes(federation)
        if record:
            method.record(record)
        history: dict[str, Sequence[float | None]] = {}
        for phase in cell.stages:
            recorded = bool(tap and tap.kinds & method.messages[phase] and phase not in unrecorded)
            stage = advance(cell, phase, method, federation, store=store, afresh=recorded, progress=progress)
            history[phase], facts.spread[phase] = stage.history, stage.spread
            facts.phase_seconds[phase] = stage.seconds
        last = method.phases[-1]
        recorded = bool(tap and tap.kinds & method.messages[last])
        partial = store.cell(cell.key).partial if store and not recorded else None
        federation.checkpoint = Checkpoint(partial, every=SECONDS_BETWEEN_CHECKPOINTS)
        started = time.perf_counter()
        history[last] = method.run(last, federation, progress)
        facts.phase_seconds[last] = time.perf_counter() - started
        trained = Trained(method, federation, history)
        facts.history, facts.reached = history, federation.reached
        _measure(trained, facts, derive(cell.seed, "bootstrap"))
    except Diverged as error:
        trained, facts.status, facts.error = None, "diverged", str(error)
    except VflsecError:
        raise
    except Exception:
        federation.checkpoint.remove()  # after a fix, the training starts again without what the error left there
        raise
    finally:
        method.close()
    facts.traffic = [(*route, nbytes) for route, nbytes in federation.channel.traffic.items()]
    facts.releases = list(federation.channel.releases())
    facts.seconds = time.perf_counter() - began
    return trained, facts


def _measure(trained: Trained, facts: CellFacts, seed: int) -> None:
    """Add the utility and the spreads of a trained federation to its facts, and the status if it has collapsed.

    Raises:
        Diverged: a prediction is not finite.
    """
    method, federation = trained.method, trained.federation
    logits = trained.predict("test")
    spread = facts.spread[method.phases[-1]] = spreads(method, federation)
    malicious = integrity_attacks(federation.malicious)
    collapsed = collapse({name: value for name, value in spread.items() if name not in malicious})
    if float(F.log_softmax(logits, dim=1).std(dim=0).max()) < COLLAPSED:
        collapsed = "the model predicts the same for every test row"
    if collapsed:
        facts.status, facts.error = "collapsed", collapsed
    labels, groups = federation.active.labels["test"], federation.groups.get("test")
    facts.utility = measure(logits, labels, federation.metric, seed, groups=groups)


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


def quick(federation: Federation, parties: Sequence[Party]) -> float | None:
    """Return the utility of a quick model of the columns of ``parties``, or None if they are too few rows."""
    active = federation.active
    train, test = (
        side_by_side([matrix_of(party.features[split].flatten(1)) for party in parties]) for split in ("train", "test")
    )
    labels, answers = (active.labels[split].cpu().numpy() for split in ("train", "test"))
    classes = federation.n_classes
    found = quick_utility(train, labels, test, answers, n_classes=classes, metric=federation.metric)
    return None if math.isnan(found) else found


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
    """Load a stage into ``federation``, or run it if it is not stored; return the stage's facts.

    A killed stage resumes after its last finished global iteration.

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
    federation.checkpoint = Checkpoint()
    until = cell.train.pretrain.until
    if store and folder and not afresh:
        at = folder if until is None else store.cell(cell.whole().stage_key(phase))
        federation.checkpoint = Checkpoint(at.partial, most=until, kept=until is not None)
    began, before = time.perf_counter(), Counter(federation.channel.traffic)
    facts = StageFacts(stage=phase)
    try:
        facts.history = method.run(phase, federation, progress)
        facts.spread = spreads(method, federation)
    except Diverged as error:
        facts.status, facts.error = "diverged", str(error)
        raise
    finally:
        facts.seconds = time.perf_counter() - began
        if folder and not stored and (facts.history or facts.error):
            facts.traffic = [(*route, n) for route, n in (federation.channel.traffic - before).items()]
            facts.releases = [release for release in federation.channel.releases() if release.phase == phase]
            folder.write(facts, lambda path: save_states(federation, path, method.stored_modules))
            federation.checkpoint.remove()
    return facts


def spreads(method: Method, federation: Federation) -> dict[str, float]:
    """Return, by party, the spread of its embeddings of test rows; it is 0 if they are all the same.

    Rows are scaled to unit length; the spread is their root mean square distance to their mean, which is 1 at most.
    SimSiam (section 4.1) uses the same quantity to detect collapse.
    """
    by_party = {}
    for party in federation.parties.values() if method.visible_to else ():
        with torch.no_grad():
            h = F.normalize(method.representation(party).eval()(party.features["test"]), dim=1)
        by_party[party.name] = float((h - h.mean(dim=0)).square().sum(dim=1).mean().sqrt())
    return by_party


def collapse(spread: Mapping[str, float | None]) -> str | None:
    """Return the error if a party's representation has collapsed."""
    collapsed = [name for name, value in spread.items() if not (value or 0.0) > COLLAPSED_SPREAD]
    if not collapsed:
        return None
    return f"the representation of {', '.join(collapsed)} is the same for every test row"
