"""Encoding against numbers worked out by hand, and against scikit-learn."""

import numpy as np
import pandas as pd
import pytest
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from vflsec.base.errors import DataError
from vflsec.base.layout import EncodedColumn
from vflsec.data.credit_default import load
from vflsec.data.dataset import PartyTable, align
from vflsec.data.encode import ColumnEncoder


def encoder_of(fit: pd.DataFrame, *, categorical: tuple = (), signed_log: tuple = ()) -> ColumnEncoder:
    return ColumnEncoder(PartyTable("active", fit, frozenset(categorical), frozenset(signed_log)), fit)


def test_numbers_are_standardized_with_the_statistics_of_the_fitted_rows():
    encode = encoder_of(pd.DataFrame({"age": [20, 40]}))
    np.testing.assert_allclose(encode(pd.DataFrame({"age": [20, 40, 60]}))[:, 0], [-1, 1, 3])


def test_heavy_tails_pass_through_the_signed_log_first():
    e = np.e
    encode = encoder_of(pd.DataFrame({"money": [1 - e, e - 1]}), signed_log=("money",))  # become -1 and 1
    np.testing.assert_allclose(encode(pd.DataFrame({"money": [0, e**2 - 1, 1 - e**3]}))[:, 0], [0, 2, -3], atol=1e-6)


@pytest.mark.parametrize("constant", [0.1, 1e6, -3.0])
def test_a_column_constant_in_training_is_zero_everywhere(constant):
    encode = encoder_of(pd.DataFrame({"x": [constant] * 7}))
    assert encode(pd.DataFrame({"x": [constant, constant + 5]})).tolist() == [[0], [0]]


def test_categories_become_one_hot_with_a_first_slot_for_unseen_ones():
    encode = encoder_of(pd.DataFrame({"job": ["cook", "baker", "cook"]}), categorical=("job",))
    rows = encode(pd.DataFrame({"job": ["baker", "cook", "pilot"]}))
    assert rows.tolist() == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]


def test_a_category_that_only_the_dtype_knows_is_unseen():
    whole = pd.DataFrame({"job": pd.Categorical(["cook", "baker", "pilot"])})
    encode = ColumnEncoder(PartyTable("active", whole, frozenset({"job"})), whole.iloc[:2])
    assert encode.layout.width == 3
    assert encode(whole.iloc[2:]).tolist() == [[1, 0, 0]]


def test_columns_say_where_each_raw_column_went():
    frame = pd.DataFrame({"age": [1, 2, 3], "job": ["a", "b", "a"], "pay": [5, 6, 7]})
    encode = encoder_of(frame, categorical=("job",))
    assert encode.layout.columns == (
        EncodedColumn("age", "numeric", 0, 1),
        EncodedColumn("job", "categorical", 1, 3),
        EncodedColumn("pay", "numeric", 4, 1),
    )
    assert encode.layout.width == 5


