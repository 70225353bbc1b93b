"""Trains one cell, from stored stages if there are any; status, utility and traffic are its facts.

Shadow federations are trained as a cell is, on other halves of the candidates, for attacks on membership. What they say
of the candidates is stored beside the cell, so that an interrupted run resumes and other attacks on the cell use the
same shadows. Their models are not kept.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.nn import functional as F

from vflsec.base.errors import Diverged, NotStackable, VflsecError
from vflsec.base.seeds import derive
from vflsec.base.sparse_rows import to_matrix
from vflsec.core.attack import list_integrity
from vflsec.core.federation import Checkpoint, Federation
from vflsec.core.message import Kind, Route, Transcript
from vflsec.core.method import Method, Progress, Trained
from vflsec.core.party import Party
from vflsec.core.view import Shadows
from vflsec.data.checkup import score_quickly
from vflsec.data.encode import join_columns
from vflsec.methods.checkpoint import load_states, save_states
from vflsec.methods.together import join, separate
from vflsec.run.cell import Cell, Technique, digest
from vflsec.run.federation import MEMBER, Candidates, build_federation, build_method, get_partition, query_model
from vflsec.run.score import measure
from vflsec.run.store import CellFacts, StageFacts, Store

COLLAPSED = 1e-6
"""A model whose log-probabilities vary by less than this over the test rows has collapsed."""

SECONDS_BETWEEN_CHECKPOINTS = 1.0
"""Of the last phase, whose epochs may be shorter than a write to the disk."""

MEMORY = 2 * 2**30
"""Bytes of the columns of cells that train together."""

COLLAPSED_SPREAD = 0.01
"""Embeddings whose spread, at most 1, is not above this have collapsed."""


@contextmanager
def limit_threads() -> Iterator[None]:
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
    began = time.process_time()
    run = _Run(cell, device, store=store, tap=tap, with_source=with_source, record=record)
    try:
        run.begin(progress)
        phase, started = run.train_last_phase(), time.process_time()
        run.history[phase] = run.method.run(phase, run.federation, progress)
        run.facts.phase_seconds[phase] = time.process_time() - started
        run.measure()
    except Diverged as error:
        run.facts.status, run.facts.error = "diverged", str(error)
    except VflsecError:
        raise
    except Exception:
        run.federation.checkpoint.remove()  # after a fix, the training starts again without what the error left there
        raise
    finally:
        run.method.close()
    return run.finish(time.process_time() - began)


def train_together(cells: Sequence[Cell], device: str, *, store: Store) -> list[tuple[Trained | None, CellFacts]]:
    """Train cells that differ in seed and defenses as one; each result is what ``train`` returns.

    Their stages, which others share, are loaded or run first, one after the other.

    Raises:
        NotStackable: they cannot train as one, with the reason. Whatever else one of them raises, it raises by itself.
    """
    began = time.process_time()
    each = _train_stacked(cells, device, store)
    for run in each:
        try:
            run.measure()
        except Diverged as error:
            run.facts.status, run.facts.error = "diverged", str(error)
    share = (time.process_time() - began) / len(each)
    return [run.finish(share) for run in each]


def train_in_turn(cells: Sequence[Cell], device: str) -> Iterator[Trained | None]:
    """Train cells that differ in their seeds, and yield each, or None if it diverged; nothing is measured or stored.

    They train as one, as many at once as memory allows, or one after the other where their method does not allow it.
    """
    most = limit_stack(cells[0], device)
    for some in (cells[start : start + most] for start in range(0, len(cells), most)):
        try:
            if not is_stackable(some[0].method):
                raise NotStackable(f"{some[0].method.name} may keep what belongs to one run")
            runs = _train_stacked(some, device)
        except Exception:  # noqa: BLE001  (what fails as one may succeed alone, or fails again)
            yield from (_train_alone(cell, device) for cell in some)
        else:
            yield from (Trained(run.method, run.federation, run.history) for run in runs)


def _train_alone(cell: Cell, device: str) -> Trained | None:
    run = _Run(cell, device)
    try:
        run.begin()
        phase = run.train_last_phase()
        run.history[phase] = run.method.run(phase, run.federation)
    except Diverged:
        return None
    finally:
        run.method.close()
    return Trained(run.method, run.federation, run.history)


def is_stackable(method: Technique) -> bool:
    """Whether cells of a method may train as one; a plug-in may keep what belongs to one run."""
    return method.built_in and method.kind.together is not Method.together


def limit_stack(cell: Cell, device: str) -> int:
    """Return how many cells like this one may train as one at most; they are held twice, by run and as one."""
    nbytes = sum(x.nbytes for party in build_federation(cell, device).all_parties for x in party.features.values())
    return max(1, MEMORY // (2 * nbytes + 1))


def _train_stacked(cells: Sequence[Cell], device: str, store: Store | None = None) -> list[_Run]:
    """Return the trainings of cells after they were run as one."""
    each = [_Run(cell, device, store=store) for cell in cells]
    for run in each:
        run.begin()
    joined = join([run.federation for run in each])
    first = each[0].method
    phase, started = first.phases[-1], time.process_time()
    losses = np.array(first.together(joined).run(phase, joined))  # (epochs, R)
    separate(joined, [run.federation for run in each])
    seconds = time.process_time() - started
    for number, run in enumerate(each):
        run.history[phase] = losses[:, number].tolist()
        run.facts.phase_seconds[phase] = seconds / len(each)
    return each


class _Run:
    """One training, from the federation to its facts; its arguments are those of ``train``."""

    def __init__(
        self,
        cell: Cell,
        device: str,
        *,
        store: Store | None = None,
        tap: Transcript | None = None,
        with_source: bool = False,
        record: Path | None = None,
    ) -> None:
        self.cell, self.store, self.tap, self.record = cell, store, tap, record
        self.federation, self.method = build_federation(cell, device), build_method(cell)
        self.unrecorded = frozenset() if with_source else self.method.source_phases
        if tap:
            self.federation.channel.taps.append(lambda m: None if m.phase in self.unrecorded else tap(m))
        self.facts = CellFacts()
        self.trained: Trained | None = None
        self.history: dict[str, Sequence[float | None]] = {}

    def begin(self, progress: Progress = lambda *_: None) -> None:
        """Build the models, and load or run all phases but the last."""
        self.method.build(self.federation)
        self.facts.notes = self.method.notes(self.federation)
        if self.record:
            self.method.record(self.record)
        for phase in self.cell.stages:
            afresh = self._is_recorded(phase) and phase not in self.unrecorded
            stage = advance(
                self.cell, phase, self.method, self.federation, store=self.store, afresh=afresh, progress=progress
            )
            self.history[phase], self.facts.spread[phase] = stage.history, stage.spread
            self.facts.phase_seconds[phase] = stage.seconds

    def train_last_phase(self) -> str:
        """Return the last phase, which starts from where it was interrupted."""
        phase = self.method.phases[-1]
        partial = self.store.cell(self.cell.key).partial if self.store and not self._is_recorded(phase) else None
        self.federation.checkpoint = Checkpoint(partial, every=SECONDS_BETWEEN_CHECKPOINTS)
        return phase

    def measure(self) -> None:
        """Add history, utility and spreads to the facts."""
        self.trained = Trained(self.method, self.federation, self.history)
        self.facts.history, self.facts.reached = self.history, self.federation.reached
        _measure(self.trained, self.facts, derive(self.cell.seed, "bootstrap"))

    def finish(self, seconds: float) -> tuple[Trained | None, CellFacts]:
        """Return the trained federation, None if it diverged, and the facts."""
        self.facts.traffic = [(*route, nbytes) for route, nbytes in self.federation.channel.traffic.items()]
        self.facts.releases = list(self.federation.channel.releases())
        self.facts.seconds = seconds
        return (None if self.facts.status == "diverged" else self.trained), self.facts

    def _is_recorded(self, phase: str) -> bool:
        return bool(self.tap and self.tap.kinds & self.method.messages[phase])


def _measure(trained: Trained, facts: CellFacts, seed: int) -> None:
    """Add the utility and the spreads of a trained federation to its facts, and the status if it has collapsed."""
    method, federation = trained.method, trained.federation
    logits = trained.predict("test")
    spread = facts.spread[method.phases[-1]] = measure_spreads(method, federation)
    malicious = list_integrity(federation.malicious)
    collapsed = collapse({name: value for name, value in spread.items() if name not in malicious})
    if float(F.log_softmax(logits, dim=1).std(dim=0).max()) < COLLAPSED:
        remedy = method.remedy(federation)
        collapsed = "the model predicts the same for every test row" + (f": {remedy}" if remedy else "")
    if collapsed:
        facts.status, facts.error = "collapsed", collapsed
    labels, groups = federation.active.labels["test"], federation.groups.get("test")
    facts.utility = measure(logits, labels, federation.metric, seed, groups=groups)


def score_columns(federation: Federation, parties: Sequence[Party]) -> float | None:
    """Return the utility of a quick model of the columns of ``parties``, or None if they are too few rows."""
    active = federation.active
    train, test = (
        join_columns([to_matrix(party.features[split].flatten(1)) for party in parties]) for split in ("train", "test")
    )
    labels, answers = (active.labels[split].cpu().numpy() for split in ("train", "test"))
    classes = federation.n_classes
    utility = score_quickly(train, labels, test, answers, n_classes=classes, metric=federation.metric)
    return None if math.isnan(utility) else utility


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
    began, before = time.process_time(), Counter(federation.channel.traffic)
    facts = StageFacts(stage=phase)
    try:
        facts.history = method.run(phase, federation, progress)
        facts.spread = measure_spreads(method, federation)
    except Diverged as error:
        facts.status, facts.error = "diverged", str(error)
        raise
    finally:
        facts.seconds = time.process_time() - began
        if folder and not stored and (facts.history or facts.error):
            facts.traffic = [(*route, n) for route, n in (federation.channel.traffic - before).items()]
            facts.releases = [release for release in federation.channel.releases() if release.phase == phase]
            folder.write(facts, lambda path: save_states(federation, path, method.stored_modules))
            federation.checkpoint.remove()
    return facts


def measure_spreads(method: Method, federation: Federation) -> dict[str, float]:
    """Return, by party with columns, the spread of its embeddings of test rows; it is 0 if they are all the same.

    Rows are scaled to unit length; the spread is their root mean square distance to their mean, which is 1 at most.
    SimSiam (section 4.1) uses the same quantity to detect collapse.
    """
    by_party = {}
    for party in federation.parties.values() if method.receives and method.embeds else ():
        features = party.features["test"]
        if features.shape[1] == 1 and (features == features[0]).all():  # a party with nothing but labels
            continue
        with torch.no_grad():
            h = F.normalize(method.representation(party).eval()(party.features["test"]), dim=1)
        by_party[party.name] = float((h - h.mean(dim=0)).square().sum(dim=1).mean().sqrt())
    return by_party


def collapse(spread: Mapping[str, float | None]) -> str | None:
    """Return the error if a party's representation has collapsed."""
    collapsed = [name for name, value in spread.items() if not (value or 0.0) > COLLAPSED_SPREAD]
    return None if not collapsed else f"the representation of {', '.join(collapsed)} is the same for every test row"


