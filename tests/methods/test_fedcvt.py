"""FedCVT: its estimates, pseudo-labels and loss are the formulas, and all that crosses is what was sent."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from vflsec.base.errors import Diverged, UsageError
from vflsec.core.defense import Defense
from vflsec.core.message import Kind, Route
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.data.partition import DataSpec
from vflsec.defenses.iso import IsotropicNoise
from vflsec.defenses.mixup import Mixup
from vflsec.methods.fedcvt import (
    UNKNOWN,
    FedCVT,
    agree_labels,
    attend,
    compare,
    complete_targets,
    cross_entropy,
    estimate,
)
from vflsec.nn.encoders import build_encoder, reinitialize
from vflsec.nn.wrappers import PooledEncoder
from vflsec.testing.conformance import MethodConformance
from vflsec.testing.federations import make_toy_federation

EVERY_SORT = DataSpec(n_labeled=40, aligned=0.8, overlap=0.7, validation=0.1)
LABELED_LOCAL = DataSpec(aligned=0.5, overlap=0.7)
MANY_LABELS = DataSpec(n_labeled=65, aligned=0.8, overlap=0.7)
"""More rows with a label than of any other sort."""
SORTS = ("train", "unlabeled", "local")
RULES = ("shared", "orthogonal", "estimate")


def agreeing(federation):
    """Let all three classifiers start with the same leaning, so that some pseudo-labels are given."""
    for name in ("top", "top_active", "top_passive_1"):
        bias = [p for p in federation.active.modules[name].parameters() if p.ndim == 1][-1]
        torch.nn.init.zeros_(bias)
        bias.data[0] = 1.0


def make_federation(*, data=EVERY_SORT, rows=200, columns=4, defenses=(), **options):
    federation = make_toy_federation(data=data, rows=rows, columns=columns, **options)
    for party in federation.parties.values():
        party.defenses = tuple(defenses)
    return federation


def method(*, model=None, train=None, **options):
    spec = TrainSpec(**{"epochs": 2, "batch": 16, **(train or {})})
    return FedCVT(spec, ModelSpec(**{"encoder": "mlp", "bottom": (6,), "cut": 3, **(model or {})}), **options)


def weights(federation):
    return {
        f"{name}.{key}": value.clone()
        for name, party in federation.parties.items()
        for key, value in party.modules.state_dict().items()
    }


def of(party, found):
    return {key: value for key, value in found.items() if key.startswith(party)}


def equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[key], other[key]) for key in one)


def heard_in(federation, made):
    """Train, and return the messages of training."""
    heard = []
    federation.channel.taps.append(heard.append)
    made.fit(federation)
    return heard


class TestConformance(MethodConformance):
    exempt = {"test_any_number_of_parties_and_classes": "FedCVT is a method of exactly two parties"}  # noqa: RUF012

    def make(self):
        return method(train={"batch": 32})


@pytest.mark.sampled
@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize(
    "model", [{}, {"head": "mlp"}, {"aggregation": "mean"}, {"encoder": "tabular", "bottom": (8,)}]
)
def test_two_parties_and_any_number_of_classes(classes, model):
    federation = make_federation(classes=classes)
    trained = method(model=model).fit(federation)
    assert len(trained.history["train"]) == 2
    for split in ("train", "unlabeled", "test"):
        assert trained.predict(split).shape == (federation.n_rows(split), classes)
    for party in federation.parties.values():
        assert trained.method.representation(party)(party.features["test"]).shape == (federation.n_rows("test"), 6)


# Estimates


def naive_attention(queries, keys, values, temperature):
    """One number after the other, and sharpened as a distribution is: p^(1/T), normalized."""
    found = []
    for q in queries.tolist():
        scores = [math.exp(sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(len(k))) for k in keys.tolist()]
        share = [(score / sum(scores)) ** (1 / temperature) for score in scores]
        share = [one / sum(share) for one in share]
        columns = zip(*values.tolist(), strict=True)
        found.append([sum(p * v for p, v in zip(share, column, strict=True)) for column in columns])
    return torch.tensor(found, dtype=torch.float64)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.floats(0.1, 3), st.integers(0, 99))
@settings(max_examples=30)
def test_attention_is_the_formula(queries, keys, width, temperature, seed):
    q, k, v = drawn(queries, width, seed=seed), drawn(keys, width, seed=seed + 100), drawn(keys, 2, seed=seed + 200)
    assert torch.allclose(attend(q, k, v, temperature), naive_attention(q, k, v, temperature))


def test_cold_attention_takes_the_nearest_row_and_hot_attention_the_mean():
    k, v = torch.eye(3), torch.tensor([[1.0, 0.0], [0.0, 5.0], [9.0, 9.0]])
    assert torch.allclose(attend(k, k, v, 0.01), v)
    assert torch.allclose(attend(k, k, v, 1e6), v.mean(dim=0).expand(3, 2), atol=1e-4)


def test_an_estimate_joins_unique_and_common_attention():
    seen, keys, values, others = drawn(4, 6), drawn(5, 6, seed=1), drawn(5, 6, seed=2), drawn(7, 6, seed=3)
    unique = naive_attention(seen[:, :3], keys[:, :3], values[:, :3], 0.5)
    common = naive_attention(seen[:, 3:], others[:, 3:], others[:, 3:], 0.5)
    assert torch.allclose(estimate(seen, keys, values, others, 0.5), torch.cat([unique, common], dim=1))


def test_likeness_is_the_root_mean_square_of_all_products():
    h = drawn(5, 6)
    products = [sum(a * b for a, b in zip(u, c, strict=True)) for u in h[:, :3].tolist() for c in h[:, 3:].tolist()]
    assert compare(h).item() == pytest.approx(math.sqrt(sum(p * p for p in products) / 25))
    assert compare(torch.tensor([[1.0, 0.0, 0.0, 2.0], [3.0, 0.0, 0.0, 4.0]])) == 0


# Pseudo-labels


def logits(*rows):
    return torch.tensor(rows).log()


@pytest.mark.parametrize(
    ("joint", "one", "other", "label"),
    [
        ((0.1, 0.9), (0.2, 0.8), (0.25, 0.75), 1),
        ((0.9, 0.1), (0.8, 0.2), (0.75, 0.25), 0),
        ((0.35, 0.65), (0.1, 0.9), (0.1, 0.9), UNKNOWN),  # one is not sure enough, whichever
        ((0.1, 0.9), (0.35, 0.65), (0.1, 0.9), UNKNOWN),
        ((0.1, 0.9), (0.1, 0.9), (0.35, 0.65), UNKNOWN),
        ((0.9, 0.1), (0.1, 0.9), (0.1, 0.9), UNKNOWN),  # one differs, whichever
        ((0.1, 0.9), (0.9, 0.1), (0.1, 0.9), UNKNOWN),
        ((0.1, 0.9), (0.1, 0.9), (0.9, 0.1), UNKNOWN),
        ((0.1, 0.9), (0.1, 0.9), (float("nan"), 0.9), UNKNOWN),
    ],
)
def test_a_pseudo_label_needs_three_sure_classifiers_that_agree(joint, one, other, label):
    assert agree_labels([logits(joint), logits(one), logits(other)], 0.7).tolist() == [label]


def test_each_row_has_a_pseudo_label_of_its_own_and_the_threshold_must_be_exceeded():
    z = torch.tensor([[0.0, 0.0], [0.0, 9.0], [9.0, 0.0]])
    assert agree_labels([z, z, z], 0.5).tolist() == [UNKNOWN, 1, 0]
    assert agree_labels([z, z, z], 0.4).tolist() == [0, 1, 0]
    certain = z * 1000
    assert agree_labels([certain, certain, certain], 1.0).tolist() == [UNKNOWN] * 3


# The loss


def naive_loss(made, federation, a, b, labels, local_labels):
    """The docstring's objective less the passive party's own term, row by row; and the number of pseudo-labels."""
    top, top_a, top_b = (federation.active.modules[name] for name in ("top", "top_active", "top_passive_1"))
    rules = made.rules
    al = [torch.cat(side[:2]) for side in (a, b)]
    al_u, al_c = [h[:, :3] for h in al], [h[:, 3:] for h in al]
    all_c = [torch.cat(side)[:, 3:] for side in (a, b)]

    def guess(party, h):
        return torch.cat(
            [
                naive_attention(h[:, :3], al_u[1 - party], al_u[party], rules.temperature),
                naive_attention(h[:, 3:], all_c[party], all_c[party], rules.temperature),
            ],
            dim=1,
        )

    def ce(model, views, label):
        return -torch.log_softmax(model([view[None] for view in views]), dim=1)[0, label].item()

    joint = [ce(top, views, y) for *views, y in zip(a[0], b[0], labels, strict=True)]
    of_a = [ce(top_a, [view], y) for view, y in zip(a[0], labels, strict=True)]
    of_b = [ce(top_b, [view], y) for view, y in zip(b[0], labels, strict=True)]
    open_rows = list(zip(a[1], b[1], strict=True)) + list(zip(guess(0, b[2]) if len(b[2]) else [], b[2], strict=True))
    for k, views in enumerate(zip(a[2], guess(1, a[2]) if len(a[2]) else [], strict=True)):
        if len(local_labels):
            joint.append(ce(top, views, local_labels[k]))
            of_a.append(ce(top_a, views[:1], local_labels[k]))
        else:
            open_rows.append(views)
    chosen = 0
    for view_a, view_b in open_rows:
        inputs = ((top, [view_a, view_b]), (top_a, [view_a]), (top_b, [view_b]))
        shares = [torch.softmax(model([view[None] for view in views]), dim=1)[0] for model, views in inputs]
        winners = {share.argmax().item() for share in shares}
        if len(winners) == 1 and all(share.max() > rules.threshold for share in shares):
            chosen += 1
            joint.append(ce(top, [view_a, view_b], winners.pop()))

    def distance(one, other):
        return (
            sum((x - y) ** 2 for x, y in zip(one.flatten().tolist(), other.flatten().tolist(), strict=True))
            / one.numel()
        )

    total = sum(sum(losses) / len(losses) for losses in (joint, of_a, of_b))
    total += rules.shared * distance(al_c[0], al_c[1])
    total += rules.orthogonal * compare(torch.cat(a)).item()
    return total + rules.estimate * (distance(guess(0, al[1]), al[0]) + distance(guess(1, al[0]), al[1])), chosen


@pytest.mark.sampled
@pytest.mark.parametrize("labeled_local", [False, True])
@pytest.mark.parametrize("sizes", [(4, 5, 6, 7), (4, 0, 6, 7), (4, 5, 0, 7), (4, 5, 6, 0), (4, 0, 0, 0)])
@pytest.mark.parametrize("model", [{}, {"aggregation": "sum", "head": "mlp"}])
def test_the_loss_is_the_sum_of_its_terms(labeled_local, sizes, model):
    """Labeled, unlabeled, the active party's own, the passive party's own."""
    made = method(model=model, threshold=0.45, temperature=0.7, shared=0.3, orthogonal=0.2, estimate=0.6)
    federation = make_federation(classes=3)
    made.build(federation)
    agreeing(federation)
    for module in federation.active.modules.values():
        module.double()
    train, unlabeled, own, theirs = sizes
    a = [drawn(n, 6, seed=k) * 2 for k, n in enumerate((train, unlabeled, own))]
    b = [drawn(n, 6, seed=k + 10) * 2 for k, n in enumerate((train, unlabeled, theirs))]
    labels = torch.arange(train) % 3
    local_labels = (torch.arange(own) + 1) % 3 if labeled_local else torch.zeros(0, dtype=torch.long)
    local_known = local_labels if labeled_local else torch.full((own,), UNKNOWN)
    given_ = torch.cat([labels, torch.full((unlabeled,), UNKNOWN), local_known])
    with torch.no_grad():
        expected, chosen = naive_loss(made, federation, a, b, labels, local_labels)
        found = made.split(federation)._compute_objective(torch.cat(a), b, given_)
    assert found.item() == pytest.approx(expected, rel=1e-9)
    candidates = unlabeled + theirs + (0 if labeled_local else own)
    assert chosen < candidates or not candidates
    assert chosen or candidates < 15, "the rule was not exercised"


def gradients(federation):
    return {
        f"{name}.{key}": p.grad.clone()
        for name, party in federation.parties.items()
        for key, p in party.modules.named_parameters()
        if p.grad is not None
    }


def one_update(made, federation):
    """Fit nothing: one batch of every sort, without an optimizer, leaves the gradients where they are."""
    training = made.split(federation)
    made.split = lambda _: training
    training._optimizers = lambda: [torch.optim.SGD(federation.active.modules.parameters(), lr=0.0)]
    loss = made.train("train", federation, lambda *_: None)
    return loss[0]


@pytest.mark.parametrize("data", [MANY_LABELS, DataSpec(aligned=0.9, overlap=0.8)])
def test_an_update_is_that_of_one_network_in_one_piece(data):
    """Without parties and wire: the sum of both parties' terms, one graph."""
    made = method(train={"epochs": 1, "batch": 500}, threshold=0.5, orthogonal=0.5)
    split, joint = make_federation(data=data), make_federation(data=data)
    for federation in (joint, split):
        made.build(federation)
    heard = []
    split.channel.taps.append(heard.append)
    loss = one_update(made, split)
    nobody = torch.arange(0)
    where = dict.fromkeys(SORTS, nobody) | {m.split: m.rows for m in heard if m.kind is Kind.EMBEDDING}
    assert [len(rows) for rows in where.values()] == [len(split.passive[0].features[name]) for name in SORTS]

    active, passive = joint.active, joint.passive[0]
    b = [passive.modules["bottom"](passive.features[split][rows]) for split, rows in where.items()]
    own = torch.arange(len(active.features["local"]))  # the whole of it: the order within a batch does not matter
    rows = {**where, "local": own}
    a = torch.cat([active.modules["bottom"](active.features[split][rows[split]]) for split in SORTS])
    local = active.labels["local"] if len(active.labels["local"]) else torch.full((len(own),), UNKNOWN)
    unlabeled = torch.full((len(where["unlabeled"]),), UNKNOWN)
    given_ = torch.cat([active.labels["train"][where["train"]], unlabeled, local])
    training = FedCVT.split(made, joint)
    total = training._compute_objective(a, b, given_) + 0.5 * compare(torch.cat(b))
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-5)
    found, expected = gradients(split), gradients(joint)
    assert found.keys() == expected.keys()
    assert any("passive_1.bottom" in key for key in found)
    for key, value in found.items():
        assert torch.allclose(value, expected[key], atol=1e-6, rtol=1e-4), key


