"""Fronts and orders of defenses against worked examples."""

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

import vflsec
from vflsec.results.analysis.results import Cap, Leak, Measure, Place, Point
from vflsec.results.analysis.scores import find_differences, find_front, place_headlines, rank
from vflsec.results.statistics import bound_over_seeds

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

SURE = (0.0, 0.001, -0.001)
SHAKY = (0.0, 0.4, -0.4)


def spread(mean, by=SURE):
    """Three seeds around a mean."""
    return {} if mean is None else {seed: mean + step for seed, step in enumerate(by)}


def point(defense, strength, utility, leak, *, attack="mc", alone=0.6, by=SURE):
    measured = {"metric": "auc", "ci95": (None, None), "n": 3}
    leaked = Leak(
        **measured, mean=leak, chance=0.5, alone=alone, alone_ci95=(None, None), advantage=None,
        advantage_ci95=(None, None), accuracy=None, by_seed=spread(leak, by), alone_by_seed=spread(alone, by),
    )  # fmt: skip
    return Point(
        method="m", defense=defense, strength=strength, attack=attack, status="ok", statuses={"ok": 1},
        utility=Measure(**measured, mean=utility), leak=leaked, leak_train=leaked, nbytes=1, seconds=1.0, budget={},
        choice=attack,
    )  # fmt: skip


def folded(defense, value, calibrated, attack="worst", *, by=SURE):
    return Cap(
        method="m", defense=defense, attack=attack, value=value, ci95=(None, None), calibrated=calibrated,
        calibrated_ci95=(None, None), accuracy_value=None, dcs=None, n=3, by_seed=spread(value, by),
        calibrated_by_seed=spread(calibrated, by),
    )  # fmt: skip


def place(utility, leak, target="labels"):
    return Place(target=target, method="m", defense="d", strength=1.0, utility=utility, leak=leak)


def exposed_by(*worst, others=()):
    """Places by these headlines, each of which is an attack as well, and by other attacks."""
    return place_headlines([*worst, *others], [msgspec.structs.replace(p, attack="worst") for p in worst])


def test_the_headline_counts():
    norm = point("d", 1.0, 0.8, 0.95, attack="norm")  # larger on all rows, by luck
    found = exposed_by(point("d", 1.0, 0.8, 0.9), point("d", 5.0, 0.7, 0.6), others=[norm])
    assert [(p.strength, p.leak, p.by_seed) for p in found.values()] == [
        (1.0, 0.9, spread(0.9)),
        (5.0, 0.6, spread(0.6)),
    ]


def test_a_strength_at_which_an_attack_gave_no_number_is_left_out():
    assert not exposed_by(point("d", 1.0, 0.8, 0.9), others=[point("d", 1.0, 0.8, None, attack="norm")])


def test_a_strength_whose_model_is_of_no_use_ranks_nowhere():
    """A destroyed model leaks little, and would put its defense first."""
    useless = msgspec.structs.replace(point("label-dp", 1.0, 0.5, 0.5), useless="worse than bank alone")
    places = exposed_by(point("iso", 1.0, 0.8, 0.6), point("label-dp", 0.5, 0.8, 0.7), useless)
    assert [(p.defense, p.strength) for p in places.values()] == [("iso", 1.0), ("label-dp", 0.5)]
    ranked = rank([folded("iso", 0.3, 0.3), folded("label-dp", 0.3, 0.3)], places)
    assert [found.values["strongest leak"] for found in ranked] == [0.6, 0.7]


def test_the_front_of_a_worked_example():
    best, cheap, beaten, twin = place(0.9, 0.8), place(0.7, 0.6), place(0.8, 0.85), place(0.7, 0.6)
    assert find_front([best, cheap, beaten, twin]) == [best, cheap, twin]
    assert find_front([best, place(0.95, 0.7, target="features")]) == [best, place(0.95, 0.7, target="features")]


def test_what_is_printed_alike_is_equal_on_the_front():
    """By more digits, the first would be beaten, and the third would be on the front."""
    first, alike, more = place(0.7196, 0.7004), place(0.7204, 0.6996), place(0.72041, 0.7012)
    assert find_front([first, alike, more]) == [first, alike]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_whatever_is_not_on_the_front_is_beaten_by_something_on_it(pairs):
    places = [place(float(u), float(a)) for u, a in pairs]
    best = find_front(places)
    assert best
    for one in places:
        dominated = any(
            o.utility >= one.utility and o.leak <= one.leak and (o.utility, o.leak) != (one.utility, one.leak)
            for o in best
        )
        assert dominated == (one not in best)


def test_ranks_are_by_the_headline():
    caps = [folded("a", 0.2, 0.8), folded("a", 0.1, 0.1, "mc"), folded("b", 0.3, 0.7)]
    found = {
        rank.defense: rank for rank in rank(caps, exposed_by(point("a", 1.0, 0.8, 0.9), point("b", 1.0, 0.7, 0.7)))
    }
    assert found["a"].values == {"CAP": 0.2, "calibrated CAP": 0.8, "hypervolume": None, "strongest leak": 0.9}
    assert found["a"].ranks == {"CAP": 2, "calibrated CAP": 1, "strongest leak": 2}
    assert found["b"].ranks == {"CAP": 1, "calibrated CAP": 2, "strongest leak": 1}


