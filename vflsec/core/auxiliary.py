"""What few known labels are good for, beside fitting: to point a score the right way, and to serve as references."""

from __future__ import annotations

import torch
from torch import Tensor

from vflsec.core import metrics
from vflsec.core.view import View


def oriented(view: View, score: Tensor, *, train: Tensor | None = None) -> Tensor:
    """Return scores (n, 2) from ``score`` (n,): turned round if that serves the auxiliary labels better.

    Args:
        view: of the adversary; without labels of both classes the score stays as it is.
        score: the larger, the likelier class 1.
        train: (n_train,) the same score of the training rows, where the auxiliary samples are; None for ``score``.
    """
    known = (score if train is None else train)[view.aux_rows].cpu()
    labels = view.aux_labels.cpu().numpy()
    if len(set(labels.tolist())) == 2 and metrics.auc(torch.stack([-known, known], dim=1).numpy(), labels) < 0.5:
        score = -score
    return torch.stack([-score, score], dim=1)


def references(view: View, limit: int | None, rng: torch.Generator) -> list[Tensor]:
    """Return for each class the training rows that are known to be of it, a draw of at most ``limit``."""
    found = []
    for c in range(view.n_classes):
        rows = view.aux_rows[view.aux_labels == c]
        drawn = torch.randperm(len(rows), generator=rng)[:limit]
        found.append(rows[drawn.to(rows.device)])
    return found
