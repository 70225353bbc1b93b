"""The suite runs over all registered attacks on recordings, and each check catches an attack that is broken its way."""

import msgspec
import numpy as np
import pytest
import torch

from vflsec.base.errors import VflsecError
from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.recording import Header, Recording, RecordingWriter
from vflsec.cipher.roles.exchange import ROLES
from vflsec.core import registry
from vflsec.core.view import Fact, Guess, Need
from vflsec.inference.recordings.samples import RecordingAttack, get_recording, guess_of_samples
from vflsec.testing.conformance import RecordingConformance
from vflsec.testing.recordings import EncryptedRun, LinearRun


def recorded(folder, notes, messages=()):
    """Recordings of both roles: by step and role, notes, and messages that the active party sends."""
    paths = [folder / f"{role}.recording" for role in ROLES]
    for role, path in enumerate(paths):
        header = Header(
            role=ROLES[role], layout=CipherLayout(width=2, batch=64), n=(1 << 1023 | 1).to_bytes(128, "little")
        )
        with RecordingWriter(path, header) as writer:
            for number, (rate, *by_role) in enumerate(notes):
                writer.begin(number, rate=rate)
                for message in messages:
                    writer.message("sent" if role else "received", message)
                for name, array in by_role[role].items():
                    writer.note(name, array)
    return tuple(map(Recording, paths))


X, Y, ROWS = np.random.default_rng(0).integers(0, 2, (64, 2)).astype(float), np.arange(64) % 2, np.arange(64)


def chosen_weights(_, folder):
    """The active party's share moves by a unit vector between passes of the same samples."""
    shares = [np.array([[(number == 1) << 64], [(number == 2) << 64]], dtype=object) for number in range(3)]
    steps = [
        (None, {"rows": ROWS, "mu": X}, {"rows": ROWS, "scores": X @ (s / 2**64).astype(float), "share": s})
        for s in shares
    ]
    return recorded(folder, steps)


def shifted_scores(_, folder):
    """The passive party has shifted the scores of both steps."""
    gradient = (1.0 - Y)[:, None] * [[1.0, 2.0]]
    steps = [
        (0.1, {"rows": ROWS + 64 * t, "embedding_gradient": gradient}, {"rows": ROWS + 64 * t, "labels": Y})
        for t in range(2)
    ]
    return recorded(folder, steps)


def score_decoding(_, folder):
    """Binary features, and weights that stay as they are."""
    steps = [(None, {"rows": ROWS, "mu": X}, {"rows": ROWS, "scores": X @ [[1.0], [2.5]]}) for _ in range(2)]
    return recorded(folder, steps)


class Exponents(msgspec.Struct, tag=True):
    exponents: list[int]


def wire_exponents(_, folder):
    """Exponents in clear, larger for class 1."""
    steps = [(0.1, {"rows": ROWS, "mu": X}, {"rows": ROWS, "labels": Y}) for _ in range(2)]
    return recorded(folder, steps, [Exponents((5 * Y).tolist())])


def encrypted(_, folder):
    return EncryptedRun(run=LinearRun(steps=3, width=2, batch=24), inference=2).record(folder)


RECORDINGS = {  # of attacks that read messages, or a role that deviates
    "chosen-weights": chosen_weights,
    "low-bits": encrypted,
    "score-decoding": score_decoding,
    "shifted-scores": shifted_scores,
    "small-masks": encrypted,
    "wire": encrypted,
    "wire-exponents": wire_exponents,
}

for _name in sorted(registry.list_all("attacks")):
    if Need.RECORDING in registry.load("attacks", _name).needs:
        _body = {"make": lambda self, name=_name: registry.build("attacks", name)}
        _body |= {"record": RECORDINGS[_name]} if _name in RECORDINGS else {}
        globals()[f"TestRecordingConformance_{_name}"] = type(
            f"TestRecordingConformance_{_name}", (RecordingConformance,), _body
        )


class Sound(RecordingAttack):
    """Says of each sample how long its delta^C is."""

    name = "sound"
    reference = verified = "made for a test"

    def run(self, view, *, rng):
        lengths = {}
        for step in get_recording(view).steps():
            each = np.linalg.norm(step.notes["embedding_gradient"], axis=1).tolist()
            lengths |= dict(zip(step.notes["rows"].tolist(), each, strict=True))
        scores = torch.tensor(list(lengths.values()))
        return guess_of_samples(view, np.array(list(lengths)), torch.stack([-scores, scores], dim=1), "lengths")


class GloballyRandom(Sound):
    def run(self, view, *, rng):
        note = f"{np.random.random()}"  # noqa: NPY002  (what the suite is to notice)
        return Guess(facts=(Fact("labels", "share", 0.5, 1),), notes=(note,))


class Prying(Sound):
    def run(self, view, *, rng):
        other = Recording(get_recording(view).path.with_name("active.recording"))
        labels = {}
        for step in other.steps():
            labels |= dict(zip(step.notes["rows"].tolist(), step.notes["labels"].tolist(), strict=True))
        ones = torch.tensor(list(labels.values()), dtype=torch.float64)
        return guess_of_samples(view, np.array(list(labels)), torch.stack([1 - ones, ones], dim=1), "labels")


class Forgiving(Sound):
    def run(self, view, *, rng):
        try:
            return super().run(view, rng=rng)
        except VflsecError:
            return Guess(facts=(Fact("labels", "share", 0.5, 1),))


def suite(attack):
    return type("Conformance", (RecordingConformance,), {"make": lambda self: attack()})()


CHECKS = [name for name in dir(RecordingConformance) if name.startswith("test_")]


@pytest.mark.parametrize("check", CHECKS)
def test_a_sound_attack_passes(check):
    getattr(suite(Sound), check)()


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (GloballyRandom, "test_equal_seeds_give_equal_guesses"),
        (GloballyRandom, "test_leaves_no_trace"),
        (Prying, "test_reads_only_what_its_party_has"),
        (Forgiving, "test_refuses_damaged_rows"),
    ],
)
def test_each_check_catches_what_it_is_for(broken, check):
    with pytest.raises((AssertionError, VflsecError)):
        getattr(suite(broken), check)()
