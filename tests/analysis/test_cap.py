"""CAP against the tables that the FedHSSL paper printed; DCS against what its own code printed for known cells."""

import pytest

from vflsec.analysis.cap import c_dcs, calibrated_cap, cap, dcs, t_dcs

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
    assert calibrated_cap([0.8], [0.7], [0.6]) == pytest.approx(0.8 * 0.9)
    assert calibrated_cap([0.8], [0.5], [0.6]) == 0.8, "a leak below alone costs nothing, and earns nothing"


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
    assert t_dcs([0.6, 0.8]) == pytest.approx(0.7)
    assert c_dcs({"labels": 0.6, "features": 0.9}) == pytest.approx(0.75)
    assert c_dcs({"labels": 0.6, "features": 0.9}, {"labels": 2.0, "features": 1.0}) == pytest.approx(0.7)