# The wire


@pytest.mark.parametrize("local_steps", [1, 3])
def test_traffic_is_exact_and_as_much_comes_down_as_goes_up(local_steps):
    federation = make_federation()
    trained = method(train={"epochs": 2, "batch": 500, "local_steps": local_steps}).fit(federation)
    n, sizes = federation.n_rows("train"), [len(federation.passive[0].features[split]) for split in SORTS]
    assert all(n <= size < 2 * n for size in sizes), "two updates: a batch of n rows, then what is left over"
    nbytes = sum(min(size, n) + (size - n if size > n else n) for size in sizes) * 6 * 4
    expected = {
        Route("train", "passive_1", "active", Kind.EMBEDDING): nbytes,
        Route("train", "active", "passive_1", Kind.GRADIENT): nbytes,
    }
    assert dict(federation.channel.traffic) == expected
    trained.predict("test")
    up = Route("predict", "passive_1", "active", Kind.EMBEDDING)
    assert dict(federation.channel.traffic) == {**expected, up: federation.n_rows("test") * 6 * 4}


def test_what_goes_up_are_the_representations_of_the_rows_it_names():
    federation = make_federation()
    passive, made = federation.passive[0], method()
    made.build(federation)
    bottom = made.representation(passive)
    expected = {split: bottom(passive.features[split]).detach() for split in SORTS}
    heard = []
    federation.channel.taps.append(heard.append)
    made.run("train", federation)
    first = {message.split: message for message in heard if message.kind is Kind.EMBEDDING and message.step == 0}
    assert list(first) == list(SORTS)
    for split, message in first.items():
        assert torch.allclose(message.payload["value"], expected[split][message.rows], atol=1e-6)
    for message in heard:
        assert message.sender == ("passive_1" if message.kind is Kind.EMBEDDING else "active")
        assert message.payload["value"].shape == (len(message.rows), 6)
        assert not message.payload["value"].requires_grad


