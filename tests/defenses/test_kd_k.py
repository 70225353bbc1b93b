"""Weight leaves the true class for those of its group, which a teacher chooses, and never so much that it is turned."""

import pytest
import torch
from torch.nn import functional as F

from vflsec.base.errors import UsageError
from vflsec.base.seeds import make_rng
from vflsec.defenses.kd_k import DistilledGroups


def softened(y, strength, *, k=None, classes=4, features=None, seed=0):
    x = torch.zeros(len(y), 3) if features is None else features
    made = DistilledGroups(strength, k=k)
    return made.on_labels(y, features=x, n_classes=classes, rng=make_rng(seed, "labels"))


def alike(rows=300, seed=0):
    """Columns and labels of four classes, of which 0 and 1 look the same, and 2 and 3."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.arange(rows) % 4
    return torch.randn(rows, 3, generator=rng) + 4.0 * (y // 2)[:, None], y


def test_with_all_classes_it_is_label_smoothing():
    y = torch.tensor([2, 0, 3])
    expected = 0.6 * F.one_hot(y, 4) + 0.4 / 3 * (1 - F.one_hot(y, 4))
    assert torch.allclose(softened(y, 0.4), expected)
    assert torch.allclose(softened(y, 0.4, k=9), expected)  # no more classes than there are


@pytest.mark.parametrize("k", [2, 3])
def test_a_row_has_its_class_and_the_others_that_the_teacher_takes_for_it(k):
    x, y = alike()
    soft = softened(y, 0.3, k=k, features=x)
    rows = torch.arange(len(y))
    assert torch.allclose(soft.sum(dim=1), torch.ones(len(y)))
    assert torch.equal((soft > 0).sum(dim=1), torch.full_like(y, k))
    assert torch.allclose(soft[rows, y], torch.tensor(0.7))
    twin = soft[rows, y ^ 1]
    assert float((twin > 0).float().mean()) > 0.95, "the class that looks the same is in the group"
    assert torch.allclose(twin[twin > 0], torch.tensor(0.3 / (k - 1)))


def test_the_true_class_is_in_the_group_however_unlikely():
    """The source adds it to k others: rows that have more than one in sum."""
    x, y = alike()
    wrong = (y + 2) % 4  # what the columns say is never so
    wrong[::10] = y[::10]
    soft = softened(wrong, 0.5, k=2, features=x)
    assert torch.allclose(soft.sum(dim=1), torch.ones(len(y)))
    assert torch.allclose(soft[torch.arange(len(y)), wrong], torch.tensor(0.5))


def test_at_the_bound_all_of_a_group_are_alike():
    x, y = alike()
    soft = softened(y, 2 / 3, k=3, features=x)
    assert torch.allclose(soft[soft > 0], torch.tensor(1 / 3), atol=1e-6)


def test_a_soft_label_is_the_mean_of_what_its_classes_become():
    x, y = alike(40)
    given = 0.75 * F.one_hot(y, 4) + 0.25 * F.one_hot((y + 1) % 4, 4)
    made = DistilledGroups(0.3)
    expected = 0.75 * softened(y, 0.3) + 0.25 * softened((y + 1) % 4, 0.3)
    assert torch.allclose(made.on_labels(given, features=x, n_classes=4, rng=make_rng(0, "labels")), expected)


def test_equal_seeds_have_equal_teachers():
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 3, generator=rng), torch.arange(200) % 4  # nothing to learn: groups are the teacher's whim
    one, same, other = (softened(y, 0.3, k=2, features=x, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("strength", "k", "classes", "bound"), [(0.51, None, 2, "0.5"), (0.65, 2, 10, "0.5"), (0.95, None, 10, "0.9")]
)
def test_a_label_turned_round_is_refused(strength, k, classes, bound):
    made = DistilledGroups(strength, k=k)
    for ask in (made.check_task, lambda n: softened(torch.arange(n), strength, k=k, classes=n)):
        with pytest.raises(UsageError, match=rf"expected epsilon <= \(k - 1\) / k = {bound} for kd-k"):
            ask(classes)
    DistilledGroups(float(bound), k=k).check_task(classes)
    with pytest.raises(UsageError, match="k=2 classes .*got 1"):
        DistilledGroups(0.3, k=1)


def test_gradients_tell_less_until_the_label_is_gone(leak):
    found = [leak("direction", "kd-k", strength, signal="hidden") for strength in (0.0, 0.4, 0.5)]
    assert found == sorted(found, reverse=True)
    assert found[1] > 0.95, "any difference, however small, has a direction"
    assert found[2] < 0.6
