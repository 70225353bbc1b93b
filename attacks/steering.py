"""Steering: an active party that trains the victim's bottom model to give its columns away, beside the task."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.attacks.fusion import ColumnFusion
from vflsec.base.checks import check_positive, check_positive_or_none
from vflsec.base.seeds import seed_weights
from vflsec.core.attack import Attack, HijackingAttack
from vflsec.core.message import Step
from vflsec.core.view import Guess, Need, View
from vflsec.inference.hijacking import EXPECTED, FAINT, SENT, build_network, descend, describe_alarm

HISTORY = 48
"""Epochs whose embeddings ``aim=novel`` compares with."""

STRENGTHS = {"known": 100.0, "novel": 10.0}
"""The default strength of each aim."""


@dataclass(kw_only=True, eq=False, repr=False)
class Steering(HijackingAttack):
    """Recovery of the victim's columns from a bottom model that was trained to give more of them away.

    The adversary adds a steering gradient to the honest ones, so that the joint model still learns the task:

    * ``known``: for auxiliary rows, the gradient of ||D(h) - x||^2. The decoder D is fitted to the last embeddings
      h (m, d) of these rows.
    * ``novel``: for all rows, the negative residual of a ridge regression of the batch's embeddings on those of the
      same rows in the last epochs. Embeddings then change in directions that earlier ones do not explain.

    ``column-fusion`` then reads all that arrived.

    With ``quiet``, the gradients pass the check of ``vflsec.inference.hijacking``: they have the rank of honest ones,
    and with two classes their signs. Lengths are free; directions are free with ``known``, and stay in the span of the
    honest gradients with ``novel``.

    Source: this project. ``fsha`` and ``urvfl`` do not use which row an embedding belongs to.

    Args:
        victim: whose columns; None for the first passive party.
        aim: ``known`` or ``novel``.
        strength: mean length of the additions, in units of that of the honest gradients; None for 100, or 10 if novel.
        steps: updates of the decoder for each batch that arrives.
        hidden: width of its two hidden layers.
        lr: learning rate of Adam.
        quiet: whether to send only gradients in which a victim without labels notices nothing.
    """

    name = "steering"
    version = 3
    needs = frozenset({Need.FEATURES, Need.EMBEDDINGS, Need.AUX_LABELS, SENT})
    wants = ColumnFusion.wants | {EXPECTED}
    reference = "this project"
    differs = ("No source describes it. The closest is fsha, which does not know which embedding is whose.",)
    verified = "gradients against finite differences; ranks and signs of quiet gradients"
    costs = "a training run of its own for each cell, and those of column-fusion"
    fails = "with few auxiliary rows, and where embeddings are too narrow to hold the columns"
    contrib = True

    victim: str | None = None
    aim: Literal["known", "novel"] = "known"
    strength: float | None = None
    steps: int = 3
    hidden: int = 64
    lr: float = 5e-3
    quiet: bool = False

    def __post_init__(self) -> None:
        check_positive(steps=self.steps, hidden=self.hidden, lr=self.lr)
        check_positive_or_none(strength=self.strength)
        self._decoder: nn.Module | None = None

    def alone(self) -> Attack:
        """Return ``column-fusion``, which then reads own columns only."""
        return ColumnFusion(victim=self.victim)

    def prepare(self, view: View) -> None:
        """Keep which rows are known, and their columns."""
        self._steered, self._decoder, self._columns = view.victim, None, view.aux_labels.float()
        places = torch.full((len(view.features["train"]),), -1, device=view.aux_rows.device)
        self._rank, self._longest = 0, 0.0
        self._past, self._seen = torch.empty(0), torch.zeros_like(places)
        self._places = places.index_copy(0, view.aux_rows, torch.arange(len(view.aux_rows), device=places.device))

    def replace_gradient(self, victim: str, h: Tensor, g: Tensor, step: Step) -> Tensor:
        """Return ``g`` with additions for rows of the victim."""
        places = self._places[step.rows]
        steered = places >= 0 if self.aim == "known" else torch.ones_like(places, dtype=torch.bool)
        if victim != self._steered or step.split != "train" or not steered.any():
            return g
        z = h[steered].float()
        addition = (self._decode(z, places[steered]) if self.aim == "known" else self._renew(z, step.rows)).to(g.dtype)
        length, mean = g.norm(dim=1).mean(), addition.norm(dim=1).mean().clamp_min(1e-12)
        sent = g.clone()
        sent[steered] += addition * ((self.strength or STRENGTHS[self.aim]) * length / mean)
        return self._hide(sent, g) if self.quiet else sent

    def _hide(self, sent: Tensor, g: Tensor) -> Tensor:
        """Return what is left of ``sent`` if it has to look like ``g``, both (B, d)."""
        self._rank = self._rank or int(torch.linalg.matrix_rank(g, rtol=1e-4))  # later, rounding adds to it
        self._longest = max(self._longest, float(g.norm(dim=1).max()))
        return restrict(sent, g, self._rank, self._longest, free=self.aim == "known")

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return values (n, d) for every split."""
        guess = ColumnFusion(victim=self.victim).run(view, rng=rng)
        return replace(guess, budget={**guess.budget, **describe_alarm(view, view.victim)})

    def _decode(self, h: Tensor, places: Tensor) -> Tensor:
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

    def _renew(self, h: Tensor, rows: Tensor) -> Tensor:
        """Return minus what earlier embeddings of the rows do not explain of ``h`` (B, d); zeros in the first epoch."""
        if not len(self._past):
            self._past = torch.zeros(HISTORY, len(self._seen), h.shape[1], device=h.device)
        epoch = int(self._seen[rows].max())
        z = self._past[: min(epoch, HISTORY), rows].transpose(0, 1).flatten(1)
        self._past[epoch % HISTORY, rows] = h
        self._seen[rows] += 1
        if not epoch:
            return torch.zeros_like(h)
        target, z = ((x - x.mean(dim=0)) / (x.std(dim=0, correction=0) + 1e-6) for x in (h, z))
        gram = z @ z.T / z.shape[1]
        explained: Tensor = gram @ torch.linalg.solve(gram + 1e-3 * torch.eye(len(h), device=h.device), target)
        return explained - target


def restrict(sent: Tensor, honest: Tensor, rank: int, longest: float, *, free: bool) -> Tensor:
    """Return gradients (B, d) near ``sent`` with the rank of honest ones, and on a line with their signs.

    Directions are ``free``, or in the span of honest ones. Where the sign is another one, or unclear beside the
    ``longest`` honest gradient, the honest length remains.
    """
    spans = sent if free else honest, honest
    lines = [torch.linalg.svd(g.double(), full_matrices=False)[2][:rank] for g in spans]
    within = sent.double() @ lines[0].T
    if rank == 1:
        along = honest.double() @ lines[1].T
        along *= (within * along.sign()).sum().sign()
        keeps = (within * along > 0) & (along.abs() > FAINT * longest)
        within = torch.where(keeps, within, along)
    restricted: Tensor = (within @ lines[0]).to(sent.dtype)
    return restricted
