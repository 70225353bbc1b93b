"""Membership inference: the formula of its scores, finds what was learned by heart, and nothing where nothing was."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vflsec.attacks.membership import MembershipInference, _compute_embedding_features, _compute_prediction_features
from vflsec.base.errors import InsufficientView, UsageError
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.core.view import Need, View
from vflsec.data.partition import DataSpec
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.results import metrics
from vflsec.run.questions import ask
from vflsec.run.spec import AuxSpec
from vflsec.testing.conformance import AttackConformance
from vflsec.testing.federations import make_toy_federation

MODES = ("loss", "calibrated")


@pytest.mark.long
class TestCalibrated(AttackConformance):
    side = "active"

    def make(self):
        return MembershipInference(mode="calibrated")


@pytest.mark.long
class TestPassive(AttackConformance):
    side = "passive"
    exempt = {  # noqa: RUF012
        "test_beats_chance_on_a_planted_leak": "without labels and predictions next to nothing tells, as its card says",
    }

    def make(self):
        return MembershipInference()


def asked(side, *, epochs, lr=5e-3, seed=0):
    """What members are asked for, of a federation that has seen 100 random labels ``epochs`` times."""
    federation = make_toy_federation(seed=seed, signal="none", rows=800, data=DataSpec(n_labeled=100))
    trained = FedSplitNN(TrainSpec(epochs=epochs, batch=64, lr=lr), ModelSpec(bottom=(64,))).fit(federation)
    return ask(MembershipInference(), trained, side, AuxSpec(n=60))


def auc(attack, question):
    guess = attack(question.view, seed=0).scores["candidates"].numpy()
    return metrics.auc(guess, question.truth.labels["candidates"].numpy())


@pytest.fixture(scope="module")
def learned_by_heart():
    return asked("active", epochs=200)


@pytest.mark.parametrize("mode", MODES)
def test_random_labels_learned_by_heart_tell_who_was_there(learned_by_heart, mode):
    """The loss of members is next to none, that of others is not, but for those who happen to have the label."""
    assert auc(MembershipInference(mode=mode), learned_by_heart) > 0.7


@pytest.mark.parametrize("side", ["active", "passive_1"])
@pytest.mark.parametrize("mode", [None, "calibrated"])
def test_a_model_that_learned_nothing_tells_nothing(side, mode):
    values = [auc(MembershipInference(mode=mode), asked(side, epochs=1, lr=1e-9, seed=seed)) for seed in range(3)]
    assert np.mean(values) == pytest.approx(0.5, abs=4 * np.sqrt(201 / (12 * 100 * 100 * 3)))


def test_the_loss_is_the_source_s_and_so_is_the_threshold(learned_by_heart):
    view = learned_by_heart.view
    found = MembershipInference()(view, seed=0).scores["candidates"]
    z, y = view.predictions["candidates"].double(), view.labels["candidates"]
    loss = torch.stack([-F.log_softmax(row, dim=0)[label] for row, label in zip(z, y, strict=True)])
    members = view.aux_rows[view.aux_labels == 1]
    torch.testing.assert_close(found[:, 1] - found[:, 0], loss[members].mean() - loss)


def test_without_a_known_member_the_threshold_is_the_mean_loss(learned_by_heart):
    view = learned_by_heart.view
    others = view.restrict(torch.nonzero(view.aux_labels == 0)[:, 0])
    score = MembershipInference()(others, seed=0).scores["candidates"][:, 1]
    assert score[others.aux_rows].mean().item() == pytest.approx(0, abs=1e-9)
    flat = MembershipInference(mode="calibrated")(others, seed=0).scores["candidates"]
    assert (flat == 0).all()


def test_features_of_predictions_are_their_formulas():
    z = torch.tensor([[2.0, 0.0, -1.0], [50.0, 0.0, 0.0], [-50.0, 0.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([0, 0, 0])
    view = View("active", "active", 2, {"candidates": torch.zeros(3, 1)}, None, y[:0], y[:0],
                labels={"candidates": y}, predictions={"candidates": z})  # fmt: skip
    found = _compute_prediction_features(view, "candidates")
    p = z.softmax(dim=1)
    assert torch.isfinite(found).all()
    assert torch.allclose(found[:, 0], -p[:, 0].log())
    assert torch.allclose(found[::2, 1], (p[:, 0] / (1 - p[:, 0])).log()[::2])
    assert torch.allclose(found[:, 2], p.amax(dim=1))
    assert torch.allclose(found[:, 3], -(p * p.log()).sum(dim=1))


def test_nobody_is_his_own_neighbor():
    """Four auxiliary candidates at 0, 1, 10, 11 of which the first two are members."""
    x = torch.tensor([[0.0], [1.0], [10.0], [11.0], [2.0]])
    rows, member = torch.arange(4), torch.tensor([1, 1, 0, 0])
    view = View("passive_1", "passive", 2, {"candidates": x}, nn.Identity(), rows, member)
    found = _compute_embedding_features(view, "candidates")
    assert found[:, 0].tolist() == x[:, 0].tolist() == found[:, 1].tolist()
    assert found[:, 2].tolist() == [10 - 1, 9 - 1, 1 - 9, 1 - 10, 8 - 1]


def test_a_passive_party_has_no_loss():
    with pytest.raises(InsufficientView, match="needs predictions"):
        auc(MembershipInference(mode="loss"), asked("passive_1", epochs=1))


def test_the_need_of_the_loss_is_known_before_training():
    shown = {Need.MODEL, Need.AUX_LABELS}
    with pytest.raises(InsufficientView, match="needs predictions"):
        MembershipInference(mode="loss").check("passive", shown)
    MembershipInference(mode="loss").check("active", {*shown, Need.PREDICTIONS})
    for mode in (None, "calibrated"):
        MembershipInference(mode=mode).check("passive", shown)
    assert repr(MembershipInference(mode="loss")) == "membership(folds=5, mode='loss')"


def test_alone_there_is_nothing_to_be_a_member_of():
    assert MembershipInference().alone() is None


def test_no_fold_is_refused():
    with pytest.raises(UsageError, match="folds > 0, got 0"):
        MembershipInference(folds=0)
