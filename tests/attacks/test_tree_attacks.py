"""Attacks on federated trees: exact where messages say everything, at chance where trees know nothing of labels."""

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
import torch
from scipy.stats import norm, spearmanr
from scipy.stats import t as student
from sklearn.datasets import load_breast_cancer

import vflsec
from vflsec.attacks.boosting_replay import BoostingReplay
from vflsec.attacks.fusion import ColumnFusion, Fusion
from vflsec.attacks.id2graph import ID2Graph
from vflsec.attacks.instance_space import InstanceSpaces
from vflsec.attacks.logistic import LogisticRegression
from vflsec.attacks.residual_sign import ResidualSign
from vflsec.attacks.split_order import SplitOrder
from vflsec.base.errors import InsufficientView, UsageError
from vflsec.base.layout import EncodedColumn, Layout
from vflsec.core.message import Kind, Message
from vflsec.core.view import View
from vflsec.results import metrics
from vflsec.results.statistics import bound_over_seeds
from vflsec.run import adversary
from vflsec.run.questions import ask
from vflsec.run.runner import list_kinds
from vflsec.run.spec import AuxSpec
from vflsec.testing.federations import build_from_numbers, grow_trees

N, KNOWN = 1500, 60


def world(*, seed=0, n=N, n_classes=2, noise=0.5, parties=("active", "passive_1"), shuffled=False, **options):
    """Columns of two parties, a label that follows the first ones of some ``parties``, and trees on encrypted messages.

    ``shuffled``: trees are grown by the same labels in a random order.
    """
    rng = torch.Generator().manual_seed(seed)
    x = {name: {s: torch.randn(n, 3, generator=rng) for s in ("train", "test")} for name in ("active", "passive_1")}
    total = {
        s: sum(x[name][s][:, 0] for name in parties) + noise * torch.randn(n, generator=rng) for s in ("train", "test")
    }
    cuts = torch.quantile(total["train"], torch.arange(1, n_classes) / n_classes)
    y = {s: torch.bucketize(t, cuts) for s, t in total.items()}
    grown_by = {s: own[torch.randperm(n, generator=rng)] for s, own in y.items()} if shuffled else y
    federation = build_from_numbers(x, grown_by, n_classes=n_classes, seed=seed)
    return x, y, grow_trees(federation, **{"exchange": "masked", **options})


def passive(trees, known=KNOWN):
    parties = adversary.get_adversary(trees.trained.federation, "passive_1")
    return adversary.observe(trees.trained, parties, torch.arange(known), trees.get_messages("passive_1"))


def active(trees, known=KNOWN):
    aux = AuxSpec(n=known, balanced=False)
    return ask(SplitOrder(), trees.trained, "active", aux, trees.get_messages("active")).view


def auc(scores, y, known=KNOWN):
    return metrics.auc(scores[known:].numpy(), y[known:].numpy())


@pytest.mark.parametrize("n_classes", [2, 4])
def test_derivatives_in_clear_give_every_label_away(n_classes):
    _, y, trees = world(n_classes=n_classes, rounds=4, exchange="plain")
    found = ResidualSign()(passive(trees, known=0), seed=0).scores["train"]
    assert (found.argmax(dim=1) == y["train"]).all()


@pytest.mark.parametrize("releases", [1, 4])
def test_noise_averages_out_over_rounds(releases):
    """Derivatives -1/2 and 1/2 plus noise of deviation s: the mean of R has the AUC of a shift of sqrt(R) / s."""
    deviation, n = 2.0, 20_000
    _, y, trees = world(n=n, rounds=1)
    rng, rows = torch.Generator().manual_seed(0), torch.arange(n)
    node = Message(Kind.NODES, "active", "passive_1", 0, "train", {"value": torch.ones(n, 1).long()}, rows)
    noisy = []
    for step in range(releases):
        g = 0.5 - y["train"][:, None].double() + deviation * torch.randn(n, 1, generator=rng).double()
        value = {"value": torch.cat([g, torch.full_like(g, 0.25)], dim=1)}
        noisy.append(Message(Kind.GRADIENT, "active", "passive_1", step, "train", value, rows))
    view = replace(passive(trees, known=0), messages=(node, *noisy))
    found = auc(ResidualSign()(view, seed=0).scores["train"], y["train"], 0)
    assert found == pytest.approx(norm.cdf(releases**0.5 / deviation / 2**0.5), abs=0.01)


