"""KDk: soft labels share weight with the classes that a teacher finds likeliest."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.base.errors import UsageError
from vflsec.base.seeds import seed_weights
from vflsec.core.defense import Defense
from vflsec.nn.stacked import draw_batches

EPOCHS = 20
BATCH = 128
RATE = 1e-3
HIDDEN = 64


@dataclass(kw_only=True, eq=False, repr=False)
class DistilledGroups(Defense):
    """Soft labels over k classes: the true one has weight 1 - epsilon, k - 1 others have epsilon / (k - 1) each.

    The others are those that a teacher finds likeliest for the row. The teacher is a network with one hidden layer of
    64 units, trained for 20 epochs before the federation, on the active party's own columns and labels. A soft label
    becomes the mean of its classes' soft labels.

    Source: Arazzi et al. 2024 (KDk, arXiv 2404.12369), and its code, where epsilon is .65. There, the group is the
    teacher's k likeliest classes, and the true one is added if it is not among them, so that the weights then sum to
    more than one. Here the group always has k classes, including the true one. Their teacher is a ResNet-50 pre-trained
    on other images; its quality only affects which classes are in the group, and nothing for k = C.

    With epsilon = (k - 1) / k all k classes have equal weight: nothing tells which of the group is the label
    (k-anonymity, as in the name), but the group still narrows it down, and the model learns no more than the group.
    With a larger epsilon the true class would be the least likely, which reveals the label: refused.

    | case | result |
    |---|---|
    | k > C | k = C |
    | epsilon > (k - 1) / k | refused, before training |

    Args:
        strength: epsilon of the paper, the weight of the other classes together; it is no privacy budget.
        k: classes in a group, including the true one; None for all C.

    Raises:
        UsageError: fewer than two classes in a group.
    """

    name = "kd-k"
    strength_name = "weight"
    strengths = (0.1, 0.3, 0.45)
    points = ()
    reference = (
        "Arazzi et al. 2024, KDk: A Defense Mechanism Against Label Inference Attacks in Vertical Federated Learning, "
        "arXiv 2404.12369"
    )
    guarantee = "none, empirical only; k classes are equal only if epsilon = (k - 1) / k, and the group is not hidden"
    softens = True
    hides = (
        "from the passive party: sign (direct) and length (norm) of the gradient at the true class, within its group"
    )
    costs = "the teacher; utility, as epsilon approaches (k - 1) / k"
    fails = (
        "below (k - 1) / k, against attackers who average or know some labels: gradients still differ by class "
        "(direction), and soft labels can improve the bottom model (mc). With two classes it is plain label smoothing"
    )

    k: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k is not None and self.k < 2:
            raise UsageError(f"expected at least k=2 classes in a group, got {self.k}: a single one hides nothing")

    def check_task(self, n_classes: int) -> None:
        """Raise UsageError if the true class would be less likely than the others in its group."""
        k = self._size(n_classes)
        if self.strength > (k - 1) / k + 1e-9:  # for a rounded fraction
            raise UsageError(
                f"expected epsilon <= (k - 1) / k = {(k - 1) / k:g} for kd-k with k={k} of {n_classes} classes, got "
                f"{self.strength:g}: the true class would be the least likely of its group, which reveals it"
            )

    def on_labels(self, y: Tensor, *, features: Tensor, n_classes: int, rng: torch.Generator) -> Tensor:
        """Return soft labels (N, C) of (N,) class numbers, or of (N, C) probabilities."""
        if not self.strength:
            return y
        self.check_task(n_classes)
        k, classes = self._size(n_classes), torch.arange(n_classes, device=y.device)
        given = F.one_hot(y, n_classes).to(features.dtype) if y.dim() == 1 else y
        teacher = self._fit_teacher(features, given, rng) if k < n_classes and len(y) else torch.zeros_like(given)
        soft = torch.zeros_like(given)
        for c in classes:
            others = teacher.masked_fill(classes == c, -torch.inf).topk(k - 1, dim=1).indices
            group = torch.zeros_like(given).scatter_(1, others, self.strength / (k - 1))
            group[:, c] = 1 - self.strength
            soft += given[:, c, None] * group
        return soft

    def _size(self, n_classes: int) -> int:
        return min(self.k or n_classes, n_classes)

    def _fit_teacher(self, x: Tensor, targets: Tensor, rng: torch.Generator) -> Tensor:
        """Return the logits (N, C) of a teacher trained on columns (N, d) and labels (N, C)."""
        seed = int(torch.randint(2**62, (), generator=rng, device=rng.device))
        with seed_weights(seed, "teacher"):
            teacher = nn.Sequential(nn.Linear(x.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, targets.shape[1]))
        teacher.to(x.device)
        optimizer, order = torch.optim.Adam(teacher.parameters(), RATE), torch.Generator().manual_seed(seed)
        for _ in range(EPOCHS):
            for rows in draw_batches(len(x), BATCH, order, x.device):
                loss = F.cross_entropy(teacher(x[rows]), targets[rows])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        with torch.no_grad():
            logits: Tensor = teacher(x)
        return logits
