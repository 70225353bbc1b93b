"""Attacks on columns: exact where the source says so, nothing from a source that says nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge, RidgeCV
from torch import nn

from vflsec.attacks.grn import GenerativeRegressionNetwork, constrain_values
from vflsec.attacks.imputation import Imputation
from vflsec.attacks.inversion_blackbox import BlackBoxInversion
from vflsec.attacks.inversion_whitebox import WhiteBoxInversion
from vflsec.base.errors import InsufficientView, UsageError
from vflsec.base.layout import EncodedColumn, Layout
from vflsec.core.message import Kind, Message
from vflsec.core.view import View
from vflsec.inference.regression import ENOUGH, RIDGE_PENALTIES, compute_loo_error, project_categories
from vflsec.nn.top import Top
from vflsec.results import metrics
from vflsec.testing.conformance import AttackConformance

ROWS = {"train": 400, "test": 200}
MIXED = Layout(
    (EncodedColumn("a", "numeric", 0, 1), EncodedColumn("b", "categorical", 1, 3), EncodedColumn("c", "numeric", 4, 1))
)


@pytest.mark.long
class TestRidge(AttackConformance):
    side = "active"

    def make(self):
        return BlackBoxInversion(model="ridge", with_columns=False)


@pytest.mark.long
class TestNetwork(AttackConformance):
    side = "active"
    wild_scenes = 3  # the network ends in another minimum when its inputs move a little

    def make(self):
        return BlackBoxInversion(model="mlp", hidden=8)


def columns(n, layout, rng):
    """Columns (n, d) of independent people."""
    x = torch.randn(n, layout.width, generator=rng)
    for _, kind, start, width in layout.columns:
        if kind == "categorical":
            chosen = torch.randint(width, (n,), generator=rng)
            x[:, start : start + width] = torch.nn.functional.one_hot(chosen, width).float()
    return x


def make_view(bottom, *, layout=None, aux=60, noise=0.0, constant=False, own=None, seed=0):
    """What an active party has of a victim with independent columns and this bottom model; and these columns."""
    rng = torch.Generator().manual_seed(seed)
    layout = layout or Layout.numeric(5)
    truth = {split: columns(n, layout, rng) for split, n in ROWS.items()}
    features = {split: own(x) if own else torch.randn(len(x), 3, generator=rng) for split, x in truth.items()}
    torch.manual_seed(seed)
    active = nn.Linear(features["train"].shape[1], 2)
    messages, width = [], 0
    for split, x in truth.items():
        h = bottom(x).detach()
        width = h.shape[1]
        h = torch.zeros_like(h) if constant else h + noise * torch.randn(h.shape, generator=rng)
        phase = "train" if split == "train" else "predict"
        for step, rows in enumerate(torch.randperm(len(x), generator=rng).split(64)):
            message = Message(Kind.EMBEDDING, "passive_1", "active", step, phase, {"value": h[rows]}, rows, split)
            messages.append(message)
    known = torch.randperm(ROWS["train"], generator=rng)[:aux]
    view = View(
        party="active", side="active", n_classes=layout.width, features=features, model=active, aux_rows=known,
        aux_labels=truth["train"][known], messages=tuple(messages), victim="passive_1", layout=layout,
        victim_model=bottom, top=Top([2, width], 2, aggregation="concat", head="linear", hidden=1),
    )  # fmt: skip
    return view, truth


def linear(d, k, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(d, k)


def r2(guess, truth, split="test"):
    return metrics.r2(guess.scores[split].numpy(), truth[split].numpy())


# What is exact.


@pytest.mark.parametrize("width", [5, 8])
@pytest.mark.parametrize("aux", [0, 60])
def test_an_injective_linear_bottom_hides_nothing_from_one_who_knows_it(width, aux):
    view, truth = make_view(linear(5, width), aux=aux)
    guess = WhiteBoxInversion()(view, seed=0)
    assert guess.converged
    for split in ROWS:
        assert torch.allclose(guess.scores[split].float(), truth[split], atol=1e-2)


def test_binary_columns_come_back_exactly_from_as_many_numbers():
    """Ye et al. 2022 (arXiv 2210.06771) search all binary columns for those in the span of embeddings.

    A few known rows show which they are, and how they are ordered.
    """
    layout = Layout(tuple(EncodedColumn(f"c{k}", "categorical", 2 * k, 2) for k in range(6)))
    view, truth = make_view(linear(12, 6), layout=layout, aux=20)
    guess = BlackBoxInversion(with_columns=False)(view, seed=0)
    for split in ROWS:
        assert torch.equal(guess.scores[split].round().float(), truth[split])


def test_an_injective_network_hides_nothing_either():
    torch.manual_seed(0)
    bottom = nn.Sequential(nn.Linear(5, 64), nn.LeakyReLU(), nn.Linear(64, 16))
    view, truth = make_view(bottom)
    assert r2(WhiteBoxInversion()(view, seed=0), truth) > 0.99


@pytest.mark.parametrize("width", [5, 6])
def test_a_linear_layer_that_a_protocol_hides_is_learned_from_auxiliary_rows(width):
    bottom, hidden = linear(5, 5), linear(5, width, seed=1)
    view, truth = make_view(nn.Sequential(bottom, hidden))
    assert r2(WhiteBoxInversion()(replace(view, victim_model=bottom), seed=0), truth) > 0.999


def test_without_auxiliary_rows_a_hidden_layer_of_another_width_is_refused():
    bottom = linear(5, 5)
    view, _ = make_view(nn.Sequential(bottom, linear(5, 6, seed=1)), aux=0)
    with pytest.raises(InsufficientView, match="aux.n"):
        WhiteBoxInversion()(replace(view, victim_model=bottom), seed=0)


def test_categories_come_back_from_an_injective_bottom():
    view, truth = make_view(linear(5, 6), layout=MIXED)
    found = WhiteBoxInversion()(view, seed=0).scores["test"]
    assert torch.equal(found[:, 1:4].argmax(dim=1), truth["test"][:, 1:4].argmax(dim=1))
    assert torch.allclose(found[:, 1:4].sum(dim=1), torch.ones(200, dtype=found.dtype))


def test_a_linear_bottom_is_inverted_by_regression():
    view, truth = make_view(linear(5, 5))
    assert r2(BlackBoxInversion()(view, seed=0), truth) > 0.99


def test_a_linear_bottom_that_hardly_shows_a_column_is_inverted_all_the_same():
    bottom = nn.Linear(5, 5, bias=False)
    turn, _ = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(0)))
    with torch.no_grad():
        bottom.weight.copy_(turn * torch.tensor([1.0, 1.0, 0.3, 0.1, 0.01]) @ turn.T)
    view, truth = make_view(bottom)
    assert r2(BlackBoxInversion(with_columns=False)(view, seed=0), truth) > 0.999


def test_half_of_five_independent_columns_is_what_two_numbers_tell():
    """A projection on k of d directions of white columns leaves k / d of their variance."""
    view, truth = make_view(linear(5, 2), aux=200)
    for attack in (BlackBoxInversion(with_columns=False), WhiteBoxInversion()):
        assert r2(attack(view, seed=0), truth) == pytest.approx(2 / 5, abs=0.06)


def test_noise_on_embeddings_is_measured_and_not_fitted():
    """Columns behind noise as large as they are: half of their variance is told, not less."""
    bottom = nn.Linear(5, 5, bias=False)
    with torch.no_grad():
        bottom.weight.copy_(torch.eye(5))
    view, truth = make_view(bottom, noise=1.0, aux=200)
    for attack in (WhiteBoxInversion(), BlackBoxInversion(with_columns=False)):
        assert r2(attack(view, seed=0), truth) == pytest.approx(1 / 2, abs=0.06)


def test_own_columns_are_the_prior():
    """What the bottom model discards is known from correlated columns of one's own."""
    bottom = nn.Linear(5, 1)
    nn.init.ones_(bottom.weight)  # a random one may hardly read the column that is not one's own
    view, truth = make_view(bottom, aux=100, own=lambda x: x[:, 1:] + 0.01)
    for attack in (WhiteBoxInversion(), BlackBoxInversion()):
        assert r2(attack(view, seed=0), truth) > 0.99
    assert r2(Imputation()(view, seed=0), truth) == pytest.approx(4 / 5, abs=0.05)


