"""Distance correlation: received embeddings are trained to depend less on the label."""

import torch
from torch import Tensor

from vflsec.core.defense import Defense

STABILIZER = 1e-16


class DistanceCorrelation(Defense):
    """Adds lambda · log dCor(h, Y) to the active party's loss, for each embedding h (B, d) that it receives.

    Y are the one-hot labels (B, C). A and B are the doubly centered matrices (B, B) of Euclidean distances between rows
    of h and of Y (minus row means and column means, plus the grand mean). With means over all entries, dCor =
    sqrt(mean(A·B)) / sqrt(sqrt(mean(A·A)) · sqrt(mean(B·B))), in [0, 1]; 1e-16 is added to each mean.

    Source: Sun et al. 2022 (arXiv 2203.01451), section 4; the form of VFLAIR's code. lambda from 1e-4 upwards.

    The active party acts alone, through the gradients that it sends. The defense does not protect gradients: they gain
    a term that depends on the label. If the top model ignores the embedding, that term dominates. The gradients of the
    term sum to zero over a batch, so those of a class with a share p of the rows are (1 - p) / p times as long as the
    others, on average. Every penalty that pushes two classes together has this effect; ``max-norm`` after it equalizes
    lengths. The estimate of dCor in a batch is biased upwards, more so in small batches.

    A batch of one class or of one row adds nothing.

    Args:
        strength: lambda.
    """

    name = "dcor"
    strength_name = "lambda"
    strengths = (0.01, 0.03, 0.1)
    points = ()
    reference = (
        "Sun et al. 2022, Label Leakage and Protection from Forward Embedding in VFL, arXiv 2203.01451, section 4"
    )
    guarantee = "none, empirical only; it acts on embeddings, and gradients still reveal labels"
    hides = "the label in embeddings, from anyone who reads them or the passive bottom model (mc, spectral-embedding)"
    costs = (
        "two (B, B) matrices for each passive party and step, O(B^2 (d + C)) time; utility, most where the active "
        "party has few columns of its own to predict from"
    )
    fails = (
        "against direction, which reads the gradients; against norm with a rare class, which can even gain; and "
        "against attackers who keep early messages"
    )

    def penalty(self, h: Tensor, labels: Tensor, sender: str) -> Tensor | None:
        """Return lambda · log dCor of embeddings (B, d) and labels (B,), a scalar; None for a single class."""
        if bool((labels == labels[:1]).all()):
            return None
        return self.strength * log_distance_correlation(h, labels)


def log_distance_correlation(h: Tensor, labels: Tensor) -> Tensor:
    """Return log dCor of embeddings (B, d) and one-hot labels, given as class numbers (B,)."""
    a = _center(torch.cdist(h, h, compute_mode="donot_use_mm_for_euclid_dist"))
    b = _center((labels[:, None] != labels).to(h.dtype) * 2**0.5)  # the distance of two one-hot rows
    logs = [torch.log((x * y).mean().clamp(min=0) + STABILIZER) for x, y in ((a, b), (a, a), (b, b))]
    return logs[0] / 2 - (logs[1] + logs[2]) / 4


def _center(distances: Tensor) -> Tensor:
    rows, columns = distances.mean(dim=1, keepdim=True), distances.mean(dim=0, keepdim=True)
    return distances - rows - columns + distances.mean()
