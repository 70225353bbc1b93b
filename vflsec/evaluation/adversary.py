"""What an adversary has before it attacks: its draw of auxiliary labels, its View, and its own test of an attack."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.model_selection import StratifiedKFold
from torch import Tensor

from vflsec.core.attack import Attack
from vflsec.core.checks import unknown
from vflsec.core.errors import UsageError
from vflsec.core.message import Message
from vflsec.core.method import Trained, World
from vflsec.core.metrics import METRICS
from vflsec.core.party import Party
from vflsec.core.seeds import derive
from vflsec.core.view import Secret, View
from vflsec.evaluation.spec import AuxSpec
from vflsec.nn.bottoms import untrained

SPLITS = ("train", "test")


def adversary(world: World, name: str) -> Party:
    """Return the attacking party.

    Raises:
        UsageError: no such party.
    """
    if name not in world.parties:
        raise UsageError(unknown("adversary", name, world.parties))
    return world.parties[name]


def secret_of(world: World) -> Secret:
    """Return the truth, for the scorer."""
    return Secret({split: world.active.labels[split].cpu() for split in SPLITS})


def view_of(trained: Trained, party: Party, aux_rows: Tensor, messages: tuple[Message, ...] = ()) -> View:
    """Return what ``party`` legitimately has after training, and the labels of its auxiliary samples."""
    world = trained.world
    return View(
        party=party.name,
        side="active" if party.active else "passive",
        n_classes=world.n_classes,
        features={split: party.features[split] for split in SPLITS},
        model=trained.method.representation(party).eval(),
        aux_rows=aux_rows.to(world.device),
        aux_labels=world.active.labels["train"][aux_rows.to(world.device)],
        messages=messages,
        unlabeled=torch.cat([party.features["unlabeled"], party.features["local"]]),
    )


def alone(view: View, seed: int) -> View:
    """Return the view of the same party had it never joined."""
    assert view.model is not None
    return view.without_federation(untrained(view.model, derive(seed, "alone", view.party)))


def draw_auxiliary(labels: Tensor, n_classes: int, spec: AuxSpec, seed: int) -> Tensor:
    """Return the sorted positions (n,) of the auxiliary samples among the training rows.

    Balanced: n/C of each class, the first classes taking the remainder.

    Raises:
        UsageError: no row, or no row of some class, would be left to attack.
    """
    y = labels.cpu().numpy()
    if spec.n >= len(y):
        raise UsageError(
            f"expected fewer auxiliary labels than the {len(y)} labeled training rows, got aux.n={spec.n}: "
            f"lower it with --set aux.n=..., or raise data.n_labeled"
        )
    rng = np.random.default_rng(derive(seed, "auxiliary"))
    order = rng.permutation(len(y))
    if spec.balanced:
        share = [spec.n // n_classes + (c < spec.n % n_classes) for c in range(n_classes)]
        counts = np.bincount(y, minlength=n_classes)
        if (counts <= share).any():
            c = int(np.argmax(np.asarray(share) - counts))
            raise UsageError(
                f"expected over {share[c]} labeled training rows of each class for aux.n={spec.n}, got {counts[c]} of "
                f"class {c}: lower aux.n, raise data.n_labeled, or set aux.balanced=false"
            )
        order = np.concatenate([order[y[order] == c][: share[c]] for c in range(n_classes)])
    return torch.from_numpy(np.sort(order[: spec.n]))


def fold_score(attack: Attack, view: View, metric: str, folds: int, seed: int) -> float | None:
    """Return how well ``attack`` does on auxiliary samples it was not given: all that the adversary itself can test.

    The mean of ``metric`` over stratified folds; None where a class has too few samples, no folds are wanted, or the
    attack does not guess training rows.
    """
    y = view.aux_labels.cpu().numpy()
    folds = min(folds, int(np.bincount(y, minlength=view.n_classes).min())) if len(y) else 0
    if folds < 2:
        return None
    split = StratifiedKFold(folds, shuffle=True, random_state=derive(seed, "folds") % 2**32)
    values = []
    for known, held_out in split.split(y, y):
        scores = attack(view.knowing(torch.from_numpy(known)), seed=seed).scores.get("train")
        if scores is None:
            return None
        rows = view.aux_rows[torch.from_numpy(held_out).to(view.aux_rows.device)].cpu()
        values.append(METRICS[metric](scores[rows].numpy(), y[held_out]))
    return float(np.mean(values))
