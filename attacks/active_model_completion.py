"""Active model completion: a malicious optimizer makes the top model rely on the adversary's bottom, then MC."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vflsec.attacks.model_completion import ModelCompletion
from vflsec.base.checks import check_non_negative
from vflsec.base.errors import UsageError

TINY = 1e-7


class ActiveModelCompletion(ModelCompletion):
    """Model completion, after training the adversary's own bottom model with updates that are larger than agreed.

    Each entry u_t of an update is scaled by r = clamp(1 + gamma · u_t / (u'_{t-1} + 1e-7), 1, largest), where u'_{t-1}
    is the scaled update before. Entries that keep their sign grow, and none shrinks. The bottom model then contributes
    more to the task, and contains more of the labels. The adversary changes only its own optimizer; its messages follow
    the protocol.

    The source has SGD with momentum and scales the momentum buffer itself, so that scaling accumulates (``feedback``).
    If the federation trains with Adam, ``base=adam`` (ours) scales Adam's update, and nothing accumulates.

    Source: Fu et al., USENIX Security 2022, section 4.2, and released code: gamma 1, r in [1, 5], momentum 0.9.

    Args, besides those of ``mc``:
        gamma: how much a consistent update grows.
        largest: upper bound of r.
        base: ``adam`` or ``sgd``.
        feedback: with ``sgd``, whether the scaled update is the momentum of the next step.
    """

    name = "active-mc"
    reference = "Fu et al., USENIX Security 2022, section 4.2 and released code"
    verified = "optimizer: equality with the formula; attack: unverified"
    differs = (
        *ModelCompletion.differs,
        "If the federation trains with Adam, the scaling acts on Adam's update (base=adam); the source has SGD with "
        "momentum.",
        "The malicious optimizer has no weight decay.",
        "All layers of the bottom model are scaled; the released code can restrict this to the top ones.",
    )
    costs = "a training run of its own for each cell"
    fails = "if gradients are mostly noise, which the optimizer enlarges too"

    def __init__(
        self,
        *,
        gamma: float = 1.0,
        largest: float = 5.0,
        base: Literal["adam", "sgd"] = "adam",
        feedback: bool = True,
        mode: Literal["supervised", "mixmatch"] = "supervised",
        freeze_bottom: bool = True,
        layers: int = 1,
        epochs: int | None = None,
        steps: int = 1024,
        lr: float | None = None,
        batch: int | None = None,
    ) -> None:
        super().__init__(
            mode=mode, freeze_bottom=freeze_bottom, layers=layers, epochs=epochs, steps=steps, lr=lr, batch=batch
        )
        check_non_negative(gamma=gamma)
        if not largest >= 1:
            raise UsageError(
                f"expected largest >= 1, got {largest}: a malicious update is never smaller than an honest one"
            )
        self.gamma = gamma
        self.largest = largest
        self.base = base
        self.feedback = feedback

    def optimizer(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """Return the malicious optimizer of the adversary's own bottom model."""
        return _Malicious(parameters, lr, self.gamma, self.largest, base=self.base, feedback=self.feedback)


class _Malicious(torch.optim.Optimizer):
    """SGD with momentum 0.9, or Adam with its default hyperparameters, whose consistent updates are enlarged."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, gamma: float, largest: float, *, base: str, feedback: bool
    ) -> None:
        super().__init__(parameters, {"lr": lr})
        self.gamma, self.largest, self.base, self.feedback = gamma, largest, base, feedback

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # returns no loss
        """Update every parameter that has a gradient."""
        assert closure is None, "no method passes one"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"])

    def _update(self, parameter: nn.Parameter, grad: Tensor, lr: float) -> None:
        state = self.state[parameter]
        update = self._scale_momentum(state, grad) if self.base == "sgd" else _compute_adam(state, grad)
        if "last" in state:
            update = update * (1 + self.gamma * update / (state["last"] + TINY)).clamp(1.0, self.largest)
        state["last"] = update.clone()
        if self.base == "sgd" and self.feedback:
            state["momentum"] = update.clone()
        parameter.sub_(update, alpha=lr)

    def _scale_momentum(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        velocity = 0.9 * state["momentum"] + grad if "momentum" in state else grad.clone()
        state["momentum"] = velocity
        return velocity


def _compute_adam(state: dict[str, Any], grad: Tensor) -> Tensor:
    """Return Adam's update of this step, before the learning rate."""
    step = state["step"] = state.get("step", 0) + 1
    mean = state["mean"] = 0.9 * state.get("mean", torch.zeros_like(grad)) + 0.1 * grad
    square = state["square"] = 0.999 * state.get("square", torch.zeros_like(grad)) + 0.001 * grad * grad
    update: Tensor = (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
    return update
