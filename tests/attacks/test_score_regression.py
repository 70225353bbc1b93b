"""Features that depend on each other are read from one score; independent ones are not."""

import numpy as np
import pytest

from vflsec.attacks.forward_passes import ForwardPasses
from vflsec.attacks.score_regression import ScoreRegression
from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.recording import Header, Recording, RecordingWriter
from vflsec.testing.recordings import attack_recording


def recordings(folder, mu, scores, answers=1):
    """One pass of all rows, as both roles record it."""
    layout = CipherLayout(width=mu.shape[1], batch=len(mu))
    for role in ("passive", "active"):
        with RecordingWriter(folder / role, Header(role=role, layout=layout)) as recorder:
            recorder.begin(0, rate=None)
            recorder.note("rows", np.arange(len(mu)))
            if role == "passive":
                recorder.note("mu", mu)
                recorder.note("answers", np.array([answers]))
            else:
                recorder.note("scores", scores)
    return Recording(folder / "passive"), Recording(folder / "active")


@pytest.mark.sampled
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_one_score_tells_the_share_of_variance_along_the_weights(tmp_path, share):
    """A common part has ``share`` of the variance of each feature, and the score is along it."""
    rng = np.random.default_rng(0)
    common, own = rng.normal(size=(2000, 1)), rng.normal(size=(2000, 6))
    mu = np.sqrt(share) * common + np.sqrt(1 - share) * own
    c, p = recordings(tmp_path, mu, common)
    value = attack_recording(ScoreRegression(), p, c, n=200)["leak"]["train"].headline
    assert value == pytest.approx(share, abs=0.05)


def test_noise_does_not_leak(tmp_path):
    rng = np.random.default_rng(0)
    for run in range(5):
        folder = tmp_path / str(run)
        folder.mkdir()
        c, p = recordings(folder, rng.normal(size=(200, 3)), rng.normal(size=(200, 1)))
        assert attack_recording(ScoreRegression(), p, c, n=60)["leak"]["train"].row_interval[0] <= 0


def test_it_predicts_as_least_squares_on_the_score_does(tmp_path):
    rng = np.random.default_rng(1)
    z = rng.normal(size=(1000, 1))
    mu = z + rng.normal(size=(1000, 4))
    c, p = recordings(tmp_path, mu, z)
    value = attack_recording(ScoreRegression(), p, c, n=200)["leak"]["train"].headline
    x = np.column_stack([z, np.ones(1000)])
    off = x @ np.linalg.lstsq(x, mu, rcond=None)[0] - mu
    assert value == pytest.approx(1 - (off**2).sum() / ((mu - mu.mean(axis=0)) ** 2).sum(), abs=0.03)


def test_without_the_truth_no_sample_is_known(tmp_path):
    _, p = recordings(tmp_path, np.ones((50, 2)), np.ones((50, 1)))
    assert "needs auxiliary labels" in attack_recording(ScoreRegression(), p)["notes"][0]


def test_answers_that_did_not_count_are_counted(tmp_path):
    c, _ = recordings(tmp_path, np.ones((8, 4)), np.ones((8, 1)), answers=3)
    assert attack_recording(ForwardPasses(), c)["leak"]["directions of features"].headline == 3 / 4
