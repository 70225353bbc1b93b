"""Learning from guesses: equal to naive refits, and better for rows with one release where training rows have many."""

from dataclasses import replace

import pytest
import torch
from sklearn.kernel_ridge import KernelRidge

from vflsec.attacks.fusion import ColumnFusion
from vflsec.base.layout import Layout
from vflsec.core.message import Kind, Message
from vflsec.core.view import View
from vflsec.inference import fused
from vflsec.inference.fused import (
    LENGTHS,
    NOISE,
    Distilled,
    _learn_by_process,
    _learn_by_trees,
    draw_rows,
    learn_guesses,
)
from vflsec.inference.kernel_mixture import Kernel, Mixture
from vflsec.inference.several_trainings import join_guesses, join_views, pool_guesses

ROWS, TEST, D = 600, 200, 8


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.long
def test_learning_is_the_best_kernel_ridge_regression_of_naive_refits():
    x, y, new = randn(30, 3), randn(30, 4, seed=1), randn(5, 3, seed=2)
    y[:, 0] += 3 * x[:, 0]
    mean, scale = x.mean(dim=0), x.std(dim=0, correction=0)

    def fit(length, noise, rows):
        model = KernelRidge(alpha=noise, kernel="rbf", gamma=1 / (2 * 3 * length**2))
        return model.fit(((x - mean) / scale)[rows], (y - y.mean(dim=0))[rows])

    def predicted(model, rows):
        return torch.as_tensor(model.predict((rows - mean) / scale)) + y.mean(dim=0)

    def left_out(length, noise):
        rest = [[k for k in range(len(x)) if k != row] for row in range(len(x))]
        return torch.cat([predicted(fit(length, noise, rows), x[k : k + 1]) for k, rows in enumerate(rest)])

    tried = {(length, noise): left_out(length, noise) for length in LENGTHS for noise in NOISE.tolist()}
    best = min(tried, key=lambda pair: float((tried[pair] - y)[:, :2].square().mean()))
    units = (x - mean) / scale / 3**0.5, (new - mean) / scale / 3**0.5
    learned = _learn_by_process(y, [units], n_scored=2)
    torch.testing.assert_close(learned.left_out, tried[best])
    torch.testing.assert_close(learned.guesses, predicted(fit(*best, list(range(len(x)))), new))


def test_a_few_numbers_of_another_party_count_beside_many_local_columns():
    """One length for all would hide two numbers among thirty."""
    sent, local = randn(400, 2), randn(400, 30, seed=1)
    y = torch.sin(2 * sent) + 0.1 * local[:, :2]
    learned = learn_guesses(y[:300], [(sent[:300], sent[300:]), (local[:300], local[300:])], 2, torch.Generator())
    together = torch.cat([sent, local], dim=1)
    alike = learn_guesses(y[:300], [(together[:300], together[300:])], 2, torch.Generator())
    assert r2(learned.guesses, y[300:]) > 0.8 > 0.6 > r2(alike.guesses, y[300:])


def test_left_out_rows_weigh_process_and_trees(monkeypatch):
    x, y, rng = randn(60, 3), randn(60, 2), torch.Generator()
    right = Distilled(y[:5], y)
    wrong = Distilled(-y[:5], -y)
    for process, trees in ((right, wrong), (wrong, right)):
        monkeypatch.setattr("vflsec.inference.fused._learn_by_process", lambda *_, process=process: process)
        monkeypatch.setattr("vflsec.inference.fused._learn_by_trees", lambda *_, trees=trees: trees)
        torch.testing.assert_close(learn_guesses(y, [(x, x[:5])], 2, rng).guesses, y[:5])


def test_trees_leave_each_row_out_of_its_guess():
    x, noise = randn(300, 4), randn(300, 3, seed=1)
    assert r2(_learn_by_trees(noise, [(x, x)], torch.Generator()).left_out, noise) < 0.05


