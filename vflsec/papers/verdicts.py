"""From measurements to verdicts on claims.

*Holds*: the mean difference exceeds zero by Holm's correction over all verdicts of the page, and it is at least the
margin. *Does not hold here*: it falls short of the margin, by the same correction. *Undecided*: neither, or a seed was
lost or not run, or there are too few. A claim of several comparisons holds if all hold and does not if one does not:
its p value for holding is the largest of theirs, and for not holding the smallest times their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from vflsec.base.errors import UsageError
from vflsec.papers.measurements import Measurements, Values
from vflsec.papers.study import ALONE, MAX_SEEDS, ArmMeasure, Claim, Study
from vflsec.results.statistics import ALPHA, MIN_SEEDS, Paired, compare_pairs, correct_holm, find_detectable

Decision = Literal["holds", "does not hold here", "undecided"]
HOLDS: Decision = "holds"
FAILS: Decision = "does not hold here"
OPEN: Decision = "undecided"
DECISIONS = (HOLDS, FAILS, OPEN)


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
        detectable: the smallest true excess over the floor that is found with 80 % power at the page's level.
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
    detectable: float
    lost: list[str]
    unconverged: int = 0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the measurements say of one claim on one of the data.

    Attributes:
        number: of the claim in its study, from 1.
        decision: after the correction over all verdicts; ``single`` without one.
        p_holds: after the correction; ``p_fails`` the same of the opposite.
    """

    study: str
    number: int
    claim: str
    source: str
    topic: str
    data: str
    decision: Decision
    single: Decision
    p_holds: float
    p_fails: float
    seeds: int
    links: list[ClaimComparison]


class _TestedClaim(NamedTuple):
    study: str
    number: int
    claim: Claim
    data: str
    links: list[ClaimComparison]

    @property
    def p_holds(self) -> float:
        return 1.0 if self.incomplete else max(link.p_above for link in self.links)

    @property
    def p_fails(self) -> float:
        return 1.0 if self.incomplete else min(1.0, len(self.links) * min(link.p_below for link in self.links))

    @property
    def incomplete(self) -> bool:
        return any(link.lost or len(link.differences) < MIN_SEEDS for link in self.links)

    def decision(self, p_holds: float, p_fails: float) -> Decision:
        """Return what two p values say."""
        if p_fails < ALPHA:
            return FAILS
        relevant = all(link.mean >= link.margin for link in self.links)
        return HOLDS if p_holds < ALPHA and relevant else OPEN


def judge(studies: Sequence[MeasuredStudy]) -> list[Verdict]:
    """Return a verdict for each claim and its data; Holm's correction is over all of them.

    Raises:
        UsageError: measurements of other settings than those of the study, or that lack a measure.
    """
    verdicts = sum(len(measured.study.list_data(claim)) for measured in studies for claim in measured.study.claims)
    cases = [case for measured in studies for case in _list_cases(measured, ALPHA / max(1, verdicts))]
    holding = correct_holm([case.p_holds for case in cases])
    failing = correct_holm([case.p_fails for case in cases])
    return [
        Verdict(
            study=case.study,
            number=case.number,
            claim=case.claim.text,
            source=case.claim.source,
            topic=case.claim.topic,
            data=case.data,
            decision=case.decision(p_holds, p_fails),
            single=case.decision(case.p_holds, case.p_fails),
            p_holds=p_holds,
            p_fails=p_fails,
            seeds=min(len(link.differences) for link in case.links),
            links=case.links,
        )
        for case, p_holds, p_fails in zip(cases, holding, failing, strict=True)
    ]


def _list_cases(measured: MeasuredStudy, level: float) -> Iterator[_TestedClaim]:
    if measured.measurements.experiment != measured.study.experiment:
        raise UsageError(
            f"expected measurements of {measured.name} as it is registered, got those of other settings: run vflsec "
            f"judge {measured.name}"
        )
    _check(measured)
    by_name = {(values.data, values.arm, values.measure): values for values in measured.measurements.values}
    for number, claim in enumerate(measured.study.claims, start=1):
        for data in measured.study.list_data(claim):
            try:
                links = list(_compare_arms(claim, data, by_name, level, measured.study.seeds))
                yield _TestedClaim(measured.name, number, claim, data, links)
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

    seeds, named = measured.measurements.seeds, set()
    expect(1 <= seeds <= MAX_SEEDS, f"1 to {MAX_SEEDS} seeds", seeds)  # before anything is made that has so many
    for values in measured.measurements.values:
        which = f"{values.measure} of {values.arm} on {values.data}"
        expect((values.data, values.arm, values.measure) not in named, f"{which} once", "it twice")
        named.add((values.data, values.arm, values.measure))
        got = sorted([*values.by_seed, *values.lost])
        expect(got == list(range(seeds)), f"each of {seeds} seeds once in {which}", f"seeds {', '.join(map(str, got))}")
        largest = max((*values.by_seed.values(), *values.alone.values()), default=0.0)
        expect(largest <= 1 or values.measure.startswith("bytes"), f"values up to 1 in {which}", "a larger one")


def _compare_arms(
    claim: Claim, data: str, values: Mapping[tuple[str, str, str], Values], level: float, seeds: int
) -> Iterator[ClaimComparison]:
    floor, margin = (-claim.margin, -claim.margin) if claim.no_worse else (0.0, claim.margin)
    for arms in claim.links:
        yield _compare(claim.arm_measure, data, arms, values, level, seeds, more=claim.more, floor=floor, margin=margin)
        if claim.at_equal_utility is not None:
            lost = -claim.at_equal_utility
            yield _compare(claim.utility, data, arms, values, level, seeds, more=True, floor=lost, margin=lost)


def _compare(
    measure: ArmMeasure,
    data: str,
    arms: tuple[str, str],
    values: Mapping[tuple[str, str, str], Values],
    level: float,
    registered: int,
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
    difference: Paired = compare_pairs(differences, floor=floor, margin=margin)
    lost = set()
    for arm, measured, given in zip(arms, (better, other), (first, second), strict=True):
        named = {} if arm == ALONE else measured.lost
        lost |= {f"{arm}: {status}, seed {seed}" for seed, status in named.items()}
        lost |= {f"{arm}: missing, seed {seed}" for seed in range(registered) if seed not in {*given, *measured.lost}}
    return ClaimComparison(
        text=f"{arms[0]} {'>' if more else '<'} {arms[1]}",
        measure=measure.name,
        floor=floor,
        margin=margin,
        differences=differences,
        mean=difference.mean,
        low=difference.low,
        high=difference.high,
        deviation=difference.deviation,
        p_above=difference.p_above,
        p_below=difference.p_below,
        detectable=find_detectable(difference.deviation, difference.n, level=level),
        lost=sorted(lost),
        unconverged=max(better.unconverged, other.unconverged),
    )


def _take_values(measure: ArmMeasure, values: Values) -> dict[int, float]:
    if measure.kind != "advantage":
        return values.by_seed
    return {seed: value - values.alone[seed] for seed, value in values.by_seed.items() if seed in values.alone}