def test_a_pass_shows_each_labeled_row_once_and_the_others_in_turn():
    """8 updates of 5 rows a pass; other rows come back only when all have been seen."""
    federation = make_federation(data=DataSpec(n_labeled=40, aligned=0.8, overlap=0.7))
    heard = heard_in(federation, method(train={"epochs": 3, "batch": 5}))
    rows = {split: [m.rows for m in heard if m.split == split and m.kind is Kind.EMBEDDING] for split in SORTS}
    assert len(rows["train"]) == len(rows["unlabeled"]) == len(rows["local"]) == 24
    for k in range(3):
        assert sorted(torch.cat(rows["train"][8 * k : 8 * k + 8]).tolist()) == list(range(40))
    for split in ("unlabeled", "local"):
        count = len(federation.passive[0].features[split])
        assert sorted(torch.cat(rows[split])[:count].tolist()) == list(range(count))


class Changed(Defense):
    """Does what a test says to whatever leaves, or to what the active party has."""

    name = "changed"
    reference = guarantee = "made for a test"
    points = (Kind.EMBEDDING, Kind.GRADIENT)

    def __init__(self, *, at=None, **hooks):
        super().__init__(1.0, at=at)
        vars(self).update(hooks)


def test_a_passive_party_learns_from_what_comes_down_and_from_nothing_else():
    """With gradients of nothing it stays as it was drawn; its orthogonality alone it can improve by itself."""
    silence = Changed(at=["gradient"], on_gradient=lambda g, release: torch.zeros_like(g))
    fresh, still, alone = (make_federation(defenses=[silence]) for _ in range(3))
    method().build(fresh)
    method(orthogonal=0.0).fit(still)
    assert equal(of("passive", weights(fresh)), of("passive", weights(still)))
    assert not equal(of("active", weights(fresh)), of("active", weights(still)))
    method(orthogonal=1.0, train={"epochs": 20}).fit(alone)
    before, after = (
        compare(federation.passive[0].modules["bottom"](federation.passive[0].features["aligned"]))
        for federation in (fresh, alone)
    )
    assert after < 0.8 * before


