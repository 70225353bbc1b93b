"""Trees between parties are those of one party with all columns, and messages are the declared ones and no more."""

import math
import re

import numpy as np
import pytest
import torch
from scipy.special import expit, logit, softmax

import vflsec
import vflsec.methods.tree_growing
from vflsec.base.errors import Diverged, UsageError
from vflsec.base.seeds import make_rng
from vflsec.core import registry
from vflsec.core.defense import Defense
from vflsec.core.federation import Checkpoint, Federation
from vflsec.core.message import Kind
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.data.partition import DataSpec
from vflsec.defenses.coae import ConfusionalAutoencoder
from vflsec.defenses.gaussian_dp import GaussianDP
from vflsec.defenses.iso import IsotropicNoise
from vflsec.defenses.label_dp import LabelDP
from vflsec.methods.secureboost import SecureBoost
from vflsec.run import score
from vflsec.testing.federations import build_from_numbers, make_toy_federation
from vflsec.trees.histograms import FRACTION_BITS

SMALL = {"rounds": 3, "depth": 3, "leaf_rows": 4, "bins": 8}
VALIDATION = DataSpec(validation=0.3)
THREE = [(0, 1), (2, 3), (4, 5)]
EXCHANGES = ("plain", "masked", "paillier")


def method(name="secureboost", **options):
    return registry.build("methods", name, TrainSpec(), ModelSpec(), **{**SMALL, **options})


def trained(federation=None, *, name="secureboost", defenses=(), **options):
    """A trained federation, its method, and all messages of training."""
    federation = federation or dealt(THREE)
    federation.active.defenses = defenses
    heard = []
    federation.channel.taps.append(heard.append)
    made = method(name, **options)
    return made.fit(federation), heard


