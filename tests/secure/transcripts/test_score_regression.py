"""Features that depend on each other are read from one score; independent ones are not."""

import numpy as np
import pytest

from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.recording import Header, Recording, RecordingWriter
from vflsec.secure.transcripts.audit import Truth
from vflsec.secure.transcripts.forward_passes import ForwardPasses
from vflsec.secure.transcripts.score_regression import ScoreRegression


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


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_one_score_tells_the_share_of_variance_along_the_weights(tmp_path, share):
    """A common part has ``share`` of the variance of each feature, and the score is along it."""
    rng = np.random.default_rng(0)
    common, own = rng.normal(size=(2000, 1)), rng.normal(size=(2000, 6))
    mu = np.sqrt(share) * common + np.sqrt(1 - share) * own
    c, p = recordings(tmp_path, mu, common)
    (figure,) = ScoreRegression()(p, Truth(p, c)).figures
    assert figure.value == pytest.approx(share, abs=0.15)  # of 18 known rows


def test_noise_does_not_leak(tmp_path):
    """Which rows are known is luck: that some draws predict a little is no leak."""
    rng = np.random.default_rng(0)
    for run in range(5):
        folder = tmp_path / str(run)
        folder.mkdir()
        c, p = recordings(folder, rng.normal(size=(60, 3)), rng.normal(size=(60, 1)))
        finding = ScoreRegression()(p, Truth(p, c))
        assert finding.verdict == "holds"
        assert finding.figures[0].ci95[0] == 0


def test_the_interval_holds_the_draws_of_known_rows(tmp_path):
    """The mean over many draws of known rows, here by least squares on the score alone, lies within."""
    rng = np.random.default_rng(1)
    z = rng.normal(size=(1000, 1))
    mu = z + rng.normal(size=(1000, 4))
    c, p = recordings(tmp_path, mu, z)
    (figure,) = ScoreRegression()(p, Truth(p, c)).figures
    draws = []
    for _ in range(200):
        order = rng.permutation(1000)
        known, asked = order[:12], order[12:]
        x = np.column_stack([z, np.ones(1000)])
        off = x[asked] @ np.linalg.lstsq(x[known], mu[known], rcond=None)[0] - mu[asked]
        draws.append(1 - (off**2).sum() / ((mu[asked] - mu[known].mean(axis=0)) ** 2).sum())
    assert figure.ci95[0] <= np.median(draws) <= figure.ci95[1]
    assert figure.value == pytest.approx(np.mean(draws), abs=0.1)


def test_without_the_truth_it_is_not_measured(tmp_path):
    _, p = recordings(tmp_path, np.ones((50, 2)), np.ones((50, 1)))
    assert ScoreRegression()(p).verdict == "unmeasured"


def test_answers_that_did_not_count_are_counted(tmp_path):
    c, _ = recordings(tmp_path, np.ones((8, 4)), np.ones((8, 1)), answers=3)
    assert ForwardPasses()(c).figures[0].value == 3 / 4
