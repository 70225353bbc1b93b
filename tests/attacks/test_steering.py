"""Steering: the gradient of the decoder's errors for known rows, honest ones for all others, and quiet as promised."""

import pytest
import torch
from sklearn.linear_model import LinearRegression

from vflsec.attacks.steering import Steering, restrict
from vflsec.core.message import Kind, Step, Transcript
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.inference.hijacking import find_alarm
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.run.adversary import observe_victim_before
from vflsec.run.spec import AuxSpec
from vflsec.testing.federations import build_from_numbers, make_toy_federation


def join(federation, aux=40, **options):
    attack = Steering(**options)
    attack.join(observe_victim_before(federation, federation.active, AuxSpec(n=aux), attack), seed=7)
    return attack


def replace(attack, n=70, **options):
    rng = torch.Generator().manual_seed(0)
    h, g = torch.randn(n, 3, generator=rng), torch.randn(n, 3, generator=rng)
    return attack.replace_gradient("passive_1", h, g, Step(0, "train", torch.arange(n))), h, g


def test_known_rows_get_the_gradient_of_the_decoders_errors_and_others_the_honest_one():
    attack = join(make_toy_federation(rows=100), strength=5.0)
    sent, h, g = replace(attack)
    known = attack._places >= 0
    assert torch.equal(sent[~known], g[~known])
    addition = (sent - g)[known].double()
    assert addition.norm(dim=1).mean() == pytest.approx(5 * float(g.norm(dim=1).mean()), rel=1e-4)
    decoder, x = attack._decoder.double(), attack._columns[attack._places[known]].double()
    expected, z = torch.zeros_like(addition), h[known].double()
    for k in range(3):
        ahead, behind = z.clone(), z.clone()
        ahead[:, k] += 1e-6
        behind[:, k] -= 1e-6
        with torch.no_grad():
            errors = [(decoder(at) - x).square().sum(dim=1) for at in (ahead, behind)]
        expected[:, k] = (errors[0] - errors[1]) / 2e-6
    ratio = addition.norm() / expected.norm()
    torch.testing.assert_close(addition, expected * ratio, rtol=1e-3, atol=1e-4)


def test_other_victims_and_test_rows_get_honest_gradients():
    attack, g = join(make_toy_federation(rows=100, parties=3), victim="passive_2"), torch.randn(70, 3)
    for victim, split in (("passive_1", "train"), ("passive_2", "test")):
        step = Step(0, "train", torch.arange(70), split=split)
        assert attack.replace_gradient(victim, torch.randn(70, 3), g, step) is g


@pytest.mark.parametrize("free", [True, False])
def test_quiet_gradients_have_the_rank_and_the_signs_of_honest_ones(free):
    rng = torch.Generator().manual_seed(0)
    for rank in (1, 2):
        honest = torch.randn(50, rank, generator=rng) @ torch.randn(rank, 6, generator=rng)
        wanted = honest + 100 * torch.randn(50, rank, generator=rng) @ torch.randn(rank, 6, generator=rng)
        sent = restrict(wanted, honest, rank, float(honest.norm(dim=1).max()), free=free)
        assert torch.linalg.matrix_rank(sent, rtol=1e-4) == rank
        signs = torch.linalg.svd(honest)[0][:, 0].sign() * torch.linalg.svd(sent)[0][:, 0].sign()
        assert rank > 1 or (signs == signs[0]).all()
        both = torch.linalg.matrix_rank(torch.cat([sent, honest]), rtol=1e-4)
        assert both > rank if free else both == rank
        assert sent.norm(dim=1).max() > 2 * honest.norm(dim=1).max()
        torch.testing.assert_close(restrict(honest, honest, rank, 1.0, free=free), honest)


def test_novel_steering_leaves_what_earlier_embeddings_tell_and_grows_what_they_do_not():
    """The second embedding is the first one in one coordinate, and a new direction in the other."""
    attack, rng = join(make_toy_federation(rows=100), aim="novel", strength=5.0), torch.Generator().manual_seed(0)
    first, new, g = (torch.randn(70, 2, generator=rng) for _ in range(3))
    rows = torch.arange(70)
    assert torch.equal(attack.replace_gradient("passive_1", first, g, Step(0, "train", rows)), g)
    second = torch.stack([3 * first[:, 0], new[:, 1]], dim=1)
    addition = attack.replace_gradient("passive_1", second, g, Step(1, "train", rows)) - g
    assert addition.norm(dim=1).mean() == pytest.approx(5 * float(g.norm(dim=1).mean()), rel=1e-4)
    assert addition[:, 0].norm() < 0.02 * addition[:, 1].norm()
    left = new[:, 1] - torch.from_numpy(LinearRegression().fit(first, new[:, 1]).predict(first))
    assert torch.corrcoef(torch.stack([addition[:, 1], -left]))[0, 1] > 0.999


