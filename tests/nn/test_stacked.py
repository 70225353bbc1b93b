"""An operation on the tensors of several runs gives what it gives for each of them, with its gradients."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vflsec.base.errors import NotStackable
from vflsec.base.seeds import Generators, Seeds, derive, make_rng
from vflsec.nn.stacked import Stacked, split_runs, stack, stack_modules, unstack_modules
from vflsec.nn.wide import LazyAdam

RUNS, ROWS = 3, 11


def drawn(*shape, seed=0):
    return [torch.randn(*shape, generator=torch.Generator().manual_seed(seed + run)) for run in range(RUNS)]


OPERATIONS = {
    "sum": lambda x: x.sum(),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "largest row": lambda x: x.norm(dim=1).max() * 2,
    "centered": lambda x: x - x.mean(dim=0),
    "scaled by a number of its own": lambda x: x * x.sum(),
    "transposed": lambda x: x.mT @ x,
    "reshaped": lambda x: x.reshape(-1, 1).expand(-1, 2),
    "softmax": lambda x: F.softmax(x, dim=1),
    "two outputs": lambda x: x.max(dim=1)[0],
    "plain rows": lambda x: x[torch.tensor([1, 1, 0])],
    "a slice": lambda x: x[2:5],
    "columns": lambda x: x[:, 1],
    "own rows": lambda x: x[x.argsort(dim=0)[:, :2]],
    "padded": lambda x: F.pad(x, (1, 0)),
    "joined": lambda x: torch.cat([x, -x], dim=1),
    "joined rows": lambda x: torch.cat([x, torch.ones(2, x.shape[1])]),
    "split": lambda x: torch.split(x, 4)[1],
    "split columns": lambda x: x.split(2, dim=-1)[0],
    "stacked": lambda x: torch.stack([x, x]).amax(dim=0),
    "plus a plain tensor": lambda x: torch.arange(ROWS)[:, None] + x,
    "in place": lambda x: x.clone().mul_(3).add_(x),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "mean of a vector": lambda x: x[:, 0].mean(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_acts_on_each_run(name):
    operation, parts = OPERATIONS[name], drawn(ROWS, 4)
    together = stack(parts).requires_grad_()
    found = operation(together)
    assert isinstance(found, Stacked)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(9))
    (found * weight).sum().backward()
    for part, result, gradient in zip(parts, split_runs(found), split_runs(together.grad), strict=True):
        alone = part.clone().requires_grad_()
        expected = operation(alone)
        (expected * weight).sum().backward()
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-7)
        torch.testing.assert_close(gradient, alone.grad, rtol=0, atol=1e-6)


def test_has_the_shape_of_one_run():
    x = stack(drawn(ROWS, 4))
    assert (tuple(x.shape), x.size(1), len(x), x.dim(), x.ndim, x.numel()) == ((ROWS, 4), 4, ROWS, 2, 2, 4 * ROWS)
    assert x.nbytes == 4 * 4 * ROWS
    assert repr(x) == "Stacked(3 runs of (11, 4))"


@pytest.mark.parametrize("read", [float, bool, lambda x: x.item(), lambda x: x.tolist(), lambda x: int(x * 1e6)])
def test_numbers_that_differ_by_run_are_refused(read):
    with pytest.raises(NotStackable):
        read(stack([torch.zeros(1), torch.ones(1), torch.ones(1)]).sum())


def test_a_number_that_is_the_same_for_all_runs_can_be_read():
    assert float(stack([torch.ones(2)] * RUNS).sum()) == 2


def test_tensors_of_different_shapes_are_refused():
    with pytest.raises(NotStackable):
        torch.nonzero(stack([torch.zeros(3), torch.ones(3), torch.zeros(3)]))


def test_a_plain_total_becomes_one_of_all_runs():
    total = torch.zeros(()) + stack(drawn(ROWS)).sum()
    assert isinstance(total, Stacked)


def network(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adagrad"])
def test_a_network_learns_as_it_does_alone(optimizer):
    """To 1e-6 after 40 updates, with layers whose sizes are no multiple of a processor's vectors."""
    made = {
        "adam": lambda p: LazyAdam(p, 1e-2, fused=True),
        "sgd": lambda p: torch.optim.SGD(p, 1e-2, 0.9, fused=True),
        "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, fused=True),
    }[optimizer]
    rows, labels = drawn(64, 5), [torch.arange(64) * (run + 1) % 3 for run in range(RUNS)]

    def fit(model, x, y):
        update = made(model.parameters())
        for _ in range(40):
            update.zero_grad()
            F.cross_entropy(model(x), y).backward()
            update.step()

    alone, joined, parted = ([network(run) for run in range(RUNS)] for _ in range(3))
    for model, x, y in zip(alone, rows, labels, strict=True):
        fit(model, x, y)
    together = network(0)
    stack_modules(joined, together)
    fit(together, stack(rows), stack(labels))
    unstack_modules(together, parted)
    for expected, found in zip(alone, parted, strict=True):
        states = zip(expected.state_dict().items(), found.state_dict().values(), strict=True)
        for (name, value), other in states:
            if name not in ("0.bias", "1.running_mean"):  # before BatchNorm: the gradient is rounding alone
                torch.testing.assert_close(value, other, rtol=0, atol=1e-6, msg=name)


