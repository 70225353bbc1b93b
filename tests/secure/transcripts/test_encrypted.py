"""Audits on recordings of the real roles: what encryption leaves open, and what its options close."""

import numpy as np
import pytest

from vflsec.base.errors import UsageError
from vflsec.cipher.roles.active import ActiveRole
from vflsec.secure.transcripts.audit import Truth
from vflsec.secure.transcripts.common_divisor import CommonDivisor
from vflsec.secure.transcripts.delta_chain import DeltaChain
from vflsec.secure.transcripts.low_bits import LowBits
from vflsec.secure.transcripts.score_gram import ScoreGram
from vflsec.secure.transcripts.small_masks import SmallMasks
from vflsec.testing.recordings import EncryptedRun, LinearRun


@pytest.mark.parametrize(("delta", "order"), [("rank1", "current"), ("outer", "current"), ("rank1", "paper")])
def test_c_reads_all_labels_and_the_weights(tmp_path, delta, order):
    c, p = EncryptedRun(run=LinearRun(steps=4, width=4, batch=24, order=order), delta=delta).record(tmp_path)
    accuracy, ranking, weights = DeltaChain()(c, Truth(c, p)).figures
    assert accuracy.value == ranking.value == 1.0
    assert weights.value > 1 - 1e-8


def test_of_three_outputs_too(tmp_path):
    c, p = EncryptedRun(run=LinearRun(steps=12, width=5, outputs=3, batch=24, rate=0.5)).record(tmp_path)
    labels, weights = DeltaChain()(c, Truth(c, p)).figures
    assert labels.value == 1.0
    assert weights.value > 0.99


def test_noise_under_encryption_hides_them(tmp_path):
    run = LinearRun(steps=12, width=4, batch=24, noise=20.0)
    c, p = EncryptedRun(run=run, delta="outer").record(tmp_path)
    accuracy, ranking, weights = DeltaChain()(c, Truth(c, p)).figures
    assert accuracy.value < 0.8
    assert ranking.value < 0.62
    assert weights.value < 0.1
    noise = np.concatenate([step.notes["embedding_gradient"] for step in c.steps()])
    assert 17 < noise.std() < 23  # it arrives as it was drawn


def test_noise_needs_rows_of_its_own(tmp_path):
    with pytest.raises(UsageError, match="expected delta=outer in the layout"):
        EncryptedRun(run=LinearRun(steps=1, width=4, batch=8, noise=1.0), delta="rank1").record(tmp_path)


class Exact(ActiveRole):
    """Sends the products as they are, without noise below a unit."""

    def _blur(self, rows, noise):
        return [0 * mask for mask in super()._blur(rows, noise)]


@pytest.mark.parametrize(("holder", "value"), [(ActiveRole, 0.0), (Exact, 1.0)])
def test_exact_products_are_read_and_blurred_ones_are_not(tmp_path, holder, value):
    run = EncryptedRun(run=LinearRun(steps=2, width=4, batch=24), delta="outer", active=holder)
    c, p = run.record(tmp_path)
    assert CommonDivisor()(c, Truth(c, p)).figures[0].value == value


def test_the_masks_bare_nothing(tmp_path):
    c, p = EncryptedRun(run=LinearRun(steps=4, width=2, batch=48), inference=4).record(tmp_path)
    low = LowBits()(c, Truth(c, p))
    assert (low.figures[0].value, low.verdict) == (0.0, "holds")
    assert "bare in 0 of 8" in low.found
    assert SmallMasks()(c, Truth(c, p)).figures[0].value < 0.01


def test_p_reads_inner_products_of_frozen_features(tmp_path):
    run = LinearRun(steps=8, width=4, batch=16, same_batch=True, rate=0.5)
    c, p = EncryptedRun(run=run, share0=0.3).record(tmp_path)
    assert ScoreGram()(p, Truth(p, c)).figures[0].value > 0.999
