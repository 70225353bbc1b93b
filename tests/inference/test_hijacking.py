"""What a victim notices: an honest training raises no alarm, and an alarm comes with the batch that shows it."""

import numpy as np
import pytest
import torch

from vflsec.core.message import Kind, Transcript
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.inference.hijacking import find_alarm
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.run.federation import build_federation, build_method
from vflsec.run.plan import list_trials
from vflsec.run.spec import read
from vflsec.testing.federations import build_from_numbers, make_toy_federation


def watch(federation, method):
    """Return the gradients and rows of all batches that the first passive party receives."""
    transcript = Transcript(frozenset({"passive_1"}), frozenset({Kind.GRADIENT}))
    federation.channel.taps.append(transcript)
    method.fit(federation)
    sent = [m for m in transcript.messages if m.split == "train"]
    return [m.payload["value"] for m in sent], [m.rows for m in sent]


@pytest.mark.statistical
@pytest.mark.parametrize("aggregation", ["concat", "sum", "mean"])
def test_honest_trainings_raise_no_alarm(aggregation):
    """70 of each kind: more than 200 in all."""
    for seed in range(70):
        method = FedSplitNN(TrainSpec(epochs=4, batch=32), ModelSpec(bottom=(4,), cut=3, aggregation=aggregation))
        assert find_alarm(*watch(make_toy_federation(rows=200, seed=seed), method), rank=1)[0] is None


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "dataset"),
    [("fedsplitnn", "credit-default"), *((m, d) for m in ("fedhssl-simsiam", "vflhlp") for d in ("toy", "digits"))],
)
def test_honest_trainings_of_methods_raise_no_alarm(method, dataset):
    settings = {"dataset": dataset, "methods": [method], "seeds": 1, "attacks": [{"name": "norm"}]}
    settings["train"] = {"epochs": 2, "pretrain": {"epochs": 1}} if method == "fedhssl-simsiam" else {"epochs": 2}
    *_, row = list_trials(read({**settings, "data": {"n_labeled": 400}}))
    federation = build_federation(row.cell, "cpu")
    gradients, rows = watch(federation, build_method(row.cell))
    assert gradients
    assert find_alarm(gradients, rows, federation.n_classes - 1)[0] is None


@pytest.mark.statistical
@pytest.mark.parametrize(("batch", "epochs"), [(32, 60), (7, 20), (1, 4)])
@pytest.mark.parametrize("aggregation", ["concat", "mean"])
def test_rounding_of_rows_that_are_fit_raises_no_alarm(batch, epochs, aggregation):
    """A wide model separates the classes: p - y then ends far below the precision of p."""
    for seed in range(2):
        model = ModelSpec(bottom=(16,), cut=8, aggregation=aggregation)
        method = FedSplitNN(TrainSpec(epochs=epochs, batch=batch, lr=1e-2), model)
        assert find_alarm(*watch(make_toy_federation(rows=200, seed=seed), method), rank=1)[0] is None


@pytest.mark.statistical
@pytest.mark.parametrize("train", [{"lr": 1e-2}, {"lr": 1e-2, "local_steps": 5}, {"lr": 0.1, "optimizer": "sgd"}])
@pytest.mark.parametrize("labels", [0.03, 0.5, 5])
def test_wide_models_rare_classes_and_high_rates_raise_no_alarm(labels, train):
    """Rows soon differ in length, by as much as a thousand times."""
    for seed in range(3):
        rng = torch.Generator().manual_seed(seed)
        n, n_classes = 1500, 5 if labels == 5 else 2
        y = torch.randint(5, (n,), generator=rng) if labels == 5 else (torch.rand(n, generator=rng) < labels).long()
        columns = {}
        for name in ("active", "passive_1"):
            means = torch.randn(n_classes, 10, generator=rng)
            columns[name] = {"train": torch.randn(n, 10, generator=rng) + means[y], "test": torch.zeros(10, 10)}
        parties = build_from_numbers(columns, {"train": y, "test": y[:10]}, n_classes=n_classes, seed=seed)
        method = FedSplitNN(TrainSpec(epochs=3, **train), ModelSpec(bottom=(256, 256), cut=64))
        assert find_alarm(*watch(parties, method), rank=n_classes - 1)[0] is None


def test_batches_that_are_faint_beside_a_long_gradient_are_not_examined():
    even, long = torch.ones(40, 3), torch.ones(40, 3)
    long[7] *= 1e4
    rows = [torch.arange(40)] * 6
    assert find_alarm([even, long, *[even] * 4], rows, rank=1) == (None, 1)
    assert find_alarm([even] * 6, rows, rank=1) == (None, 6)


def test_what_is_not_finite_raises_the_alarm_and_an_empty_batch_does_not():
    g = torch.ones(4, 3)
    for wrong in (torch.nan, torch.inf):
        assert find_alarm([g, g * wrong], [torch.arange(4)] * 2, rank=1)[0] == 2
    assert find_alarm([g[:0], g, g * 0], [torch.arange(0), torch.arange(4), torch.arange(4)], rank=1)[0] is None
    assert find_alarm([], [], rank=1)[0] is None


def color(batches):
    """Return whether rows and batches have signs whose products are those of ``batches``: a naive search."""
    colors, todo = {}, []
    edges = [(("row", row), ("batch", k), sign) for k, batch in enumerate(batches) for row, sign in batch]
    for start in {edge[0] for edge in edges}:
        if start in colors:
            continue
        colors[start], todo = 1, [start]
        while todo:
            node = todo.pop()
            for a, b, sign in edges:
                for here, there in ((a, b), (b, a)):
                    if here == node and there not in colors:
                        colors[there] = colors[node] * sign
                        todo.append(there)
    return all(colors[a] * colors[b] == sign for a, b, sign in edges)


@pytest.mark.parametrize("seed", range(20))
def test_the_alarm_comes_with_the_first_batch_whose_signs_contradict(seed):
    rng = np.random.default_rng(seed)
    truth, batches = rng.choice([-1, 1], 30), []
    for _ in range(15):
        rows = rng.permutation(30)[:6]
        signs = truth[rows] * rng.choice([-1, 1])
        signs[0] *= rng.choice([-1, 1], p=[0.1, 0.9])
        batches.append(list(zip(rows.tolist(), signs.tolist(), strict=True)))
    expected = next((k for k in range(1, 16) if not color(batches[:k])), None)
    gradients = [torch.tensor([[2.0, 1.0]]) * torch.tensor([[s] for _, s in batch]) for batch in batches]
    assert find_alarm(gradients, [torch.tensor([r for r, _ in batch]) for batch in batches], rank=1)[0] == expected


@pytest.mark.parametrize(("rank", "width"), [(1, 4), (3, 8)])
def test_a_further_direction_raises_the_alarm_in_its_batch(rank, width):
    rng = torch.Generator().manual_seed(0)
    weights = torch.randn(rank, width, generator=rng)
    batches = [torch.rand(40, rank, generator=rng) @ weights for _ in range(5)]
    rows = [torch.arange(40)] * 5
    assert find_alarm(batches, rows, rank)[0] is None
    batches[3][7] += 0.1 * torch.randn(width, generator=rng)
    assert find_alarm(batches, rows, rank)[0] == 4
    assert find_alarm(batches, rows, width)[0] is None
