"""FSHA and URVFL: the gradients of their losses, exact where the victim is the pilot, and no other change."""

import numpy as np
import pytest
import torch
from torch import nn

from vflsec.attacks.fsha import DECODER, ClassAwareHijacking, FeatureSpaceHijacking, _Hijacking
from vflsec.attacks.imputation import Imputation
from vflsec.base.errors import UsageError
from vflsec.base.layout import Layout
from vflsec.core.attack import HijackingAttack
from vflsec.core.message import Kind, Message, Transcript
from vflsec.core.method import Trained
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.core.view import View
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.results import metrics
from vflsec.run.adversary import observe_victim_before
from vflsec.run.engine import check, expand_attacks
from vflsec.run.federation import build_federation
from vflsec.run.plan import list_trials
from vflsec.run.questions import ask
from vflsec.run.spec import AuxSpec, read
from vflsec.testing.federations import build_from_numbers, make_toy_federation


class Honest(HijackingAttack):
    name = reference = verified = "honest"
    needs = frozenset()

    def replace_gradient(self, victim, h, g, step):
        return g

    def run(self, view, *, rng):
        raise AssertionError


def fit(federation, attack=None, *, epochs=1, aux=40, **spec):
    """The trained federation, and what the active party saw."""
    if attack:
        attack.join(observe_victim_before(federation, federation.active, AuxSpec(n=aux), attack), seed=7)
        federation.malicious = {"active": attack}
    transcript = Transcript(frozenset({"active"}), frozenset(Kind))
    federation.channel.taps.append(transcript)
    train = TrainSpec(**{"epochs": epochs, "batch": 500, "lr": 1e-2, **spec})
    trained = FedSplitNN(train, ModelSpec(bottom=(), cut=3)).fit(federation)
    trained.predict("test")
    return trained, tuple(transcript.messages)


def parameters(trained, name):
    return [p.detach() for p in trained.federation.parties[name].modules.parameters()]


def are_equal(first, second, name):
    return all(map(torch.equal, parameters(first, name), parameters(second, name)))


def test_a_gradient_that_is_not_replaced_leaves_every_bit():
    honest, (through, _) = (
        fit(make_toy_federation(rows=200), epochs=2)[0],
        fit(make_toy_federation(rows=200), Honest(), epochs=2),
    )
    assert all(are_equal(honest, through, name) for name in honest.federation.parties)


def test_only_the_victim_learns_otherwise():
    """After one step; later the others hear of it through the embeddings alone."""
    honest, _ = fit(make_toy_federation(rows=200, parties=3))
    hijacked, messages = fit(make_toy_federation(rows=200, parties=3), FeatureSpaceHijacking(victim="passive_2"))
    changed = {name for name in honest.federation.parties if not are_equal(honest, hijacked, name)}
    assert changed == {"passive_2"}
    assert {m.receiver for m in messages if m.kind is Kind.GRADIENT} == {"passive_1", "passive_2"}


def test_the_gradient_is_that_of_the_losses():
    """Against a critic whose slope is known: w · z, whose mean over a batch of B has the gradient w / B."""
    attack, y = FeatureSpaceHijacking(steps=1, layers=0), torch.zeros(6, dtype=torch.long)
    hijacking = _Hijacking(attack, torch.randn(20, 4), torch.randn(20, 2), torch.zeros(20).long(), width=3, outputs=1)
    hijacking.critic = critic = nn.Linear(5, 1)
    gradient = hijacking.mislead(torch.randn(6, 3), torch.randn(6, 2), y)
    torch.testing.assert_close(gradient, critic.weight[:, :3].expand(6, 3) / 6)
    z, h = torch.randn(2, 6, 5)
    expected = critic(z).mean() - critic(h).mean() + attack.penalty * (critic.weight.norm() - 1) ** 2
    torch.testing.assert_close(attack.distinguish(critic, z, y, h, y, hijacking.rng), expected)


def test_the_gradient_with_labels_is_that_of_the_cross_entropy():
    """Against a linear critic V: V'(p - e) / B, where e is 1 at the pilot's class 2y + 1; the victim's own is 2y."""
    attack, y = ClassAwareHijacking(layers=0, warm=0), torch.tensor([0, 1, 2, 2, 1, 0])
    hijacking = _Hijacking(attack, torch.randn(20, 4), torch.randn(20, 2), torch.zeros(20).long(), width=3, outputs=6)
    hijacking.critic = critic = nn.Linear(5, 6)
    h, context = torch.randn(6, 3), torch.randn(6, 2)
    p = critic(torch.cat([h, context], dim=1)).softmax(dim=1).detach()
    expected = (p - torch.eye(6)[2 * y + 1]) @ critic.weight[:, :3] / 6
    torch.testing.assert_close(hijacking.mislead(h, context, y), expected)
    received = torch.cat([h, context], dim=1)
    loss = attack.distinguish(critic, received, y, received, y, hijacking.rng)
    torch.testing.assert_close(loss, -(p[range(6), 2 * y].log() + p[range(6), 2 * y + 1].log()).mean())