def test_seeds_make_a_generator_for_each_run():
    seeds = Seeds([3, 5])
    made = make_rng(seeds, "noise")
    assert isinstance(made, Generators)
    expected = [torch.rand(4, generator=make_rng(seed, "noise")) for seed in (3, 5)]
    assert all(torch.equal(torch.rand(4, generator=one), x) for one, x in zip(made, expected, strict=True))


def test_what_draws_for_one_run_refuses_several():
    with pytest.raises(NotStackable, match="a/b"):
        derive(Seeds([1, 2]), "a", "b")
    with pytest.raises(TypeError):
        torch.rand(3, generator=make_rng(Seeds([1, 2])))


WRITES = {
    "a sum": lambda x, y: x.__iadd__(y),
    "an entry": lambda x, y: x.__setitem__(0, y[0]),
    "a product": lambda x, y: x.__imul__(y),
    "a moving mean": lambda x, y: x.mul_(0.9).add_(y, alpha=0.1),
    "a copy": lambda x, y: x.copy_(y),
}


@pytest.mark.parametrize("name", WRITES)
def test_runs_do_not_write_to_a_tensor_that_they_share(name):
    with pytest.raises(NotStackable, match="writes"):
        WRITES[name](torch.zeros(ROWS), stack(drawn(ROWS)))


def test_shapes_are_aligned_by_run():
    x, y = drawn(3, 3), drawn(3, seed=5)
    for name, one in {
        "positional": torch.mul(stack(x), stack(y)),
        "named": torch.mul(stack(x), other=stack(y)),
    }.items():
        assert all(torch.equal(a, b * c) for a, b, c in zip(split_runs(one), x, y, strict=True)), name


def test_the_options_of_a_loss_are_heeded():
    x, y = drawn(ROWS, 3), [torch.arange(ROWS) % 3] * RUNS
    for options in ({"weight": torch.tensor([1.0, 2.0, 3.0])}, {"label_smoothing": 0.1}, {"reduction": "sum"}):
        found = F.cross_entropy(stack(x), stack(y), **options)
        for one, a, b in zip(split_runs(found), x, y, strict=True):
            torch.testing.assert_close(one, F.cross_entropy(a, b, **options))


@pytest.mark.parametrize(("rows", "width", "out"), [(37, 10, 10), (33, 3, 2), (256, 5, 2), (20, 33, 10), (3, 10, 5)])
def test_products_have_the_rounding_of_one_run(rows, width, out):
    """On shapes for which libraries sum in another order in a batch, or at another address."""
    differ = 0
    for seed in range(20):
        x, w, b = drawn(rows, width, seed=seed), drawn(out, width, seed=seed), drawn(out, seed=seed)
        together = [stack(one).requires_grad_() for one in (x, w, b)]
        found = F.linear(*together)
        found.square().sum().backward()
        for run in range(RUNS):
            own = [one[run].clone().requires_grad_() for one in (x, w, b)]
            alone = F.linear(*own)
            alone.square().sum().backward()
            torch.testing.assert_close(split_runs(found)[run], alone, rtol=1e-6, atol=1e-5)
            differ += not torch.equal(split_runs(found)[run], alone)
            differ += sum(
                not torch.equal(split_runs(one.grad)[run], o.grad) for one, o in zip(together, own, strict=True)
            )
    assert differ <= 12  # of 240: a few products round in another way on some processors


def test_the_runs_share_memory_with_the_whole():
    x = stack(drawn(ROWS))
    split_runs(x)[1].zero_()
    assert np.array_equal(split_runs(x)[1].numpy(), np.zeros(ROWS))
