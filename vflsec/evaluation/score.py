"""The scorer: the only place where a guess meets the truth."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vflsec.core import metrics
from vflsec.core.view import Guess, Secret
from vflsec.evaluation import statistics


def score(guess: Guess, secret: Secret, *, headline: str, exclude: Tensor, seed: int) -> dict[str, dict[str, Any]]:
    """Return, for each split guessed, all metrics, chance, the number of rows, and the row interval of the headline.

    Args:
        guess: what the attack proposed.
        secret: the truth.
        headline: the metric that the interval is for.
        exclude: positions of the auxiliary samples among the training rows: the adversary knew them.
        seed: of the bootstrap.
    """
    blocks = {}
    for split, guessed in guess.scores.items():
        scores, labels = _kept(split, guessed, secret.labels[split], exclude)
        if len(torch.unique(labels)) > 1:  # of a single class no metric says anything
            blocks[split] = measure(scores, labels, headline, seed)
    return blocks


def measure(scores: Tensor, labels: Tensor, headline: str, seed: int) -> dict[str, Any]:
    """Return all applicable metrics of (n, C) scores against (n,) labels, and the headline's row interval."""
    s, y = scores.detach().cpu().numpy(), labels.cpu().numpy()
    return {
        "metrics": {name: metrics.METRICS[name](s, y) for name in metrics.applicable(s.shape[1])},
        "ci95_rows": list(statistics.over_rows(headline, s, y, np.random.default_rng(seed))),
        "chance": metrics.chance(headline, y),
        "n": len(y),
    }


def _kept(split: str, scores: Tensor, labels: Tensor, exclude: Tensor) -> tuple[Tensor, Tensor]:
    labels = labels.cpu()
    if split != "train" or not len(exclude):
        return scores, labels
    keep = torch.ones(len(labels), dtype=torch.bool)
    keep[exclude.cpu()] = False
    return scores[keep], labels[keep]
