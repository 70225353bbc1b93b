"""Replay attack (ExPLoit): find the head and the labels that would have sent the gradients that came back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.core.attack import Attack
from vflsec.core.checks import positive, positive_or_none
from vflsec.core.message import Kind
from vflsec.core.releases import received
from vflsec.core.view import Guess, Need, View

INNER = 15
"""Projected-gradient steps on the errors in each round; they start where the round before ended."""

CHUNK = 8192
"""Rows labeled at once, which bounds memory at chunk · C² numbers."""


SETTLED = 0.002
"""Share of rows whose label the last round may have changed for the fit to count as converged."""


class Replay(Attack):
    """Label inference by a surrogate head W (C, d) and labels y that together explain the recorded gradients g (n, d).

    Under a linear head a row's gradient is Σ_j a_j (W_j − W_y), where a_j >= 0 is the probability that the model gives
    to the wrong class j. Which these are depends on the other parties, so each row has its own. Three steps alternate:
    errors a of each row for each class it might be of (non-negative least squares), the probability of each class
    (n, C) from how well it explains the row, and W by least squares. The known labels start W and stay fixed. Errors
    have a Gaussian prior around 1/C whose weight is the variance that is left unexplained, so under noise the classes
    become clouds around their means, and without noise cones: a row is of the class in whose cone it lies, however
    short its gradient is. A class's score is minus the squared distance to its cone.

    A row's gradient is its mean direction over its releases, so neither 1/B nor the shrinking of gradients in training
    matters, and noise averages out. W is fitted on at most ``rows`` rows; then all are labeled.

    Departs from the source, which fits both by gradient descent, reads p off the embedding that was sent and needs the
    class prior and an entropy term to name classes and to make labels hard: here known labels do the first and the
    enumeration of classes the second.

    Costs rounds · rows · C³ times about 100 operations: 0.1 s at 2 classes, 1 s at 10. Fails where noise is much longer
    than the gradients, where d < C − 1, so that cones overlap, and the less linear the head is in this party's
    embedding.

    Source: Kariyappa & Qureshi 2021, ExPLoit (arXiv 2112.01299).

    Args:
        rounds: of the alternation.
        rows: training rows on which W is fitted, the known ones first.
        turns: how many releases of each row are read, from the first; None for all.
    """

    name = "replay"
    version = 2
    needs = frozenset({Need.GRADIENTS, Need.AUX_LABELS})
    reference = "Kariyappa & Qureshi 2021 (ExPLoit), arXiv 2112.01299, by alternating least squares"
    verified = "recovers labels under a linear head; unverified against the source: only the abstract could be read"
    differs = (
        "Labels and head are fitted by alternating least squares; the source fits both by gradient descent.",
        "Known labels name the classes; the source uses the class prior, and an entropy term to make labels hard.",
        "The probabilities of wrong classes are free for each row; the source computes them from the embedding "
        "that was sent.",
        "Only the abstract of the source could be read.",
        "Two classes: where argmax divides the auxiliary labels badly, a threshold that they support takes its place.",
    )

    def __init__(self, *, rounds: int = 40, rows: int = 2000, turns: int | None = None) -> None:
        positive(rounds=rounds, rows=rows)
        self.rounds = rounds
        self.rows = rows
        positive_or_none(turns=turns)
        self.turns = turns

    @property
    def search(self) -> Mapping[str, Sequence[Any]]:
        """Vary how many releases are read: gradients turn as training goes on."""
        return {"turns": (None, 1, 5)}

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, C) of the training rows."""
        releases = received(view, Kind.GRADIENT).first(self.turns)
        directions = releases.mean(F.normalize(releases.values, dim=1))
        directions = directions / directions.norm(dim=1).mean().clamp_min(torch.finfo(directions.dtype).tiny)
        others = torch.ones(len(directions), dtype=torch.bool, device=directions.device)
        others[view.aux_rows] = False
        drawn = torch.randperm(int(others.sum()), generator=rng)[: max(0, self.rows - len(view.aux_rows))]
        rows = torch.cat([view.aux_rows, others.nonzero()[:, 0][drawn.to(others.device)]])
        known = Known(torch.arange(len(view.aux_rows), device=rows.device), onehot(view, directions.dtype))
        fit = before = started(directions[rows], known)
        for _ in range(self.rounds):
            before, fit = fit, alternated(fit, directions[rows], known)
        return Guess(
            {"train": scored(fit.head, directions)},
            converged=changed(before, fit) <= SETTLED,
            budget={"rounds": self.rounds, "rows": len(rows)},
        )


class Head(NamedTuple):
    """A surrogate head: its weights (C, d), and the variance of an entry of a gradient that it does not explain."""

    weights: Tensor
    variance: float