def test_derivatives_that_are_encrypted_are_not_read():
    _, _, trees = world(rounds=1)
    with pytest.raises(InsufficientView, match="received gradients"):
        ResidualSign()(passive(trees), seed=0)


def pure(n_classes=2, *, parts=3):
    """Trees with leaves of one class each, told in full; own columns say nothing."""
    rng, n = torch.Generator().manual_seed(0), 600
    y = torch.arange(n) % n_classes
    rows, messages = torch.arange(n), []
    for tree in range(5):
        leaf = y + n_classes * torch.randint(parts, (n,), generator=rng)
        sealed = {"sealed": torch.zeros(0)}
        messages.append(
            Message(Kind.CIPHERTEXT, "active", "passive_1", tree, "train", sealed, rows)
        )  # a round for each
        for level in (0, 1, 2, 3, 4):
            value = {"value": ((16 + leaf) >> (4 - level))[:, None]}
            messages.append(Message(Kind.NODES, "active", "passive_1", tree, "train", value, rows))
    own = {s: torch.randn(n, 3, generator=rng) for s in ("train", "test")}
    return View("passive_1", "passive", n_classes, own, None, rows[:20], y[:20], tuple(messages)), y


@pytest.mark.long
@pytest.mark.usefixtures("small_forests")
@pytest.mark.parametrize("attack", [InstanceSpaces, BoostingReplay])
@pytest.mark.parametrize("n_classes", [2, 3])
def test_pure_leaves_give_labels_away(n_classes, attack):
    view, y = pure(n_classes)
    found = attack()(view, seed=0).scores
    assert set(found) == {"train"}, "nothing is told of test rows"
    assert (found["train"].argmax(dim=1) == y)[20:].double().mean() > 0.97


@pytest.mark.parametrize("known", [0, 20])
@pytest.mark.parametrize("n_classes", [2, 3])
def test_communities_are_found_without_any_label(n_classes, known):
    view, y = pure(n_classes, parts=1)
    view = replace(view, aux_rows=view.aux_rows[:known], aux_labels=view.aux_labels[:known])
    found = ID2Graph(columns=0.1)(view, seed=0).scores["train"].argmax(dim=1)
    table = torch.zeros(n_classes, n_classes).index_put_((y, found), torch.ones(len(y)), accumulate=True)
    assert (table > 0).sum() == n_classes, "each cluster is a class"
    assert known == 0 or (found == y).all(), "auxiliary labels name clusters"


def test_without_labels_the_larger_cluster_is_class_0():
    view, _ = pure(parts=1)
    kept = torch.tensor([i for i in range(600) if i % 2 == 0 or i % 6 == 1])
    messages = tuple(
        replace(m, rows=torch.arange(len(kept)), payload={"value": m.payload["value"][kept]})
        for m in view.messages
        if m.kind is Kind.NODES
    )
    features = {"train": view.features["train"][kept]}
    view = replace(
        view, features=features, messages=messages, aux_rows=view.aux_rows[:0], aux_labels=view.aux_labels[:0]
    )
    found = ID2Graph(columns=0.1)(view, seed=0).scores["train"].argmax(dim=1)
    assert torch.equal(found, kept % 2)


@pytest.mark.parametrize("columns", [-0.1, 1.5])
def test_a_share_of_the_variance_is_between_0_and_1(columns):
    with pytest.raises(UsageError, match="expected 0 <= columns <= 1"):
        ID2Graph(columns=columns)


@pytest.mark.long
@pytest.mark.usefixtures("small_forests")
def test_nodes_that_follow_the_label_add_to_own_columns():
    """The active party's column is half of the label, and nodes tell it."""
    _, y, trees = world(n=800, rounds=6)
    view = passive(trees)
    alone = auc(Fusion()(adversary.isolate(view, 0), seed=0).scores["train"], y["train"])
    nodes = auc(InstanceSpaces()(view, seed=0).scores["train"], y["train"])
    together = auc(Fusion()(view, seed=0).scores["train"], y["train"])
    assert nodes > alone + 0.05
    assert together > nodes - 0.01


