"""Model completion: its formulas, what it leaves alone, what it recovers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vflsec.attacks import model_completion
from vflsec.attacks.model_completion import (
    BUDGETS,
    Adam,
    ModelCompletion,
    Standardize,
    as_vectors,
    build_head,
    compute_slope,
    sharpen,
)
from vflsec.base.errors import UsageError
from vflsec.base.seeds import make_rng
from vflsec.core.view import View
from vflsec.inference.regression import is_still_falling

MODES = {
    "supervised": {"epochs": 60, "lr": 0.02},
    "mixmatch": {"mode": "mixmatch", "epochs": 4, "steps": 50},
}
ENOUGH = {"supervised": {"epochs": 180}, "mixmatch": {"epochs": 10, "steps": 200}}


def make_view(*, n=300, n_aux=20, classes=2, noise=1.0, seed=0, bottom=None):
    """A bottom model whose first embedding coordinates give the class away, behind scales far from one."""
    rng = make_rng(seed, "toy embeddings")
    y = torch.arange(n) % classes
    x = torch.cat([4.0 * F.one_hot(y, classes), torch.zeros(n, 3)], dim=1)
    x = x + noise * torch.randn(x.shape, generator=rng)
    bottom = bottom or nn.Linear(classes + 3, 8)
    if isinstance(bottom, nn.Linear):
        with torch.no_grad():
            bottom.weight.copy_(torch.randn(bottom.weight.shape, generator=rng) * 100)
            bottom.bias.fill_(50.0)
    aux = torch.arange(n_aux)
    half = n // 2
    features = {"train": x[:half], "test": x[half:]}
    return View("passive_1", "passive", classes, features, bottom, aux, y[aux]), {"train": y[:half], "test": y[half:]}


def accuracy(guess, truth, split="test"):
    return float((guess.scores[split].argmax(dim=1) == truth[split]).double().mean())


@pytest.mark.parametrize(
    ("p", "temperature", "expected"),
    [
        ([0.2, 0.8], 1.0, [0.2, 0.8]),
        ([0.2, 0.8], 0.5, [1 / 17, 16 / 17]),
        ([0.5, 0.5], 0.1, [0.5, 0.5]),
        ([0.0, 1.0], 0.8, [0.0, 1.0]),
        ([0.1, 0.3, 0.6], 0.5, [1 / 46, 9 / 46, 36 / 46]),
    ],
)
def test_sharpen_closed_form(p, temperature, expected):
    logits = torch.tensor([p, p]).log() + torch.tensor([[0.0], [7.0]])
    assert torch.allclose(sharpen(logits, temperature=temperature), torch.tensor([expected, expected]))


@pytest.mark.parametrize(
    ("losses", "falling"),
    [
        ([1.0 - 0.005 * t for t in range(100)], True),  # a straight line down
        ([2.0 * 0.9**t for t in range(100)], False),  # settled long ago
        ([2.0 * 0.99**t for t in range(100)], True),
        ([1.0] * 100, False),
        ([0.01 * t for t in range(100)], False),  # rising is not falling
        ([1.0, 0.5], True),
        ([0.7, 0.7, 0.7], True),  # too short to tell
    ],
)
def test_a_loss_is_still_falling_if_its_last_tenth_fell(losses, falling):
    assert is_still_falling(losses) is falling


@pytest.mark.parametrize(("epochs", "converged"), [(2, False), (400, True)])
def test_a_budget_too_small_is_owned_up_to(epochs, converged):
    view, _ = make_view(noise=2.0, n_aux=60)
    attack = ModelCompletion(epochs=epochs, lr=0.02)
    guess = attack(view, seed=0)
    assert guess.converged is converged
    assert guess.budget == {"updates": epochs}


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_bottom_keeps_parameters_and_buffers(mode, monkeypatch):
    bottom = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    view, _ = make_view(bottom=bottom)
    view = view.copy_private()
    before = {key: value.clone() for key, value in view.model.state_dict().items()}
    ModelCompletion(**MODES[mode]).run(view, rng=make_rng(0, "x"))
    assert all(torch.equal(value, before[key]) for key, value in view.model.state_dict().items())


@pytest.mark.parametrize("mode", MODES)
def test_an_unfrozen_bottom_is_fitted(mode):
    view, _ = make_view()
    view = view.copy_private()
    before = view.model.weight.detach().clone()
    ModelCompletion(**MODES[mode], freeze_bottom=False).run(view, rng=make_rng(0, "x"))
    assert not torch.equal(view.model.weight, before)


def test_the_fast_path_equals_a_naive_full_pass():
    """Frozen embeddings computed once, against the completed network run whole on every batch."""
    view, _ = make_view()
    attack = ModelCompletion(epochs=5, batch=8)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        found = attack.run(view.copy_private(), rng=torch.Generator().manual_seed(3))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        rng, bottom = torch.Generator().manual_seed(3), view.model
        with torch.no_grad():
            h = bottom(view.features["train"])
        head = nn.Linear(h.shape[1], 2)
        optimizer = torch.optim.Adam(head.parameters(), 5e-3, weight_decay=1e-6)

        def completed(x):
            return head((bottom(x).detach() - h.mean(dim=0)) / h.std(dim=0, correction=0))

        for _ in range(5):
            for rows in torch.randperm(20, generator=rng).split(8):
                loss = F.cross_entropy(completed(view.features["train"][view.aux_rows[rows]]), view.aux_labels[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    for split, x in view.features.items():
        assert torch.allclose(found.scores[split], completed(x).detach(), atol=1e-4)


@pytest.mark.parametrize("freeze_bottom", [True, False])
def test_views_that_are_fitted_at_once_are_guessed_as_by_themselves(freeze_bottom):
    view, _ = make_view()
    views = [view.restrict(torch.tensor([k for k in range(20) if k % 5 != fold])) for fold in range(5)]
    views.append(view)  # which has more labels than the others
    attack = ModelCompletion(epochs=5, batch=8, freeze_bottom=freeze_bottom)
    for own, found in zip(views, attack.on_each(views, seed=3), strict=True):
        expected = attack(own, seed=3)
        assert found.budget == expected.budget
        for split, scores in expected.scores.items():
            assert torch.allclose(found.scores[split], scores, atol=1e-5)


def test_standardizing_uses_the_adversarys_own_rows():
    h = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
    assert Standardize(h)(h).tolist() == [[-1.0, 0.0], [1.0, 0.0]]  # a constant column becomes zero, not NaN


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("classes", [2, 5])
def test_it_recovers_separable_classes(mode, classes):
    view, truth = make_view(classes=classes, n_aux=8 * classes, n=120 * classes)
    guess = ModelCompletion(**{**MODES[mode], **ENOUGH[mode]})(view, seed=0)
    assert accuracy(guess, truth) > 0.9


def test_a_trained_bottom_beats_the_prior():
    """Six labels on forty columns of which one matters: the federation's bottom model knows which."""
    rng = make_rng(0, "columns")
    x = torch.randn(600, 40, generator=rng)
    y = (x[:, 0] > 0).long()
    aux = torch.cat([(y == c).nonzero().flatten()[:3] for c in (0, 1)])
    trained = nn.Linear(40, 2)
    with torch.no_grad():
        trained.weight.zero_()[:, 0] = torch.tensor([1.0, -1.0])
    features = {"train": x[:300], "test": x[300:]}
    view = View("passive_1", "passive", 2, features, trained, aux, y[aux])
    truth = {"test": y[300:]}
    attack = ModelCompletion(epochs=100)
    fresh = nn.Linear(40, 2)
    with torch.no_grad():
        fresh.weight.copy_(torch.randn(2, 40, generator=rng) / 40**0.5)
    prior = attack.alone()(view.drop_federation(fresh), seed=0)
    assert accuracy(attack(view, seed=0), truth) > 0.9
    assert accuracy(prior, truth) < 0.75


