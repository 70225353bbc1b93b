"""Privacy of words: the probabilities of the mechanisms, once for each text, and what reads it."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import vflsec
from tests.attacks.test_batch_label import ROWS, exchanged, right
from tests.language.test_split_lm import make_animals, make_federation, make_method
from vflsec.attacks.batch_label import BatchLabel
from vflsec.attacks.cluster import Cluster
from vflsec.attacks.fusion import Fusion
from vflsec.attacks.membership import MembershipInference
from vflsec.attacks.model_completion import ModelCompletion
from vflsec.attacks.spectral_embedding import SpectralEmbedding
from vflsec.base.errors import UsageError
from vflsec.base.layout import PADDING
from vflsec.base.seeds import make_rng
from vflsec.cli.train_ import describe_budget
from vflsec.core.message import Kind, Transcript
from vflsec.core.view import View
from vflsec.language.transformer import Text
from vflsec.language.word_privacy import CusText, SanText, SnD, find_diameter, find_sets
from vflsec.results import metrics
from vflsec.run.adversary import isolate
from vflsec.run.questions import ask
from vflsec.run.score import compute_spending
from vflsec.run.spec import AuxSpec
from vflsec.testing.conformance import DefenseConformance

POINTS = [[9.0, 9.0], [0.0, 0.0], [0.0, 1.0], [3.0, 0.0], [3.0, 4.0]]
"""Embeddings of padding and four words; the largest distance of two words is 5."""


ON_A_LINE = [[9.0], [0.0], [10.0], [1.0], [11.0], [3.0], [12.0], [20.0]]
"""Embeddings of padding and seven words: with ``top_k`` = 3 the first is with those at 1 and 3; the others are left."""

NEARNESS = {
    1: {1: 1, 3: 2 / 3, 5: 0},
    3: {1: 1 / 2, 3: 1, 5: 0},
    5: {1: 0, 3: 1 / 3, 5: 1},
    7: {2: 0, 4: 0.1, 6: 0.2, 7: 1},
}
"""Of four of them the similarity to each word of their set, from 0 to 1."""


def make(kind, epsilon, points=POINTS, length=1, **options):
    defense = kind(1 / epsilon, **options)
    defense.read_words(nn.Embedding.from_pretrained(torch.tensor(points), freeze=False), length)
    return defense


def draw(defense, words, seed=0):
    return defense.on_text(Text(words), rng=make_rng(seed, "text"))


class Conformance(DefenseConformance):
    kind = None

    def make(self, strength, **options):
        defense = self.kind(strength, **options)
        defense.read_words(nn.Embedding(4, 2), 3)
        return defense


class TestConformance_santext(Conformance):
    kind = SanText


class TestConformance_custext(Conformance):
    kind = CusText


class TestConformance_snd(Conformance):
    kind = SnD


def measure_replacement(defense, rows=40_000):
    """Return the shares (V, V - 1) of the words that each word becomes, and how far they are from the paper's formula.

    The second is in standard deviations, at most.
    """
    words = torch.arange(1, 5).repeat(rows, 1)
    drawn = draw(defense, words).words
    shares = torch.stack([(drawn == word).double().mean(dim=0) for word in range(1, 5)], dim=1)
    points = torch.tensor(POINTS[1:]).double()
    expected = torch.softmax(-2.0 * torch.cdist(points, points) / 5 / 2, dim=1)  # epsilon is 2
    return shares, float(((shares - expected).abs() / (expected * (1 - expected) / rows).sqrt()).max())


def test_words_are_replaced_with_the_probabilities_of_the_paper():
    shares, deviation = measure_replacement(make(SanText, 2.0))
    assert deviation < 5
    ratios = (shares[:, None] / shares[None]).log().amax(dim=2)
    distances = torch.cdist(torch.tensor(POINTS[1:]), torch.tensor(POINTS[1:])) / 5
    assert (ratios <= 2.0 * distances + 0.1).all()  # epsilon times distance, within the error of the shares
    assert measure_replacement(make(SanText, 2.2))[1] > 5  # a scale that is wrong by a tenth


def measure_sets(defense, rows=40_000):
    """Return how far the shares of words are from those by ``NEARNESS``, in standard deviations, at most."""
    largest = 0.0
    for word, near in NEARNESS.items():
        drawn = draw(defense, torch.full((rows, 1), word)).words
        shares = torch.bincount(drawn[:, 0], minlength=8).double() / rows
        assert set(drawn[:, 0].tolist()) == near.keys()
        expected = torch.tensor([math.exp(3.0 * near[k] / 2) if k in near else 0.0 for k in range(8)]).double()
        expected /= expected.sum()  # epsilon is 3
        deviation = (shares - expected).abs() / (expected * (1 - expected) / rows).sqrt().clamp_min(1e-9)
        largest = max(largest, float(deviation.max()))
    return largest


def test_words_are_replaced_within_their_sets_with_the_probabilities_of_the_paper():
    assert measure_sets(make(CusText, 3.0, ON_A_LINE, top_k=3)) < 5
    assert measure_sets(make(CusText, 3.3, ON_A_LINE, top_k=3)) > 5  # a scale that is wrong by a tenth


def test_sets_share_no_word_and_epsilon_holds_between_words_of_a_set_alone():
    points = torch.randn(62, 5, generator=make_rng(0, "points")).double()
    sets, words = find_sets(points, 20), torch.arange(1, 62)
    assert sets[PADDING] == 0
    assert sorted(sets[1:].unique(return_counts=True)[1].tolist()) == [20, 20, 21]
    defense = make(CusText, 3.0, points.tolist(), top_k=20)
    shares = torch.stack(list(defense.compute_shares(words, points)))
    same = sets[1:, None] == sets[None, 1:]
    assert torch.equal(shares > 0, same)
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(61).double())
    ratios = (shares[:, None] / shares[None]).log()[same[:, None] & same[None] & same[..., None]]
    assert 1.5 < ratios.max() <= 3.0
    assert torch.equal(shares.argmax(dim=1), words - 1)


def test_a_set_of_a_single_word_is_refused_and_equal_words_are_drawn_evenly():
    with pytest.raises(UsageError, match=r"^expected top_k >= 2 for custext, got 1: a set of a word hides nothing$"):
        CusText(0.25, top_k=1)
    defense = make(CusText, 3.0, [[0.0]] * 4, top_k=3)
    (shares,) = defense.compute_shares(torch.tensor([2]), defense.embeddings)
    torch.testing.assert_close(shares, torch.full((3,), 1 / 3).double())


@pytest.mark.parametrize("kind", [CusText, SanText, SnD])
def test_without_strength_the_text_is_the_same(kind):
    defense, text = kind(0.0), Text(torch.tensor([[1, 2, PADDING]]))
    defense.read_words(nn.Embedding(4, 2), 3)
    assert defense.on_text(text, rng=make_rng(0, "text")) is text


def measure_lengths(defense, rows=20_000):
    """Return how far the mean length of noise is from that of a Gamma distribution, in standard deviations."""
    width, scale = 2, 5 / 10.0  # epsilon is 10
    noise = draw(defense, torch.ones(rows, 1, dtype=torch.long)).noise[:, 0]
    assert noise.mean(dim=0).abs().max() < 5 * scale * math.sqrt(3 / rows)  # each coordinate has the variance 3 scale²
    lengths = torch.linalg.vector_norm(noise, dim=1)
    assert float(lengths.std()) == pytest.approx(float(lengths.mean()) / math.sqrt(width), rel=0.05)
    return abs(float(lengths.mean()) - width * scale) / (scale * math.sqrt(width / rows))


def test_noise_on_embeddings_has_the_density_of_the_paper():
    assert measure_lengths(make(SnD, 10.0)) < 5
    assert measure_lengths(make(SnD, 11.0)) > 5


def test_padding_stays_and_extreme_epsilons_are_the_identity_and_a_uniform_draw():
    words = torch.tensor([[1, 2, 4, PADDING]]).repeat(4000, 1)
    assert torch.equal(draw(make(SanText, 1e4), words).words, words)
    drawn = draw(make(SanText, 1e-6), words).words
    assert not drawn[:, 3].any()
    assert (torch.bincount(drawn[:, 0], minlength=5)[1:] / 4000 - 0.25).abs().max() < 0.05
    assert draw(make(SnD, 1e9), words).noise.abs().max() < 1e-6


@pytest.mark.parametrize("dimension", [1, 3])
def test_the_diameter_is_the_largest_distance_of_two_words(dimension, monkeypatch):
    monkeypatch.setattr("vflsec.language.word_privacy.ROWS", 3)
    points = torch.randn(10, dimension, generator=make_rng(0, "points")).double()
    assert find_diameter(points) == pytest.approx(float(torch.cdist(points[1:], points[1:]).max()))


@pytest.mark.parametrize("kind", [SanText, SnD])
def test_a_text_is_drawn_once_for_all_releases_of_a_training(kind):
    """States of a row differ between epochs as the model does, and not as much as a fresh draw would make them."""
    federation, sent = make_federation(defenses=[kind(1 / 8)]), []
    federation.channel.taps.append(lambda message: message.kind == Kind.EMBEDDING and sent.append(message))
    trained = make_method(epochs=3).fit(federation)
    trained.predict("train")
    states, party = {}, federation.parties["passive_1"]
    for message in sent:
        for row, value in zip(message.rows.tolist(), message.payload["value"].flatten(1), strict=True):
            states.setdefault(row, []).append(value)
    received = torch.stack([torch.stack(values) for _, values in sorted(states.items())], dim=1)  # (releases, n, T d)
    assert len(received) == 4
    with torch.no_grad():
        plain = trained.method.representation(party)(party.features["train"])
    changed = (received[-1] - plain).square().mean()
    assert (received - received[-1]).square().mean() < 0.1 * changed
    assert changed > 0.1


@pytest.mark.parametrize("kind", [SanText, SnD])
def test_the_party_with_the_text_has_the_states_of_both_texts(kind):
    """Those of what was drawn are those that it sent at prediction; alone it has none."""
    federation, transcript = make_federation(defenses=[kind(1 / 8)]), Transcript(frozenset({"active"}), frozenset(Kind))
    federation.channel.taps.append(transcript)
    trained = make_method().fit(federation)
    sent = {}
    for split in ("train", "test"):
        trained.predict(split)
        sent[split] = transcript.messages[-1].payload["value"]
    view = ask(ModelCompletion(), trained, "passive_1", AuxSpec(n=20)).view
    for split, states in sent.items():
        torch.testing.assert_close(view.defended[split], states, rtol=0, atol=1e-6)
        assert (view.model(view.features[split]) - states).square().mean() > 0.1
    candidates = ask(MembershipInference(), trained, "passive_1", AuxSpec(n=20)).view
    assert len(candidates.defended["candidates"]) == len(candidates.features["candidates"])
    assert not isolate(view, 0).defended
    assert not ask(ModelCompletion(), trained, "active", AuxSpec(n=20)).view.defended


def make_view(planted, defended):
    """A view whose columns, or what a defense made of them, tell the label in each of 200 rows of both splits."""
    rng, y = torch.Generator().manual_seed(0), torch.arange(200) % 2
    by_side = {
        side: {split: torch.randn(200, 3, generator=rng) for split in ("train", "test")} for side in ("columns", "text")
    }
    for x in by_side.get(planted, {}).values():
        x[:, 0] = 6.0 * y + 0.1 * x[:, 0]
    view = View("passive_1", "passive", 2, by_side["columns"], nn.Identity(), torch.arange(40), y[:40])
    return dataclasses.replace(view, defended=by_side["text"] if defended else {}), y


@pytest.mark.parametrize("attack", [ModelCompletion(), Cluster(source="embedding"), SpectralEmbedding(), Fusion()])
def test_labels_are_inferred_from_words_and_of_training_texts_from_what_was_drawn(attack):
    """What was drawn for a test text never taught a model anything, and guesses of it are those by its words."""

    def measure(planted, defended):
        view, y = make_view(planted, defended)
        return {s: metrics.auc(x[40:].numpy(), y[40:].numpy()) for s, x in attack(view, seed=0).scores.items()}

    assert min(measure("columns", defended=True).values()) > 0.95
    with_drawn, without = (measure("text", defended=defended) for defended in (True, False))
    assert with_drawn["train"] > 0.95
    assert max(without.values()) < 0.7
    assert with_drawn["test"] == pytest.approx(without["test"], abs=0.03)


def test_sums_of_gradients_are_those_of_the_text_that_the_model_has_read():
    """All texts have the same words, so that a batch has a single sum; what is drawn differs from row to row."""
    view, y = exchanged(2, 4, batch=16)
    same = dataclasses.replace(view, model=nn.Identity(), features={"train": torch.ones(ROWS, 32)})
    drawn = {"train": torch.randn(ROWS, 32, generator=make_rng(0, "text"))}
    assert right(BatchLabel(), dataclasses.replace(same, defended=drawn), y) > 0.98
    assert right(BatchLabel(), same, y) < 0.7


def test_embeddings_under_noise_do_not_learn():
    federations = {kind: make_federation(defenses=[kind(1 / 8)]) for kind in (SanText, SnD)}
    for kind, federation in federations.items():
        method = make_method(epochs=1)
        method.build(federation)
        words = federation.parties["passive_1"].modules["bottom"].words.weight
        before = words.detach().clone()
        method.run("train", federation)
        assert torch.equal(words, before) == kind.fixes


def test_epsilon_is_that_of_the_longest_text_and_of_the_party_that_holds_it():
    federation = make_federation(defenses=[SanText(0.25)])
    federation.active.defenses = [SanText(0.25)]
    trained = make_method(epochs=1).fit(federation)
    account = {"defense": "santext:1/epsilon=0.25", "epsilon": 4.0 * 8, "delta": 0.0}  # eight words
    assert compute_spending(trained, federation.channel.releases(), "active") == [account]
    (twice,) = compute_spending(trained, federation.channel.releases(), "active", trainings=2)
    assert twice["epsilon"] == 2 * account["epsilon"]
    assert compute_spending(trained, federation.channel.releases(), "passive_1") == []
    assert SanText(0.25).privacy_spent(1) is None  # it has read no words


def test_an_epsilon_within_sets_bounds_no_accuracy(tmp_path):
    """Of which set a word is, everybody is told, so that two texts may be told apart for certain."""
    report = vflsec.evaluate(
        attack="text-prior", adversary="active", dataset=make_animals(), methods=["split-lm"],
        defense="custext:epsilon=0.01,top_k=3", train={"epochs": 1}, aux={"n": 20}, seeds=1, jobs=1, out=tmp_path,
    )  # fmt: skip
    (spent,) = report.points[-1].spent
    assert (spent["epsilon"], spent["of"]) == (pytest.approx(0.08), "within sets")
    assert (
        describe_budget(spent)
        == "0.08 at delta 0 by custext: one label or text within sets, over all messages of the training"
    )
    text = report.to_markdown(details=True)
    assert "0.08 (within sets)" in text
    assert "custext hides the words of passive_1 within their sets alone" in text
    assert "names the right one in at most" not in text
    assert "EPSILON (models)" not in text


def test_a_method_that_reads_no_words_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"^defense santext changes nothing that fedsplitnn sends or learns[^\n]*$"):
        vflsec.evaluate(
            attack="text-prior", adversary="active", dataset=make_animals(), methods=["fedsplitnn"],
            defense="santext", out=tmp_path,
        )  # fmt: skip
