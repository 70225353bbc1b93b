"""Training of a head that protocols hold in shares, on frozen bottom models."""

from __future__ import annotations

from torch import Tensor

from vflsec.core.message import Step
from vflsec.core.method import Progress
from vflsec.core.protocol import LinearBoundary
from vflsec.methods.split_training import SplitTraining
from vflsec.nn.columns import Columns
from vflsec.nn.frozen import Frozen


class SharedHeadTraining(SplitTraining):
    """Weights that a protocol holds learn in exchanges: rows are sent in every epoch, and no gradient comes back.

    The arguments are those of ``SplitTraining``, with every bottom model ``Frozen``.
    """

    def fit(self, phase: str, progress: Progress) -> list[float]:
        """Train as ``SplitTraining`` does, but checks every row first: frozen embeddings are known before any is sent.

        Raises:
            UsageError: a boundary cannot carry one of them.
        """
        self._switch(training=False)  # running statistics must not change
        for party in self.federation.passive:
            bottom, boundary = self.bottoms[party.name], self.boundaries[party.name]
            assert isinstance(bottom, Frozen)
            if isinstance(boundary, LinearBoundary):
                columns = party.layout.names if isinstance(bottom.model, Columns) else None
                for split in self.federation.active.labels:
                    boundary.check(bottom(party.features[split]), columns)
        return super().fit(phase, progress)

    def _down(self, name: str, h: Tensor, step: Step) -> Tensor:
        """Update the weights; the zeros that are returned end at the embedding, which is a leaf."""
        boundary, bottom = self.boundaries[name], self.bottoms[name]
        if not isinstance(boundary, LinearBoundary):  # one that learns only by sending
            return super()._down(name, h, step)
        assert isinstance(bottom, Frozen)
        assert h.grad is not None
        boundary.learn(h.grad, step)
        return h.new_zeros(len(h), bottom.width)
