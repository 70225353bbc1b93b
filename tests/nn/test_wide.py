"""Layers of wide tables: sparse rows and dense ones give the same outputs and gradients."""

import copy

import pytest
import torch
from torch import nn

from vflsec.base.layout import EncodedColumn, Layout
from vflsec.base.sparse_rows import SparseRows
from vflsec.core.settings import ModelSpec
from vflsec.nn import wide
from vflsec.nn.encoders import MLPBottom, build_encoder
from vflsec.nn.wide import CategoryEmbedding, WideLinear, allow_sparse_gradients

LAYOUT = Layout(
    (
        EncodedColumn("city", "categorical", 0, 700),
        EncodedColumn("age", "numeric", 700, 1),
        EncodedColumn("shop", "categorical", 701, 400),
        EncodedColumn("pay", "numeric", 1101, 1),
    )
)


@pytest.fixture
def rows() -> SparseRows:
    rng = torch.Generator().manual_seed(2)
    places = torch.tensor([0, 700, 701, 1101]).repeat(16, 1)
    places[:, 0] += torch.randint(700, (16,), generator=rng)
    places[:, 2] += torch.randint(400, (16,), generator=rng)
    entries = torch.ones(16, 4)
    entries[:, [1, 3]] = torch.randn(16, 2, generator=rng)
    return SparseRows(entries, places, 1102)


def layers() -> dict:
    torch.manual_seed(0)
    return {
        "linear": WideLinear(1102, 5),
        "embedding": CategoryEmbedding(LAYOUT, 3, 0.1),
        "mlp": MLPBottom(1102, (8,), 2),
        "encoder": build_encoder(LAYOUT, ModelSpec(encoder="tabular", bottom=(8, 8), cut=3), 2),
    }


@pytest.mark.parametrize("name", layers())
@pytest.mark.parametrize("sparse", [False, True])
def test_sparse_rows_give_outputs_and_gradients_of_dense_ones(rows, name, sparse, monkeypatch):
    monkeypatch.setattr(wide, "MANY", 1)
    layer = layers()[name]
    other = copy.deepcopy(layer)
    expected = other(rows.dense())
    expected.square().sum().backward()
    if sparse:
        with allow_sparse_gradients(layer):
            found = layer(rows)
            found.square().sum().backward()
            assert any(p.grad.is_sparse for p in layer.parameters())
    else:
        found = layer(rows)
        found.square().sum().backward()
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(layer.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.to_dense(), theirs.grad, rtol=1e-4, atol=1e-5)


def test_small_tables_keep_dense_gradients(rows):
    layer = WideLinear(1102, 5)
    with allow_sparse_gradients(layer):
        layer(rows).sum().backward()
    assert not layer.weight.grad.is_sparse


def test_gradients_are_dense_again_outside(rows, monkeypatch):
    monkeypatch.setattr(wide, "MANY", 1)
    layer = CategoryEmbedding(LAYOUT, 3, 0.1)
    with pytest.raises(ZeroDivisionError), allow_sparse_gradients(layer):
        raise ZeroDivisionError
    layer(rows).sum().backward()
    assert not layer.weight.grad.is_sparse


def test_initial_weights_have_the_distribution_of_a_linear_layer():
    torch.manual_seed(0)
    ours, theirs = WideLinear(4000, 32), nn.Linear(4000, 32)
    assert float(ours.weight.detach().std()) == pytest.approx(float(theirs.weight.detach().std()), rel=0.02)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert float(a.detach().abs().max()) == pytest.approx(float(b.detach().abs().max()), rel=0.1)


def test_mixtures_of_categories_are_mixtures_of_embeddings(rows):
    layer, dense = CategoryEmbedding(LAYOUT, 3, 0.1), rows.dense()
    torch.testing.assert_close(
        layer(0.3 * dense[:4] + 0.7 * dense[4:8]), 0.3 * layer(rows[:4]) + 0.7 * layer(rows[4:8])
    )
