"""Tests of a stated epsilon: formulas without a library, and lower bounds from attacks.

An attack distinguishes two neighbors, and the rates of its errors give a lower bound of epsilon
(``epsilon_bounds``). A bound above the stated epsilon refutes it; a bound below proves nothing, since
the attack may be weak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from epsilon_bounds import epsilon_at_least, gaussian_epsilon
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from vflsec.base.seeds import make_rng
from vflsec.core.defense import Defense, Release
from vflsec.core.message import Kind, Transcript
from vflsec.core.method import Trained
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.data.partition import DataSpec
from vflsec.results.canaries import Tradeoff
from vflsec.run.cell import Cell
from vflsec.run.federation import build_federation, build_method
from vflsec.run.plan import make_cell
from vflsec.run.score import compute_spending
from vflsec.run.spec import parse_defense

Scores = NDArray[np.floating]

CONFIDENCE = 0.99
"""Of a lower bound: one in a hundred mechanisms that keep to their epsilon may be refuted."""


class Game(NamedTuple):
    """The scores of one attack.

    Attributes:
        absent: (n,) of trials with one neighbor.
        present: (m,) of trials with the other, which the attack should score higher.
        spent: from ``vflsec.run.score.compute_spending``, or a defense; empty without a defense.
        tradeoff: of the mechanism, if it is one for which a tighter bound is known.
        releases: of the same row.
    """

    absent: Scores
    present: Scores
    spent: Sequence[dict[str, float]]
    tradeoff: Tradeoff | None = None
    releases: int = 1


def gaussian(sigma: float, releases: int, delta: float) -> float:
    """Return the exact epsilon of Gaussian mechanisms of deviation ``sigma`` over the sensitivity.

    n of them are one of sigma / root n (Dong, Roth and Su 2022, corollary 3.3).
    """
    return gaussian_epsilon(math.sqrt(releases) / sigma, delta)


def gaussian_by_renyi(sigma: float, releases: int, delta: float, orders: Sequence[float]) -> float:
    """Return the epsilon of the same mechanisms by Renyi divergence, the least over its orders a > 1.

    It is a / (2 sigma^2) and adds up (Mironov 2017, proposition 7); to epsilon by Balle et al. 2020, theorem 21.
    """
    return min(
        releases * a / (2 * sigma**2) + math.log1p(-1 / a) - (math.log(delta) + math.log(a)) / (a - 1) for a in orders
    )


def at_least(game: Game, delta: float, confidence: float = CONFIDENCE) -> float:
    """Return a lower bound of epsilon at ``delta``, by the trade-off function of the game's mechanism if it has one."""
    return epsilon_at_least(
        game.absent, game.present, delta, tradeoff=game.tradeoff, releases=game.releases, confidence=confidence
    )


def opposite_rows(defense: Defense, *, releases: int = 1, trials: int = 40_000, seed: int = 3) -> Game:
    """Distinguish two rows (3,) at opposite ends of the clipping range by their repeated releases as embeddings.

    The score has the order of the likelihood ratio, which is optimal: it is the sum of the releases, with Laplace noise
    each limited to [-C, C]. It ignores the last bits of floats, which reveal more than epsilon allows (Mironov 2012, On
    significance of the least significant bits for differential privacy).

    Args:
        defense: ``gaussian-dp`` or ``laplace-dp`` at ``embedding``.
        releases: of the same row.
        trials: half of them with each row.
        seed: of the noise.
    """
    present = torch.arange(trials) % 2
    x = torch.zeros(trials, 3)
    x[:, 0] = 50.0 * (2.0 * present - 1)
    rng = make_rng(seed, "trials")
    release = Release("a", "b", Kind.EMBEDDING, 0, "train", "value", None, None, rng)
    received = torch.stack([defense.on_embedding(x, release)[:, 0] for _ in range(releases)])
    if getattr(defense, "order", 2) == 1:
        received = received.clamp(-defense.clip, defense.clip)  # type: ignore[attr-defined]
    return _game(received.sum(dim=0), present, [defense.privacy_spent(releases)], [defense], releases)


def opposite_gradients(defense: Defense, size: float, *, releases: int = 1, trials: int = 4000) -> Game:
    """Distinguish the gradients ``size`` and ``-size`` of one entry by how often ``ppdl`` releases a positive value."""
    received = torch.zeros(trials)
    present = torch.arange(trials) % 2
    rng = make_rng(3, "trials")
    release = Release("a", "b", Kind.GRADIENT, 0, "train", "value", None, None, rng)
    for i in range(trials):
        g = torch.full((1, 1), size * (2.0 * float(present[i]) - 1))
        received[i] = sum(float(defense.on_gradient(g, release).sign()) for _ in range(releases))
    return _game(received, present, [defense.privacy_spent(releases)])


def either_label(defense: Defense, *, n_classes: int = 2, trials: int = 40_000, seed: int = 3) -> Game:
    """Distinguish the labels 0 and 1 of C classes by the randomized label."""
    present = torch.arange(trials) % 2
    rng = make_rng(seed, "trials")
    randomized = defense.on_labels(present, features=present[:, None], n_classes=n_classes, rng=rng)
    return _game((randomized == 1).float(), present, [defense.privacy_spent(1)])