@pytest.mark.long
@pytest.mark.usefixtures("small_forests")
@pytest.mark.parametrize(("n_classes", "noise"), [(2, 1.5), (4, 0.3)])
def test_fusion_is_not_behind_its_sources(n_classes, noise):
    """With much noise in the labels, and with little."""
    _, y, trees = world(n=600, rounds=10, n_classes=n_classes, noise=noise)
    view = passive(trees)
    reached = {a.name: right(a(view, seed=0).scores["train"], y["train"]) for a in (Fusion(), BoostingReplay())}
    reached["alone"] = right(Fusion()(replace(view, messages=()), seed=0).scores["train"], y["train"])
    assert reached["fusion"] > max(reached.values()) - 0.02


def right(scores, y):
    return float((scores.argmax(dim=1) == y)[KNOWN:].double().mean())


@pytest.mark.long
@pytest.mark.usefixtures("small_forests")
@pytest.mark.parametrize("attack", [InstanceSpaces, BoostingReplay])
def test_test_rows_are_guessed_from_nodes_that_the_party_splits(attack):
    _, y, trees = world(rounds=15)
    assert auc(attack()(passive(trees), seed=0).scores["test"], y["test"], 0) > 0.8


@pytest.mark.parametrize("attack", [InstanceSpaces, BoostingReplay])
def test_nodes_that_are_withheld_say_nothing(attack):
    view = passive(world(rounds=3)[2])
    messages = tuple(
        replace(m, payload={"value": torch.zeros_like(m.payload["value"])})
        for m in view.messages
        if m.kind is Kind.NODES and m.sender == "active"
    )
    found = attack()(replace(view, messages=messages), seed=0).scores["train"]
    assert torch.equal(found, found[:1].expand_as(found))


def shuffled_labels(parties, seed, **options):
    """A view of trees by labels in a random order, with KNOWN true labels, and the true labels of all rows."""
    _, y, trees = world(seed=seed, parties=parties, shuffled=True, **options)
    return replace(passive(trees), aux_labels=y["train"][:KNOWN]), y["train"]


def nodes_and_columns(parties, seed):
    """The AUC of an attack on such trees, and of what its party infers alone.

    Alone it fits a logistic regression to its own columns, which is the right model.
    """
    view, y = shuffled_labels(parties, seed)
    alone = LogisticRegression()(adversary.isolate(view, seed), seed=0)
    return [auc(guess.scores["train"], y) for guess in (InstanceSpaces()(view, seed=0), alone)]


@pytest.mark.statistical
@pytest.mark.usefixtures("small_forests")
def test_trees_by_shuffled_labels_leak_nothing_if_no_column_tells_of_labels():
    """The AUC of a score that knows nothing has the deviation sqrt((n + 1) / (12 n_0 n_1)).

    Over S seeds, this and the quantile of t give the expected width of the interval; it is not twice as wide.
    """
    n, seeds = 400, 5
    deviation = ((n - KNOWN + 1) / (3 * (n - KNOWN) ** 2)) ** 0.5  # n_0 = n_1
    widest = 2 * 2 * student.ppf(0.975, seeds - 1) * deviation / seeds**0.5
    attacks = InstanceSpaces(), BoostingReplay(), Fusion(), ID2Graph()
    views = [shuffled_labels((), seed, n=n, rounds=4) for seed in range(seeds)]
    for attack in attacks:
        leak = bound_over_seeds([auc(attack(view, seed=0).scores["train"], y) for view, y in views])
        assert leak.low <= 0.5 <= leak.high, attack
        assert leak.high - leak.low < widest, attack


@pytest.mark.statistical
def test_trees_by_shuffled_labels_tell_no_more_than_the_columns_that_they_split():
    """Of own columns nodes tell less than the columns themselves; of other parties' columns the adversary has no more.

    So what is inferred from nodes can exceed what the party infers alone even if trees know nothing of labels.
    """
    own, foreign = ([nodes_and_columns((name,), seed) for seed in range(5)] for name in ("passive_1", "active"))
    of_own, of_foreign = (bound_over_seeds([nodes - alone for nodes, alone in one]) for one in (own, foreign))
    assert of_own.high < 0
    assert of_foreign.low > 0
    alone = bound_over_seeds([alone for _, alone in foreign])
    assert alone.low <= 0.5 <= alone.high


