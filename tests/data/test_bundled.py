"""The bundled datasets are what their cards say, split as their sources do, and of use to a simple model."""

import hashlib
import subprocess
import sys
import tomllib

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from vflsec.base.errors import DataError, UsageError
from vflsec.data import CATALOGUE, bundle, census_income, credit_default, digits, multiple_features
from vflsec.data.dataset import Card, VerticalDataset
from vflsec.data.partition import DataSpec, split_dataset

MODULES = {
    "credit-default": credit_default,
    "census-income": census_income,
    "multiple-features": multiple_features,
    "digits": digits,
}


@pytest.mark.parametrize("name", MODULES)
def test_the_card_is_complete_and_true(name: str):
    card, dataset = bundle.get_card(name), MODULES[name].load()
    assert set(tomllib.loads((bundle.FOLDER / f"{name}.toml").read_text("utf-8"))) == set(Card.__dataclass_fields__)
    assert card.license == "CC BY 4.0"
    assert "ersonal data" in card.notes or "no names" in card.notes
    assert len(dataset.labels) == card.rows
    assert dataset.card == card
    assert CATALOGUE[name] == f"{MODULES[name].__name__}:load"


@pytest.mark.parametrize("name", [name for name in MODULES if name != "digits"])
def test_the_sha256_on_the_card_is_that_of_the_file(name: str):
    content = (bundle.FOLDER / f"{name}.npz").read_bytes()
    assert hashlib.sha256(content).hexdigest() == bundle.get_card(name).sha256
    assert len(content) <= 4_000_000


def test_a_changed_or_missing_file_is_refused(tmp_path, monkeypatch):
    card = bundle.get_card("credit-default")
    content = (bundle.FOLDER / "credit-default.npz").read_bytes()
    monkeypatch.setattr(bundle, "FOLDER", tmp_path)
    monkeypatch.setattr(bundle, "get_card", lambda *_: card)
    with pytest.raises(DataError, match=r"credit-default\.npz, .*no such file"):
        bundle.read_arrays("credit-default")
    (tmp_path / "credit-default.npz").write_bytes(content[:-1] + b"x")
    with pytest.raises(DataError, match=f"{card.sha256}, got .*Reinstall"):
        bundle.read_arrays("credit-default")


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODULES)
def test_every_party_has_its_own_row_order_and_the_same_rows(name: str):
    tables = MODULES[name].load().parties
    orders = [table.frame.index for table in tables]
    assert not orders[0].equals(orders[1])
    assert orders[0].sort_values().equals(orders[1].sort_values())
    assert not any(order.is_monotonic_increasing for order in orders)
    again = MODULES[name].load().parties
    assert all(table.frame.equals(other.frame) for table, other in zip(tables, again, strict=True))


@pytest.mark.parametrize(("name", "module"), [(n, m) for n, m in MODULES.items() if m in (multiple_features, digits)])
def test_ids_tell_nothing_of_the_class_where_the_source_sorts_its_rows(name, module):
    labels = module.load().labels.sort_index().to_numpy()
    same_as_next = (labels[1:] == labels[:-1]).mean()
    assert 0.07 < same_as_next < 0.13  # by chance 0.1; sorted it would be 1, and 0 where the digits take turns


def test_credit_default_class_share_and_codes():
    dataset = credit_default.load()
    assert dataset.labels.mean() == pytest.approx(0.2212, abs=1e-9)
    assert (dataset.classes, dataset.metric) == (("paid", "default"), "auc")
    host = dataset.parties[1]
    assert host.categorical == {"SEX", "EDUCATION", "MARRIAGE"}
    assert sorted(dataset.labels.index) == list(range(1, 30_001))
    # UCI's published counts of the raw codes
    assert host.frame["SEX"].value_counts().to_dict() == {2: 18112, 1: 11888}
    assert host.frame["EDUCATION"].value_counts().to_dict() == {
        2: 14030,
        1: 10585,
        3: 4917,
        5: 280,
        4: 123,
        6: 51,
        0: 14,
    }
    assert host.frame["MARRIAGE"].value_counts().to_dict() == {2: 15964, 1: 13659, 3: 323, 0: 54}


