"""Features that depend on each other are read from one score; independent ones are not."""

import numpy as np
import pytest

from vflsec.audit.audit import Truth
from vflsec.audit.forward_passes import ForwardPasses
from vflsec.audit.score_regression import ScoreRegression
from vflsec.paillier.layout import Layout
from vflsec.paillier.recording import Header, Recorder, Recording


def recordings(folder, mu, scores, answers=1):
    """One pass of all rows, as both roles record it."""
    layout = Layout(width=mu.shape[1], batch=len(mu))
    for role in ("C", "p"):
        with Recorder(folder / role, Header(role=role, layout=layout)) as recorder:
            recorder.begin(0, rate=None)
            recorder.note("rows", np.arange(len(mu)))
            if role == "C":
                recorder.note("mu", mu)
                recorder.note("answers", np.array([answers]))
            else:
                recorder.note("scores", scores)
    return Recording(folder / "C"), Recording(folder / "p")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_one_score_tells_the_share_of_variance_along_the_weights(tmp_path, share):
    """A common part has ``share`` of the variance of each feature, and the score is along it."""
    rng = np.random.default_rng(0)
    common, own = rng.normal(size=(2000, 1)), rng.normal(size=(2000, 6))
    mu = np.sqrt(share) * common + np.sqrt(1 - share) * own
    c, p = recordings(tmp_path, mu, common)
    (figure,) = ScoreRegression()(p, Truth(p, c)).figures
    assert figure.value == pytest.approx(share, abs=0.15)  # of 18 known rows


def test_without_the_truth_it_is_not_measured(tmp_path):
    _, p = recordings(tmp_path, np.ones((50, 2)), np.ones((50, 1)))
    assert ScoreRegression()(p).verdict == "unmeasured"


def test_answers_that_did_not_count_are_counted(tmp_path):
    c, _ = recordings(tmp_path, np.ones((8, 4)), np.ones((8, 1)), answers=3)
    assert ForwardPasses()(c).figures[0].value == 3 / 4
