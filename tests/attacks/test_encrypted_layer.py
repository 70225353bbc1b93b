"""Audits on recordings of the real roles: what encryption leaves open, and what its options close."""

import numpy as np
import pytest

from vflsec.attacks.common_divisor import CommonDivisor
from vflsec.attacks.delta_chain import DeltaChain, DeltaChainWeights
from vflsec.attacks.low_bits import LowBits
from vflsec.attacks.score_gram import ScoreGram
from vflsec.attacks.small_masks import SmallMasks
from vflsec.audit.evaluation import _make_results, add_attacks
from vflsec.audit.recordings import open_recording
from vflsec.base.errors import UsageError
from vflsec.cipher.roles.active import ActiveRole
from vflsec.run.spec import AuxSpec, parse_attack
from vflsec.testing.recordings import EncryptedRun, LinearRun, attack_recording


@pytest.mark.sampled
@pytest.mark.parametrize(("delta", "order"), [("rank1", "current"), ("outer", "current"), ("rank1", "paper")])
def test_c_reads_all_labels_and_the_weights(tmp_path, delta, order):
    c, p = EncryptedRun(run=LinearRun(steps=4, width=4, batch=24, order=order), delta=delta).record(tmp_path)
    labels = attack_recording(DeltaChain(), c, p, n=8)["leak"]["train"]
    assert labels.metrics["auc"] == labels.metrics["accuracy"] == 1.0
    assert attack_recording(DeltaChainWeights(), c, p, n=8)["leak"]["parameters"].headline > 1 - 1e-8


@pytest.mark.long
def test_of_three_outputs_too(tmp_path):
    c, p = EncryptedRun(run=LinearRun(steps=12, width=5, outputs=3, batch=24, rate=0.5)).record(tmp_path)
    assert attack_recording(DeltaChain(), c, p, n=12)["leak"]["train"].headline == 1.0
    assert attack_recording(DeltaChainWeights(), c, p, n=12)["leak"]["parameters"].headline > 0.99


@pytest.mark.long
def test_noise_under_encryption_hides_them(tmp_path):
    run = LinearRun(steps=12, width=4, batch=24, noise=20.0)
    c, p = EncryptedRun(run=run, delta="outer").record(tmp_path)
    labels = attack_recording(DeltaChain(), c, p, n=8)["leak"]["train"]
    assert labels.metrics["accuracy"] < 0.8
    assert labels.headline < 0.62
    assert attack_recording(DeltaChainWeights(), c, p, n=8)["leak"]["parameters"].headline < 0.1
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
    (block,) = attack_recording(CommonDivisor(), c, p)["leak"].values()
    assert block.headline == value


def test_the_masks_bare_nothing(tmp_path):
    c, p = EncryptedRun(run=LinearRun(steps=4, width=2, batch=48), inference=4).record(tmp_path)
    low = attack_recording(LowBits(), c, p)
    assert (low["leak"]["weights"].headline, low["status"]) == (0.0, "ok")
    assert "bare in 0 of 8" in low["notes"][0]
    (block,) = attack_recording(SmallMasks(), c, p)["leak"].values()
    assert block.headline < 0.01


def test_p_reads_frozen_features(tmp_path):
    run = LinearRun(steps=8, width=4, batch=16, same_batch=True, rate=0.5)
    c, p = EncryptedRun(run=run, share0=0.3).record(tmp_path)
    assert attack_recording(ScoreGram(), p, c, n=8)["leak"]["train"].headline > 0.999


@pytest.mark.parametrize("names", [("small-masks",), ("delta-chain-weights", "small-masks")])
def test_attacks_on_the_weights_beside_each_other_keep_their_answers(tmp_path, names):
    """W is guessed as zero, and its common part is part of the answer whatever else is run."""
    c, p = EncryptedRun(run=LinearRun(steps=2, width=3, outputs=3, batch=24, rate=0.5)).record(tmp_path)
    audit = open_recording(c.path, p.path, aux=AuxSpec(n=12))
    audit = add_attacks(audit, [parse_attack(name) for name in names])
    results = _make_results(audit, [trial for trial in audit.trials() if trial.seed == 0], audit.joint(0))
    (r2,) = (record.leak["parameters"].headline for record in results if record.attack.name == "small-masks")
    shares = [[step.notes["share"] for step in own.steps() if step.has("share")] for own in (c, p)]
    weights = np.ldexp(np.concatenate([a + b for a, b in zip(*shares, strict=False)]).astype(float).ravel(), -64)
    assert r2 == pytest.approx(1 - (weights**2).sum() / ((weights - weights.mean()) ** 2).sum(), abs=0.02)