@pytest.mark.parametrize("as_dtype", ["int64", "category", "object"])
def test_agrees_with_scikit_learn(as_dtype):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(5, 3, 400), "y": rng.integers(0, 9, 400), "c": rng.integers(0, 4, 400)})
    fit, rows = frame[:300], frame[300:]
    table = PartyTable("active", frame.astype({"c": as_dtype}), frozenset({"c"}))
    encoded = ColumnEncoder(table, table.frame[:300])(table.frame[300:])

    numbers = StandardScaler().fit(fit[["x", "y"]]).transform(rows[["x", "y"]])
    one_hot = OneHotEncoder(sparse_output=False).fit(fit[["c"]]).transform(rows[["c"]])
    np.testing.assert_allclose(encoded[:, :2], numbers, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(encoded[:, 2:], np.hstack([np.zeros((100, 1)), one_hot]))


def test_output_is_contiguous_float32_also_without_rows():
    frame = pd.DataFrame({"x": [1, 2], "c": ["a", "b"]})
    encode = encoder_of(frame, categorical=("c",))
    for rows, shape in ((frame, (2, 4)), (frame[:0], (0, 4))):
        encoded = encode(rows)
        assert encoded.shape == shape
        assert encoded.dtype == np.float32
        assert encoded.flags.c_contiguous


@pytest.mark.parametrize(
    ("frame", "roles", "message"),
    [
        ({"x": ["a"]}, {}, "active: .*'x', got (str|object)"),
        ({"x": [np.inf]}, {}, "active: .*finite numbers in 'x'"),
        ({"x": [np.nan]}, {}, "active: .*finite numbers in 'x'"),
        ({"x": ["a", None]}, {"categorical": {"x"}}, r"category .*'x'; .*'\(miss"),
        ({"x": [1]}, {"categorical": {"z"}}, r"own columns, got \['z'\]"),
        ({"x": [1]}, {"categorical": {"x"}, "signed_log": {"x"}}, "signed_log columns .*got .*x"),
    ],
)
def test_tables_that_cannot_be_encoded_are_refused(frame, roles, message):
    with pytest.raises(DataError, match=message):
        PartyTable("active", pd.DataFrame(frame), **{role: frozenset(names) for role, names in roles.items()})


def test_a_wide_table_is_sparse_with_one_entry_for_each_raw_column(monkeypatch):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": [1.0, np.nan, 3.0, 0.0] * 3, "job": rng.choice(list("abcdef"), 12), "zero": 0.0})
    table = PartyTable("active", frame, frozenset({"job"}), impute="mean")
    encode = ColumnEncoder(table, frame.iloc[:8])
    dense = encode(frame)
    monkeypatch.setattr("vflsec.data.encode.WIDE", 3)
    sparse = encode(frame)
    np.testing.assert_array_equal(sparse.toarray(), dense)
    assert sparse.dtype == np.float32
    assert np.diff(sparse.indptr).tolist() == [len(encode.layout.columns)] * 12
    assert encode(frame.iloc[:0]).shape == (0, encode.layout.width)


CLEAN = {
    "normal": lambda rng: rng.normal(50, 9, 1000),
    "lognormal": lambda rng: rng.lognormal(size=1000),
    "rare": lambda rng: (rng.random(1000) < 0.01) * 1.0,
    "mostly zero": lambda rng: (rng.random(1000) < 0.1) * rng.exponential(size=1000),
    "counts": lambda rng: rng.poisson(0.05, 1000) * 1.0,
}


@pytest.mark.parametrize("kind", CLEAN)
@pytest.mark.parametrize("wild", [1e4, -1e6, 1e10])
def test_one_percent_of_wild_rows_hardly_moves_the_others(kind, wild):
    values = CLEAN[kind](np.random.default_rng(0))
    clean = encoder_of(pd.DataFrame({"x": values}))(pd.DataFrame({"x": values}))[:, 0]
    np.testing.assert_allclose(clean, (values - values.mean()) / values.std(), rtol=1e-5, atol=1e-6)
    dirty = values.copy()
    dirty[:10] = wild
    encoded = encoder_of(pd.DataFrame({"x": dirty}))(pd.DataFrame({"x": dirty}))[:, 0]
    others = np.flatnonzero(values[10:] > 0) + 10
    np.testing.assert_allclose(encoded[others], clean[others], rtol=0.05, atol=0.1)
    assert 5 < np.abs(encoded[:10]).max() < 100


def test_values_in_heavy_tails_keep_their_order():
    values = np.sort(np.random.default_rng(0).pareto(1.5, 5000))
    encoded = encoder_of(pd.DataFrame({"x": values}))(pd.DataFrame({"x": values}))[:, 0]
    assert (np.diff(encoded) >= 0).all()
    assert 0 < (encoded == encoded.max()).sum() < 0.002 * len(values)


def test_pixels_have_no_bounds():
    frame = pd.DataFrame({"x": [0.0] * 997 + [1.0, 1.0, 255.0]})
    table = PartyTable("active", frame, image=(1, 1, 1))
    assert ColumnEncoder(table, frame)(frame)[-1, 0] == pytest.approx(31.6, abs=0.1)
    assert encoder_of(frame).describe()["x"]["high"] == 10.0  # as a number


def test_a_bundled_dataset_has_no_value_beyond_its_bounds():
    dataset = load()
    common = align(dataset.parties)
    for table in dataset.parties:
        for name, scale in ColumnEncoder(table, table.frame.loc[common]).describe().items():
            if "low" in scale and name not in table.signed_log:
                assert scale["low"] <= table.frame[name].min() <= table.frame[name].max() <= scale["high"], name
