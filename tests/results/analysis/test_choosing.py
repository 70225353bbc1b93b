"""The headline on synthetic worlds whose strongest attack is known: no winner's curse, and intervals that cover."""

import msgspec
import numpy as np
import pytest
from scipy import stats

from vflsec.results.analysis.choosing import Choice, choose, score_across
from vflsec.results.analysis.intervals import get_headline, make_interval
from vflsec.results.records.schema import Block
from vflsec.results.statistics import GROUPS, SHARE

TRUE, WORLDS, SEEDS, ATTACKS = 0.7, 200, 5, 10
ROW_NOISE = 0.014  # of an AUC on a thousand rows, half of 2,000
SEED_NOISE = 0.01


def block(halves):
    value = sum(halves) / 2
    error = ROW_NOISE / 2**0.5
    rng = np.random.default_rng(int(1e9 * value))  # each seed has rows of its own
    return Block(
        metrics={"auc": value, "accuracy": value - 0.1},
        halves=tuple(halves),
        ci95_rows=(value - 1.96 * error, value + 1.96 * error),
        chance=0.5,
        n=2000,
        without=tuple(value + rng.normal(0, error / GROUPS**0.5, GROUPS)),
    )


def world(rng, strengths, *, seeds=SEEDS, seed_noise=SEED_NOISE):
    """Attacks of these strengths: what a seed gives is common to all of them, the noise of their rows is not."""
    common = rng.normal(0, seed_noise, (1, seeds, 1))
    scores = np.asarray(strengths)[:, None, None] + common + rng.normal(0, ROW_NOISE, (len(strengths), seeds, 2))
    return {(f"a{k}", "test"): {s: block(scores[k, s]) for s in range(seeds)} for k in range(len(strengths))}


def worst_of(candidates, seeds=SEEDS):
    found = score_across(candidates, choose(candidates))
    blocks = [found[seed] for seed in sorted(found)]
    gap = float(np.mean([one.overfit for one in blocks]))
    return make_interval([get_headline(one) for one in blocks], seeds, SHARE, extended=gap)


def largest_of(candidates):
    return max(np.mean([one.headline for one in by_seed.values()]) for by_seed in candidates.values())


def many(strengths, **changed):
    rng = np.random.default_rng(0)
    worlds = [world(rng, strengths, **changed) for _ in range(WORLDS)]
    return worlds, [worst_of(one, changed.get("seeds", SEEDS)) for one in worlds]


def covered(found, truth):
    return sum(one["ci95"][0] <= truth <= one["ci95"][1] for one in found)


def test_of_equally_strong_attacks_there_is_no_winners_curse_and_the_interval_covers():
    worlds, found = many([TRUE] * ATTACKS)
    assert np.mean([one["mean"] for one in found]) == pytest.approx(TRUE, abs=0.002)
    assert np.mean([largest_of(one) for one in worlds]) > TRUE + 0.005, "the largest mean of the same worlds is lucky"
    assert covered(found, TRUE) >= 0.93 * WORLDS
    assert covered(found, TRUE) >= stats.binom.ppf(0.001, WORLDS, 0.95)


@pytest.mark.parametrize(("seeds", "seed_noise"), [(1, 0.0), (2, SEED_NOISE), (5, 0.0)])
def test_with_other_seeds_the_interval_covers_as_well(seeds, seed_noise):
    """One seed has an interval over its rows, which says nothing of other seeds: none of their noise is asked of it."""
    _, found = many([TRUE] * ATTACKS, seeds=seeds, seed_noise=seed_noise)
    limit = 0.002 if seeds == SEEDS else 4 * np.hypot(seed_noise, ROW_NOISE) / (seeds * WORLDS) ** 0.5
    assert np.mean([one["mean"] for one in found]) == pytest.approx(TRUE, abs=limit)
    assert covered(found, TRUE) >= stats.binom.ppf(0.001, WORLDS, 0.95)


def test_an_attack_that_is_stronger_is_found_and_not_flattered():
    _, found = many([TRUE + 0.05] + [TRUE] * (ATTACKS - 1))
    assert np.mean([one["mean"] for one in found]) == pytest.approx(TRUE + 0.05, abs=0.002)
    assert covered(found, TRUE + 0.05) >= stats.binom.ppf(0.001, WORLDS, 0.95)


@pytest.mark.sampled
@pytest.mark.parametrize("lead", [0.002, 0.005, 0.01, 0.02])
def test_a_small_lead_is_understated_by_less_than_itself_and_covered(lead):
    """Noise may choose another attack, which is weaker: what is reported then lies between the two strengths."""
    _, found = many([TRUE + lead] + [TRUE] * (ATTACKS - 1))
    noise = 4 * np.std([one["mean"] for one in found]) / WORLDS**0.5
    assert TRUE - noise <= np.mean([one["mean"] for one in found]) <= TRUE + lead + noise
    assert covered(found, TRUE + lead) >= 0.9 * WORLDS


def test_rows_that_chose_do_not_score():
    candidates = {("a", "test"): {0: block((0.9, 0.5))}, ("b", "train"): {0: block((0.6, 0.7))}}
    choice = choose(candidates)
    assert choice == Choice(on_first=("a", "test"), on_second=("b", "train"))
    found = score_across(candidates, choice)[0]
    assert found.metrics == pytest.approx({"auc": (0.5 + 0.6) / 2, "accuracy": (0.6 + 0.55) / 2})
    assert found.halves == (0.6, 0.5)
    assert found.overfit == pytest.approx((0.9 + 0.7) / 2 - 0.55)


def test_one_choice_is_scored_on_all_rows():
    candidates = {("a", "test"): {0: block((0.9, 0.8))}, ("b", "test"): {0: block((0.6, 0.7))}}
    assert score_across(candidates, choose(candidates)) == candidates["a", "test"]


def test_candidates_without_a_common_seed_are_those_with_most():
    candidates = {
        ("a", "test"): {0: block((0.6, 0.6)), 1: block((0.6, 0.6))},
        ("b", "test"): {0: block((0.7, 0.7)), 1: block((0.7, 0.7))},
        ("c", "test"): {2: block((0.9, 0.9))},
    }
    assert choose(candidates) == Choice(("b", "test"), ("b", "test"))


def test_of_equal_candidates_that_of_more_rows_is_chosen():
    few = msgspec.structs.replace(block([1.0, 0.94]), n=20)
    candidates = {("alone", "test"): {0: few}, ("direction", "train"): {0: block([1.0, 1.0])}}
    assert choose(candidates) == Choice(("direction", "train"), ("direction", "train"))
