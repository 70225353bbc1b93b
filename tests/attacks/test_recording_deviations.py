"""A6 and A7: what a role that deviates reads, and what the other can notice."""

import numpy as np
import pytest

from vflsec.attacks.chosen_weights import ChosenWeights
from vflsec.attacks.forward_passes import ForwardPasses
from vflsec.attacks.score_drift import ScoreDrift
from vflsec.attacks.shifted_scores import ShiftedScores
from vflsec.cipher.arithmetic.codec import cut, join
from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.recording import Header, Recording, RecordingWriter
from vflsec.cipher.roles.active import ActiveRole
from vflsec.cipher.roles.passive import PassiveRole
from vflsec.testing.recordings import EncryptedRun, LinearRun, attack_recording


def determined(c):
    """Return the share of directions that honest answers determine."""
    return attack_recording(ForwardPasses(), c)["leak"]["directions of features"].headline


class Prober(ActiveRole):
    """After each forward pass it adds a unit vector to the weights that it uses in the next."""

    asked = 0

    def scores(self, message):
        found = super().scores(message)
        if not self._packs:  # inference
            self._share[self.asked % self.layout.width] += 1 << 64
            self.asked += 1
        return found


@pytest.mark.parametrize(("passes", "least", "most"), [(5, 0.999999, 1.0), (3, 0.3, 0.7)])
def test_weights_of_its_choice_give_p_the_features(tmp_path, passes, least, most):
    run = EncryptedRun(run=LinearRun(steps=2, width=4, batch=8), inference=passes, active=Prober)
    c, p = run.record(tmp_path)
    leak = attack_recording(ChosenWeights(), p, c)["leak"]["train"]
    assert least < leak.headline <= most
    assert (leak.metric, leak.n) == ("r2", 8)


def test_an_honest_p_reads_nothing(tmp_path):
    c, p = EncryptedRun(run=LinearRun(steps=3, width=4, batch=8, same_batch=True), inference=3).record(tmp_path)
    finding = attack_recording(ChosenWeights(), p, c)
    assert finding["status"] == "unmeasured"
    assert finding["notes"] == [
        "p asked for the same samples again only under the same share; these notes show no deviation"
    ]


def test_a_p_that_asks_once_shows_no_deviation(tmp_path):
    _, p = EncryptedRun(run=LinearRun(steps=2, width=4, batch=8)).record(tmp_path)
    finding = attack_recording(ChosenWeights(), p)
    assert finding["status"] == "unmeasured"
    assert "p never asked" in finding["notes"][0]


@pytest.mark.parametrize("share0", [0.0, 0.3])
def test_the_bound_gives_no_credit_for_weights_that_all_samples_share(tmp_path, share0):
    c, _ = EncryptedRun(run=LinearRun(steps=2, width=4, batch=8), share0=share0).record(tmp_path)
    assert determined(c) == 1 / 4


@pytest.mark.parametrize("settings", [{"outputs": 5, "steps": 4}, {"outputs": 1, "steps": 14}])
def test_the_bound_is_of_the_worst_sample_and_counts_outputs(tmp_path, settings):
    c, _ = LinearRun(rows=40, batch=20, validation=10, width=8, columns=8, **settings).record(tmp_path)
    (note,) = attack_recording(ForwardPasses(), c)["notes"]
    passes = settings["steps"] // 2
    expected = min(1.0, settings["outputs"] * passes / 8)
    assert determined(c) == pytest.approx(expected)
    assert ("50 of 50 samples are fully exposed" if expected == 1 else "0 of 50 samples") in note


def test_the_bound_of_two_epochs_of_ten_outputs_is_above_a_half(tmp_path):
    c, _ = LinearRun(rows=200, batch=50, steps=8, outputs=10, width=16, columns=16).record(tmp_path)
    assert determined(c) > 0.5


def test_the_bound_grows_with_the_passes(tmp_path):
    for name, inference in (("few", 1), ("many", 9)):
        (tmp_path / name).mkdir()
        run = EncryptedRun(run=LinearRun(steps=1, width=4, batch=8), share0=0.3, inference=inference)
        bound = determined(run.record(tmp_path / name)[0])
        assert bound == {"few": 2 / 4, "many": 1.0}[name]


class Shifter(PassiveRole):
    """Adds 40 to all scores of one batch."""

    def scores(self, message, noise=None):
        honest = super().scores(message, noise)
        if self.turn != 12:
            return honest
        layout = self.layout
        units = 40 << layout.feature_precision + layout.weight_precision
        values = cut(honest.values, 8, len(honest.values) // 8, "scores")
        shifted = join([(value + units) % (1 << layout.ring) for value in values], 8)
        return type(honest)(agreement=honest.agreement, turn=honest.turn, values=shifted)


@pytest.fixture(scope="module")
def shifted(tmp_path_factory):
    run = EncryptedRun(run=LinearRun(steps=12, width=2, batch=32), passive=Shifter)
    return run.record(tmp_path_factory.mktemp("shifted"))


def test_shifted_scores_give_c_the_labels_of_that_batch(shifted):
    c, p = shifted
    finding = attack_recording(ShiftedScores(), c, p)
    leak = finding["leak"]["train"]
    assert (leak.headline, leak.metrics["accuracy"], leak.n) == (1.0, 1.0, 32)
    assert "labels of 1 batch " in finding["notes"][0]


def test_p_notices_them(shifted):
    finding = attack_recording(ScoreDrift(), shifted[1])
    assert finding["leak"]["scores"].headline == 32 / 128  # one of the four batches that are judged
    assert "first in step 11" in finding["notes"][0]


def test_honest_scores_do_not_jump(tmp_path):
    for seed in range(3):
        (tmp_path / str(seed)).mkdir()
        c, p = LinearRun(steps=60, rate=0.5, seed=seed).record(tmp_path / str(seed))
        assert attack_recording(ScoreDrift(), p)["leak"]["scores"].headline == 0.0
        finding = attack_recording(ShiftedScores(), c)
        assert finding["status"] == "unmeasured"
        assert finding["notes"] == ["no sign that the passive party shifted scores; noise on delta^C could hide it"]


def test_what_is_not_recorded_is_not_acquitted(tmp_path):
    with RecordingWriter(tmp_path / "passive", Header(role="passive", layout=CipherLayout(width=2))) as recorder:
        recorder.begin(3, rate=0.1)
        recorder.note("rows", np.arange(4))
    passive = Recording(tmp_path / "passive")
    assert "from 0 on, got 3" in attack_recording(ForwardPasses(), passive)["notes"][0]
    assert "training step, got none" in attack_recording(ShiftedScores(), passive)["notes"][0]
    with RecordingWriter(tmp_path / "active", Header(role="active", layout=CipherLayout(width=2))) as recorder:
        recorder.begin(0, rate=0.1)
    for audit in (ScoreDrift(), ChosenWeights()):
        assert attack_recording(audit, Recording(tmp_path / "active"))["status"] == "unmeasured"