def opposite_updates(defense: Defense, *, updates: int = 1, trials: int = 10_000, seed: int = 3) -> Game:
    """Distinguish two rows whose gradients are at opposite ends of the clipping range, by updates of one weight.

    Args:
        defense: ``dp-sgd``.
        updates: that the row takes part in, each with one other row of zero gradient.
        trials: half of them with each row.
        seed: of the noise.
    """
    modules = nn.ModuleDict({"bottom": nn.Linear(1, 1, bias=False)}).double()
    weight, rng = modules["bottom"].weight, make_rng(seed, "trials")
    received = np.zeros((2, trials // 2))
    for own, extreme in enumerate((-100.0, 100.0)):
        with defense.training_hooks(modules, ()):
            modules["bottom"](torch.tensor([[extreme], [0.0]], dtype=torch.float64)).mean().backward()
            kept = weight.grad_sample  # type: ignore[union-attr]
            for trial in range(trials // 2):
                for _ in range(updates):  # the same update, noised anew
                    weight.grad_sample = kept  # type: ignore[union-attr]
                    defense.on_update(modules, 2, rng)
                    received[own, trial] += float(weight.grad)  # type: ignore[arg-type]
    return Game(
        received[0], received[1], [one for one in [defense.privacy_spent(updates)] if one], defense.tradeoff, updates
    )


def labels_by_their_gradients(*defenses: str, epochs: int = 4, rows: int = 8000) -> Game:
    """Attack the gradients of a trained federation on planted data for labels that are independent of the columns.

    Labels of half of the training rows are redrawn at random: the others can be guessed from the columns, which epsilon
    does not bound. The attacker adds up all releases of a row, along the direction that the true labels of other rows
    give. Adding up is optimal for independent noise of one scale.
    """
    cell = _cell(defenses, rows=rows, signal="planted", train=TrainSpec(epochs=epochs, batch=64, lr=0.01))
    federation, method = build_federation(cell, "cpu"), build_method(cell)
    labels = federation.active.labels["train"]
    tossed = torch.arange(len(labels)) % 2 == 0
    labels[tossed] = torch.randint(0, 2, (int(tossed.sum()),), generator=make_rng(5, "coins"))
    tap = Transcript(frozenset({"passive_1"}), frozenset({Kind.GRADIENT}))
    federation.channel.taps.append(tap)
    trained = method.fit(federation)
    total = torch.zeros(len(labels), tap.messages[0].payload["value"].shape[1], dtype=torch.float64)
    for message in tap.messages:
        assert message.rows is not None
        total.index_add_(0, message.rows, message.payload["value"].double() * len(message.rows))
    known = tossed & (torch.arange(len(labels)) % 8 < 2)
    first, second = (total[known & (labels == c)].mean(dim=0) for c in (0, 1))
    score = total @ (second - first)
    spent = _spent(trained, "passive_1")
    return _game(score[tossed & ~known], labels[tossed & ~known], spent, federation.active.defenses, epochs)


def members_by_their_loss(*defenses: str) -> Game:
    """Attack the predictions of a trained federation for membership, with random labels that can only be memorized.

    The attacker compares the losses of training rows and other rows. The privacy spent by all parties that carry the
    defense adds up, since the predictions depend on all of them.
    """
    train = TrainSpec(epochs=40, batch=128, lr=0.01)
    cell = _cell(defenses, rows=1500, columns=20, signal="none", train=train, model=ModelSpec(bottom=(64,)))
    federation, method = build_federation(cell, "cpu"), build_method(cell)
    for split, y in federation.active.labels.items():
        y.copy_(torch.randint(0, 2, y.shape, generator=make_rng(5, "coins", split)))
    trained = method.fit(federation)
    losses = {
        split: F.cross_entropy(trained.predict(split), federation.active.labels[split], reduction="none").numpy()
        for split in ("train", "test")
    }
    spent = _spent(trained, "nobody") * len(federation.parties)
    return Game(-losses["test"], -losses["train"], spent, _tradeoff(federation.active.defenses))


def _cell(defenses: Sequence[str], *, train: TrainSpec, model: ModelSpec | None = None, **options: float | str) -> Cell:
    return make_cell(
        dataset="toy",
        data=DataSpec(options=options),
        method="fedsplitnn",
        method_options={},
        train=train,
        model=model or ModelSpec(),
        defenses=tuple(parse_defense(text) for text in defenses),
        seed=0,
    )


def _spent(trained: Trained, adversary: str) -> list[dict[str, float]]:
    return compute_spending(trained, trained.federation.channel.releases(), adversary)


def _game(
    score: torch.Tensor,
    present: torch.Tensor,
    spent: Sequence[dict[str, float] | None],
    defenses: Sequence[Defense] = (),
    releases: int = 1,
) -> Game:
    absent, there = (score[present == c].numpy() for c in (0, 1))
    return Game(absent, there, [one for one in spent if one], _tradeoff(defenses), releases)


def _tradeoff(defenses: Sequence[Defense]) -> Tradeoff | None:
    """Return the trade-off function of a single defense; several have one that is not known."""
    return defenses[0].tradeoff if len(defenses) == 1 else None
