"""Verdicts: what decides them, and what does not."""

import msgspec
import numpy as np
import pytest
from scipy import stats

from vflsec.base.errors import UsageError
from vflsec.papers.measurements import Measurements, Values
from vflsec.papers.study import Claim, Study, StudyPart
from vflsec.papers.verdicts import EQUAL, FAILS, HOLDS, OPEN, MeasuredStudy, judge, plan_look

CLEAR = {seed: 0.1 + 0.001 * seed for seed in range(6)}
"""Differences that are surely above 0.05."""
NOTHING = {seed: 0.001 * (-1) ** seed for seed in range(6)}
STUDIES = 150
"""Null studies, of which 1,000 take a minute."""
WORSE = {seed: -value for seed, value in CLEAR.items()}
VAGUE = {seed: 0.3 * (-1) ** seed + 0.06 for seed in range(6)}


def claim(**changes):
    settings = {
        "text": "a beats b", "source": "table 1", "topic": "utility", "measure": "utility", "margin": 0.05,
    }  # fmt: skip
    order = {} if "order" in changes else {"better": "a", "than": ["b"]}
    return Claim(**{**settings, **order, **changes})


def study(*claims):
    arms = [StudyPart(name=name) for name in ("a", "b", "c")]
    return Study(
        title="t",
        source="s",
        registered="2026-01-01",
        data=[StudyPart(name="d")],
        arms=arms,
        claims=list(claims),
        seeds=6,
    )


def measurements(own, *values, experiment=None):
    return Measurements(
        study="s",
        experiment=experiment or own.experiment,
        registration=own.registration,
        seeds=len({seed for one in values for seed in (*one.by_seed, *one.lost)}),
        time="",
        commit=None,
        versions={},
        seconds=1.0,
        values=list(values),
    )


def verdict(one, *values):
    own = study(one)
    return judge([MeasuredStudy("s", own, measurements(own, *values))])[0]


def values(arm, by_seed, measure="utility", **more):
    return Values(data="d", arm=arm, measure=measure, by_seed=by_seed, **more)


def against(differences, one=None, **more):
    """Return the verdict if a is better than b by these differences."""
    zero = dict.fromkeys(differences, 0.0)
    return verdict(one or claim(), values("a", differences), values("b", zero), **more)


@pytest.mark.parametrize(("differences", "decision"), [(CLEAR, HOLDS), (NOTHING, EQUAL), (VAGUE, OPEN), (WORSE, FAILS)])
def test_a_verdict_follows_from_the_differences(differences, decision):
    assert against(differences).decision == decision


def test_a_significant_difference_below_the_margin_is_equivalent():
    assert against({seed: 0.01 + 0.0001 * seed for seed in range(6)}).decision == EQUAL
    near = {seed: 0.045 + 0.01 * (-1) ** seed for seed in range(6)}
    assert against(near).decision == OPEN  # above zero, and perhaps at the margin


def test_no_worse_holds_of_equal_arms():
    assert against(NOTHING, claim(no_worse=True)).decision == HOLDS
    assert against(WORSE, claim(no_worse=True)).decision == FAILS


def test_less_leak_is_better_unless_the_claim_wants_more():
    leak = {"topic": "privacy", "measure": "leak", "attack": "mc"}
    a, b = values("a", dict.fromkeys(CLEAR, 0.2), "leak of mc"), values("b", CLEAR, "leak of mc")
    assert verdict(claim(**leak), b, a).decision == FAILS
    assert verdict(claim(**leak, wants="more"), a, b).decision == HOLDS


def test_a_leak_may_be_compared_with_the_adversary_alone():
    one = claim(topic="privacy", measure="leak", attack="mc", than=["alone"], wants="more")
    found = verdict(
        one, values("a", {k: 0.5 + v for k, v in CLEAR.items()}, "leak of mc", alone=dict.fromkeys(CLEAR, 0.5))
    )
    assert found.decision == HOLDS
    assert found.links[0].differences == pytest.approx(list(CLEAR.values()))


