"""The contents of a report as plain data, from which every table, plot and file is made."""

from typing import Any

import msgspec

from vflsec.results.records.manifest import UNDEFENDED
from vflsec.results.records.schema import Tuning
from vflsec.results.statistics import ALPHA

Ends = tuple[float | None, float | None]
"""The ends of an interval; None where there is none."""


MIN_GAIN = 0.005
"""A leak of which mean or upper end differ by less, which two digits do not show, is neither higher nor lower."""


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """A mean with its 95 % interval.

    Attributes:
        n: how many seeds or draws the mean is over; not rows.
        interval: what it is over: ``seeds and rows``, ``rows`` with one seed, ``draws and rows`` of an audit, ``seeds``
            where rows were not measured, or ``none``.
    """

    metric: str
    mean: float | None
    ci95: Ends
    n: int
    interval: str = "seeds and rows"

    @property
    def lower(self) -> float:
        """The lower end of the interval, or the mean."""
        return self.ci95[0] if self.ci95[0] is not None else (self.mean or 0.0)

    @property
    def upper(self) -> float:
        """The upper end of the interval, or the mean."""
        return self.ci95[1] if self.ci95[1] is not None else (self.mean or 0.0)


class Leak(Measure, frozen=True, kw_only=True):
    """How much was recovered, and how much of it without the federation.

    Attributes:
        rows: ``test``; ``train`` for an attack that guesses only training rows; ``candidates`` for membership;
            ``test+train`` or ``train+test`` if one half of the rows chooses an attack on the first, the other half an
            attack on the second.
        alone: the leak without the federation, one value for each target and ``rows`` of a report.
        advantage: leak minus *alone*, paired by seed, with its interval in ``advantage_ci95``.
        detectable: an advantage whose interval would exclude 0 in about four of five such runs; for a headline that
            is ``alone``, of the strongest attack. None without an interval, where no value varies or *alone* is 1, or
            for an attack that is part of *alone*.
        p: of the test that the advantage is 0; ``p_holm`` of a headline is after the correction for its table.
        few: ``rows`` or ``seeds``, of which too few hide any advantage; ``seeds`` if the rows of one would show some.
        accuracy: label recovery accuracy, the papers' measure; None if columns are recovered.
        bits: what a row's guess tells beyond *alone*, in bits: the cross-entropy of *alone* minus that of the attack,
            both calibrated, paired by seed; None for recovered columns, too few rows and records of earlier versions.
        others: the means of the other metrics by name, each over the seeds that have it, and of *alone* in
            ``alone_others``: among them the true positive rates ``tpr@0.001`` and ``tpr@0.01``, missing if the rows do
            not resolve them; the ``cross_entropy`` in bits per row; ``known@0.99``, the share of rows of whose class
            the calibrated guess is more than 99 % sure, and ``right@0.99``, the share of these that are right;
            ``known_of_class@0.99``, the same as a mean over classes, without one of more than 90 % of the rows. These
            are missing if a class has too few rows for it. *Alone* is the best baseline in each metric.
        single_class: the number of seeds in which all rows were guessed to be of one class: accuracy is then no leak.
        by_seed: the leak by seed, and *alone* in ``alone_by_seed``.
    """

    chance: float | None
    alone: float | None
    alone_ci95: Ends
    advantage: float | None
    advantage_ci95: Ends
    accuracy: float | None
    rows: str = "test"
    bits: float | None = None
    bits_ci95: Ends = (None, None)
    detectable: float | None = None
    p: float | None = None
    p_holm: float | None = None
    few: str = ""
    others: dict[str, float] = {}
    alone_others: dict[str, float] = {}
    single_class: int = msgspec.field(default=0, name="one_class")
    by_seed: dict[int, float] = {}
    alone_by_seed: dict[int, float] = {}

    @property
    def is_shown(self) -> bool:
        """Whether the interval of the advantage lies above 0, of a headline with the correction."""
        return (self.advantage_ci95[0] or 0.0) > 0 and (self.p_holm is None or self.p_holm < ALPHA)

    @property
    def is_blind(self) -> bool:
        """Whether not even all that is left to be gained would have been told from 0."""
        least = max(self.alone or 0.0, self.chance or 0.0)
        return self.alone is not None and self.detectable is not None and self.detectable + least > 1 - 1e-9


