"""Rows leave as the mean of their group, groups are as large as they must be, and they are drawn without labels."""

import pytest
import torch

from vflsec.base.errors import UsageError
from vflsec.base.seeds import make_rng
from vflsec.core.defense import Release
from vflsec.core.message import Kind
from vflsec.defenses.average import GroupAverage


def averaged(g, strength, release, seed=0):
    return GroupAverage(strength).on_gradient(g, release(seed))


@pytest.mark.parametrize(("rows", "k"), [(12, 2), (12, 4), (13, 4), (15, 4), (64, 5), (7, 7), (5, 9)])
def test_each_row_is_the_mean_of_a_group_of_k_or_one_more(release, rows, k):
    """A row's own bit in a sum of powers of two tells who was averaged with whom."""
    g = torch.eye(rows, dtype=torch.float64)
    out = averaged(g, k - 1, release)
    groups = {tuple(row.nonzero().flatten().tolist()) for row in out}
    assert sorted(i for group in groups for i in group) == list(range(rows))  # a partition
    assert all(min(k, rows) <= len(group) for group in groups)
    assert max(map(len, groups)) - min(map(len, groups)) <= 1
    for group in groups:
        for i in group:
            assert torch.allclose(out[i], g[list(group)].mean(dim=0))


def test_the_sum_over_the_batch_stays(release):
    g = torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(averaged(g, 4, release).sum(dim=0), g.sum(dim=0))
    shuffled = averaged(g[:50], 4, release)  # groups of equal size
    assert float(shuffled.var()) == pytest.approx(float(g.var()) / 5, rel=0.35)


def test_labels_are_not_looked_at():
    g = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    found = [
        GroupAverage(3).on_gradient(
            g, Release("active", "passive_1", Kind.GRADIENT, 0, "train", "h", None, labels, make_rng(0, "rows"))
        )
        for labels in (None, torch.zeros(8), torch.arange(8) % 2)
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_groups_are_drawn_afresh(release):
    same = release()
    g = torch.eye(20)
    first, second = (GroupAverage(1).on_gradient(g, same) for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (3, 0)])
def test_small_batches(release, shape):
    assert torch.equal(averaged(torch.ones(shape), 3, release), torch.ones(shape))


def test_half_a_row_is_refused():
    with pytest.raises(UsageError, match=r"whole number .*strength, got 0\.5"):
        GroupAverage(0.5)


@pytest.mark.long
@pytest.mark.parametrize("attack", ["norm", "direction", "averaging"])
def test_larger_groups_leak_less(leak, attack):
    found = [leak(attack, "average", strength) for strength in (0, 3, 15, 63)]
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0] - 0.2