def test_imputation_is_the_regression_that_it_says():
    view, _ = make_view(linear(5, 2), own=lambda x: x[:, :3] + 1)
    own, known = view.features["train"].double().numpy(), view.aux_rows
    scale = own.mean(axis=0), own.std(axis=0)
    x = (own - scale[0]) / scale[1]
    expected = RidgeCV(RIDGE_PENALTIES, alpha_per_target=True).fit(x[known], view.aux_labels.double().numpy())
    np.testing.assert_allclose(Imputation()(view, seed=0).scores["train"], expected.predict(x), rtol=1e-6, atol=1e-8)


def test_a_network_takes_the_place_of_the_regression_where_it_is_better():
    """Own columns tell the absolute value of the victim's: no line does."""
    view, truth = make_view(linear(5, 2), aux=ENOUGH + 50, own=lambda x: x.sign() * x.abs().sqrt())
    curved, straight = (Imputation(model=model)(view, seed=0) for model in (None, "ridge"))
    assert r2(curved, truth) > r2(straight, truth) + 0.01
    few, _ = make_view(linear(5, 2), aux=ENOUGH - 1)
    assert torch.equal(Imputation()(few, seed=0).scores["test"], Imputation(model="ridge")(few, seed=0).scores["test"])


# Releases that are said again.


