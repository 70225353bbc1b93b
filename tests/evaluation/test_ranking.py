"""Fronts and orders of defences against worked examples."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from vflsec.evaluation.ranking import disagreements, exposed, front, ranks
from vflsec.evaluation.results import Cap, Leak, Measure, Place, Point


def point(defense, strength, utility, leak, *, attack="mc", alone=0.6, on_train=None):
    measured = {"metric": "auc", "ci95": (None, None), "n": 1}
    leaked = Leak(
        **measured, mean=leak, chance=0.5, alone=alone, alone_ci95=(None, None), advantage=None,
        advantage_ci95=(None, None), accuracy=None,
    )  # fmt: skip
    train = msgspec.structs.replace(leaked, mean=leak if on_train is None else on_train)
    return Point(
        method="m", defense=defense, strength=strength, attack=attack, status="ok", statuses={"ok": 1},
        utility=Measure(**measured, mean=utility), leak=leaked, leak_train=train, nbytes=1, seconds=1.0, budget={},
        choice=attack,
    )  # fmt: skip


def folded(defense, value, calibrated, attack="mc"):
    return Cap(
        method="m", defense=defense, attack=attack, value=value, ci95=(None, None), calibrated=calibrated,
        calibrated_ci95=(None, None), accuracy_value=None, dcs=None, n=1,
    )  # fmt: skip


def place(utility, leak, target="labels"):
    return Place(target=target, method="m", defense="d", strength=1.0, utility=utility, leak=leak, worst_rows=leak)


def test_the_strongest_attack_counts_and_alone_is_the_floor():
    points = [point("d", 1.0, 0.8, 0.9, attack="norm"), point("d", 1.0, 0.8, 0.7), point("d", 5.0, 0.7, 0.55)]
    assert [(p.strength, p.leak) for p in exposed(points).values()] == [(1.0, 0.9), (5.0, 0.6)]


def test_a_strength_at_which_an_attack_gave_no_number_is_left_out():
    assert not exposed([point("d", 1.0, 0.8, 0.9), point("d", 1.0, 0.8, None, attack="norm")])


def test_the_front_of_a_worked_example():
    best, cheap, beaten, twin = place(0.9, 0.8), place(0.7, 0.6), place(0.8, 0.85), place(0.7, 0.6)
    assert front([best, cheap, beaten, twin]) == [best, cheap, twin]
    assert front([best, place(0.95, 0.7, target="features")]) == [best, place(0.95, 0.7, target="features")]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_whatever_is_not_on_the_front_is_beaten_by_something_on_it(pairs):
    places = [place(float(u), float(a)) for u, a in pairs]
    best = front(places)
    assert best
    for one in places:
        dominated = any(
            o.utility >= one.utility and o.leak <= one.leak and (o.utility, o.leak) != (one.utility, one.leak)
            for o in best
        )
        assert dominated == (one not in best)


def test_ranks_are_by_the_attack_that_a_defense_does_worst_against():
    caps = [folded("a", 0.5, 0.9), folded("a", 0.2, 0.8, "norm"), folded("b", 0.3, 0.7)]
    points = [point("a", 1.0, 0.8, 0.9), point("b", 1.0, 0.7, 0.7)]
    found = {rank.defense: rank for rank in ranks(caps, exposed(points))}
    assert found["a"].values == {"CAP": 0.2, "calibrated CAP": 0.8, "strongest leak": 0.9}
    assert found["a"].ranks == {"CAP": 2, "calibrated CAP": 1, "strongest leak": 2}
    assert found["b"].ranks == {"CAP": 1, "calibrated CAP": 2, "strongest leak": 1}
    assert disagreements(list(found.values())) == [
        "CAP and calibrated CAP disagree on m, a and m, b",
        "calibrated CAP and strongest leak disagree on m, a and m, b",
    ]


def test_without_a_score_there_is_no_place_by_it():
    caps = [folded("a", None, None), folded("b", 0.3, 0.7)]
    found = ranks(caps, exposed([point("a", 1.0, 0.8, 0.9), point("b", 1.0, 0.7, 0.7)]))
    assert found[0].ranks == {"strongest leak": 2}
    assert found[1].ranks == {"CAP": 1, "calibrated CAP": 1, "strongest leak": 1}
    assert not disagreements(found)


def test_what_is_leaked_of_training_rows_counts_in_the_order():
    caps = [folded("a", 0.5, 0.9), folded("b", 0.3, 0.7)]
    points = [point("a", 1.0, 0.8, 0.65, on_train=0.99), point("b", 1.0, 0.7, 0.7)]
    assert [rank.ranks["strongest leak"] for rank in ranks(caps, exposed(points))] == [2, 1]


def test_an_attack_that_acts_in_training_lends_its_utility_to_nobody():
    points = [point("a", 1.0, 0.8, 0.7), point("a", 1.0, 0.85, 0.65, attack="active-mc")]
    assert [p.utility for p in exposed(points).values()] == [0.8]
