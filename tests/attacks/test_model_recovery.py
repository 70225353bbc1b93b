"""Model recovery: the averaging server and either of two parties recover a model exactly, unless masks hide it."""

import pytest
import torch

from vflsec.attacks.model_recovery import ModelRecovery
from vflsec.base.errors import InsufficientView
from vflsec.core import registry
from vflsec.core.message import Kind, Transcript
from vflsec.core.method import Trained
from vflsec.core.settings import ModelSpec, PretrainSpec, TrainSpec
from vflsec.data.partition import DataSpec
from vflsec.results.metrics import METRICS
from vflsec.run.questions import ask
from vflsec.run.spec import AuxSpec
from vflsec.testing.federations import make_toy_federation

AUX = AuxSpec(n=10)
DATA = DataSpec(n_labeled=40, aligned=0.5)


def pretrained(average, *, method="fedhssl-simsiam", parties=2, adversary="server", defenses=(), **options):
    """A federation after pre-training, and what ``adversary`` heard."""
    train = TrainSpec(epochs=1, batch=32, pretrain=PretrainSpec(epochs=2, batch=32))
    widths = {"projector": 8, "predictor": 4}
    model = ModelSpec(bottom=(8, 8), encoder="tabular")
    made = registry.build("methods", method, train, model, average=average, **widths, **options)
    federation = make_toy_federation(data=DATA, rows=120, columns=4, parties=parties)
    federation.parties["passive_1"].defenses = tuple(defenses)
    made.build(federation)
    tap = Transcript(frozenset(adversary.split("+")), frozenset(Kind))
    federation.channel.taps.append(tap)
    made.run("pretrain", federation)
    return Trained(made, federation, {}), tuple(tap.messages)


def recovered(average, adversary, *, victim=None, **options):
    trained, messages = pretrained(average, adversary=adversary, **options)
    attack = ModelRecovery(victim=victim)
    view, truth, names, *_ = ask(attack, trained, adversary, AUX, messages, after="pretrain")
    guess = attack(view, seed=0).scores["parameters"]
    return METRICS[names[0]](guess.numpy(), truth.labels["parameters"].numpy())


@pytest.mark.sampled
@pytest.mark.parametrize("parties", [2, 3])
@pytest.mark.parametrize("victim", ["active", "passive_1"])
def test_the_server_of_a_plain_average_reads_each_model(parties, victim):
    assert recovered("model-average", "server", parties=parties, victim=victim) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("parties", [2, 3])
def test_masks_leave_the_server_with_the_mean(parties):
    """R2 is around the mean deviation of all parameters, which is almost 0, so the guess of 0 is just below 0."""
    trained, messages = pretrained("secure-average", parties=parties)
    view = ask(ModelRecovery(), trained, "server", AUX, messages, after="pretrain").view
    assert not ModelRecovery()(view, seed=0).scores["parameters"].any()
    assert -0.05 < recovered("secure-average", "server", parties=parties) <= 0


@pytest.mark.sampled
@pytest.mark.parametrize("average", ["model-average", "secure-average"])
@pytest.mark.parametrize(("adversary", "victim"), [("passive_1", "active"), ("active", "passive_1")])
def test_of_two_parties_each_computes_the_other_ones_model(average, adversary, victim):
    assert recovered(average, adversary, victim=victim) == pytest.approx(1, abs=1e-6)


def test_of_three_parties_one_learns_what_the_others_have_in_common():
    """An equal share of both deviations, so far from all of one of them; with a colluding party it is exact again."""
    assert -0.2 < recovered("secure-average", "passive_1", parties=3) < 0.8
    assert recovered("secure-average", "passive_1+passive_2", parties=3) == pytest.approx(1, abs=1e-5)


def test_a_defense_of_parameters_protects_from_the_server():
    noise = registry.build("defenses", "iso", 25.0, at=["pretrain.parameters"])
    plain = recovered("model-average", "server", victim="passive_1")
    assert recovered("model-average", "server", victim="passive_1", defenses=[noise]) < plain - 0.5


def test_local_pre_training_with_an_average_is_attacked_too():
    found = recovered("model-average", "server", method="fedlocal-simsiam", pma=True)
    assert found == pytest.approx(1, abs=1e-6)


def test_without_an_average_there_is_nothing_to_recover():
    trained, messages = pretrained("model-average", method="fedlocal-simsiam", adversary="passive_1")
    with pytest.raises(InsufficientView, match="needs received parameters, and fedlocal-simsiam has none"):
        ask(ModelRecovery(), trained, "passive_1", AUX, messages)


def test_the_server_has_messages_and_nothing_else():
    trained, messages = pretrained("model-average")
    view = ask(ModelRecovery(), trained, "server", AUX, messages).view
    assert view.model is None
    assert view.unlabeled is None
    assert not view.labels
    assert len(view.aux_rows) == 0
    assert all(x.shape[1] == 0 for x in view.features.values())
    assert {m.receiver for m in view.messages} == {"server", "active", "passive_1"}


def test_the_truth_is_stored_with_the_models_of_the_stage():
    trained, _ = pretrained("model-average")
    shared = trained.method.local_parameters(trained.federation)
    assert not torch.equal(shared["active"], shared["passive_1"])
    assert not any(p.requires_grad for p in trained.federation.active.modules["shared"].parameters())
    assert "shared" in trained.method.stored_modules
