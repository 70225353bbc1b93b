"""Backdoor: each hook does what it says, and on planted data the trigger opens where nobody else knows the answer."""

import pytest
import torch

from vflsec.attacks.backdoor import Backdoor
from vflsec.base.errors import UsageError
from vflsec.core.message import Step
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.core.view import View
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.results.metrics import METRICS
from vflsec.run.adversary import observe_before
from vflsec.run.score import measure_success
from vflsec.run.spec import AuxSpec
from vflsec.testing.conformance import IntegrityConformance
from vflsec.testing.federations import make_toy_federation

X = torch.arange(60.0).reshape(20, 3)
KNOWN = [2, 5]  # of class 1; row 9 is known to be of class 0


class TestManyRows(IntegrityConformance):
    def make(self):
        return Backdoor(poisoned=0.2, columns=1, value=3.0)


def joined(party="passive_1", **options):
    attack = Backdoor(**{"poisoned": 0.2, **options})
    view = View(party, "passive", 2, {"train": X}, None, torch.tensor([2, 5, 9]), torch.tensor([1, 1, 0]))
    attack.join(view, seed=0)
    return attack


def everybody(number=0, **where):
    return Step(number, "train", torch.arange(20))._replace(**where)


def poisoned(attack):
    """The rows that bear the trigger and are not known: their own first column is still there."""
    fed = attack.on_features(X, everybody())
    changed = (fed != X).any(dim=1).nonzero()[:, 0].tolist()
    return [row for row in changed if row not in KNOWN]


def test_the_trigger_is_the_largest_and_the_smallest_value_in_turns():
    triggered = joined().trigger(X)
    assert torch.equal(triggered[:, 0], X[:, 0])
    assert (triggered[:, 1] == 58.0).all()  # the largest of the second column
    assert (triggered[:, 2] == 2.0).all()  # the smallest of the third
    assert (joined(columns=3, value=7.0).trigger(X) == 7.0).all()


def test_a_share_of_the_rows_is_poisoned_and_known_rows_bring_one_of_them():
    attack = joined()
    rows = poisoned(attack)
    assert len(rows) == 4
    fed, triggered = attack.on_features(X, everybody()), attack.trigger(X)
    assert torch.equal(fed[rows], triggered[rows])
    for row in KNOWN:
        assert any(torch.equal(fed[row], triggered[other]) for other in rows)
    rest = [row for row in range(20) if row not in (*rows, *KNOWN)]
    assert torch.equal(fed[rest], X[rest])


def test_for_poisoned_rows_it_sends_the_embedding_of_another():
    attack = joined()
    h = torch.arange(20.0)[:, None]
    sent, rows = attack.on_embedding(h, everybody()), poisoned(attack)
    assert not set(sent[rows, 0].int().tolist()) & set(rows)
    rest = [row for row in range(20) if row not in rows]
    assert torch.equal(sent[rest], h[rest])
    alone = everybody(rows=torch.tensor(rows))
    assert torch.equal(attack.on_embedding(h[rows], alone), h[rows]), "a batch with nobody to borrow from"


def test_poisoned_rows_learn_from_the_gradients_of_known_rows_enlarged():
    attack = joined(gamma=10.0)
    rows, g = poisoned(attack), torch.arange(40.0).reshape(20, 2)
    unknown = torch.tensor([row for row in range(20) if row not in KNOWN])
    before = attack.on_gradient(g[unknown], everybody(rows=unknown))
    assert (before[[unknown.tolist().index(row) for row in rows]] == 0).all(), "nothing is known yet"
    learned = attack.on_gradient(g, everybody(1))
    assert torch.equal(learned[rows], 10 * (g[2] + g[5]).expand(4, 2) / 2)
    rest = [row for row in range(20) if row not in rows]
    assert torch.equal(learned[rest], g[rest])
    later = attack.on_gradient(g[unknown], everybody(2, rows=unknown))
    assert torch.equal(later[unknown.tolist().index(rows[0])], learned[rows[0]]), "the last one is kept"


