"""CAP against the tables that the FedHSSL paper printed; DCS against what its own code printed for known cells."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vflsec.results.analysis.results import Cap
from vflsec.results.analysis.scores import (
    average_dcs,
    cap,
    compare_area,
    compute_calibrated_cap,
    dcs,
    hypervolume,
    score_privacy,
)

# FedHSSL (arXiv 2208.08934), table XI: (label recovery accuracy A, main metric) at lambda_f = 1, 5, 25.
TABLE_XI = {
    ("NUSWIDE", "FedLocalSimSiam"): [(0.471, 0.494), (0.465, 0.487), (0.449, 0.458)],
    ("NUSWIDE", "FedHSSL 20 %"): [(0.471, 0.538), (0.449, 0.519), (0.443, 0.503)],
    ("NUSWIDE", "FedHSSL 40 %"): [(0.474, 0.533), (0.471, 0.528), (0.458, 0.503)],
    ("Avazu", "FedLocalSimSiam"): [(0.548, 0.582), (0.546, 0.577), (0.545, 0.576)],
    ("Avazu", "FedHSSL 20 %"): [(0.568, 0.614), (0.565, 0.602), (0.563, 0.594)],
    ("Avazu", "FedHSSL 40 %"): [(0.571, 0.616), (0.566, 0.610), (0.561, 0.603)],
    ("BHI", "FedLocalSimSiam"): [(0.710, 0.756), (0.699, 0.732), (0.685, 0.710)],
    ("BHI", "FedHSSL 20 %"): [(0.692, 0.783), (0.672, 0.764), (0.674, 0.758)],
    ("BHI", "FedHSSL 40 %"): [(0.686, 0.788), (0.687, 0.773), (0.682, 0.764)],
    ("ModelNet", "FedLocalSimSiam"): [(0.438, 0.597), (0.415, 0.573), (0.408, 0.564)],
    ("ModelNet", "FedHSSL 20 %"): [(0.451, 0.652), (0.447, 0.613), (0.415, 0.594)],
    ("ModelNet", "FedHSSL 40 %"): [(0.466, 0.658), (0.448, 0.631), (0.419, 0.598)],
}
# The same paper, table XII; its first three columns are table VII. FedSplitNN has no cells in table XI.
TABLE_XII = {
    "NUSWIDE": {"FedLocalSimSiam": 0.258, "FedHSSL 20 %": 0.284, "FedHSSL 40 %": 0.277},
    "Avazu": {"FedLocalSimSiam": 0.262, "FedHSSL 20 %": 0.262, "FedHSSL 40 %": 0.264},
    "BHI": {"FedLocalSimSiam": 0.221, "FedHSSL 20 %": 0.246, "FedHSSL 40 %": 0.244},
    "ModelNet": {"FedLocalSimSiam": 0.334, "FedHSSL 20 %": 0.348, "FedHSSL 40 %": 0.349},
}


@pytest.mark.parametrize(("dataset", "method"), TABLE_XI)
def test_cap_reproduces_the_printed_tables(dataset, method):
    leak, utility = zip(*TABLE_XI[dataset, method], strict=True)
    # All printed numbers are rounded to three decimals: the cells' rounding moves CAP by at most this much.
    inputs = 0.0005 * (sum(utility) + sum(1 - a for a in leak)) / 3
    assert cap(utility, leak) == pytest.approx(TABLE_XII[dataset][method], abs=0.0005 + inputs)


def test_a_destroyed_model_scores_a_quarter_on_cap():
    assert cap([0.5], [0.5]) == 0.25


def test_calibrated_cap_charges_only_what_exceeds_the_adversary_alone():
    assert compute_calibrated_cap([0.8], [0.7], [0.6]) == pytest.approx(0.8 * 0.9)
    assert compute_calibrated_cap([0.8], [0.5], [0.6]) == 0.8, "a leak below alone costs nothing, and earns nothing"


def test_cap_refuses_curves_of_different_length():
    with pytest.raises(ValueError, match="argument"):
        cap([0.5, 0.6], [0.5])


@pytest.mark.parametrize(
    ("utility", "leak", "printed"),
    [(0.9778, 0.7139, 0.665), (0.9667, 0.6917, 0.672), (0.9361, 0.4361, 0.764), (0.6361, 0.1750, 0.787)],
)
def test_dcs_equals_what_vflair_printed_for_known_cells(utility, leak, printed):
    assert dcs(leak, utility, ideal_utility=0.9778) == pytest.approx(printed, abs=0.001)


def test_dcs_is_one_sided():
    assert dcs(0.1, 0.99, ideal_utility=0.9, ideal_leak=0.2) == 1.0


def test_t_and_c_dcs_are_means():
    scores = (("labels", "mc", 0.6), ("labels", "norm", 0.8), ("features", "inversion", 0.9), ("labels", "worst", 0.1))
    (means,) = average_dcs([Cap(method="m", defense="d", target=t, attack=a, dcs=score, n=1) for t, a, score in scores])
    assert means["t_dcs"] == pytest.approx({"labels": 0.7, "features": 0.9})
    assert means["c_dcs"] == pytest.approx(0.8)


POINTS = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6)


def test_the_hypervolume_of_worked_examples():
    assert hypervolume([0.5], [0.4]) == 0.2, "a rectangle"
    assert hypervolume([0.5, 0.25], [0.4, 0.8]) == pytest.approx(0.25 * 0.8 + 0.25 * 0.4), "a staircase"
    assert hypervolume([1.0, 0.3], [1.0, 0.9]) == 1.0, "the ideal"
    assert hypervolume([0.0, 0.0], [1.0, 0.5]) == 0.0, "destroyed models, however private"


@given(POINTS)
def test_the_hypervolume_is_the_share_of_a_grid_that_some_point_dominates(points):
    gain, kept = zip(*points, strict=True)
    x, y = np.meshgrid(*2 * [(np.arange(200) + 0.5) / 200])
    covered = np.any([(x < g) & (y < k) for g, k in points], axis=0).mean()
    assert hypervolume(gain, kept) == pytest.approx(covered, abs=0.011)


@given(POINTS, st.floats(0, 1), st.floats(0, 1))
def test_a_dominated_point_adds_nothing_and_a_better_one_never_takes_away(points, less_gain, less_kept):
    gain, kept = map(list, zip(*points, strict=True))
    own = hypervolume(gain, kept)
    assert hypervolume([*gain, gain[0] * less_gain], [*kept, kept[0] * less_kept]) == pytest.approx(own)
    assert hypervolume([gain[0] + (1 - gain[0]) * less_gain, *gain[1:]], kept) >= own - 1e-12
    assert hypervolume(gain, [kept[0] + (1 - kept[0]) * less_kept, *kept[1:]]) >= own - 1e-12


def test_privacy_is_kept_from_alone_to_everything():
    assert [score_privacy(leak, 0.6) for leak in (0.5, 0.6, 0.8, 1.0)] == pytest.approx([1.0, 1.0, 0.5, 0.0])
    assert score_privacy(1.0, 1.0) == 1.0, "there was nothing left to infer"
    assert score_privacy(0.0, -0.5) == 1.0, "an R2 below 0"


@pytest.mark.long
def test_pseudo_values_have_the_deviation_of_a_ratio_of_means():
    rng = np.random.default_rng(0)
    whole = rng.normal(1.0, 0.2, (2000, 20, 1))
    gains, kept = np.concatenate([whole, 0.7 * whole], axis=2), rng.uniform(0.4, 0.6, (2000, 20, 1))
    found = [compare_area(*one) for one in zip(gains, kept, strict=True)]
    values = np.array([one.value for one in found])
    assert values == pytest.approx(0.7 * kept.mean(axis=(1, 2)))
    stated = np.sqrt(np.mean([np.var(own, ddof=1) / 20 for _, own, _ in found]))
    assert stated == pytest.approx(np.std(values), rel=0.05)


def test_a_model_that_gains_nothing_but_noise_has_no_hypervolume():
    rng = np.random.default_rng(0)
    found = []
    for _ in range(400):
        joining, dead = rng.normal(0.05, 0.01, 5), rng.normal(0.0, 0.01, (4, 5))
        found.append(compare_area(np.stack([joining, *dead]).T, np.ones((5, 4))).value or 0.0)
    assert np.mean(np.array(found) > 0) < 0.15, "four strengths, of which each is taken for a gain once in forty times"
    assert np.mean(found) < 0.02
    assert compare_area([[0.0, 0.1]] * 3, [[1.0]] * 3) == (0.0, [0.0] * 3, 0.0), "where joining gains nothing"
    assert compare_area([[0.2, 0.1]], [[0.5]]) == (0.25, [0.25], 0.25)


def test_two_seeds_that_tell_nothing_from_everything_give_no_hypervolume():
    """With two seeds a t interval is 18 times as wide as one of five with the same deviation."""
    gains, kept = [[0.10, 0.09], [0.08, 0.07], [0.09, 0.08], [0.11, 0.10], [0.09, 0.08]], [[1.0]] * 5
    assert compare_area(gains, kept).value == pytest.approx(0.42 / 0.47)
    assert compare_area(gains[:2], kept[:2]) == (None, [], 1.0)


def test_gains_that_are_not_shown_widen_the_interval():
    """Of two strengths one gains .06 in every seed; the other may gain from nothing to everything."""
    gains = [[0.1, 0.06, 0.2], [0.1, 0.06, -0.1], [0.1, 0.06, 0.1]]
    found = compare_area(gains, [[0.5, 0.9]] * 3)
    assert found.value == pytest.approx(0.6 * 0.5)
    assert found.most == pytest.approx(0.9), "all that joining gains, at the privacy of this strength"


def test_a_gain_that_is_seen_to_be_none_is_none():
    gains = [[0.1, 0.001], [0.1, -0.001], [0.1, 0.0]]
    value, _, most = compare_area(gains, [[1.0]] * 3)
    assert value == 0.0
    assert most == pytest.approx(4.303 * 0.001 / np.sqrt(3) / 0.1, abs=1e-4)


def test_the_hypervolume_can_be_written_as_json():
    whole, by_seed, most = compare_area([[0.2, 0.1], [0.3, 0.15], [0.25, 0.1]], [[0.5], [0.6], [0.7]])
    assert {type(value) for value in (whole, *by_seed, most)} == {float}
