"""What is reported, as plain data: every table, plot and file is made of these."""

from __future__ import annotations

from typing import Any

import msgspec


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """A mean with its 95 % interval: over seeds, or over rows where there is one seed."""

    metric: str
    mean: float | None
    ci95: tuple[float | None, float | None]
    n: int
    interval: str = "seeds"


class Leak(msgspec.Struct, frozen=True, kw_only=True):
    """How much was recovered, beside what it takes no federation to recover.

    Attributes:
        rows: ``test``; ``train`` of an attack on what was said about training rows, which guesses no others;
            ``candidates`` where it is asked who was trained on; ``test+train`` or ``train+test`` where the
            strongest attack is on one of them by the first half of the rows, and on the other by the second.
        alone: what the adversary reaches without the federation, one value for each target and ``rows`` of a report.
        advantage: leak minus *alone*, paired by seed, with its interval in ``advantage_ci95``.
        accuracy: label recovery accuracy, the papers' measure; None where columns are recovered.
        others: the other measures by name, in the mean.
        one_class: with how many seeds every row was guessed to be of one class, which leaves accuracy without meaning.
        by_seed: the leak by seed, and *alone* in ``alone_by_seed``.
    """

    metric: str
    mean: float | None
    ci95: tuple[float | None, float | None]
    n: int
    chance: float | None
    alone: float | None
    alone_ci95: tuple[float | None, float | None]
    advantage: float | None
    advantage_ci95: tuple[float | None, float | None]
    accuracy: float | None
    interval: str = "seeds"
    rows: str = "test"
    others: dict[str, float] = {}
    one_class: int = 0
    by_seed: dict[int, float] = {}
    alone_by_seed: dict[int, float] = {}


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One method, defense, strength and attack, over all seeds.

    Attributes:
        target: what the attack recovers.
        leak: on the rows that say most of it: test rows where the attack guesses them.
        leak_train: on training rows.
        reached: epochs, and bytes truly and as SS-VFL counts them, until ``train.target`` was met; None if it was not.
        choice: the attack that ``worst`` or ``picked`` stands for, or ``alone``; two where halves of the rows chose
            differently.
        sureness: how sure auxiliary labels make it that an attack whose sign they fix has the right one; else None.
        spent: of each defense with differential privacy, what the adversary may have learned of one row: its epsilon
            and delta in ``releases`` releases about the row, and ``epsilon_transcript`` of all that was said; or, where
            ``of`` is ``models``, in the ``updates`` of a party's own models, whatever is said about the row itself.
    """

    method: str
    defense: str
    strength: float
    attack: str
    status: str
    statuses: dict[str, int]
    utility: Measure
    leak: Leak
    leak_train: Leak
    nbytes: int | None
    seconds: float | None
    budget: dict[str, float]
    choice: str
    target: str = "labels"
    reached: dict[str, float] | None = None
    sureness: float | None = None
    spent: list[dict[str, Any]] = []


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """What one attack on integrity does to one method, under one defense and strength, over all seeds.

    Attributes:
        statuses: of each seed the worse of two trainings, the honest one and the one under attack.
        utility: of the honest training.
        under_attack: utility of the other.
        lost: the difference, paired by seed.
        success: the share of test rows of other classes that a trigger turns into the attack's class; without a mean
            for an attack that has no trigger.
        chance: the same share in the honest training, where nobody has prepared for the trigger.
    """

    method: str
    defense: str
    strength: float
    attack: str
    status: str
    statuses: dict[str, int]
    utility: Measure
    under_attack: Measure
    lost: Measure
    success: Measure
    chance: float | None


class Cap(msgspec.Struct, frozen=True, kw_only=True):
    """A curve folded into one number; None where a cell of the curve gave no number.

    Attributes:
        attack: its name, or ``worst`` for the headline of each strength.
        by_seed: ``value`` by seed, and ``calibrated`` in ``calibrated_by_seed``.
    """

    method: str
    defense: str
    attack: str
    value: float | None
    ci95: tuple[float | None, float | None]
    calibrated: float | None
    calibrated_ci95: tuple[float | None, float | None]
    accuracy_value: float | None
    dcs: float | None
    n: int
    note: str = ""
    target: str = "labels"
    by_seed: dict[int, float] = {}
    calibrated_by_seed: dict[int, float] = {}


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What one strength of a defense leaves to the strongest adversary, and at what utility.

    Attributes:
        leak: of the headline, by seed in ``by_seed``.
    """

    target: str
    method: str
    defense: str
    strength: float
    utility: float
    leak: float
    by_seed: dict[int, float] = {}


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """A defense in the order of each score.

    Attributes:
        values: each score; None where a cell gave no number.
        ranks: its place by each score that it has, 1 the best.
        by_seed: each score by seed.
        close: the scores by which it is not told apart from a neighbor in their order.
    """

    target: str
    method: str
    defense: str
    values: dict[str, float | None]
    ranks: dict[str, int]
    by_seed: dict[str, dict[int, float]] = {}
    close: list[str] = []

    @property
    def label(self) -> str:
        """Method and defense."""
        return f"{self.method}, {self.defense}"


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """A limit and whether it holds; None where a status takes the place of the number."""

    gate: str
    limit: float
    worst: float | None
    at: str
    holds: bool | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is reported; ``msgspec.json.encode`` of it is the JSON output.

    Attributes:
        points: one for each method, defense, strength and attack.
        worst: the headline of each method, defense, strength and target: the strongest attack or *alone*, chosen on the
            truth and scored on other rows.
        picked: what the adversary would have taken for the strongest, by folds of its own labels; empty without folds.
        not_run: the attacks that this adversary could mount and that were not run.
    """

    schema: int = 1
    dataset: str
    adversary: str
    metric: str
    seeds: int
    target: float | None = None
    points: list[Point]
    worst: list[Point]
    picked: list[Point] = []
    cap: list[Cap]
    c_dcs: list[dict[str, Any]]
    front: list[Place] = []
    ranks: list[Rank] = []
    orders: list[str] = []
    disagreements: list[str] = []
    gates: list[Gate]
    notes: list[str]
    out: str
    integrity: list[Damage] = []
    not_run: list[str] = []
