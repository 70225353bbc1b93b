"""Passive model completion (MC): a head on the adversary's own trained bottom model, fitted to auxiliary labels."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from vflsec.base.checks import check_positive
from vflsec.base.seeds import seed_torch
from vflsec.base.sparse_rows import SparseRows
from vflsec.core.attack import THRESHOLD, Attack
from vflsec.core.view import Guess, Need, View
from vflsec.inference.auxiliary import list_embeddings
from vflsec.inference.regression import Standardize, is_still_falling
from vflsec.nn.stacked import draw_batches, split_runs, stack, stack_modules, unstack_modules

WARM_AVERAGE = 3000
"""Updates after which the first thousand have a weight below 1/7 in the average, whose decay is 0.999."""

TOGETHER = 64
"""Mixmatch steps whose rows pass a frozen bottom model together; it bounds the memory."""


class Budget(NamedTuple):
    """The budget of one fit: the source's numbers for each mode."""

    epochs: int
    lr: float
    batch: int


DECAY = 1e-6
"""The weight decay of a head in supervised mode."""

BUDGETS = {"supervised": Budget(300, 5e-3, 64), "mixmatch": Budget(25, 2e-3, 16)}


class ModelCompletion(Attack):
    """Label inference from the adversary's own bottom model and a few labeled samples.

    *supervised*: embeddings are standardized over the adversary's own training rows, then one linear layer is fitted by
    cross-entropy. Source: FedHSSL (arXiv 2208.08934), section VI-B: "trains an inference head"; its team's public
    pipeline has Adam, lr 0.005, weight decay 1e-6, 300 epochs, batch 64. Standardizing is ours: it makes one learning
    rate fit embeddings of any scale.

    *mixmatch*: semi-supervised, with all other rows of the party unlabeled. Source: Fu et al., USENIX Security 2022,
    section 4.1 and released code: T = 0.8, alpha = 0.75, lambda_u = 50, Adam 2e-3, EMA 0.999, 25 x 1024 steps. Labeled
    and unlabeled rows pass the network in one batch, which is the purpose of the source's interleaving; here, this
    includes the pass that guesses labels. The source guesses on unlabeled rows only. Labeled rows are balanced and
    unlabeled ones are not, so BatchNorm then centers the two passes differently, guesses drift to the rare class, and
    training on them ends in a constant guess. As in the source, the weight average has its own BatchNorm statistics,
    averaged like the weights. After the full budget, it equals the source's.

    Args:
        mode: ``supervised`` or ``mixmatch``.
        freeze_bottom: whether the bottom model stays as the federation trained it.
        layers: depth of the mixmatch head, blocks of BatchNorm, ReLU, Linear.
        epochs: passes (supervised) or rounds of ``steps`` updates (mixmatch); None for the source's number.
        steps: updates in one mixmatch epoch.
        lr: learning rate; None for the source's.
        batch: labeled rows in a batch (and as many unlabeled ones in mixmatch); None for the source's.
    """

    name = "mc"
    version = 4
    needs = frozenset({Need.FEATURES, Need.MODEL, Need.AUX_LABELS})
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
        THRESHOLD,
    )
    costs = "epochs x labeled / batch updates of one layer; in mixmatch mode, epochs x steps updates of the head"
    fails = (
        "if the bottom model tells no more about the label than the columns do; noise on gradients slows its training, "
        "but does not hide what it has learned"
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
        check_positive(layers=layers, epochs=self.epochs, steps=steps, lr=self.lr, batch=self.batch)

    @property
    def search(self) -> Mapping[str, Sequence[Any]]:
        """Vary the learning rate and whether the bottom model is fitted; the epochs or the depth of the head."""
        common = {"lr": (self.lr / 4, self.lr, self.lr * 4), "freeze_bottom": (True, False)}
        if self.mode == "supervised":
            return {**common, "epochs": (-(-self.epochs // 3), self.epochs, self.epochs * 3)}
        return {**common, "layers": (1, 2)}

    def alone(self) -> Attack:
        """Return the same attack on an untrained bottom model, which is fitted too: the baseline of this attack."""
        options = {name: getattr(self, name) for name in inspect.signature(ModelCompletion).parameters}
        return ModelCompletion(**{**options, "freeze_bottom": False})

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return logits (n, C) of the completed model."""
        assert view.model is not None
        if self.mode == "supervised":
            return (self._find_heads if self.freeze_bottom else self._fit_networks)([view], rng)[0]
        bottom = view.model.requires_grad_(not self.freeze_bottom).train(not self.freeze_bottom)
        completed, losses = self._fit_mixmatch(bottom, view, rng)
        guess = self._guess(completed, view, losses)
        return replace(guess, converged=guess.converged and guess.budget["updates"] >= WARM_AVERAGE)

    def run_each(self, views: Sequence[View], *, seed: int) -> list[Guess]:
        """Fit the heads or networks of all views with equally many labels at once."""
        if self.mode == "mixmatch" or not (self.freeze_bottom or all(map(_is_alike_by_row, views))):
            return super().run_each(views, seed=seed)
        fit = self._find_heads if self.freeze_bottom else self._fit_networks
        guesses: dict[int, Guess] = {}
        for size in {len(view.aux_rows) for view in views}:
            places = [k for k, view in enumerate(views) if len(view.aux_rows) == size]
            seed_torch(seed)
            fitted = fit([views[k] for k in places], torch.Generator().manual_seed(seed))
            guesses |= zip(places, fitted, strict=True)
        return [guesses[k] for k in range(len(views))]

    def _count_updates(self, labels: int) -> int:
        return self.epochs * (self.steps if self.mode == "mixmatch" else -(-labels // self.batch))

    @torch.no_grad()
    def _find_heads(self, views: Sequence[View], rng: torch.Generator) -> list[Guess]:
        """Return the guesses of linear heads on frozen bottom models, one of each view, with the same random draws.

        A head for training rows reads their text and what defenses made of it side by side, if there is any.
        """
        embedded = [list_embeddings(view) for view in views]
        guesses = self._fit_heads(views, [_standardize_embeddings(parts[0]) for parts in embedded], rng)
        if len(embedded[0]) == 1:
            return guesses
        both = [{"train": torch.cat([part["train"] for part in parts], dim=1)} for parts in embedded]
        further = self._fit_heads(views, list(map(_standardize_embeddings, both)), rng)
        return [replace(a, scores={**a.scores, **b.scores}) for a, b in zip(guesses, further, strict=True)]

    def _fit_heads(
        self, views: Sequence[View], embedded: Sequence[Mapping[str, Tensor]], rng: torch.Generator
    ) -> list[Guess]:
        """Return the guesses of linear heads on embeddings (n, d + 1) of each view.

        The gradient is derived by hand; differentiating small batches takes longer than computing them.
        """
        x = torch.stack([h["train"][view.aux_rows] for h, view in zip(embedded, views, strict=True)])  # (K, n, d+1)
        targets = torch.stack([F.one_hot(view.aux_labels, view.n_classes) for view in views]).to(x.dtype)  # (K, n, C)
        first = nn.Linear(x.shape[2] - 1, views[0].n_classes)
        weights = torch.cat([first.weight.T, first.bias[None]]).to(x.device).repeat(len(views), 1, 1)  # (K, d+1, C)
        adam, losses = Adam(weights, self.lr), []
        for _ in range(self.epochs):
            total = torch.zeros(len(views), device=x.device)
            for rows in draw_batches(x.shape[1], self.batch, rng, x.device):
                drawn, wanted = x[:, rows], targets[:, rows]
                log_p = (drawn @ weights).log_softmax(dim=2)
                total -= (log_p * wanted).sum(dim=(1, 2))
                slopes = drawn.mT @ (log_p.exp() - wanted) / len(rows)
                adam.step(slopes.add_(weights, alpha=DECAY))
            losses.append(total / x.shape[1])
        by_view = torch.stack(losses, dim=1).tolist()
        budget = {"updates": self._count_updates(x.shape[1])}
        return [
            Guess(
                {split: h @ head for split, h in by_split.items()}, converged=not is_still_falling(fell), budget=budget
            )
            for by_split, head, fell in zip(embedded, weights, by_view, strict=True)
        ]

    def _fit_networks(self, views: Sequence[View], rng: torch.Generator) -> list[Guess]:
        """Return the guesses of heads that are fitted together with bottom models, one of each view.

        All start from the same head and draw the same batches. Those of several views train as one network.
        """
        networks = []
        head = None
        for view in views:
            assert view.model is not None
            with torch.no_grad():
                embeddings = view.model.train()(view.features["train"])  # (n, d)
            head = nn.Linear(embeddings.shape[1], view.n_classes).to(embeddings.device) if head is None else head
            networks.append(nn.Sequential(view.model.requires_grad_(), Standardize(embeddings), deepcopy(head)))
        x = [view.features["train"][view.aux_rows] for view in views]
        y = [view.aux_labels for view in views]
        if len(views) == 1:
            losses = [self._fit_network(networks[0], x[0], y[0], rng).tolist()]
        else:
            together = deepcopy(networks[0])
            stack_modules(networks, together)
            fell = self._fit_network(together, stack(x), stack(y), rng)
            unstack_modules(together, networks)
            losses = [curve.tolist() for curve in split_runs(fell)]
        return list(map(self._guess, networks, views, losses))

    def _fit_network(self, completed: nn.Module, x: Tensor, y: Tensor, rng: torch.Generator) -> Tensor:
        """Fit a network to rows (n, p) of classes (n,); return the mean loss of each epoch."""
        optimizer = torch.optim.Adam(completed.parameters(), self.lr, weight_decay=DECAY, fused=True)
        losses = []
        for _ in range(self.epochs):
            total = torch.zeros((), device=x.device)
            for rows in draw_batches(len(y), self.batch, rng, y.device):
                loss = F.cross_entropy(completed(x[rows]), y[rows])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                total = total + loss.detach() * len(rows)
            losses.append(total / len(y))
        return torch.stack(losses)

    def _guess(self, completed: nn.Module, view: View, losses: list[float]) -> Guess:
        completed.eval()
        with torch.no_grad():
            scores = {split: completed(x) for split, x in view.features.items()}
        updates = self._count_updates(len(view.aux_rows))
        return Guess(scores, converged=not is_still_falling(losses), budget={"updates": updates})

    @torch.no_grad()
    def _fit_mixmatch(self, bottom: nn.Module, view: View, rng: torch.Generator) -> tuple[nn.Module, list[float]]:
        columns, n = view.features["train"], view.n_classes
        known = torch.ones(len(columns), dtype=torch.bool, device=columns.device)
        known[view.aux_rows] = False
        others = [columns[known]] if view.unlabeled is None else [columns[known], view.unlabeled]
        pool = torch.cat([columns[view.aux_rows], *others])  # (n, p), labeled rows first
        embedded = bottom(pool)  # (n, d)
        labels = F.one_hot(view.aux_labels, n).to(embedded.dtype)
        head = build_head(embedded.shape[1], n, self.layers).to(columns.device)
        completed = nn.Sequential(bottom, head)
        fitted = head if self.freeze_bottom else completed
        weights, slopes = as_vectors([p for p in completed.parameters() if p.requires_grad])
        adam = Adam(weights, self.lr)
        averaged = [weights, *(statistic for statistic in fitted.buffers() if statistic.is_floating_point())]
        average = [values.clone() for values in averaged]  # of BatchNorm's statistics too, as in the source
        losses = []
        for epoch in range(self.epochs):
            draws = self._draw_choices(len(labels), len(pool), rng).to(columns.device)
            rows = self._rows(draws, pool, embedded, bottom)
            choices = zip(rows, labels[draws.known], draws.partner, draws.share.tolist(), strict=True)
            outputs, expected = [], []
            for step, ((x, raw), q, partner, share) in enumerate(choices):
                guessed = sharpen(fitted(raw)[len(q) :], temperature=0.8)
                targets = torch.cat([q, guessed])  # (2B, C)
                targets = torch.lerp(targets[partner], targets, share)
                with torch.enable_grad():
                    logits = fitted(x)
                slopes.zero_()
                logits.backward(compute_slope(logits.detach(), targets, 50 * (epoch + step / self.steps) / self.epochs))
                adam.step(slopes)
                torch._foreach_lerp_(average, averaged, max(1 - 0.999, 1 / adam.steps))
                weights.mul_(1 - 0.02 * self.lr)
                outputs.append(logits.detach()[: len(q)])
                expected.append(targets[: len(q)])
            losses.append(float(F.cross_entropy(torch.cat(outputs), torch.cat(expected))))
        torch._foreach_copy_(averaged, average)
        return completed, losses

    def _rows(self, draws: Draw, pool: Tensor, embedded: Tensor, bottom: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the mixed rows (2B, p) of each step, and the same rows unmixed; embeddings if the bottom is frozen.

        A frozen bottom model embeds the rows of many steps at once.
        """
        source = embedded if self.freeze_bottom else pool
        for draw in draws.split(TOGETHER):
            rows = torch.cat([draw.known, draw.other], dim=1)  # (S, 2B)
            width = rows.shape[1]
            drawn = pool.index_select(0, rows.flatten())  # (S 2B, p)
            partners = pool.index_select(0, rows.gather(1, draw.partner).flatten())
            mixed = torch.lerp(partners, drawn, draw.share.to(pool.dtype).repeat_interleave(width)[:, None])
            if self.freeze_bottom:
                mixed = bottom(mixed)  # (S 2B, d)
            yield from zip(torch.split(mixed, width), source[rows], strict=True)

    def _draw_choices(self, n_known: int, n: int, rng: torch.Generator) -> Draw:
        """Return the random choices of one epoch; drawing them step by step would double the cost."""
        size = min(self.batch, n_known, n - n_known)
        known = torch.rand(self.steps, n_known, generator=rng).argsort(dim=1)[:, :size]
        other = torch.randint(n_known, n, (self.steps, size), generator=rng)
        partner = torch.rand(self.steps, 2 * size, generator=rng).argsort(dim=1)
        beta = np.random.default_rng(int(torch.randint(2**31, (), generator=rng))).beta(0.75, 0.75, self.steps)
        return Draw(known, other, partner, torch.from_numpy(np.maximum(beta, 1 - beta)))


class Draw(NamedTuple):
    """Random choices of S mixmatch steps: rows (S, B) twice, partners (S, 2B), weights of the row itself (S,)."""

    known: Tensor
    other: Tensor
    partner: Tensor
    share: Tensor

    def to(self, device: torch.device) -> Draw:
        """Return the same choices on a device."""
        return Draw(*(choice.to(device) for choice in self))

    def split(self, steps: int) -> Iterator[Draw]:
        """Yield the choices of ``steps`` steps at a time."""
        return map(Draw, *(torch.split(choice, steps) for choice in self))


class Adam:
    """Adam with its default hyperparameters on one vector."""

    # torch.optim.Adam, fused, takes twice as long and rounds differently (by 4e-7 after 1,000 steps).

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
    """Move parameters into one vector and their gradients into another, so that an update is one operation."""
    weights = torch.cat([p.detach().flatten() for p in parameters])
    slopes = torch.zeros_like(weights)
    sizes = [p.numel() for p in parameters]
    for p, value, gradient in zip(parameters, torch.split(weights, sizes), torch.split(slopes, sizes), strict=True):
        p.data, p.grad = value.view_as(p), gradient.view_as(p)
    return weights, slopes


def compute_slope(logits: Tensor, targets: Tensor, weight: float) -> Tensor:
    """Return the gradient (2B, C) at the logits: cross-entropy of the first B rows, weighted squared error of the rest.

    Derived by hand: differentiating the loss takes three times as long.
    """
    p = F.softmax(logits, dim=1)
    known, other = (p - targets).chunk(2)
    p = p[len(known) :]
    pull = p * other
    pull = torch.addcmul(pull, p, pull.sum(dim=1, keepdim=True), value=-1)
    return torch.cat([known / len(known), pull * (2 * weight / pull.numel())])


def _is_alike_by_row(view: View) -> bool:
    """Whether the network of ``view`` can train as one with others: dense rows, and nothing drawn at random."""
    assert view.model is not None
    drawn = any(isinstance(layer, _DropoutNd) and layer.p for layer in view.model.modules())
    return not drawn and not isinstance(view.features["train"], SparseRows)


def _standardize_embeddings(h: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the embeddings of each split, (n, d + 1), standardized, with a column of ones."""
    scale = Standardize(h["train"])
    return {split: torch.cat([scale(x), torch.ones_like(x[:, :1])], dim=1) for split, x in h.items()}


def build_head(width: int, n_classes: int, layers: int) -> nn.Sequential:
    """Return Fu's head: ``layers - 1`` blocks BatchNorm-ReLU-Linear(width, width), then one to C classes."""
    widths = [width] * layers + [n_classes]
    return nn.Sequential(
        *(layer for a, b in pairwise(widths) for layer in (nn.BatchNorm1d(a), nn.ReLU(), nn.Linear(a, b)))
    )


def sharpen(logits: Tensor, *, temperature: float) -> Tensor:
    """Return p^(1/T) / sum p^(1/T), row by row (B, C), where p is the softmax of the logits."""
    return F.softmax(logits / temperature, dim=1)
