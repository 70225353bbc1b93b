"""Model completion: its formulas, what it leaves alone, what it recovers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from vflsec.attacks import model_completion
from vflsec.attacks.model_completion import (
    BUDGETS,
    ModelCompletion,
    Standardize,
    inference_head,
    sharpen,
    still_falling,
)

from vflsec.core.errors import UsageError
from vflsec.core.seeds import generator
from vflsec.core.view import View

MODES = {
    "supervised": {"epochs": 60, "lr": 0.02},
    "mixmatch": {"mode": "mixmatch", "epochs": 4, "steps": 50},
}
ENOUGH = {"supervised": {"epochs": 180}, "mixmatch": {"epochs": 10, "steps": 200}}


def make_view(*, n=300, n_aux=20, classes=2, noise=1.0, seed=0, bottom=None):
    """A bottom model whose first embedding coordinates give the class away, behind scales far from one."""
    rng = generator(seed, "toy embeddings")
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
    rows = torch.tensor([p, p])
    assert torch.allclose(sharpen(rows, temperature=temperature), torch.tensor([expected, expected]))


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_sharpen_refuses_to_flatten(temperature):
    with pytest.raises(UsageError, match=r"expected 0 < temperature <= 1"):
        sharpen(torch.ones(1, 2), temperature=temperature)


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
    assert still_falling(losses) is falling


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
    view = view.private_copy()
    before = {key: value.clone() for key, value in view.model.state_dict().items()}
    ModelCompletion(**MODES[mode]).run(view, rng=generator(0, "x"))
    assert all(torch.equal(value, before[key]) for key, value in view.model.state_dict().items())


@pytest.mark.parametrize("mode", MODES)
def test_an_unfrozen_bottom_is_fitted(mode):
    view, _ = make_view()
    view = view.private_copy()
    before = view.model.weight.detach().clone()
    ModelCompletion(**MODES[mode], freeze_bottom=False).run(view, rng=generator(0, "x"))
    assert not torch.equal(view.model.weight, before)


def test_the_fast_path_equals_a_naive_full_pass():
    """Frozen embeddings computed once, against the completed network run whole on every batch."""
    view, _ = make_view()
    attack = ModelCompletion(epochs=5, batch=8)
    found = attack(view, seed=3)

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


def test_standardising_uses_the_adversarys_own_rows():
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
    rng = generator(0, "columns")
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
    prior = attack.alone()(view.without_federation(fresh), seed=0)
    assert accuracy(attack(view, seed=0), truth) > 0.9
    assert accuracy(prior, truth) < 0.75


def test_alone_is_the_same_training_of_the_whole_network():
    attack = ModelCompletion(mode="mixmatch", layers=2, epochs=3, steps=7, lr=0.1, batch=4)
    assert vars(attack.alone()) == {**vars(attack), "freeze_bottom": False}


@pytest.mark.parametrize("layers", [1, 3])
def test_the_head_is_blocks_of_norm_relu_linear(layers):
    head = inference_head(4, 3, layers)
    kinds = [type(layer) for block in head for layer in block]
    assert kinds == [nn.BatchNorm1d, nn.ReLU, nn.Linear] * layers
    assert [block[2].out_features for block in head] == [4] * (layers - 1) + [3]


def test_draws_mix_at_least_half_of_the_row_itself():
    draws = list(ModelCompletion(mode="mixmatch", steps=500)._draws(10, 30, 6, generator(0, "draws")))
    assert len(draws) == 500
    shares = [draw.share for draw in draws]
    assert min(shares) >= 0.5
    assert max(shares) <= 1.0
    # E[max(l, 1 - l)] for l ~ Beta(.75, .75), by numerical integration
    assert sum(shares) / 500 == pytest.approx(0.7718, abs=4 * 0.155 / 500**0.5)
    for draw in draws:
        assert draw.known.unique().numel() == 6
        assert draw.known.max() < 10
        assert draw.other.max() < 30
        assert sorted(draw.partner.tolist()) == list(range(12))
    assert torch.stack([draw.known for draw in draws]).unique().numel() == 10


def test_mixmatch_weighs_unlabelled_rows_more_and_more(monkeypatch):
    """lambda_u = 50 times the share of the budget spent; nothing at the first step."""
    weights, original = [], F.mse_loss

    def spy(guess, target):
        loss = original(guess, target)
        loss.register_hook(lambda gradient: weights.append(gradient.item()))
        return loss

    monkeypatch.setattr(model_completion.F, "mse_loss", spy)
    view, _ = make_view()
    ModelCompletion(mode="mixmatch", epochs=2, steps=5)(view, seed=0)
    assert weights == pytest.approx([50 * t / 10 for t in range(10)])


def test_mixmatch_takes_unlabelled_rows_from_the_rows_it_does_not_know():
    """No row that gets a guessed label is one whose label is known."""
    view, _ = make_view(n_aux=20)
    seen = []

    class Recording(nn.Module):
        def forward(self, x):
            seen.append(x.detach().clone())
            return x[:, :4]

    ModelCompletion(mode="mixmatch", epochs=1, steps=2, batch=8)(
        View("passive_1", "passive", 2, view.features, Recording(), view.aux_rows, view.aux_labels), seed=0
    )
    own = view.features["train"]
    assert torch.equal(seen[0], own[20:])  # the auxiliary rows are the first twenty
    assert [len(x) for x in seen[1:]] == [16, 16, len(own), len(own)]  # two mixed batches, then the guess


def naive_mixmatch(view, *, epochs, steps, seed):
    """Fu et al., step by step as written: every forward pass runs the whole completed network."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    bottom, known = view.model.eval(), view.aux_rows
    head = inference_head(8, view.n_classes, 1)
    model = nn.Sequential(bottom, head)
    unknown = torch.tensor([i for i in range(len(view.features["train"])) if i not in set(known.tolist())])
    x_known, x_unknown = view.features["train"][known], view.features["train"][unknown]
    y_known = F.one_hot(view.aux_labels, view.n_classes).float()
    averages = [p.detach().clone() for p in head.parameters()]
    optimizer = torch.optim.Adam(head.parameters(), 2e-3)
    drawer, t = ModelCompletion(mode="mixmatch", epochs=epochs, steps=steps), 0
    for _ in range(epochs):
        for draw in drawer._draws(len(x_known), len(x_unknown), 16, rng):
            x, u = x_known[draw.known], x_unknown[draw.other]
            p = model(u).softmax(dim=1).detach() ** (1 / 0.8)
            rows = torch.cat([x, u])
            targets = torch.cat([y_known[draw.known], p / p.sum(dim=1, keepdim=True)])
            mixed = draw.share * rows + (1 - draw.share) * rows[draw.partner]
            mixed_targets = draw.share * targets + (1 - draw.share) * targets[draw.partner]
            z = model(mixed)
            labelled = -(mixed_targets[:16] * z[:16].log_softmax(dim=1)).sum(dim=1).mean()
            unlabelled = ((z[16:].softmax(dim=1) - mixed_targets[16:]) ** 2).mean()
            optimizer.zero_grad()
            (labelled + 50 * t / (epochs * steps) * unlabelled).backward()
            optimizer.step()
            for average, parameter in zip(averages, head.parameters(), strict=True):
                average.mul_(0.999).add_(parameter.detach(), alpha=0.001)
                parameter.data.mul_(1 - 0.02 * 2e-3)
            t += 1
    for average, parameter in zip(averages, head.parameters(), strict=True):
        parameter.data.copy_(average)
    model.eval()
    return {split: model(x).detach() for split, x in view.features.items()}


def test_mixmatch_equals_its_description():
    view, _ = make_view()
    found = ModelCompletion(mode="mixmatch", epochs=3, steps=20)(view, seed=4)
    with torch.random.fork_rng(devices=[]):
        expected = naive_mixmatch(view, epochs=3, steps=20, seed=4)
    for split, scores in found.scores.items():
        assert torch.allclose(scores, expected[split], atol=1e-4)


@pytest.mark.parametrize("mode", BUDGETS)
def test_the_sources_numbers_are_the_defaults(mode):
    attack = ModelCompletion(mode=mode)
    assert (attack.epochs, attack.lr, attack.batch) == tuple(BUDGETS[mode])


@pytest.mark.parametrize("option", ["layers", "epochs", "steps", "lr", "batch"])
def test_impossible_options_are_refused(option):
    with pytest.raises(UsageError, match=f"expected {option} > 0, got 0"):
        ModelCompletion(**{option: 0})