def test_an_active_party_learns_from_what_goes_up_and_from_nothing_else():
    silence = Changed(at=["embedding"], on_embedding=lambda h, release: torch.ones_like(h))
    one, other = make_federation(defenses=[silence]), make_federation(defenses=[silence])
    for features in other.passive[0].features.values():
        features.mul_(-3)
    for federation in (one, other):
        method().fit(federation)
    assert equal(of("active", weights(one)), of("active", weights(other)))
    assert not equal(of("passive", weights(one)), of("passive", weights(other)))


def test_strength_zero_changes_no_bit_and_noise_does():
    plain, off, noised = (make_federation(defenses=d) for d in ((), [IsotropicNoise(0.0)], [IsotropicNoise(1.0)]))
    for federation in (plain, off, noised):
        method().fit(federation)
    assert equal(weights(plain), weights(off))
    assert not equal(of("passive", weights(plain)), of("passive", weights(noised)))


def test_the_active_partys_own_defenses_act_on_all_it_receives_and_uses():
    seen, penalized, changed = [], [], []

    def on_received(h, sender):
        seen.append(len(h))
        return h * 0

    def penalty(h, labels, sender):
        penalized.append((len(h), len(labels), int(labels.min())))
        return 100 * h.square().mean()

    def on_labels(y, *, features, n_classes, rng):
        changed.append(len(y))
        return y

    guard = Changed(at=["embedding"], on_received=on_received, penalty=penalty, on_labels=on_labels)
    federation = make_federation(data=LABELED_LOCAL)
    federation.active.defenses = (guard,)
    trained = method(train={"epochs": 1, "batch": 500}).fit(federation)
    sizes = [len(federation.passive[0].features[split]) for split in SORTS]
    assert seen == [min(size, federation.n_rows("train")) for size in sizes if size], (
        "as many of each sort as have labels"
    )
    assert penalized == [(federation.n_rows("train"), federation.n_rows("train"), 0)]
    assert sorted(changed) == sorted([federation.n_rows("train"), federation.n_rows("local")])
    before = trained.predict("test")
    federation.passive[0].features["test"].add_(5)
    assert torch.equal(trained.predict("test"), before)


