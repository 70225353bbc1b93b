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
import numpy as np
from safetensors.numpy import save

from vflsec.core.errors import Diverged, PeerLost, PeerRefused, ProtocolError, StoreError, UsageError, VflsecError
from vflsec.secure.arithmetic.keys import Keys
from vflsec.secure.remote.active_side import ActiveSide
from vflsec.secure.remote.hello import Hello, agree
from vflsec.secure.remote.job import Job
from vflsec.secure.remote.link import Link
from vflsec.secure.remote.messages import FIRST, KINDS, Done, limits
from vflsec.secure.remote.own import Own
from vflsec.secure.remote.passive_side import PassiveSide, key_from, key_numbers
from vflsec.secure.remote.snapshots import Facts, Journal, Snapshots
from vflsec.secure.remote.wire import Connection, plain
from vflsec.secure.roles.messages import EncryptedDelta, MaskedScores, NoisedGradient
from vflsec.secure.transcripts.recording import Header, Recorder, expect_writable

RESULT = "result.json"
NOTHING = sha256().hexdigest()
"""The history of a party p that has not met its peer yet."""
LONGEST_PAUSE = 10.0
"""Seconds between two attempts to reach the peer, at most."""
WIDTHS = {"paillier.feature_bits", "paillier.weight_bits", "paillier.delta_bits"}
"""Settings that both parties may change together in mid-run, where numbers have grown: no state depends on them."""
FAREWELL = 10.0
"""Seconds that a party p with its predictions waits for C's last word."""
REPEATS = 3
"""How often a party answers one batch again, unless it is told otherwise; in all, as often for every third batch."""
SECURE_BITS = 2048
"""Bits of the smallest key that is not warned of: about 112 bits of security."""

M = TypeVar("M", bound=msgspec.Struct)


class PartyResult(msgspec.Struct, frozen=True, kw_only=True):
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
        files: SHA-256 of each file beside this one, by its name.
        digest: SHA-256 of all this, by which damage is noticed.
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
    files: dict[str, str] = {}
    digest: str = ""

    def sealed(self) -> PartyResult:
        """Return it with its digest."""
        content = msgspec.json.encode(msgspec.structs.replace(self, digest=""))
        return msgspec.structs.replace(self, digest=sha256(content).hexdigest())


class Talk:
    """One batch on the wire, and in the recording if there is one.

    Args:
        wire: the connection.
        step: number of the batch.
        recorder: of what we see by right, or None.
        answer: called with the number of the batch when C is asked for scores, and before p's delta^C leaves; returns
            how often the batch has been answered, this time included, or refuses.
    """

    def __init__(
        self,
        wire: Connection,
        step: int,
        recorder: Recorder | None,
        answer: Callable[[int], int] = lambda step: 1,
    ) -> None:
        self._wire, self._step, self._recorder, self._answer = wire, step, recorder, answer

    def send(self, message: msgspec.Struct) -> None:
        """Send ``message``."""
        if isinstance(message, EncryptedDelta):
            self._answer(self._step)
        if self._recorder:
            self._recorder.message("sent", message)
        self._wire.send(message, self._step)

    def receive(self, expected: type[M]) -> M:
        """Return the next message, an ``expected`` one."""
        message = self._wire.receive(expected, self._step)
        if self._recorder:
            self._recorder.message("received", message)
        if isinstance(message, MaskedScores):  # even a refusal tells p something, once they are decrypted
            self.note("answers", np.array([self._answer(self._step)]))
        return message

    def note(self, name: str, values: object) -> None:
        """Record an array."""
        if self._recorder:
            self._recorder.note(name, values)


