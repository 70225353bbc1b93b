"""Sparse rows against the same rows as a dense tensor."""

import copy

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from torch import nn

from vflsec.base import sparse_rows
from vflsec.base.errors import DataError
from vflsec.base.sparse_rows import SparseRows, to_matrix, to_tensor
from vflsec.nn.wide import WideLinear


@pytest.fixture
def rows() -> SparseRows:
    rng = torch.Generator().manual_seed(3)
    places = torch.stack([torch.randperm(9, generator=rng)[:3] for _ in range(6)])
    return SparseRows(torch.randn(6, 3, generator=rng), places, 9)


OPERATIONS = {
    "index": lambda x: x[torch.tensor([4, 0, 4])],
    "mask": lambda x: x[torch.tensor([True, False, True, True, False, False])],
    "slice": lambda x: x[1:5:2],
    "last": lambda x: x[-2:],
    "one row": lambda x: x[2],
    "columns": lambda x: x[:, 2:5],
    "some columns": lambda x: x[:, torch.tensor([1, 1, 8])],
    "rows and columns": lambda x: x[torch.tensor([0, 1]), torch.tensor([3, 4])],
    "split": lambda x: torch.cat([part * 2 for part in torch.split(x, 4)]),
    "columns split": lambda x: torch.cat([part.exp() for part in torch.split(x, [4, 5], dim=1)], dim=1),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "double": lambda x: x.double(),
    "to": lambda x: x.to("cpu"),
    "rows joined": lambda x: torch.cat([x, x[:2]]),
    "columns joined": lambda x: torch.cat([x, torch.ones(6, 2), x], dim=1),
    "columns joined before": lambda x: torch.cat([torch.ones(6, 2), x], dim=1),
    "joined by the last dimension": lambda x: torch.cat([x, x], dim=-1),
    "scaled": lambda x: torch.addmm(torch.ones(2), x, torch.ones(9, 2), beta=0.5, alpha=2.0),
    "into another": lambda x: torch.mm(x, torch.ones(9, 2), out=torch.empty(6, 2)),
    "list": lambda x: torch.tensor(x.tolist()),
    "joined with dense rows": lambda x: torch.cat([x, torch.ones(1, 9)]),
    "product": lambda x: x @ torch.arange(18.0).view(9, 2),
    "product from the left": lambda x: torch.arange(12.0).view(2, 6) @ x,
    "linear": lambda x: nn.functional.linear(x, torch.arange(18.0).view(2, 9), torch.ones(2)),
    "sum": lambda x: (x + 1).sum(dim=0),
    "mean": lambda x: x.mean(),
    "argmax": lambda x: x.argmax(dim=1),
    "where": lambda x: torch.where(x > 0, x, -1.0),
    "gather": lambda x: x.gather(1, torch.zeros(6, 1, dtype=torch.long)),
    "extremes": lambda x: torch.stack([x.amin(dim=0), x.amax(dim=0)]),
    "normalize": lambda x: nn.functional.normalize(x, dim=1),
    "distances": lambda x: torch.cdist(x, x),
    "like": lambda x: torch.zeros_like(x) + x,
    "flat": lambda x: x.flatten(1),
    "array": lambda x: torch.from_numpy(x.cpu().numpy()),
    "asarray": lambda x: torch.from_numpy(np.asarray(x)),
    "copies": copy.deepcopy,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_what_it_gives_on_dense_rows(rows, name):
    found, expected = OPERATIONS[name](rows), OPERATIONS[name](rows.dense())
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.dense() if isinstance(found, SparseRows) else found, expected)


@pytest.mark.parametrize("name", ["index", "mask", "slice", "clone", "detach", "rows joined", "columns joined"])
def test_rows_stay_sparse(rows, name):
    assert isinstance(OPERATIONS[name](rows), SparseRows)


def test_a_batch_is_a_sequence_of_its_rows(rows):
    assert len(rows) == 6
    assert rows.shape == (6, 9)
    assert "6 x 9" in repr(rows)
    assert not rows.requires_grad


CHANGES = [
    lambda x: x.zero_(),
    lambda x: x.add_(1),
    lambda x: x.__setitem__(0, 1.0),
    lambda x: torch._foreach_mul_([x], 0.0),
    lambda x: torch.mul(x.dense(), 0, out=x),
    lambda x: setattr(x, "data", x.dense()),
]


@pytest.mark.parametrize("change", CHANGES)
def test_rows_cannot_be_changed_in_place(rows, change):
    before = rows.dense()
    with pytest.raises(TypeError, match="dense"):
        change(rows)
    torch.testing.assert_close(rows.dense(), before)


def test_a_clone_shares_nothing(rows):
    clone = rows.clone()
    clone.entries.zero_()
    assert rows.entries.abs().min() > 0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x @ torch.ones(12, 2),
        lambda x: x @ torch.ones(9, 2).double(),
        lambda x: torch.cat([x, SparseRows(x.entries, x.places, 12)]),
        WideLinear(12, 2),
    ],
)
def test_shapes_that_do_not_fit_are_refused_as_of_dense_rows(rows, wrong):
    with pytest.raises(RuntimeError):
        wrong(rows)


def test_the_gradient_of_the_rows_is_that_of_dense_rows(rows):
    layer, found = WideLinear(9, 2), []
    for x in (rows.clone(), rows.dense()):
        x.requires_grad_()
        found.append(torch.autograd.grad(layer(x).square().sum(), x)[0])
    torch.testing.assert_close(*found)


def test_the_gradient_of_a_layer_is_that_of_dense_rows(rows):
    layer = nn.Linear(9, 4)
    gradients = []
    for x in (rows, rows.dense()):
        layer.zero_grad()
        layer(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in layer.parameters()])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)


def test_no_dense_copy_is_larger_than_the_limit(rows, monkeypatch):
    monkeypatch.setattr(sparse_rows, "MAX_DENSE_BYTES", 6 * 9 * 4 - 1)
    with pytest.raises(DataError, match="6 rows of 9 encoded columns"):
        rows + 1
    monkeypatch.setattr(sparse_rows, "MAX_DENSE_BYTES", 6 * 9 * 4)
    assert (rows + 1).shape == (6, 9)


def test_matrices_of_scipy_become_tensors_and_back():
    dense = np.array([[0, 2, 0, 0], [0, 0, 0, 3], [5, 0, 0, 0]], dtype=np.float32)
    stored = csr_array((np.array([2, 0, 0, 3, 5, 0], dtype=np.float32), [1, 0, 0, 3, 0, 2], [0, 2, 4, 6]), (3, 4))
    rows = to_tensor(stored)
    assert rows.places.shape == (3, 2)  # zeros that are stored are entries
    np.testing.assert_array_equal(rows.numpy(), dense)
    np.testing.assert_array_equal(to_matrix(rows).toarray(), dense)
    np.testing.assert_array_equal(to_matrix(to_tensor(dense)), dense)
    empty = to_tensor(csr_array((0, 4), dtype=np.float32))
    assert empty.dense().shape == (0, 4)
    assert to_matrix(empty).shape == (0, 4)