def test_alone_is_the_same_training_of_the_whole_network():
    attack = ModelCompletion(mode="mixmatch", layers=2, epochs=3, steps=7, lr=0.1, batch=4)
    assert vars(attack.alone()) == {**vars(attack), "freeze_bottom": False}


@pytest.mark.parametrize("layers", [1, 3])
def test_the_head_is_blocks_of_norm_relu_linear(layers):
    head = build_head(4, 3, layers)
    assert [type(layer) for layer in head] == [nn.BatchNorm1d, nn.ReLU, nn.Linear] * layers
    assert [layer.out_features for layer in head[2::3]] == [4] * (layers - 1) + [3]


def test_draws_mix_at_least_half_of_the_row_itself():
    draws = ModelCompletion(mode="mixmatch", steps=500, batch=6)._draw_choices(10, 40, make_rng(0, "draws"))
    assert draws.share.shape == (500,)
    assert draws.share.min() >= 0.5
    assert draws.share.max() <= 1.0
    # E[max(l, 1 - l)] for l ~ Beta(.75, .75), by numerical integration
    assert float(draws.share.mean()) == pytest.approx(0.7718, abs=4 * 0.155 / 500**0.5)
    assert all(known.unique().numel() == 6 for known in draws.known)
    assert draws.known.unique().tolist() == list(range(10))
    assert draws.other.unique().tolist() == list(range(10, 40))
    assert torch.equal(draws.partner.sort(dim=1).values, torch.arange(12).expand(500, 12))


