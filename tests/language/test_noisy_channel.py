"""The noisy channel: shares of words against a sum over all sentences, and planted texts that only order gives."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vflsec.base.layout import PADDING
from vflsec.base.seeds import make_rng
from vflsec.language import noisy_channel, word_context
from vflsec.language.noisy_channel import Mechanism, fit_channel, weigh_releases
from vflsec.language.text import START
from vflsec.language.text_prior import WordShares, fit_forests
from vflsec.language.transformer import Text
from vflsec.language.word_context import Network, Repeats, SimilarTexts, WordContext
from vflsec.language.word_order import ColumnRatios, ReadTexts, States, WordOrder
from vflsec.language.word_privacy import CusText, SanText, find_sets

SIZE, LENGTH = 3, 4
NO_COPIES = torch.zeros(1000, 0, dtype=torch.long)
NO_COLUMNS = WordShares([], []), torch.zeros(3, 0), NO_COPIES


def decode(states, words, known, mechanism, columns=None, *, has_network=False):
    """Return what the channel decoder reads, from the row ``known`` on, of states (n, T, k); others are known."""
    columns = torch.zeros(len(words), 1) if columns is None else columns
    of_known, shares = fit_forests(columns[:known].numpy(), words[:known].numpy(), {"all": columns.numpy()}, 0)
    every = States(states, words != PADDING, shares["all"], columns, words[:, :0])
    source, rows = every.select(torch.arange(known)), every.select(torch.arange(known, len(words)))
    return fit_channel(source._replace(shares=of_known), words[:known], rows, mechanism, has_network=has_network)


def read(*args, **options):
    """Return the words of it."""
    return decode(*args, **options).words


def make_order(size=SIZE):
    """That of texts of three words; further ones are in none."""
    words = torch.randint(SIZE, (40, LENGTH), generator=make_rng(0, "words"))
    words[::3, LENGTH - 1] = -1  # shorter ones
    return WordOrder.fit(words, size)


@pytest.mark.parametrize("size", [SIZE, SIZE + 2])
def test_shares_by_the_other_words_are_those_of_a_sum_over_all_sentences(size):
    order, rng = make_order(size), make_rng(1, "likely")
    likely = torch.rand(2, LENGTH, size, generator=rng, dtype=torch.double)
    mask = torch.tensor([[True] * LENGTH, [True, True, True, False]])
    found = order.expect(likely, mask)
    first = 0.9 * order.shares[0] + 0.1 / size
    unit = torch.eye(size, dtype=torch.double)
    follow = [None, *(torch.cat([order.follow(unit[k : k + 1], t) for k in range(size)]) for t in range(1, LENGTH))]
    for row in range(2):
        length = int(mask[row].sum())
        expected = torch.zeros(length, size, dtype=torch.double)
        for words in itertools.product(range(size), repeat=length):
            share = first[words[0]]
            for t in range(1, length):
                share = share * follow[t][words[t - 1], words[t]]
            for t in range(length):
                others = torch.prod(torch.stack([likely[row, s, words[s]] for s in range(length) if s != t]))
                expected[t, words[t]] += share * others
        torch.testing.assert_close(found[row, :length], expected / expected.sum(dim=1, keepdim=True))


@pytest.mark.parametrize("size", [SIZE, SIZE + 2])
@pytest.mark.parametrize("t", [1, 2, 3])
def test_following_and_preceding_are_one_table_of_shares(t, size):
    order = make_order(size)
    unit = torch.eye(size, dtype=torch.double)
    follow = torch.cat([order.follow(unit[k : k + 1], t) for k in range(size)])
    precede = torch.cat([order.precede(unit[k : k + 1], t) for k in range(size)])
    torch.testing.assert_close(follow, precede.T)
    assert (follow > 0).all()
    assert (follow.sum(dim=1) <= 1 + 1e-9).all()


def test_held_out_rows_tell_whether_words_follow_each_other():
    steps = torch.arange(30)[None] + torch.arange(60)[:, None]
    in_turn = WordOrder.fit(steps % 7, 7)
    drawn = WordOrder.fit(torch.randint(7, (60, 30), generator=make_rng(0, "drawn")), 7)
    assert in_turn.weights[:2].sum() > 0.99
    assert drawn.weights[2:].sum() > 0.5


def plant(epsilon, noise, rows=600, known=150):
    """Texts of eight words that follow in turn, from any of 12, their replaced words, and states of these."""
    rng = make_rng(0, "planted")
    start = torch.randint(12, (rows, 1), generator=rng)
    words = torch.cat([torch.full((rows, 1), START), 3 + (start + torch.arange(8)) % 12], dim=1)
    words[::4, 7:] = PADDING
    embeddings = torch.randn(15, 6, generator=rng).double()
    drawn = words
    if epsilon:
        defense = SanText(1 / epsilon)
        defense.read_words(nn.Embedding.from_pretrained(embeddings), LENGTH)
        drawn = defense.on_text(Text(words), rng=rng).words
    states = embeddings[drawn] @ torch.randn(6, 10, generator=rng).double()
    states = states + noise * torch.randn(states.shape, generator=rng).double()
    mask = words != PADDING
    states *= mask[..., None]
    fitted = read(states, words, known, Mechanism(embeddings, (defense,)) if epsilon else None)
    rates = [float((guess == words[known:])[mask[known:]].double().mean()) for guess in (fitted, drawn[known:])]
    return *rates, fitted, mask[known:]


def test_order_gives_the_words_that_were_replaced():
    """At this epsilon half of the words are others, and each sentence is fixed by any of its words."""
    recovered, stayed, fitted, mask = plant(epsilon=10.0, noise=0.01)
    assert stayed < 0.6
    assert recovered > 0.95
    assert torch.equal(fitted == PADDING, ~mask)


def test_order_gives_words_that_noise_hides_where_no_defense_of_words_is_known():
    recovered, *_ = plant(epsilon=0.0, noise=6.0)
    assert recovered > 0.95


@pytest.mark.parametrize("several", [False, True])
def test_of_words_without_order_the_set_is_recovered_and_the_word_as_often_as_the_channel_allows(several):
    """Words are drawn evenly, so that nothing is better than the likeliest word of each that may have been read."""
    rng = make_rng(0, "drawn")
    words, embeddings = torch.randint(1, 16, (1500, 8), generator=rng), torch.randn(16, 6, generator=rng).double()
    text, channel, defenses = Text(words), torch.eye(15).double(), []
    for kind, epsilon in [("custext", 2.0), ("santext", 12.0)][: 1 + several]:
        defenses.append(CusText(1 / epsilon, top_k=5) if kind == "custext" else SanText(1 / epsilon))
        defenses[-1].read_words(nn.Embedding.from_pretrained(embeddings), 8)
        text = defenses[-1].on_text(text, rng=rng)
        channel = channel @ torch.stack(list(defenses[-1].compute_shares(torch.arange(1, 16), embeddings)))
    states = embeddings[text.words] @ torch.randn(6, 10, generator=rng).double()
    states += 0.01 * torch.randn(states.shape, generator=rng).double()
    fitted = read(states, words, 300, Mechanism(embeddings, (*defenses,)))
    words = words[300:]
    best = float(channel.amax(dim=0).mean())
    assert 0.2 < best < 0.8
    assert float((fitted == words).double().mean()) == pytest.approx(best, abs=0.025)
    sets = find_sets(embeddings, 5)
    assert several or torch.equal(sets[fitted], sets[words])


@pytest.mark.parametrize("informative", [True, False])
def test_own_columns_are_weighed_beside_states_as_far_as_known_rows_say(informative):
    """Two words of each text are drawn evenly, one of them from a pair that the columns tell, or do not."""
    rng = make_rng(0, "beside")
    pair = torch.randint(6, (1200, 1), generator=rng)
    words = torch.cat([1 + 2 * pair, torch.full_like(pair, 13)], dim=1) + torch.randint(2, (1200, 2), generator=rng)
    columns = F.one_hot((pair if informative else pair.roll(1, dims=0)).squeeze(1), 6).float()
    states = torch.randn(15, 8, generator=rng)[words] + 2 * torch.randn(1200, 2, 8, generator=rng)
    rates = [(read(states, words, 300, None, beside) == words[300:]).double().mean(dim=0) for beside in (columns, None)]
    assert rates[0][1] == pytest.approx(float(rates[1][1]), abs=0.02)  # columns say nothing of the second word
    if informative:
        assert rates[0][0] > rates[1][0] + 0.15
        assert rates[0][0] > 0.5 + 0.15  # columns alone give the pair
    else:
        assert rates[0][0] == pytest.approx(float(rates[1][0]), abs=0.02)


def test_the_ratio_by_own_columns_is_that_of_shares_and_excludes_no_word():
    """Two groups of texts without a word in common, of 30 and 10 known rows, which the column tells."""
    words = torch.tensor([[0, 1]] * 30 + [[2, -1]] * 10)
    columns = np.array([[0.0]] * 30 + [[1.0]] * 10)
    of_known, shares = fit_forests(columns, words.numpy() + 1, {"new": np.array([[0.0], [1.0]])}, 0)
    numbers = [torch.tensor([0, 2]), torch.tensor([1])]
    by_columns = ColumnRatios(of_known, words, WordOrder.fit(words, 4), numbers)
    trust = float(by_columns.trust[0])
    right = (30 / (1 - trust + trust * 4 / 3) * 4 / 3 + 10 / (1 - trust + trust * 4) * 4) * trust
    assert trust == pytest.approx(right / 41)
    expected = 1 - trust + trust * torch.tensor([[4 / 3, 1, 0, 1], [0, 1, 4, 1]]).double()
    ratios = by_columns(shares["new"])
    torch.testing.assert_close(ratios[:, 0], expected**by_columns.power, atol=1e-6, rtol=0)
    torch.testing.assert_close(ratios[:, 1], torch.ones(2, 4).double())
    few = WordOrder.fit(words[:4], 4)
    assert ColumnRatios(of_known.select(torch.arange(4)), words[:4], few, numbers)(shares["new"]) == 1


@pytest.mark.parametrize("deviations", [1.5, 1000.0])
def test_a_prior_keeps_noisy_states_from_spoiling_what_columns_tell(deviations, monkeypatch):
    """64 numbers of a state and 60 known rows: without the prior, noise looks like words."""
    rng = make_rng(0, "noise")
    words = torch.randint(1, 21, (1000, 4), generator=rng)
    columns = words + 2.0 * torch.randn(words.shape, generator=rng)
    states = torch.randn(21, 64, generator=rng)[words] + deviations * torch.randn(1000, 4, 64, generator=rng)

    def measure(states):
        return float((read(states, words, 60, None, columns) == words[60:]).double().mean())

    alone, both = measure(torch.ones(1000, 4, 1)), measure(states)
    assert alone > 0.15  # of 20 words
    assert both > alone + 0.5 if deviations < 2 else both > 0.85 * alone
    monkeypatch.setattr(noisy_channel, "EVIDENCE", 0)
    assert deviations < 2 or measure(states) < 0.5 * alone


def test_a_word_that_is_unknown_follows_no_word_and_none_follows_it():
    """1 2 1 2 and holes: only whole pairs count, and the last word of the vocabulary has none of them."""
    words = torch.tensor([[1, 2, 1, 2]] * 6 + [[1, -1, -1, 2], [-1, 2, -1, 2]])
    order = WordOrder.fit(words, 4)
    assert order.seen.tolist() == [1, 2]
    assert order.pairs.tolist() == [[0, 1], [1, 0]]
    assert order.shares[1].tolist() == [0, 0, 1, 0]


def test_a_text_that_was_read_has_the_shares_of_its_words():
    nothing = States(torch.zeros(1, 2, 3), torch.ones(1, 2, dtype=torch.bool), *NO_COLUMNS)
    text = ReadTexts(nothing, torch.tensor([[2, 0]]), torch.tensor([[0.8, 0.4]]))
    assert text.compute_shares(4).flatten().tolist() == pytest.approx([0.05, 0.05, 0.85, 0.05, 0.55, 0.15, 0.15, 0.15])
    assert text.keep_sure().tolist() == [[2, -1]]


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_texts_that_were_read_teach_the_decoder_as_far_as_their_words_are_right(right, monkeypatch):
    """20 known texts of a grammar and 300 others under noise, whose words are known or may be any."""
    monkeypatch.setattr(word_context, "STEPS", 60)
    rng = make_rng(0, "texts")
    follow = torch.rand(12, 12, generator=rng).log().neg() ** 4
    words = torch.randint(12, (520, 8), generator=rng)
    for t in range(1, 8):
        words[:, t] = torch.multinomial(follow[words[:, t - 1]], 1, generator=rng)[:, 0]
    words += START + 1
    states = torch.randn(int(words.max()) + 1, 6, generator=rng)[words] + 2 * torch.randn(520, 8, 6, generator=rng)
    mask, columns = torch.ones(520, 8, dtype=torch.bool), torch.zeros(520, 1)
    of_known, shares = fit_forests(columns[:20].numpy(), words[:20].numpy(), {"all": columns.numpy()}, 0)
    every = States(states, mask, shares["all"], columns, NO_COPIES)
    known, rows = every.select(torch.arange(20))._replace(shares=of_known), every.select(torch.arange(320, 520))
    text = ReadTexts(every.select(torch.arange(20, 320)), words[20:320], torch.full((300, 8), right))
    without, beside = (
        (fit_channel(known, words[:20], rows, None, read=r, has_network=True).words == words[320:]).double().mean()
        for r in (None, text)
    )
    assert beside > without + 0.04 if right else abs(beside - without) < 0.04


def test_words_of_similar_texts_are_those_of_a_sum_over_all_of_them():
    order, rng = make_order(), make_rng(0, "similar")
    texts = torch.tensor([[0, 1, 2, 2], [0, 2, 1, -1], [2, 2, 0, 1]])
    similar = SimilarTexts.fit(texts, order)
    likely = torch.rand(5, LENGTH, SIZE, generator=rng).double()
    mask = torch.arange(LENGTH) < torch.tensor([[4], [4], [3], [2], [1]])
    shares, fits = similar.expect(likely, mask)
    assert len(similar.words) == 15
    for row, t in itertools.product(range(5), range(LENGTH)):
        expected, total = torch.zeros(SIZE, dtype=torch.double), 0.0
        for text, shift in itertools.product(texts.tolist(), word_context.SHIFTS):
            words = [text[s - shift] if 0 <= s - shift < LENGTH else -1 for s in range(LENGTH)]
            weight = 1.0
            for s in (s for s in range(LENGTH) if s != t and words[s] >= 0):
                ratio = likely[row, s, words[s]] / (likely[row, s] @ similar.usual[s].double()) * mask[row, s]
                weight *= float(0.85 * ratio + 0.15)
            total += weight
            expected[words[t]] += weight * (words[t] >= 0)
        torch.testing.assert_close(shares[row, t], expected / expected.sum(), atol=1e-5, rtol=0)
        assert float(fits[row, t]) == pytest.approx(np.log(total / 15), abs=1e-4)


def test_copies_of_known_texts_with_changes_are_read_by_their_likeness(monkeypatch):
    """30 sentences of 60 random words; a text is one of them, moved by up to one position, with a tenth replaced."""
    monkeypatch.setattr(word_context, "STEPS", 60)
    rng = make_rng(0, "copies")
    sentences = torch.randint(60, (30, 12), generator=rng)
    words = torch.cat([torch.randint(60, (400, 1), generator=rng), sentences[torch.arange(400) % 30]], dim=1)
    words = torch.where(torch.rand(400, 1, generator=rng) < 0.5, words[:, :12], words[:, 1:])
    words = torch.where(torch.rand(400, 12, generator=rng) < 0.1, torch.randint(60, (400, 12), generator=rng), words)
    words += START + 1
    states = torch.randn(int(words.max()) + 1, 8, generator=rng)[words] + 2.5 * torch.randn(400, 12, 8, generator=rng)
    by_likeness = (read(states, words, 150, None, has_network=True) == words[150:]).double().mean()
    monkeypatch.setattr(word_context, "BARS", word_context.BARS[:1])
    without = (read(states, words, 150, None, has_network=True) == words[150:]).double().mean()
    assert by_likeness > without + 0.05


def test_the_mean_of_releases_is_weighted_and_leaves_out_those_that_are_missing():
    values = torch.randn(3, 2, 4, 5, generator=make_rng(0, "releases"))
    values[1, :, 1:] = 0
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4])
    states = States(values, torch.ones(3, 2, dtype=torch.bool), *NO_COLUMNS)
    mean = states.average(weights).values
    torch.testing.assert_close(mean[::2], (values[::2] * weights[:, None]).sum(dim=2))
    torch.testing.assert_close(mean[1], values[1, :, 0])


def test_releases_weigh_as_much_as_their_signal_over_the_variance_of_their_noise():
    rng, noise, size = make_rng(0, "epochs"), torch.tensor([1.0, 2.0, 8.0]), torch.tensor([1.0, 1.0, 4.0])
    words, means = torch.randint(1, 11, (2000, 3), generator=rng), torch.randn(11, 3, 16, generator=rng)
    values = means[words] * size[:, None] + noise[:, None] * torch.randn(2000, 3, 3, 16, generator=rng)
    weights = weigh_releases(States(values, words > 0, *NO_COLUMNS), words)
    deviation = means[1:].sub(means[1:].mean(dim=0)).square().mean(dim=(0, 2)).sqrt()
    expected = deviation * size / noise.square()
    torch.testing.assert_close(weights, expected / expected.sum(), rtol=0.05, atol=0)
    nothing = weigh_releases(States(torch.zeros(2, 3, 4, 5), words[:2] > 0, *NO_COLUMNS), words[:2])
    assert (nothing == 0.25).all()


@pytest.mark.parametrize("epsilon", [None, 40.0])
def test_words_that_no_known_text_has_are_read_by_their_public_embeddings(epsilon):
    """Under noise on embeddings (None), and under replacement, which keeps most words at this epsilon."""
    rng = make_rng(0, "unseen")
    words, embeddings = torch.randint(1, 31, (500, 6), generator=rng), torch.randn(31, 8, generator=rng).double()
    words[:100] = words[:100].clamp_max(24)  # of known texts
    drawn, replacing = words, ()
    if epsilon:
        replacing = (SanText(1 / epsilon),)
        replacing[0].read_words(nn.Embedding.from_pretrained(embeddings), 6)
        drawn = replacing[0].on_text(Text(words), rng=rng).words
    states = embeddings[drawn] @ torch.randn(8, 12, generator=rng).double()
    states += 0.3 * torch.randn(states.shape, generator=rng).double()
    for mechanism, least, most in ((Mechanism(embeddings, replacing), 0.8, 1.0), (None, 0.0, 0.0)):
        fitted = read(states, words, 100, mechanism)
        unseen = words[100:] > 24
        assert least <= (fitted == words[100:])[unseen].double().mean() <= most


@pytest.mark.parametrize(("most", "share"), [(31, 1.0), (30, 0.0)])
def test_words_that_no_known_text_has_are_read_up_to_a_size_of_the_vocabulary(most, share, monkeypatch):
    """31 embeddings, of padding and 30 words, without noise."""
    monkeypatch.setattr(noisy_channel, "VOCABULARY", most)
    rng = make_rng(0, "unseen")
    words, embeddings = torch.randint(1, 31, (300, 6), generator=rng), torch.randn(31, 8, generator=rng).double()
    words[:100] = words[:100].clamp_max(24)  # of known texts
    states = embeddings[words] @ torch.randn(8, 12, generator=rng).double()
    right = read(states, words, 100, Mechanism(embeddings)) == words[100:]
    assert right[words[100:] > 24].double().mean() == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("defense", ["none", "custext"])
def test_a_network_reads_words_that_agree_with_words_far_away(defense, monkeypatch):
    """The last of eight words is told by the first; those between are drawn evenly, and order says nothing."""
    monkeypatch.setattr(word_context, "STEPS", 300)  # fewer do not learn it
    rng = make_rng(0, "far")
    words = torch.randint(1, 13, (1000, 8), generator=rng)
    words[:, 7] = 13 + (words[:, 0] - 1) % 6
    embeddings, replacing = torch.randn(19, 8, generator=rng).double(), ()
    drawn = words
    if defense == "custext":
        replacing = (CusText(1 / 1.0, top_k=6),)
        replacing[0].read_words(nn.Embedding.from_pretrained(embeddings), 8)
        drawn = replacing[0].on_text(Text(words), rng=rng).words
    states = embeddings[drawn] @ torch.randn(8, 12, generator=rng).double()
    states += (0.1 if replacing else 3.0) * torch.randn(states.shape, generator=rng).double()
    mechanism = Mechanism(embeddings, replacing) if replacing else None
    rates = []
    for has_network in (False, True):
        fitted = read(states, words, 200, mechanism, has_network=has_network)
        rates.append((fitted == words[200:]).double().mean(dim=0))
    assert (rates[1] - rates[0])[[0, 7]].min() > 0.05
    assert (rates[1] - rates[0])[1:7].mean() == pytest.approx(0, abs=0.03)


def test_shares_of_a_network_do_not_depend_on_likelihoods_of_the_word_itself():
    rng, usual = make_rng(0, "network"), torch.full((LENGTH, SIZE), 1 / SIZE).double()
    network = Network(usual, 2).eval()
    likely = torch.rand(5, LENGTH, SIZE, generator=rng).double()
    mask = torch.arange(LENGTH) < torch.tensor([4, 4, 3, 2, 1])[:, None]
    columns = torch.randn(5, 2, generator=rng)
    scores = network(likely, mask, columns)
    for t in range(LENGTH):
        other = likely.clone()
        other[:, t] = torch.rand(5, SIZE, generator=rng).double()
        changed = network(other, mask, columns)
        same = (changed - scores).abs().amax(dim=2) < 1e-5
        assert same[:, t].all()
        assert not same[0].all()
    padded = torch.where(mask[..., None], likely, 9.0)
    torch.testing.assert_close(network(padded, mask, columns), scores)


def test_a_power_of_zero_is_the_order_and_of_one_the_network():
    order, rng = make_order(), make_rng(0, "power")
    likely, mask = torch.rand(6, LENGTH, SIZE, generator=rng).double(), torch.ones(6, LENGTH, dtype=torch.bool)
    states = States(likely, mask, WordShares([], []), torch.zeros(6, 1), NO_COPIES)
    network = Network(order.shares, 1).eval()
    context = WordContext(order, lambda _: torch.ones(()).double(), network)
    torch.testing.assert_close(context.expect(likely, states), order.expect(likely, mask))
    scores = network(likely, mask, states.columns).softmax(dim=2).double()
    torch.testing.assert_close(context._replace(powers=(1.0, 0.0)).expect(likely, states), scores)
    half = context._replace(powers=(0.5, 0.0)).expect(likely, states)
    torch.testing.assert_close(half, (scores * order.expect(likely, mask)).sqrt())


def test_words_that_are_likely_together_make_a_text_that_occurs():
    """The texts 0 0, 1 1 and 1 2 have the shares 4, 3 and 3: the likeliest words would be 1 0."""
    words = torch.tensor([[0, 0]] * 4 + [[1, 1]] * 3 + [[1, 2]] * 3).repeat(50, 1)
    order, likely = WordOrder.fit(words, 3), torch.ones(2, 2, 3).double()
    states = States(
        likely, torch.tensor([[True, True], [True, False]]), WordShares([], []), torch.zeros(2, 1), NO_COPIES
    )
    context = WordContext(order, lambda _: torch.ones(()).double())
    shares = context.expect(likely, states)
    assert shares[0].argmax(dim=1).tolist() == [1, 0]
    texts = context.decode(likely, shares, states)
    assert texts[0].tolist() in ([1, 1], [1, 2])
    assert texts[1, 0] == 1


def test_one_word_of_equally_likely_ones_is_chosen_at_a_time():
    order, likely = WordOrder.fit(torch.tensor([[0, 1], [1, 0]] * 50), 2), torch.ones(3, 2, 2).double()
    states = States(likely, torch.ones(3, 2, dtype=torch.bool), WordShares([], []), torch.zeros(3, 1), NO_COPIES)
    context = WordContext(order, lambda _: torch.ones(()).double())
    texts = context.decode(likely, context.expect(likely, states) * likely, states)
    assert (texts.sum(dim=1) == 1).all()


@pytest.mark.parametrize("length", [3, 70])
def test_words_that_are_sure_are_decoded_as_they_are(length):
    """Texts longer than the number of choices, too; a text may end at any place."""
    words = torch.randint(SIZE, (50, length), generator=make_rng(0, "words"))
    mask = torch.arange(length) < torch.randint(1, length + 1, (50, 1), generator=make_rng(1, "lengths"))
    likely = F.one_hot(words, SIZE).double().clamp_min(1e-9)
    context = WordContext(WordOrder.fit(torch.where(mask, words, -1), SIZE), lambda _: torch.ones(()).double())
    states = States(likely, mask, WordShares([], []), torch.zeros(50, 1), NO_COPIES)
    texts = context.decode(likely, context.expect(likely, states) * likely, states)
    assert torch.equal(texts[mask], words[mask])


def test_ratios_of_repeats_are_those_of_a_mixture_of_the_text_and_all_texts():
    rates, usual = torch.tensor([0.5, 0.0]).double(), torch.tensor([0.2, 0.8]).double()
    shares = torch.tensor([[[1.0, 0.0], [0.5, 0.5], [9.0, 9.0]]]).double()
    ratios = Repeats(rates, usual).expect(shares, torch.tensor([[True, True, False]]))
    expected = torch.tensor([[0.5 + 0.5 * 0.5 / 0.2, 1.0], [0.5 + 0.5 * 1.0 / 0.2, 1.0]]).double()
    torch.testing.assert_close(ratios[0, :2], expected)
    ratios = Repeats(rates, usual).expect(shares, torch.tensor([[True, False, False]]))
    assert (ratios == 1).all()  # no other word


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_the_rate_at_which_words_return_is_that_with_which_they_were_drawn(rate):
    rng = np.random.default_rng(0)
    words = rng.integers(200, size=(3000, 10))
    for t in range(1, 10):
        again = rng.random(3000) < rate
        words[again, t] = words[again, rng.integers(t, size=again.sum())]
    repeats = Repeats.fit(torch.from_numpy(words), 200)
    share = np.mean([(np.bincount(w)[w] > 1).mean() for w in words])  # that is elsewhere in its text
    assert float(repeats.rates.mean()) == pytest.approx(share if rate else 0.0, abs=0.05)


def test_words_that_return_are_read_better_where_noise_hides_them(monkeypatch):
    """Each text has two words of 60, in any order: neither order nor few known texts tell which."""
    monkeypatch.setattr(word_context, "STEPS", 300)
    rng = make_rng(0, "return")
    own = torch.randint(1, 61, (900, 2), generator=rng)
    words = own.gather(1, torch.randint(2, (900, 8), generator=rng))
    vectors = torch.randn(61, 20, generator=rng).double()
    states = vectors[words] + 1.5 * torch.randn(900, 8, 20, generator=rng).double()
    rates = [
        float((read(states, words, 100, None, has_network=many) == words[100:]).double().mean()) for many in (0, 1)
    ]
    assert rates[1] > rates[0] + 0.1


def test_clean_states_tell_words_in_an_order_that_no_known_text_has():
    """All known texts are 1 2 3 ... 9 with one word left out: the order seems certain, and is not."""
    rng = make_rng(0, "unusual")
    left_out = torch.randint(9, (150,), generator=rng)
    words = torch.arange(1, 10).expand(150, -1)[torch.arange(9) != left_out[:, None]].view(150, 8)
    words = torch.cat([words, torch.stack([torch.randperm(9, generator=rng)[:8] + 1 for _ in range(50)])])
    vectors = torch.randn(10, 20, generator=rng).double()
    states = vectors[words] + 0.3 * torch.randn(200, 8, 20, generator=rng).double()
    assert (read(states, words, 100, None)[50:] == words[150:]).double().mean() > 0.9


@pytest.mark.parametrize("are_joint", [False, True])
def test_the_probability_that_a_word_is_right_is_that_of_the_word_which_is_chosen(are_joint, monkeypatch):
    """Words of whole texts are here the second of each position; five words are equally likely before states."""
    monkeypatch.setattr(WordContext, "add_network", lambda self, *_: self._replace(are_joint=are_joint))
    monkeypatch.setattr(WordContext, "decode", lambda _, likely, shares, states: shares.topk(2, dim=2).indices[..., 1])
    rng = make_rng(0, "right")
    words = torch.randint(1, 6, (300, 4), generator=rng)
    states = torch.randn(6, 8, generator=rng).double()[words] + 2 * torch.randn(300, 4, 8, generator=rng)
    decoded = decode(states, words, 100, None, has_network=True)
    assert ((decoded.words == words[100:]).double().mean() > 0.5) != are_joint
    assert (decoded.right.mean() > 0.5) != are_joint


def test_texts_of_one_word_have_no_shifted_copies():
    words = torch.tensor([[0], [2], [-1]])
    similar = SimilarTexts.fit(words, WordOrder.fit(words, SIZE))
    assert similar.words.equal(words)
    shares, _ = similar.expect(torch.rand(2, 1, SIZE), torch.ones(2, 1, dtype=torch.bool))
    assert shares[:, 0, 1].max() < 0.1


def test_unit_vectors_read_more_of_many_words_than_random_ones(monkeypatch):
    """90 words without order under noise, of which each is ten times in known texts."""
    rng = make_rng(0, "many")
    words = torch.randint(1, 91, (400, 6), generator=rng)
    states = torch.randn(91, 20, generator=rng).double()[words] + torch.randn(400, 6, 20, generator=rng)
    rates = []
    for width in (40, 90):
        monkeypatch.setattr(noisy_channel, "WIDTH", width)
        rates.append(float((read(states, words, 150, None) == words[150:]).double().mean()))
    assert rates[1] > rates[0] + 0.05
