"""The scorer: the only place where a guess meets the truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vflsec.core import metrics
from vflsec.core.view import Guess, Secret
from vflsec.evaluation import statistics


def score(
    guess: Guess,
    secret: Secret,
    *,
    headline: str,
    exclude: Tensor,
    seed: int,
    known: str = "train",
    names: Sequence[str] = (),
) -> dict[str, dict[str, Any]]:
    """Return, for each split guessed, all metrics, chance, the number of rows, and the row interval of the headline.

    Args:
        guess: what the attack proposed.
        secret: the truth; rows whose answer is -1 have none.
        headline: the metric that the interval is for.
        exclude: positions of the auxiliary samples in the split ``known``: the adversary knew them.
        seed: of the bootstrap.
        known: the split of the auxiliary samples.
        names: of the metrics; those of a task with as many classes unless given.
    """
    blocks = {}
    for split, guessed in guess.scores.items():
        truth = secret.labels[split].cpu()
        keep = torch.ones(len(truth), dtype=torch.bool) if truth.dim() > 1 else truth >= 0
        if split == known:
            keep[exclude.cpu()] = False
        if len(torch.unique(truth[keep])) > 1:  # of a single class no metric says anything
            blocks[split] = measure(guessed[keep], truth[keep], headline, seed, names)
    return blocks


def measure(scores: Tensor, labels: Tensor, headline: str, seed: int, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return all metrics of (n, C) scores against (n,) labels, or of values, and the headline's row interval.

    ``one_class`` is set where every row is guessed to be of the same class: accuracy then says nothing of the leak.
    """
    s, y = scores.detach().cpu().numpy(), labels.cpu().numpy()
    return {
        **({"one_class": True} if one_class(labels, s) else {}),
        "metrics": {name: metrics.METRICS[name](s, y) for name in names or metrics.applicable(s.shape[1])},
        "ci95_rows": list(statistics.over_rows(headline, s, y, np.random.default_rng(seed))),
        "chance": metrics.chance(headline, y),
        "n": len(y),
    }


def one_class(labels: Tensor, scores: np.ndarray) -> bool:
    """Whether the argmax of (n, C) scores is one class for every row; of values there is no class."""
    return not labels.is_floating_point() and len(np.unique(scores.argmax(axis=1))) == 1
