"""Sealed training: split learning in which a passive party receives noised sums over a batch, and no row's gradient."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.base.errors import UsageError
from vflsec.base.seeds import make_rng
from vflsec.cipher.lattice import MODULUS
from vflsec.cipher.noise import SealedPlan
from vflsec.core import hooks
from vflsec.core.message import Step
from vflsec.core.method import Progress
from vflsec.core.party import Party
from vflsec.core.settings import TrainSpec
from vflsec.methods.split_training import PREDICTION_BATCH, SplitTraining
from vflsec.nn.jacobians import check_rows_apart, compute_jacobians, count_learned, get_learned, scale_to_unit
from vflsec.nn.stacked import draw_batches
from vflsec.nn.top import Top
from vflsec.nn.wide import create_optimizer
from vflsec.protocols.sealed_plain import SealedSums

UNBOUNDED = (hooks.LABELS, hooks.BATCH, hooks.RECEIVED, hooks.PENALTY, hooks.UPDATE)
"""Hooks of defenses under which a label could change a sum by more than the noise allows for."""

PRIVATE = "private"
"""The role of the active party's private model."""


class JointScores(nn.Module):
    """The active party's models as one: its own columns (B, p) and each received embedding to scores (B, m).

    m is the number of classes, or 1 for two classes: the difference of their logits.
    """

    def __init__(self, bottom: nn.Module, top: nn.Module) -> None:
        super().__init__()
        self.bottom, self.top = bottom, top

    def forward(self, x: Tensor, *received: Tensor) -> Tensor:
        """Return the scores."""
        logits: Tensor = self.top([self.bottom(x), *received])
        return logits[:, 1:] - logits[:, :1] if logits.shape[1] == 2 else logits