def test_a_column_that_is_split_at_every_bin_has_the_exact_order():
    """Each tree splits the root at another bin of one column."""
    n, bins = 300, 16
    theirs = {s: torch.randn(n, 1, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(("train", "test"))}
    cuts = torch.quantile(theirs["train"][:, 0], torch.arange(1, bins) / bins)
    setup = {"column": torch.zeros(bins, dtype=torch.long), "ordered": torch.ones(bins, dtype=torch.bool)}
    messages = [Message(Kind.CONTROL, "passive_1", "active", 0, "train", setup)]
    for b in range(bins - 1):
        control = {"nodes": torch.tensor([1]), "bins": torch.tensor([b])}
        messages.append(Message(Kind.CONTROL, "active", "passive_1", b, "train", control))
        for split, phase in (("train", "train"), ("test", "predict")):
            child = {"value": 2 + (theirs[split] > cuts[b]).long()}
            messages.append(Message(Kind.NODES, "passive_1", "active", b, phase, child, torch.arange(n), split))
    none, own = torch.zeros(0, dtype=torch.long), {s: torch.zeros(n, 1) for s in theirs}
    view = View("active", "active", 1, own, None, none, torch.zeros(0, 1), tuple(messages), victim="passive_1")
    found = SplitOrder()(view, seed=0).scores
    for split, x in theirs.items():
        bin_of = torch.bucketize(x[:, 0], cuts).numpy()
        middles = [NormalDist().inv_cdf((b + 0.5) / bins) for b in range(bins)]
        np.testing.assert_allclose(found[split][:, 0], np.array(middles)[bin_of])
    known = replace(view, aux_rows=torch.arange(n), aux_labels=theirs["train"])
    fitted = SplitOrder()(known, seed=0).scores["train"][:, 0]
    means = torch.stack([theirs["train"][torch.bucketize(theirs["train"], cuts) == b].mean() for b in range(bins)])
    torch.testing.assert_close(fitted, means.double()[torch.bucketize(theirs["train"][:, 0], cuts)], atol=1e-5, rtol=0)


def test_columns_that_trees_split_are_recovered_if_bins_are_known():
    x, _, trees = world(rounds=20)
    guess = SplitOrder()(active(trees), seed=0).scores
    assert spearmanr(guess["test"][:, 0], x["passive_1"]["test"][:, 0]).statistic > 0.85
    nothing = replace(active(trees), messages=tuple(m for m in trees.messages if m.kind is Kind.NODES))
    with pytest.raises(InsufficientView, match="needs histograms"):
        SplitOrder()(nothing, seed=0)


def test_columns_are_recovered_from_trees_that_draw_some_of_them():
    x, _, trees = world(n=400, rounds=20, columns=0.6)
    everything = SplitOrder()(active(trees), seed=0).scores["train"]
    truth = x["passive_1"]["train"]
    assert min(spearmanr(everything[:, k], truth[:, k]).statistic for k in range(3)) > 0.97


def test_a_passive_party_does_not_see_what_the_active_party_decrypts():
    assert {m.kind for m in passive(world(n=200, rounds=2)[2]).messages if m.sender == "passive_1"} == {
        Kind.CIPHERTEXT, Kind.CONTROL, Kind.NODES
    }  # fmt: skip


def test_categories_are_placed_in_the_last_slots_of_their_column():
    rows, category = torch.arange(4), torch.tensor([0, 1, 1, 0])
    setup = {"column": torch.zeros(2, dtype=torch.long), "ordered": torch.zeros(2, dtype=torch.bool)}
    control = {"nodes": torch.tensor([1]), "bins": torch.tensor([1])}
    messages = (
        Message(Kind.CONTROL, "passive_1", "active", 0, "train", setup),
        Message(Kind.CONTROL, "active", "passive_1", 0, "train", control),
        Message(Kind.NODES, "passive_1", "active", 0, "train", {"value": 2 + category[:, None]}, rows),
    )
    layout = Layout((EncodedColumn("c", "categorical", 0, 3),))
    none = torch.zeros(0, dtype=torch.long)
    view = View("active", "active", 3, {"train": torch.zeros(4, 1)}, None, none, torch.zeros(0, 3), messages,
                victim="passive_1", layout=layout)  # fmt: skip
    found = SplitOrder()(view, seed=0).scores["train"]
    assert torch.equal(found, torch.nn.functional.one_hot(1 + category, 3).double())


@pytest.mark.long
@pytest.mark.usefixtures("small_forests")
def test_fusion_of_columns_reads_bounds_and_is_not_behind_what_splits_say():
    x, _, trees = world(n=1000, rounds=20)
    view = active(trees)
    guesses = (
        ColumnFusion()(view, seed=0),
        SplitOrder()(view, seed=0),
        ColumnFusion()(adversary.isolate(view, 0), seed=0),
    )
    fused, of_splits, alone = (
        {split: metrics.r2(guess.scores[split].numpy(), x["passive_1"][split].numpy()) for split in guess.scores}
        for guess in guesses
    )
    assert fused["test"] > alone["test"] + 0.2
    assert fused["train"] > of_splits["train"] - 0.01
    assert fused["test"] > of_splits["test"] - 0.02


@pytest.mark.long
def test_columns_of_other_rows_are_learned_from_what_histograms_say_of_training_rows():
    """The victim's column is the sign of a product of two own columns, which 30 auxiliary rows do not teach."""
    rng, n = torch.Generator().manual_seed(0), 1000
    own = {s: torch.randn(n, 6, generator=rng) for s in ("train", "test")}
    theirs = {s: (x[:, 0] * x[:, 1]).sign()[:, None] for s, x in own.items()}
    theirs = {s: x + 0.1 * torch.randn(n, 1, generator=rng) for s, x in theirs.items()}
    y = {s: (torch.rand(n, generator=rng) < 0.5).long() for s in own}
    trees = grow_trees(
        build_from_numbers({"active": own, "passive_1": theirs}, y), exchange="masked", rounds=20, bins=32
    )
    view = active(trees, known=30)
    found, of_splits = (attack(view, seed=0).scores["test"] for attack in (ColumnFusion(), SplitOrder()))
    alone = ColumnFusion()(adversary.isolate(view, 0), seed=0).scores["test"]
    scores = [metrics.r2(x.numpy(), theirs["test"].numpy()) for x in (found, of_splits, alone)]
    assert scores[0] > max(scores[1:]) + 0.1


@pytest.mark.long
@pytest.mark.usefixtures("small_forests")
def test_columns_of_other_rows_are_not_guessed_worse_than_by_imputation():
    """Measurements of breast cancers, half of which follow from the others."""
    columns, classes = load_breast_cancer(return_X_y=True)
    rows = torch.randperm(len(columns), generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy((columns - columns.mean(axis=0)) / columns.std(axis=0)).float()[rows]
    y, halves = torch.from_numpy(classes)[rows], {"train": slice(398), "test": slice(398, None)}
    order = torch.from_numpy(np.random.default_rng(0).permutation(x.shape[1]))
    dealt = {"active": x[:, order[:15]], "passive_1": x[:, order[15:]]}
    parties = {name: {s: own[part] for s, part in halves.items()} for name, own in dealt.items()}
    federation = build_from_numbers(parties, {s: y[part] for s, part in halves.items()})
    view = active(grow_trees(federation, exchange="masked", rounds=8, bins=32), known=80)
    alone = SplitOrder().alone()(adversary.isolate(view, 0), seed=0).scores["test"]
    found = ColumnFusion()(view, seed=0).scores["test"]
    truth = parties["passive_1"]["test"].numpy()
    assert metrics.r2(found.numpy(), truth) > metrics.r2(alone.numpy(), truth) + 0.01


@pytest.mark.parametrize("attack", [SplitOrder(), BoostingReplay(), InstanceSpaces()], ids=lambda attack: attack.name)
def test_an_evaluation_hands_over_the_derivatives_of_each_round_with_the_nodes(attack):
    read = list_kinds([attack])
    assert {Kind.NODES, Kind.CONTROL, Kind.GRADIENT, Kind.CIPHERTEXT} <= read


@pytest.mark.long
def test_an_evaluation_finds_columns_by_the_sums_of_derivatives(tmp_path):
    """Numbers of rows alone leave more than a tenth of the variance open."""
    chosen = {"methods": "secureboost:rounds=4", "adversary": "active", "dataset": "multiple-features"}
    chosen |= {"data": {"n_labeled": 400}, "aux": {"folds": 0}, "seeds": 1, "jobs": 1}
    report = vflsec.evaluate(attack="split-order", out=tmp_path, **chosen)
    assert report.worst[0].leak.mean > 0.95


def test_split_order_is_compared_with_a_guess_from_own_columns():
    alone = SplitOrder(victim="passive_2").alone()
    assert (alone.name, alone.victim) == ("imputation", "passive_2")
