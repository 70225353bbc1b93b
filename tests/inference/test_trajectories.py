"""All releases of a row: exact in bounded memory, complete where rows miss releases, used where they say more."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import RidgeCV
from sklearn.metrics import roc_auc_score

from vflsec.attacks.attribute import AttributeInference
from vflsec.attacks.fusion import ColumnFusion
from vflsec.attacks.inversion_blackbox import BlackBoxInversion
from vflsec.base.layout import Layout
from vflsec.core.message import Kind, Message
from vflsec.core.view import View
from vflsec.inference.regression import RIDGE_PENALTIES, standardize
from vflsec.inference.releases import Releases, read_releases
from vflsec.inference.sources import list_sources
from vflsec.inference.trajectories import (
    NEIGHBORS,
    find_components,
    fit_trajectories,
    interpolate_epochs,
    join_epochs,
    pick_landmarks,
    split_by_epoch,
)

ROWS, BATCH, D = 600, 100, 12


def federation(*, epochs=8, cut=2, noise=0.0, aux=60, drift=1.0, kept=1.0, seed=0):
    """The view of an active party, and the columns of a victim whose bottom model is linear and changes every epoch."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, D, generator=rng, dtype=torch.float64)
    last = torch.randn(D, cut, generator=rng, dtype=torch.float64)
    messages, step = [], 0
    for _ in range(epochs):
        bottom = last + drift * torch.randn(D, cut, generator=rng, dtype=torch.float64)
        for drawn in torch.randperm(ROWS, generator=rng).split(BATCH):
            rows = drawn[torch.rand(len(drawn), generator=rng) < kept]
            h = x[rows] @ bottom + noise * torch.randn(len(rows), cut, generator=rng, dtype=torch.float64)
            value = {"value": h.float()}
            messages.append(Message(Kind.EMBEDDING, "passive_1", "active", step, "train", value, rows, "train"))
            step += 1
    known = torch.randperm(ROWS, generator=rng)[:aux]
    own = {"train": torch.randn(ROWS, 2, generator=rng)}
    view = View("active", "active", D, own, None, known, x[known].float(), tuple(messages), victim="passive_1")
    return replace(view, layout=Layout.numeric(D)), x.numpy()


def r2(guessed, truth):
    return 1 - ((np.asarray(guessed) - truth) ** 2).sum() / ((truth - truth.mean(axis=0)) ** 2).sum()


def run(attack, view):
    return attack.run(view, rng=torch.Generator().manual_seed(0)).scores["train"].double().numpy()


def naive(view):
    """The standardized releases (n, k) of all epochs side by side, where every row has one in each."""
    blocks = []
    messages = list(view.messages)
    for start in range(0, len(messages), ROWS // BATCH):
        block = torch.zeros(ROWS, messages[0].payload["value"].shape[1], dtype=torch.float64)
        for m in messages[start : start + ROWS // BATCH]:
            block[m.rows] = m.payload["value"].double()
        blocks.append(standardize(block))
    return torch.cat(blocks, dim=1)


@pytest.mark.parametrize("cut", [2, 80], ids=["few columns", "more columns than landmarks"])
def test_ridge_on_coordinates_is_that_on_all_releases_side_by_side(cut):
    """The second has 640 columns, 336 landmarks at most, and columns that the landmarks do not span."""
    view, _ = federation(cut=cut, noise=1.0)
    x, y = naive(view), view.aux_labels.double()
    u, values = find_components(join_epochs(read_releases(view, Kind.EMBEDDING)), pick_landmarks(view))
    assert len(values) == min(x.shape[1], len(pick_landmarks(view)))

    def ridge(z):
        known = z[view.aux_rows]
        solved = torch.linalg.solve(known @ known.T + 3.0 * torch.eye(len(known)), y - y.mean(dim=0))
        return z @ (known.T @ solved)

    torch.testing.assert_close(ridge(u * values), ridge(x), atol=1e-6, rtol=1e-6)
    table = fit_trajectories(view, [("passive_1", None)])[0].every
    found, expected = (z[view.aux_rows] @ z.T for z in (table, x))
    torch.testing.assert_close(found / found.abs().max(), expected / expected.abs().max(), atol=1e-6, rtol=0)


def test_components_are_those_of_a_singular_value_decomposition():
    view, _ = federation(noise=0.1)
    x = naive(view)
    u, values = find_components(join_epochs(read_releases(view, Kind.EMBEDDING)), pick_landmarks(view))
    left, expected, _ = torch.linalg.svd(x, full_matrices=False)
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close((u.T @ left).abs(), torch.eye(len(values), dtype=torch.float64), atol=1e-6, rtol=0)


def test_a_row_without_a_release_in_an_epoch_keeps_its_last():
    first, second = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[5.0], [3.0]])
    rows = (torch.tensor([0, 1, 2]), torch.tensor([0, 2]))
    messages = [
        Message(Kind.EMBEDDING, "passive_1", "active", step, "train", {"value": value}, about, "train")
        for step, (value, about) in enumerate(zip((first, second), rows, strict=True))
    ]
    known = torch.zeros(0, dtype=torch.long)
    view = View("active", "active", 1, {"train": torch.zeros(3, 1)}, None, known, known, tuple(messages))
    before, after = join_epochs(read_releases(view, Kind.EMBEDDING))
    assert torch.equal(before, standardize(first))
    assert torch.equal(after[[0, 2]], standardize(second))
    assert after[1] == before[1]