class SealedTraining(SplitTraining):
    """Split learning under ``SealedSums``, then a fit of the active party's own models that nobody sees.

    In each batch the active party has the residual r = p - y of each row, (m,). All that leaves, and all that it learns
    itself in this phase, are sums over the batch of J' r with noise, where J (m, P) is the Jacobian of the scores with
    respect to a party's parameters, divided by its largest singular value. So a label that is replaced changes each of
    the sums of K + 1 parties by at most |r - r'|, 1 for two classes and sqrt(2) for more, and all of them together by
    sqrt(K + 1) times as much. A row is in one batch of each epoch. E epochs are E Gaussian mechanisms, whose noise is
    sqrt(E) / mu times that (Dong et al. 2019, corollary 3.3), for every adversary who does as it is told.

    With a linear head, J of a passive party is the product of its own Jacobian with its part of the head, which it is
    told and which has learned from noised sums: r is sealed. Else the product of r with the scaled Jacobian of the
    scores with respect to the embedding is sealed, d numbers a row.

    Args: as ``SplitTraining``; every boundary is ``SealedSums``.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        boundaries = [boundary for boundary in self.boundaries.values() if isinstance(boundary, SealedSums)]
        self.plan, self.private_spec = boundaries[0].plan, self.spec
        self.sums = {boundary.passive.name: boundary for boundary in boundaries}
        self.spec = plan_batches(self.plan, self.federation.n_rows("train"), self.private_spec)
        self.private = self.federation.active.module(PRIVATE, PrivateModel)
        self.scores = JointScores(self.bottoms[self.federation.active.name], self.top)
        self.is_linear = isinstance(self.top, Top) and (
            self.top.aggregation != "max" and isinstance(self.top.head, nn.Linear | nn.Identity)
        )
        self.unit = 2.0**self.plan.bits
        self.scale = self.plan.scale(self._bound_change())

    def _bound_change(self) -> float:
        """Return by how much a label that is replaced changes all sums of a batch together, with rounded factors."""
        m = 1 if self.federation.n_classes == 2 else self.federation.n_classes
        too_long = 0.0 if self.is_linear else 2.0
        weights = ((width, learned, too_long * math.sqrt(width)) for width, learned in self._list_sizes().values())
        return bound_change(m, weights, self.unit)

    def _list_sizes(self) -> dict[str, tuple[int, int]]:
        """Return by passive party how many numbers of a row are sealed, and how many sums come back."""
        m, sizes = 1 if self.federation.n_classes == 2 else self.federation.n_classes, {}
        for name in self.sums:
            width = m if self.is_linear else int(self.bottoms[name].width)  # type: ignore[arg-type]
            sizes[name] = width, count_learned(self.bottoms[name])
        return sizes

    def list_exchanges(self) -> list[tuple[SealedSums, list[int], int]]:
        """Return each boundary, how many numbers are sealed in each of its batches, and how many sums come back."""
        rows = draw_batches(self.federation.n_rows("train"), self.spec.batch, torch.Generator(), torch.device("cpu"))
        sizes = self.plan.epochs * [len(batch) for batch in rows]
        return [(self.sums[k], [width * n for n in sizes], sums) for k, (width, sums) in self._list_sizes().items()]

    def check(self) -> None:
        """Raise UsageError if a label could change the sums by more than the noise allows for."""
        spec = self.private_spec
        if spec.select != "last" or spec.patience or spec.target or spec.local_steps > 1 or spec.clip:
            raise UsageError(
                "expected train.select=last and no train.patience, train.target, train.clip or train.local_steps with "
                "sealed training: a choice by labels, or another step, is not part of its epsilon"
            )
        if self.spec.batch * self.federation.n_classes * self.unit**2 > MODULUS / 4:
            raise UsageError(f"expected sums below 2^48 for sealed, got batches of {self.spec.batch}: lower batch")
        if self.constraint is not None:
            raise UsageError("expected no further loss with sealed training: choose a method without one")
        for party in self.federation.parties.values():
            for hook in UNBOUNDED:
                if clashing := party.defenses.select(hook):
                    raise UsageError(
                        f"expected no {clashing[0].name} beside sealed training, whose epsilon does not bound what it "
                        f"changes: leave one out"
                    )
            check_rows_apart(self.bottoms[party.name], "sealed training")
            if not count_learned(self.bottoms[party.name]):
                raise UsageError(f"expected models that learn for sealed training, got a fixed one of {party.name}")

    def fit(self, phase: str, progress: Progress) -> list[float]:
        """Train all parties on noised sums, then the active party's models in private; return the loss by epoch."""
        self.check()
        losses = super().fit(phase, progress)
        self._fit_private(phase)
        return losses

    def _update(self, step: Step, optimizers: list[torch.optim.Optimizer]) -> Tensor:
        """Exchange embeddings for noised sums; every party updates its own models by them."""
        active, passive = self.federation.active, self.federation.passive
        x, targets = active.features[step.split][step.rows], self.targets[step.rows]
        with torch.no_grad():
            fed = [self._feed(party, step) for party in passive]
            arrived = [
                self._forward(p.name, self.bottoms[p.name](x_p), step) for p, x_p in zip(passive, fed, strict=True)
            ]
            scores = self.scores(x, *arrived)
        residuals = round_residuals(scores, targets, self.unit)  # (B, m)
        total, slopes = sum_rows(self.scores, residuals, self.unit, x, *arrived)
        assign_gradient(self.scores, (total + self._draw(total).to(total)) / len(x))
        for number, party in enumerate(passive):
            slope = torch.cat([block[number] for block in slopes])  # (B, m, d)
            noised = self._sum(party, fed[number], slope, residuals, step)
            assign_gradient(self.bottoms[party.name], noised / len(x))
        for optimizer in optimizers:
            optimizer.step()
        return F.cross_entropy(F.pad(scores, (1, 0)) if scores.shape[1] == 1 else scores, targets)

    def _sum(self, party: Party, x: Tensor, slope: Tensor, residuals: Tensor, step: Step) -> Tensor:
        """Return the noised sum (P,) that ``party``, a passive one that feeds its model ``x`` (B, p), learns.

        ``slope`` (B, m, d) is that of the scores with respect to its embedding; ``residuals`` (B, m) are integers.
        """
        bottom = self.bottoms[party.name]
        learned = get_learned(bottom)
        if self.is_linear:
            head, values = slope[0], residuals  # the same head for all rows
            known = {"head": head}
        else:
            head, known = None, {}
            values = torch.einsum("bmd,bm->bd", scale_to_unit(slope), residuals.to(slope)).trunc().long()
        blocks = round_weights((block for block, _ in compute_jacobians(bottom, x, head=head)), self.unit)
        noise = (self._draw(torch.empty(count_learned(bottom), device=x.device)) * self.unit**2).round().long()
        known |= {
            "parameters": torch.cat([p.flatten() for p in learned.values()]),
            "noise": torch.tensor([self.scale], device=x.device),
        }
        return self.sums[party.name].sum(values, blocks, noise, known, step)

    def _draw(self, like: Tensor) -> Tensor:
        """Return the noise on a sum, with the shape of ``like``, in float64."""
        rng = self.federation.active.rng
        return torch.randn(like.shape, generator=rng, device=like.device, dtype=torch.float64) * self.scale

    def _fit_private(self, phase: str) -> None:
        """Fit the active party's private model to its columns and the last embeddings that it received.

        No noise is necessary: nothing that the passive parties see depends on this model.
        """
        federation, spec = self.federation, self.private_spec
        rows = torch.arange(federation.n_rows("train"), device=federation.device)
        step = Step(self.spec.count_batches(len(rows)), phase, rows)
        with torch.no_grad():
            inputs = self._gather(step)
        order = make_rng(federation.seed, "private", phase)
        for _ in fit_private(self.private, inputs, self.targets, spec, order):
            pass

    def _gather(self, step: Step) -> Tensor:
        """Have the rows of ``step`` sent; return the active party's columns and all embeddings (B, p)."""
        active = self.federation.active
        arrived = [
            self._forward(p.name, self.bottoms[p.name](self._feed(p, step)), step) for p in self.federation.passive
        ]
        return torch.cat([active.features[step.split][step.rows], *arrived], dim=1)

    @torch.no_grad()
    def predict(self, split: str, phase: str = "predict") -> Tensor:
        """Return the logits (n, C) of the private model for ``split``."""
        everybody = torch.arange(self.federation.n_rows(split), device=self.federation.device)
        parts = torch.split(everybody, PREDICTION_BATCH)
        logits = [self.private(self._gather(Step(k, phase, rows, split=split))) for k, rows in enumerate(parts)]
        return self.federation.active.defenses.decode_logits(torch.cat(logits))


