"""Logistic regression: the adversary without the federation."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression as Classifier

from vflsec.attacks.logistic import LogisticRegression
from vflsec.base.seeds import make_rng
from vflsec.core.view import Need, View
from vflsec.inference.regression import PENALTIES


def make_view(labels, *, n=80, classes=2):
    rng = make_rng(0, "logistic")
    y = torch.arange(n) % classes
    x = torch.randn(n, 4, generator=rng) + 2.0 * torch.nn.functional.one_hot(y, 4)
    rows = torch.cat([(y == c).nonzero().flatten()[:count] for c, count in enumerate(labels)])
    return View("passive_1", "passive", classes, {"train": x, "test": x + 0.1}, None, rows, y[rows]), y


def test_it_reads_no_model_and_no_message():
    assert LogisticRegression.needs == {Need.FEATURES, Need.AUX_LABELS}


@pytest.mark.parametrize("classes", [2, 3])
def test_it_recovers_what_own_columns_tell(classes):
    view, y = make_view([10] * classes, classes=classes)
    guess = LogisticRegression()(view, seed=0)
    assert float((guess.scores["test"].argmax(dim=1) == y).double().mean()) > 0.8
    assert guess.converged is True
    assert guess.budget == {"fits": 5 * len(PENALTIES) + 1}


@pytest.mark.parametrize(("labels", "fits"), [([3, 10], 3 * 7 + 1), ([2, 2], 2 * 7 + 1), ([9, 9], 5 * 7 + 1)])
def test_no_more_folds_than_the_rarest_class_has_samples(labels, fits):
    view, _ = make_view(labels)
    assert LogisticRegression()(view, seed=0).budget == {"fits": fits}


def test_with_one_sample_of_a_class_the_penalty_is_not_searched():
    view, _ = make_view([1, 10])
    found = LogisticRegression()(view, seed=0).scores["train"]
    plain, x = Classifier(max_iter=2000, tol=1e-10), view.features["train"].double().numpy()
    plain.fit(x[view.aux_rows], view.aux_labels.numpy())
    expected = torch.from_numpy(plain.predict_log_proba(x))
    # The attack fits in float32, whose search ends within 1e-5 of the optimum, by the order of sums of the processor.
    assert torch.allclose(found.double(), expected, atol=1e-4)


def test_a_class_without_a_sample_is_the_least_likely():
    view, _ = make_view([8, 0, 8], classes=3)
    scores = LogisticRegression()(view, seed=0).scores["test"]
    assert (scores.argmin(dim=1) == 1).all()
    assert torch.isfinite(scores).all()


def test_the_seed_decides_the_folds_only():
    view, _ = make_view([10, 10])
    first, again = (LogisticRegression()(view, seed=1).scores["test"] for _ in range(2))
    assert torch.equal(first, again)


def test_only_the_auxiliary_labels_matter():
    """Rows outside the auxiliary set do not change the fit."""
    view, _ = make_view([10, 10])
    honest = LogisticRegression()(view, seed=0).scores["test"]
    others = torch.ones(80, dtype=torch.bool)
    others[view.aux_rows] = False
    view.features["train"][others] = 1e3
    assert torch.equal(LogisticRegression()(view, seed=0).scores["test"], honest)
