"""Mixtures of Gaussian processes: leave-one-out and predictions against naive refits, weights against a library."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, WhiteKernel

from vflsec.inference.kernel_mixture import NOISE, Kernel, Mixture, scale_rows

N, KNOWN = 60, 25


def tables(seed=0):
    rng = torch.Generator().manual_seed(seed)
    x, z = (torch.randn(N, k, generator=rng, dtype=torch.float64) for k in (3, 5))
    targets = torch.stack([x[:, 0] + z[:, 0], x[:, 1]], dim=1) + 0.3 * torch.randn(N, 2, generator=rng)
    return {"x": scale_rows(x, x), "z": scale_rows(z, z)}, targets.double()


def mixture(kernels, targets, likelihood, known=KNOWN):
    rng = torch.Generator().manual_seed(0)
    return Mixture(kernels, torch.arange(known), targets[:known], likelihood, rng)


def test_leave_one_out_predictions_equal_naive_refits():
    x, targets = tables()
    seen = {}

    def likelihood(predicted, rows):
        seen.setdefault("first", predicted)  # of the first table alone
        return torch.zeros(len(predicted), dtype=torch.float64)

    mixture({"x": Kernel(x["x"])}, targets, likelihood)
    y = targets[:KNOWN]
    gram = x["x"][:KNOWN] @ x["x"][:KNOWN].T + 1
    for place, noise in enumerate(NOISE):
        for out in range(KNOWN):
            rest = torch.arange(KNOWN) != out
            regular = gram[rest][:, rest] + noise * torch.eye(KNOWN - 1)
            naive = y.mean(dim=0) + gram[out, rest] @ torch.linalg.solve(regular, y[rest] - y.mean(dim=0))
            torch.testing.assert_close(seen["first"][place, out], naive)


def test_the_mixture_s_held_out_predictions_are_those_of_its_candidates():
    """One candidate is kept, so that its leave-one-out predictions are the mixture's."""
    x, targets = tables()
    seen = []

    def only_unit_noise(predicted, rows):
        seen.append(predicted[NOISE == 1.0][0])
        return torch.where(NOISE == 1.0, 0.0, -1e9)

    found = mixture({"x": Kernel(x["x"])}, targets, only_unit_noise).predict_left_out()
    torch.testing.assert_close(found, seen[0])


@pytest.mark.parametrize("nonlinear", [False, True])
def test_one_candidate_predicts_as_scikit_learn_does(nonlinear):
    x, targets = tables()

    def only_unit_noise(predicted, rows):
        return torch.where(NOISE == 1.0, 0.0, -1e9)

    found = mixture({"x": Kernel(x["x"], nonlinear)}, targets, only_unit_noise).predict({"x": x["x"]})
    of_x = RBF(1.0) if nonlinear else DotProduct(1e-9)
    model = GaussianProcessRegressor(of_x + ConstantKernel(1.0) + WhiteKernel(1.0), optimizer=None)
    known, y = x["x"][:KNOWN].numpy(), targets[:KNOWN].numpy()
    model.fit(known, y - y.mean(axis=0))
    np.testing.assert_allclose(found.numpy(), model.predict(x["x"].numpy()) + y.mean(axis=0), atol=1e-8)


def test_the_evidence_ranks_noise_as_scikit_learn_does():
    """With the signal's variance profiled out, the log marginal likelihood of one target differs by a constant."""
    x, targets = tables()
    y = targets[:, :1]
    found = mixture({"x": Kernel(x["x"])}, y, lambda predicted, rows: torch.zeros(len(predicted), dtype=torch.float64))
    scores = {c.noise: c.score for c, _ in found.candidates}
    known, centered = x["x"][:KNOWN].numpy(), (y[:KNOWN] - y[:KNOWN].mean()).numpy()[:, 0]

    def library(noise):
        kernel = DotProduct(1e-9) + ConstantKernel(1.0) + WhiteKernel(noise)
        gram = kernel(known)
        scale = centered @ np.linalg.solve(gram, centered) / KNOWN  # the best variance of the signal
        model = GaussianProcessRegressor(ConstantKernel(scale) * kernel, optimizer=None).fit(known, centered)
        return model.log_marginal_likelihood_value_

    first, *rest = sorted(scores)
    for noise in rest:
        expected = (library(noise) - library(first)) / 2  # the other half is the leave-one-out likelihood, here 0
        assert scores[noise] - scores[first] == pytest.approx(expected, abs=1e-4)


def test_weights_sum_to_one_and_a_large_search_fits_all_known_rows(monkeypatch):
    x, targets = tables()
    monkeypatch.setattr("vflsec.inference.kernel_mixture.SEARCHED", 10)
    found = mixture({name: Kernel(own) for name, own in x.items()}, targets, lambda p, rows: -p.square().sum((1, 2)))
    assert sum(weight for _, weight in found.candidates) == pytest.approx(1.0)
    assert all(len(own) == KNOWN for own in found.coefficients.values())


def test_constant_columns_are_left_out_and_rows_have_unit_square():
    x = torch.cat([torch.randn(500, 4, dtype=torch.float64), torch.full((500, 2), 7.0)], dim=1)
    own = scale_rows(x, x)
    assert own.shape == (500, 4)
    assert own.square().sum(dim=1).mean() == pytest.approx(1.0)


def test_thirty_equal_tables_predict_what_the_table_alone_does():
    """Hundreds of candidates have equal weights then, each of them a negligible one."""
    x, targets = tables()

    def likelihood(predicted, rows):
        return -len(rows) / 2 * (predicted - targets[rows]).square().mean(dim=(1, 2)).log()

    alone = mixture({"x": Kernel(x["x"])}, targets, likelihood).predict({"x": x["x"]})
    names = [str(k) for k in range(30)]
    many = mixture({name: Kernel(x["x"]) for name in names}, targets, likelihood)
    torch.testing.assert_close(many.predict(dict.fromkeys(names, x["x"])), alone, atol=0.05, rtol=0)