class PrivateModel(nn.Module):
    """What the active party predicts with after sealed training: a network on its columns and all embeddings.

    Args:
        width: of both together.
        n_classes: C.
        hidden: units.
    """

    def __init__(self, width: int, n_classes: int, hidden: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, n_classes))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("deviation", torch.ones(width))

    def standardize(self, inputs: Tensor) -> None:
        """Subtract the mean of ``inputs`` (n, width) from now on, and divide by their standard deviation."""
        self.mean, self.deviation = inputs.mean(dim=0), inputs.std(dim=0).clamp(min=1e-6)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (B, C)."""
        logits: Tensor = self.layers((inputs - self.mean) / self.deviation)
        return logits


def fit_private(
    model: PrivateModel, inputs: Tensor, targets: Tensor, spec: TrainSpec, order: torch.Generator
) -> Iterator[int]:
    """Fit the active party's private model to ``inputs`` (n, width); yield the number of each epoch."""
    model.standardize(inputs)
    optimizer = create_optimizer(model.parameters(), spec)
    for epoch in range(spec.count_epochs(len(inputs))):
        for batch in draw_batches(len(inputs), spec.batch, order, inputs.device):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[batch]), targets[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        yield epoch


def plan_batches(plan: SealedPlan, rows: int, spec: TrainSpec) -> TrainSpec:
    """Return the settings of the passes under noise over ``rows``, in batches of about one size."""
    batch = math.ceil(rows / max(1, round(rows / plan.batch)))
    return msgspec.structs.replace(
        spec, epochs=plan.epochs, batch=batch, lr=plan.lr, optimizer="adam", weight_decay=0.0, schedule="constant"
    )


def bound_change(m: int, weights: Iterable[tuple[int, int, float]], unit: float) -> float:
    """Return by how much a label that is replaced changes the sums of a batch of all parties together.

    Args:
        m: numbers of a residual.
        weights: of each passive party, the numbers that are sealed for a row, its parameters, and by how many units
            the sealed numbers of a row may be too long for being rounded.
        unit: integers that make 1.
    """
    largest, parties = 1.0, 1  # the active party's own sums have weights that are not rounded
    for width, learned, rounded in weights:
        of_weights = (width > 1) * math.sqrt(width * learned)
        largest, parties = max(largest, (1 + of_weights / unit) * (1 + rounded / unit)), parties + 1
    return (1.0 if m == 1 else math.sqrt(2)) * largest * math.sqrt(parties)


def sum_rows(
    model: nn.Module, residuals: Tensor, unit: float, *inputs: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, list[list[Tensor]]]:
    """Return the sum (P,) over rows of J' r, where J is the scaled Jacobian of the model's scores and r the residual.

    Args:
        model: of the active party, from ``inputs`` to scores (B, m).
        residuals: (B, m) integers.
        unit: integers that make 1.
        inputs: (B, ...) each.
        dtype: of the sum. Its rounding depends on labels as well, which the noise leaves out of account.

    Returns:
        The sum, and in blocks of rows the Jacobians (b, m, d) of the scores with respect to each input but the first.
    """
    total, slopes, first = torch.zeros((), device=residuals.device), [], 0
    for block, of_inputs in compute_jacobians(model, *inputs):
        of_block = residuals[first : first + len(block)].to(dtype) / unit
        total = total + torch.einsum("bmp,bm->p", scale_to_unit(block).to(dtype), of_block)
        slopes.append(of_inputs)
        first += len(block)
    return total, slopes


def round_weights(jacobians: Iterable[Tensor], unit: float) -> Iterator[Tensor]:
    """Yield the weights (b, m, P) of consecutive rows as integers, with m = 1 no longer than ``unit``."""
    return ((scale_to_unit(block) * unit * (1 - 2**-20)).int() for block in jacobians)  # float32 rounds by less


def round_residuals(scores: Tensor, targets: Tensor, unit: float) -> Tensor:
    """Return p - y (B, m), the gradient of each row's loss with respect to its scores (B, m), as integers.

    ``unit`` of them make 1. p alone is rounded, so that another label changes the integers by ``unit`` exactly.
    """
    if scores.shape[1] == 1:
        p, y = torch.sigmoid(scores), targets[:, None]
    else:
        p, y = torch.softmax(scores, dim=1), F.one_hot(targets, scores.shape[1])
    return (p.double() * unit).round().long() - y.long() * int(unit)


def assign_gradient(model: nn.Module, gradient: Tensor) -> None:
    """Give each parameter that learns its part of ``gradient`` (P,)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p, part in zip(parameters, torch.split(gradient, [p.numel() for p in parameters]), strict=True):
        p.grad = part.reshape(p.shape).to(p)