SHADOWS_VERSION = 1
"""Raised whenever shadows of the same cell become others."""

SHADOWS_TOGETHER = 16
"""Shadows that are trained, and stored, together."""


def split_shadows(count: int) -> list[range]:
    """Return the numbers of the first ``count`` shadows in batches."""
    return [range(first, min(first + SHADOWS_TOGETHER, count)) for first in range(0, count, SHADOWS_TOGETHER)]


def make_batch_key(cell: Cell, batch: range) -> str:
    """Return the key of a batch of shadows of ``cell``."""
    return digest(["shadows", SHADOWS_VERSION, cell.key, batch.start, batch.stop])


def get_shadows(cell: Cell, count: int, device: str, store: Store | None = None) -> Shadows:
    """Return what the first ``count`` shadows of ``cell`` say of its candidates; those that diverged are left out.

    Args:
        cell: of the attacked federation.
        count: of shadows, an even number.
        device: on which they are trained, and which their logits are on.
        store: of shadows that were trained before; those that are not there are trained now.

    Raises:
        Diverged: all have.
    """
    parts = [train_shadows(cell, batch, device, store) for batch in split_shadows(count)]
    logits, members = (torch.cat(of_batches).to(device) for of_batches in zip(*parts, strict=True))
    finite = logits.isfinite().all(dim=(1, 2))
    if not finite.any():
        raise Diverged(f"all {count} shadow federations diverged: choose other settings, or leave the attack out")
    return Shadows(logits[finite], members[finite])