@pytest.mark.parametrize("where", [{"phase": "predict"}, {"phase": "validate"}, {"split": "unlabeled"}], ids=str)
def test_it_is_honest_where_no_row_is_poisoned(where):
    attack, step = joined(), everybody(**where)
    assert all(torch.equal(hook(X, step), X) for hook in (attack.on_features, attack.on_embedding, attack.on_gradient))


def test_parties_that_collude_poison_the_same_rows():
    assert poisoned(joined()) == poisoned(joined("passive_2"))


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_backdoor_opens_on_planted_data_and_nothing_else_is_lost(seed):
    """Only the attacker's columns know the class: the trigger outweighs all of them but two."""
    found = []
    for malicious in (False, True):
        federation = make_toy_federation(seed=seed, rows=1000)
        federation.active.features = {split: 0 * x for split, x in federation.active.features.items()}
        attack = Backdoor(poisoned=0.05)
        attack.join(observe_before(federation, federation.parties["passive_1"], AuxSpec(n=40)), seed=1)
        federation.malicious = {"passive_1": attack} if malicious else {}
        trained = FedSplitNN(TrainSpec(epochs=15, batch=64, lr=5e-3), ModelSpec(bottom=(16,))).fit(federation)
        utility = METRICS["auc"](trained.predict("test").numpy(), federation.active.labels["test"].numpy())
        found.append((utility, measure_success(trained, {"passive_1": attack}, 1).share))
    (honest, chance), (attacked, opened) = found
    assert opened > 0.9
    assert chance < 0.5
    assert honest - attacked < 0.01


def test_replay_trains_honestly_and_sends_known_rows_in_turn():
    attack = joined(replay=True)
    assert all(torch.equal(hook(X, everybody()), X) for hook in (attack.on_features, attack.on_embedding))
    assert torch.equal(attack.on_gradient(X, everybody()), X)
    assert torch.equal(attack.trigger(X[:5]), X[[2, 5, 2, 5, 2]])


@pytest.mark.parametrize("seed", [0, 1])
def test_a_replayed_row_is_predicted_as_its_class_where_nobody_else_knows_the_answer(seed):
    """The honest model of planted data knows the class of nearly all rows from the attacker's columns alone."""
    federation = make_toy_federation(seed=seed, rows=600)
    federation.active.features = {split: 0 * x for split, x in federation.active.features.items()}
    attack = Backdoor(replay=True)
    attack.join(observe_before(federation, federation.parties["passive_1"], AuxSpec(n=40)), seed=1)
    trained = FedSplitNN(TrainSpec(epochs=10, batch=64, lr=5e-3), ModelSpec(bottom=(16,))).fit(federation)
    assert measure_success(trained, {"passive_1": attack}, 1).share > 0.9
    x, logits = attack.trigger(federation.parties["passive_1"].features["test"]), trained.predict("train")
    rows = (federation.parties["passive_1"].features["train"][:, None] == x[None, :1]).all(dim=2).any(dim=1)
    federation.parties["passive_1"].features = {**federation.parties["passive_1"].features, "test": x}
    torch.testing.assert_close(trained.predict("test")[0], logits[rows][0])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"aim": 2}, "aim < 2.*got 2"),
        ({"columns": 4}, "expected columns <= 3 of passive_1, got 4"),
        ({"poisoned": 0.0}, "expected 0 < poisoned <= 1"),
        ({"gamma": -1.0}, "expected gamma >= 0"),
        ({"aim": -1}, "expected aim >= 0"),
    ],
)
def test_impossible_settings_are_refused(options, match):
    with pytest.raises(UsageError, match=match):
        joined(**options)


def test_without_a_known_row_of_the_class_there_is_no_gradient_to_replay():
    view = View("passive_1", "passive", 2, {"train": X}, None, torch.tensor([9]), torch.tensor([0]))
    with pytest.raises(UsageError, match=r"row of class 1.*aux\.n"):
        Backdoor().join(view, seed=0)
