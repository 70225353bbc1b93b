"""What a large attack budget gains or loses, over many draws of toy data: tuned on folds against the attack as it is.

python benchmarks/attack_budget.py [--draws 200]

The attack is a ridge regression of the class on some columns; its 16 variants read all columns, or others each. The
leak is the AUC on rows that no fold holds. ``largest`` takes the variant with the largest fold score instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import rankdata

from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need, View
from vflsec.results.metrics import METRICS, score_positive
from vflsec.results.statistics import bound_over_seeds
from vflsec.run.adversary import TRIALS, draw_variants, fold_scores, tune
from vflsec.run.spec import AuxSpec

COLUMNS, KNOWN, ROWS = 12, 80, 1000
LARGE = AuxSpec(n=KNOWN, budget="large")


class World(NamedTuple):
    """A case.

    Attributes:
        signal: by how many deviations each column differs between the classes.
        kept: how many columns a variant reads; variant 0 reads all of them.
        start: the variant that the attack is as it is.
        tried: those that tuning may choose.
    """

    signal: float
    kept: int
    start: int
    tried: Sequence[int]


WORLDS = {
    "variants are much worse": World(0.4, 4, 0, range(16)),
    "variants are worse": World(0.4, 7, 0, range(16)),
    "variants are a little worse": World(0.4, 10, 0, range(16)),
    "variants are alike": World(0.4, 6, 1, range(1, 17)),
    "nothing to be learned": World(0.0, 6, 1, range(1, 17)),
    "one variant is better": World(0.4, 6, 1, range(16)),
    "one variant is much better": World(0.4, 2, 1, range(16)),
}


class Ridge(Attack):
    """Ridge regression of two classes on the columns of one variant."""

    name, reference, verified = "ridge", "none", "none"
    needs = frozenset({Need.FEATURES, Need.AUX_LABELS})

    def __init__(self, *, which: int, kept: int, tried: Sequence[int]) -> None:
        self.which, self.kept, self.tried = which, kept, tried

    @property
    def search(self) -> Mapping[str, Sequence[Any]]:
        """Vary the columns."""
        return {"which": self.tried}

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, 2) of the training rows."""
        order = np.random.default_rng(self.which).permutation(COLUMNS)
        x = view.features["train"][:, order[: self.kept] if self.which else order]
        known = x[view.aux_rows]
        weights = torch.linalg.solve(known.T @ known + torch.eye(x.shape[1]), known.T @ (2.0 * view.aux_labels - 1))
        return Guess({"train": torch.stack([-x @ weights, x @ weights], dim=1)})


def auc_by_ranks(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the AUC of two classes as ``METRICS`` does, without the checks of scikit-learn, which take most time."""
    above = rankdata(score_positive(scores))[labels == 1]
    return float((above.mean() - (len(above) + 1) / 2) / (len(labels) - len(above)))


def draw(world: World, seed: int) -> tuple[Ridge, View, np.ndarray]:
    """Return the attack, a view that knows the first rows, and the classes of all rows."""
    y = np.arange(KNOWN + ROWS) % 2
    x = np.random.default_rng(seed).normal(size=(len(y), COLUMNS)) + world.signal * (y[:, None] - 0.5)
    known = torch.arange(KNOWN)
    features = {"train": torch.from_numpy(x).float()}
    view = View("passive_1", "passive", 2, features, None, known, torch.from_numpy(y)[known])
    return Ridge(which=world.start, kept=world.kept, tried=world.tried), view, y


def largest(attack: Ridge, view: View, seed: int) -> Ridge:
    """Return the variant with the largest score on one set of folds, the attack itself among equal ones."""
    trials = [attack, *draw_variants(attack, TRIALS["large"], np.random.default_rng(seed))]
    found = [fold_scores(one, view, "auc", LARGE.folds, seed) for one in trials]
    return trials[int(np.argmax([own.mean() for own in found if own is not None]))]


def differences(world: World, seed: int) -> tuple[float, float]:
    """Return the leak of the tuned attack, and of the variant with the largest score, minus that of the attack."""
    attack, view, y = draw(world, seed)

    def leak(chosen: Ridge) -> float:
        return METRICS["auc"](chosen(view, seed=seed).scores["train"][KNOWN:].numpy(), y[KNOWN:])

    own = leak(attack)
    return leak(tune(attack, view, "auc", LARGE, seed)[0]) - own, leak(largest(attack, view, seed)) - own


def main() -> None:
    """Print the mean difference of each world with its 95 % interval, and the worst of all draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200)
    draws = parser.parse_args().draws
    METRICS["auc"] = auc_by_ranks
    print("| world | tuned minus paper | 5 % of draws below | worst | largest minus paper |\n|---|---|---|---|---|")
    for name, world in WORLDS.items():
        by_tuning, by_score = np.array([differences(world, seed) for seed in range(draws)]).T
        one, other = bound_over_seeds(by_tuning), bound_over_seeds(by_score)
        low = np.quantile(by_tuning, 0.05)
        print(
            f"| {name} | {one.mean:+.4f} ({one.low:+.4f} to {one.high:+.4f}) | {low:+.3f} | {by_tuning.min():+.3f} "
            f"| {other.mean:+.4f} ({other.low:+.4f} to {other.high:+.4f}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
