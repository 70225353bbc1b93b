"""One run between two parties, over as many connections as it takes."""

import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from safetensors.numpy import save

from vflsec.base.errors import Diverged, PeerLost, PeerRefused, ProtocolError, StoreError, UsageError, VflsecError
from vflsec.cipher.arithmetic.keys import Keys
from vflsec.cipher.recording import Direction, RecordingWriter, expect_writable
from vflsec.cipher.roles.exchange import EncryptedDelta, MaskedScores, RoleName
from vflsec.companies.active_side import ActiveSide, measure_utility, tabulate_predictions
from vflsec.companies.job import JobFile
from vflsec.companies.link import Link
from vflsec.companies.messages import FIRST, KINDS, Done, Hello, MaskedSums, NoisedSums, SealedResiduals, agree
from vflsec.companies.party_rows import PartyRows
from vflsec.companies.passive_side import PassiveSide, restore_keys
from vflsec.companies.sealed_sides import SealedActiveSide, SealedPassiveSide
from vflsec.companies.side import Side
from vflsec.companies.snapshots import AnswerLimits, Facts, Journal, PartyResult, Snapshots, read_result, write_result
from vflsec.companies.wire import Connection, clean

NOTHING = sha256().hexdigest()
"""The history of an active party that has not met its peer yet."""
LONGEST_PAUSE = 10.0
"""Seconds between two attempts to reach the peer, at most."""
WIDTHS = {"paillier.feature_bits", "paillier.weight_bits", "paillier.delta_bits"}
"""Settings that both parties may change together during a run, where numbers have grown: no state depends on them."""
FAREWELL = 10.0
"""Seconds that an active party with its predictions waits for the passive party's last message."""
M = TypeVar("M", bound=msgspec.Struct)
SECURE_BITS = 2048
"""Bits of the smallest key that needs no warning: about 112 bits of security."""


Active = ActiveSide | SealedActiveSide


def make_side(
    role: RoleName, data: PartyRows, job: JobFile, snapshots: Snapshots, **options: Any
) -> PassiveSide | SealedPassiveSide | Active:
    """Return the side of ``role``; the passive one has the key of the run in ``snapshots``, or a new one.

    Args:
        role: ``passive`` or ``active``.
        data: its columns of the common rows.
        job: the agreement.
        snapshots: what is kept of the run.
        options: of the side.
    """
    if job.sealed:
        return (SealedActiveSide if role == "active" else SealedPassiveSide)(data, job, **options)
    if role == "active":
        return ActiveSide(data, job, **options)
    bits, mode = job.paillier.bits, job.paillier.mode
    keys = restore_keys(snapshots.load_key(), mode) if snapshots.list_checkpoints() else Keys.generate(bits, mode)
    return PassiveSide(data, job, keys, **options)


class BatchPort:
    """A party's port in one batch.

    Args:
        wire: the connection.
        step: number of the batch.
        recorder: of this party's messages and notes, or None.
        answer: called with the number of the batch when the passive party receives a request for scores, and before
            the active party sends delta^C or noised sums; returns how often the batch has been answered, or refuses.
        keep: writes this party's state before the batch again.
    """

    def __init__(
        self,
        wire: Connection,
        step: int,
        recorder: RecordingWriter | None,
        answer: Callable[[int], int] = lambda step: 1,
        keep: Callable[[], object] = lambda: None,
    ) -> None:
        self._wire, self._step, self._recorder, self._answer, self._keep = wire, step, recorder, answer, keep

    def keep(self) -> None:
        """Write this party's state before the batch again."""
        self._keep()

    def send(self, message: msgspec.Struct) -> None:
        """Send ``message``."""
        if isinstance(message, EncryptedDelta | NoisedSums):
            self._answer(self._step)
        self._record("sent", message)
        self._wire.send(message, self._step)

    def receive(self, expected: type[M]) -> M:
        """Return the next message, which must be an ``expected`` one."""
        message = self._wire.receive(expected, self._step)
        self._record("received", message)
        if isinstance(message, MaskedScores):  # once they are decrypted, even a refusal gives information
            self.note("answers", np.array([self._answer(self._step)]))
        return message

    def note(self, name: str, values: object) -> None:
        """Record an array."""
        if self._recorder:
            self._recorder.note(name, values)

    def _record(self, direction: Direction, message: msgspec.Struct) -> None:
        """Record a message, but for the large ciphertexts whose content the key's owner notes."""
        if self._recorder and not isinstance(message, SealedResiduals | MaskedSums):
            self._recorder.message(direction, message)


