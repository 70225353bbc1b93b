"""A model that does not learn, where a training expects one that does."""

from __future__ import annotations

from torch import Tensor, nn


class Frozen(nn.Module):
    """The same outputs, as leaves: a gradient that is given to them goes no further, and running statistics stay.

    Args:
        model: stays in evaluation mode.
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
        """Return what the model makes of ``x``."""
        h: Tensor = self.model(x)
        return h.detach().requires_grad_()
