"""LocalCL is what its formulas say; SS-VFL-I sends once and hears nothing; SS-VFL-C is split learning from there."""

import math
import re
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vflsec.base.errors import Diverged, UsageError
from vflsec.base.layout import Layout
from vflsec.base.seeds import make_rng, seed_weights
from vflsec.core.federation import Checkpoint
from vflsec.core.message import Kind, Route
from vflsec.core.settings import ModelSpec, PretrainSpec, TrainSpec
from vflsec.data.partition import DataSpec
from vflsec.methods.split_training import SplitTraining, count_traffic
from vflsec.methods.ss_vfl import (
    LocalCL,
    LocalMoCo,
    SSVFLCoupled,
    SSVFLIndependent,
    get_rows,
    make_views,
    size_queue,
)
from vflsec.nn.encoders import Encoder
from vflsec.protocols.plain import PlainBoundary
from vflsec.testing.conformance import MethodConformance
from vflsec.testing.federations import make_toy_federation

BOTH = pytest.mark.parametrize("kind", [SSVFLIndependent, SSVFLCoupled])
DATA = DataSpec(n_labeled=60, overlap=0.8, validation=0.2)
MB = 2**20


def make(kind, *, model=None, pretrain=None, options=None, **train):
    spec = TrainSpec(
        **{"epochs": 3, "batch": 16, **train}, pretrain=PretrainSpec(**{"epochs": 2, "batch": 32, **(pretrain or {})})
    )
    shape = ModelSpec(**{"encoder": "tabular", "bottom": (6,), "cut": 5, **(model or {})})
    return kind(spec, shape, **(options or {}))


def make_federation(*, data=DATA, **options):
    return make_toy_federation(data=data, **{"rows": 160, "columns": 4, **options})


def pretrained(kind, federation, **settings):
    method = make(kind, **settings)
    method.build(federation)
    method.run("pretrain", federation)
    return method


def states(federation, role="bottom"):
    return {
        f"{party.name}.{key}": value.clone()
        for party in federation.parties.values()
        if role in party.modules
        for key, value in party.modules[role].state_dict().items()
    }


def equal(a, b):
    assert a.keys() == b.keys()
    return {key for key in a if torch.equal(a[key], b[key])}


class Conformance(MethodConformance):
    kind = SSVFLCoupled

    def make(self):
        return make(self.kind)


class TestCoupled(Conformance):
    pass


class TestIndependent(Conformance):
    kind = SSVFLIndependent


class TestAsPrinted(Conformance):
    def make(self):
        return make(SSVFLCoupled, options={"localcl": "inbatch", "keep_projection": True}, model={"encoder": "mlp"})


class TestAltered(Conformance):
    def make(self):
        return make(SSVFLIndependent, options={"recompute_augmented": True})


# LocalCL


def linear_model(width=3, columns=4):
    with seed_weights(0, "test"):
        return Encoder(nn.Linear(columns, 6), nn.Linear(6, width), width)


def learner(kind, rows=8, batch=8, lr=0.1):
    x = torch.randn(rows, 4, generator=make_rng(1, "rows"))
    with seed_weights(0, "queue"):
        return kind(linear_model(), x, Layout.numeric(4), batch=batch, lr=lr)


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm()))


def views(found, *stream):
    """The two views of the first batch of a pass."""
    seed, *names = stream
    rows = torch.randperm(len(found.rows), generator=make_rng(seed, "batches", *names))[: found.batch]
    return found.views(found.rows[rows], make_rng(seed, "views", *names))


