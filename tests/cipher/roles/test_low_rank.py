"""A few rows stand for all, and tell no more than all of delta W^T does."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from vflsec.cipher.roles.active import factor


def matrix(rows, columns, rank, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, rank)) @ rng.normal(size=(rank, columns))


@given(st.integers(1, 40), st.integers(1, 10), st.integers(1, 10), st.integers(0, 10**6))
def test_rows_times_coefficients_are_the_matrix(rows, columns, rank, seed):
    rank = min(rows, columns, rank)
    delta = matrix(rows, columns, rank, seed)
    found = factor(delta)
    assert found.rows.shape == (rank,)
    assert found.coefficients.shape == (rows, rank)
    assert np.allclose(found.coefficients @ delta[found.rows], delta, atol=1e-12 * np.abs(delta).max() * 100)
    assert np.allclose(found.coefficients[found.rows], np.eye(rank), atol=1e-9)


@pytest.mark.parametrize("columns", [1, 3, 10])
def test_both_are_functions_of_delta_times_weights(columns):
    """Whoever has delta W^T in full finds the same rows and the same coefficients, for any W of full column rank."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        delta = rng.normal(size=(30, columns)) * rng.exponential(size=(30, 1))
        weights = rng.normal(size=(12, columns)) * 10.0 ** rng.uniform(-2, 2, size=columns)
        of_delta, of_product = factor(delta), factor(delta @ weights.T)
        assert of_delta.rows.tolist() == of_product.rows.tolist()
        assert np.allclose(of_delta.coefficients, of_product.coefficients, atol=1e-7)


def test_one_column_gives_signed_ratios_to_the_longest():
    """Positive ratios would tell the common sign of delta, which delta W^T hides."""
    delta = np.array([[0.25], [-0.5], [0.0]])
    for sign in (1, -1):
        found = factor(sign * delta)
        assert found.rows.tolist() == [1]
        assert np.allclose(found.coefficients, [[-0.5], [1.0], [0.0]])


def test_softmax_gradients_have_a_column_less():
    delta = matrix(20, 4, 4, 0)
    assert len(factor(delta - delta.mean(1, keepdims=True)).rows) == 3


@pytest.mark.parametrize("columns", [2, 3, 10])
@pytest.mark.parametrize("rows", [32, 100, 128])
@pytest.mark.parametrize("scale", [1.0, 12.0])
def test_softmax_gradients_in_float32_have_a_column_less_too(columns, rows, scale):
    """Their rows add up to zero but for rounding, which is no row of its own to send."""
    rng = torch.Generator().manual_seed(0)
    z = (scale * torch.randn(rows, columns, generator=rng)).requires_grad_()
    functional.cross_entropy(z, torch.randint(columns, (rows,), generator=rng)).backward()
    delta = z.grad.double().numpy() * rows
    dithered = delta + 2.0**-23 * (np.random.default_rng(0).random(delta.shape) - 0.5)
    found = factor(dithered, 2.0**-23)
    assert len(found.rows) == columns - 1
    assert np.abs(found.coefficients @ delta[found.rows] - delta).max() < 4e-7


def test_nothing_stands_for_zero():
    found = factor(np.zeros((5, 3)))
    assert found.rows.shape == (0,)
    assert found.coefficients.shape == (5, 0)