class Softened(Defense):
    """Labels lose a part of their weight to all classes."""

    name = "softened"
    reference = guarantee = "made for a test"
    points = ()
    softens = True

    def on_labels(self, y, *, features, n_classes, rng):
        return F.one_hot(y, n_classes).float() * (1 - self.strength) + self.strength / n_classes


@pytest.mark.parametrize("data", [EVERY_SORT, LABELED_LOCAL])
def test_soft_labels_that_are_almost_certain_teach_what_class_numbers_do(data):
    """With rows that have none beside them, and pseudo-labels."""
    plain, soft, softer = (make_federation(data=data) for _ in range(3))
    soft.active.defenses, softer.active.defenses = (Softened(1e-7),), (Softened(0.5),)
    for federation in (plain, soft, softer):
        method(threshold=0.5).fit(federation)
    assert all(torch.allclose(w, weights(plain)[name], atol=1e-4) for name, w in weights(soft).items())
    assert not all(torch.allclose(w, weights(plain)[name], atol=1e-4) for name, w in weights(softer).items())


def test_the_mean_over_soft_labels_leaves_out_rows_without_one():
    z = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    hard = torch.tensor([2, UNKNOWN, 0, UNKNOWN])
    soft = torch.tensor([[0, 0, 1.0], [0, 0, 0], [1, 0, 0], [0, 0, 0]])
    assert torch.allclose(cross_entropy(z, soft), cross_entropy(z, hard))
    pseudo = torch.tensor([1, 1, UNKNOWN, UNKNOWN])
    assert complete_targets(hard, pseudo).tolist() == [2, 1, 0, UNKNOWN]
    assert torch.equal(complete_targets(soft, pseudo), torch.tensor([[0, 0, 1.0], [0, 1, 0], [1, 0, 0], [0, 0, 0]]))


