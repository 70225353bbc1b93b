"""Gradient reversal changes nothing on the way up and the sign on the way down."""

import pytest
import torch

from vflsec.nn.feature_groups import reverse


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0, 2.5])
def test_the_gradient_is_minus_alpha_times_what_it_would_be(alpha):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = reverse(x, alpha)
    assert torch.equal(y, x)
    y.pow(3).sum().backward()
    assert torch.allclose(x.grad, -alpha * 3 * x.detach().square(), rtol=1e-6)


def test_it_is_differentiable_in_double_precision():
    x = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (g,) = torch.autograd.grad(reverse(x, 0.5).sin().sum(), x)
    assert torch.allclose(g, -0.5 * x.cos(), atol=1e-15)