def test_draws_are_split_in_order():
    draws = ModelCompletion(mode="mixmatch", steps=10, batch=6)._draw_choices(10, 40, make_rng(0, "draws"))
    parts = list(draws.split(4))
    assert [len(part.share) for part in parts] == [4, 4, 2]
    assert all(
        torch.equal(torch.cat(choice), whole) for choice, whole in zip(zip(*parts, strict=True), draws, strict=True)
    )


@pytest.mark.parametrize("weight", [0.0, 1.7])
def test_the_slope_is_that_of_the_loss(weight):
    """The closed form against automatic differentiation of the two losses as the source writes them."""
    rng = make_rng(0, "slope")
    logits = (3 * torch.randn(12, 5, generator=rng)).double().requires_grad_()
    targets = torch.randn(12, 5, generator=rng).double().softmax(dim=1)
    labeled = F.cross_entropy(logits[:6], targets[:6])
    (labeled + weight * F.mse_loss(logits[6:].softmax(dim=1), targets[6:])).backward()
    assert torch.allclose(compute_slope(logits.detach(), targets, weight), logits.grad, atol=1e-12)


def test_adam_is_torchs():
    rng = make_rng(0, "slopes")
    ours = torch.randn(9, generator=rng)
    theirs = nn.Parameter(ours.clone())
    adam, reference = Adam(ours, 0.01), torch.optim.Adam([theirs], 0.01)
    for _ in range(30):
        theirs.grad = torch.randn(9, generator=rng)
        reference.step()
        adam.step(theirs.grad)
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_one_vector_is_all_parameters_and_another_all_gradients():
    layer = nn.Linear(3, 2)
    before = torch.cat([p.detach().flatten() for p in layer.parameters()])
    weights, slopes = as_vectors(list(layer.parameters()))
    assert torch.equal(weights, before)
    layer(torch.tensor([[1.0, 2.0, 3.0]])).sum().backward()
    assert slopes.tolist() == [1, 2, 3, 1, 2, 3, 1, 1]
    weights.fill_(5.0)
    assert layer.bias.tolist() == [5.0, 5.0]


def test_mixmatch_weighs_unlabeled_rows_more_and_more(monkeypatch):
    """lambda_u = 50 times the share of the budget spent; nothing at the first step."""
    weights = []

    def spy(logits, targets, weight):
        weights.append(weight)
        return compute_slope(logits, targets, weight)

    monkeypatch.setattr(model_completion, "compute_slope", spy)
    view, _ = make_view()
    ModelCompletion(mode="mixmatch", epochs=2, steps=5)(view, seed=0)
    assert weights == pytest.approx([50 * t / 10 for t in range(10)])


def test_mixmatch_takes_unlabeled_rows_from_the_rows_it_does_not_know():
    """No row that gets a guessed label is one whose label is known."""
    view, _ = make_view(n_aux=20)
    own, aux = view.features["train"], torch.arange(7, 27)
    seen = []

    class Recording(nn.Module):
        def forward(self, x):
            seen.append(x.detach().clone())
            return x[:, :4]

    further = torch.full((3, own.shape[1]), 9.0)
    ModelCompletion(mode="mixmatch", epochs=1, steps=2, batch=8)(
        View("passive_1", "passive", 2, view.features, Recording(), aux, torch.arange(20) % 2, unlabeled=further),
        seed=0,
    )
    assert torch.equal(seen[0], torch.cat([own[7:27], own[:7], own[27:], further]))  # the twenty known ones first
    assert [len(x) for x in seen[1:]] == [32, len(own), len(own)]  # two mixed batches at once, then the guess


