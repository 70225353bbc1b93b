"""Siamese self-supervised learning on two views of a row: the base of SimSiam, BYOL and MoCo."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from vflsec.nn.losses.negative_cosine import negative_cosine
from vflsec.nn.projection import Predictor, Projector


class Siamese(nn.Module, ABC):
    """An encoder with a projector and a predictor, and the losses that train them without labels.

    One object serves as FedHSSL's local model, trained by ``two_views``, or as its cross-party model, trained by
    ``cross_loss``. A training step is ``two_views(...).backward()``, the optimizer's step, ``after_step()``. A training
    batch needs at least two rows, since heads have BatchNorm.

    Source: FedHSSL (arXiv 2208.08934), section III-B with table II, section IV-B with eq. 5 and 6.

    Class attributes:
        name: for methods and results.
        cross_differs: differences of ``cross_loss`` from FedHSSL.
        local_differs: differences of ``two_views`` from FedHSSL.

    Args:
        encoder: (B, features) -> (B, width), with submodules ``bottom`` and ``top``.
        width: of its output.
        projector: width of the projector's hidden layers.
        predictor: width of the predictor's hidden layer; None for no predictor.
        out: width d of the projections; None for that of ``projector``.
    """

    name: ClassVar[str]
    cross_differs: ClassVar[tuple[str, ...]]
    local_differs: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        encoder: nn.Module,
        width: int,
        *,
        projector: int = 512,
        predictor: int | None = 128,
        out: int | None = None,
    ) -> None:
        super().__init__()
        out = out or projector
        self.encoder = encoder
        self.projector = Projector(width, projector, out)
        self.predictor = None if predictor is None else Predictor(out, predictor)

    def represent(self, x: Tensor) -> Tensor:
        """Return the embedding (B, width) for downstream tasks."""
        h: Tensor = self.encoder(x)
        return h

    def project(self, x: Tensor) -> Tensor:
        """Return projections z (B, d), which parties exchange."""
        z: Tensor = self.projector(self.encoder(x))
        return z

    def predict(self, z: Tensor) -> Tensor:
        """Return predictions p (B, d) from projections; without a predictor, the projections."""
        return z if self.predictor is None else self.predictor(z)

    def cross_loss(self, p: Tensor, z: Tensor) -> Tensor:
        """Return the loss of predictions (B, d) against another party's projections z (B, d), eq. 5; z is detached."""
        return negative_cosine(p, z)

    def two_views(
        self, v1: Tensor, v2: Tensor, guide: tuple[Tensor, Tensor] | None = None, gamma: float = 0.0
    ) -> Tensor:
        """Return L = 1/2 [SSL(p1, z2~) + SSL(p2, z1~)] + gamma [SSL(p1, c1) + SSL(p2, c2)], eq. 6.

        Without a guide, or with gamma = 0, exactly the first half, and its gradients.

        Args:
            v1: the first view of each row (B, features).
            v2: the second.
            guide: c1 and c2 (B, d), the cross-party model's projections of the same two views; detached here.
            gamma: weight of the guidance.
        """
        z1, z2 = self.project(v1), self.project(v2)
        p1, p2 = self.predict(z1), self.predict(z2)
        target1, target2 = self._targets(v1, v2, z1, z2)
        loss = 0.5 * (self._ssl(p1, target2, 1) + self._ssl(p2, target1, 2))
        if guide is not None and gamma != 0:
            loss = loss + gamma * (self._ssl(p1, guide[0], 1) + self._ssl(p2, guide[1], 2))
        return loss

    def after_step(self) -> None:
        """Update the state that follows the online network; called after each optimizer step."""

    def online_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the trained parameters: of encoder and projector, on a schedule; of the predictor, at a fixed rate."""
        scheduled = [*self.encoder.parameters(), *self.projector.parameters()]
        return scheduled, [] if self.predictor is None else [*self.predictor.parameters()]

    def shared(self) -> dict[str, nn.Module]:
        """Return the modules that partial model aggregation averages: not the encoder's bottom nor target networks."""
        shared = {"top": self.encoder.get_submodule("top"), "projector": self.projector}
        return shared if self.predictor is None else {**shared, "predictor": self.predictor}

    def _targets(self, v1: Tensor, v2: Tensor, z1: Tensor, z2: Tensor) -> tuple[Tensor, Tensor]:
        """Return z1~ and z2~ (B, d); here the projections themselves, which ``_ssl`` detaches."""
        return z1, z2

    @abstractmethod
    def _ssl(self, p: Tensor, z: Tensor, view: int) -> Tensor:
        """Return the loss of predictions (B, d) from view 1 or 2 against targets (B, d), which are detached."""
