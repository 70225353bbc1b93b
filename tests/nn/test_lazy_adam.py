"""Adam with sparse gradients against torch's two optimizers."""

import copy

import pytest
import torch
from torch import nn

from vflsec.nn.wide import LazyAdam


def losses(sparse: bool, optimizers, steps: int = 30):
    torch.manual_seed(0)
    table, layer = nn.Embedding(50, 4, sparse=sparse), nn.Linear(4, 2)
    used = optimizers(table, layer)
    rng, found = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        rows = torch.randint(50, (8,), generator=rng)  # some of them twice
        for optimizer in used:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(layer(table(rows)), rows % 2)
        loss.backward()
        for optimizer in used:
            optimizer.step()
        found.append(float(loss.detach()))
    return torch.tensor(found), table.weight.detach()


def test_sparse_gradients_are_those_of_sparse_adam():
    ours = losses(True, lambda table, layer: [LazyAdam([*table.parameters(), *layer.parameters()], 0.05, fused=True)])
    torchs = losses(
        True,
        lambda table, layer: [
            torch.optim.SparseAdam(table.parameters(), 0.05),
            torch.optim.Adam(layer.parameters(), 0.05),
        ],
    )
    for found, expected in zip(ours, torchs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)  # theirs scales eps


def test_dense_gradients_are_those_of_adam_bit_for_bit():
    def of(kind):
        return lambda table, layer: [kind([*table.parameters(), *layer.parameters()], 0.05, fused=True)]

    for found, expected in zip(losses(False, of(LazyAdam)), losses(False, of(torch.optim.Adam)), strict=True):
        assert torch.equal(found, expected)


def test_rows_without_a_gradient_do_not_move():
    table = nn.Embedding(6, 3, sparse=True)
    optimizer, before = LazyAdam(table.parameters(), 0.1, weight_decay=0.5, fused=True), table.weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        table(torch.tensor([1, 4, 4])).sum().backward()
        optimizer.step()
    moved = (table.weight.detach() != before).any(dim=1)
    assert moved.tolist() == [False, True, False, False, True, False]


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_one_step_on_all_rows_is_one_of_adam(decay):
    dense = nn.Embedding(5, 3)
    sparse = copy.deepcopy(dense)
    sparse.sparse = True
    for table, kind in ((dense, torch.optim.Adam), (sparse, LazyAdam)):
        optimizer = kind(table.parameters(), 0.01, weight_decay=decay, fused=True)
        table(torch.arange(5)).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(sparse.weight, dense.weight)