def test_rows_are_not_mixed_where_some_have_no_label():
    federation = make_federation()
    federation.active.defenses = (Mixup(1.0),)
    with pytest.raises(UsageError, match="mixes rows, got mixup"):
        method().fit(federation)


# Which rows and labels teach


def without(federation, *emptied):
    """Take a split away: ``unlabeled`` from both parties; a party's name stands for its local rows."""
    for name, party in federation.parties.items():
        if "unlabeled" in emptied:
            party.features["unlabeled"] = party.features["unlabeled"][:0]
        if name in emptied:
            party.features["local"] = party.features["local"][:0]
            if party.active:
                party.labels["local"] = party.labels["local"][:0]
    return federation


@pytest.mark.sampled
@pytest.mark.parametrize("data", [EVERY_SORT, LABELED_LOCAL])
@pytest.mark.parametrize(
    "emptied", [("unlabeled",), ("active",), ("passive_1",), ("unlabeled", "active", "passive_1")], ids="+".join
)
@pytest.mark.parametrize("encoder", ["mlp", "tabular"])
def test_rows_of_any_sort_may_be_lacking(data, emptied, encoder):
    federation = without(make_federation(data=data), *emptied)
    heard = heard_in(federation, method(model={"encoder": encoder, "bottom": (6,)}))
    kept = [split for split in SORTS if len(federation.passive[0].features[split])]
    assert {message.split for message in heard} == set(kept)
    assert all(len(message.rows) for message in heard)


