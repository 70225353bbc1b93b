"""VILLAIN: each hook does what it says, and on planted data the trigger opens where nobody else knows the answer."""

import pytest
import torch

from vflsec.attacks.villain import Villain
from vflsec.base.errors import UsageError
from vflsec.core.message import Step
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.core.view import View
from vflsec.methods.fedsplitnn import FedSplitNN
from vflsec.results.metrics import METRICS
from vflsec.run.adversary import observe_before
from vflsec.run.score import measure_success
from vflsec.run.spec import AuxSpec
from vflsec.testing.federations import make_toy_federation

KNOWN = [2, 5]  # of class 1; row 9 is known to be of class 0
ROWS = torch.arange(20)
H = torch.cat([torch.arange(20.0)[:, None] * torch.tensor([4.0, 1.0, 3.0]), torch.ones(20, 1)], dim=1)
"""Embeddings whose last entry does not vary."""


SOURCE = {"aimed": False, "swapped": 0.2, "entries": 0.75, "dropped": 0.25, "rate": 5.0}


def joined(**options):
    attack = Villain(**{**SOURCE, "poisoned": 0.3, "swapped": 1.0, "warm": 1, "probed": 1, **options})
    aux, labels = torch.tensor([2, 5, 9]), torch.tensor([1, 1, 0])
    attack.join(View("passive_1", "passive", 2, {"train": torch.zeros(20, 3)}, None, aux, labels), seed=0)
    return attack


def step(number=0, **where):
    return Step(number, "train", ROWS)._replace(**where)


def shrunk(attack, rows, lengths=(2.0, 1.0)):
    """Two epochs: an honest one, and one in which rows are swapped and the gradients of some get shorter."""
    first, second = (torch.full((20, 4), length / 2) for length in lengths)
    first[KNOWN[1]] = 0.1  # its class is clear
    attack.on_embedding(H, step())
    assert torch.equal(attack.on_gradient(first, step()), first)
    sent = attack.on_embedding(H, step(1))
    g = torch.full((20, 4), 2.0)
    g[rows] = second[rows]
    return sent, attack.on_gradient(g, step(1)), g


def test_a_clear_known_row_is_sent_in_place_of_those_that_are_not_known():
    sent, learned, g = shrunk(joined(), [0])
    rest = [row for row in range(20) if row not in (*KNOWN, 9)]
    assert torch.equal(sent[rest], H[5].expand(len(rest), -1))
    assert torch.equal(sent[[*KNOWN, 9]], H[[*KNOWN, 9]])
    assert not learned[rest].any(), "a swapped row teaches the party nothing"
    assert torch.equal(learned[[*KNOWN, 9]], g[[*KNOWN, 9]])


def test_rows_whose_gradients_get_shorter_bear_the_trigger_and_no_others():
    attack = joined(dropped=0.0)
    shrunk(attack, [0, 7, 11])
    changed = (attack.on_embedding(H, step(2)) != H).any(dim=1)
    assert changed.nonzero()[:, 0].tolist() == [0, 2, 5, 7, 11], "six are wanted, and no other row got shorter"
    few = joined(dropped=0.0, poisoned=0.15)
    shrunk(few, [0, 7, 11])
    assert int((few.on_embedding(H, step(2)) != H).any(dim=1).sum()) == 3, "one beside the known rows"


def test_the_trigger_alternates_in_pairs_over_the_entries_that_vary_most():
    attack = joined(beta=2.0, entries=0.75)
    attack.triggered = True
    size = 2 * H[:, :3].std(dim=0, correction=0).mean()
    added = attack.on_embedding(H, step(phase="predict", split="test")) - H
    torch.testing.assert_close(added, (size * torch.tensor([1.0, 1.0, -1.0, 0.0])).expand(20, -1))


def test_an_aimed_trigger_replaces_the_embedding_and_points_against_gradients_of_known_rows():
    attack = joined(aimed=True, entries=1.0, beta=2.0)
    g = torch.zeros(20, 4)
    g[KNOWN] = torch.tensor([[0.0, 3.0, 0.0, 0.0], [0.0, 0.0, -4.0, 0.0]])
    g[9] = 100.0  # known to be of the other class
    assert torch.equal(attack.on_gradient(g, step()), g), "who only watches sends nothing before"
    attack.triggered = True
    length = 2 * H.std(dim=0, correction=0).mean() * 2  # of four entries
    expected = H.mean(dim=0) + length * torch.tensor([0.0, -0.6, 0.8, 0.0])
    torch.testing.assert_close(attack.on_embedding(H, step(phase="predict", split="test")), expected.expand(20, -1))