class Session:
    """Trains and predicts with the peer, and resumes whenever the connection or a process breaks.

    Args:
        side: this party's part.
        link: the way to the peer.
        snapshots: where the state is kept.
        timeout: seconds that a single message may take.
        patience: seconds without a finished batch after which the peer counts as gone.
        tell: called with each message for the user.
        progress: called with the number of batches done, and of all batches.
        begin: called with the number of each batch before it starts; for tests.
        record: the file in which this party's view is recorded, or None.
        repeats: how often a batch is answered again, by the passive party with scores and by the active party with
            delta^C or noised sums; None for the side's own. Each answer gives a dishonest peer new information; an
            honest one asks again only after a broken connection.

    Raises:
        StoreError: the kept state belongs to another role, job or set of rows.
    """

    def __init__(
        self,
        side: Side,
        link: Link,
        snapshots: Snapshots,
        *,
        timeout: float = 60.0,
        patience: float = 300.0,
        tell: Callable[[str], object] = lambda line: None,
        progress: Callable[[int, int], object] = lambda done, total: None,
        begin: Callable[[int], object] = lambda step: None,
        record: Path | None = None,
        repeats: int | None = None,
    ) -> None:
        self.side = side
        self.link = link
        self.snapshots = snapshots
        self.timeout, self.patience = timeout, patience
        self.tell, self.progress, self.begin = tell, progress, begin
        self.batches = len(side.schedule)
        self.record = record
        self._sent = self._received = 0
        kept = snapshots.list_checkpoints(side.schedule.per_epoch)
        for facts in kept.values():
            self._expect_same_job(facts)
        tested = len(side.later)  # all of which are asked for again after a break among them
        repeats = side.repeats if repeats is None else repeats
        in_all = repeats * (max(20, self.batches // 3) + tested)
        journal = snapshots.load_journal() if kept else Journal()
        self.answers = AnswerLimits(side.role, journal, snapshots, each=repeats, in_all=in_all, cost=side.cost)
        self._ahead = False
        self._resumed = 0
        self.history = {step: facts.history for step, facts in kept.items()}
        self._at = max(self.history, default=0)
        self.run = next((facts.run for facts in kept.values()), "")
        self.result = read_result(snapshots)
        if self.result:
            self._expect_same_job(self.result)
        self._peer_done = self.result is not None and not kept
        self._finished_before = self.result is not None
        self._left = False
        self._furthest = 0
        if not self.history:
            self.history = {0: NOTHING}
            self.run = secrets.token_hex(16) if side.role == "passive" else ""
        self._deadline = 0.0
        self._pause = 0.1

    def finish(self) -> PartyResult:
        """Run until both sides are done; return the result.

        Raises:
            PeerLost: the peer has vanished; the message says how to resume.
            PeerRefused: the peer is another than agreed, or refuses to go on.
            ProtocolError: the peer sent what the protocol does not allow.
        """
        if self.record:
            expect_writable(self.record)
        job = self.side.job
        if not job.sealed and (bits := job.paillier.bits) < SECURE_BITS and not self._is_over():
            self.tell(f"a key of {bits} bits protects nothing that matters: take bits = {SECURE_BITS} or more")
        for step in self.snapshots.damaged:
            self.tell(f"the state after batch {step} is damaged; going on from one that is not, if both parties can")
        self._is_alive()
        while not (self._is_over() or self._left):
            try:
                with closing(self._connect()) as wire:
                    self._talk(wire)
            except PeerLost as error:
                self._back_off(error)
        if self._is_over() or self._finished_before:  # else the passive party may have been killed, and may come back
            self.snapshots.clear()
        assert self.result, "who has parted has a result"
        return self.result

    def _is_over(self) -> bool:
        """Whether the peer is done as well: the passive party writes its result last, and confirms it."""
        return self.result is not None and (self.side.role == "passive" or self._peer_done)

    def _back_off(self, error: PeerLost) -> None:
        """Wait a little before the next attempt, or give up."""
        if time.monotonic() < self._deadline:
            self.tell(f"{error}; trying again{self.answers.text(self._at)}")
            time.sleep(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        elif self.result:
            self.tell(f"the other party has left without a word ({error}); nothing is missing here")
            self._left = True
        else:
            raise PeerLost(
                f"{error}; given up after {self.patience:g} s without progress. {max(self.history)} of {self.batches} "
                f"batches are done, and kept in {self.snapshots.folder}: run the same command again to go on"
            ) from error

    def _begin(self, recorder: RecordingWriter | None, step: int, rate: float | None) -> None:
        """Start batch ``step``.

        The passive party records how often it has answered this batch and later ones: the active party knows those
        answers although the batches are done again.
        """
        self._at = step
        self.begin(step)
        if recorder is None:
            return
        recorder.begin(step, rate=rate)
        recorder.note("rows", self.side.samples(step))
        if self.side.role == "passive" and (before := self.answers.times(step)):
            recorder.note("answers", np.array([before]))
            later = range(step + 1, self.answers.journal.answered)
            beyond = [(row, self.answers.times(at)) for at in later for row in self.side.samples(at)]
            if beyond:
                recorder.note("answers_beyond", np.array(beyond))

    def _doubt(self, *, at_once: bool) -> None:
        """Drop the newest state if it has failed before, or ``at_once``; and earlier ones if that does not help.

        This party's own settings can be the cause of the error as well, and may be corrected before the next start.
        """
        journal, newest = self.answers.journal, max(self.history)
        again = newest <= journal.failed
        last = min(self._resumed, newest) if again else newest
        journal.failed = max(journal.failed, newest)
        self.snapshots.save_journal(journal)
        older = [step for step in self.history if step < last]
        if older and (again or at_once):
            self.snapshots.forget_after(max(older))
            self.tell(
                f"the state after batch {newest} is set aside, for the next batch fails in it; started again, both "
                f"parties go on from the one after batch {max(older)}"
            )

    def _connect(self) -> Connection:
        left = max(self._deadline - time.monotonic(), 0.1)
        return Connection(self.link.open(left), KINDS, FIRST, self.timeout, self.link.is_superseded)

    def _talk(self, wire: Connection) -> None:
        """Exchange greetings, train what is left, predict and part; on an error of this party, tell the peer."""
        met = False
        with ExitStack() as stack:
            try:
                step, predicted = self._greet(wire)
                done = step + len(self.side.later) if predicted else step + self._is_settled()
                recorder = stack.enter_context(self._open_recording(done)) if self.record else None
                met = True
                self._train(wire, step, recorder)
                if not predicted:
                    self._predict(wire, recorder)
                self._part(wire)
            except (PeerRefused, ProtocolError) as error:
                wire.refuse(str(error))
                raise type(error)(clean(str(error))) from None  # it may quote the peer
            except PeerLost:
                raise
            except VflsecError as error:
                wire.refuse("it has stopped with an error of its own")  # which may speak of its data
                if met and isinstance(error, UsageError | Diverged):
                    self._doubt(at_once=isinstance(error, Diverged))
                raise
            finally:
                self._sent, self._received = self._sent + wire.sent, self._received + wire.received

    def _greet(self, wire: Connection) -> tuple[int, bool]:
        """Go to the last common state; return its number of batches, and whether the active party has predicted."""
        ours, side = self._make_hello(), self.side
        if self.link.speaks_first:  # the dialer reads first, so that it learns why it is turned away
            wire.send(ours)
            theirs = wire.receive(Hello)
        else:
            theirs = wire.receive(Hello)
            wire.send(ours)
        step = agree(ours, theirs)
        wire.limits.update(side.meet(theirs))
        self._ahead = side.resends and step + 1 in (ours if side.role == "active" else theirs).history
        side.exchange_keys(BatchPort(wire, 0, None))
        self._resume(step, theirs.run if side.role == "active" else self.run)
        return step, (ours if side.role == "active" else theirs).predicted

    def _make_hello(self) -> Hello:
        side = self.side
        return Hello(
            role=side.role,
            settings=side.job.settings,
            counts={split: len(ids) for split, ids in side.data.ids.items()},
            rows=side.data.digest,
            run=self.run,
            history=self.history,
            predicted=self.result is not None,
            lost=bool(self.snapshots.damaged) or self.answers.journal.failed >= max(self.history),
            **side.introduce(),
        )

    def _resume(self, step: int, run: str) -> None:
        """Go back to ``step``, or begin the run."""
        self._resumed = self._at = step
        if self.run != run or self.history == {0: NOTHING}:
            assert step == 0, "a party that joins a run has no batch"
            self.run, self.history = run, {}
            self.side.save_keys(self.snapshots)
            self.snapshots.save_journal(self.answers.journal)
            self._keep(0, sha256(run.encode()).hexdigest())
            return
        if step < max(self.history) - 1:
            self.tell(f"going back from batch {max(self.history)} to batch {step}, the last one that both parties have")
        step += self._is_settled()
        self.side.load(self.snapshots.load(step))
        self.history = {at: digest for at, digest in self.history.items() if at <= step}
        self.snapshots.forget_after(step)
        self.snapshots.damaged = []

    def _train(self, wire: Connection, start: int, recorder: RecordingWriter | None) -> None:
        for step in range(start, self.batches):

            def commit(message: msgspec.Struct, step: int = step) -> None:
                digest = sha256(bytes.fromhex(self.history[step]) + msgspec.msgpack.encode(message))
                self._keep(step + 1, digest.hexdigest())

            def keep(step: int = step) -> None:
                self._keep(step, self.history[step])

            batch = self.side.schedule[step]
            if self._ahead and step == start:
                recorded = None if self._is_settled() else recorder
                self._begin(recorded, step, batch.rate)
                self.side.resend(BatchPort(wire, step, recorded, self._count_once), batch, commit)
            else:
                self._begin(recorder, step, batch.rate)
                self.side.learn(BatchPort(wire, step, recorder, self.answers.count, keep), batch, commit)
            self._advance(step + 1)
            self.progress(step + 1, self.batches)

    def _is_settled(self) -> bool:
        """Whether this party has kept the batch whose last message is sent again."""
        return self._ahead and self.side.role == "active"

    def _count_once(self, step: int) -> int:
        """Count an answer unless it has been: one that is sent again is the same."""
        return self.answers.times(step) or self.answers.count(step)

    def _predict(self, wire: Connection, recorder: RecordingWriter | None) -> None:
        for number, (split, rows) in enumerate(self.side.later, start=self.batches):
            self._begin(recorder, number, None)
            self.side.infer(BatchPort(wire, number, recorder, self.answers.count), split, rows)
            self._advance(number + 1)
        if self.side.role == "active":
            self._settle(wire)

    def _part(self, wire: Connection) -> None:
        """Let the active party report that it has its predictions, and the passive party confirm that."""
        if self.side.role == "active":
            self._is_alive()
            wire.send(Done())
            wire.receive(Done)
            self._peer_done = True
        else:
            wire.receive(Done)
            self._settle(wire)
            wire.send(Done())

    def _settle(self, wire: Connection) -> None:
        """Write the models, the active party's predictions, and last the result."""
        side = self.side
        files = {f"{side.role}.safetensors": save(side.models())}
        logits = side.logits() if isinstance(side, Active) else None
        if logits is not None:
            files["predictions.csv"] = tabulate_predictions(side.data, logits)
        result = PartyResult(
            role=side.role,
            run=self.run,
            batches=self.batches,
            history=self.history[self.batches],
            settings=side.job.settings,
            rows=side.data.digest,
            utility={} if logits is None else measure_utility(side.data, logits),
            epsilon=side.measure_epsilon(self.answers.times) if isinstance(side, SealedActiveSide) else None,
            sent=self._sent + wire.sent,
            received=self._received + wire.received,
        )
        self.result = write_result(self.snapshots, result, files)

    def _keep(self, step: int, digest: str) -> None:
        side = self.side
        facts = Facts(
            role=side.role,
            run=self.run,
            step=step,
            history=digest,
            settings=side.job.settings,
            rows=side.data.digest,
        )
        kept = self.snapshots.save(facts, side.state(), epoch=side.schedule.per_epoch)
        self.history = {at: known for at, known in [*self.history.items(), (step, digest)] if at in kept}

    def _expect_same_job(self, kept: Facts | PartyResult) -> None:
        ours = {"role": self.side.role, "rows": self.side.data.digest, **self.side.job.settings}
        theirs = {"role": kept.role, "rows": kept.rows, **kept.settings}
        for name in sorted({*ours, *theirs} - WIDTHS):
            if ours.get(name) != theirs.get(name):
                raise StoreError(
                    f"expected a run of this job in {self.snapshots.folder}, got {name} = {theirs.get(name)} there "
                    f"and {ours.get(name)} now: choose another --out, or go back to that job"
                )

    def _open_recording(self, step: int) -> RecordingWriter:
        """Return the recording from ``step`` on, without the batches that are done again."""
        assert self.record is not None, "nothing is to be recorded"
        header = self.side.make_header(self.run)
        return (
            RecordingWriter.resume(self.record, header, step)
            if self.record.exists()
            else RecordingWriter(self.record, header)
        )

    def _advance(self, done: int) -> None:
        """Restart the patience after a batch that is done for the first time, and not after a repeated one."""
        if done > self._furthest:
            self._furthest = done
            self._is_alive()

    def _is_alive(self) -> None:
        self._deadline = time.monotonic() + (min(self.patience, FAREWELL) if self.result else self.patience)
        self._pause = 0.1