def test_without_other_rows_and_penalties_it_is_three_supervised_classifiers():
    federation = without(make_federation(), "unlabeled", "active", "passive_1")
    made = method(train={"epochs": 1, "batch": 500}, shared=0.0, orthogonal=0.0, estimate=0.0)
    made.build(federation)
    labels, active = federation.active.labels["train"], federation.active
    a, b = (party.modules["bottom"](party.features["train"]) for party in federation.parties.values())
    inputs = (
        (active.modules["top"], [a, b]),
        (active.modules["top_active"], [a]),
        (active.modules["top_passive_1"], [b]),
    )
    expected = sum(torch.nn.functional.cross_entropy(model(views), labels).item() for model, views in inputs)
    assert one_update(made, federation) == pytest.approx(expected, rel=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize(("split", "reads"), [("train", True), ("local", True), ("val", False), ("test", False)])
def test_labels_that_the_active_party_has_are_read_and_no_others(split, reads):
    data = DataSpec(aligned=0.5, overlap=0.7, validation=0.2)
    one, other = make_federation(data=data), make_federation(data=data)
    assert len(other.active.labels[split]) > 5
    other.active.labels[split].copy_(1 - other.active.labels[split])
    for federation in (one, other):
        method().fit(federation)
    assert equal(weights(one), weights(other)) is not reads


def test_pseudo_labels_teach_the_joint_classifier_and_no_other():
    """Penalties off: the classifiers of one view, and the encoders at a first update, know labels alone."""
    options = {"shared": 0.0, "orthogonal": 0.0, "estimate": 0.0}
    found = {}
    for threshold in (0.5, 1.0):  # with two classes all that agree are surer than 0.5
        federation, made = make_federation(), method(train={"epochs": 1, "batch": 500}, threshold=threshold, **options)
        made.build(federation)
        agreeing(federation)
        one_update(made, federation)
        found[threshold] = gradients(federation)
    one, other = found[0.5], found[1.0]
    for top in ("active.top_active", "active.top_passive_1"):
        assert equal(of(top, one), of(top, other))
    assert not equal(of("active.top.", one), of("active.top.", other))
    assert not equal(of("passive_1.bottom", one), of("passive_1.bottom", other))


@pytest.mark.parametrize("rule", RULES)
def test_each_weight_matters(rule):
    one, other = make_federation(), make_federation()
    method(**{rule: 0.0}).fit(one)
    method(**{rule: 2.0}).fit(other)
    assert not equal(weights(one), weights(other))


def test_local_steps_reuse_an_exchange():
    one, other = make_federation(), make_federation()
    for federation, steps in ((one, 1), (other, 2)):
        method(train={"local_steps": steps}).fit(federation)
    assert one.channel.traffic == other.channel.traffic
    for party in ("active", "passive_1"):
        assert not equal(of(party, weights(one)), of(party, weights(other)))


def test_gradients_are_clipped():
    federation = make_federation()
    made = method(train={"epochs": 1, "batch": 500, "clip": 0.01})
    made.build(federation)
    one_update(made, federation)
    found = gradients(federation)
    for party in ("active", "passive_1"):
        assert torch.cat([g.flatten() for g in of(party, found).values()]).norm() == pytest.approx(0.01, rel=1e-3)


# What it learns


def hard_world(seed):
    """Many columns, most of them noise, and few labels: rows without a label show which columns go together."""
    federation = make_federation(data=DataSpec(n_labeled=16, aligned=0.7), rows=700, columns=12, classes=4, seed=seed)
    for party in federation.parties.values():
        for split, x in sorted(party.features.items()):
            noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed + len(x)))
            party.features[split] = x + 1.5 * noise
    return federation