def test_an_advantage_is_the_leak_less_that_alone():
    one = claim(topic="privacy", measure="advantage", attack="mc")
    a = values("a", dict.fromkeys(CLEAR, 0.9), "leak of mc", alone=dict.fromkeys(CLEAR, 0.9))
    b = values("b", dict.fromkeys(CLEAR, 0.9), "leak of mc", alone=dict.fromkeys(CLEAR, 0.8))
    assert verdict(one, a, b).links[0].mean == pytest.approx(0.1)


def test_bytes_are_compared_by_the_share_that_is_saved():
    one = claim(topic="cost", measure="bytes", margin=0.5)
    a, b = values("a", dict.fromkeys(CLEAR, 10.0), "bytes"), values("b", dict.fromkeys(CLEAR, 100.0), "bytes")
    found = verdict(one, a, b)
    assert (found.decision, found.links[0].mean) == (HOLDS, 0.9)


def test_a_chain_holds_if_every_link_does():
    one = claim(order=["a", "b", "c"])
    down = [values(arm, {k: -i * v for k, v in CLEAR.items()}) for i, arm in enumerate("abc")]
    assert verdict(one, *down).decision == HOLDS
    assert verdict(one, down[0], down[1], values("c", down[1].by_seed)).decision == FAILS
    assert (
        verdict(one, down[0], down[1], values("c", {k: down[1].by_seed[k] - VAGUE[k] for k in VAGUE})).decision == OPEN
    )


def test_at_equal_utility_a_loss_of_utility_defeats_the_claim():
    one = claim(topic="privacy", measure="leak", attack="mc", at_equal_utility=0.02)
    leaks = (
        values("a", dict.fromkeys(CLEAR, 0.2), "leak of mc"),
        values("b", {k: 0.2 + v for k, v in CLEAR.items()}, "leak of mc"),
    )
    same = values("a", NOTHING), values("b", dict.fromkeys(CLEAR, 0.0))
    assert verdict(one, *leaks, *same).decision == HOLDS
    worse = values("a", {k: -v for k, v in CLEAR.items()}), same[1]
    assert verdict(one, *leaks, *worse).decision == FAILS


def test_a_lost_seed_leaves_a_claim_undecided():
    found = verdict(claim(), values("a", CLEAR, lost={6: "diverged"}), values("b", dict.fromkeys(range(7), 0.0)))
    assert (found.decision, found.links[0].lost) == (OPEN, ["a: diverged, seed 6"])


def test_fewer_seeds_than_registered_leave_a_claim_undecided():
    """Whoever runs seeds until a claim holds, and stops, has not tested it."""
    few = {seed: CLEAR[seed] for seed in range(4)}
    found = against(few)
    missing = [f"{arm}: missing, seed {seed}" for arm in "ab" for seed in (4, 5)]
    assert (found.decision, found.single, found.links[0].lost) == (OPEN, OPEN, missing)
    assert against({seed: NOTHING[seed] for seed in few}).decision == OPEN


@pytest.mark.parametrize("measure", ["leak", "advantage"])
def test_a_seed_that_lacks_the_adversary_alone_leaves_a_claim_undecided(measure):
    alone = {seed: 0.5 for seed in CLEAR if seed != 2}
    above = values("a", {seed: 0.5 + v for seed, v in CLEAR.items()}, "leak of mc", alone=alone)
    if measure == "leak":
        one, others = claim(topic="privacy", measure="leak", attack="mc", than=["alone"], wants="more"), []
    else:
        one = claim(topic="privacy", measure="advantage", attack="mc", wants="more")
        others = [values("b", dict.fromkeys(CLEAR, 0.5), "leak of mc", alone=dict.fromkeys(CLEAR, 0.5))]
    found = verdict(one, above, *others)
    arm = "alone" if measure == "leak" else "a"
    assert (found.decision, found.links[0].lost) == (OPEN, [f"{arm}: missing, seed 2"])
    whole = msgspec.structs.replace(above, alone=dict.fromkeys(CLEAR, 0.5))
    assert verdict(one, whole, *others).decision == HOLDS


def test_a_number_of_seeds_that_no_study_has_is_refused_at_once():
    own = study(claim())
    for seeds in (0, 1001, 10**30):
        found = msgspec.structs.replace(measurements(own, values("a", CLEAR), values("b", ZERO)), seeds=seeds)
        with pytest.raises(UsageError, match=f"expected 1 to 1000 seeds, got {seeds}"):
            judge([MeasuredStudy("s", own, found)])


