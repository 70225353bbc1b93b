"""The gradient reversal layer: the identity, with a negated gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def reverse(x: Tensor, alpha: float) -> Tensor:
    """Return ``x``; in the backward pass a gradient g becomes -alpha g.

    Source: Ganin and Lempitsky 2015, "Unsupervised domain adaptation by backpropagation", section 3.1.
    """
    reversed_: Tensor = _Reversal.apply(x, alpha)  # type: ignore[no-untyped-call]
    return reversed_


class _Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.alpha * gradients[0], None
