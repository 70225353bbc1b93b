"""Passive model completion (MC): put a head on one's own trained bottom model, fit it on few auxiliary labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.core.attack import Attack
from vflsec.core.checks import positive
from vflsec.core.view import Guess, Need, View
from vflsec.inference.convergence import still_falling
from vflsec.nn.batches import batches

WARM_AVERAGE = 3000
"""Updates after which the average of weights, decay 0.999, holds less than a seventh of its first thousand."""

TOGETHER = 64
"""Mixmatch steps whose rows go through a frozen bottom at once; they are all in memory."""


class Budget(NamedTuple):
    """What one fit may spend: the source's numbers for each mode."""

    epochs: int
    lr: float
    batch: int


BUDGETS = {"supervised": Budget(300, 5e-3, 64), "mixmatch": Budget(25, 2e-3, 16)}


class ModelCompletion(Attack):
    """Label inference from one's own bottom model and a handful of labeled samples.

    *supervised*: embeddings are standardized by the adversary's own training rows, then one linear layer is fitted by
    cross-entropy. Source: FedHSSL (arXiv 2208.08934), section VI-B: "trains an inference head"; its team's public
    pipeline has Adam, lr 0.005, weight decay 1e-6, 300 epochs, batch 64. Standardizing is ours: it makes one learning
    rate fit embeddings of any scale.

    *mixmatch*: semi-supervised, with all other rows of the party unlabeled. Source: Fu et al., USENIX Security 2022,
    section 4.1 and released code: T = 0.8, alpha = 0.75, lambda_u = 50, Adam 2e-3, EMA 0.999, 25 x 1024 steps.
    Labeled and unlabeled rows go through the network in one batch, which is what the source's interleaving is for;
    here also when labels are guessed. The source guesses on unlabeled rows alone. Labeled rows are balanced and
    unlabeled ones are not, so that BatchNorm then centers the two passes differently, guesses drift to the rare class,
    and training on them ends in a guess of that class for every row.
    As in the source, the average that is scored has its own BatchNorm statistics, averaged like the weights. For the
    first thousand updates it is a plain mean, where the source's begins at its random start: the same after the full
    budget, and stronger after a small one.

    Costs seconds in mixmatch mode, a fraction of one else. Fails where the bottom model says of the label no more than
    raw columns do; noise on gradients lets it learn less, but hides nothing that it has learned.

    Fu's paper fine-tunes the bottom model; the released code in effect freezes it, and so does the default here.

    Args:
        mode: ``supervised`` or ``mixmatch``.
        freeze_bottom: keep the bottom model as the federation left it.
        layers: depth of the mixmatch head, blocks of BatchNorm, ReLU, Linear.
        epochs: passes (supervised) or rounds of ``steps`` updates (mixmatch); None for the source's number.
        steps: updates in one mixmatch epoch.
        lr: learning rate; None for the source's.
        batch: labeled rows in a batch (as many unlabeled ones in mixmatch); None for the source's.
    """

    name = "mc"
    version = 3
    needs = frozenset({Need.OWN_FEATURES, Need.OWN_MODEL, Need.AUX_LABELS})
    reference = "Fu et al., USENIX Security 2022, section 4.1 (mixmatch); He et al. 2022, arXiv 2208.08934, VI-B"
    verified = "mixmatch: against published figures of a public re-implementation; supervised: unverified"
    differs: ClassVar[tuple[str, ...]] = (
        "Supervised mode: embeddings are standardized by the adversary's own training rows before the head; the "
        "sources do not.",
        "Supervised mode: the last epoch is scored; the public pipeline picks the epoch on validation rows.",
        "The bottom model is frozen by default, as in the released code of Fu et al.; their text fine-tunes it.",
        "Mixmatch: labels of unlabeled rows are guessed in one batch with labeled rows; the source guesses on "
        "unlabeled rows alone, which collapses on uneven classes.",
        "Mixmatch: the first thousand updates enter the weight average equally; the source's average starts at its "
        "random weights.",
        "Mixmatch: only parameters are decayed; the released code decays BatchNorm's running statistics too.",
        "Mixmatch: the head's weights have PyTorch's default initialization; the released code sets them to one.",
        "Mixmatch: the last epoch is scored; the released code reports the best one. Every dataset has the "
        "source's budget for CIFAR-10.",
        "Two classes: where argmax divides the auxiliary labels badly, a threshold that they support takes its place.",
    )

    def __init__(
        self,
        *,
        mode: Literal["supervised", "mixmatch"] = "supervised",
        freeze_bottom: bool = True,
        layers: int = 1,
        epochs: int | None = None,
        steps: int = 1024,
        lr: float | None = None,
        batch: int | None = None,
    ) -> None:
        default = BUDGETS[mode]
        self.mode = mode
        self.freeze_bottom = freeze_bottom
        self.layers = layers
        self.epochs = default.epochs if epochs is None else epochs
        self.steps = steps
        self.lr = default.lr if lr is None else lr
        self.batch = default.batch if batch is None else batch
        positive(layers=layers, epochs=self.epochs, steps=steps, lr=self.lr, batch=self.batch)

    @property
    def search(self) -> Mapping[str, Sequence[Any]]:
        """Vary the rate and whether the bottom model is fitted; beyond, passes or the depth of the head."""
        common = {"lr": (self.lr / 4, self.lr, self.lr * 4), "freeze_bottom": (True, False)}
        if self.mode == "supervised":
            return {**common, "epochs": (-(-self.epochs // 3), self.epochs, self.epochs * 3)}
        return {**common, "layers": (1, 2)}

    def alone(self) -> Attack:
        """Return the same training from an untrained bottom model, all of it fitted: the prior of this attack."""
        return ModelCompletion(
            mode=self.mode,
            freeze_bottom=False,
            layers=self.layers,
            epochs=self.epochs,
            steps=self.steps,
            lr=self.lr,
            batch=self.batch,
        )

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return logits (n, C) of the completed model."""
        assert view.model is not None
        bottom = view.model.requires_grad_(not self.freeze_bottom).train(not self.freeze_bottom)
        fit = self._supervised if self.mode == "supervised" else self._mixmatch
        completed, losses = fit(bottom, view, rng)
        completed.eval()
        with torch.no_grad():
            scores = {split: completed(own) for split, own in view.features.items()}
        updates = self.epochs * (self.steps if self.mode == "mixmatch" else -(-len(view.aux_rows) // self.batch))
        settled = not still_falling(losses) and (self.mode == "supervised" or updates >= WARM_AVERAGE)
        return Guess(scores, converged=settled, budget={"updates": updates})

    def _supervised(self, bottom: nn.Module, view: View, rng: torch.Generator) -> tuple[nn.Module, list[float]]:
        own = view.features["train"]
        with torch.no_grad():
            embeddings = bottom(own)  # (n, d)
        scale = Standardize(embeddings)
        head = nn.Linear(embeddings.shape[1], view.n_classes).to(own.device)
        completed = nn.Sequential(bottom, scale, head)
        x, y, fitted = own[view.aux_rows], view.aux_labels, completed
        if self.freeze_bottom:  # what does not change is computed once
            x, fitted = scale(embeddings[view.aux_rows]), nn.Sequential(head)
        optimizer = torch.optim.Adam(fitted.parameters(), self.lr, weight_decay=1e-6, fused=True)
        losses = []
        for _ in range(self.epochs):
            total = 0.0
            for rows in batches(len(y), self.batch, rng, y.device):
                loss = F.cross_entropy(fitted(x[rows]), y[rows])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                total += loss.item() * len(rows)
            losses.append(total / len(y))
        return completed, losses

    @torch.no_grad()
    def _mixmatch(self, bottom: nn.Module, view: View, rng: torch.Generator) -> tuple[nn.Module, list[float]]:
        own, n = view.features["train"], view.n_classes
        known = torch.ones(len(own), dtype=torch.bool, device=own.device)
        known[view.aux_rows] = False
        others = [own[known]] if view.unlabeled is None else [own[known], view.unlabeled]
        pool = torch.cat([own[view.aux_rows], *others])  # (n, p), those of known label first
        embedded = bottom(pool)  # (n, d)
        labels = F.one_hot(view.aux_labels, n).to(embedded.dtype)
        head = inference_head(embedded.shape[1], n, self.layers).to(own.device)
        completed = nn.Sequential(bottom, head)
        fitted = head if self.freeze_bottom else completed
        weights, slopes = as_vectors([p for p in completed.parameters() if p.requires_grad])
        adam = Adam(weights, self.lr)
        averaged = [weights, *(statistic for statistic in fitted.buffers() if statistic.is_floating_point())]
        average = [values.clone() for values in averaged]  # of BatchNorm's statistics too, as in the source
        losses = []
        for epoch in range(self.epochs):
            draws = self._draws(len(labels), len(pool), rng).to(own.device)
            rows = self._rows(draws, pool, embedded, bottom)
            choices = zip(rows, labels[draws.known], draws.partner, draws.share.tolist(), strict=True)
            said, meant = [], []
            for step, ((x, raw), q, partner, share) in enumerate(choices):
                guessed = sharpen(fitted(raw)[len(q) :], temperature=0.8)
                targets = torch.cat([q, guessed])  # (2B, C)
                targets = torch.lerp(targets[partner], targets, share)
                with torch.enable_grad():
                    logits = fitted(x)
                slopes.zero_()
                logits.backward(slope(logits.detach(), targets, 50 * (epoch + step / self.steps) / self.epochs))
                adam.step(slopes)
                torch._foreach_lerp_(average, averaged, max(1 - 0.999, 1 / adam.steps))
                weights.mul_(1 - 0.02 * self.lr)
                said.append(logits.detach()[: len(q)])
                meant.append(targets[: len(q)])
            losses.append(float(F.cross_entropy(torch.cat(said), torch.cat(meant))))
        torch._foreach_copy_(averaged, average)
        return completed, losses

    def _rows(self, draws: Draw, pool: Tensor, embedded: Tensor, bottom: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the mixed rows (2B, p) of each step, and the same rows unmixed; embeddings if the bottom is frozen.

        No update changes what a frozen bottom says, so it is asked about the rows of many steps at once.
        """
        source = embedded if self.freeze_bottom else pool
        for draw in draws.split(TOGETHER):
            rows = torch.cat([draw.known, draw.other], dim=1)  # (S, 2B)
            width = rows.shape[1]
            own = pool.index_select(0, rows.flatten())  # (S 2B, p)
            partners = pool.index_select(0, rows.gather(1, draw.partner).flatten())
            mixed = torch.lerp(partners, own, draw.share.to(pool.dtype).repeat_interleave(width)[:, None])
            if self.freeze_bottom:
                mixed = bottom(mixed)  # (S 2B, d)
            yield from zip(torch.split(mixed, width), source[rows], strict=True)

    def _draws(self, n_known: int, n: int, rng: torch.Generator) -> Draw:
        """Return the random choices of one epoch, drawn at once because drawing them singly is half the cost."""
        size = min(self.batch, n_known, n - n_known)
        known = torch.rand(self.steps, n_known, generator=rng).argsort(dim=1)[:, :size]
        other = torch.randint(n_known, n, (self.steps, size), generator=rng)
        partner = torch.rand(self.steps, 2 * size, generator=rng).argsort(dim=1)
        beta = np.random.default_rng(int(torch.randint(2**31, (), generator=rng))).beta(0.75, 0.75, self.steps)
        return Draw(known, other, partner, torch.from_numpy(np.maximum(beta, 1 - beta)))


class Draw(NamedTuple):
    """Random choices of S mixmatch steps: rows (S, B) twice, mixing partners (S, 2B), shares of the row itself (S,)."""

    known: Tensor
    other: Tensor
    partner: Tensor
    share: Tensor

    def to(self, device: torch.device) -> Draw:
        """Return the same choices on a device."""
        return Draw(*(choice.to(device) for choice in self))

    def split(self, steps: int) -> Iterator[Draw]:
        """Yield the choices of so many steps at a time."""
        return map(Draw, *(torch.split(choice, steps) for choice in self))


class Adam:
    """Adam with its usual numbers on one vector: torch's, without the time it takes to look at its options."""

    def __init__(self, weights: Tensor, lr: float) -> None:
        self.weights, self.lr, self.steps = weights, lr, 0
        self.mean, self.square = torch.zeros_like(weights), torch.zeros_like(weights)

    def step(self, slopes: Tensor) -> None:
        """Update the weights in place."""
        self.steps += 1
        self.mean.lerp_(slopes, 1 - 0.9)
        self.square.mul_(0.999).addcmul_(slopes, slopes, value=1 - 0.999)
        warm = (1 - 0.999**self.steps) ** 0.5
        self.weights.addcdiv_(
            self.mean, self.square.sqrt().add_(1e-8 * warm), value=-self.lr * warm / (1 - 0.9**self.steps)
        )


def as_vectors(parameters: list[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """Lay parameters out in one vector and their gradients in another: an update is one operation, not one for each."""
    weights = torch.cat([p.detach().flatten() for p in parameters])
    slopes = torch.zeros_like(weights)
    sizes = [p.numel() for p in parameters]
    for p, value, gradient in zip(parameters, torch.split(weights, sizes), torch.split(slopes, sizes), strict=True):
        p.data, p.grad = value.view_as(p), gradient.view_as(p)
    return weights, slopes


def slope(logits: Tensor, targets: Tensor, weight: float) -> Tensor:
    """Return the gradient (2B, C) at the logits: cross-entropy of the first B rows, weighted squared error of the rest.

    Written out, because it takes a third of the time that differentiating the loss does.
    """
    p = F.softmax(logits, dim=1)
    known, other = (p - targets).chunk(2)
    p = p[len(known) :]
    pull = p * other
    pull = torch.addcmul(pull, p, pull.sum(dim=1, keepdim=True), value=-1)
    return torch.cat([known / len(known), pull * (2 * weight / pull.numel())])


class Standardize(nn.Module):
    """Maps (B, d) to zero mean and unit deviation by the statistics of given embeddings (n, d); nothing is learned."""

    def __init__(self, embeddings: Tensor) -> None:
        super().__init__()
        self.mean = embeddings.mean(dim=0)
        self.deviation = embeddings.std(dim=0, correction=0).clamp_min(1e-12)

    def forward(self, h: Tensor) -> Tensor:
        """Return the standardized embeddings (B, d)."""
        return (h - self.mean) / self.deviation


def inference_head(width: int, n_classes: int, layers: int) -> nn.Sequential:
    """Return Fu's head: ``layers - 1`` blocks BatchNorm-ReLU-Linear(width, width), then one to C classes."""
    widths = [width] * layers + [n_classes]
    return nn.Sequential(
        *(layer for a, b in pairwise(widths) for layer in (nn.BatchNorm1d(a), nn.ReLU(), nn.Linear(a, b)))
    )


def sharpen(logits: Tensor, *, temperature: float) -> Tensor:
    """Return p^(1/T) / sum p^(1/T), row by row (B, C), where p is the softmax of the logits."""
    return F.softmax(logits / temperature, dim=1)