class Explained(NamedTuple):
    """How a head explains gradients (n, d) if they were of each class: errors (C, n, C), and what that costs (n, C)."""

    errors: Tensor
    cost: Tensor


class Known(NamedTuple):
    """Rows (m,) whose label is known, and their one-hot labels (m, C)."""

    rows: Tensor
    labels: Tensor


class Fit(NamedTuple):
    """Where the alternation stands: the head, what it makes of each row, and labels as probabilities (n, C)."""

    head: Head
    errors: Tensor | None
    labels: Tensor

    def modelled(self) -> Tensor:
        """Return the gradients (n, d) that this head and these labels would have sent."""
        assert self.errors is not None
        return torch.einsum("nc,cnj,cjd->nd", self.labels, self.errors, edges(self.head.weights))


def started(gradients: Tensor, known: Known) -> Fit:
    """Return the head that explains the known rows (of ``gradients`` (n, d)) best if all errors are 1/C."""
    classes = known.labels.shape[1]
    weights = torch.linalg.pinv(1 / classes - known.labels) @ gradients[known.rows]
    return Fit(Head(weights, 1 / gradients.shape[1]), None, gradients.new_full((len(gradients), classes), 1 / classes))


def alternated(fit: Fit, gradients: Tensor, known: Known) -> Fit:
    """Return the fit after one round: errors, then labels, then the head."""
    classes = fit.labels.shape[1]
    own = torch.arange(classes, device=gradients.device)
    errors, cost = explained(fit.head, gradients, steps=INNER, start=fit.errors)
    labels = (-cost / (2 * fit.head.variance)).softmax(dim=1)
    labels[known.rows] = known.labels
    variance = max(float((labels * cost).sum(dim=1).mean()) / gradients.shape[1], 1e-5)
    residuals = errors.clone()  # (C, n, C): what the gradient of the loss by logits would be, p − onehot(y)
    residuals[own, :, own] -= errors.sum(dim=2)
    weighted = residuals * labels.T[:, :, None]
    moments = torch.einsum("cni,cnj->ij", weighted, residuals)
    products = torch.einsum("cni,nd->id", weighted, gradients)
    return Fit(Head(torch.linalg.pinv(moments, rtol=1e-5, hermitian=True) @ products, variance), errors, labels)


def changed(before: Fit, after: Fit) -> float:
    """Return the share of rows whose likeliest class is another than before."""
    return float((before.labels.argmax(dim=1) != after.labels.argmax(dim=1)).double().mean())


def edges(weights: Tensor) -> Tensor:
    """Return W_j − W_c as (c, j, d): a row of class c pulls its embedding along these."""
    return weights[None] - weights[:, None]


def explained(head: Head, gradients: Tensor, *, steps: int, start: Tensor | None = None) -> Explained:
    """Return the errors a >= 0 that minimize ||g − Σ_j a_j (W_j − W_c)||² + ridge · ||a − 1/C||², for each class c.

    Args:
        head: the surrogate.
        gradients: g (n, d).
        steps: of accelerated projected gradient descent.
        start: (C, n, C) errors to start from; None for 1/C.
    """
    weights, classes = head.weights, len(head.weights)
    ridge = max(0.01 * float(weights.pow(2).mean()), head.variance * classes**2)
    to = edges(weights)
    eye = torch.eye(classes, dtype=weights.dtype, device=weights.device)
    gram = to @ to.mT + ridge * eye  # (c, j, j)
    target = gradients @ to.mT + ridge / classes  # (c, n, j)
    largest = torch.linalg.eigvalsh(gram)[:, -1, None, None]
    errors = torch.full_like(target, 1 / classes) if start is None else start
    ahead, momentum = errors, 1.0
    for _ in range(steps):
        found = (ahead - (ahead @ gram - target) / largest).clamp_min(0)
        faster = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = found + (momentum - 1) / faster * (found - errors)
        errors, momentum = found, faster
    constant = gradients.pow(2).sum(dim=1) + ridge / classes
    cost = constant + (errors @ gram * errors).sum(dim=2) - 2 * (errors * target).sum(dim=2)  # (c, n)
    return Explained(errors, cost.clamp_min(0).T)


def scored(head: Head, gradients: Tensor) -> Tensor:
    """Return minus the cost (n, C) of explaining each gradient by each class."""
    return torch.cat([-explained(head, chunk, steps=4 * INNER).cost for chunk in torch.split(gradients, CHUNK)])


def onehot(view: View, dtype: torch.dtype) -> Tensor:
    """Return the adversary's own labels (m, C)."""
    return F.one_hot(view.aux_labels, view.n_classes).to(dtype)
