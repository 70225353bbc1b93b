"""Many logistic regressions at once: the same optima as scikit-learn's, one by one."""

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict

from vflsec.inference import regression
from vflsec.inference.regression import fit_many, predict_many

PENALTIES = np.logspace(-4, 2, 7)


def world(load, n=80, width=8):
    x, y = load(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(y))[:n]
    return ((x - x.mean(axis=0)) / x.std(axis=0))[rows, :width], y[rows]


def samples(n, folds=5):
    fold = np.random.default_rng(1).integers(0, folds, n)
    return np.tile(fold != np.arange(folds)[:, None], (len(PENALTIES), 1)), np.repeat(PENALTIES, folds)


@pytest.mark.parametrize("load", [load_breast_cancer, load_wine])
def test_each_is_the_optimum_that_scikit_learn_finds(load):
    x, y = world(load)
    sampled, penalties = samples(len(y))
    found, converged = fit_many(x, y, sampled, penalties)
    assert converged
    told = predict_many(x, found)
    for rows, penalty, log_p in zip(sampled, penalties, told, strict=True):
        one = LogisticRegression(C=penalty, tol=1e-10, max_iter=10_000).fit(x[rows], y[rows])
        assert np.allclose(one.predict_proba(x), np.exp(log_p), atol=2e-5)


def test_gradients_vanish():
    x, y = world(load_wine)
    sampled, penalties = samples(len(y))
    found, _ = fit_many(x, y, sampled, penalties)
    p = np.exp(predict_many(x, found))
    wrong = sampled[:, :, None] * penalties[:, None, None] * (p - np.eye(3)[y])
    assert np.allclose(x.T @ wrong, -found[:, :-1], atol=1e-5)
    assert np.allclose(wrong.sum(axis=1), 0, atol=1e-5)


def test_rows_outside_a_sample_are_not_read():
    x, y = world(load_breast_cancer)
    sampled, penalties = samples(len(y))
    changed = x.copy()
    changed[~sampled[0]] += 100
    before, after = (fit_many(own, y, sampled[:1], penalties[:1])[0] for own in (x, changed))
    assert np.allclose(before, after, atol=1e-9)


def test_separable_classes_converge():
    x = np.linspace(-1, 1, 20)[:, None]
    found, converged = fit_many(x, (x[:, 0] > 0).astype(int), np.ones((1, 20), dtype=bool), np.array([1e4]))
    assert converged
    assert np.isfinite(found).all()


@pytest.mark.parametrize("load", [load_breast_cancer, load_wine])
def test_a_search_chooses_what_one_by_one_it_chooses(load):
    x, y = world(load)
    found = regression.search_penalty(x, y, 5, seed=3)
    values = []
    for penalty in PENALTIES:
        model = LogisticRegression(C=penalty, tol=1e-10, max_iter=10_000)
        told = cross_val_predict(
            model, x, y, cv=StratifiedKFold(5, shuffle=True, random_state=3), method="predict_log_proba"
        )
        values.append(told[np.arange(len(y)), y].sum())
    assert PENALTIES[np.argmax(values)] == found.model.C
    assert found.value == pytest.approx(max(values), rel=1e-5)