def test_a_mixture_without_some_known_rows_is_one_of_the_others():
    x, y, rng = randn(40, 3), randn(20, 2, seed=1), torch.Generator().manual_seed(0)
    kernels = {"a": Kernel(x[:, :1]), "b": Kernel(x, nonlinear=True)}
    mixture = Mixture(kernels, torch.arange(20), y, lambda predicted, rows: predicted.new_zeros(len(predicted)), rng)
    assert list(mixture.coefficients) == list(dict.fromkeys(n for c, _ in mixture.candidates for n in sorted(c.names)))
    tables, out = {name: kernel.x for name, kernel in kernels.items()}, torch.arange(20) % 4 == 1
    whole, fewer = mixture.predict_without([torch.zeros(20, dtype=torch.bool), out], tables)
    torch.testing.assert_close(whole, mixture.predict(tables))
    expected = torch.zeros(40, 2, dtype=torch.float64)
    for (names, noise, _), weight in mixture.candidates:
        everything = sum(kernels[name].compute_similarity(kernels[name].x, kernels[name].x) for name in names)
        gram = everything[:, :20][:, ~out] / len(names) + 1
        regular = gram[:20][~out] + noise * torch.eye(15)
        expected += weight * (gram @ torch.linalg.solve(regular, (y - y.mean(dim=0))[~out]))
    torch.testing.assert_close(fewer, expected + y.mean(dim=0))


def test_drawn_rows_are_the_known_ones_and_others_once():
    known = torch.tensor([7, 2])
    rows = draw_rows(50, known, torch.Generator().manual_seed(0))
    assert rows[:2].tolist() == [7, 2]
    assert sorted(rows.tolist()) == list(range(50))


def federation(columns, z):
    """A view in which eight bottom models show training rows, and the last of them a single time test rows."""
    messages, last = [], None
    for epoch in range(8):
        last = randn(z.shape[1], 2, seed=epoch + 10)
        messages.append(message(epoch, "train", (z @ last)[:ROWS]))
    messages.append(message(8, "predict", (z @ last)[ROWS:], "test"))
    known = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))[:80]
    features = {"train": randn(ROWS, 2, seed=4).float(), "test": randn(TEST, 2, seed=5).float()}
    view = View("active", "active", D, features, None, known, columns[known].float(), tuple(messages), victim="p")
    return replace(view, layout=Layout.numeric(D))


def message(step, phase, values, split="train"):
    rows = torch.arange(len(values))
    return Message(Kind.EMBEDDING, "p", "active", step, phase, {"value": values.float()}, rows, split)


def r2(guessed, truth):
    return 1 - float((guessed - truth).square().sum() / (truth - truth.mean(dim=0)).square().sum())


def test_what_training_rows_tell_helps_with_rows_that_have_one_release(monkeypatch):
    """Columns are waves of two numbers that the last embedding tells: eighty known rows do not show them well."""
    z = randn(ROWS + TEST, 2)
    columns = torch.sin(2 * z @ randn(2, D, seed=1))
    view = federation(columns, z)
    guessed = ColumnFusion()(view, seed=0).scores["test"]
    monkeypatch.setattr(fused, "_pool_guesses", lambda *_: {})
    direct = ColumnFusion()(view, seed=0).scores["test"]
    assert r2(guessed, columns[ROWS:]) > r2(direct, columns[ROWS:]) + 0.05


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_learned_from_guesses_of_columns_that_nobody_tells(seed):
    """The known rows that weigh what is learned are in none of it: with them it would fit their noise."""
    columns = randn(ROWS + TEST, D, seed=100 + seed)
    view = federation(columns, randn(ROWS + TEST, 6, seed=seed))
    assert r2(ColumnFusion()(view, seed=seed).scores["test"], columns[ROWS:]) > -0.05


def test_releases_of_several_trainings_tell_columns_of_test_rows_that_no_training_tells():
    """Five trainings with two-wide embeddings are ten projections of eight columns."""
    columns = randn(ROWS + TEST, D, seed=3)
    views = []
    for training in range(5):
        bottom = randn(D, 2, seed=50 + training)
        messages = [
            message(0, "train", columns[:ROWS] @ bottom),
            message(1, "predict", columns[ROWS:] @ bottom, "test"),
        ]
        views.append(replace(federation(columns, columns), messages=tuple(messages)))
    each = [ColumnFusion()(view, seed=0) for view in views]
    together = ColumnFusion()(join_views(views), seed=0)
    joined = join_guesses(pool_guesses(each, values=True), together, views[-1])
    assert max(r2(guess.scores["test"], columns[ROWS:]) for guess in each) < 0.4
    assert r2(pool_guesses(each, values=True).scores["test"], columns[ROWS:]) < 0.8
    assert r2(joined.scores["test"], columns[ROWS:]) > 0.95
