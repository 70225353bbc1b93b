"""A frozen model in the place of one that is trained."""

from __future__ import annotations

from torch import Tensor, nn


class Frozen(nn.Module):
    """Returns the outputs of a model as leaves; its parameters and running statistics do not change.

    Args:
        model: always in evaluation mode.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def width(self) -> int:
        """The width of its outputs."""
        width = self.model.width
        assert isinstance(width, int)
        return width

    def train(self, mode: bool = True) -> Frozen:
        """Ignore ``mode``."""
        self.training = mode
        self.model.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's output."""
        h: Tensor = self.model(x)
        return h.detach().requires_grad_()
