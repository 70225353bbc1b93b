"""Conformance of attacks on recordings; see ``vflsec.testing.conformance`` for how to use it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from vflsec.audit.recordings import open_recording
from vflsec.base.errors import DataError, InsufficientView
from vflsec.cipher.recording import NOTES, Note, Recording, RecordingWriter
from vflsec.cipher.roles.exchange import ROLES
from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need
from vflsec.run.questions import Question
from vflsec.run.spec import AuxSpec
from vflsec.testing.recordings import LinearRun
from vflsec.testing.suite import Suite, are_same, expect_refusal, list_changed
from vflsec.testing.suite_attack import copy_all


class RecordingConformance(Suite):
    """Checks of one attack on recordings of an encrypted layer.

    Class attributes:
        aux: of how many samples the adversary knows the answer.
        side: of the adversary, for an attack that either side can mount.
    """

    aux: ClassVar[int] = 8
    side: ClassVar[str] = "passive"
    _contents: ClassVar[Sequence[bytes]] = ()

    def make(self) -> Attack:
        """Return the attack."""
        raise NotImplementedError

    def record(self, folder: Path) -> tuple[Recording, Recording]:
        """Return the recordings of the passive and the active party, from which the attack infers something.

        By default without messages, as a linear layer in clear would have made them.
        """
        return LinearRun(rows=72, steps=12, width=3, batch=24, rounding=2.0**-51).record(folder)

    def test_refuses_a_poor_view(self) -> None:
        """The recording that is missing is named, and so is the wrong role."""
        attack = self.make()
        with self._get_scene() as (question, _):
            with expect_refusal(InsufficientView, naming=Need.RECORDING.name):
                attack(replace(question.view, recording=None), seed=0)
            if attack.side != "either":
                other = "active" if attack.side == "passive" else "passive"
                with expect_refusal(InsufficientView, naming=other):
                    attack(replace(question.view, side=other), seed=0)

    def test_equal_seeds_give_equal_guesses(self) -> None:
        """Bit for bit, also where the same recording is opened anew, so that nothing is remembered of the first."""
        attack = self.make()
        with self._get_scene() as (question, path):
            first, again = (attack(replace(question.view, recording=Recording(path)), seed=0) for _ in range(2))
        assert _are_equal(first, again), f"{attack!r} is not reproducible"

    def test_leaves_no_trace(self) -> None:
        """The view, the recording and all global generators stay as they were."""
        with self._get_scene() as (question, path):
            before, content = copy_all(question.view), path.read_bytes()
            self.make()(question.view, seed=0)
            traces = list_changed(before, copy_all(question.view))
            assert not traces, f"the attack changed {', '.join(traces)}"
            assert path.read_bytes() == content, "the attack changed the recording"

    def test_reads_only_what_its_party_has(self) -> None:
        """The guess is the same where the other role's recording is not there and the answers are others."""
        attack = self.make()
        with self._get_scene() as (question, path):
            beside = attack(replace(question.view, recording=Recording(path)), seed=0)
            for answers in question.truth.labels.values():
                answers.neg_().add_(1)
            with tempfile.TemporaryDirectory() as folder:
                alone = Path(folder) / path.name
                alone.write_bytes(path.read_bytes())
                for other in path.parent.iterdir():
                    other.unlink()
                apart = attack(replace(question.view, recording=Recording(alone)), seed=0)
        assert _are_equal(beside, apart), "the guess follows what the adversary cannot see"

    def test_refuses_damaged_rows(self) -> None:
        """Rows that a note lacks, numbers that are not finite and changed bytes end in an error, not in a guess."""
        attack = self.make()
        with self._get_scene() as (question, path):
            for damage, named in (("missing", "other notes"), ("not finite", "finite"), ("bytes", "checksum")):
                damaged = path.with_name("damaged.recording")
                _damage(path, damaged, damage)
                with expect_refusal(DataError, naming=named):
                    attack(replace(question.view, recording=Recording(damaged)), seed=0)
                damaged.unlink()

    @contextmanager
    def _get_scene(self) -> Iterator[tuple[Question, Path]]:
        """Give the question to the attack's role, and its recording beside that of the other role; recorded once."""
        attack, cls = self.make(), type(self)
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / f"{role}.recording" for role in ROLES]
            if not cls._contents:
                with tempfile.TemporaryDirectory() as made:
                    cls._contents = [recording.path.read_bytes() for recording in self.record(Path(made))]
            for path, content in zip(paths, cls._contents, strict=True):
                path.write_bytes(content)
            side = self.side if attack.side == "either" else attack.side
            path, other = paths[::-1] if side == "active" else paths
            audit = open_recording(path, other, aux=AuxSpec(n=self.aux))
            yield audit.build_question(attack, audit.joint(0)), path


def _are_equal(a: Guess, b: Guess) -> bool:
    """Whether two guesses are equal bit for bit, with their rows, facts and notes."""
    tensors = all(
        first.keys() == second.keys() and all(are_same(value, second[split]) for split, value in first.items())
        for first, second in ((a.scores, b.scores), (a.rows, b.rows))
    )
    return tensors and (a.facts, a.notes, a.untested) == (b.facts, b.notes, b.untested)


def _damage(path: Path, damaged: Path, damage: str) -> None:
    """Write the recording at ``path`` with damage in its second step."""
    if damage == "bytes":
        content = bytearray(path.read_bytes())
        content[len(content) // 8] ^= 1
        damaged.write_bytes(content)
        return
    recording = Recording(path)
    with RecordingWriter(damaged, recording.header) as writer:
        for step in recording.steps():
            writer.begin(step.number, rate=step.rate)
            for message in step.messages:
                writer._write(message)
            spoiled = [name for name in step.notes if NOTES[name][0] == "B"][-1] if step.number == 1 else None
            for name, array in step.notes.items():
                if name != spoiled:
                    writer.note(name, array)
                elif damage == "missing":
                    writer.note(name, array[:-1])
                else:
                    writer._write(Note(name, "<f8", array.shape, np.full(array.shape, np.nan).tobytes()))
