"""What attacks are asked: views that hold no answer, answers that are the victim's, measures that fit."""

import numpy as np
import pytest
import torch

from vflsec.base.errors import UsageError
from vflsec.core.attack import Attack
from vflsec.core.method import Trained
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.core.view import Guess, Need
from vflsec.data.partition import DataSpec
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.run.questions import ask
from vflsec.run.score import score
from vflsec.run.spec import AuxSpec
from vflsec.testing.federations import make_toy_federation

AUX = AuxSpec(n=20)


class Probe(Attack):
    """An attack of a chosen target; it only carries the question."""

    name, side, needs, reference, verified = "probe", "either", frozenset(), "none", "none"

    def __init__(self, target, victim=None, column=None):
        self.target, self.victim, self.column = target, victim, column  # type: ignore[misc]

    def run(self, view, *, rng):
        return Guess({})


@pytest.fixture(scope="module")
def trained():
    method = FedSplitNN(TrainSpec(epochs=2), ModelSpec())
    return method.fit(make_toy_federation(parties=3))


def test_features_are_those_of_the_first_passive_party(trained):
    question = ask(Probe("features"), trained, "active", AUX)
    victim = trained.federation.parties["passive_1"]
    assert question.view.victim == "passive_1"
    assert torch.equal(question.truth.labels["test"], victim.features["test"])
    assert torch.equal(question.view.aux_labels, victim.features["train"][question.view.aux_rows])
    assert question.view.n_classes == victim.n_features
    assert question.view.layout == victim.layout
    assert question.metrics[0] == "r2"


def test_the_victim_may_be_named(trained):
    question = ask(Probe("features", victim="passive_2"), trained, "active", AUX)
    assert torch.equal(question.truth.labels["test"], trained.federation.parties["passive_2"].features["test"])
    with pytest.raises(UsageError, match="victim 'passive_3'. Did you mean"):
        ask(Probe("features", victim="passive_3"), trained, "active", AUX)
    with pytest.raises(UsageError, match="unknown victim 'passive_1'"):
        ask(Probe("features", victim="passive_1"), trained, "passive_1", AUX)


def test_the_victims_model_is_known_only_if_the_threat_model_says_so(trained):
    assert Need.VICTIM_MODEL not in ask(Probe("features"), trained, "active", AUX).view.has()
    view = ask(Probe("features"), trained, "active", AuxSpec(n=20, victim_model=True)).view
    x = trained.federation.parties["passive_1"].features["test"]
    assert view.victim_model is not None
    assert torch.equal(view.victim_model(x), trained.method.representation(trained.federation.parties["passive_1"])(x))


def test_a_number_is_an_attribute_by_its_median(trained):
    question = ask(Probe("attribute", column="passive_1_x2"), trained, "active", AUX)
    x = trained.federation.parties["passive_1"].features
    assert torch.equal(question.truth.labels["train"].bool(), x["train"][:, 2] > x["train"][:, 2].median())
    assert question.view.n_classes == 2
    with pytest.raises(UsageError, match="unknown column of passive_1 'x9'"):
        ask(Probe("attribute", column="x9"), trained, "active", AUX)


def test_members_are_training_rows_and_nothing_says_where_they_are(trained):
    federation = trained.federation
    question = ask(Probe("membership"), trained, "active", AUX)
    view, member = question.view, question.truth.labels["candidates"].bool()
    assert set(view.features) == {"candidates"} == set(view.labels) == set(view.predictions)
    assert member.sum() * 2 == len(member) == 2 * federation.n_rows("test")
    own = {tuple(row) for row in federation.active.features["train"].tolist()}
    assert [tuple(row) in own for row in view.features["candidates"].tolist()] == member.tolist()
    assert not view.messages


def test_members_keep_the_groups_of_their_rows():
    federation = make_toy_federation(rows=300)
    splits = ("train", "test")
    federation.groups = {split: np.arange(federation.n_rows(split)) % 7 for split in splits}
    trained = FedSplitNN(TrainSpec(epochs=1), ModelSpec()).fit(federation)
    question = ask(Probe("membership"), trained, "passive_1", AUX)
    features = federation.passive[0].features
    by_row = {
        tuple(row): group
        for split in splits
        for row, group in zip(features[split].tolist(), federation.groups[split], strict=True)
    }
    found = [by_row[tuple(row)] for row in question.view.features["candidates"].tolist()]
    assert found == question.groups["candidates"].tolist()