def state(found):
    federation = found if isinstance(found, Federation) else found.federation
    return {f"{p.name}.{key}": v for p in federation.parties.values() for key, v in p.modules.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def numbers(value):
    """What a payload holds, sealed or not."""
    return value.numpy() if isinstance(value, torch.Tensor) else value._values


def equal(a, b):
    """Whether two messages are the same to the bit."""
    facts = [(m.kind, m.sender, m.receiver, m.step, m.phase, m.split, set(m.payload)) for m in (a, b)]
    return facts[0] == facts[1] and all(np.array_equal(numbers(a.payload[k]), numbers(b.payload[k])) for k in a.payload)


def dealt(columns, *, rows=240, classes=2, seed=0, split=0.75, signal=1.0):
    """A federation whose parties hold the numbered ``columns`` of one table without ties; the active party first."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 6)).astype(np.float32)
    score = signal * (2 * x[:, 0] + np.abs(x[:, 3]) * 2 + x[:, 5] * x[:, 1]) + rng.normal(size=rows)
    y = torch.tensor(np.searchsorted(np.quantile(score, np.arange(1, classes) / classes), score))
    train = int(split * rows)
    split_at = {"train": slice(train), "test": slice(train, None)}
    names = ["active", *(f"passive_{number}" for number in range(1, len(columns)))]
    x_of = {
        name: {s: torch.tensor(x[at][:, list(own)]) for s, at in split_at.items()}
        for name, own in zip(names, columns, strict=True)
    }
    return build_from_numbers(x_of, {s: y[at] for s, at in split_at.items()}, n_classes=classes, seed=seed)


def derivatives(scores, targets):
    p = expit(scores)
    return p - targets, p * (1 - p)


# Trees


@pytest.mark.sampled
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("options", [{}, {"l2": 5.0, "leaf_hessian": 2.0, "least_gain": 0.5}])
def test_any_deal_of_the_columns_gives_the_trees_of_one_party(classes, options):
    deals = [
        [(0, 1, 2, 3, 4, 5), ()],
        [(), (0, 1, 2, 3, 4, 5)],
        [(0, 1, 2), (3, 4, 5)],
        [(5, 3), (4,), (2, 1, 0)],
        [(1,), (0, 2), (4, 3), (5,)],
    ]
    whole, *others = (trained(dealt(deal, classes=classes), **options)[0] for deal in deals)
    for split in ("train", "test"):
        expected = whole.predict(split)
        assert expected.std() > 0.1
        for other in others:
            assert torch.equal(other.predict(split), expected)
    assert all(other.history == whole.history for other in others)


@pytest.mark.parametrize("parties", [2, 3])
@pytest.mark.parametrize("options", [{}, {"rows": 0.5, "columns": 0.5}, {"order": "turns"}, {"order": "layers"}])
def test_in_prediction_training_rows_reach_the_leaves_that_they_reached_in_training(parties, options, monkeypatch):
    federation = make_toy_federation(rows=300, columns=3, parties=parties, signal="none")
    reached = []
    add = vflsec.methods.secureboost._Boosting.add

    def spy(self, first, leaves, rows):
        reached.append(leaves.clone())
        add(self, first, leaves, rows)

    monkeypatch.setattr(vflsec.methods.secureboost._Boosting, "add", spy)
    made = method(**options)
    made.fit(federation)
    found = made.leaves(federation, "train", 0, SMALL["rounds"], "predict")
    assert len(found.unique()) > 4
    assert torch.equal(found, torch.cat(reached, dim=1))


@pytest.mark.long
def test_a_category_is_split_one_value_against_all_others(monkeypatch):
    federation = vflsec.run.federation.build_federation(
        vflsec.run.plan.build_cell(
            vflsec.run.spec.read({"dataset": "census-income", "data": {"n_labeled": 400}}), "fedsplitnn", 0
        ),
        "cpu",
    )
    assert any(c.kind == "categorical" for party in federation.parties.values() for c in party.layout.columns)
    made = method(rounds=4, leaf_rows=10)
    made.fit(federation)
    leaves = made.leaves(federation, "train", 0, 4, "predict")
    scores = made.shape(federation).start + made.shape(federation).logits(leaves)
    targets = federation.active.labels["train"].double()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(scores[:, 0], targets)
    assert float(loss) == pytest.approx(made_loss(federation), rel=1e-12)
    thresholds = {float(t) for party in federation.parties.values() for t in party.modules["splits"].threshold.unique()}
    assert 0.5 in thresholds, "one split at least is a category's"


def made_loss(federation):
    again = method(rounds=4, leaf_rows=10)
    return again.fit(federation).history["train"][-1]


def stump(federation, *, l2=1.0, rate=0.3, least=4):
    """The best tree of depth 1 by a search over all columns and thresholds between values, in plain loops."""
    x = torch.cat([p.features["train"] for p in federation.parties.values()], dim=1).double().numpy()
    y = federation.active.labels["train"].double().numpy()
    start = logit(y.mean())
    g, h = derivatives(np.full(len(y), start), y)
    best = (-math.inf, None)
    for column in range(x.shape[1]):
        values = np.unique(x[:, column])
        for threshold in (values[1:] + values[:-1]) / 2:
            left = x[:, column] <= threshold
            if min(left.sum(), (~left).sum()) >= least:
                gain = sum(g[s].sum() ** 2 / (h[s].sum() + l2) for s in (left, ~left)) - g.sum() ** 2 / (h.sum() + l2)
                best = max(best, (gain, column, threshold), key=lambda one: one[0])
    left = x[:, best[1]] <= best[2]
    values = [-rate * g[s].sum() / (h[s].sum() + l2) for s in (left, ~left)]
    return best, start + np.where(left, *values)


@pytest.mark.parametrize("columns", [[(0, 1, 2), (3, 4, 5)], [(1,), (0, 2), (4, 3), (5,)]])
def test_a_tree_of_depth_one_is_the_best_of_all(columns):
    federation = dealt(columns)
    (_, column, threshold), scores = stump(federation)
    found, _ = trained(federation, rounds=1, depth=1, bins=1000)
    kept = [
        (party, own.modules["splits"].threshold[0, 1], own.modules["splits"].column[0, 1])
        for party, own in federation.parties.items()
        if own.modules["splits"].column[0, 1] >= 0
    ]
    ((party, own, place),) = kept
    order = [c for part in columns for c in part]
    assert columns[list(federation.parties).index(party)][int(place)] == order[column]
    assert float(own) == pytest.approx(threshold, rel=1e-6)
    assert found.predict("train")[:, 1].double().numpy() == pytest.approx(scores, rel=1e-6)


def test_trees_are_those_of_lightgbm_where_bins_coincide():
    """On few values, each of which is a bin in both."""
    lightgbm = pytest.importorskip("lightgbm", reason="an extra")
    federation = make_toy_federation(rows=600, columns=4, parties=3, signal="none")
    rng = make_rng(0, "columns")
    for party in federation.parties.values():
        for split, x in party.features.items():
            party.features[split] = torch.randint(7, x.shape, generator=rng).float()
    x, test = (
        torch.cat([p.features[split] for p in federation.parties.values()], dim=1).numpy()
        for split in ("train", "test")
    )
    y = (x[:, 0] + x[:, 5] * (x[:, 9] > 3) + 3 * torch.randn(len(x), generator=rng).numpy() > 6).astype(int)
    federation.active.labels["train"] = torch.tensor(y)
    parameters = {
        "objective": "binary", "learning_rate": 0.3, "max_depth": 3, "num_leaves": 8, "min_data_in_leaf": 10,
        "lambda_l2": 1.0, "min_sum_hessian_in_leaf": 0.001, "num_threads": 1, "verbosity": -1, "min_data_in_bin": 1,
        "deterministic": True, "boost_from_average": True, "enable_bundle": False,
    }  # fmt: skip
    booster = lightgbm.train(parameters, lightgbm.Dataset(x, y, params=parameters), 5)
    found, _ = trained(federation, rounds=5, leaf_rows=10, bins=32)
    expected = booster.predict(test, raw_score=True)
    assert np.std(expected) > 0.2
    assert found.predict("test")[:, 1].numpy() == pytest.approx(expected, abs=1e-5)


def test_first_derivatives_of_several_classes_are_those_of_softmax():
    federation = make_toy_federation(rows=150, columns=3, classes=4)
    y = federation.active.labels["train"].numpy()
    found, heard = trained(federation, rounds=2, exchange="plain")
    share = np.bincount(y, minlength=4) / len(y)
    p = np.tile(softmax(np.log(share)), (len(y), 1))
    first, second = (m.payload["value"].numpy() for m in heard if m.kind is Kind.GRADIENT and m.receiver == "passive_1")
    assert first == pytest.approx(np.hstack([p - np.eye(4)[y], p * (1 - p)]), abs=2.0 ** -(FRACTION_BITS + 1))
    made = found.method
    leaves = made.leaves(federation, "train", 0, 4, "predict")
    scores = np.log(share) + made.shape(federation).logits(leaves).numpy()
    p = softmax(scores, axis=1)
    assert second == pytest.approx(np.hstack([p - np.eye(4)[y], p * (1 - p)]), abs=2.0**-FRACTION_BITS)
    expected = made.shape(federation).start + made.shape(federation).logits(
        made.leaves(federation, "test", 0, 8, "predict")
    )
    assert torch.equal(found.predict("test"), expected.float())


def test_losses_are_log_losses_and_fall():
    found, _ = trained(rounds=6)
    labels = found.federation.active.labels["train"]
    loss = torch.nn.functional.cross_entropy(found.predict("train").double(), labels)
    assert found.history["train"][-1] == pytest.approx(float(loss), rel=1e-5)
    assert found.history["train"] == sorted(found.history["train"], reverse=True)


# Exchanges


@pytest.fixture(scope="module")
def exchanged():
    def make(exchange, **options):
        bits = {"key_bits": 1024} if exchange == "paillier" else {}
        federation = dealt([(0,), (1, 2, 3), (4, 5)], rows=80)
        return trained(federation, exchange=exchange, rounds=2, **bits, **options)

    return {exchange: make(exchange) for exchange in EXCHANGES}


def test_all_exchanges_give_the_same_models_to_the_bit(exchanged):
    models = {exchange: state(found) for exchange, (found, _) in exchanged.items()}
    assert any((value >= 0).any() for key, value in models["plain"].items() if "passive_1.splits.column" in key)
    assert same(models["plain"], models["masked"])
    assert same(models["plain"], models["paillier"])


def test_all_exchanges_send_the_same_nodes_and_splits_and_give_the_same_histograms(exchanged):
    shared = {
        exchange: [m for m in heard if m.kind in (Kind.NODES, Kind.HISTOGRAM, Kind.CONTROL)]
        for exchange, (_, heard) in exchanged.items()
    }
    for exchange in ("masked", "paillier"):
        assert len(shared[exchange]) == len(shared["plain"])
        assert all(equal(a, b) for a, b in zip(shared["plain"], shared[exchange], strict=True))


@pytest.mark.parametrize("exchange", ["masked", "paillier"])
def test_encrypted_derivatives_are_not_readable(exchanged, exchange):
    _, heard = exchanged[exchange]
    for name in ("passive_1", "passive_2"):
        own = [m for m in heard if name in (m.sender, m.receiver)]
        assert {m.kind for m in own if m.receiver == name} == {Kind.CIPHERTEXT, Kind.NODES, Kind.CONTROL}
        sent = [m for m in own if m.kind is Kind.CIPHERTEXT and m.receiver == name]
        assert len(sent) == 2, "once a round"
        for message in sent:
            readable = {key for key, x in message.payload.items() if isinstance(x, torch.Tensor)}
            assert readable <= {"key", "generator"}
            assert not isinstance(message.payload["value"], torch.Tensor)
    assert not any(m.receiver.startswith("passive") for m in heard if m.kind in (Kind.GRADIENT, Kind.HISTOGRAM))


@pytest.mark.parametrize(
    ("options", "rounds"),
    [
        ({}, 6),
        ({"order": "turns"}, 2),
        ({"order": "layers"}, 6),
        ({"alone": 2}, 4),
        ({"alone": 2, "order": "turns"}, 1),
        ({"alone": 6}, 0),
        ({"rows": 0.5, "columns": 0.5}, 6),
    ],
)
def test_the_estimate_counts_what_is_encrypted_and_added_up(options, rounds):
    """Rounds are exact; rows are added up at most as often as estimated, as a child may have less than half of them."""
    federation = dealt([(0, 1), (2, 3)] if "columns" in options else [(0,), (1, 2, 3), (4, 5)], rows=2000, split=0.9)
    made = method(rounds=6, leaf_rows=1, **options)
    heard = []
    federation.channel.taps.append(heard.append)
    made.build(federation)
    counted = {}
    for name, exchange in made._exchanges.items():
        exchange.seconds = lambda *work, name=name: counted.setdefault(name, work)[0]
    made.cryptography(federation)
    made.run("train", federation)
    for name, (of_rounds, outputs, drawn, columns, n_bins, passes) in counted.items():
        sent = [m for m in heard if m.kind is Kind.CIPHERTEXT and m.receiver == name]
        assert of_rounds == len(sent) == (rounds if name == "passive_1" else of_rounds)
        assert all(len(m.rows) == drawn for m in sent)
        sums = [m.payload["value"][..., 2] for m in heard if m.kind is Kind.HISTOGRAM and m.sender == name]
        assert all(int((own.sum(dim=0) > 0).sum()) <= n_bins for own in sums)
        added = sum(float(own.sum()) for own in sums)
        estimated = of_rounds * outputs * drawn * columns * passes
        assert 0.6 * estimated <= added <= estimated


def test_ciphertexts_of_a_round_are_fresh(exchanged):
    _, heard = exchanged["paillier"]
    data = [m.payload["value"].data for m in heard if m.kind is Kind.CIPHERTEXT and m.sender == "active"]
    assert len(set(data)) == len(data) == 4, "to each party and in each round others"


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_histograms_are_the_sums_of_the_derivatives_and_only_of_smaller_children(exchanged, exchange):
    found, heard = exchanged[exchange]
    made, federation = found.method, found.federation
    derivatives = {m.step: m.payload["value"] for m in heard if m.kind is Kind.GRADIENT and m.sender == m.receiver}
    told = {}
    for message in heard:
        if message.kind is Kind.NODES and message.sender == "active":
            told[message.receiver] = message.payload["value"][:, 0].numpy()
        if message.kind is not Kind.HISTOGRAM:
            continue
        passive, asked = message.sender, message.payload["nodes"].tolist()
        nodes, bins = told[passive], made._bins[passive]
        codes = bins.assign(federation.parties[passive].features["train"])
        values = derivatives[message.step].numpy()
        for k, node in enumerate(asked):
            inside = nodes == node
            for b in range(len(bins)):
                of_bin = inside & (codes[:, bins.column[b]] == b)
                expected = [*values[of_bin].sum(axis=0), of_bin.sum()]
                assert message.payload["value"][k, b].numpy() == pytest.approx(expected, abs=1e-12)
            sibling = (nodes == node ^ 1).sum()
            assert node == 1 or not sibling or inside.sum() <= sibling
            assert node == 1 or node ^ 1 not in asked


def test_a_difference_of_histograms_is_the_histogram(monkeypatch):
    """Trees are the same to the bit if every node is asked for, and then there are more histograms."""
    by_difference, fewer = trained(depth=4)
    monkeypatch.setattr(vflsec.methods.tree_growing._Source, "_can_subtract", lambda *_: False)
    direct, more = trained(depth=4)
    assert same(state(by_difference), state(direct))
    counts = [sum(len(m.payload["nodes"]) for m in heard if m.kind is Kind.HISTOGRAM) for heard in (fewer, more)]
    assert counts[0] < 0.75 * counts[1]


# Messages


ORDERS = {
    "together": lambda tree, level: {"active", "passive_1", "passive_2"},
    "turns": lambda tree, level: {("active", "passive_1", "passive_2")[tree % 3]},
    "layers": lambda tree, level: {"passive_1", "passive_2"} if level < 2 else {"active"},
}


@pytest.mark.sampled
@pytest.mark.parametrize("alone", [0, 1])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("exchange", ["plain", "masked"])
def test_messages_are_those_of_the_order(order, alone, exchange):
    found, heard = trained(order=order, alone=alone, exchange=exchange, rounds=4)
    federation = found.federation
    n = federation.n_rows("train")
    sealed = Kind.GRADIENT if exchange == "plain" else Kind.CIPHERTEXT
    announced = [m for m in heard if m.kind is Kind.CONTROL and m.receiver == "active"]
    assert [(m.sender, m.step) for m in announced] == [("passive_1", 0), ("passive_2", 0)]
    for message in announced:
        column, ordered = message.payload["column"], message.payload["ordered"]
        assert (column.dtype, ordered.dtype) == (torch.int64, torch.bool)
        assert torch.equal(column, column.sort().values)
        assert column.bincount().max() <= SMALL["bins"]
    training = [m for m in heard if m.phase == "train" and m not in announced]
    owner = found.method.shape(federation).owner
    for tree in range(4):
        asked = [{"active"} if tree < alone else ORDERS[order](tree, level) for level in range(SMALL["depth"])]
        everyone = set().union(*asked)
        own = [m for m in training if m.step == tree]
        (note,) = [m for m in own if m.kind is Kind.GRADIENT and m.sender == m.receiver == "active"]
        assert note.payload["value"].shape == (n, 2)
        for number, name in enumerate(("passive_1", "passive_2"), 1):
            to = [m for m in own if m.receiver == name]
            back = [m for m in own if m.sender == name]
            if name not in everyone:
                assert not to
                assert not back
                continue
            (shared,) = [m for m in to if m.kind is sealed]
            assert torch.equal(shared.rows, torch.arange(n))
            if exchange == "plain":
                assert torch.equal(shared.payload["value"], note.payload["value"])
            levels = set()
            for message in to:
                if message.kind is Kind.NODES:
                    value = message.payload["value"]
                    assert (value.shape, value.dtype) == ((n, 1), torch.int16)
                    levels |= {int(node).bit_length() - 1 for node in value.unique() if node}
            assert levels <= {level for level, names in enumerate(asked) if name in names}
            split = [m.payload for m in to if m.kind is Kind.CONTROL]
            nodes = {int(node) for payload in split for node in payload["nodes"]}
            assert nodes == set(torch.nonzero(owner[tree] == number)[:, 0].tolist())
            answers = [m for m in back if m.kind is Kind.NODES]
            assert len(answers) == len(split)
            for payload, answer in zip(split, answers, strict=True):
                child = answer.payload["value"]
                assert child.shape == (len(answer.rows), 1)
                assert set((child // 2).unique().tolist()) == set(payload["nodes"].tolist())
            for message in back:
                if message.kind is Kind.HISTOGRAM:
                    assert message.rows is None
                    assert message.payload["value"].dtype == torch.float64
                    assert message.payload["value"].shape == (
                        len(message.payload["nodes"]), len(found.method._bins[name]), 3
                    )  # fmt: skip
        for level, names in enumerate(asked):
            owners = {
                ("active", "passive_1", "passive_2")[o] for o in owner[tree, 2**level : 2 ** (level + 1)] if o >= 0
            }
            assert owners <= names
    declared = found.method.messages_in("train", {"exchange": exchange})
    assert {m.kind for m in heard if m.sender != m.receiver} <= declared | {Kind.HISTOGRAM}
    assert not any(m.kind is Kind.GRADIENT and m.sender != m.receiver for m in heard) or exchange == "plain"


@pytest.mark.parametrize("exchange", ["plain", "masked"])
def test_alone_in_all_rounds_nothing_is_said_about_training_rows(exchange):
    found, heard = trained(alone=SMALL["rounds"], exchange=exchange)
    assert {(m.kind, m.sender) for m in heard if m.sender != m.receiver} == {
        (Kind.CONTROL, "passive_1"),
        (Kind.CONTROL, "passive_2"),
    }
    assert not any(route.sender == "active" for route in found.federation.channel.traffic)
    found.predict("test")
    assert not any(m.phase == "predict" for m in heard), "nobody else has a split"


def test_prediction_asks_each_owner_level_by_level():
    found, heard = trained()
    heard.clear()
    found.predict("test")
    n, trees = found.federation.n_rows("test"), SMALL["rounds"]
    owner = found.method.shape(found.federation).owner
    assert heard
    for question, answer in zip(heard[::2], heard[1::2], strict=True):
        assert (question.sender, answer.receiver) == ("active", "active")
        assert question.receiver == answer.sender
        number = int(question.receiver.removeprefix("passive_"))
        asked, said = question.payload["value"], answer.payload["value"]
        for message in (question, answer):
            assert (message.kind, message.phase, message.split, message.step) == (Kind.NODES, "predict", "test", 0)
            assert (message.payload["value"].shape, message.payload["value"].dtype) == ((n, trees), torch.int16)
        for tree in range(trees):
            inner = asked[:, tree] > 0
            assert (owner[tree, asked[inner, tree].long()] == number).all()
            assert torch.equal(said[inner, tree] // 2, asked[inner, tree])
            assert not said[~inner, tree].any()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("secureboost-rl", {"alone": 1}),
        ("secureboost-turns", {"order": "turns"}),
        ("secureboost-layers", {"order": "layers"}),
    ],
)
def test_presets_are_options(name, options):
    assert same(state(trained(name=name)[0]), state(trained(**options)[0]))


def test_a_party_knows_its_own_splits():
    found, _ = trained()
    for party in found.federation.parties.values():
        directions = found.method.representation(party)(party.features["test"])
        assert directions.shape == (found.federation.n_rows("test"), party.modules["splits"].width)
        assert set(directions.unique().tolist()) <= {-1.0, 0.0, 1.0}


# Sampling


def test_a_round_is_of_its_share_of_the_rows():
    found, heard = trained(rows=0.3, exchange="plain", alone=0)
    n = found.federation.n_rows("train")
    rounds = [m for m in heard if m.kind is Kind.GRADIENT and m.receiver == "passive_1"]
    assert [len(m.rows) for m in rounds] == [round(0.3 * n)] * SMALL["rounds"]
    assert all(torch.equal(m.rows, m.rows.unique()) for m in rounds)
    assert not torch.equal(rounds[0].rows, rounds[1].rows)
    first = next(m for m in heard if m.kind is Kind.HISTOGRAM and m.sender == "passive_1")
    assert first.payload["value"][0, :, 2].sum() == 2 * round(0.3 * n), "two columns"
    assert all(m.payload["value"].shape[0] == n for m in heard if m.kind is Kind.NODES and m.sender == "active")


def test_a_tree_is_of_a_share_of_the_columns_of_each_party():
    federation = make_toy_federation(rows=300, columns=6, parties=2, signal="none")
    found, heard = trained(federation, columns=0.34, rounds=8)
    drawn = []
    for message in heard:
        if message.kind is Kind.HISTOGRAM:
            column = found.method._bins["passive_1"].column
            filled = {int(column[b]) for b in torch.nonzero(message.payload["value"][..., 2].sum(dim=0))[:, 0]}
            drawn.append((message.step, filled))
    assert all(len(filled) == 2 for _, filled in drawn)
    assert len({tuple(filled) for _, filled in drawn}) > 3
    assert all(a == b for s, a in drawn for t, b in drawn if s == t), "one draw for each tree"
    whose = {name: int((p.modules["splits"].column >= 0).sum()) for name, p in federation.parties.items()}
    assert min(whose.values()) > 8, "of each party, whichever columns are drawn"
    for party in federation.parties.values():
        splits = party.modules["splits"].column
        assert all(len(own[own >= 0].unique()) <= 2 for own in splits)


# Defenses


def flipped(federation):
    federation.active.labels["train"] = 1 - federation.active.labels["train"]
    return federation


class Fixed(Defense):
    """Labels that do not depend on the true ones."""

    name = reference = guarantee = "made for a test"
    points = ()

    def on_labels(self, y, *, features, n_classes, rng):
        return (torch.arange(len(y)) * 7 % 11 > 4).long() * 1


@pytest.mark.parametrize("exchange", ["plain", "masked"])
def test_with_grafted_leaves_all_that_is_sent_depends_on_the_noisy_labels_alone(exchange):
    runs = []
    for change in (lambda f: f, flipped):
        federation = change(dealt(THREE))
        runs.append(trained(federation, defenses=[Fixed(1.0)], graft=True, exchange=exchange))
    (one, said), (other, heard) = runs
    a, b = ([m for m in messages if m.sender == "active"] for messages in (said, heard))
    assert len(a) == len(b) > 10
    assert all(equal(x, y) for x, y in zip(a, b, strict=True))
    for name in ("passive_1", "passive_2"):
        assert same(
            one.federation.parties[name].modules.state_dict(), other.federation.parties[name].modules.state_dict()
        )
    owners = [found.method.shape(found.federation).owner for found in (one, other)]
    assert torch.equal(*owners)
    assert not torch.equal(one.predict("test"), other.predict("test")), "the leaves are those of the true labels"


def test_grafted_leaves_have_the_values_of_the_true_labels():
    federation = make_toy_federation(rows=200, columns=3)
    found, _ = trained(federation, defenses=[Fixed(1.0)], graft=True, rounds=1, depth=1, l2=2.0, learning_rate=0.5)
    leaves = found.method.leaves(federation, "train", 0, 1, "predict")[:, 0]
    y = federation.active.labels["train"].double()
    start = y.mean().logit()
    for leaf in (2, 3):
        g, h = derivatives(np.full(int((leaves == leaf).sum()), float(start)), y[leaves == leaf].numpy())
        value = found.method.shape(federation).value[0, leaf]
        assert float(value) == pytest.approx(-0.5 * g.sum() / (h.sum() + 2.0), rel=1e-9)
    assert float(found.method.shape(federation).start) == pytest.approx(float(start))
    plain, _ = trained(make_toy_federation(rows=200, columns=3), defenses=[Fixed(1.0)], rounds=1, depth=1)
    noisy = Fixed(1.0).on_labels(y, features=None, n_classes=2, rng=None).double()
    assert float(plain.method.shape(plain.federation).start) == pytest.approx(float(noisy.mean().logit()))


def test_without_a_defense_grafting_changes_nothing():
    assert same(state(trained(graft=True)[0]), state(trained()[0]))


def test_grafting_recovers_utility_under_randomized_response():
    def auc(graft):
        federation = make_toy_federation(rows=600, columns=3)
        found, _ = trained(federation, defenses=[LabelDP(2.0)], graft=graft, rounds=10)
        return float((found.predict("test").argmax(dim=1) == federation.active.labels["test"]).double().mean())

    assert auc(True) >= auc(False)


def test_when_training_stops_depends_on_the_noisy_labels_alone():
    """Validation rows are scored by leaves of the noisy labels: passive parties see when it stops."""
    runs = []
    for change in (lambda f: f, flipped):
        federation = change(make_toy_federation(rows=300, columns=3, data=VALIDATION))
        runs.append(trained(federation, defenses=[Fixed(1.0)], graft=True, rounds=12, patience=2))
    (one, said), (other, heard) = runs
    assert [m.kind for m in said] == [m.kind for m in heard]
    grown = [int(found.method.shape(found.federation).grown) for found in (one, other)]
    assert grown[0] == grown[1]


@pytest.mark.sampled
@pytest.mark.parametrize("graft", [False, True])
@pytest.mark.parametrize("classes", [2, 3])
def test_codes_of_labels_are_decoded_unless_leaves_are_of_the_true_labels(graft, classes):
    federation = make_toy_federation(rows=300, columns=3, classes=classes, data=VALIDATION)
    found, _ = trained(
        federation, defenses=[ConfusionalAutoencoder(1.0)], graft=graft, rounds=20, patience=5, leaf_rows=1
    )
    guessed = found.predict("test").argmax(dim=1)
    assert float((guessed == federation.active.labels["test"]).double().mean()) > 0.9
    assert int(found.method.shape(federation).grown) > classes, "validation rows are read like predictions"


class Counted(IsotropicNoise):
    """Noise that counts its releases."""

    def on_gradient(self, g, release):
        self.calls = [*getattr(self, "calls", []), (release.receiver, g.shape, release.labels is not None)]
        return super().on_gradient(g, release)


@pytest.mark.parametrize("exchange", ["plain", "masked"])
def test_noise_is_drawn_once_a_round_and_all_parties_get_the_same(exchange):
    noise = Counted(1.0)
    found, heard = trained(defenses=[noise], exchange=exchange)
    n = found.federation.n_rows("train")
    assert [shape for _, shape, _ in noise.calls] == [(n, 2)] * SMALL["rounds"]
    assert all(labeled for _, _, labeled in noise.calls)
    kind = Kind.GRADIENT if exchange == "plain" else Kind.CIPHERTEXT
    for step in range(SMALL["rounds"]):
        one, other = (
            m.payload["value"]
            for m in heard
            if m.kind is kind and m.sender == "active" != m.receiver and m.step == step
        )
        assert np.array_equal(numbers(one), numbers(other))
    own = [m for m in heard if m.kind is Kind.GRADIENT and m.sender == m.receiver]
    clean, _ = trained(defenses=[], exchange=exchange)
    assert len(own) == SMALL["rounds"]
    assert not same(state(found), state(clean))


@pytest.mark.parametrize("at", [None, ["gradient"]])
def test_strength_zero_changes_no_bit(at):
    plain, said = trained()
    defended, heard = trained(defenses=[IsotropicNoise(0.0, at=at), LabelDP(0.0)])
    assert same(state(plain), state(defended))
    assert all(equal(a, b) for a, b in zip(said, heard, strict=True))


def test_with_noise_models_are_the_same_in_clear_and_sealed():
    plain, _ = trained(defenses=[IsotropicNoise(1.0)], exchange="plain")
    masked, _ = trained(defenses=[IsotropicNoise(1.0)], exchange="masked")
    assert same(state(plain), state(masked))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 6),
        ({"exchange": "plain"}, 6),
        ({"alone": 2}, 4),
        ({"order": "turns"}, 2),
        ({"order": "layers", "alone": 1}, 5),
        ({"alone": 6}, 0),
    ],
)
def test_a_row_is_released_as_often_as_planned(options, expected):
    found, _ = trained(rounds=6, defenses=[GaussianDP(0.5)], **options)
    federation = found.federation
    assert found.method.max_releases("train", federation) == expected
    heard = [r for r in federation.channel.releases() if r.kind is Kind.GRADIENT and r.receiver == "passive_1"]
    assert [r.most for r in heard] == ([expected] if expected else [])
    for adversary in ("passive_1", "passive_2"):
        accounts = score.compute_spending(found, federation.channel.releases(), adversary)
        assert [one["releases"] for one in accounts] == ([expected] if expected else [])


@pytest.mark.long
@pytest.mark.parametrize("exchange", ["plain", "masked"])
def test_an_epsilon_that_is_asked_for_is_spent_over_the_rounds(tmp_path, exchange):
    report = vflsec.evaluate(
        method={"secureboost": {**SMALL, "exchange": exchange}},
        attack="logistic", methods=["secureboost"],
        defense="gaussian-dp", epsilons=[2], dataset="toy", data={"options": {"rows": 200}}, seeds=1, jobs=1,
        aux={"n": 20, "folds": 0}, out=tmp_path,
    )  # fmt: skip
    points = {point.strength: point for point in report.points}
    assert points[0.0].spent == []
    (one,) = points[0.5].spent
    assert one["epsilon"] == pytest.approx(2, rel=1e-3)
    assert one["releases"] == SMALL["rounds"]


# Early stopping, and going on


@pytest.mark.parametrize("classes", [2, 3])
def test_the_round_that_is_best_on_validation_rows_is_kept(classes):
    federation = make_toy_federation(rows=120, columns=2, classes=classes, data=VALIDATION, signal="none")
    found, heard = trained(federation, rounds=30, patience=3, learning_rate=1.0, leaf_rows=1)
    made, labels = found.method, federation.active.labels["val"]
    shape = made.shape(federation)
    outputs, done = shape.outputs, len(found.history["train"])
    assert done < 30
    losses = []
    for rounds in range(1, done + 1):
        shape.grown.fill_(rounds * outputs)
        losses.append(float(torch.nn.functional.cross_entropy(found.predict("val").double(), labels)))
    best = int(np.argmin(losses)) + 1
    assert done == best + 3
    shape.grown.fill_(best * outputs)
    expected = found.predict("test")
    again, _ = trained(
        make_toy_federation(rows=120, columns=2, classes=classes, data=VALIDATION, signal="none"),
        rounds=30, patience=3, learning_rate=1.0, leaf_rows=1,
    )  # fmt: skip
    assert torch.equal(again.predict("test"), expected)
    validated = [m for m in heard if m.phase == "validate"]
    assert {(m.kind, m.split) for m in validated} <= {(Kind.NODES, "val")}
    assert all(m.payload["value"].shape[1] == outputs for m in validated)


class Killed(BaseException):
    pass


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "defenses"),
    [
        ({}, []),
        ({"rows": 0.5, "columns": 0.5, "exchange": "plain"}, [IsotropicNoise(1.0)]),
        ({"patience": 3, "graft": True, "order": "turns"}, [LabelDP(0.5)]),
        ({"exchange": "paillier", "key_bits": 1024}, []),
    ],
)
def test_an_interrupted_training_goes_on_to_the_bit(tmp_path, options, defenses):
    def run(path=None, kill=None):
        federation = make_toy_federation(rows=200, columns=3, data=VALIDATION, parties=3)
        federation.active.defenses = defenses
        federation.checkpoint = Checkpoint(path)
        made = method(rounds=5, **options)
        made.build(federation)

        def progress(phase, done, total):
            if done == kill:
                raise Killed

        return federation, made.run("train", federation, progress), made

    whole, history, made = run()
    with pytest.raises(Killed):
        run(tmp_path / "partial", kill=2)
    resumed, again, other = run(tmp_path / "partial")
    assert again == history
    assert same(state(whole), state(resumed))
    if "key_bits" not in options:  # or else a new key is sent
        assert resumed.channel.traffic == whole.channel.traffic
    assert resumed.channel.releases() == whole.channel.releases()
    assert torch.equal(made.predict(whole, "test"), other.predict(resumed, "test"))


# What is refused


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"alone": 4}, "alone .*rounds=3, got 4"),
        ({"depth": 15}, "got 15: grow more rounds"),
        ({"depth": 0}, "depth"),
        ({"bins": 1}, "2 <= bins <= 32768, got 1"),
        ({"key_bits": 100}, "key_bits <= 4096.*got 100"),
        ({"key_bits": 2049, "exchange": "paillier"}, "key_bits <= 4096, a multiple of 8, got 2049"),
        ({"rows": 1.5}, "expected 0 < rows <= 1, got 1.5"),
        ({"columns": 1.5}, "expected 0 < columns <= 1, got 1.5"),
        ({"rows": 0.0}, "rows"),
        ({"exchange": "open"}, "'open'.*paillier, plain$"),
        ({"exchange": "pailler"}, "'pailler'.*mean paillier"),
        ({"order": "random"}, "order 'random'.*layers, together, turns"),
        ({"l2": -1.0}, "l2"),
        ({"alone": -1}, "alone"),
        ({"patience": 0}, "patience"),
        ({"learning_rate": 1e18}, r"expected 0 < learning_rate <= 1, got 1e\+18"),
        ({"order": "layers", "passive_levels": 5}, "passive_levels .*depth=3, got 5"),
    ],
)
def test_impossible_settings_are_refused(options, match):
    with pytest.raises(UsageError, match=match):
        method(**options)


def test_patience_needs_validation_rows():
    federation, made = make_toy_federation(), method(patience=2)
    made.build(federation)
    with pytest.raises(UsageError, match=r"patience .*got none: .*data\.validation=0\.1"):
        made.check(federation)
    method(patience=2).check(make_toy_federation(data=VALIDATION))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("party", ["active", "passive_1"])
def test_columns_that_are_not_finite_are_a_divergence(value, party):
    federation = make_toy_federation(rows=100)
    federation.parties[party].features["train"][3, 1] = value
    with pytest.raises(Diverged, match=f"nan or infinity at {party}"):
        method().fit(federation)


def test_noise_beyond_all_sums_is_a_divergence():
    with pytest.raises(Diverged, match="derivatives below .*lower the noise"):
        trained(defenses=[IsotropicNoise(1e12)])


def test_options_are_shown_with_the_defaults_of_the_preset():
    assert registry.load("methods", "secureboost-rl").alone == 1
    assert registry.load("methods", "secureboost-turns").order == "turns"
    assert SecureBoost.alone == 0
    assert SecureBoost.order == "together"


def test_every_bin_pair_of_deepest_trees_fits_the_wire():
    federation = make_toy_federation(rows=60, columns=2, signal="none")
    found, heard = trained(federation, rounds=1, depth=14, leaf_rows=1, l2=0.0, leaf_hessian=0.0)
    assert max(int(m.payload["value"].max()) for m in heard if m.kind is Kind.NODES) < 2**15
    assert torch.isfinite(found.predict("test")).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"leaf_rows": 91}, "182 rows .*leaf_rows=91.*180"),
        ({"leaf_rows": 46, "rows": 0.5}, "92 rows .*leaf_rows=46.*90"),
        ({"leaf_hessian": 100.0}, "lower leaf_rows, leaf_hessian or least_gain"),
        ({"leaf_rows": 60}, ""),
    ],
)
def test_trees_without_a_split_say_which_option_forbids_it(options, said):
    found, _ = trained(**options)
    remedy = found.method.remedy(found.federation)
    assert re.search(said, remedy)
    assert bool(remedy) == bool(said) == (float(found.predict("test").std(dim=0).max()) == 0)


@pytest.mark.long
def test_a_run_of_trees_on_few_rows_says_what_to_lower(tmp_path):
    report = vflsec.evaluate(
        methods=["secureboost"], attack="logistic", dataset="toy", data={"n_labeled": 30, "options": {"rows": 200}},
        seeds=1, jobs=1, aux={"n": 10, "folds": 0}, out=tmp_path,
    )  # fmt: skip
    assert [point.statuses for point in report.points if point.attack == "logistic"] == [{"collapsed": 1}]
    (alarm,) = [alarm for alarm in report.summary.alarms if "leaf_rows" in alarm]
    assert alarm == (
        "secureboost, no defense: the model predicts the same for every test row: no tree has a split, which needs 40 "
        "rows in a round with leaf_rows=20, and there are 30: lower leaf_rows (1 of 1 training)"
    )


def test_more_nodes_than_memory_are_refused_before_they_are_made():
    with pytest.raises(UsageError, match="4,194,304 nodes .*800,000,000"):
        method(rounds=100_000_000).build(dealt(THREE))
