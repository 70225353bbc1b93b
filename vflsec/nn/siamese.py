"""Siamese self-supervised learning on two views of a row: SimSiam, BYOL and MoCo."""

import copy
import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from vflsec.base.checks import check_fraction, check_positive
from vflsec.nn.losses import info_nce, negative_cosine, normalize, nt_xent, regression


class Projector(nn.Sequential):
    """Linear-BN-ReLU, Linear-BN-ReLU, Linear-BN: (B, width) -> (B, out).

    Source: Chen and He 2021 (SimSiam), arXiv 2011.10566, section 3; FedHSSL (arXiv 2208.08934), whose widths are 512,
    512 and 512 (MoCo: 128). Only the last Linear has a bias, as in FedHSSL's code.

    Args:
        width: of the input.
        hidden: width of both hidden layers.
        out: width of the projection.
    """

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__(
            *(nn.Linear(width, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU()),
            *(nn.Linear(hidden, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU()),
            *(nn.Linear(hidden, out), nn.BatchNorm1d(out)),
        )


class Predictor(nn.Sequential):
    """A bottleneck, Linear-BN-ReLU, Linear: (B, width) -> (B, width).

    Source: Chen and He 2021 (SimSiam), arXiv 2011.10566, section 3; FedHSSL (arXiv 2208.08934): 512 - 128 - 512.

    Args:
        width: of the projection.
        hidden: width of the bottleneck.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(
            *(nn.Linear(width, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU()), nn.Linear(hidden, width)
        )


class Queue(nn.Module):
    """The last ``size`` keys (size, d), first in, first out; random directions until they are replaced.

    The initial keys are drawn from torch's global stream, as the weights of a layer are.

    Source: He et al. 2020 (MoCo), arXiv 1911.05722, section 3.2, "dictionary as a queue". Batches need not divide it.

    Args:
        size: number of keys.
        width: d.
    """

    keys: Tensor
    pointer: Tensor

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        check_positive(queue=size)
        self.register_buffer("keys", normalize(torch.randn(size, width)))
        self.register_buffer("pointer", torch.tensor(0))  # position of the oldest key, which is replaced next

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        """Replace the oldest keys by keys (B, d), scaled to unit length; if B > ``size``, only the last ones enter."""
        size, n = len(self.keys), len(keys)
        # each slot once: the order of writes is undefined
        new = torch.arange(max(0, n - size), n, device=self.keys.device)
        self.keys[(self.pointer + new) % size] = normalize(keys)[new]
        self.pointer.add_(n).remainder_(size)


@torch.no_grad()
def update_average(target: nn.Module, online: nn.Module, momentum: float) -> None:
    """Set every parameter of ``target`` to momentum · target + (1 - momentum) · online.

    Parameters only: BatchNorm's running statistics are those of the target's own inputs.

    Source: Grill et al. 2020 (BYOL), arXiv 2006.07733, eq. 1; He et al. 2020 (MoCo), arXiv 1911.05722, eq. 2.
    """
    for average, new in zip(target.parameters(), online.parameters(), strict=True):
        average.lerp_(new, 1 - momentum)


FORGOTTEN = 7.0
"""A target network keeps e^-7, a thousandth, of its random start."""


def fit_momentum(momentum: float, updates: int) -> float:
    """Return ``momentum``, or less if a moving average of so many ``updates`` would keep more of its start."""
    return min(momentum, math.exp(-FORGOTTEN / updates))


class Siamese(nn.Module, ABC):
    """An encoder with a projector and a predictor, and the losses that train them without labels.

    One object serves as FedHSSL's local model, trained by ``two_views``, or as its cross-party model, trained by
    ``cross_loss``. A training step is ``two_views(...).backward()``, the optimizer's step, ``update_state()``. A
    training batch needs at least two rows, since heads have BatchNorm.

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

    momentum = 0.0  # of the target network, if there is one
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
        loss = 0.5 * (self._compute_ssl(p1, target2, 1) + self._compute_ssl(p2, target1, 2))
        if guide is not None and gamma != 0:
            loss = loss + gamma * (self._compute_ssl(p1, guide[0], 1) + self._compute_ssl(p2, guide[1], 2))
        return loss

    def update_state(self) -> None:
        """Update the state that follows the online network; called after each optimizer step."""

    def fit_momentum(self, updates: int) -> None:
        """Let the target network forget its random start within so many ``updates``."""
        self.momentum = fit_momentum(self.momentum, updates)

    def list_online(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the trained parameters: of encoder and projector, on a schedule; of the predictor, at a fixed rate."""
        scheduled = [*self.encoder.parameters(), *self.projector.parameters()]
        return scheduled, [] if self.predictor is None else [*self.predictor.parameters()]

    def list_averaged(self) -> dict[str, nn.Module]:
        """Return the modules that partial model aggregation averages: not the encoder's bottom nor target networks."""
        shared = {"top": self.encoder.get_submodule("top"), "projector": self.projector}
        return shared if self.predictor is None else {**shared, "predictor": self.predictor}

    def _targets(self, v1: Tensor, v2: Tensor, z1: Tensor, z2: Tensor) -> tuple[Tensor, Tensor]:
        """Return z1~ and z2~ (B, d); here the projections themselves, which ``_ssl`` detaches."""
        return z1, z2

    @abstractmethod
    def _compute_ssl(self, p: Tensor, z: Tensor, view: int) -> Tensor:
        """Return the loss of predictions (B, d) from view 1 or 2 against targets (B, d), which are detached."""


class SimSiam(Siamese):
    """Predictions of one view against the other view's projections, -cos, gradient stopped.

    Source: Chen and He 2021, arXiv 2011.10566, algorithm 1; FedHSSL (arXiv 2208.08934), eq. 4.
    """

    name = "simsiam"
    cross_differs = ()
    local_differs = ()

    def _compute_ssl(self, p: Tensor, z: Tensor, view: int) -> Tensor:
        return negative_cosine(p, z)


class BYOL(Siamese):
    """Predictions of one view against the other view's projections by a moving average of the network, 2 - 2 cos.

    Between parties there is no moving average, and the loss is -cos, as in FedHSSL's code.

    Source: Grill et al. 2020, arXiv 2006.07733, section 3.1; FedHSSL (arXiv 2208.08934), eq. 3. FedHSSL's code moves
    the average before each forward pass and while evaluating; here it moves after each step.

    Args, besides those of ``Siamese``:
        momentum: weight of the old average in each step; FedHSSL's paper has 0.995, its code 0.999. See
            ``fit_momentum``.
    """

    name = "byol"
    cross_differs = (
        "Across parties: no moving average is kept, and the loss is -cos, that of SimSiam, as in the authors' "
        "code; table II has the average and eq. 3 for BYOL.",
    )
    local_differs = (
        "The moving average follows each optimizer step, and covers parameters alone: BatchNorm's statistics are "
        "the target's own. The authors' code moves it before each forward pass, and at 0.999; momentum is at most the "
        "paper's 0.995, and less where few updates would leave much of the random start.",
    )

    def __init__(
        self, encoder: nn.Module, width: int, *, projector: int = 512, predictor: int = 128, momentum: float = 0.995
    ) -> None:
        super().__init__(encoder, width, projector=projector, predictor=predictor)
        check_fraction(momentum=momentum)
        self.momentum = momentum
        self.target = copy.deepcopy(nn.Sequential(self.encoder, self.projector)).requires_grad_(False)

    def update_state(self) -> None:
        """Move the target network towards the online one."""
        update_average(self.target, nn.Sequential(self.encoder, self.projector), self.momentum)

    @torch.no_grad()
    def _targets(self, v1: Tensor, v2: Tensor, z1: Tensor, z2: Tensor) -> tuple[Tensor, Tensor]:
        return self.target(v1), self.target(v2)

    def _compute_ssl(self, p: Tensor, z: Tensor, view: int) -> Tensor:
        return regression(p, z)


class MoCo(Siamese):
    """Projections of one view against the other view's keys, by a moving average of the network: InfoNCE.

    There is a bank of keys for each view. A query of view 1 meets the bank of view 2, and the other way round, for its
    own key and for the guide's; only its own key is remembered. Between parties the negatives are the batch, both ways.

    Source: He et al. 2020, arXiv 1911.05722, algorithm 1; FedHSSL (arXiv 2208.08934), eq. 2. In FedHSSL's code the
    guide's projections enter the bank as well, and the average moves before each forward pass; here neither.

    Args, besides those of ``Siamese``:
        predictor: ignored, for the signature of its siblings; MoCo has none.
        momentum: weight of the old average in each step; FedHSSL's paper has 0.99, its code 0.999. See
            ``fit_momentum``.
        temperature: tau.
        queue: number of keys in a bank.
        out: width d of the projections.
    """

    name = "moco"
    cross_differs = (
        "Across parties: in-batch NT-Xent in both directions, with 2B - 2 negatives, without queue or moving "
        "average, as in the authors' code; table II has both for MoCo.",
    )
    local_differs = (
        "InfoNCE compares directions (vectors of length one) at the temperature 0.5 of the appendix; eq. 2 prints "
        "neither.",
        "There are two queues of 4096 keys, one for each view, as in the authors' code; the paper has one dictionary.",
        "The guide's projections meet the queue and do not enter it; in the authors' code they enter.",
        "The moving average follows each optimizer step, and covers parameters alone; the authors' code moves it "
        "before each forward pass, and at 0.999; momentum is at most the paper's 0.99, and less where few updates "
        "would leave much of the random start.",
        "The projector's learning rate follows the cosine; in the authors' code it stays constant for MoCo.",
    )

    def __init__(
        self,
        encoder: nn.Module,
        width: int,
        *,
        projector: int = 512,
        predictor: int | None = None,
        momentum: float = 0.99,
        temperature: float = 0.5,
        queue: int = 4096,
        out: int = 128,
    ) -> None:
        super().__init__(encoder, width, projector=projector, predictor=None, out=out)
        check_fraction(momentum=momentum)
        check_positive(temperature=temperature)
        self.momentum = momentum
        self.temperature = temperature
        self.target = copy.deepcopy(nn.Sequential(self.encoder, self.projector)).requires_grad_(False)
        self.bank1, self.bank2 = Queue(queue, out), Queue(queue, out)  # keys of view 1, keys of view 2
        self._keys: tuple[Tensor, Tensor] | None = None  # of the last training step

    def cross_loss(self, p: Tensor, z: Tensor) -> Tensor:
        """Return in-batch NT-Xent of projections (B, d) and another party's z (B, d), which is detached."""
        return nt_xent(p, z.detach(), self.temperature)

    def update_state(self) -> None:
        """Move the target network towards the online one; then remember the last keys, each view in its own bank."""
        update_average(self.target, nn.Sequential(self.encoder, self.projector), self.momentum)
        if self._keys is not None:
            self.bank1.enqueue(self._keys[0])
            self.bank2.enqueue(self._keys[1])
            self._keys = None

    @torch.no_grad()
    def _targets(self, v1: Tensor, v2: Tensor, z1: Tensor, z2: Tensor) -> tuple[Tensor, Tensor]:
        keys = self.target(v1), self.target(v2)
        self._keys = keys if self.training else None
        return keys

    def _compute_ssl(self, p: Tensor, z: Tensor, view: int) -> Tensor:
        bank = self.bank1 if view == 2 else self.bank2
        return info_nce(p, z, bank.keys, self.temperature)