@pytest.mark.parametrize("epochs", [2, 3, 4, 7])
def test_aligned_releases_are_those_of_the_model_in_the_middle_of_an_epoch(epochs):
    """Twelve batches an epoch, and a model whose weights are a polynomial in the step."""
    rng, n, batches = np.random.default_rng(0), 120, 12
    x = rng.normal(size=(n, 3))
    weights = [rng.normal(size=(3, 2)) / 20**k for k in range(min(epochs, NEIGHBORS))]

    def send(step, rows):
        return torch.tensor(x[rows] @ sum(step**k * weight for k, weight in enumerate(weights)))

    rows = [part for _ in range(epochs) for part in np.array_split(rng.permutation(n), batches)]
    step = torch.repeat_interleave(torch.arange(len(rows)), n // batches)
    values = torch.cat([send(number, part) for number, part in enumerate(rows)])
    about = torch.tensor(np.concatenate(rows))
    releases = Releases(values, about, step // batches, step, n)
    times = torch.stack([step[releases.epoch == e][about[releases.epoch == e].argsort()] for e in range(epochs)])
    for block in interpolate_epochs(split_by_epoch(releases), releases):
        middle = block.time.median()
        inner = ((times.amin(dim=0) <= middle) & (times.amax(dim=0) >= middle)).nonzero()[:, 0]
        assert len(inner) > n / 3
        torch.testing.assert_close(block.values[inner], send(float(middle), inner), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("make", [BlackBoxInversion, ColumnFusion])
def test_releases_of_all_epochs_tell_columns_that_no_embedding_tells(make):
    """Sixteen projections of twelve columns determine them; two do not."""
    view, truth = federation(noise=0.01)
    assert r2(run(make(), view), truth) > 0.98
    assert r2(run(BlackBoxInversion(releases=1), view), truth) < 0.3
    once = replace(view, adaptive=False)
    assert r2(run(make(), once), truth) < 0.3, "the first release only"


def test_rows_that_miss_releases_are_inferred_too():
    view, truth = federation(noise=0.01, epochs=12, kept=0.8)
    assert r2(run(ColumnFusion(), view), truth) > 0.6
    assert r2(run(BlackBoxInversion(releases=3), view), truth) < 0.4


def test_a_column_is_inferred_from_all_releases():
    view, truth = federation(noise=0.01, epochs=12)
    y = torch.from_numpy(truth[:, 0] > 0).long()
    view = replace(view, n_classes=2, aux_labels=y[view.aux_rows])
    guessed = run(AttributeInference(reads="received"), view)
    assert (guessed.argmax(axis=1) == y.numpy()).mean() > 0.8
    guessed = run(AttributeInference(reads="received", releases=1), view)
    assert (guessed.argmax(axis=1) == y.numpy()).mean() < 0.7


SETTINGS = [
    {"seed": seed, "cut": cut, "epochs": epochs, "noise": noise, "drift": drift}
    for seed, (cut, epochs, noise, drift) in enumerate(
        [
            (1, 3, 0.0, 1.0), (1, 20, 0.0, 0.3), (2, 6, 0.0, 1.0), (2, 12, 1.0, 1.0), (2, 12, 3.0, 0.1),
            (4, 2, 0.0, 0.3), (4, 10, 3.0, 0.0), (8, 3, 0.3, 1.0), (8, 6, 10.0, 0.3), (16, 4, 1.0, 0.3),
        ]
    )
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_no_choice_of_releases_beats_the_attack_that_reads_all(setting):
    view, truth = federation(**setting)
    built_in = r2(run(ColumnFusion(), view), truth)
    blocks, rng = torch.stack(list(join_epochs(read_releases(view, Kind.EMBEDDING)))), np.random.default_rng(0)
    epochs, known = len(blocks), view.aux_rows.numpy()
    subsets = [rng.permutation(epochs)[: rng.integers(1, epochs + 1)] for _ in range(6)]
    inputs = [blocks[k] for k in range(epochs)] + [blocks[-k:].mean(dim=0) for k in (2, 3, 5, 10, epochs)]
    inputs += [torch.cat(list(blocks[subset]), dim=1) for subset in (*subsets, list(range(epochs)))]
    for x in (chosen.numpy() for chosen in inputs):
        model = RidgeCV(RIDGE_PENALTIES, alpha_per_target=True).fit(x[known], truth[known])
        assert r2(model.predict(x), truth) <= built_in + 0.02


def test_views_that_share_what_they_remember_share_trajectories():
    view, _ = federation()
    first = fit_trajectories(view, [("passive_1", None)])
    assert fit_trajectories(view.copy_private(), [("passive_1", None)]) is first
    assert any("components of all" in name for name in list_sources(view))
    assert fit_trajectories(replace(view, adaptive=False), [("passive_1", None)]) == []


@pytest.mark.long
def test_an_attribute_that_is_no_linear_function_of_releases_is_inferred():
    """Whether the first two columns are of the same sign, by sixteen projections of all twelve."""
    view, truth = federation(noise=0.01, aux=200)
    y = torch.tensor(truth[:, 0] * truth[:, 1] > 0).long()
    view = replace(view, n_classes=2, aux_labels=y[view.aux_rows], layout=None)
    linear, default = (auc_of(run(AttributeInference(**options), view), y) for options in ({"reads": "both"}, {}))
    assert linear < 0.6
    assert default > 0.7


def auc_of(scores, y):
    return roc_auc_score(y, scores[:, 1] - scores[:, 0])
