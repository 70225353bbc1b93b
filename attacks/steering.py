"""Steering: an active party that trains the victim's bottom model to give away rows that it knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.attacks.fusion import ColumnFusion
from vflsec.base.checks import check_positive
from vflsec.base.seeds import seed_weights
from vflsec.core.attack import Attack, HijackingAttack
from vflsec.core.message import Step
from vflsec.core.view import Guess, Need, View
from vflsec.inference.hijacking import EXPECTED, SENT, build_network, descend, describe_alarm


class Steering(HijackingAttack):
    """Recovery of the victim's columns from a bottom model that was trained to make known rows easy to decode.

    The adversary fits a decoder D to the last embeddings h (m, d) of the auxiliary rows. To the gradients of those in
    the batch it adds the gradient of ||D(h) - x||^2, scaled to ``strength`` times the mean length of the honest
    gradients. All other rows get the honest gradient, so that the joint model still learns the task.
    ``column-fusion`` then reads all that arrived.

    With ``quiet``, the gradients pass the check of ``vflsec.inference.hijacking``: the sum is projected on the span of
    the batch's honest gradients, and with two classes none is turned around.

    Source: this project. ``fsha`` does not use which auxiliary row an embedding belongs to.

    Args:
        victim: whose columns; None for the first passive party.
        strength: length of the additions, in units of the mean length of the honest gradients.
        steps: updates of the decoder for each batch that arrives.
        hidden: width of its two hidden layers.
        lr: learning rate of Adam.
        quiet: whether to send only gradients in which a victim without labels notices nothing.
    """

    name = "steering"
    needs = frozenset({Need.FEATURES, Need.EMBEDDINGS, Need.AUX_LABELS, SENT})
    wants = ColumnFusion.wants | {EXPECTED}
    reference = "this project"
    differs = ("No source describes it. The closest is fsha, which does not know which embedding is whose.",)
    verified = "gradients against finite differences; ranks and signs of quiet gradients"
    costs = "a training run of its own for each cell, and those of column-fusion"
    fails = "with few auxiliary rows, and where embeddings are too narrow to hold the columns"
    contrib = True

    def __init__(
        self,
        *,
        victim: str | None = None,
        strength: float = 100.0,
        steps: int = 3,
        hidden: int = 64,
        lr: float = 5e-3,
        quiet: bool = False,
    ) -> None:
        check_positive(strength=strength, steps=steps, hidden=hidden, lr=lr)
        self.victim = victim
        self.strength = strength
        self.steps = steps
        self.hidden = hidden
        self.lr = lr
        self.quiet = quiet
        self._decoder: nn.Module | None = None

    @property
    def search(self) -> Mapping[str, Sequence[Any]]:
        """Vary the length of the additions."""
        return {"strength": (10.0, 100.0)}

    def alone(self) -> Attack:
        """Return ``column-fusion``, which then reads own columns only."""
        return ColumnFusion(victim=self.victim)

    def prepare(self, view: View) -> None:
        """Keep which rows are known, and their columns."""
        self._steered, self._decoder, self._columns = view.victim, None, view.aux_labels.float()
        places = torch.full((len(view.features["train"]),), -1, device=view.aux_rows.device)
        self._places = places.index_copy(0, view.aux_rows, torch.arange(len(view.aux_rows), device=places.device))

    def replace_gradient(self, victim: str, h: Tensor, g: Tensor, step: Step) -> Tensor:
        """Return ``g`` with additions for the auxiliary rows of the victim."""
        places = self._places[step.rows]
        known = places >= 0
        if victim != self._steered or step.split != "train" or not known.any():
            return g
        addition = self._steer(h[known].float(), places[known]).to(g.dtype)
        length, longest = g.norm(dim=1).mean(), addition.norm(dim=1).mean().clamp_min(1e-12)
        sent = g.clone()
        sent[known] += addition * (self.strength * length / longest)
        return restrict(sent, g) if self.quiet else sent

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return values (n, d) for every split."""
        guess = ColumnFusion(victim=self.victim).run(view, rng=rng)
        return replace(guess, budget={**guess.budget, **describe_alarm(view, view.victim)})

    def _steer(self, h: Tensor, places: Tensor) -> Tensor:
        """Update the decoder with embeddings ``h`` (b, d) of some auxiliary rows; return the gradient of its errors."""
        if self._decoder is None:
            widths = h.shape[1], self.hidden, self.hidden, self._columns.shape[1]
            with seed_weights(self._seed, self.name, "networks"):
                self._decoder = build_network(*widths).to(h.device)
            self._optimizer = torch.optim.Adam(self._decoder.parameters(), self.lr)
            self._last = torch.full((len(self._columns), h.shape[1]), torch.nan, device=h.device)
        self._last[places] = h
        seen = self._last.isfinite().all(dim=1)
        for _ in range(self.steps):
            descend(self._optimizer, F.mse_loss(self._decoder(self._last[seen]), self._columns[seen]))
        z = h.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((self._decoder(z) - self._columns[places]).square().sum(), z)
        return gradient


def restrict(sent: Tensor, honest: Tensor) -> Tensor:
    """Return gradients (B, d) in the span of the honest ones; on a line, those that would turn around are honest."""
    _, lengths, axes = torch.linalg.svd(honest, full_matrices=False)
    axes = axes[lengths > 1e-4 * lengths[0]]
    within = sent @ axes.T @ axes
    turned = (within * honest).sum(dim=1, keepdim=True) <= 0
    return torch.where(turned, honest, within) if len(axes) == 1 else within
