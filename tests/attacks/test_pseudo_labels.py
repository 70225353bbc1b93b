"""Pseudo-labels: the Bayes rule of a mixture of Gaussians, from few labels and many rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis

from vflsec.attacks import pseudo_labels
from vflsec.attacks.logistic import LogisticRegression, Squares
from vflsec.attacks.pseudo_labels import RIDGE, PseudoLabels, _fit_without_each_fold, _get_moments, _make_rule
from vflsec.attacks.trees import Trees
from vflsec.core.view import View

N, CLASSES, WIDTH = 3000, 3, 6


def mixture(seed=0, *, n=N, width=WIDTH, apart=2.5):
    """Three Gaussians, each with its own covariance, and for each row the class that is most likely by Bayes' rule."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % CLASSES
    centers = apart * torch.randn(CLASSES, width, generator=rng) / width**0.5
    shapes = torch.eye(width) + 1.5 * torch.randn(CLASSES, width, width, generator=rng) / width**0.5
    x = centers[y] + torch.einsum("nij,nj->ni", shapes[y], torch.randn(n, width, generator=rng))
    each = [
        torch.distributions.MultivariateNormal(center, shape @ shape.T).log_prob(x)
        for center, shape in zip(centers, shapes, strict=True)
    ]
    return x, y, torch.stack(each, dim=1).argmax(dim=1)


def view_of(x, y, known, classes=CLASSES):
    half = len(x) // 2
    features = {"train": x[:half], "test": x[half:]}
    return View("passive_1", "passive", classes, features, None, torch.arange(known), y[:known])


def accuracy(guess, y, split, known):
    half, own = len(y) // 2, guess.scores[split].argmax(dim=1)
    right = own == (y[:half] if split == "train" else y[half:])
    return float(right[known if split == "train" else 0 :].double().mean())


@pytest.mark.parametrize("split", ["train", "test"])
def test_with_few_labels_it_comes_near_the_bayes_rule(split):
    x, y, best = mixture()
    bayes = float((best == y).double().mean())
    view = view_of(x, y, 45)
    reached = accuracy(PseudoLabels()(view, seed=0), y, split, 45)
    assert reached > bayes - 0.05
    others = [accuracy(attack(view, seed=0), y, split, 45) for attack in (LogisticRegression(), Trees(), Squares())]
    assert reached > max(others) + 0.05


def test_rows_without_a_label_teach_what_few_labels_cannot():
    x, y, _ = mixture()
    view = view_of(x, y, 24)
    alone = replace(view, features={**view.features, "train": x[:24]})
    many, none = (accuracy(PseudoLabels()(one, seed=0), y, "test", 24) for one in (view, alone))
    assert many > none + 0.05


def test_while_a_class_has_no_more_rows_than_columns_all_share_a_covariance():
    """The rule is linear then: 30 rows of 40 columns, of which one tells the class."""
    rng = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 2
    x = torch.randn(60, 40, generator=rng)
    x[:, 0] += 6.0 * y
    assert accuracy(PseudoLabels()(view_of(x, y, 20, classes=2), seed=0), y, "test", 20) > 0.85
    x, y, _ = mixture()
    for rows, is_quadratic in ((CLASSES * WIDTH, False), (CLASSES * (WIDTH + 1), True)):
        assert (_make_rule(_get_moments(x[:rows], y[:rows], CLASSES)) is not None) is is_quadratic


def test_a_class_with_one_known_row_and_one_with_none():
    x, y, _ = mixture()
    view = view_of(x, y, 40)
    kept = (view.aux_labels == 0) | (torch.arange(40) == 1)
    scores = PseudoLabels()(view.restrict(kept.nonzero().flatten()), seed=0).scores
    assert all((one.argmin(dim=1) == 2).all() for one in scores.values())
    only = PseudoLabels()(view.restrict((view.aux_labels == 0).nonzero().flatten()), seed=0).scores
    assert all((one.argmax(dim=1) == 0).all() for one in only.values())


def test_one_known_row_of_each_class_is_enough_where_classes_are_far_apart():
    x, y, _ = mixture(n=600, apart=40.0)
    assert accuracy(PseudoLabels()(view_of(x, y, CLASSES), seed=0), y, "test", CLASSES) > 0.95


def test_fewer_rows_than_folds():
    x, y, _ = mixture(n=6)
    scores = PseudoLabels()(view_of(x, y, 3), seed=0).scores
    assert (scores["train"].argmax(dim=1) == y[:3]).all(), "all are known"


def test_the_rule_without_each_fold_is_that_of_the_library_on_the_rows_left():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 6)) @ rng.normal(size=(6, 6)) + 3
    y = (x[:, 0] + rng.normal(size=400) > 3).astype(int)
    fold, known = np.arange(400) % 3, np.arange(50)
    rules = _fit_without_each_fold(*map(torch.tensor, (x, y, fold, known)))
    for k, rule in enumerate(rules):
        kept = (fold != k) | (np.arange(400) < 50)
        expected = QuadraticDiscriminantAnalysis(reg_param=RIDGE).fit(x[kept], y[kept]).predict_log_proba(x)
        np.testing.assert_allclose(rule(torch.tensor(x)), expected, rtol=1e-7, atol=1e-9)


def test_of_many_columns_it_reads_the_principal_components(monkeypatch):
    """A hundred noisy copies of six columns have six components that tell something."""
    x, y, best = mixture()
    copies = x.repeat(1, 100) + 0.01 * torch.randn(N, 100 * WIDTH, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(pseudo_labels, "MAX_COLUMNS", WIDTH)
    reached = accuracy(PseudoLabels()(view_of(copies, y, 45), seed=0), y, "test", 45)
    assert reached > float((best == y).double().mean()) - 0.05