def test_nothing_is_lost_where_different_arms_give_equal_numbers():
    """As under encryption, which changes no number. Arms that are the same are refused before anything is measured."""
    equal = dict.fromkeys(CLEAR, 0.7)
    found = verdict(claim(no_worse=True), values("a", equal), values("b", equal))
    assert (found.decision, found.links[0].deviation) == (HOLDS, 0.0)
    assert verdict(claim(), values("a", equal), values("b", equal)).decision == EQUAL


def test_two_seeds_leave_a_claim_undecided():
    assert against({0: 0.1, 1: 0.1}).decision == OPEN


def test_many_claims_need_stronger_evidence():
    weak = {0: 0.05, 1: 0.07, 2: 0.02, 3: 0.09, 4: 0.055, 5: 0.03}
    assert against(weak).decision == HOLDS
    null = [claim(text=str(k), order=["c", "b"]) for k in range(49)]
    own = study(claim(), *null)
    found = measurements(own, values("a", weak), values("b", dict.fromkeys(weak, 0.0)), values("c", VAGUE))
    verdicts = judge([MeasuredStudy("s", own, found)])
    assert (verdicts[0].decision, verdicts[0].single) == (OPEN, HOLDS)
    assert verdicts[0].links[0].detectable > against(weak).links[0].detectable


def test_primary_claims_are_corrected_among_themselves():
    weak = {0: 0.05, 1: 0.07, 2: 0.02, 3: 0.09, 4: 0.055, 5: 0.03}
    others = [claim(text=str(k), order=["c", "b"]) for k in range(49)]
    own = study(claim(primary=True), claim(text="too", primary=True), *others)
    found = measurements(own, values("a", weak), values("b", dict.fromkeys(weak, 0.0)), values("c", VAGUE))
    verdicts = judge([MeasuredStudy("s", own, found)])
    single = against(weak)
    assert [one.decision for one in verdicts[:2]] == [HOLDS, HOLDS]
    assert verdicts[0].p_holds == pytest.approx(2 * single.p_holds)
    with pytest.raises(ValueError, match="at most 5 primary"):
        study(*[claim(text=str(k), primary=True) for k in range(6)])


def test_a_p_value_is_the_smallest_of_the_looks_times_their_number():
    few, many = dict(list(CLEAR.items())[:3]), {**CLEAR, **{k: VAGUE[k - 6] for k in range(6, 12)}}
    own = msgspec.structs.replace(study(claim()), seeds=3, looks=[6, 12])
    found = measurements(own, values("a", many), values("b", dict.fromkeys(many, 0.0)))
    link = judge([MeasuredStudy("s", own, found)])[0].links[0]
    at = [against(part).links[0].p_above for part in (CLEAR, many)]
    three = stats.ttest_1samp(list(few.values()), 0, alternative="greater").pvalue
    assert link.p_above == pytest.approx(3 * min(three, *at))
    with pytest.raises(ValueError, match="looks that rise"):
        msgspec.convert({**msgspec.to_builtins(own), "looks": [3]}, Study)


def test_a_look_that_all_seeds_contradict_decides_nothing():
    own = msgspec.structs.replace(study(claim()), looks=[12])  # first nothing, then a difference above the margin
    all_seeds = {**NOTHING, **{k: 0.2 + 0.4 * (-1) ** k for k in range(6, 12)}}
    made = measurements(own, values("a", all_seeds), values("b", dict.fromkeys(all_seeds, 0.0)))
    (judged,) = judge([MeasuredStudy("s", own, made)])
    assert judged.p_fails < 0.05
    assert judged.links[0].mean > 0.05
    assert judged.decision == OPEN


def test_seeds_between_two_looks_decide_nothing():
    own = msgspec.structs.replace(study(claim()), looks=[9])
    more = {**VAGUE, 6: 0.1, 7: 0.1}
    found = measurements(own, values("a", more), values("b", dict.fromkeys(more, 0.0)))
    link = judge([MeasuredStudy("s", own, found)])[0].links[0]
    assert link.differences == list(VAGUE.values())