def hijack(attack, sign):
    """The columns of a victim whose model starts as the pilot, or as it would be with columns times -1, and a guess.

    It has one column, near -1 in one class and near 1 in the other: times -1, it has the same distribution.
    """
    rng = torch.Generator().manual_seed(0)
    y, none = torch.arange(600) % 2, torch.empty(600, 0)
    x = 2.0 * y[:, None] - 1 + 0.3 * torch.randn(600, 1, generator=rng)
    hijacking = _Hijacking(attack, x[:200], none[:200], y[:200], width=1, outputs=attack.count_outputs(2))
    victim = nn.Linear(1, 1)
    with torch.no_grad():
        victim.weight.copy_(sign * hijacking.pilot[0].weight)
        victim.bias.copy_(hijacking.pilot[0].bias)
    optimizer = torch.optim.Adam(victim.parameters(), 3e-3)
    for _ in range(200):
        rows = 200 + torch.randint(400, (64,), generator=rng)
        h = victim(x[rows])
        hijacking.learn(h.detach(), none[rows], y[rows])
        optimizer.zero_grad()
        h.backward(hijacking.mislead(h, none[rows], y[rows]))
        optimizer.step()
    with torch.no_grad():
        return x[200:, 0], hijacking.decoder(victim(x[200:]))[:, 0]


@pytest.mark.parametrize("sign", [1, -1])
def test_labels_tell_a_model_from_its_mirror_image_and_distributions_do_not(sign):
    """Without labels the guess keeps the sign that the victim happens to start with."""
    options = {"layers": 0, "steps": 2, "lr": 1e-2}
    truth, unlabeled = hijack(FeatureSpaceHijacking(**options), sign)
    assert torch.corrcoef(torch.stack([truth, unlabeled]))[0, 1] == pytest.approx(sign, abs=0.01)
    truth, guess = hijack(ClassAwareHijacking(**options), sign)
    assert metrics.r2(guess[:, None].numpy(), truth[:, None].numpy()) > 0.97


def test_a_victim_that_is_the_pilot_is_inverted_exactly():
    pilot, x = nn.Linear(3, 3).double(), {"train": torch.randn(30, 3).double(), "test": torch.randn(10, 3).double()}
    nn.init.orthogonal_(pilot.weight)

    class Decoder(nn.Module):
        def forward(self, z):
            return (z.double() - pilot.bias) @ pilot.weight

    messages = tuple(
        Message(Kind.EMBEDDING, "passive_1", "active", 0, "train" if split == "train" else "predict",
                {"value": pilot(rows).detach().float()}, torch.arange(len(rows)), split)
        for split, rows in x.items()
    )  # fmt: skip
    sent = Message(Kind.GRADIENT, "active", "passive_1", 0, "train", {"value": torch.zeros(30, 3)}, torch.arange(30))
    view = View(
        party="active", side="active", n_classes=3, features={s: torch.randn(len(rows), 2) for s, rows in x.items()},
        model=nn.Linear(2, 2), aux_rows=torch.arange(5), aux_labels=x["train"][:5].float(), messages=(*messages, sent),
        victim="passive_1", layout=Layout.numeric(3), further={DECODER.name: Decoder()},
    )  # fmt: skip
    guess = FeatureSpaceHijacking()(view, seed=0)
    for split, rows in x.items():
        torch.testing.assert_close(guess.scores[split], rows, rtol=0, atol=1e-5)


def make_noisy_copy():
    """The active party has a noisy copy of each column of the victim, whose bottom model is linear."""
    rng = torch.Generator().manual_seed(0)
    columns = {split: torch.randn(n, 3, generator=rng) for split, n in (("train", 400), ("test", 300))}
    copies = {split: x + torch.randn(x.shape, generator=rng) for split, x in columns.items()}
    labels = {split: (x.sum(dim=1) > 0).long() for split, x in columns.items()}
    return build_from_numbers({"active": copies, "passive_1": columns}, labels)


@pytest.mark.long
def test_it_recovers_more_than_own_columns_tell():
    attack = FeatureSpaceHijacking(layers=0, lr=1e-2)
    trained, messages = fit(make_noisy_copy(), attack, epochs=40, batch=64, aux=200)
    r2 = {}
    for guessing in (attack, Imputation()):
        question = ask(guessing, trained, "active", AuxSpec(n=200), messages)
        truth = question.truth.labels["test"]
        error = (guessing(question.view, seed=0).scores["test"] - truth).square().sum()
        r2[guessing.name] = float(1 - error / (truth - truth.mean(dim=0)).square().sum())
    assert r2["imputation"] == pytest.approx(0.5, abs=0.06)
    assert r2["fsha"] > r2["imputation"] + 0.2


SETTINGS = {"dataset": "toy", "adversary": "active", "attacks": [{"name": "fsha"}], "seeds": 1, "aux": {"n": 40}}


def test_it_learns_from_the_rows_that_are_left_out_of_the_score():
    (row,) = list_trials(read(SETTINGS))
    assert row.cell.malicious[0] == "active"
    federation = build_federation(row.cell, "cpu")
    attack = federation.malicious["active"]
    known, own, labels = attack._known
    method = FedSplitNN(TrainSpec(epochs=1), ModelSpec())
    method.build(federation)
    view = ask(attack, Trained(method, federation, {}), "active", row.aux).view
    np.testing.assert_array_equal(known, view.aux_labels)
    np.testing.assert_array_equal(own, view.features["train"][view.aux_rows])
    np.testing.assert_array_equal(labels, view.labels["train"][view.aux_rows])


def test_all_does_not_stand_for_it_and_several_trainings_are_refused():
    spec, left_out = expand_attacks(read({**SETTINGS, "attacks": [{"name": "all"}]}))
    assert "fsha" not in {attack.name for attack in spec.attacks}
    assert left_out["fsha"] == "acts in training, and was not asked for: name it in --attack"
    with pytest.raises(UsageError, match="expected one training with fsha"):
        check(read({**SETTINGS, "trainings": 2}))
