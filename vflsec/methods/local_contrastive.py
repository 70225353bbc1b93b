"""LocalCL: contrastive learning of one party on all its own rows; no message is sent."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vflsec.base.seeds import generator
from vflsec.core.layout import Layout
from vflsec.nn.augment import ImageAugmentation, TwoViews, two_views
from vflsec.nn.batches import batches
from vflsec.nn.bottoms import Encoder
from vflsec.nn.ema import update_average
from vflsec.nn.losses.info_nce import info_nce
from vflsec.nn.losses.nt_xent import nt_xent
from vflsec.nn.queue import Queue

MOMENTUM, WEIGHT_DECAY, TEMPERATURE = 0.9, 1e-4, 0.2
AVERAGE, QUEUE = 0.999, 65_536


class LocalCL(nn.Module):
    """The model learns to distinguish the two views of a row from all other views in the batch.

    The loss is NT-Xent, both ways, with 2B - 2 negatives, straight on the model's output: there is no projector behind
    it. The optimizer is SGD with momentum 0.9 and weight decay 1e-4.

    Source: SS-VFL (Castiglia et al. 2022), algorithm 4 and equation 2, which prints one way; temperature and optimizer
    are those of the released code.

    Args:
        model: (B, d) -> (B, width), what learns.
        rows: (n, d) of the party, n >= 2.
        layout: of its columns.
        batch: rows per update.
        lr: first learning rate.

    Attributes:
        optimizer: of the model.
    """

    def __init__(self, model: Encoder, rows: Tensor, layout: Layout, *, batch: int, lr: float) -> None:
        super().__init__()
        self.model = model
        self.rows = rows
        self.views = views_of(layout, rows)
        self.batch = batch
        self.optimizer = torch.optim.SGD(model.parameters(), lr, MOMENTUM, weight_decay=WEIGHT_DECAY, fused=True)

    def steps(self, *stream: object) -> Iterator[Tensor]:
        """Yield the loss of each update of one pass over the rows; ``stream`` names its randomness, seed first."""
        seed, *names = stream
        assert isinstance(seed, int)
        order = generator(seed, "batches", *names)
        noise = generator(seed, "views", *names, device=self.rows.device)
        self.train()
        for rows in batches(len(self.rows), self.batch, order, self.rows.device):
            loss = self.loss(*self.views(self.rows[rows], noise))
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()  # after it, so that no gradient is left for a later phase to find
            self.after_step()
            yield loss.detach()

    def loss(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the loss of two views (B, d) of the same rows."""
        return nt_xent(self.model(first), self.model(second), TEMPERATURE)

    def after_step(self) -> None:
        """Update what follows the model."""


class LocalMoCo(LocalCL):
    """View 1 of a row is to find its key, view 2, among keys of other rows, which a queue remembers: MoCo v1.

    Keys are made by a slow average of the model. It and the queue are not used after training. The
    queue starts with random directions, drawn from torch's global stream.

    Source: He et al. 2020 (MoCo), arXiv 1911.05722, algorithm 1, with temperature 0.2, as the released code of SS-VFL
    has it in the place of equation 2.

    Args: those of ``LocalCL``.
    """

    def __init__(self, model: Encoder, rows: Tensor, layout: Layout, *, batch: int, lr: float) -> None:
        super().__init__(model, rows, layout, batch=batch, lr=lr)
        self.average = copy.deepcopy(model).requires_grad_(False)
        self.queue = Queue(queue_size(len(rows), batch), model.width).to(rows.device)
        self._keys = torch.empty(0)  # of the last step

    def loss(self, first: Tensor, second: Tensor) -> Tensor:
        """Return InfoNCE of view 1 (B, d) against the key of view 2, with the whole queue as negatives."""
        with torch.no_grad():
            self._keys = self.average(second)  # (B, width)
        return info_nce(self.model(first), self._keys, self.queue.keys, TEMPERATURE)

    def after_step(self) -> None:
        """Move the average towards the model; remember the last keys."""
        update_average(self.average, self.model, AVERAGE)
        self.queue.enqueue(self._keys)


def queue_size(rows: int, batch: int) -> int:
    """Return how many keys are remembered: 65,536, or one for each row if these are fewer, in whole batches."""
    most = min(QUEUE, rows)
    return most - most % min(batch, most)


def views_of(layout: Layout, rows: Tensor) -> TwoViews:
    """Return what makes two views: of images MoCo v1's alterations, of a table those of all other methods."""
    if layout.image is None:
        return two_views(layout, rows)
    alter = ImageAugmentation(
        layout.image, scale=(0.2, 1.0), jitter=(0.4, 0.4, 0.4, 0.4), jitter_p=1.0, grey_p=0.2, blur_p=0.0
    )
    return lambda x, noise: (alter(x, noise), alter(x, noise))
