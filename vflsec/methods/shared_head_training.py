"""Training of a head that protocols hold in shares, on bottom models that stay as they are."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from vflsec.core.method import TrainSpec, World
from vflsec.core.protocol import Boundary, LinearBoundary, Step
from vflsec.methods.split_training import SplitTraining
from vflsec.nn.frozen import Frozen


class SharedHeadTraining(SplitTraining):
    """Weights that a protocol holds learn in exchanges: rows are sent in every epoch, and no gradient comes back.

    Args:
        world: parties and wire.
        bottoms: each party's bottom model by name; none of them learns.
        top: what the active party holds of the head by itself.
        boundaries: the protocol to each passive party by name.
        spec: how to fit.
    """

    def __init__(
        self,
        world: World,
        bottoms: Mapping[str, nn.Module],
        top: nn.Module,
        boundaries: Mapping[str, Boundary],
        spec: TrainSpec,
    ) -> None:
        super().__init__(world, {name: Frozen(bottom) for name, bottom in bottoms.items()}, top, boundaries, spec)

    def _down(self, name: str, h: Tensor, step: Step) -> Tensor:
        """Let the weights learn; the zeros go no further than the embedding, which is a leaf."""
        boundary, bottom = self.boundaries[name], self.bottoms[name]
        if not isinstance(boundary, LinearBoundary):  # one that can learn only by saying something
            return super()._down(name, h, step)
        assert isinstance(bottom, Frozen)
        assert h.grad is not None
        boundary.learn(h.grad, step)
        return h.new_zeros(len(h), bottom.width)
