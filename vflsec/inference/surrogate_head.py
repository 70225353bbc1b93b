"""Alternating least squares for a surrogate head and labels that together explain received gradients.

Source: Kariyappa & Qureshi 2021, ExPLoit (arXiv 2112.01299), who fit both by gradient descent.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.core.view import View

INNER = 15
"""Projected-gradient steps on the errors in each round, from the errors of the round before."""

CHUNK = 8192
"""Rows labeled at once, which bounds the memory to CHUNK · C² numbers."""

MAX_CHANGED_SHARE = 0.002
"""Largest share of labels that the last round of a converged fit may change."""


class Head(NamedTuple):
    """A surrogate head: its weights (C, d), and the residual variance of an entry of a gradient."""

    weights: Tensor
    variance: float


class Explanation(NamedTuple):
    """The explanation of gradients (n, d) by each class in turn: errors (C, n, C), and the cost (n, C)."""

    errors: Tensor
    cost: Tensor


class KnownLabels(NamedTuple):
    """Rows (m,) with a known label, and their one-hot labels (m, C)."""

    rows: Tensor
    labels: Tensor


class HeadFit(NamedTuple):
    """The state of the alternation: the head, the errors of each row, and labels as probabilities (n, C)."""

    head: Head
    errors: Tensor | None
    labels: Tensor

    def compute_residuals(self) -> Tensor:
        """Return the gradients (n, C) of the loss by the logits, whose products with the weights are those of rows."""
        assert self.errors is not None
        return torch.einsum("nc,cnj->nj", self.labels, self.errors) - self.labels * self.errors.sum(dim=2).T


def start_fit(gradients: Tensor, known: KnownLabels) -> HeadFit:
    """Return the head that explains the known rows of ``gradients`` (n, d) best if all errors are 1/C."""
    classes = known.labels.shape[1]
    weights = torch.linalg.pinv(1 / classes - known.labels) @ gradients[known.rows]
    return HeadFit(
        Head(weights, 1 / gradients.shape[1]), None, gradients.new_full((len(gradients), classes), 1 / classes)
    )


def alternate(fit: HeadFit, gradients: Tensor, known: KnownLabels) -> HeadFit:
    """Return the fit after one round, which updates errors, then labels, then the head."""
    classes = fit.labels.shape[1]
    each = torch.arange(classes, device=gradients.device)
    errors, cost = explain_gradients(fit.head, gradients, steps=INNER, start=fit.errors)
    labels = (-cost / (2 * fit.head.variance)).softmax(dim=1)
    labels[known.rows] = known.labels
    variance = max(float((labels * cost).sum(dim=1).mean()) / gradients.shape[1], 1e-5)
    residuals = errors.clone()  # (C, n, C): the gradient of the loss by the logits, p − encode_labels(y)
    residuals[each, :, each] -= errors.sum(dim=2)
    weighted = residuals * labels.T[:, :, None]
    moments = torch.einsum("cni,cnj->ij", weighted, residuals)
    products = torch.einsum("cni,nd->id", weighted, gradients)
    return HeadFit(Head(torch.linalg.pinv(moments, rtol=1e-5, hermitian=True) @ products, variance), errors, labels)


def share_changed(before: HeadFit, after: HeadFit) -> float:
    """Return the share of rows whose likeliest class changed."""
    return float((before.labels.argmax(dim=1) != after.labels.argmax(dim=1)).double().mean())


def get_edges(weights: Tensor) -> Tensor:
    """Return W_j − W_c as (c, j, d): the gradient of a row of class c is a sum of multiples of these."""
    return weights[None] - weights[:, None]


def explain_gradients(head: Head, gradients: Tensor, *, steps: int, start: Tensor | None = None) -> Explanation:
    """Return the errors a >= 0 that minimize ||g − Σ_j a_j (W_j − W_c)||² + ridge · ||a − 1/C||², for each class c.

    Args:
        head: the surrogate.
        gradients: g (n, d).
        steps: of accelerated projected gradient descent.
        start: (C, n, C) errors to start from; None for 1/C.
    """
    weights, classes = head.weights, len(head.weights)
    ridge = max(0.01 * float(weights.pow(2).mean()), head.variance * classes**2)
    along = get_edges(weights)
    eye = torch.eye(classes, dtype=weights.dtype, device=weights.device)
    gram = along @ along.mT + ridge * eye  # (c, j, j)
    target = gradients @ along.mT + ridge / classes  # (c, n, j)
    largest = torch.linalg.eigvalsh(gram)[:, -1, None, None]
    errors = torch.full_like(target, 1 / classes) if start is None else start
    ahead, momentum = errors, 1.0
    for _ in range(steps):
        before, errors = errors, (ahead - (ahead @ gram - target) / largest).clamp_min(0)
        faster = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = errors + (momentum - 1) / faster * (errors - before)
        momentum = faster
    constant = gradients.pow(2).sum(dim=1) + ridge / classes
    cost = constant + (errors @ gram * errors).sum(dim=2) - 2 * (errors * target).sum(dim=2)  # (c, n)
    return Explanation(errors, cost.clamp_min(0).T)


def score_gradients(head: Head, gradients: Tensor) -> Tensor:
    """Return the negative cost (n, C) of explaining each gradient by each class."""
    return torch.cat([-explain_gradients(head, chunk, steps=4 * INNER).cost for chunk in torch.split(gradients, CHUNK)])


def encode_labels(view: View, dtype: torch.dtype) -> Tensor:
    """Return the known labels (m, C)."""
    return F.one_hot(view.aux_labels, view.n_classes).to(dtype)
