"""Each loss against its formula written out in loops, and what all of them have in common."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vflsec.nn.losses import info_nce, negative_cosine, normalize, nt_xent, regression, scarf_loss

quick = settings(max_examples=30)
rows, widths, seeds = st.integers(1, 7), st.integers(1, 6), st.integers(0, 2**31)
temperatures = st.floats(0.05, 5)


def normal(seed, *shapes):
    """Draw one matrix per shape."""
    rng = np.random.RandomState(seed)
    return [torch.from_numpy(rng.randn(*shape)) for shape in shapes]


def cos(a, b):
    return float(a @ b / (np.sqrt(a @ a) * np.sqrt(b @ b)))


def negatives_of_two(p, z):
    """InfoNCE of p and z with two fixed negatives."""
    width = p.shape[1]
    return info_nce(p, z, torch.stack([torch.ones(width), torch.arange(width) - 0.5]).to(p), 0.5)


LOSSES = {
    "negative_cosine": negative_cosine,
    "regression": regression,
    "info_nce": negatives_of_two,
    "nt_xent": partial(nt_xent, temperature=0.5),
    "scarf": partial(scarf_loss, temperature=0.5),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


@given(rows, widths, seeds)
@quick
def test_cosine_losses(n, d, seed):
    p, z = normal(seed, (n, d), (n, d))
    mean = np.mean([cos(p[i].numpy(), z[i].numpy()) for i in range(n)])
    assert negative_cosine(p, z).item() == pytest.approx(-mean, abs=1e-12)
    assert regression(p, z).item() == pytest.approx(2 - 2 * mean, abs=1e-12)
    between = p / p.norm(dim=1, keepdim=True) - z / z.norm(dim=1, keepdim=True)
    assert regression(p, z).item() == pytest.approx(between.square().sum(dim=1).mean().item(), abs=1e-12)


@given(rows, st.integers(0, 9), widths, temperatures, seeds)
@quick
def test_info_nce(n, q, d, tau, seed):
    p, z, negatives = normal(seed, (n, d), (n, d), (q, d))
    expected = 0.0
    for i in range(n):
        positive = np.exp(cos(p[i].numpy(), z[i].numpy()) / tau)
        others = sum(np.exp(cos(p[i].numpy(), negatives[j].numpy()) / tau) for j in range(q))
        expected -= np.log(positive / (positive + others)) / n
    assert info_nce(p, z, negatives, tau).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(rows, widths, temperatures, seeds)
@quick
def test_nt_xent(n, d, tau, seed):
    a, b = normal(seed, (n, d), (n, d))
    both = [*a.numpy(), *b.numpy()]
    expected = 0.0
    for i in range(2 * n):
        others = {j: np.exp(cos(both[i], both[j]) / tau) for j in range(2 * n) if j != i}
        assert len(others) == 2 * n - 1  # the partner and 2n - 2 negatives
        expected -= np.log(others[(i + n) % (2 * n)] / sum(others.values())) / (2 * n)
    assert nt_xent(a, b, tau).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert nt_xent(b, a, tau).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(rows, widths, temperatures, seeds)
@quick
def test_scarf(n, d, tau, seed):
    z, corrupted = normal(seed, (n, d), (n, d))
    s = np.array([[cos(z[i].numpy(), corrupted[j].numpy()) for j in range(n)] for i in range(n)])
    expected = np.mean([-s[i, i] / tau + np.log(np.mean(np.exp(s[i] / tau))) for i in range(n)])
    assert scarf_loss(z, corrupted, tau).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_scarf_is_info_nce_less_log_n_with_the_other_rows_as_negatives():
    z, corrupted = normal(0, (5, 4), (5, 4))
    each = [info_nce(z[[i]], corrupted[[i]], corrupted[[j for j in range(5) if j != i]], 0.7) for i in range(5)]
    assert scarf_loss(z, corrupted, 0.7).item() == pytest.approx(torch.stack(each).mean().item() - np.log(5), abs=1e-12)


def test_scarf_does_not_overflow_at_a_small_temperature():
    z, corrupted = normal(0, (5, 4), (5, 4))
    s = normalize(z) @ normalize(corrupted).T
    nearly_the_largest = (s.max(dim=1).values - s.diagonal()).mean().item() / 1e-4 - np.log(5)
    assert scarf_loss(z.float(), corrupted.float(), 1e-4).item() == pytest.approx(nearly_the_largest, rel=1e-4)


def test_values_that_need_no_formula():
    x = torch.tensor([[3.0, 4.0], [-4.0, 3.0]])
    assert negative_cosine(x, 7 * x).item() == pytest.approx(-1)
    assert negative_cosine(x, x.flip(0)).item() == pytest.approx(0, abs=1e-7)
    assert regression(x, x).item() == pytest.approx(0, abs=1e-6)
    assert regression(x, -x).item() == pytest.approx(4)
    alike = torch.ones(6, 3)
    assert info_nce(alike, alike, torch.ones(9, 3), 0.1).item() == pytest.approx(np.log(10), rel=1e-6)
    assert nt_xent(alike, alike, 0.1).item() == pytest.approx(np.log(11), rel=1e-6)
    assert scarf_loss(alike, alike, 0.1).item() == pytest.approx(0, abs=1e-6)


@every_loss
def test_only_directions_count(loss):
    p, z, scale = normal(1, (6, 4), (6, 4), (6, 1))
    torch.testing.assert_close(loss(p * scale.exp(), 100 * z), loss(p, z))


@every_loss
def test_gradients_are_the_derivative(loss):
    p, z = normal(2, (5, 3), (5, 3))
    assert torch.autograd.gradcheck(lambda p: loss(p, z), p.requires_grad_())


@pytest.mark.parametrize("name", ["negative_cosine", "regression", "info_nce"])
def test_the_second_argument_gets_no_gradient(name):
    p, z = (x.requires_grad_() for x in normal(3, (5, 3), (5, 3)))
    LOSSES[name](p, z).backward()
    assert z.grad is None
    assert p.grad.abs().min() > 0


def test_negatives_get_no_gradient():
    p, z, negatives = (x.requires_grad_() for x in normal(3, (5, 3), (5, 3), (8, 3)))
    info_nce(p, z, negatives, 0.5).backward()
    assert negatives.grad is None


@pytest.mark.parametrize("name", ["nt_xent", "scarf"])
def test_both_arguments_get_their_gradient_unless_detached(name):
    loss = LOSSES[name]
    a, b = (x.requires_grad_() for x in normal(4, (5, 3), (5, 3)))
    assert torch.autograd.gradcheck(loss, (a, b))
    both = torch.autograd.grad(loss(a, b), (a, b))
    torch.testing.assert_close(torch.autograd.grad(loss(a, b.detach()), a)[0], both[0])
    torch.testing.assert_close(torch.autograd.grad(loss(a.detach(), b), b)[0], both[1])


@every_loss
@pytest.mark.parametrize("zero", ["first", "second", "both"])
def test_zero_rows_give_finite_values_and_modest_gradients(loss, zero):
    p, z = (x.float() for x in normal(5, (4, 3), (4, 3)))
    if zero != "second":
        p[1] = 0
    if zero != "first":
        z[1] = 0
    p.requires_grad_(), z.requires_grad_()
    value = loss(p, z)
    value.backward()
    assert torch.isfinite(value)
    for x in (p, z):
        assert x.grad is None or x.grad.abs().max() < 10


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_stays(loss, dtype):
    p, z = (x.to(dtype) for x in normal(6, (4, 3), (4, 3)))
    assert loss(p, z).dtype is dtype
    assert loss(p, z).shape == ()


@every_loss
def test_rows_are_paired_one_to_one(loss):
    p, z = normal(7, (4, 3), (1, 3))
    with pytest.raises(AssertionError, match="one .* per"):
        loss(p, z)


def test_unit_rows_have_length_one_and_zero_stays_zero():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, -1e-6]])
    torch.testing.assert_close(normalize(x), torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.0, -1.0]]))
    assert normalize(torch.ones(0, 3)).shape == (0, 3)