def test_a_step_of_moco_is_the_formula():
    """One loss by a double loop, one update by hand: the model, its average and the queue."""
    found, lr = learner(LocalMoCo), 0.1
    before = [p.detach().clone() for p in found.model.parameters()]
    queue = found.queue.keys.clone()
    first, second = views(found, 0, "here")
    queries, keys = found.model(first), found.average(second)

    expected = 0.0
    for q, k in zip(queries.detach(), keys, strict=True):
        positive = math.exp(cosine(q, k) / 0.2)
        expected -= math.log(positive / (positive + sum(math.exp(cosine(q, n) / 0.2) for n in queue))) / len(first)
    logits = torch.cat(
        [(F.normalize(queries) * F.normalize(keys)).sum(1, keepdim=True), F.normalize(queries) @ queue.T], 1
    )
    gradients = torch.autograd.grad(-F.log_softmax(logits / 0.2, 1)[:, 0].mean(), list(found.model.parameters()))

    (loss,) = found.steps(0, "here")
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    for old, gradient, new, average in zip(
        before, gradients, found.model.parameters(), found.average.parameters(), strict=True
    ):
        assert torch.allclose(new, old - lr * (gradient + 1e-4 * old), atol=1e-6)
        assert torch.allclose(average, 0.999 * old + 0.001 * new, atol=1e-6)
        assert not torch.equal(average, old)
    assert torch.allclose(found.queue.keys, F.normalize(keys), atol=1e-6)
    assert torch.allclose(found.queue.keys.norm(dim=1), torch.ones(8))
    assert not any(p.requires_grad for p in found.average.parameters())