def get_seconds(cell: Cell, count: int, store: Store) -> float:
    """Return how long the first ``count`` shadows of ``cell``, which are stored, were trained."""
    stages = (store.cell(make_batch_key(cell, batch)).read() for batch in split_shadows(count))
    return sum(facts.seconds for facts in stages if facts)


def train_shadows(cell: Cell, batch: range, device: str, store: Store | None = None) -> Shadows:
    """Return what the shadows with numbers ``batch`` say; they are trained and stored unless they are there."""
    folder = store.cell(make_batch_key(cell, batch)) if store else None
    if folder is None or not folder.read():
        began, shadows = time.process_time(), _train_shadows(cell, batch, device)
        if folder is None:
            return shadows
        facts = StageFacts(stage=f"shadows {batch.start + 1} to {batch.stop}", seconds=time.process_time() - began)
        folder.write(facts, lambda path: _save(shadows, path))
    stored = load_file(folder.path / "shadows.safetensors")
    return Shadows(stored["logits"], stored["members"])


def _train_shadows(cell: Cell, batch: range, device: str) -> Shadows:
    data = get_partition(cell)
    rows = {split: len(data.ids[split]) for split in MEMBER}
    target = Candidates.draw(cell.seed, rows["train"], rows["test"])
    is_member = {split: torch.full((rows[split],), bool(member)) for split, member in MEMBER.items()}
    logits: list[Tensor] = []
    members: list[Tensor] = []
    cells = [msgspec.structs.replace(cell, shadow=number) for number in batch]
    for number, trained in zip(batch, train_in_turn(cells, device), strict=True):
        candidates = target.deal(number)
        members.append(candidates.gather(is_member))
        logits.append(
            candidates.gather(query_model(trained)).float().cpu()
            if trained
            else torch.full((len(members[-1]), len(data.classes)), torch.nan)
        )
    return Shadows(torch.stack(logits), torch.stack(members))


def _save(shadows: Shadows, folder: Path) -> None:
    folder.mkdir(parents=True)
    save_file(shadows._asdict(), folder / "shadows.safetensors")