# Rows of FATE's default_credit_hetero_guest.csv and _host.csv, which are z-scores (population std) by the same id.
FATE_GUEST = {
    25115: "-1.486041 -0.695628 -0.682385 -0.674713 -0.675078 -0.672187 -0.668576 -0.281506 -0.256946 -0.296744 "
    "-0.307999 -0.314071 -0.293326",
    15473: "0.253137 -0.643723 1.413661 0.138401 0.530734 0.641564 0.589780 8.732378 0.203808 1.123115 -0.114393 "
    "-0.116991 -0.011447",
}
FATE_HOST = {
    25115: "1.483795 -1.234323 -1.079457 -1.057295 2.442516 -0.874991 -0.723570 1.809921 1.899436 -1.530046",
    19498: "0.096463 0.810161 3.981685 0.858557 -0.161156 0.904712 -0.723570 -0.696663 -1.521944 -1.530046",
}


@pytest.mark.parametrize(("party", "rows"), [(0, FATE_GUEST), (1, FATE_HOST)])
def test_credit_default_agrees_with_the_files_of_fate_in_order_and_value(party, rows):
    dataset = credit_default.load()
    frame = dataset.parties[party].frame.astype(float)
    z = (frame - frame.mean()) / frame.std(ddof=0)
    for row, values in rows.items():
        np.testing.assert_allclose(z.loc[row], [float(value) for value in values.split()], atol=1e-6)
    assert dataset.labels[25115] == 1
    assert dataset.labels[15473] == 0


def test_credit_default_at_a_bank_and_a_bureau():
    bank, bureau = credit_default.load(split="bureau").parties
    assert list(bank.frame.columns)[:6] == ["LIMIT_BAL", "SEX", "EDUCATION", "MARRIAGE", "AGE", "BILL_AMT1"]
    assert [len(party.frame.columns) for party in (bank, bureau)] == [11, 12]
    assert set(bureau.signed_log) == {f"PAY_AMT{k}" for k in range(1, 7)}
    assert {"PAY_0", "PAY_2", "PAY_6"} <= set(bureau.frame.columns) - bureau.signed_log


def test_census_income_rows_groups_and_official_test_set():
    dataset = census_income.load(parties=6)
    assert dataset.test_ids is not None
    assert (len(dataset.labels), len(dataset.test_ids)) == (299_285, 99_762)
    assert [len(party.frame.columns) for party in dataset.parties] == [5, 6, 6, 4, 7, 5]
    for labels in (dataset.labels.loc[dataset.test_ids], dataset.labels.drop(dataset.test_ids)):
        assert labels.mean() == pytest.approx(0.062, abs=1e-3)
    # The first person in UCI's training file
    first = pd.concat([party.frame.loc[[0]] for party in dataset.parties], axis=1).iloc[0]
    expected = {
        "age": 73,
        "gender": "Female",
        "education": "High school graduate",
        "tax_filer_stat": "Nonfiler",
        "mig_chg_msa": "?",
        "country_self": "United-States",
        "own_or_self": 0,
    }
    assert first[list(expected)].to_dict() == expected


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("parties", "widths"), [(2, [5, 28]), (3, [5, 6, 22]), (4, [5, 6, 6, 16]), (5, [5, 6, 6, 4, 12])]
)
def test_census_income_with_fewer_parties_merges_the_last_groups(parties, widths):
    assert [len(party.frame.columns) for party in census_income.load(parties=parties).parties] == widths


def test_census_income_of_adults():
    dataset = census_income.load(adults_only=True)
    assert dataset.test_ids is not None
    assert len(dataset.labels) == 224_036
    assert dataset.labels.mean() == pytest.approx(0.083, abs=5e-4)
    assert dataset.parties[0].frame["age"].min() == 16
    assert dataset.test_ids.isin(dataset.labels.index).all()


VIEWS = {"fourier": 76, "profile_correlations": 216, "karhunen_loeve": 64, "pixel_averages": 240}


@pytest.mark.sampled
@pytest.mark.parametrize("parties", range(2, 7))
def test_multiple_features_deals_out_its_views(parties):
    dataset = multiple_features.load(parties=parties)
    widths = [len(party.frame.columns) for party in dataset.parties]
    assert widths == ([53, *VIEWS.values()][:parties] if parties < 6 else [47, *VIEWS.values(), 6])
    assert dataset.labels.value_counts().to_dict() == dict.fromkeys(range(10), 200)
    assert dataset.metric == "accuracy"