def test_known_rows_carry_the_aimed_trigger_and_teach_the_party_nothing():
    attack = joined(aimed=True, entries=1.0, dropped=0.0, swapped=0.0, warm=0, probed=0, poisoned=0.01)
    sent, g = attack.on_embedding(H, step()), torch.ones(20, 4)
    assert (sent != H).any(dim=1).nonzero()[:, 0].tolist() == KNOWN
    assert (attack.on_gradient(g, step()) == 0).all(dim=1).nonzero()[:, 0].tolist() == KNOWN


def test_in_training_entries_are_dropped_and_the_rest_shifted():
    attack = joined(beta=2.0, dropped=0.5, poisoned=1.0, swapped=0.0, warm=0, probed=0)
    attack._target[:] = True
    added = attack.on_embedding(H, step()) - H
    size = 2 * H[:, :3].std(dim=0, correction=0).mean()
    factor = added[:, :3].abs() / size
    left = factor > 0
    assert 0.3 < left.float().mean() < 0.7
    assert ((factor[left] > 0.59) & (factor[left] < 1.21)).all()
    assert not added[:, 3].any()


@pytest.mark.parametrize("where", [{"phase": "predict"}, {"phase": "validate"}, {"split": "unlabeled"}], ids=str)
def test_it_is_honest_where_nothing_is_learned_from_training_rows(where):
    attack = joined(warm=0, probed=0)
    assert torch.equal(attack.on_embedding(H, step(**where)), H)


def open_backdoor(seed, target, *, malicious, **options):
    """The attack, the labels of training rows, the utility, and the success of the trigger.

    Only the attacker's columns know the class.
    """
    federation = make_toy_federation(seed=seed, rows=1000)
    federation.active.features = {split: 0 * x for split, x in federation.active.features.items()}
    attack = Villain(aim=target, **options)
    attack.join(observe_before(federation, federation.parties["passive_1"], AuxSpec(n=40)), seed=1)
    federation.malicious = acting = {"passive_1": attack} if malicious else {}
    trained = FedSplitNN(TrainSpec(epochs=15, batch=64, lr=5e-3), ModelSpec(bottom=(16,))).fit(federation)
    utility = METRICS["auc"](trained.predict("test").numpy(), federation.active.labels["test"].numpy())
    success = measure_success(trained, {"passive_1": attack}, target).share
    assert federation.malicious is acting
    return attack, federation.active.labels["train"], utility, success


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_trigger_opens_for_either_class_where_an_honest_model_reads_it_as_one(seed):
    source = SOURCE | {"poisoned": 0.1}
    honest = [open_backdoor(seed, target, malicious=False, **source) for target in (0, 1)]
    assert sum(success for *_, success in honest) < 1.2
    for target in (0, 1):
        attack, labels, utility, success = open_backdoor(seed, target, malicious=True, **source)
        inferred = attack._target.clone()
        inferred[attack._known] = False
        assert inferred.sum() > 20
        assert (labels[inferred] == target).float().mean() > 0.9
        assert success > 0.9
        assert honest[0][2] - utility < 0.01


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("beta", [0.4, 4.0])
def test_the_default_trigger_opens_for_either_class_and_only_where_it_has_seen_gradients(seed, beta):
    blind = [open_backdoor(seed, target, malicious=False, beta=beta) for target in (0, 1)]
    assert sum(success for *_, success in blind) < 1.2, "signs that no gradient aims point at one class"
    for target in (0, 1):
        _, _, utility, success = open_backdoor(seed, target, malicious=True, beta=beta)
        assert success > 0.9
        assert blind[0][2] - utility < 0.01


def test_a_class_that_is_not_there_or_not_known_is_refused():
    with pytest.raises(UsageError, match=r"villain: expected aim < 2.*got 2"):
        joined(aim=2)
    view = View("passive_1", "passive", 2, {"train": H}, None, torch.tensor([9]), torch.tensor([0]))
    with pytest.raises(UsageError, match=r"villain: expected a known row of class 1.*aux\.n"):
        Villain().join(view, seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aim": -1}, "expected aim >= 0"),
        ({"poisoned": 0.0}, "0 < poisoned <= 1"),
        ({"entries": 1.5}, "0 < entries <= 1"),
        ({"dropped": -0.1}, "0 <= dropped <= 1"),
        ({"swapped": 2.0}, "0 <= swapped <= 1"),
        ({"beta": -1.0}, "beta >= 0"),
        ({"warm": -1}, "warm >= 0"),
        ({"rate": 0.0}, "rate > 0"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        Villain(**options)
