"""KDk: a label leaves part of its weight to the classes that a teacher takes for it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.core.defense import Defense
from vflsec.core.errors import UsageError
from vflsec.core.seeds import drawing
from vflsec.nn.batches import batches

EPOCHS = 20
BATCH = 128
RATE = 1e-3
HIDDEN = 64


class DistilledGroups(Defense):
    """Soft labels over k classes: the true one has weight 1 - epsilon, k - 1 others have epsilon / (k - 1) each.

    The others are those that a teacher finds likeliest for the row: a network of one hidden layer of 64 units, trained
    before the federation, for 20 epochs, on the active party's own columns and labels. A label that is soft already
    becomes the mean of what its classes would.

    Source: Arazzi et al. 2024 (KDk, arXiv 2404.12369), and its code, where epsilon is .65. There the group is the
    teacher's k likeliest classes, and the true one, if it is not among them, is added: its rows then have more than one
    in sum. Here the group always has k classes, the true one among them. Their teacher is a ResNet-50 pre-trained on
    other images; how good it is matters only for which classes are in the group, and with k = C not at all.

    With epsilon = (k - 1) / k all k are alike: nothing tells which of the group is the label (the k-anonymity that the
    name claims), but the group still narrows it down, and the model can learn no more than the group. Above that the
    true class would be the unlikeliest, and the label known again, turned round: refused.

    From the passive party it hides the label in each gradient: the sign at the true class (``direct``) and the length
    (``norm``) shrink towards those of the group. Costs the teacher, and utility as epsilon comes near (k - 1) / k.
    Fails below that against whoever averages or knows some labels: gradients still differ by class, only less, and
    ``direction`` and ``mc`` need no size. Of two classes it is plain label smoothing.
    That it hides labels from ``mc`` does not hold here: on digits, three seeds, epsilon .5 takes it from .79 to
    .85, because the bottom model becomes better (the joint one goes from .957 to .974), and ``direction`` from 1.00 to
    .70; on credit-default it leaves both as they were.

    Guarantee: none, empirical only.

    | case | result |
    |---|---|
    | strength 0 | the labels themselves |
    | k > C | k = C |
    | epsilon > (k - 1) / k | refused, before training |

    Args:
        strength: epsilon, the weight that leaves the true class.
        k: classes in a group, the true one included; None for all C.

    Raises:
        UsageError: fewer than two classes in a group.
    """

    name = "kd-k"
    strength_name = "epsilon"
    strengths = (0.1, 0.3, 0.45)
    points = ()
    reference = (
        "Arazzi et al. 2024, KDk: A Defense Mechanism Against Label Inference Attacks in Vertical Federated Learning, "
        "arXiv 2404.12369"
    )
    guarantee = "none, empirical only; k classes are alike only if epsilon = (k - 1) / k, and their group is not hidden"
    softens = True

    def __init__(self, strength: float, *, k: int | None = None, at: Iterable[str] | None = None) -> None:
        super().__init__(strength, at=at)
        if k is not None and k < 2:
            raise UsageError(f"expected at least k=2 classes in a group, got {k}: one alone hides nothing")
        self.k = k

    def check_task(self, n_classes: int) -> None:
        """Raise UsageError if the true class would be less likely than the others in its group."""
        k = self._size(n_classes)
        if self.strength > (k - 1) / k + 1e-9:  # of a fraction as one writes it
            raise UsageError(
                f"expected epsilon <= (k - 1) / k = {(k - 1) / k:g} for kd-k with k={k} of {n_classes} classes, got "
                f"{self.strength:g}: the true class would be the unlikeliest of its group, and known by that"
            )

    def on_labels(self, y: Tensor, *, features: Tensor, n_classes: int, rng: torch.Generator) -> Tensor:
        """Return soft labels (N, C) of (N,) class numbers, or of (N, C) probabilities."""
        if not self.strength:
            return y
        self.check_task(n_classes)
        k, classes = self._size(n_classes), torch.arange(n_classes, device=y.device)
        given = F.one_hot(y, n_classes).to(features.dtype) if y.dim() == 1 else y
        teacher = self._taught(features, given, rng) if k < n_classes and len(y) else torch.zeros_like(given)
        soft = torch.zeros_like(given)
        for c in classes:
            others = teacher.masked_fill(classes == c, -torch.inf).topk(k - 1, dim=1).indices
            group = torch.zeros_like(given).scatter_(1, others, self.strength / (k - 1))
            group[:, c] = 1 - self.strength
            soft += given[:, c, None] * group
        return soft

    def _size(self, n_classes: int) -> int:
        return min(self.k or n_classes, n_classes)

    def _taught(self, x: Tensor, targets: Tensor, rng: torch.Generator) -> Tensor:
        """Return the logits (N, C) of a teacher trained on columns (N, d) and labels (N, C)."""
        seed = int(torch.randint(2**62, (), generator=rng, device=rng.device))
        with drawing(seed, "teacher"):
            teacher = nn.Sequential(nn.Linear(x.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, targets.shape[1]))
        teacher.to(x.device)
        optimizer, order = torch.optim.Adam(teacher.parameters(), RATE), torch.Generator().manual_seed(seed)
        for _ in range(EPOCHS):
            for rows in batches(len(x), BATCH, order, x.device):
                loss = F.cross_entropy(teacher(x[rows]), targets[rows])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        with torch.no_grad():
            logits: Tensor = teacher(x)
        return logits
