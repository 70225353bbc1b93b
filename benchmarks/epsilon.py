"""What each defense with differential privacy states, what a hand calculation gives, and what attacks show it to be.

    python benchmarks/epsilon.py

Two tables. In the first the neighbors are the worst that the defense allows and the attacker knows both, so that the
lower bound should come close. In the second a federation is trained on the planted data, where labels are tossed by a
coin and no column tells them: what an attack knows of them it has from the federation. No lower bound may lie above the
epsilon that is stated; the command ends with 1 if one does.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

from games import (
    CONFIDENCE,
    Game,
    at_least,
    either_label,
    gaussian,
    gaussian_by_renyi,
    labels_by_their_gradients,
    members_by_their_loss,
    opposite_gradients,
    opposite_rows,
    opposite_updates,
)
from rich.console import Console
from rich.table import Table

from vflsec.core.defense import Defense
from vflsec.defenses.dp_sgd import DPSGD
from vflsec.defenses.gaussian_dp import ORDERS, GaussianDP
from vflsec.defenses.label_dp import LabelDP
from vflsec.defenses.laplace_dp import LaplaceDP
from vflsec.defenses.ppdl import SparseVector
from vflsec.run.training import limit_threads

EPOCHS = 4
ROWS = 20_000
CLIP = 0.02  # below most rows' gradients, so that the noise hides as much as is paid for
SENT = "labels, gradients"


class Line(NamedTuple):
    """One comparison.

    Attributes:
        game: in words.
        releases: that add up.
        stated: epsilon, by the defense.
        delta: at which.
        by_hand: by a formula without a library, on the same way as the defense.
        exact: of the mechanism itself, where it is known.
        found: a lower bound.
        undefended: the same of the same game without the defense, or None.
    """

    defense: str
    game: str
    releases: int
    stated: float
    delta: float
    by_hand: float
    exact: float | None
    found: float
    undefended: float | None = None

    @property
    def holds(self) -> bool:
        """Whether what is stated is what the formula gives, and not below what an attack shows."""
        return self.found <= self.stated and math.isclose(self.stated, self.by_hand, rel_tol=1e-6)


def line(defense: Defense, game: str, played: Game, releases: int, undefended: Game | None = None) -> Line:
    """Return the line of one game."""
    delta = max(one["delta"] for one in played.spent)
    found = [at_least(one, delta) if one else None for one in (played, undefended)]
    hand, exact = by_hand(defense, releases, delta)
    parties = len(played.spent)  # each of which carries it
    stated = sum(one["epsilon"] for one in played.spent)
    assert found[0] is not None
    exactly = None if exact is None else parties * exact
    return Line(defense.name, game, releases, stated, delta, parties * hand, exactly, found[0], found[1])


def by_hand(defense: Any, releases: int, delta: float) -> tuple[float, float | None]:
    """Return epsilon by the formula that the defense is accounted with, and that of the mechanism where it is known."""
    if isinstance(defense, GaussianDP):  # and DP-SGD
        return gaussian_by_renyi(defense.scale, releases, delta, ORDERS), gaussian(defense.scale, releases, delta)
    if isinstance(defense, LaplaceDP):
        return releases / defense.scale, releases / defense.scale
    if isinstance(defense, LabelDP):
        kept = defense.compute_keep_probability(2)
        return math.log(kept / (1 - kept)), math.log(kept / (1 - kept))
    # of ppdl epsilon_1, and half of epsilon_2: values have noise of 2 c / epsilon_2, and sensitivity 1 at most
    return releases * (8 / 9 + 2 / 9 / 2) / defense.strength, None


def worst_neighbors() -> list[Line]:
    """Play the worst neighbors of each defense, released once and more often."""
    found = []
    for releases in (1, 5):
        for made in (GaussianDP, LaplaceDP):
            options = {"delta": 0.01} if made is GaussianDP else {}  # what happens once in 100,000 nobody counts
            defense = made(0.5, at=["embedding"], unit="1/epsilon", **options)  # type: ignore[arg-type]
            defense.plan_releases(releases)
            found.append(line(defense, "two opposite rows", opposite_rows(defense, releases=releases), releases))
        update = DPSGD(0.5, unit="1/epsilon", delta=0.01)
        update.plan_releases(releases)
        played = opposite_updates(update, updates=releases)
        found.append(line(update, "two opposite gradients of one row, in an update", played, releases))
        sparse = SparseVector(0.1, gamma=0.5)
        played = opposite_gradients(sparse, 0.5, releases=releases)
        found.append(line(sparse, "two opposite gradients of one entry", played, releases))
    answer = LabelDP(0.5)
    return [*found, line(answer, "two labels", either_label(answer), 1)]


def planted_data() -> list[Line]:
    """Attack trained federations for labels that were tossed by a coin, and for who was trained on."""
    open_labels, open_members = labels_by_their_gradients(epochs=EPOCHS, rows=ROWS), members_by_their_loss()
    found = []
    for epsilon in (1.0, 8.0):
        for made in (GaussianDP, LaplaceDP):
            defense = made(1 / epsilon, unit="1/epsilon", clip=CLIP)
            defense.plan_releases(EPOCHS)
            played = labels_by_their_gradients(
                f"{defense.name}:epsilon={epsilon},clip={CLIP}", epochs=EPOCHS, rows=ROWS
            )
            found.append(line(defense, SENT, played, EPOCHS, open_labels))
        answer = LabelDP(1 / epsilon)
        played = labels_by_their_gradients(f"label-dp:epsilon={epsilon}@labels", epochs=EPOCHS, rows=ROWS)
        found.append(line(answer, SENT, played, 1, open_labels))
        sparse = SparseVector(EPOCHS / epsilon)
        played = labels_by_their_gradients(f"ppdl:strength={sparse.strength}", epochs=EPOCHS, rows=ROWS)
        found.append(line(sparse, SENT, played, EPOCHS, open_labels))
        update = DPSGD(2 / epsilon, unit="1/epsilon")
        update.plan_releases(40)
        played = members_by_their_loss(f"dp-sgd:epsilon={epsilon / 2}")
        found.append(line(update, "members, losses; both parties", played, 40, open_members))
    return found


def show(title: str, found: list[Line]) -> Table:
    """Return a table of the lines."""
    known = any(one.undefended is not None for one in found)
    columns = ["defense", "told apart by", "releases", "ε stated", "δ", "ε by hand", "ε exactly"]
    table = Table(*columns, f"ε at least ({CONFIDENCE:.0%})", *(["without it, at least"] if known else []), title=title)
    for one in sorted(found, key=lambda one: (one.defense, one.stated, one.releases)):
        more = [f"{one.undefended:.3f}"] if one.undefended is not None else []
        exact = "–" if one.exact is None else f"{one.exact:.4f}"
        numbers = (f"{one.stated:.4f}", f"{one.delta:g}", f"{one.by_hand:.4f}", exact, f"{one.found:.3f}", *more)
        table.add_row(one.defense, one.game, str(one.releases), *numbers)
    return table


def main() -> None:
    """Print both tables, and whether all of it holds."""
    with limit_threads():
        neighbors, planted = worst_neighbors(), planted_data()
    console = Console(width=150)
    console.print(show("The worst neighbors, both known", neighbors), show("The planted data, trained", planted))
    wrong = [one for one in (*neighbors, *planted) if not one.holds]
    for one in wrong:
        console.print(f"FAILED {one}")
    if wrong:
        sys.exit(1)
    console.print("No attack shows more than what is stated, and what is stated is what the formulas give.")


if __name__ == "__main__":
    main()