@pytest.mark.parametrize("parties", [2, 4])
def test_digits_put_together_again_are_the_images(parties):
    dataset = digits.load(parties=parties)
    together = pd.concat([party.frame.sort_index() for party in dataset.parties], axis=1)
    pixels, labels = load_digits(return_X_y=True)
    order = bundle.shuffle_ids("digits", len(labels))
    names = [f"pixel_{row}_{column}" for row in range(8) for column in range(8)]
    np.testing.assert_array_equal(together.loc[order, names], pixels)
    np.testing.assert_array_equal(dataset.labels.loc[order], labels)
    assert "pixel_7_3" in dataset.parties[0 if parties == 2 else 2].frame


@pytest.mark.parametrize(
    ("parties", "seen"),
    [
        (2, [np.s_[:, :, :4], np.s_[:, :, 4:]]),
        (4, [np.s_[:, :4, :4], np.s_[:, :4, 4:], np.s_[:, 4:, :4], np.s_[:, 4:, 4:]]),
    ],
)
def test_digits_of_each_party_are_an_image_row_by_row(parties, seen):
    images = load_digits().images
    ids = bundle.shuffle_ids("digits", len(images))
    for table, part in zip(digits.load(parties=parties).parties, seen, strict=True):
        expected = images[part]
        assert table.image == (1, *expected.shape[1:])
        np.testing.assert_array_equal(table.frame.loc[ids].to_numpy().reshape(-1, *table.image)[:, 0], expected)


@pytest.mark.parametrize("module", [credit_default, census_income, multiple_features])
def test_tables_that_are_no_images_say_so(module):
    assert all(table.image is None for table in module.load().parties)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (credit_default, {"split": "bureaux"}, "'bureaux'. Did you mean bureau"),
        (census_income, {"parties": 7}, "unknown parties '7'. Known: 2, 3, 4, 5, 6"),
        (multiple_features, {"parties": 1}, "unknown parties '1'. Known: 2, 3, 4, 5, 6"),
        (digits, {"parties": 3}, "unknown parties '3'. Known: 2, 4"),
    ],
)
def test_unknown_options_are_refused_with_the_known_ones(module, options, message):
    with pytest.raises(UsageError, match=message):
        module.load(**options)


def logistic_scores(dataset: VerticalDataset, spec: DataSpec, parties: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return test scores of a model trained on the columns of some parties, and the test labels."""
    split = split_dataset(dataset, spec, 0)
    train, test = (np.hstack([split.parties[name].features[rows] for name in parties]) for rows in ("train", "test"))
    model = LogisticRegression(max_iter=300).fit(train, split.labels["train"])
    return model.predict_proba(test), split.labels["test"]


def test_joining_pays_on_credit_default():
    dataset, spec = credit_default.load(), DataSpec()
    together, alone = (
        roc_auc_score(y, scores[:, 1])
        for scores, y in (logistic_scores(dataset, spec, names) for names in (["active", "passive_1"], ["active"]))
    )
    assert together >= 0.74
    assert alone <= together - 0.02


@pytest.mark.statistical
def test_the_active_columns_of_census_income_are_of_use():
    scores, labels = logistic_scores(census_income.load(), DataSpec(n_labeled=20_000), ["active"])
    assert roc_auc_score(labels, scores[:, 1]) == pytest.approx(0.82, abs=0.03)


@pytest.mark.statistical
def test_two_weak_views_of_multiple_features_help_each_other():
    dataset = multiple_features.load()
    together, alone, passive = (
        (scores.argmax(axis=1) == labels).mean()
        for scores, labels in (
            logistic_scores(dataset, DataSpec(), names)
            for names in (["active", "passive_1"], ["active"], ["passive_1"])
        )
    )
    assert together >= 0.88
    assert max(alone, passive) <= together - 0.03


def test_the_catalogue_is_light():
    heavy = "{'torch', 'numpy', 'pandas', 'sklearn'}"
    code = f"import sys, vflsec.data; sys.exit(str({heavy} & set(sys.modules)) if {heavy} & set(sys.modules) else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
