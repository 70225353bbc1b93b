"""The quick model: at least as good as each of its parts up to noise, and blind to what is not there."""

import numpy as np
from sklearn.metrics import roc_auc_score

from vflsec.data import checkup
from vflsec.data.checkup import score_quickly


def data(rows, kind):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3)).astype(np.float32)
    score = {"linear": x[:, 0], "xor": 3 * np.sign(x[:, 0] * x[:, 1]), "nothing": np.zeros(rows)}[kind]
    return x, (score + rng.normal(size=rows) > 0).astype(int)


def utility(kind, rows=3000):
    x, y = data(2 * rows, kind)
    return score_quickly(x[:rows], y[:rows], x[rows:], y[rows:], n_classes=2, metric="auc")


def test_it_finds_what_a_line_and_what_only_trees_find():
    x, y = data(6000, "linear")
    assert abs(utility("linear") - roc_auc_score(y[3000:], x[3000:, 0])) < 0.005
    assert utility("xor") > 0.95
    assert abs(utility("nothing") - 0.5) < 0.04


def test_a_missing_class_gives_no_number():
    x, _ = data(100, "nothing")
    assert np.isnan(score_quickly(x, np.zeros(100, int), x, np.zeros(100, int), n_classes=2, metric="auc"))


def test_of_many_columns_few_bins_are_enough(monkeypatch):
    monkeypatch.setattr(checkup, "TREES", 10)
    x, y = np.random.default_rng(0).normal(size=(600, 3000)), np.arange(600) % 2
    x[:, 7] = np.where(y == 1, x[:, 7].clip(-0.5, 0.5), np.sign(x[:, 7]) + x[:, 7])  # no line tells them apart
    assert score_quickly(x[:400], y[:400], x[400:], y[400:], n_classes=2, metric="auc") > 0.95