class Empirical(msgspec.Struct, frozen=True, kw_only=True):
    """What guesses of tossed labels show of the epsilon of one label, with a confidence of 95 %.

    Attributes:
        epsilon: a lower bound; 0 shows nothing.
        delta: at which: that of the promise, or 0.
        promised: the least epsilon that a defense states for a label or the messages about its row; None if none does.
        attack: whose guesses they are; for the headline, the one of the largest bound, at a confidence that allows for
            the choice among all.
        right: of the guesses in ``made``, over all seeds; ``tossed`` are all labels that could be guessed.
    """

    epsilon: float
    delta: float
    promised: float | None
    attack: str
    right: int
    made: int
    tossed: int


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One method, defense, strength and attack, over all seeds.

    Attributes:
        target: what the attack recovers.
        leak: on test rows if the attack guesses them, else on the rows that it guesses.
        leak_train: on training rows.
        leak_test: of a headline: on test rows, for a comparison on the same rows; None for an attack.
        reached: epochs and bytes, sent and as SS-VFL counts them, until ``train.target`` was met; None if it was not.
        choice: the attack that ``worst`` or ``picked`` stands for, or ``alone``; two if halves of the rows chose
            differently.
        sureness: the confidence that an attack has the right sign, if auxiliary labels fix only its sign; else None.
        spent: the privacy that each defense has spent on one row: epsilon and delta over ``releases`` releases of the
            row, and ``epsilon_transcript`` over all releases; or, if ``of`` is ``models``, over the ``updates`` of a
            party's own models, which does not cover messages about the row itself.
        empirical: a lower bound of epsilon, where labels were tossed for it (``data.canaries``) and are guessed.
        trainings: on the same rows, that the adversary has seen and ``spent`` covers.
        victim: the party that the attack is on; empty for an attack on labels or membership.
        column: the column that is recovered; two if halves of the rows chose differently.
        above: the median of a number, which is inferred as above it or not; None for categories.
        among: of how many columns this is the strongest; 0 where only one is attacked.
        cost: how much less utility than without the defense, paired by seed, with its interval in ``cost_ci95``; None
            where one of the two is not known.
        gain: how much more utility than a quick model of the active party's columns, ``gain_ci95``; None if unknown.
        useless: ``worse than bank alone`` or ``no better than chance``, if the joint model is.
        highest: of a headline, the largest leak of a single attack, ``highest_attack`` on ``highest_rows``; the rows
            that choose it also score it, so that it may be too high. None without an attack of the same measure.
        unconverged: of a headline that is ``alone``, the attacks on the same that had not converged in some seed.
        tuning: by seed, what chose settings, see ``Tuning``.
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
    leak_test: Leak | None = None
    reached: dict[str, float] | None = None
    sureness: float | None = None
    spent: list[dict[str, Any]] = []
    empirical: Empirical | None = None
    trainings: int = 1
    victim: str = ""
    column: str = ""
    above: float | None = None
    among: int = 0
    cost: float | None = None
    cost_ci95: Ends = (None, None)
    gain: float | None = None
    gain_ci95: Ends = (None, None)
    useless: str = ""
    highest: float | None = None
    highest_attack: str = ""
    highest_rows: str = ""
    unconverged: list[str] = []
    tuning: dict[int, Tuning] = {}

    @property
    def place(self) -> tuple[str, str, float]:
        """Method, defense and strength."""
        return self.method, self.defense, self.strength

    @property
    def is_exceeded(self) -> bool:
        """Whether a single attack leaks more than the headline, by what two digits show."""
        return self.highest is not None and self.highest >= (self.leak.mean or 0.0) + MIN_GAIN

    @property
    def question(self) -> str:
        """What is recovered, in words: ``attribute AGE of bank, above its median 34``, ``labels``."""
        name = " ".join(filter(None, [self.target.split(" ")[0], self.column]))
        of = f" of {self.victim}" if self.victim else ""
        median = f", above its median {self.above:.6g}" if self.above is not None else ""
        return f"{name}{of}{median}"


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """The impact of one attack on integrity on one method, defense and strength, over all seeds.

    Attributes:
        statuses: for each seed the worse of two trainings, the honest one and the one under attack.
        utility: of the honest training.
        under_attack: utility of the other training.
        lost: the difference, paired by seed.
        success: the share of test rows of other classes that a trigger turns into the attack's class; without a mean
            for an attack that has no trigger.
        chance: the same share in the honest training, which was not prepared for the trigger.
        success_by_seed: ``success`` by seed, and ``chance`` in ``chance_by_seed``.
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
    success_by_seed: dict[int, float] = {}
    chance_by_seed: dict[int, float] = {}


class Cap(msgspec.Struct, frozen=True, kw_only=True):
    """A curve folded into one number; None if a cell of the curve gave no number.

    Attributes:
        attack: its name, or ``worst`` for the headline of each strength.
        hypervolume: the area of utility gained and privacy kept, from 0, as without joining, to 1, the utility of the
            best undefended model at the leak of *alone*; None if the utility of the active party alone is not known, or
            if the seeds do not show what joining gains.
        by_seed: ``value`` by seed, and the others in ``calibrated_by_seed`` and ``hypervolume_by_seed``, the latter as
            jackknife pseudo-values.
    """

    method: str
    defense: str
    attack: str
    value: float | None = None
    ci95: Ends = (None, None)
    calibrated: float | None = None
    calibrated_ci95: Ends = (None, None)
    accuracy_value: float | None = None
    dcs: float | None = None
    n: int
    note: str = ""
    target: str = "labels"
    by_seed: dict[int, float] = {}
    calibrated_by_seed: dict[int, float] = {}
    hypervolume: float | None = None
    hypervolume_ci95: Ends = (None, None)
    hypervolume_by_seed: dict[int, float] = {}


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The leak to the strongest adversary, and the utility, at one strength of a defense.

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
        values: each score; None if a cell gave no number.
        ranks: its rank by each score that it has; 1 is the best.
        by_seed: each score by seed.
        close: the scores by which it does not differ from a neighbor in their order.
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
    """A limit and whether it holds; None if there is no number to compare, or for another reason, in ``why``.

    Attributes:
        replaced: whether a later run in the same folder was given other limits, so that it decides no exit code.
    """

    gate: str
    limit: float
    worst: float | None
    at: str
    holds: bool | None
    why: str = ""
    replaced: bool = False


class GroupLeak(msgspec.Struct, frozen=True, kw_only=True):
    """What one attack on labels leaks of one group of rows.

    Attributes:
        group: a category of ``column``, or the interval of a number.
        n: rows per seed.
        leak: without a mean for a group that has too few rows of a class.
        p: of the test that all groups leak the same, and in ``p_holm`` after Holm's correction over all these tests.
    """

    column: str
    method: str
    defense: str
    strength: float
    attack: str
    rows: str
    group: str
    n: int
    leak: Measure
    p: float | None
    p_holm: float | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report; ``msgspec.json.encode`` of it is the JSON output.

    Attributes:
        points: one for each method, defense, strength and attack.
        worst: the headline of each method, defense, strength and target: the strongest attack or *alone*, chosen on the
            truth and scored on other rows.
        picked: the attacks that the adversary takes for the strongest, by folds of its own labels; empty without folds.
        not_run: the attacks that this adversary can mount and that were not run.
        mountable: the number of attacks that it can mount.
        lost: attacks without the federation that gave no number, with the number of seeds: *alone* may be too low.
        failures: why results have no number, with the number of seeds.
        left_out: why it cannot mount each other attack, by name, as far as that was recorded.
        subgroups: the leaks of groups of rows, if they were asked for.
        spending: by defense and training, or trainings that share one draw, epsilon and how many trainings these are.
        columns: the headline of each column, and each attack on it, where several of one party are attacked.
        undefended: what strength 0 has: the defenses that are in every training, or ``no defense``.
        alarms: signs that numbers are not about the system, so that no gate holds; the verdict begins with them.
        verdict: sentences for a reader who knows none of the words in the tables.
        audited: the file or folder of a system that was trained elsewhere; empty for an evaluation.
        rows: how many test and training rows are guessed in a seed, at most.
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
    gates: list[Gate]
    notes: list[str]
    out: str
    integrity: list[Damage] = []
    not_run: list[str] = []
    mountable: int = 0
    lost: list[str] = []
    failures: list[str] = []
    left_out: dict[str, str] = {}
    alarms: list[str] = []
    verdict: list[str] = []
    audited: str = ""
    subgroups: list[GroupLeak] = []
    spending: dict[str, dict[str, tuple[float, int]]] = {}
    columns: list[Point] = []
    undefended: str = UNDEFENDED
    rows: dict[str, int] = {}


def name_defense(place: Any, undefended: str) -> str:
    """Return defense and strength of a row or a point, or what strength 0 has."""
    return f"{place.defense} {place.strength:.4g}" if place.strength else undefended
