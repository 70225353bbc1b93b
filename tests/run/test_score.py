"""The scorer: exclusion of what the adversary knew, and the null of a shuffled truth."""

from statistics import NormalDist

import numpy as np
import pytest
import torch

from vflsec.base.seeds import derive
from vflsec.core.view import GroundTruth, Guess
from vflsec.run.score import draw_first_half, measure, score

LABELS = torch.arange(200) % 4
Z2 = NormalDist().inv_cdf(0.975) ** 2


def perfect(labels):
    return torch.eye(4)[labels]


def test_perfect_guess_scores_one_everywhere():
    block = measure(perfect(LABELS), LABELS, "accuracy", seed=0)
    assert block.metrics == {"accuracy": 1.0, "auc": 1.0, "f1": 1.0}
    assert block.ci95_rows == pytest.approx((200 / (200 + Z2), 1.0)), "Wilson's interval"
    assert block.chance == 0.25
    assert next(iter(block.metrics)) == "accuracy"


def test_a_guess_of_one_class_is_flagged():
    """Scores may order the rows perfectly; values have no class."""
    y = LABELS % 2
    scores = torch.stack([torch.zeros(200), 1.0 + y], dim=1)
    block = measure(scores, y, "auc", seed=0)
    assert block.single_class is True
    assert block.metrics["auc"] == 1.0
    assert not measure(scores - torch.tensor([0.0, 1.5]), y, "auc", seed=0).single_class
    assert not measure(scores, scores, "r2", seed=0, names=["r2"]).single_class


def test_auxiliary_rows_are_left_out_of_training_rows_only():
    scores = perfect(LABELS)
    scores[:50] = scores[:50].roll(1, dims=1)  # wrong on the first fifty
    guess = Guess({"train": scores, "test": scores})
    found = score(
        guess, GroundTruth({"train": LABELS, "test": LABELS}), headline="accuracy", exclude=torch.arange(50), seed=0
    )
    assert (found["train"].metrics["accuracy"], found["train"].n) == (1.0, 150)
    assert (found["test"].metrics["accuracy"], found["test"].n) == (0.75, 200)


@pytest.mark.long
def test_against_a_shuffled_secret_a_perfect_guess_is_at_chance():
    truth = GroundTruth({"test": LABELS})
    hits = [
        score(
            Guess({"test": perfect(LABELS)}),
            truth.shuffle_labels(torch.Generator().manual_seed(seed)),
            headline="accuracy",
            exclude=torch.tensor([]),
            seed=0,
        )["test"].metrics["accuracy"]
        for seed in range(30)
    ]
    assert sum(hits) / 30 == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / 6000) ** 0.5)


def scored(scores, labels, seed=0, exclude=(), headline="accuracy"):
    return score(
        Guess({"train": scores}),
        GroundTruth({"train": labels}),
        headline=headline,
        exclude=torch.tensor(exclude, dtype=torch.long),
        seed=seed,
    )["train"]


@pytest.mark.parametrize("labels", [LABELS, LABELS[:187], torch.tensor([0] * 150 + [1] * 50)])
def test_halves_are_disjoint_and_split_each_class_evenly(labels):
    first = torch.from_numpy(draw_first_half(labels, 3))
    counts = [torch.bincount(labels[half], minlength=4) for half in (first, ~first)]
    assert (counts[0] - counts[1]).abs().max() <= 1
    assert torch.equal(counts[0] + counts[1], torch.bincount(labels, minlength=4))
    assert not torch.equal(first, torch.from_numpy(draw_first_half(labels, 4)))


def test_each_half_is_scored_by_itself():
    """Wrong on the rows of the first half alone: which these are is the same for every guess."""
    first = torch.from_numpy(draw_first_half(LABELS[50:], derive(0, "halves", "train")))
    scores = perfect(LABELS)
    scores[50:][first] = scores[50:][first].roll(1, dims=1)
    found = scored(scores, LABELS, exclude=list(range(50)))
    assert found.halves == (0.0, 1.0)
    assert found.metrics["accuracy"] == 0.5
    assert scored(perfect(LABELS), LABELS, exclude=list(range(50))).halves == (1.0, 1.0)


def test_the_headline_comes_first():
    labels = torch.arange(200) % 2
    found = measure(perfect(labels)[:, :2], labels, "f1", 0)
    assert list(found.metrics) == ["f1", "auc", "accuracy", "ks"]
    assert (found.metric, found.headline) == ("f1", 1.0)
    assert found.ci95_rows == pytest.approx((100 / (100 + Z2), 1.0)), "of the rows of class 1"


def test_values_are_split_as_well():
    truth = torch.randn(101, 3, generator=torch.Generator().manual_seed(0))
    assert sum(draw_first_half(truth, 0)) == 51
    found = score(
        Guess({"train": truth}), GroundTruth({"train": truth}), headline="r2", seed=0, names=("r2",),
        exclude=torch.tensor([], dtype=torch.long),
    )  # fmt: skip
    assert found["train"].halves == (1.0, 1.0)


def test_halves_of_a_single_class_are_none():
    labels = torch.tensor([0] * 20 + [1])
    scores = torch.stack([-labels, labels], dim=1).float()
    assert scored(scores, labels, headline="auc").halves is None


def test_a_guess_of_classes_tells_how_much_of_how_many_rows():
    truth = GroundTruth({"test": torch.arange(4000) % 4, "train": LABELS})
    guess = Guess({"test": perfect(truth.labels["test"]), "train": perfect(LABELS)})
    found = score(guess, truth, headline="accuracy", exclude=torch.arange(0), seed=0)
    metrics = found["test"].metrics
    assert (metrics["tpr@0.001"], metrics["known@0.99"], metrics["right@0.99"]) == (1.0, 1.0, 1.0)
    assert metrics["cross_entropy"] < 0.01
    assert "tpr@0.001" not in found["train"].metrics, "150 negatives do not resolve it"
    assert found["train"].metrics["tpr@0.01"] == 1.0


def test_recovered_columns_have_no_bits():
    values = torch.randn(100, 2)
    found = score(
        Guess({"test": values}), GroundTruth({"test": values}), headline="r2", exclude=torch.tensor([]), seed=0,
        names=["r2"],
    )  # fmt: skip
    assert found["test"].metrics == {"r2": 1.0}


def test_groups_of_rows_are_left_out_in_turn_but_for_auxiliary_ones():
    scores = perfect(LABELS)
    scores[:30] = scores[:30].roll(1, dims=1)
    groups = (np.arange(200) // 20) + 3
    truth = GroundTruth({"train": LABELS})
    block = score(
        Guess({"train": scores}), truth, headline="accuracy", exclude=torch.arange(10), seed=0, groups={"train": groups}
    )["train"]
    assert block.without is not None
    assert block.without[:5] == pytest.approx((170 / 190, 170 / 190, 170 / 190, 170 / 180, 160 / 170))
    assert block.known == 10 / 200
