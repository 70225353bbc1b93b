"""A6 and A7: what a role that deviates reads, and what the other can notice."""

import numpy as np
import pytest

from vflsec.cipher.arithmetic.codec import cut, join
from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.recording import Header, Recording, RecordingWriter
from vflsec.cipher.roles.active import ActiveRole
from vflsec.cipher.roles.passive import PassiveRole
from vflsec.secure.transcripts.audit import Truth
from vflsec.secure.transcripts.chosen_weights import ChosenWeights
from vflsec.secure.transcripts.forward_passes import ForwardPasses
from vflsec.secure.transcripts.run import judge
from vflsec.secure.transcripts.score_drift import ScoreDrift
from vflsec.secure.transcripts.shifted_scores import ShiftedScores
from vflsec.testing.recordings import EncryptedRun, LinearRun


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
    finding = ChosenWeights()(p, Truth(p, c))
    assert least < finding.figures[0].value <= most
    assert finding.verdict == "leaks"


def test_an_honest_p_reads_nothing(tmp_path):
    c, p = EncryptedRun(run=LinearRun(steps=3, width=4, batch=8, same_batch=True), inference=3).record(tmp_path)
    finding = ChosenWeights()(p, Truth(p, c))
    assert finding.verdict == "unmeasured"
    assert (
        finding.found == "p asked for the same samples again only under the same share; these notes show no deviation"
    )


def test_a_p_that_asks_once_shows_no_deviation(tmp_path):
    _, p = EncryptedRun(run=LinearRun(steps=2, width=4, batch=8)).record(tmp_path)
    finding = ChosenWeights()(p)
    assert finding.verdict == "unmeasured"
    assert finding.found == (
        "p never asked for the same samples twice between two updates; these notes show no deviation"
    )


@pytest.mark.parametrize("share0", [0.0, 0.3])
def test_the_bound_gives_no_credit_for_weights_that_all_samples_share(tmp_path, share0):
    c, _ = EncryptedRun(run=LinearRun(steps=2, width=4, batch=8), share0=share0).record(tmp_path)
    finding = ForwardPasses()(c)
    assert finding.figures[0].value == 1 / 4
    assert finding.verdict == "counted"


@pytest.mark.parametrize("settings", [{"outputs": 5, "steps": 4}, {"outputs": 1, "steps": 14}])
def test_the_bound_is_of_the_worst_sample_and_counts_outputs(tmp_path, settings):
    c, _ = LinearRun(rows=40, batch=20, validation=10, width=8, columns=8, **settings).record(tmp_path)
    finding = ForwardPasses()(c)
    passes = settings["steps"] // 2
    expected = min(1.0, settings["outputs"] * passes / 8)
    assert finding.figures[0].value == pytest.approx(expected)
    assert (
        "50 of 50 samples are fully exposed" in finding.found if expected == 1 else "0 of 50 samples" in finding.found
    )


def test_a_limit_on_the_bound_fails_on_two_epochs_of_ten_outputs(tmp_path):
    c, _ = LinearRun(rows=200, batch=50, steps=8, outputs=10, width=16, columns=16).record(tmp_path)
    verdict = judge(c, [ForwardPasses()(c)], None, {"forward-passes": 0.5})
    assert verdict.exit_code == 1


def test_the_bound_grows_with_the_passes(tmp_path):
    for name, inference in (("few", 1), ("many", 9)):
        (tmp_path / name).mkdir()
        run = EncryptedRun(run=LinearRun(steps=1, width=4, batch=8), share0=0.3, inference=inference)
        bound = ForwardPasses()(run.record(tmp_path / name)[0]).figures[0].value
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
    finding = ShiftedScores()(c, Truth(c, p))
    assert finding.figures[0].value == 1.0
    assert finding.figures[0].n == 32
    assert "labels of 1 batch " in finding.found


def test_p_notices_them(shifted):
    finding = ScoreDrift()(shifted[1])
    assert finding.figures[0].value == 32 / 128  # one of the four batches that are judged
    assert "first in step 11" in finding.found
    assert finding.verdict == "leaks"


def test_honest_scores_do_not_jump(tmp_path):
    for seed in range(3):
        (tmp_path / str(seed)).mkdir()
        c, p = LinearRun(steps=60, rate=0.5, seed=seed).record(tmp_path / str(seed))
        assert ScoreDrift()(p).figures[0].value == 0.0
        assert ScoreDrift()(p).verdict == "holds"
        finding = ShiftedScores()(c)
        assert finding.verdict == "unmeasured"
        assert finding.found == "no sign that the passive party shifted scores; noise on delta^C could hide it"


def test_what_is_not_recorded_is_not_acquitted(tmp_path):
    with RecordingWriter(tmp_path / "passive", Header(role="passive", layout=CipherLayout(width=2))) as recorder:
        recorder.begin(3, rate=0.1)
        recorder.note("rows", np.arange(4))
    assert "expected all steps from 0 on, got 3 after -1" in ForwardPasses()(Recording(tmp_path / "passive")).found
    assert ShiftedScores()(Recording(tmp_path / "passive")).found == "expected delta^C of a training step, got none"
    with RecordingWriter(tmp_path / "active", Header(role="active", layout=CipherLayout(width=2))) as recorder:
        recorder.begin(0, rate=0.1)
    for audit in (ScoreDrift(), ChosenWeights()):
        assert audit(Recording(tmp_path / "active")).verdict == "unmeasured"