def test_in_batch_loss_is_equation_2_both_ways():
    found = learner(LocalCL)
    first, second = views(found, 0, "here")
    z = torch.cat([found.model(first), found.model(second)]).detach()
    expected = 0.0
    for u in range(16):
        others = [math.exp(cosine(z[u], z[i]) / 0.2) for i in range(16) if i != u]
        assert len(others) == 1 + 2 * 8 - 2
        expected -= math.log(math.exp(cosine(z[u], z[(u + 8) % 16]) / 0.2) / sum(others)) / 16
    (loss,) = found.steps(0, "here")
    assert float(loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", [LocalCL, LocalMoCo])
def test_a_pass_takes_every_row_once_and_leaves_no_gradient(kind):
    found, seen = learner(kind, rows=21, batch=5), []
    altered = found.views
    found.views = lambda x, noise: seen.append(x) or altered(x, noise)
    list(found.steps(0, "here"))
    assert [len(x) for x in seen] == [5, 5, 5, 6], "a single row left over joins the batch before it"
    assert sorted(map(tuple, torch.cat(seen).tolist())) == sorted(map(tuple, found.rows.tolist()))
    assert all(p.grad is None for p in found.model.parameters())


@pytest.mark.parametrize("kind", [LocalCL, LocalMoCo])
def test_contrast_is_learned(kind):
    found = learner(kind, rows=64, batch=16, lr=0.03)
    losses = [sum(map(float, found.steps(0, epoch))) / 4 for epoch in range(30)]
    assert losses[-1] < losses[1] - 0.3  # the queue of the first pass is random, and easy


@pytest.mark.parametrize(
    ("rows", "batch", "size"),
    [
        (1000, 128, 896),
        (128, 128, 128),
        (100, 128, 100),
        (65_536, 128, 65_536),
        (1_000_000, 128, 65_536),
        (1_000_000, 100, 65_500),
        (1_000_000, 70_000, 65_536),
    ],
)
def test_the_queue_has_whole_batches_and_no_more_keys_than_there_are_rows(rows, batch, size):
    assert size_queue(rows, batch) == size


def test_the_queue_of_a_party_is_as_long_as_its_rows_allow():
    found = learner(LocalMoCo, rows=21, batch=5)
    assert found.queue.keys.shape == (20, 3)


def test_a_table_keeps_one_view_as_it_is_and_an_image_none():
    x = torch.randn(16, 24, generator=make_rng(0, "x"))
    first, second = make_views(Layout.numeric(24), x)(x, make_rng(0, "noise"))
    assert torch.equal(first, x)
    assert not torch.equal(second, x)
    first, second = make_views(Layout.numeric(24)._replace(image=(1, 6, 4)), x)(x, make_rng(0, "noise"))
    assert first.shape == second.shape == x.shape
    for view, other in ((first, x), (second, x), (first, second)):
        assert (view != other).any(dim=1).all()


# Pre-training


@BOTH
def test_rates_fall_at_60_and_80_percent(kind):
    method = make(kind, pretrain={"epochs": 200, "lr": 1.0})
    assert [epoch for epoch in range(1, 200) if method.rate(epoch) < method.rate(epoch - 1)] == [120, 160]
    assert [method.rate(epoch) for epoch in (0, 119, 120, 160, 199)] == pytest.approx([1, 1, 0.1, 0.01, 0.01])
    assert (method.batch, make(kind, pretrain={"batch": None, "epochs": None}).iterations) == (32, 40)


@BOTH
def test_pre_training_says_nothing_and_trains_nothing_but_the_bottoms(kind):
    federation, fresh = make_federation(), make_federation()
    make(kind).build(fresh)
    pretrained(kind, federation)
    assert not federation.channel.traffic
    unchanged = equal(states(federation), states(fresh))
    assert not {key for key in unchanged if "num_batches" not in key}
    assert len(equal(states(federation, "top"), states(fresh, "top"))) == 2
    assert all(p.grad is None for party in federation.parties.values() for p in party.modules.parameters())


def test_pre_training_is_that_of_each_party_alone_on_all_its_rows():
    federation, by_hand = make_federation(), make_federation()
    pretrained(SSVFLCoupled, federation, pretrain={"epochs": 1}, options={"localcl": "inbatch"})
    make(SSVFLCoupled).build(by_hand)
    for party in by_hand.parties.values():
        rows = get_rows(party)
        assert len(rows) == len(party.features["aligned"]) + len(party.features["local"])
        assert len(party.features["local"])
        alone = LocalCL(party.modules["bottom"], rows, party.layout, batch=32, lr=0.03)
        list(alone.steps(by_hand.seed, "pretrain", party.name, 0))
    assert equal(states(federation), states(by_hand)) == states(federation).keys()


def test_both_methods_pre_train_alike():
    federations = make_federation(), make_federation()
    for kind, federation in zip((SSVFLIndependent, SSVFLCoupled), federations, strict=True):
        pretrained(kind, federation)
    assert equal(*map(states, federations)) == states(federations[0]).keys()


class Killed(Exception):
    pass


@pytest.mark.sampled
@pytest.mark.parametrize("localcl", ["moco", "inbatch"])
@pytest.mark.parametrize("done", [1, 3])
def test_a_killed_pre_training_goes_on_to_the_same_bits(localcl, done, tmp_path):
    settings = {"pretrain": {"epochs": 5, "batch": 16}, "options": {"localcl": localcl}}
    whole = make_federation()
    expected = make(SSVFLCoupled, **settings)
    expected.build(whole)
    history = expected.run("pretrain", whole)

    def kill(phase, iteration, total):
        if iteration == done:
            raise Killed

    federation, seen = make_federation(), []
    federation.checkpoint = Checkpoint(tmp_path / "kept")
    method = make(SSVFLCoupled, **settings)
    method.build(federation)
    with pytest.raises(Killed):
        method.run("pretrain", federation, kill)

    federation = make_federation()
    federation.checkpoint = Checkpoint(tmp_path / "kept")
    method = make(SSVFLCoupled, **settings)
    method.build(federation)
    assert method.run("pretrain", federation, lambda *progress: seen.append(progress)) == history
    assert seen == [("pretrain", iteration, 5) for iteration in range(done + 1, 6)]
    assert equal(states(federation), states(whole)) == states(whole).keys()


def test_a_loss_that_is_not_finite_is_a_divergence():
    with pytest.raises(Diverged, match=r"lower train\.pretrain\.lr"):
        pretrained(SSVFLCoupled, make_federation(), pretrain={"lr": 1e38}, model={"encoder": "mlp"})


# The projection


@pytest.mark.parametrize(
    ("model", "options", "width"),
    [
        ({}, {}, 5),
        ({"cut": None}, {}, 128),
        ({}, {"projection": 9}, 9),
        ({"cut": None, "head": "none", "aggregation": "sum"}, {}, 2),
    ],
)
@pytest.mark.parametrize("encoder", ["mlp", "tabular"])
def test_a_linear_projection_ends_the_model(model, options, width, encoder):
    federation = make_federation()
    method = make(SSVFLCoupled, model={**model, "encoder": encoder}, options=options)
    method.build(federation)
    bottom = federation.active.modules["bottom"]
    assert bottom.width == width
    *_, last = bottom.modules()
    assert (last.in_features, last.out_features) == (6, width)
    assert bottom(federation.active.features["train"]).shape == (federation.n_rows("train"), width)


@pytest.mark.parametrize("encoder", ["mlp", "tabular"])
def test_the_projection_starts_again_unless_it_is_kept(encoder):
    """All that SS-VFL-I changes of a party's model when it learns from labels, to the bit."""
    for keep in (True, False):
        federation = make_federation()
        method = pretrained(SSVFLIndependent, federation, options={"keep_projection": keep}, model={"encoder": encoder})
        before = states(federation)
        method.run("finetune", federation)
        after = states(federation)
        changed = before.keys() - equal(before, after)
        *_, (last, _) = federation.active.modules["bottom"].named_modules()
        drawn = {f"{name}.{last}.{part}" for name in federation.parties for part in ("weight", "bias")}
        assert changed == (set() if keep else drawn)
    for name, party in federation.parties.items():
        with seed_weights(federation.seed, "projection", name):
            fresh = nn.Linear(6, 5)
        projection = party.modules["bottom"].get_submodule(last)
        assert torch.equal(projection.weight, fresh.weight)
        assert torch.equal(projection.bias, fresh.bias)


def test_what_the_last_phase_alone_reads_changes_no_pre_training():
    plain = make_federation()
    pretrained(SSVFLIndependent, plain)
    options = {"keep_projection": True, "server_lr": 3.0, "recompute_augmented": True, "boundary": PlainBoundary}
    assert options.keys() == SSVFLIndependent.last_phase_options
    other = make_federation(data=DataSpec(n_labeled=40, overlap=0.8))
    pretrained(SSVFLIndependent, other, options=options, lr=0.5, epochs=7)
    assert equal(states(plain), states(other)) == states(plain).keys()


# SS-VFL-I


def head_by_hand(federation, method, *, lr, local_steps=1):
    """Logistic regression on frozen representations, without parties or a wire."""
    bottoms = [method.representation(party).eval() for party in federation.parties.values()]
    with torch.no_grad():
        h = torch.cat(
            [b(p.features["train"]) for b, p in zip(bottoms, federation.parties.values(), strict=True)], dim=1
        )
    head, labels = federation.active.modules["top"].head, federation.active.labels["train"]
    optimizer = torch.optim.SGD(head.parameters(), lr, method.train_spec.momentum)
    order = make_rng(federation.seed, "batches", "finetune")
    for _ in range(method.train_spec.epochs):
        for rows in torch.randperm(len(labels), generator=order).split(method.train_spec.batch):
            for _ in range(local_steps):
                loss = F.cross_entropy(head(h[rows]), labels[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


@pytest.mark.sampled
@pytest.mark.parametrize(("server_lr", "lr"), [(None, 0.1), (20.0, 20.0)])
@pytest.mark.parametrize("local_steps", [1, 3])
def test_the_head_is_a_regression_on_frozen_representations(server_lr, lr, local_steps):
    settings = {"options": {"server_lr": server_lr, "keep_projection": True}, "optimizer": "sgd", "lr": 0.1}
    found, by_hand = make_federation(parties=3), make_federation(parties=3)
    for federation in (found, by_hand):
        method = pretrained(SSVFLIndependent, federation, local_steps=local_steps, **settings)
        before = states(federation, "top")
        if federation is found:
            method.run("finetune", federation)
        else:
            head_by_hand(federation, method, lr=lr, local_steps=local_steps)
        assert not equal(before, states(federation, "top"))
    for key, value in states(by_hand, "top").items():
        assert torch.allclose(states(found, "top")[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("parties", "labeled", "printed"), [(12, 40, 0.23), (2, 1268, 1.24)])
def test_table_1(parties, labeled, printed):
    """SS-VFL-I on 1 % of ModelNet10 and of ImageNet100: 12 and 2 parties, embeddings of width 128."""
    federation = make_federation(parties=parties, rows=math.ceil(labeled / 0.7) + 20, data=DataSpec(n_labeled=labeled))
    method = make(
        SSVFLIndependent, model={"cut": None, "encoder": "mlp"}, pretrain={"epochs": 1, "batch": 128}, target=0.01
    )
    method.fit(federation)
    assert round(federation.reached["paper_bytes"] / MB, 2) == printed
    assert federation.reached["paper_bytes"] == parties * 128 * labeled * 4
    assert federation.reached["true_bytes"] == (parties - 1) * 128 * labeled * 4


@pytest.mark.parametrize(
    ("parties", "rows", "printed"),
    [(2, 126_788, (1.24, 6.19, 12.38, 30.95)), (12, 4_000, (0.23, 1.17, 2.34, 5.86))],
)
def test_table_1_by_its_formula(parties, rows, printed):
    """All of its column SS-VFL-I, from the counter; the paper's rows need not be whole."""
    federation = make_federation(parties=parties)
    for fraction, expected in zip((0.01, 0.05, 0.1, 0.25), printed, strict=True):
        nbytes = 128 * rows * fraction * 4
        sent = {Route("finetune", p.name, "active", Kind.EMBEDDING): nbytes for p in federation.passive}
        federation.channel.traffic = Counter(sent)
        assert round(count_traffic(federation, 1)["paper_bytes"] / MB, 2) == expected


@pytest.mark.parametrize("epochs", [1, 4])
def test_embeddings_go_up_once_and_no_gradient_comes_down(epochs):
    federation, heard = make_federation(parties=3), []
    federation.channel.taps.append(heard.append)
    make(SSVFLIndependent, epochs=epochs).fit(federation)
    rows = federation.n_rows("train")
    assert federation.channel.traffic == {
        Route("finetune", party.name, "active", Kind.EMBEDDING): rows * 5 * 4 for party in federation.passive
    }
    for party in federation.passive:
        sent = torch.cat([message.rows for message in heard if message.sender == party.name])
        assert torch.equal(sent, torch.arange(rows))
        h = torch.cat([message.payload["value"] for message in heard if message.sender == party.name])
        assert torch.allclose(h, party.modules["bottom"].eval()(party.features["train"]), atol=1e-6)
    assert {message.split for message in heard} == {"train"}


def test_altered_rows_are_sent_and_counted_in_every_epoch():
    federation, heard = make_federation(), []
    method = pretrained(
        SSVFLIndependent, federation, options={"recompute_augmented": True, "keep_projection": True}, epochs=4
    )
    before, rows = states(federation), federation.n_rows("train")
    federation.channel.taps.append(heard.append)
    method.run("finetune", federation)
    assert federation.channel.traffic == {Route("finetune", "passive_1", "active", Kind.EMBEDDING): 4 * rows * 5 * 4}
    assert equal(before, states(federation)) == before.keys(), "the bottom models stay as they are, statistics included"
    h = torch.cat([m.payload["value"] for m in heard]).split(rows)
    order = torch.cat([m.rows for m in heard]).split(rows)
    epochs = [part[where.argsort()] for part, where in zip(h, order, strict=True)]  # each by row
    plain = method.representation(federation.passive[0]).eval()(federation.passive[0].features["train"])
    for k, epoch in enumerate(epochs):
        for other in (plain, *epochs[:k]):
            changed = ~torch.isclose(epoch, other, atol=1e-4).all(dim=1)
            assert changed.double().mean() > 0.8  # one column of four is replaced


@pytest.mark.parametrize("select", ["best_on_val", "paper_best_on_test"])
def test_rows_that_choose_an_epoch_are_sent_once(select):
    federation = make_federation()
    method = make(SSVFLIndependent, select=select, epochs=4)
    method.fit(federation)
    split = "val" if select == "best_on_val" else "test"
    assert (
        federation.channel.traffic[Route("validate", "passive_1", "active", Kind.EMBEDDING)]
        == federation.n_rows(split) * 5 * 4
    )
    assert count_traffic(federation, 1)["true_bytes"] == federation.n_rows("train") * 5 * 4


def test_what_was_sent_for_validation_predicts_what_the_wire_does():
    federation = make_federation()
    method = pretrained(SSVFLIndependent, federation, select="best_on_val")
    training = method.split(federation)
    training.fit("finetune", lambda *_: None)
    traffic = federation.channel.traffic.total()
    stored = training.predict("val", phase="validate")
    assert federation.channel.traffic.total() == traffic
    assert torch.allclose(stored, training.predict("val"), atol=1e-6)
    assert federation.channel.traffic.total() > traffic


def test_a_passive_adversary_is_shown_no_gradient():
    assert Kind.GRADIENT not in SSVFLIndependent.receives["passive"]
    assert Kind.GRADIENT in SSVFLCoupled.receives["passive"]
    assert Kind.EMBEDDING in SSVFLIndependent.receives["active"]
    assert SSVFLIndependent.messages["finetune"] == {Kind.EMBEDDING}


# SS-VFL-C


def test_coupled_is_split_learning_from_the_pre_trained_bottoms():
    options = {"keep_projection": True}
    found, before = make_federation(parties=3), make_federation(parties=3)
    method = make(SSVFLCoupled, options=options)
    method.fit(found)
    pretrained(SSVFLCoupled, before, options=options)

    by_hand = make_federation(parties=3)
    method.build(by_hand)
    for name, party in by_hand.parties.items():
        party.modules["bottom"].load_state_dict(before.parties[name].modules["bottom"].state_dict())
    bottoms = {name: party.modules["bottom"] for name, party in by_hand.parties.items()}
    split = SplitTraining(by_hand, bottoms, by_hand.active.modules["top"], method._boundaries, method.train_spec)
    split.fit("finetune", lambda *_: None)
    for role in ("bottom", "top"):
        assert equal(states(found, role), states(by_hand, role)) == states(found, role).keys()
    assert not {key for key in equal(states(found), states(before)) if "num_batches" not in key}


def test_coupled_says_as_much_in_an_epoch_as_split_learning():
    federation = make_federation(parties=3)
    make(SSVFLCoupled, epochs=4, target=0.01).fit(federation)
    epoch = federation.n_rows("train") * 5 * 4
    assert federation.reached == {"epochs": 1, "paper_bytes": 3 * epoch, "true_bytes": 2 * 2 * epoch}
    for party in federation.passive:
        for route in ((party.name, "active", Kind.EMBEDDING), ("active", party.name, Kind.GRADIENT)):
            assert federation.channel.traffic[Route("finetune", *route)] == 4 * epoch


# What is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pretrain": {"batch": 1}}, "expected train.pretrain.batch >= 2, got 1"),
        ({"options": {"localcl": "mocco"}}, "'mocco'. Did you mean moco?"),
        ({"options": {"projection": 0}}, "expected projection > 0, got 0"),
        ({"options": {"server_lr": -1.0}}, "expected server_lr > 0, got -1.0"),
        ({"model": {"cut": None, "aggregation": "sum", "head": "none"}}, "trains the head alone"),
        (
            {"model": {"cut": None, "aggregation": "sum", "head": "none"}, "options": {"projection": 8}},
            "expected no projection with model.head=none",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        make(SSVFLIndependent, **settings)


@BOTH
def test_a_party_needs_two_rows_to_tell_apart(kind):
    federation = make_federation()
    method = make(kind)
    method.build(federation)
    method.check(federation)
    party = federation.passive[0]
    party.features = {**party.features, "aligned": party.features["aligned"][:1], "local": party.features["local"][:0]}
    with pytest.raises(UsageError, match="two training rows .*passive_1"):
        method.check(federation)
