"""Registered defenses in a loop of one's own: the same changes as in vflsec's own trainings, and nothing else."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vflsec
from vflsec.audit.defending import CROSSING, is_on_messages
from vflsec.audit.recorder import Recorder
from vflsec.audit.transcript import TranscriptFolder
from vflsec.base.errors import UsageError
from vflsec.core import registry
from vflsec.core.defense import Release
from vflsec.core.message import Kind
from vflsec.run.plan import resolve
from vflsec.run.spec import parse_defense

X, Y = torch.randn(64, 5, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 2


def step(guard=None, *, recorder=None):
    """Return the embedding that arrives, and the gradients of the bottom model's weight and of the embedding."""
    torch.manual_seed(0)
    bottom, top = nn.Linear(5, 3), nn.Linear(3, 2)
    h = sent = bottom(X)
    sent.retain_grad()
    if guard:
        h = guard.passive(h)
        h = recorder.cut(h, rows=torch.arange(64)) if recorder else h
        h = guard.active(h, labels=Y)
    F.cross_entropy(top(h), Y).backward()
    return h.detach(), bottom.weight.grad, sent.grad


def expected(name, kind, value, seed):
    defense = resolve(parse_defense(name)).defense()
    release = Release(
        "active", "passive_1", kind, 0, "train", "value", torch.arange(64), Y, torch.Generator().manual_seed(seed)
    )
    return getattr(defense, f"on_{kind.value}")(value.clone(), release)


@pytest.mark.parametrize("name", ["iso:lambda=5", "marvell:s=4", "max-norm:lambda=4", "compress:strength=0.5"])
def test_gradients_change_as_in_trainings_of_vflsec(name):
    plain, defended = step(), step(vflsec.defend(name, seed=7))
    assert torch.equal(plain[0], defended[0]), "nothing happens on the way there"
    assert torch.allclose(defended[2], expected(name, Kind.GRADIENT, plain[2], 7), atol=1e-7)
    assert not torch.equal(plain[2], defended[2])


def test_embeddings_change_and_their_gradients_pass():
    plain, defended = step(), step(vflsec.defend("iso:lambda=5@embedding", seed=7))
    assert torch.allclose(defended[0], expected("iso:lambda=5@embedding", Kind.EMBEDDING, plain[0], 7 ^ 1))
    assert not torch.equal(plain[0], defended[0])
    assert defended[2].shape == plain[2].shape


@pytest.mark.parametrize("name", sorted(registry.list_all("defenses")))
def test_strength_0_is_the_identity_or_the_defense_is_refused(name):
    if not is_on_messages(registry.load("defenses", name)):
        with pytest.raises(UsageError, match="train it with vflsec train"):
            vflsec.defend(f"{name}:strength=0")
        return
    points = registry.load("defenses", name).points
    if points and not CROSSING & set(points):
        with pytest.raises(UsageError, match="which cross a cut layer"):
            vflsec.defend(f"{name}:strength=0")
        return
    guard = vflsec.defend(f"{name}:strength=0", releases=3)
    assert all(torch.equal(one, other) for one, other in zip(step(), step(guard), strict=True))


def test_noise_is_new_each_time_and_each_step_unless_a_seed_is_given():
    guard = vflsec.defend("iso:lambda=5")
    drawn = [step(guard)[1] for _ in range(3)] + [step(vflsec.defend("iso:lambda=5"))[1]]
    assert len({tuple(one.flatten().tolist()) for one in drawn}) == 4
    first, second = (step(vflsec.defend("iso:lambda=5", seed=1))[1] for _ in range(2))
    assert torch.equal(first, second)


def test_the_recorder_between_both_sides_sees_what_crosses(tmp_path):
    guard = vflsec.defend("iso:lambda=5@gradient+embedding", seed=3)
    with Recorder(tmp_path / "t", parties={"bank": "active", "bureau": "passive"}) as recorder:
        arrived, _, returned = step(guard, recorder=recorder)
    embedding, gradient = TranscriptFolder(tmp_path / "t").messages()
    assert torch.allclose(torch.tensor(embedding.values), arrived)
    assert torch.allclose(torch.tensor(gradient.values), returned, atol=1e-7)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "the name of a defense"),
        (("iso:lamda=1",), "unknown option 'lamda'"),
        (("isso",), "Did you mean iso"),
        (("dp-sgd:epsilon=2",), "train it with vflsec train"),
        (("phe",), "train it with vflsec train"),
        (("iso:lambda=1@parameters",), "cut layer, got parameters"),
        (("gaussian-dp:epsilon=2",), "add releases="),
    ],
)
def test_mistakes_are_one_line(names, message):
    with pytest.raises(UsageError, match=message):
        vflsec.defend(*names)


@pytest.mark.statistical
def test_the_noise_has_the_scale_of_the_source():
    """ISO adds noise of standard deviation lambda * max norm / sqrt(d) to each number (Yang et al., appendix)."""
    guard = vflsec.defend("iso:lambda=2", seed=0)
    h = torch.zeros(4000, 16, requires_grad=True)
    gradient = torch.randn(4000, 16, generator=torch.Generator().manual_seed(1))
    guard(h).backward(gradient)
    noise = h.grad - gradient
    scale = 2 * gradient.norm(dim=1).max() / 16**0.5
    assert abs(noise.std() / scale - 1) < 0.02
