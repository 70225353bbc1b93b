"""One run between two parties, over as many connections as it takes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from safetensors.numpy import save

from vflsec.core.errors import PeerLost, PeerRefused, ProtocolError, StoreError, VflsecError
from vflsec.paillier.keys import Keys
from vflsec.paillier.messages import NoisedGradient
from vflsec.paillier.recording import Header, Recorder
from vflsec.remote.feature_side import FeatureSide, key_from
from vflsec.remote.hello import Hello, agree
from vflsec.remote.job import Job
from vflsec.remote.label_side import LabelSide
from vflsec.remote.link import Link
from vflsec.remote.messages import FIRST, KINDS, Done, limits
from vflsec.remote.own import Own
from vflsec.remote.snapshots import Facts, Snapshots
from vflsec.remote.wire import Wire

RESULT = "result.json"
NOTHING = sha256().hexdigest()
"""The history of a party p that has not met its peer yet."""
LONGEST_PAUSE = 10.0
"""Seconds between two attempts to reach the peer, at most."""
WIDTHS = {"paillier.feature_bits", "paillier.weight_bits", "paillier.delta_bits"}
"""Settings that both parties may change together in mid-run, where numbers have grown: no state depends on them."""
FAREWELL = 10.0
"""Seconds that a party p with its predictions waits for C's last word."""