def repeated(times, *, noise, drift=0.0, aux=100, seed=0):
    """Columns (5) behind noise drawn anew in each of ``times`` releases, of a model that turns as training goes on."""
    bottom = nn.Linear(5, 5, bias=False)
    with torch.no_grad():
        bottom.weight.copy_(torch.eye(5))
    view, truth = make_view(bottom, aux=aux, noise=noise, seed=seed)
    rng = torch.Generator().manual_seed(seed + 1)
    rows = torch.arange(ROWS["train"])
    earlier = []
    for left in range(times - 1, 0, -1):
        h = torch.roll(truth["train"], 1, dims=1) * drift * left + truth["train"]
        h = h + noise * torch.randn(h.shape, generator=rng)
        earlier.append(Message(Kind.EMBEDDING, "passive_1", "active", 0, "train", {"value": h}, rows, "train"))
    return replace(view, messages=(*earlier, *view.messages)), truth


AVERAGING = [lambda **options: BlackBoxInversion(with_columns=False, **options), WhiteBoxInversion]


@pytest.mark.parametrize("make", AVERAGING)
def test_noise_of_repeated_releases_averages_out_and_of_test_rows_does_not(make):
    """Noise of variance 4 leaves 1 / 5 of a column told, the mean of ten releases 1 / 1.4."""
    view, truth = repeated(12, noise=2.0, aux=200)
    guess = make()(view, seed=0)
    assert r2(guess, truth, "train") == pytest.approx(1 / 1.4, abs=0.06)
    assert r2(guess, truth) == pytest.approx(1 / 5, abs=0.06)
    once = make()(replace(view, adaptive=False), seed=0)
    assert r2(once, truth, "train") == pytest.approx(1 / 5, abs=0.06)


@pytest.mark.parametrize("make", AVERAGING)
def test_how_often_a_row_is_read_does_not_touch_test_rows(make):
    view, truth = repeated(12, noise=2.0)
    one, many, chosen = (make(releases=turns)(view, seed=0).scores for turns in (1, 10, None))
    assert torch.equal(one["test"], many["test"])
    assert torch.equal(one["test"], chosen["test"])
    errors = [((scores["train"] - truth["train"]) ** 2).mean() for scores in (many, chosen)]
    assert errors[1] <= 1.02 * errors[0], "of twelve releases, all can be read"
    assert not torch.equal(one["train"], many["train"])


def test_a_model_that_changed_is_not_averaged_over():
    """By a regression it may be, for that is fitted on the means."""
    view, truth = repeated(12, noise=0.01, drift=0.5)
    one, ten, chosen = (WhiteBoxInversion(releases=turns)(view, seed=0) for turns in (1, 10, None))
    assert torch.equal(one.scores["train"], chosen.scores["train"])
    assert r2(chosen, truth, "train") > 0.99 > r2(ten, truth, "train")
    assert r2(BlackBoxInversion()(view, seed=0), truth, "train") > 0.99


def test_what_is_missed_is_the_error_of_rows_left_out_one_by_one():
    view, _ = make_view(linear(5, 2), aux=20)
    x = view.features["train"]
    z, y = x[view.aux_rows].double().numpy(), view.aux_labels.double().numpy()
    z = (z - x.double().mean(dim=0).numpy()) / x.double().std(dim=0, correction=0).numpy()
    errors = np.empty((len(RIDGE_PENALTIES), *y.shape))
    for i, penalty in enumerate(RIDGE_PENALTIES):
        for k in range(len(y)):
            kept = np.arange(len(y)) != k
            errors[i, k] = Ridge(alpha=penalty).fit(z[kept], y[kept]).predict(z[[k]])[0] - y[k]
    assert compute_loo_error(x, view) == pytest.approx((errors**2).mean(axis=1).min(axis=0).mean(), rel=1e-6)
    assert compute_loo_error(x, view.restrict(torch.arange(2))) == 0


def test_the_better_regression_is_chosen_on_few_rows_too():
    """A search must not impose a network on noisy test rows because it is the better one on averaged training rows."""
    view, truth = repeated(12, noise=2.0)
    ridge, mlp, better = (BlackBoxInversion(with_columns=False, model=model)(view, seed=0) for model in
                          ("ridge", "mlp", "better"))  # fmt: skip
    assert r2(better, truth) >= r2(mlp, truth)
    assert r2(better, truth) > r2(ridge, truth) - 0.1
    assert all("mlp" not in values for values in BlackBoxInversion().search.values())