def test_candidates_may_outnumber_training_rows():
    """Then a position among candidates is none among training rows, whose labels must not be looked up by it."""
    federation = make_toy_federation(rows=300, data=DataSpec(n_labeled=60))
    trained = FedSplitNN(TrainSpec(epochs=1), ModelSpec()).fit(federation)
    view = ask(Probe("membership"), trained, "active", AUX).view
    assert len(view.features["candidates"]) == 120
    assert view.aux_rows.max() > 60
    assert torch.equal(view.aux_labels.bincount(), torch.tensor([10, 10]))


def test_asking_who_was_trained_on_leaves_no_trace(trained):
    before = dict(trained.federation.channel.traffic)
    first, again = (ask(Probe("membership"), trained, "active", AUX).view.predictions["candidates"] for _ in "12")
    assert torch.equal(first, again)
    assert dict(trained.federation.channel.traffic) == before


def test_a_passive_party_cannot_ask_the_joint_model(trained):
    view = ask(Probe("membership"), trained, "passive_1", AUX).view
    assert not view.predictions
    assert not view.labels


def test_the_active_party_has_labels_of_training_rows_alone(trained):
    assert set(ask(Probe("features"), trained, "active", AUX).view.labels) == {"train"}
    assert not ask(Probe("labels"), trained, "passive_1", AUX).view.labels


def test_recovered_columns_are_scored_without_those_that_were_known(trained):
    question = ask(Probe("features"), trained, "active", AUX)
    truth = question.truth.labels
    wrong = truth["train"].clone()
    wrong[question.view.aux_rows] += 100
    found = score(
        Guess({"train": wrong, "test": truth["test"].mean(dim=0).expand_as(truth["test"])}),
        question.truth,
        headline="r2",
        exclude=question.view.aux_rows,
        seed=0,
        names=question.metrics,
    )
    assert found["train"].metrics["r2"] == 1
    assert found["test"].metrics["r2"] == pytest.approx(0, abs=1e-6)
    assert found["test"].ci95_rows == pytest.approx([0, 0], abs=1e-6)
    assert found["test"].chance == 0


def test_rows_whose_category_training_never_showed_are_not_scored():
    from vflsec.core.view import GroundTruth

    scores = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    found = score(
        Guess({"test": scores}),
        GroundTruth({"test": torch.tensor([1, 0, -1])}),
        headline="accuracy",
        exclude=torch.tensor([]),
        seed=0,
    )
    assert found["test"].n == 2
    assert found["test"].metrics["accuracy"] == 1


def test_untrained_federations_can_be_asked_before_training():
    method, federation = FedSplitNN(TrainSpec(epochs=2), ModelSpec()), make_toy_federation()
    method.build(federation)
    for target in ("labels", "features", "attribute", "membership"):
        assert ask(Probe(target), Trained(method, federation, {}), "active", AUX).view.aux_rows.shape == (20,)


def test_after_pre_training_nobody_can_ask_the_joint_model(trained):
    view = ask(Probe("membership"), trained, "active", AUX, after="pretrain").view
    assert not view.predictions
    assert view.top is None


def test_a_column_that_says_the_same_of_everybody_is_no_attribute():
    method, federation = FedSplitNN(TrainSpec(epochs=2), ModelSpec()), make_toy_federation()
    method.build(federation)
    victim = federation.parties["passive_1"]
    for x in victim.features.values():
        x[:, 0] = 1.0
    built = Trained(method, federation, {})
    question = ask(Probe("attribute"), built, "active", AUX)
    assert torch.equal(
        question.truth.labels["test"].bool(), victim.features["test"][:, 1] > victim.features["train"][:, 1].median()
    )
    with pytest.raises(UsageError, match="all training rows, got passive_1_x0"):
        ask(Probe("attribute", column="passive_1_x0"), built, "active", AUX)