def accuracy(made, federation):
    return (
        (made.fit(federation).predict("test").argmax(dim=1) == federation.active.labels["test"]).double().mean().item()
    )


@pytest.mark.long
def test_pseudo_labels_add_to_what_few_labels_teach():
    train, model = TrainSpec(epochs=150, lr=3e-3), ModelSpec(encoder="mlp", bottom=(32,), cut=8)
    gains = []
    for seed in range(3):
        none, found = (accuracy(FedCVT(train, model, threshold=t), hard_world(seed)) for t in (1.0, 0.7))
        assert found > 0.6  # chance is 0.25
        gains.append(found - none)
    assert sum(gains) / 3 > 0.01


# What it refuses


def test_three_parties_are_refused():
    with pytest.raises(UsageError, match="2 parties, got 3"):
        method().fit(make_federation(parties=3))


def test_a_missing_head_is_refused():
    with pytest.raises(UsageError, match=r"model\.head=linear or mlp, got none"):
        method(model={"head": "none", "aggregation": "sum", "cut": None})


def test_encoders_of_two_widths_are_refused():
    federation, made = make_federation(), method()
    made.build(federation)
    wide = [build_encoder(federation.active.layout, ModelSpec(cut=5), 2) for _ in range(2)]
    federation.active.modules["bottom"] = PooledEncoder(wide, "concat")
    with pytest.raises(UsageError, match=r"got 5 and 3.*model\.cut"):
        made.check(federation)


@pytest.mark.parametrize(
    ("option", "value"),
    [("threshold", 0.0), ("threshold", 1.1), ("temperature", 0.0), *((rule, -0.1) for rule in RULES)],
)
def test_numbers_out_of_range_are_refused(option, value):
    with pytest.raises(UsageError, match=option):
        method(**{option: value})


def test_selection_needs_validation_rows():
    with pytest.raises(UsageError, match="need validation rows"):
        method(train={"select": "best_on_val"}).fit(make_federation(data=LABELED_LOCAL))


def test_selection_takes_an_epoch_and_its_traffic_is_that_of_validation():
    federation = make_federation()
    method(train={"select": "best_on_val"}).fit(federation)
    up = Route("validate", "passive_1", "active", Kind.EMBEDDING)
    assert federation.channel.traffic[up] == 2 * federation.n_rows("val") * 6 * 4


def test_divergence_is_a_status():
    with pytest.raises(Diverged, match=r"lower train\.lr"):
        method(train={"optimizer": "sgd", "lr": 1e12, "epochs": 20}).fit(make_federation())


def test_an_untrained_copy_of_the_representation_has_other_weights_and_the_same_shape():
    federation, made = make_federation(), method()
    made.build(federation)
    bottom = made.representation(federation.passive[0])
    fresh = reinitialize(bottom, seed=5)
    x = federation.passive[0].features["test"]
    assert fresh(x).shape == bottom(x).shape == (len(x), 6)
    assert not torch.allclose(fresh(x), bottom(x))
