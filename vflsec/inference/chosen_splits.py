"""Labels under which trees would have been split as they were."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.core.view import View
from vflsec.inference.replay import Ensemble, replayed
from vflsec.inference.trees.choices import Choices
from vflsec.inference.trees.components import components, weighed
from vflsec.inference.trees.nodes import partners

STEPS, STEP = 20, 0.1
PENALTY = 3.0
WEIGHT = 0.3
FARTHEST = 5.0
"""Standard deviations at which own columns are cut off."""


def explained(view: View, trees: Ensemble, start: Tensor, *, learning_rate: float, l2: float) -> Tensor:
    """Return probabilities of classes (n, C') of training rows that explain the splits and the auxiliary labels.

    Logits are those of ``start`` plus a linear function of own columns and of principal components of nodes. The
    function minimizes, with a ridge penalty, the cross-entropy of the auxiliary labels plus a share of the surprise at
    all known splits (``vflsec.inference.trees.choices``), while boosting on the probabilities is replayed.

    Source: this project.

    Args:
        view: of a passive party.
        trees: whose nodes it is told.
        start: (n, C') probabilities to start from, of the last of two classes only.
        learning_rate: of the training.
        l2: of the training.
    """
    split, single = view.aux_split, start.shape[1] == 1
    choices, x = _once(view)
    base = start.float().clamp(1e-3, 1 - 1e-3)
    base = base.logit() if single else base.log()
    answers = F.one_hot(view.aux_labels, view.n_classes).float()[:, -start.shape[1] :]
    known = trees._replace(nodes={split: trees.nodes[split]})
    slopes = base.new_zeros(x.shape[1], base.shape[1]).requires_grad_()
    offset, of_aux = (base.new_zeros(base.shape[1]).requires_grad_() for _ in range(2))  # auxiliary rows are balanced
    optimizer = torch.optim.Adam([slopes, offset, of_aux], lr=STEP)
    for _ in range(STEPS):
        logits = base + x @ slopes + offset
        replay = replayed(
            known, _probabilities(logits, view, answers), split, learning_rate=learning_rate, l2=l2,
            noted=choices.surprise,
        )  # fmt: skip
        of_known = logits[view.aux_rows] + of_aux
        error = (
            F.binary_cross_entropy_with_logits(of_known, answers, reduction="sum")
            if single
            else F.cross_entropy(of_known, view.aux_labels, reduction="sum")
        )
        loss = error + PENALTY / 2 * slopes.square().sum() + WEIGHT * torch.stack(replay.notes).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return _probabilities((base + x @ slopes + offset).detach(), view, answers).double()


def _probabilities(logits: Tensor, view: View, answers: Tensor) -> Tensor:
    """Return probabilities (n, C'), of the auxiliary rows those of their labels."""
    found = logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(dim=1)
    return found.index_copy(0, view.aux_rows, answers)


def _once(view: View) -> tuple[Choices, Tensor]:
    """Return the choices, and columns (n, k) whose rows have a mean squared length of one, once for a view."""
    if "chosen splits" not in view.memo:
        view.memo["chosen splits"] = Choices(view), _columns(view)
    found: tuple[Choices, Tensor] = view.memo["chosen splits"]
    return found


def _columns(view: View) -> Tensor:
    own = view.features[view.aux_split].float()
    own = (own - own.mean(dim=0)) / own.std(dim=0).clamp_min(1e-3)
    shared = [components(view, other) for other in partners(view)]
    tables = [weighed(*one[view.aux_split], 1).to(own) for one in shared if one]
    x = torch.cat([*tables, own.clamp(-FARTHEST, FARTHEST) / max(1, own.shape[1]) ** 0.5], dim=1)
    return x / x.square().sum(dim=1).mean().sqrt().clamp_min(torch.finfo(x.dtype).tiny)
