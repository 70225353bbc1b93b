"""How many rows of a table of headlines are said to leak more than is known alone, where none does."""

import numpy as np
import pytest
from msgspec.structs import replace

from tests.report.test_columns import POINT
from vflsec.report.columns import compare_with_alone
from vflsec.results.analysis.intervals import ANY, DIFFERENCE, SeedValue, compute_p, make_interval
from vflsec.results.analysis.summary import correct_advantages

SEEDS = 3
DEFENSES = ("iso", "marvell", "label-dp", "ppdl")


def made_headline(defense, strength, by_seed):
    """A headline whose advantage has these values."""
    differences = [SeedValue(value) for value in by_seed]
    interval = make_interval(differences, len(differences), DIFFERENCE)
    shown = {"advantage": interval["mean"], "advantage_ci95": interval["ci95"]}
    leak = replace(POINT.leak, **shown, p=compute_p(differences, len(differences), DIFFERENCE))
    return replace(POINT, attack="worst", defense=defense, strength=strength, leak=leak)


def test_at_most_a_twentieth_of_tables_without_any_advantage_says_that_there_is_some():
    """Of four defenses at three strengths, and one row without; uncorrected, a fifth of such tables did."""
    rng, tables = np.random.default_rng(0), 300
    corrected = uncorrected = 0
    for _ in range(tables):
        clean = rng.normal(0, 0.02, SEEDS)
        rows = [(name, s, clean if not s else rng.normal(0, 0.02, SEEDS)) for name in DEFENSES for s in (0, 1, 5, 25)]
        headlines = [made_headline(*row) for row in rows]
        uncorrected += "yes" in map(compare_with_alone, headlines)
        corrected += "yes" in map(compare_with_alone, correct_advantages(headlines))
    assert uncorrected / tables > 0.2
    assert corrected / tables < 0.05 + 2 * (0.05 * 0.95 / tables) ** 0.5


def test_a_row_counts_once_and_the_undefended_one_by_itself():
    p_values = {("iso", 0.0): 0.04, ("iso", 1.0): 0.01, ("mid", 0.0): 0.04, ("mid", 1.0): 0.04, ("mid", 2.0): 0.03}
    made = [
        replace(POINT, attack="worst", defense=name, strength=s, leak=replace(POINT.leak, p=p))
        for (name, s), p in p_values.items()
    ]
    others = [replace(point, target="features", leak=replace(point.leak, p=None)) for point in made]
    headlines = correct_advantages([*made, *others])
    assert [point.leak.p_holm for point in headlines] == [0.04, 0.03, 0.04, pytest.approx(0.06), 0.06] + [None] * 5
    answers = ["yes", "yes", "yes", "yes, before correction", "yes, before correction"] + ["yes"] * 5
    assert list(map(compare_with_alone, headlines)) == answers


@pytest.mark.parametrize("bounds", [DIFFERENCE, ANY])
def test_p_is_below_a_twentieth_where_the_interval_does_not_hold_0(bounds):
    rng, outside = np.random.default_rng(1), 0
    for _ in range(300):
        differences = [SeedValue(value) for value in rng.normal(rng.uniform(-0.9, 0.9), rng.uniform(0.01, 0.5), SEEDS)]
        if bounds == DIFFERENCE and abs(np.mean([d.value for d in differences])) >= 1:
            continue
        low, high = make_interval(differences, SEEDS, bounds)["ci95"]
        assert (compute_p(differences, SEEDS, bounds) < 0.05) == (low > 0 or high < 0)
        outside += low > 0 or high < 0
    assert 30 < outside < 270


def test_p_of_no_interval_and_of_equal_seeds():
    assert compute_p([], 3, ANY) is compute_p([SeedValue(0.1)], 3, ANY) is compute_p([SeedValue(0.1)], 1, ANY) is None
    assert compute_p([SeedValue(0.1)] * 3, 3, DIFFERENCE) == 0
    assert compute_p([SeedValue(0.0)] * 3, 3, DIFFERENCE) == 1