M = TypeVar("M", bound=msgspec.Struct)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a party knows at the end; of utility, C knows nothing.

    Attributes:
        role: who.
        run: which run.
        batches: how many were trained.
        history: digest over them, equal at both parties.
        settings: the job.
        rows: digest of the row ids.
        utility: metrics of test rows by name, the headline first; p's alone.
        sent: bytes sent by the process that ended the run.
        received: likewise.
    """

    role: str
    run: str
    batches: int
    history: str
    settings: dict[str, str]
    rows: str
    utility: dict[str, float] = {}
    sent: int = 0
    received: int = 0


class Talk:
    """One batch on the wire, and in the recording if there is one.

    Args:
        wire: the connection.
        step: number of the batch.
        recorder: of what we see by right, or None.
    """

    def __init__(self, wire: Wire, step: int, recorder: Recorder | None) -> None:
        self._wire, self._step, self._recorder = wire, step, recorder

    def send(self, message: msgspec.Struct) -> None:
        """Send ``message``."""
        if self._recorder:
            self._recorder.message("sent", message)
        self._wire.send(message, self._step)

    def receive(self, expected: type[M]) -> M:
        """Return the next message, an ``expected`` one."""
        message = self._wire.receive(expected, self._step)
        if self._recorder:
            self._recorder.message("received", message)
        return message

    def note(self, name: str, values: object) -> None:
        """Record an array."""
        if self._recorder:
            self._recorder.note(name, values)


def make_side(
    role: str, own: Own, job: Job, snapshots: Snapshots, *, seed: int | None = None, workers: int = 0, **options: Any
) -> FeatureSide | LabelSide:
    """Return the side of ``role``; C's has the key of the run that ``snapshots`` keeps, or a new one.

    Args:
        role: ``C`` or ``p``.
        own: its rows.
        job: the agreement.
        snapshots: what is kept of the run.
        seed: of its own first weights; None draws one.
        workers: processes that prepare randomisers.
        options: of the side; for tests.
    """
    if role == "p":
        return LabelSide(own, job, seed=seed, workers=workers, **options)
    kept = max(snapshots.kept(), default=None)
    cipher = job.paillier
    keys = Keys.generate(cipher.bits, cipher.mode) if kept is None else key_from(snapshots.load(kept), cipher.mode)
    return FeatureSide(own, job, keys, seed=seed, workers=workers, **options)


class Session:
    """Trains and predicts with the peer, and goes on where both stopped whenever the connection or a process breaks.

    Args:
        side: our part.
        link: the way to the peer.
        snapshots: where our state is kept.
        timeout: seconds that any single message may take.
        patience: seconds without a finished batch after which the peer counts as gone.
        tell: called with a line about each thing that a person should know.
        progress: called with the batches done, and with all of them.
        begin: called with the number of each batch before it starts; for tests.
        record: the file that gets all that we see by right, or None.

    Raises:
        StoreError: what is kept is of another role, job or set of rows.
    """

    def __init__(
        self,
        side: FeatureSide | LabelSide,
        link: Link,
        snapshots: Snapshots,
        *,
        timeout: float = 60.0,
        patience: float = 300.0,
        tell: Callable[[str], object] = lambda line: None,
        progress: Callable[[int, int], object] = lambda done, total: None,
        begin: Callable[[int], object] = lambda step: None,
        record: Path | None = None,
    ) -> None:
        self.side = side
        self.link = link
        self.snapshots = snapshots
        self.timeout, self.patience = timeout, patience
        self.tell, self.progress, self.begin = tell, progress, begin
        self.batches = len(side.schedule)
        self.record = record
        self._sent = self._received = 0
        kept = self._kept()
        self.history = {step: facts.history for step, facts in kept.items()}
        self.run = next((facts.run for facts in kept.values()), "")
        self.result = self._result()
        self._heard_farewell = self.result is not None and not kept
        self._furthest = 0
        if not self.history:
            self.history = {0: NOTHING}
            self.run = secrets.token_hex(16) if side.role == "C" else ""
        self._deadline = 0.0
        self._pause = 0.1

    def finish(self) -> Result:
        """Run until both sides are done; return what we know then.

        Raises:
            PeerLost: the peer has vanished; the line says how to go on.
            PeerRefused: it is another than agreed, or refuses us.
            ProtocolError: it says what it must not.
        """
        self._alive()
        while not self._parted():
            try:
                with closing(self._connect()) as wire:
                    self._talk(wire)
            except PeerLost as error:
                self._lost(error)
        self.snapshots.clear()
        assert self.result, "who has parted has a result"
        return self.result

    def _parted(self) -> bool:
        """Whether the peer needs us no more; C's result is what it keeps last, p has still to say that it has one."""
        return self.result is not None and (self.side.role == "C" or self._heard_farewell)

    def _lost(self, error: PeerLost) -> None:
        """Wait a little before the next attempt, or give up."""
        if time.monotonic() < self._deadline:
            self.tell(f"{error}; trying again")
            time.sleep(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        elif self.result:
            self.tell(f"the other party has left without a word ({error}); nothing is missing here")
            self._heard_farewell = True
        else:
            raise PeerLost(
                f"{error}; given up after {self.patience:g} s. All {max(self.history)} of {self.batches} batches "
                f"that are done are kept in {self.snapshots.folder}: run the same command again to go on"
            ) from error

    def _connect(self) -> Wire:
        left = max(self._deadline - time.monotonic(), 0.1)
        return Wire(self.link.open(left), KINDS, FIRST, self.timeout, self.link.superseded)

    def _talk(self, wire: Wire) -> None:
        """Greet, train what is left, predict, part; tell the peer if it is us who cannot go on."""
        with ExitStack() as stack:
            try:
                step, predicted = self._greet(wire)
                recorder = stack.enter_context(self._recording(step)) if self.record else None
                self._train(wire, step, recorder)
                if not predicted:
                    self._predict(wire, recorder)
                self._part(wire)
            except (PeerRefused, ProtocolError) as error:
                wire.refuse(str(error))
                raise
            except PeerLost:
                raise
            except VflsecError:
                wire.refuse("it has stopped with an error of its own")  # which may speak of its data
                raise
            finally:
                self._sent, self._received = self._sent + wire.sent, self._received + wire.received

    def _greet(self, wire: Wire) -> tuple[int, bool]:
        """Return after which batch both go on, with our side in its state of then, and whether p has predicted."""
        side = self.side
        ours = Hello(
            role=side.role,
            settings=side.job.settings,
            counts={split: len(ids) for split, ids in side.own.ids.items()},
            rows=side.own.digest,
            run=self.run,
            history=self.history,
            predicted=self.result is not None,
            layout=msgspec.to_builtins(side.agreed) if isinstance(side, FeatureSide) else {},
            key=side.public if isinstance(side, FeatureSide) else None,
        )
        if self.link.speaks_first:  # who dials listens first, so that it hears why it is turned away
            wire.send(ours)
            theirs = wire.receive(Hello)
        else:
            theirs = wire.receive(Hello)
            wire.send(ours)
        step = agree(ours, theirs)
        layout = side.meet(theirs)
        wire.limits.update(limits(layout))
        self._layout, self._key = layout, theirs.key or ours.key
        self._resume(step, theirs.run if side.role == "p" else self.run)
        return step, (ours if side.role == "p" else theirs).predicted

    def _resume(self, step: int, run: str) -> None:
        """Go back to ``step``, or begin the run."""
        if self.run != run or self.history == {0: NOTHING}:
            assert step == 0, "a party that joins a run has no batch"
            self.run, self.history = run, {}
            self._keep(0, sha256(run.encode()).hexdigest())
            return
        self.history = {at: digest for at, digest in self.history.items() if at <= step}
        self.snapshots.forget_after(step)
        self.side.load(self.snapshots.load(step))

    def _train(self, wire: Wire, start: int, recorder: Recorder | None) -> None:
        for step in range(start, self.batches):
            self.begin(step)

            def commit(message: NoisedGradient, step: int = step) -> None:
                digest = sha256(bytes.fromhex(self.history[step]) + msgspec.msgpack.encode(message))
                self._keep(step + 1, digest.hexdigest())

            batch = self.side.schedule[step]
            if recorder:
                recorder.begin(step, rate=batch.rate)
            self.side.learn(Talk(wire, step, recorder), batch, commit)
            self._advance(step + 1)
            self.progress(step + 1, self.batches)

    def _predict(self, wire: Wire, recorder: Recorder | None) -> None:
        for number, rows in enumerate(self.side.test_batches(), start=self.batches):
            self.begin(number)
            if recorder:
                recorder.begin(number, rate=None)
            self.side.infer(Talk(wire, number, recorder), rows)
            self._advance(number + 1)
        if isinstance(self.side, LabelSide):
            self._settle(wire)

    def _part(self, wire: Wire) -> None:
        """Let p say that it has its predictions, and C that it has heard so."""
        if isinstance(self.side, LabelSide):
            self._alive()
            wire.send(Done())
            wire.receive(Done)
            self._heard_farewell = True
        else:
            wire.receive(Done)
            self._settle(wire)
            wire.send(Done())

    def _settle(self, wire: Wire) -> None:
        """Write what we take home: the models, p's predictions, and last the result that says that all is there."""
        side, files = self.side, self.snapshots
        self.result = Result(
            role=side.role,
            run=self.run,
            batches=self.batches,
            history=self.history[self.batches],
            settings=side.job.settings,
            rows=side.own.digest,
            utility=side.utility() if isinstance(side, LabelSide) else {},
            sent=self._sent + wire.sent,
            received=self._received + wire.received,
        )
        files.write(f"{side.role}.safetensors", save(side.models()))
        if isinstance(side, LabelSide):
            files.write("predictions.csv", side.predictions())
        files.write(RESULT, msgspec.json.format(msgspec.json.encode(self.result)))

    def _keep(self, step: int, digest: str) -> None:
        side = self.side
        facts = Facts(
            role=side.role,
            run=self.run,
            step=step,
            history=digest,
            settings=side.job.settings,
            rows=side.own.digest,
        )
        self.snapshots.save(facts, side.state())
        self.history[step] = digest
        self.history = dict(sorted(self.history.items())[-2:])

    def _kept(self) -> dict[int, Facts]:
        """Return our kept states.

        Raises:
            StoreError: they are of another role, job or set of rows.
        """
        found = self.snapshots.kept()
        for facts in found.values():
            self._expect_own(facts)
        return found

    def _expect_own(self, found: Facts | Result) -> None:
        ours = {"role": self.side.role, "rows": self.side.own.digest, **self.side.job.settings}
        theirs = {"role": found.role, "rows": found.rows, **found.settings}
        for name in sorted({*ours, *theirs} - WIDTHS):
            if ours.get(name) != theirs.get(name):
                raise StoreError(
                    f"expected a run of this job in {self.snapshots.folder}, got {name} = {theirs.get(name)} there "
                    f"and {ours.get(name)} now: choose another --out, or go back to that job"
                )

    def _result(self) -> Result | None:
        """Return the result of a run that has come to its end, or None."""
        found = self.snapshots.read(RESULT)
        if found is None:
            return None
        try:
            result = msgspec.json.decode(found, type=Result)
        except msgspec.DecodeError as error:
            raise StoreError(f"expected a result in {self.snapshots.folder / RESULT}, got {error}: remove it") from None
        self._expect_own(result)
        return result

    def _recording(self, step: int) -> Recorder:
        """Return the recording, from ``step`` on; what was recorded of a batch that did not count is cut off."""
        assert self.record is not None, "nothing is to be recorded"
        train = self.side.job.train
        header = Header(
            role=self.side.role,
            layout=self._layout,
            n=self._key.n if self._key else b"",
            momentum=train.momentum,
            weight_decay=train.weight_decay,
        )
        return Recorder.resume(self.record, header, step) if self.record.exists() else Recorder(self.record, header)

    def _advance(self, done: int) -> None:
        """Be patient anew after what was never done before: a peer that has us repeat a batch gets no more time."""
        if done > self._furthest:
            self._furthest = done
            self._alive()

    def _alive(self) -> None:
        self._deadline = time.monotonic() + (min(self.patience, FAREWELL) if self.result else self.patience)
        self._pause = 0.1
