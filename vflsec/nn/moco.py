"""MoCo: two views, one through a moving average of the network, contrasted with a queue of earlier keys."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from vflsec.base.checks import fraction, positive
from vflsec.nn.ema import update_average
from vflsec.nn.losses.info_nce import info_nce
from vflsec.nn.losses.nt_xent import nt_xent
from vflsec.nn.queue import Queue
from vflsec.nn.siamese import Siamese


class MoCo(Siamese):
    """Projections of one view against the other view's keys, by a moving average of the network: InfoNCE.

    There is a bank of keys for each view. A query of view 1 meets the bank of view 2, and the other way round, for its
    own key and for the guide's; only its own key is remembered. Between parties the negatives are the batch, both ways.

    Source: He et al. 2020, arXiv 1911.05722, algorithm 1; FedHSSL (arXiv 2208.08934), eq. 2. In FedHSSL's code the
    guide's projections enter the bank as well, and the average moves before each forward pass; here neither.

    Args, besides those of ``Siamese``:
        predictor: ignored, for the signature of its siblings; MoCo has none.
        momentum: weight of the old average in each step; FedHSSL's paper has 0.99, its code 0.999.
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
        "before each forward pass, and at 0.999; momentum is the paper's 0.99.",
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
        fraction(momentum=momentum)
        positive(temperature=temperature)
        self.momentum = momentum
        self.temperature = temperature
        self.target = copy.deepcopy(nn.Sequential(self.encoder, self.projector)).requires_grad_(False)
        self.bank1, self.bank2 = Queue(queue, out), Queue(queue, out)  # keys of view 1, keys of view 2
        self._keys: tuple[Tensor, Tensor] | None = None  # of the last training step

    def cross_loss(self, p: Tensor, z: Tensor) -> Tensor:
        """Return in-batch NT-Xent of projections (B, d) and another party's z (B, d), which is detached."""
        return nt_xent(p, z.detach(), self.temperature)

    def after_step(self) -> None:
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

    def _ssl(self, p: Tensor, z: Tensor, view: int) -> Tensor:
        bank = self.bank1 if view == 2 else self.bank2
        return info_nce(p, z, bank.keys, self.temperature)