def test_only_data_with_an_undecided_claim_get_more_seeds():
    own = msgspec.structs.replace(
        study(claim()), data=[StudyPart(name="d"), StudyPart(name="e", settings={"train.lr": 1})], looks=[12, 24]
    )
    zero = dict.fromkeys(CLEAR, 0.0)
    others = [
        Values(data="e", arm=arm, measure="utility", by_seed=by_seed) for arm, by_seed in (("a", VAGUE), ("b", zero))
    ]
    made = measurements(own, values("a", CLEAR), values("b", zero), *others)
    assert plan_look(MeasuredStudy("s", own, made)) == {"d": 6, "e": 12}
    assert not plan_look(MeasuredStudy("s", own, msgspec.structs.replace(made, seconds=60 * own.minutes)))
    assert not plan_look(MeasuredStudy("s", msgspec.structs.replace(own, looks=[]), made))


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("mean", "deviation", "pairs", "wrong"),
    [
        (0.0, 0.1, ["ab", "bc", "ca", "ba", "cb", "ac"], {HOLDS}),
        (0.05, 0.02, ["ab", "ac", "ab", "ac", "ab", "ac"], {EQUAL, FAILS}),
    ],
)
def test_null_studies_with_looks_keep_their_error_rates(mean, deviation, pairs, wrong):
    """Studies that add seeds until all is decided: no more than 5 % decide a claim wrongly."""
    rng, looks = np.random.default_rng(0), (5, 10, 20)
    claims = [claim(text=str(k), order=pair, primary=k < 2) for k, pair in enumerate(pairs)]
    own = msgspec.structs.replace(study(*claims), seeds=5, looks=list(looks[1:]))
    errors = {True: 0, False: 0}
    for _ in range(STUDIES):
        drawn = {arm: rng.normal(mean if arm == "a" else 0.0, deviation, looks[-1]) for arm in "abc"}
        for look in looks:
            arms = [values(arm, dict(enumerate(numbers[:look]))) for arm, numbers in drawn.items()]
            measured = MeasuredStudy("s", own, measurements(own, *arms))
            verdicts = judge([measured])
            if not plan_look(measured):
                break
        for primary in errors:
            errors[primary] += any(one.decision in wrong for one in verdicts if one.primary == primary)
    assert max(errors.values()) <= stats.binom.ppf(0.999, STUDIES, 0.05), errors


def test_measurements_of_other_settings_are_refused():
    own = study(claim())
    other = msgspec.structs.replace(own, settings={"dataset": "toy"})
    with pytest.raises(UsageError, match="other settings"):
        judge([MeasuredStudy("s", own, measurements(own, experiment=other.experiment))])
    with pytest.raises(UsageError, match="run vflsec judge s"):
        judge([MeasuredStudy("s", own, measurements(own))])


ZERO = dict.fromkeys(CLEAR, 0.0)
TWICE = [values("a", CLEAR), values("b", ZERO), values("b", CLEAR)]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([values("a", {0: 0.1, 1: 0.2, 2: 0.3}), values("b", ZERO)], "each of 6 seeds once"),
        ([values("a", {**CLEAR, -3: 0.1}), values("b", {**ZERO, -3: 0.0})], "each of 7 seeds once"),
        ([values("a", CLEAR, lost={0: "diverged"}), values("b", ZERO)], "each of 6 seeds once"),
        ([values("a", {**CLEAR, 0: 7.0}), values("b", ZERO)], "values up to 1"),
        (TWICE, "once, got it twice"),
        ([values("a", CLEAR)], "utility of b on d"),
    ],
)
def test_measurements_that_were_changed_give_no_verdict(found, message):
    with pytest.raises(UsageError, match=message):
        verdict(claim(), *found)


@pytest.mark.parametrize(
    "changes",
    [
        {"margin": float("inf")},
        {"at_equal_utility": float("inf")},
        {"margin": 1.0},  # of a measure between 0 and 1
        {"at_equal_utility": 1.0},
        {"than": ["a"]},
        {"than": ["b", "b"]},
        {"order": ["a", "b", "a"]},
        {"data": []},
        {"data": ["d", "d"]},
        {"measure": "leak", "attack": "mc", "metric": "auc"},
        {"measure": "cap", "attack": "mc", "strength": 1.0},
    ],
)
def test_a_claim_that_says_nothing_is_refused(changes):
    with pytest.raises(ValueError, match="claim"):
        claim(**changes)