@pytest.fixture
def double():
    """Eight bytes a number: a bias before a BatchNorm has no slope but rounding, which Adam takes at full length."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def naive_mixmatch(view, *, freeze_bottom, layers, epochs, steps, seed):
    """Fu et al., step by step, guesses in one batch with labeled rows: every pass runs the whole completed network."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    bottom, known = copy.deepcopy(view.model).train(not freeze_bottom), view.aux_rows
    head = build_head(8, view.n_classes, layers)
    model = nn.Sequential(bottom, head)
    fitted = list((head if freeze_bottom else model).parameters())
    unknown = torch.tensor([i for i in range(len(view.features["train"])) if i not in set(known.tolist())])
    x_all = view.features["train"][torch.cat([known, unknown])]
    y_known = F.one_hot(view.aux_labels, view.n_classes).double()
    statistics = [b for b in (head if freeze_bottom else model).buffers() if b.dtype == torch.float64]
    kept = []
    optimizer = torch.optim.Adam(fitted, 2e-3)
    drawer, t = ModelCompletion(mode="mixmatch", epochs=epochs, steps=steps), 0
    for _ in range(epochs):
        for known, other, partner, share in zip(*drawer._draw_choices(len(y_known), len(x_all), rng), strict=True):
            x, u = x_all[known], x_all[other]
            rows = torch.cat([x, u])
            p = model(rows)[16:].softmax(dim=1).detach() ** (1 / 0.8)
            targets = torch.cat([y_known[known], p / p.sum(dim=1, keepdim=True)])
            mixed = share * rows + (1 - share) * rows[partner]
            mixed_targets = share * targets + (1 - share) * targets[partner]
            z = model(mixed)
            labeled = -(mixed_targets[:16] * z[:16].log_softmax(dim=1)).sum(dim=1).mean()
            unlabeled = ((z[16:].softmax(dim=1) - mixed_targets[16:]) ** 2).mean()
            optimizer.zero_grad()
            (labeled + 50 * t / (epochs * steps) * unlabeled).backward()
            optimizer.step()
            kept.append([value.detach().clone() for value in [*fitted, *statistics]])
            for parameter in fitted:
                parameter.data.mul_(1 - 0.02 * 2e-3)
            t += 1
    for value, *history in zip([*fitted, *statistics], *kept, strict=True):
        value.data.copy_(torch.stack(history).mean(dim=0))  # fewer than a thousand updates: their mean
    model.eval()
    return {split: model(x).detach() for split, x in view.features.items()}


@pytest.mark.sampled
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("freeze_bottom", [True, False])
def test_mixmatch_equals_its_description(freeze_bottom, layers, double, monkeypatch):
    monkeypatch.setattr(model_completion, "TOGETHER", 7)  # two full groups of steps and a part of one
    view, _ = make_view()
    options = {"freeze_bottom": freeze_bottom, "layers": layers, "epochs": 3, "steps": 20}
    found = ModelCompletion(mode="mixmatch", **options)(view, seed=4)
    with torch.random.fork_rng(devices=[]):
        expected = naive_mixmatch(view, **options, seed=4)
    for split, scores in found.scores.items():
        assert torch.allclose(scores, expected[split], atol=1e-6)


@pytest.mark.statistical
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("share", [0.6, 0.8])
def test_mixmatch_is_no_worse_than_mc_where_classes_are_uneven(share, seed):
    """Two Gaussian classes, 80 known rows drawn evenly from uneven classes."""
    rng = make_rng(seed, "uneven")
    y = (torch.rand(3000, generator=rng) < share).long()
    x = torch.randn(3000, 5, generator=rng)
    x[:, 0] += 2.6 * y
    half = len(y) // 2
    aux = torch.cat([(y[:half] == c).nonzero().flatten()[:40] for c in (0, 1)])
    bottom = nn.Linear(5, 2)
    with torch.no_grad():
        bottom.weight.copy_(0.3 * torch.randn(2, 5, generator=rng))
        bottom.weight[:, 0] += torch.tensor([-1.0, 1.0])
        bottom.bias.zero_()
    view = View("passive_1", "passive", 2, {"train": x[:half], "test": x[half:]}, bottom, aux, y[aux])
    found = {}
    for mode, budget in {"supervised": {"epochs": 900}, "mixmatch": {"epochs": 15, "steps": 300}}.items():
        guess = ModelCompletion(mode=mode, **budget)(view, seed=seed)
        found[mode] = accuracy(guess, {"test": y[half:]})
        assert guess.converged, mode
        assert len(guess.scores["test"].argmax(dim=1).unique()) == 2
    half_width = 1.96 * (found["supervised"] * (1 - found["supervised"]) / half) ** 0.5
    assert found["mixmatch"] >= found["supervised"] - half_width


@pytest.mark.parametrize("mode", BUDGETS)
def test_the_sources_numbers_are_the_defaults(mode):
    attack = ModelCompletion(mode=mode)
    assert (attack.epochs, attack.lr, attack.batch) == tuple(BUDGETS[mode])


@pytest.mark.parametrize("option", ["layers", "epochs", "steps", "lr", "batch"])
def test_impossible_options_are_refused(option):
    with pytest.raises(UsageError, match=f"expected {option} > 0, got 0"):
        ModelCompletion(**{option: 0})