def test_novel_steering_remembers_embeddings_of_many_epochs():
    """The last embedding is one of 20 epochs before in one coordinate, and a new direction in the other."""
    attack, rng = join(make_toy_federation(rows=100), aim="novel"), torch.Generator().manual_seed(0)
    g, new = torch.randn(70, 2, generator=rng), torch.randn(70, generator=rng)
    past = torch.randn(20, 70, 2, generator=rng)
    for epoch, h in enumerate([*past, torch.stack([past[0, :, 0], new], dim=1)]):
        addition = attack.replace_gradient("passive_1", h, g, Step(epoch, "train", torch.arange(70))) - g
    assert addition[:, 0].norm() < 0.05 * addition[:, 1].norm()


@pytest.mark.parametrize("aim", ["known", "novel"])
@pytest.mark.parametrize("quiet", [True, False])
def test_only_quiet_steering_raises_no_alarm(quiet, aim):
    federation = make_toy_federation(rows=300)
    federation.malicious = {"active": join(federation, quiet=quiet, aim=aim)}
    transcript = Transcript(frozenset({"passive_1"}), frozenset({Kind.GRADIENT}))
    federation.channel.taps.append(transcript)
    FedSplitNN(TrainSpec(epochs=5, batch=50), ModelSpec(bottom=(8,), cut=3)).fit(federation)
    sent = [m for m in transcript.messages if m.split == "train"]
    alarm, _ = find_alarm([m.payload["value"] for m in sent], [m.rows for m in sent], rank=1)
    first = {"known": 1, "novel": 6}[aim]  # of five batches an epoch
    assert alarm is None if quiet else alarm == first


@pytest.mark.statistical
@pytest.mark.parametrize("aim", ["known", "novel"])
def test_quiet_steering_raises_no_alarm_where_rows_are_fit(aim):
    """Rounding then adds to the rank of honest gradients."""
    for seed in range(4):
        federation = make_toy_federation(rows=150, seed=seed)
        federation.malicious = {"active": join(federation, quiet=True, aim=aim)}
        transcript = Transcript(frozenset({"passive_1"}), frozenset({Kind.GRADIENT}))
        federation.channel.taps.append(transcript)
        FedSplitNN(TrainSpec(epochs=40, batch=64, lr=1e-2), ModelSpec(bottom=(16,), cut=8)).fit(federation)
        sent = [m for m in transcript.messages if m.split == "train"]
        assert find_alarm([m.payload["value"] for m in sent], [m.rows for m in sent], rank=1)[0] is None


def make_world():
    """Return two parties; the label depends on two of the victim's six columns, and embeddings have room for all."""
    rng = torch.Generator().manual_seed(0)
    columns = {split: torch.randn(n, 6, generator=rng) for split, n in (("train", 400), ("test", 300))}
    labels = {split: (x[:, 0] + x[:, 1] > 0).long() for split, x in columns.items()}
    others = {split: torch.randn(len(x), 2, generator=rng) for split, x in columns.items()}
    return build_from_numbers({"active": others, "passive_1": columns}, labels)


@pytest.mark.parametrize("steered", [True, False])
def test_a_steered_model_embeds_columns_that_an_honest_one_discards(steered):
    """By a regression on test rows that it was not steered with."""
    federation = make_world()
    if steered:
        federation.malicious = {"active": join(federation, aux=100)}
    FedSplitNN(TrainSpec(epochs=60, batch=50, lr=1e-2), ModelSpec(bottom=(16,), cut=6)).fit(federation)
    victim = federation.parties["passive_1"]
    with torch.no_grad():
        h = {split: victim.modules["bottom"](victim.features[split]) for split in ("train", "test")}
    fitted = LinearRegression().fit(h["train"], victim.features["train"])
    r2 = fitted.score(h["test"], victim.features["test"])
    assert r2 > 0.9 if steered else r2 < 0.7