def make_side(
    role: str, own: Own, job: Job, snapshots: Snapshots, *, seed: int | None = None, workers: int = 0, **options: Any
) -> PassiveSide | ActiveSide:
    """Return the side of ``role``; C's has the key of the run that ``snapshots`` keeps, or a new one.

    Args:
        role: ``C`` or ``p``.
        own: its rows.
        job: the agreement.
        snapshots: what is kept of the run.
        seed: of its own first weights; None draws one.
        workers: processes that prepare randomizers.
        options: of the side; for tests.
    """
    if role == "p":
        return ActiveSide(own, job, seed=seed, workers=workers, **options)
    cipher = job.paillier
    keys = key_from(snapshots.load_key(), cipher.mode) if snapshots.kept() else Keys.generate(cipher.bits, cipher.mode)
    return PassiveSide(own, job, keys, seed=seed, workers=workers, **options)


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
        repeats: how often we answer one batch again: C with scores, p with delta^C. Each answer tells a peer that
            deviates from the protocol something new; an honest one needs another only where a connection breaks.

    Raises:
        StoreError: what is kept is of another role, job or set of rows.
    """

    def __init__(
        self,
        side: PassiveSide | ActiveSide,
        link: Link,
        snapshots: Snapshots,
        *,
        timeout: float = 60.0,
        patience: float = 300.0,
        tell: Callable[[str], object] = lambda line: None,
        progress: Callable[[int, int], object] = lambda done, total: None,
        begin: Callable[[int], object] = lambda step: None,
        record: Path | None = None,
        repeats: int = REPEATS,
    ) -> None:
        self.side = side
        self.link = link
        self.snapshots = snapshots
        self.timeout, self.patience = timeout, patience
        self.tell, self.progress, self.begin = tell, progress, begin
        self.batches = len(side.schedule)
        self.record = record
        self.repeats = repeats
        tested = sum(1 for _ in side.test_batches())  # all of which are asked for again after a break among them
        self.repeats_in_all = repeats * (max(20, self.batches // 3) + tested)
        self._sent = self._received = 0
        kept = self._kept()
        self._journal = snapshots.load_journal() if kept else Journal()
        self._resumed = 0
        self.history = {step: facts.history for step, facts in kept.items()}
        self._at = max(self.history, default=0)
        self.run = next((facts.run for facts in kept.values()), "")
        self.result = self._result()
        self._heard_farewell = self.result is not None and not kept
        self._finished_before = self.result is not None
        self._left = False
        self._furthest = 0
        if not self.history:
            self.history = {0: NOTHING}
            self.run = secrets.token_hex(16) if side.role == "C" else ""
        self._deadline = 0.0
        self._pause = 0.1

    def finish(self) -> PartyResult:
        """Run until both sides are done; return what we know then.

        Raises:
            PeerLost: the peer has vanished; the line says how to go on.
            PeerRefused: it is another than agreed, or refuses us.
            ProtocolError: it says what it must not.
        """
        if self.record:
            expect_writable(self.record)
        if (bits := self.side.job.paillier.bits) < SECURE_BITS and not self._parted():
            self.tell(f"a key of {bits} bits protects nothing that matters: take bits = {SECURE_BITS} or more")
        for step in self.snapshots.damaged:
            self.tell(f"the state after batch {step} is damaged; going on from one that is not, if both parties can")
        self._alive()
        while not (self._parted() or self._left):
            try:
                with closing(self._connect()) as wire:
                    self._talk(wire)
            except PeerLost as error:
                self._lost(error)
        if self._parted() or self._finished_before:  # else C may have been killed, and need us once more
            self.snapshots.clear()
        assert self.result, "who has parted has a result"
        return self.result

    def _parted(self) -> bool:
        """Whether the peer needs us no more; C's result is what it keeps last, p has still to say that it has one."""
        return self.result is not None and (self.side.role == "C" or self._heard_farewell)

    def _lost(self, error: PeerLost) -> None:
        """Wait a little before the next attempt, or give up."""
        if time.monotonic() < self._deadline:
            self.tell(f"{error}; trying again{self._answers()}")
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

    def _answer(self, step: int) -> int:
        """Note on the disk that batch ``step`` is answered, before the answer leaves; return how often it has been.

        Raises:
            PeerRefused: it has been answered too often.
        """
        journal = self._journal
        if step >= journal.answered:
            journal.answered = step + 1
        else:
            again, in_all = journal.repeats.get(step, 0) + 1, sum(journal.repeats.values()) + 1
            if again > self.repeats or in_all > self.repeats_in_all:
                raise PeerRefused(
                    f"batch {step} is not answered again: it was answered {again} times, and there were {in_all - 1} "
                    f"repeats of all batches (limits: {self.repeats} repeats of one, {self.repeats_in_all} of all); "
                    f"if the network is to blame, start {self.side.role} with more --repeats"
                )
            journal.repeats[step] = again
        self.snapshots.save_journal(journal)
        return self._times(step)

    def _times(self, step: int) -> int:
        """Return how often batch ``step`` has been answered."""
        return (step < self._journal.answered) + self._journal.repeats.get(step, 0)

    def _begin(self, recorder: Recorder | None, step: int, rate: float | None) -> None:
        """Start batch ``step``; record what C has answered of it and of later ones, which p has read all the same."""
        self._at = step
        self.begin(step)
        if recorder is None:
            return
        recorder.begin(step, rate=rate)
        if self.side.role == "C" and (before := self._times(step)):
            recorder.note("answers", np.array([before]))
            beyond = [
                (self.side.samples(later), self._times(later)) for later in range(step + 1, self._journal.answered)
            ]
            if beyond:
                counts = [np.column_stack([rows, np.full(len(rows), times)]) for rows, times in beyond]
                recorder.note("answers_beyond", np.concatenate(counts))

    def _answers(self) -> str:
        """Say how often the batch that was under way has been answered."""
        if not self._journal.answered:
            return ""
        repeats, step = self._journal.repeats, self._at
        again = repeats.get(step, 0)
        return (
            f" (answers to batch {step}: {self._times(step)}; repeats: {again} of {self.repeats}"
            f", and {sum(repeats.values())} of {self.repeats_in_all} in all)"
        )

    def _doubt(self, *, at_once: bool) -> None:
        """Set the newest state aside if it has failed before, or ``at_once``; and further ones if that does not help.

        An error of our own can come from our settings as well, which may be mended before the next start.
        """
        journal, newest = self._journal, max(self.history)
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
        return Connection(self.link.open(left), KINDS, FIRST, self.timeout, self.link.superseded)

    def _talk(self, wire: Connection) -> None:
        """Greet, train what is left, predict, part; tell the peer if it is us who cannot go on."""
        met = False
        with ExitStack() as stack:
            try:
                step, predicted = self._greet(wire)
                done = step + sum(1 for _ in self.side.test_batches()) if predicted else step
                recorder = stack.enter_context(self._recording(done)) if self.record else None
                met = True
                self._train(wire, step, recorder)
                if not predicted:
                    self._predict(wire, recorder)
                self._part(wire)
            except (PeerRefused, ProtocolError) as error:
                wire.refuse(str(error))
                raise type(error)(plain(str(error))) from None  # it may quote the peer
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
        """Return after which batch both go on, with our side in its state of then, and whether p has predicted."""
        ours, side = self._hello(), self.side
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

    def _hello(self) -> Hello:
        side = self.side
        return Hello(
            role=side.role,
            settings=side.job.settings,
            counts={split: len(ids) for split, ids in side.own.ids.items()},
            rows=side.own.digest,
            run=self.run,
            history=self.history,
            predicted=self.result is not None,
            lost=bool(self.snapshots.damaged) or self._journal.failed >= max(self.history),
            layout=msgspec.to_builtins(side.agreed) if isinstance(side, PassiveSide) else {},
            key=side.public if isinstance(side, PassiveSide) else None,
        )

    def _resume(self, step: int, run: str) -> None:
        """Go back to ``step``, or begin the run."""
        self._resumed = self._at = step
        if self.run != run or self.history == {0: NOTHING}:
            assert step == 0, "a party that joins a run has no batch"
            self.run, self.history = run, {}
            if isinstance(self.side, PassiveSide):
                self.snapshots.save_key(key_numbers(self.side.keys))
            self.snapshots.save_journal(self._journal)
            self._keep(0, sha256(run.encode()).hexdigest())
            return
        if step < max(self.history) - 1:
            self.tell(f"going back from batch {max(self.history)} to batch {step}, the last one that both parties have")
        self.side.load(self.snapshots.load(step))
        self.history = {at: digest for at, digest in self.history.items() if at <= step}
        self.snapshots.forget_after(step)
        self.snapshots.damaged = []

    def _train(self, wire: Connection, start: int, recorder: Recorder | None) -> None:
        for step in range(start, self.batches):

            def commit(message: NoisedGradient, step: int = step) -> None:
                digest = sha256(bytes.fromhex(self.history[step]) + msgspec.msgpack.encode(message))
                self._keep(step + 1, digest.hexdigest())

            batch = self.side.schedule[step]
            self._begin(recorder, step, batch.rate)
            self.side.learn(Talk(wire, step, recorder, self._answer), batch, commit)
            self._advance(step + 1)
            self.progress(step + 1, self.batches)

    def _predict(self, wire: Connection, recorder: Recorder | None) -> None:
        for number, rows in enumerate(self.side.test_batches(), start=self.batches):
            self._begin(recorder, number, None)
            self.side.infer(Talk(wire, number, recorder, self._answer), rows)
            self._advance(number + 1)
        if isinstance(self.side, ActiveSide):
            self._settle(wire)

    def _part(self, wire: Connection) -> None:
        """Let p say that it has its predictions, and C that it has heard so."""
        if isinstance(self.side, ActiveSide):
            self._alive()
            wire.send(Done())
            wire.receive(Done)
            self._heard_farewell = True
        else:
            wire.receive(Done)
            self._settle(wire)
            wire.send(Done())

    def _settle(self, wire: Connection) -> None:
        """Write what we take home: the models, p's predictions, and last the result that says that all is there."""
        side, files = self.side, self.snapshots
        content = {f"{side.role}.safetensors": save(side.models())}
        if isinstance(side, ActiveSide):
            content["predictions.csv"] = side.predictions()
        self.result = PartyResult(
            role=side.role,
            run=self.run,
            batches=self.batches,
            history=self.history[self.batches],
            settings=side.job.settings,
            rows=side.own.digest,
            utility=side.utility() if isinstance(side, ActiveSide) else {},
            sent=self._sent + wire.sent,
            received=self._received + wire.received,
            files={name: sha256(written).hexdigest() for name, written in content.items()},
        ).sealed()
        for name, written in content.items():
            files.write(name, written)
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
        kept = self.snapshots.save(facts, side.state(), epoch=side.schedule.per_epoch)
        self.history = {at: known for at, known in [*self.history.items(), (step, digest)] if at in kept}

    def _kept(self) -> dict[int, Facts]:
        """Return our kept states.

        Raises:
            StoreError: they are of another role, job or set of rows.
        """
        found = self.snapshots.kept()
        for facts in found.values():
            self._expect_own(facts)
        return found

    def _expect_own(self, found: Facts | PartyResult) -> None:
        ours = {"role": self.side.role, "rows": self.side.own.digest, **self.side.job.settings}
        theirs = {"role": found.role, "rows": found.rows, **found.settings}
        for name in sorted({*ours, *theirs} - WIDTHS):
            if ours.get(name) != theirs.get(name):
                raise StoreError(
                    f"expected a run of this job in {self.snapshots.folder}, got {name} = {theirs.get(name)} there "
                    f"and {ours.get(name)} now: choose another --out, or go back to that job"
                )

    def _result(self) -> PartyResult | None:
        """Return the result of a run that has come to its end, or None."""
        path, found = self.snapshots.folder / RESULT, self.snapshots.read(RESULT)
        if found is None:
            return None
        try:
            result = msgspec.json.decode(found, type=PartyResult)
        except ValueError as error:  # a DecodeError, or text that is not in UTF-8
            raise StoreError(
                f"expected a result in {path}, got {error}: restore a copy, or choose another --out"
            ) from None
        if result.sealed() != result:
            raise StoreError(
                f"expected {path} as it was written, got other numbers: restore a copy, or choose another --out"
            )
        for name, digest in result.files.items():
            content = self.snapshots.read(name)  # a file that was moved elsewhere is no damage
            if content is not None and sha256(content).hexdigest() != digest:
                raise StoreError(
                    f"expected {path.with_name(name)} as it was written, got another: restore a copy, or move it away"
                )
        self._expect_own(result)
        return result

    def _recording(self, step: int) -> Recorder:
        """Return the recording, from ``step`` on; what was recorded of batches that did not count will be cut off."""
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