def ranked(*by_seed):
    """Defenses a, b, c... with these leaks by seed, and no other score."""
    caps = [folded(name, None, None) for name in "abcd"[: len(by_seed)]]
    places = {
        ("labels", "m", cap.defense, 1.0): Place(
            target="labels", method="m", defense=cap.defense, strength=1.0, utility=0.8, leak=sum(own) / len(own),
            by_seed=dict(enumerate(own)),
        )
        for cap, own in zip(caps, by_seed, strict=True)
    }  # fmt: skip
    return rank(caps, places)


def test_neighbors_are_told_apart_by_paired_differences():
    """b and c vary together, so that c's small lead is certain; a's larger one over b is not, for a varies alone."""
    found = ranked([0.60, 0.80, 0.55], [0.70, 0.80, 0.90], [0.71, 0.81, 0.91])
    assert [rank.close for rank in found] == [["strongest leak"], ["strongest leak"], []]
    assert [rank.ranks["strongest leak"] for rank in found] == [1, 2, 3]


def test_by_one_seed_nothing_is_told_apart():
    found = ranked([0.6], [0.9])
    assert [rank.close for rank in found] == [["strongest leak"]] * 2
    assert not find_differences(found)


def test_equal_defenses_are_not_told_apart():
    assert not find_differences(ranked([0.6, 0.7, 0.6], [0.6, 0.7, 0.6]))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=3, max_size=6))
def test_of_two_defenses_told_apart_is_that_the_interval_of_the_difference_leaves_out_zero(pairs):
    differences = [a - b for a, b in pairs]
    _, low, high, _ = bound_over_seeds(differences)
    assume(min(abs(low), abs(high)) > 1e-6)
    assert bool(find_differences(ranked(*map(list, zip(*pairs, strict=True))))) == (not low <= 0 <= high)


def test_of_many_defenses_a_pair_needs_a_smaller_p_value():
    """The difference of a and b has a p value just below .05; of six pairs the least needs .05 / 6."""
    a, b = [0.60, 0.61, 0.62, 0.60, 0.61], [0.615, 0.63, 0.62, 0.625, 0.615]
    others = [0.9, 0.2, 0.6, 0.1, 0.5], [0.1, 0.9, 0.4, 0.8, 0.3]
    assert len(find_differences(ranked(a, b))) == 1
    assert not find_differences(ranked(a, b, *others))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_equal_defenses_are_told_apart_in_at_most_one_of_twenty_reports():
    rng = np.random.default_rng(0)
    worlds = [rng.normal(0.7, 0.02, (4, 5)).tolist() for _ in range(400)]
    wrong = sum(bool(find_differences(ranked(*world))) for world in worlds)
    assert wrong <= stats.binom.ppf(0.999, 400, 0.05)


def test_seeds_that_one_lacks_are_left_out():
    one, other = ranked([0.6, 0.6, 0.6], [0.7, 0.7, 0.7])
    lacking = msgspec.structs.replace(other, by_seed={"strongest leak": {1: 0.7, 2: 0.7, 3: 0.1}})
    assert find_differences([one, other])
    assert not find_differences([one, lacking])


def test_what_is_summed_up_by_seed_is_the_mean_over_strengths():
    (found,) = rank([folded("a", 0.3, 0.7)], exposed_by(point("a", 1.0, 0.8, 0.9), point("a", 5.0, 0.8, 0.5)))
    assert found.values["strongest leak"] == pytest.approx((0.9 + 0.5) / 2)
    assert found.by_seed["strongest leak"] == pytest.approx(spread(0.7))


def test_without_a_score_there_is_no_place_by_it():
    caps = [folded("a", None, None), folded("b", 0.3, 0.7)]
    found = rank(caps, exposed_by(point("a", 1.0, 0.8, 0.9), point("b", 1.0, 0.7, 0.7)))
    assert found[0].ranks == {"strongest leak": 2}
    assert found[1].ranks == {"CAP": 1, "calibrated CAP": 1, "strongest leak": 1}


def test_an_attack_that_acts_in_training_lends_its_utility_to_nobody():
    found = exposed_by(point("a", 1.0, 0.85, 0.65, attack="active-mc"), others=[point("a", 1.0, 0.8, 0.6)])
    assert [p.utility for p in found.values()] == [0.8]


@pytest.mark.long
def test_a_report_shows_orders_and_what_they_do_not_tell(tmp_path):
    report = vflsec.evaluate(
        attack="direction", defense=["iso:lambda=1,50", "iso:lambda=1@embedding"], dataset="toy", seeds=2, jobs=1,
        data={"options": {"rows": 150}}, train={"epochs": 1}, aux={"n": 20, "folds": 0}, out=tmp_path,
    )  # fmt: skip
    shown = report.table(200)
    assert "hypervolume (place)" not in shown, "two seeds give none"
    assert shown.count("(≈") == sum(len(rank.close) for rank in report.summary.ranks)
    assert report.to_dict()["ranks"][0]["by_seed"]["CAP"].keys() == {0, 1}
    leak = next(p.leak for p in report.points if p.strength)
    assert leak.mean == pytest.approx(sum(leak.by_seed.values()) / 2)
