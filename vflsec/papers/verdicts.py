"""From measurements to verdicts on claims.

*Holds*: the mean difference surely exceeds zero, and it is at least the margin. *Equivalent*: it is surely within the
margin on both sides. *Does not hold here*: it surely falls short of the margin. *Undecided*: neither, or a seed was
lost or not run, or there are too few. A claim of several comparisons holds if all hold and does not if one does not:
its p value for holding is the largest of theirs, and for not holding the smallest times their number.

"Surely" allows for the looks and the other claims. A p value is the smallest of the looks so far times the number of
looks that the study registered, so that it is valid whenever a run ends. Primary claims of a paper are then corrected
by Holm (the probability of an error among them), others of a study and topic by Benjamini and Hochberg 1995 (the share
of errors among what is decided).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
from scipy import stats

from vflsec.base.errors import UsageError
from vflsec.papers.measurements import Measurements, Values
from vflsec.papers.study import ALONE, MAX_SEEDS, ArmMeasure, Claim, Study
from vflsec.results.statistics import ALPHA, MIN_SEEDS, Paired, compare_pairs, correct_holm, find_detectable

Decision = Literal["holds", "equivalent", "does not hold here", "undecided"]
HOLDS: Decision = "holds"
EQUAL: Decision = "equivalent"
FAILS: Decision = "does not hold here"
OPEN: Decision = "undecided"
DECISIONS = (HOLDS, EQUAL, FAILS, OPEN)


PRIMARY = "primary"


class MeasuredStudy(NamedTuple):
    """A study and what was measured for it."""

    name: str
    study: Study
    measurements: Measurements


class ClaimComparison(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison of a claim.

    Attributes:
        text: what is compared with what.
        measure: its name.
        floor: what the mean must exceed; ``margin`` what it must reach.
        differences: over seeds, positive in favor of the claim; ``mean``, ``low``, ``high`` and ``deviation`` of them.
        p_above: of the test that the mean exceeds the floor: the smallest over the looks times their number.
        p_below: the same of the test that it falls short of the margin; ``p_equal`` that it is within the margin.
        pairs: how many seeds have both values, of which ``differences`` has those of the largest look.
        detectable: the smallest true excess over the floor that is found with 80 % power at the corrected level.
        lost: why seeds are missing.
    """

    text: str
    measure: str
    floor: float
    margin: float
    differences: list[float]
    mean: float
    low: float
    high: float
    deviation: float
    p_above: float
    p_below: float
    p_equal: float
    detectable: float
    pairs: int
    lost: list[str]
    unconverged: int = 0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the measurements say of one claim on one of the data.

    Attributes:
        number: of the claim in its study, from 1.
        primary: whether the claim is one of the paper's few.
        decision: after the correction over the other claims; ``single`` without one.
        p_holds: after the correction; ``p_equal`` and ``p_fails`` the same of the other decisions.
    """

    study: str
    number: int
    claim: str
    source: str
    topic: str
    primary: bool
    data: str
    decision: Decision
    single: Decision
    p_holds: float
    p_equal: float
    p_fails: float
    seeds: int
    links: list[ClaimComparison]

    @property
    def measure(self) -> str:
        """The name of what the claim compares."""
        return self.links[0].measure

    @property
    def comparisons(self) -> list[ClaimComparison]:
        """The comparisons by that measure, without those of utility that must be equal."""
        return [link for link in self.links if link.measure == self.measure]


class _TestedClaim(NamedTuple):
    study: str
    number: int
    claim: Claim
    data: str
    family: tuple[str, str]
    links: list[ClaimComparison]

    @property
    def p_values(self) -> tuple[float, float, float]:
        """The p values of holding, of being equivalent and of not holding."""
        if any(link.lost or len(link.differences) < MIN_SEEDS for link in self.links):
            return 1.0, 1.0, 1.0
        fails = min(1.0, len(self.links) * min(link.p_below for link in self.links))
        return max(link.p_above for link in self.links), max(link.p_equal for link in self.links), fails

    def decide(self, p_values: Sequence[float]) -> Decision:
        """Return what p values say."""
        p_holds, p_equal, p_fails = p_values
        relevant = all(link.mean >= link.margin for link in self.links)
        if p_fails < ALPHA and not relevant:  # an earlier look may contradict all seeds together
            return EQUAL if p_equal < ALPHA else FAILS
        return HOLDS if p_holds < ALPHA and relevant else OPEN


def judge(studies: Sequence[MeasuredStudy]) -> list[Verdict]:
    """Return a verdict for each claim and its data, corrected over the claims of its family.

    Raises:
        UsageError: measurements of other settings than those of the study, or that lack a measure.
    """
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    for measured in studies:
        for claim in measured.study.claims:
            sizes[_get_family(measured, claim)] += len(measured.study.list_data(claim))
    cases = [case for measured in studies for case in _list_cases(measured, sizes)]
    corrected: dict[int, tuple[float, ...]] = {}
    for family in sizes:
        members = [k for k, case in enumerate(cases) if case.family == family]
        columns = zip(*(cases[k].p_values for k in members), strict=True)
        corrected |= dict(zip(members, zip(*(_correct(family, p) for p in columns), strict=True), strict=True))
    return [
        Verdict(
            study=case.study,
            number=case.number,
            claim=case.claim.text,
            source=case.claim.source,
            topic=case.claim.topic,
            primary=case.claim.primary,
            data=case.data,
            decision=case.decide(corrected[k]),
            single=case.decide(case.p_values),
            p_holds=corrected[k][0],
            p_equal=corrected[k][1],
            p_fails=corrected[k][2],
            seeds=min(len(link.differences) for link in case.links),
            links=case.links,
        )
        for k, case in enumerate(cases)
    ]


def plan_look(measured: MeasuredStudy) -> dict[str, int]:
    """Return the number of seeds for each of the data at the next look; empty if none is to be made.

    Data with an undecided claim get more seeds, unless a seed was lost or the study would exceed its minutes.
    """
    study, made = measured.study, measured.measurements
    seeds = {values.data: len({*values.by_seed, *values.lost}) for values in made.values}
    undecided = {v.data for v in judge([measured]) if v.decision == OPEN and not any(link.lost for link in v.links)}
    look = {
        data: next((n for n in study.schedule if n > now and data in undecided), now) for data, now in seeds.items()
    }
    minutes = made.seconds / 60 * sum(look.values()) / max(1, sum(seeds.values()))
    return look if look != seeds and minutes <= study.minutes else {}


def _get_family(measured: MeasuredStudy, claim: Claim) -> tuple[str, str]:
    """Return the claims among which one is corrected: the primary ones of a paper, or a topic of a study."""
    return (PRIMARY, measured.study.source) if claim.primary else (measured.name, claim.topic)


def _correct(family: tuple[str, str], p: Sequence[float]) -> list[float]:
    return correct_holm(p) if family[0] == PRIMARY else [float(q) for q in stats.false_discovery_control(p)]


def _list_cases(measured: MeasuredStudy, sizes: Mapping[tuple[str, str], int]) -> Iterator[_TestedClaim]:
    study = measured.study
    if measured.measurements.experiment != study.experiment:
        raise UsageError(
            f"expected measurements of {measured.name} as it is registered, got those of other settings: run vflsec "
            f"judge {measured.name}"
        )
    _check(measured)
    by_name = {(values.data, values.arm, values.measure): values for values in measured.measurements.values}
    for number, claim in enumerate(study.claims, start=1):
        family = _get_family(measured, claim)
        for data in study.list_data(claim):
            try:
                links = list(_compare_arms(claim, data, by_name, ALPHA / sizes[family], study.schedule))
                yield _TestedClaim(measured.name, number, claim, data, family, links)
            except KeyError as error:
                name, arm, measure = error.args[0]
                raise UsageError(
                    f"expected {measure} of {arm} on {name} in the measurements of {measured.name}, got none: run "
                    f"vflsec judge {measured.name}"
                ) from None


def _check(measured: MeasuredStudy) -> None:
    """Raise UsageError if the measurements are not of one run: a lost seed is named, none is left out."""

    def expect(holds: bool, expected: str, got: object) -> None:
        if not holds:
            changed = f"the measurements of {measured.name} were changed; run vflsec judge {measured.name}"
            raise UsageError(f"expected {expected}, got {got}: {changed}")

    most, named = measured.measurements.seeds, set()
    expect(1 <= most <= MAX_SEEDS, f"1 to {MAX_SEEDS} seeds", most)  # before anything is made that has so many
    by_data: dict[str, int] = defaultdict(int)  # how many seeds each of the data has: those decided early have fewer
    for values in measured.measurements.values:
        by_data[values.data] = min(most, max(by_data[values.data], len({*values.by_seed, *values.lost})))
    for values in measured.measurements.values:
        which = f"{values.measure} of {values.arm} on {values.data}"
        expect((values.data, values.arm, values.measure) not in named, f"{which} once", "it twice")
        named.add((values.data, values.arm, values.measure))
        got, seeds = sorted([*values.by_seed, *values.lost]), by_data[values.data]
        expect(got == list(range(seeds)), f"each of {seeds} seeds once in {which}", f"seeds {', '.join(map(str, got))}")
        largest = max((*values.by_seed.values(), *values.alone.values()), default=0.0)
        expect(largest <= 1 or values.measure.startswith("bytes"), f"values up to 1 in {which}", "a larger one")


def _compare_arms(
    claim: Claim, data: str, values: Mapping[tuple[str, str, str], Values], level: float, looks: Sequence[int]
) -> Iterator[ClaimComparison]:
    floor, margin = (-claim.margin, -claim.margin) if claim.no_worse else (0.0, claim.margin)
    for arms in claim.links:
        yield _compare(claim.arm_measure, data, arms, values, level, looks, more=claim.more, floor=floor, margin=margin)
        if claim.at_equal_utility is not None:
            lost = -claim.at_equal_utility
            yield _compare(claim.utility, data, arms, values, level, looks, more=True, floor=lost, margin=lost)


def _compare(
    measure: ArmMeasure,
    data: str,
    arms: tuple[str, str],
    values: Mapping[tuple[str, str, str], Values],
    level: float,
    looks: Sequence[int],
    *,
    more: bool,
    floor: float,
    margin: float,
) -> ClaimComparison:
    better = values[data, arms[0], measure.name]
    other = better if arms[1] == ALONE else values[data, arms[1], measure.name]
    first = _take_values(measure, better)
    second = better.alone if arms[1] == ALONE else _take_values(measure, other)
    seeds = sorted(first.keys() & second.keys())
    if measure.kind in ("bytes", "bytes to target"):  # the share that is saved
        differences = [1 - first[seed] / second[seed] if second[seed] else 0.0 for seed in seeds]
    else:
        differences = [(first[seed] - second[seed]) * (1 if more else -1) for seed in seeds]
    # Seeds beyond a look are no part of a verdict before the next look.
    done = max((look for look in looks if look <= len(differences)), default=len(differences))
    parts = [differences[:look] for look in looks if look < done] + [differences[:done]]
    tests = [compare_pairs(part, floor=floor, margin=margin) for part in parts]
    equal = [
        max(test.p_below, compare_pairs(part, floor=-margin).p_above) for test, part in zip(tests, parts, strict=True)
    ]
    difference: Paired = tests[-1]
    lost = set()
    for arm, measured, given in zip(arms, (better, other), (first, second), strict=True):
        named = {} if arm == ALONE else measured.lost
        lost |= {f"{arm}: {status}, seed {seed}" for seed, status in named.items()}
        lost |= {f"{arm}: missing, seed {seed}" for seed in range(looks[0]) if seed not in {*given, *measured.lost}}
    return ClaimComparison(
        text=f"{arms[0]} {'>' if more else '<'} {arms[1]}",
        measure=measure.name,
        floor=floor,
        margin=margin,
        differences=differences[:done],
        mean=difference.mean,
        low=difference.low,
        high=difference.high,
        deviation=difference.deviation,
        p_above=min(1.0, len(looks) * min(test.p_above for test in tests)),
        p_below=min(1.0, len(looks) * min(test.p_below for test in tests)),
        p_equal=min(1.0, len(looks) * min(equal)),
        detectable=find_detectable(difference.deviation, difference.n, level=level / len(looks)),
        pairs=len(differences),
        lost=sorted(lost),
        unconverged=max(better.unconverged, other.unconverged),
    )


def _take_values(measure: ArmMeasure, values: Values) -> dict[int, float]:
    if measure.kind != "advantage":
        return values.by_seed
    return {seed: value - values.alone[seed] for seed, value in values.by_seed.items() if seed in values.alone}
