"""The scorer: exclusion of what the adversary knew, and the null of a shuffled truth."""

import pytest
import torch

from vflsec.core.view import Guess, Secret
from vflsec.evaluation.score import measure, score

LABELS = torch.arange(200) % 4


def perfect(labels):
    return torch.eye(4)[labels]


def test_perfect_guess_scores_one_everywhere():
    block = measure(perfect(LABELS), LABELS, "accuracy", seed=0)
    assert block["metrics"] == {"accuracy": 1.0, "auc": 1.0, "f1": 1.0}
    assert block["ci95_rows"] == [1.0, 1.0]
    assert block["chance"] == 0.25
    assert next(iter(block["metrics"])) == "accuracy"


def test_a_guess_of_one_class_is_flagged():
    """Scores may order the rows perfectly; values have no class."""
    y = LABELS % 2
    scores = torch.stack([torch.zeros(200), 1.0 + y], dim=1)
    block = measure(scores, y, "auc", seed=0)
    assert block["one_class"] is True
    assert block["metrics"]["auc"] == 1.0
    assert "one_class" not in measure(scores - torch.tensor([0.0, 1.5]), y, "auc", seed=0)
    assert "one_class" not in measure(scores, scores, "r2", seed=0, names=["r2"])


def test_auxiliary_rows_are_left_out_of_training_rows_only():
    scores = perfect(LABELS)
    scores[:50] = scores[:50].roll(1, dims=1)  # wrong on the first fifty
    guess = Guess({"train": scores, "test": scores})
    found = score(
        guess, Secret({"train": LABELS, "test": LABELS}), headline="accuracy", exclude=torch.arange(50), seed=0
    )
    assert (found["train"]["metrics"]["accuracy"], found["train"]["n"]) == (1.0, 150)
    assert (found["test"]["metrics"]["accuracy"], found["test"]["n"]) == (0.75, 200)


def test_against_a_shuffled_secret_a_perfect_guess_is_at_chance():
    secret = Secret({"test": LABELS})
    hits = [
        score(
            Guess({"test": perfect(LABELS)}),
            secret.shuffled(torch.Generator().manual_seed(seed)),
            headline="accuracy",
            exclude=torch.tensor([]),
            seed=0,
        )["test"]["metrics"]["accuracy"]
        for seed in range(30)
    ]
    assert sum(hits) / 30 == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / 6000) ** 0.5)
