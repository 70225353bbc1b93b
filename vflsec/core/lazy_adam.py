"""Adam that updates only those rows of a table that a sparse gradient holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class LazyAdam(torch.optim.Adam):
    """Adam; a parameter with a sparse gradient is updated in the rows of the gradient, and so are its moments.

    Other rows keep their values and moments, where Adam would decay the moments and move the rows by them. With dense
    gradients it is Adam.

    Source: the sparse form of Adam of PyTorch's ``SparseAdam``, in one optimizer with the dense one.
    """

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Make one update; ``closure`` is for the base class."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    self._update(parameter, group)
                    parameter.grad = None
        return super().step(closure)

    @torch.no_grad()
    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        if group["weight_decay"]:
            values = values + group["weight_decay"] * parameter[rows]
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        mean = torch.lerp(state["exp_avg"][rows], values, 1 - beta1)
        square = torch.lerp(state["exp_avg_sq"][rows], values.square(), 1 - beta2)
        state["exp_avg"][rows], state["exp_avg_sq"][rows] = mean, square
        deviation = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        parameter.index_add_(0, rows, mean / deviation, alpha=-group["lr"] / (1 - beta1**step))