# What nothing can be made of.

ATTACKS = [Imputation, BlackBoxInversion, WhiteBoxInversion]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("aux", [30, 100])
def test_a_source_that_says_nothing_tells_no_more_than_the_mean(attack, aux):
    """Embeddings that are all alike, own columns that are independent of the victim's."""
    view, truth = make_view(linear(5, 4), constant=True, aux=aux)
    assert -0.1 < r2(attack()(view, seed=0), truth) < 0.02


def test_a_network_that_explains_nothing_invents_nothing():
    view, truth = make_view(linear(5, 4), constant=True)
    assert r2(GenerativeRegressionNetwork()(view, seed=0), truth) < 0.02


@pytest.mark.parametrize("attack", ATTACKS[:2])
def test_with_two_auxiliary_rows_it_guesses_their_mean(attack):
    view, _ = make_view(linear(5, 2), aux=2)
    found = attack()(view, seed=0).scores["test"]
    assert torch.allclose(found, view.aux_labels.double().mean(dim=0).expand_as(found))


@pytest.mark.parametrize("attack", [BlackBoxInversion, WhiteBoxInversion, GenerativeRegressionNetwork])
def test_rows_of_a_split_without_messages_are_not_guessed(attack):
    view, _ = make_view(linear(5, 4))
    trained = replace(view, messages=tuple(m for m in view.messages if m.split == "train"))
    assert set(attack()(trained, seed=0).scores) == {"train"}


# The generator.


@pytest.mark.long
def test_the_generator_explains_the_predictions_it_saw():
    """Own columns are the sign of the victim's only one: to explain predictions it must give it that sign.

    The best guess from the sign is its mean given the sign, sqrt(2 / pi): an R2 of 2 / pi.
    """
    bottom = nn.Linear(1, 2)
    with torch.no_grad():
        bottom.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        bottom.bias.zero_()
    view, truth = make_view(bottom, layout=Layout.numeric(1), aux=0, own=torch.sign)
    with torch.no_grad():
        view.top.head.weight.copy_(torch.tensor([[0.0, 0, 1, -1], [0, 0, -1, 1]]))
    guess = GenerativeRegressionNetwork(steps=600)(view, seed=0)
    assert r2(guess, truth) == pytest.approx(2 / np.pi, abs=0.15)


def test_the_generator_needs_a_top_model():
    view, _ = make_view(linear(5, 2))
    with pytest.raises(InsufficientView, match="needs the joint model's top"):
        GenerativeRegressionNetwork()(replace(view, top=None), seed=0)


def test_generated_categories_are_probabilities():
    found = constrain_values(torch.randn(7, 5), MIXED)
    assert torch.allclose(found[:, 1:4].sum(dim=1), torch.ones(7))
    assert constrain_values(found, None) is found


# Parts.


def test_the_nearest_point_of_the_simplex_is_the_nearest():
    """No point of a fine grid over the simplex is nearer."""
    values = torch.randn(20, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = project_categories(values, MIXED)
    assert torch.equal(found[:, [0, 4]], values[:, [0, 4]])
    steps = torch.linspace(0, 1, 101, dtype=torch.float64)
    grid = torch.stack([a.flatten() for a in torch.meshgrid(steps, steps, indexing="ij")], dim=1)
    grid = torch.cat([grid, 1 - grid.sum(dim=1, keepdim=True)], dim=1)
    grid = grid[grid[:, 2] >= 0]
    nearest = torch.cdist(values[:, 1:4], grid).amin(dim=1)
    distance = (values - found)[:, 1:4].norm(dim=1)
    assert (distance <= nearest + 1e-9).all()
    assert (distance >= nearest - 0.02).all()
    assert torch.equal(project_categories(values, None), values)


def test_alone_is_imputation():
    for attack in (Imputation, BlackBoxInversion, WhiteBoxInversion, GenerativeRegressionNetwork):
        alone = attack(victim="passive_2").alone()
        assert type(alone) is Imputation
        assert alone.victim == "passive_2"


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Imputation(hidden=0), "expected hidden > 0"),
        (lambda: BlackBoxInversion(releases=0), "expected releases > 0"),
        (lambda: WhiteBoxInversion(steps=0), "expected steps > 0"),
        (lambda: GenerativeRegressionNetwork(penalty=-1), "expected penalty >= 0"),
        (lambda: GenerativeRegressionNetwork(lr=0), "expected lr > 0"),
    ],
)
def test_impossible_options_are_refused(make, match):
    with pytest.raises(UsageError, match=match):
        make()
