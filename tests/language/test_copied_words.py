"""What texts copy from columns of the party that reads: planted lines and cities, and columns that no text copies."""

import dataclasses
import math

import pytest
import torch
from torch.nn import functional as F

from vflsec.base.layout import PADDING, UNKNOWN, Layout
from vflsec.base.seeds import make_rng
from vflsec.core.view import View
from vflsec.language.copied_words import COPIED, find_copies, replace_copies, restore_copies
from vflsec.language.noisy_channel import _Gaussians, fit_channel
from vflsec.language.text_prior import fit_forests, guess_alone
from vflsec.language.word_order import States

ROWS, KNOWN, FIRST = 400, 100, 4
"""Texts, known ones, and the word of the number 0."""


def make_texts(share=1.0, rows=ROWS, seed=0):
    """Columns (n, 3), encoded, and texts of five words; a share of them has the first column, in another unit."""
    rng = make_rng(seed, "copies")
    numbers = torch.randint(200, (rows, 2), generator=rng)
    words = torch.randint(2, FIRST, (rows, 5), generator=rng)
    words[:, 3] = FIRST + 200 + numbers[:, 1] // 2  # which no column has
    place = torch.randint(3, (rows, 1), generator=rng)
    copies = torch.rand(rows, 1, generator=rng) < share
    words.scatter_(1, place, torch.where(copies, FIRST + numbers[:, :1], words.gather(1, place)))
    x = torch.cat([(numbers[:, :1] - 150) / 86.6, torch.randn(rows, 2, generator=rng)], dim=1)
    return x, words, FIRST + numbers[:, 0]


def make_view(x, words, ending=""):
    half = ROWS // 2
    features = {"train": x[:half], "test": x[half:]}
    layout = Layout((), vocabulary=("[padding]", "[unknown]", "the", "of", *(f"{n}{ending}" for n in range(300))))
    return View("active", "active", 5, features, None, torch.arange(KNOWN), words[:KNOWN], layout=layout)


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_a_column_that_texts_copy_is_told_in_each_row_of_each_split(share):
    x, words, copied = make_texts(share)
    copies = find_copies(make_view(x, words))
    assert torch.equal(torch.cat([copies["train"], copies["test"]]), copied[:, None])


def test_copies_on_a_logarithmic_scale_and_with_letters_are_told():
    x, words, copied = make_texts(0.6)
    x[:, 0] = ((copied - FIRST).double().log1p() - 4.3) / 0.9
    for ending in ("", "k"):
        assert find_copies(make_view(x, words, ending))["test"].equal(copied[ROWS // 2 :, None])


def test_sums_and_differences_of_columns_that_texts_copy_are_told():
    """Three kinds of texts: with an amount and what is paid, with the rest, and with the sum."""
    rng = make_rng(0, "sums")
    paid, rest = torch.randint(1, 150, (2, ROWS), generator=rng)
    words = torch.full((ROWS, 5), 2)
    kind = torch.randint(3, (ROWS,), generator=rng)
    words[:, 1] = FIRST + torch.where(kind == 0, paid, torch.where(kind == 1, (paid - rest).abs(), paid + rest))
    words[:, 3] = torch.where(kind == 0, FIRST + rest, words[:, 3])
    x = torch.stack([paid, rest, torch.randint(300, (ROWS,), generator=rng)], dim=1) / 40.0
    copies = find_copies(make_view(x, words))["test"] - FIRST
    expected = torch.stack([paid, rest, (paid - rest).abs(), paid + rest], dim=1)[ROWS // 2 :]
    assert copies.equal(expected)


def test_rounded_numbers_of_a_column_that_texts_copy_are_told():
    """Half of the texts have the number of the column, the others that number rounded to tens."""
    x, words, copied = make_texts()
    tens = FIRST + 10 * ((copied - FIRST) / 10).round().long()
    is_rounded = torch.arange(ROWS) % 2 == 0
    words = torch.where((words == copied[:, None]) & is_rounded[:, None], tens[:, None], words)
    assert find_copies(make_view(x, words))["test"].equal(torch.stack([copied, tens], dim=1)[ROWS // 2 :])


@pytest.mark.parametrize("seed", range(20))
def test_columns_that_no_text_copies_are_none(seed):
    x, words, _ = make_texts(share=0.0, seed=seed)
    assert find_copies(make_view(x, words))["test"].shape == (ROWS // 2, 0)


def test_a_number_that_no_text_of_the_vocabulary_has_is_the_unknown_word():
    x, words, _ = make_texts()
    x[-1, 0] = (1000 - 150) / 86.6
    assert find_copies(make_view(x, words))["test"][-1].tolist() == [UNKNOWN]


@pytest.mark.parametrize("vocabulary", [(), ("[padding]", "[unknown]", "²", "9" * 400, "the")])
def test_a_vocabulary_without_numbers_has_no_copies(vocabulary):
    x, words, _ = make_texts()
    view = make_view(x, words.clamp_max(4))
    layout = Layout((), vocabulary=vocabulary) if vocabulary else None
    assert find_copies(dataclasses.replace(view, layout=layout))["train"].shape == (ROWS // 2, 0)


def test_copies_that_are_hidden_are_restored():
    words, copies = torch.tensor([[5, 7, 0], [7, 1, 5]]), torch.tensor([[5, 9], [UNKNOWN, 7]])
    hidden = replace_copies(words, copies)
    assert hidden.tolist() == [[COPIED, 7, 0], [COPIED + 1, UNKNOWN, 5]]
    assert torch.equal(restore_copies(hidden, copies), words)
    assert restore_copies(torch.tensor([[COPIED], [COPIED]]), copies).tolist() == [[5], [UNKNOWN]]


def test_a_copy_is_as_likely_as_its_word_or_as_the_usual_copy():
    """Two words and one column, whose copies were word 1 in three of four known texts."""
    usual, unit = torch.tensor([[0.25, 0.75]]).double(), torch.eye(2).double()
    score = _Gaussians(0 * unit[:1], unit, unit, None, usual)
    shares = torch.tensor([[[0.5, 0.2, 0.3]]] * 2).double()
    merged = score.merge(shares, torch.tensor([[0], [-1]]))
    assert merged.flatten().tolist() == pytest.approx([0.8, 0.2, 0.8, 0.5, 0.2, 0.3])
    states = States(
        torch.tensor([[[1.0, 0.0]]] * 2).double(), torch.ones(2, 1) > 0, None, None, torch.tensor([[0], [-1]])
    )
    other = math.exp(-1)
    assert score.read(states).flatten().tolist() == pytest.approx([1, other, 1, 1, other, 0.25 + 0.75 * other])


def test_numbers_that_no_known_text_has_are_read_where_they_copy_a_column():
    x, words, copied = make_texts()
    rng = make_rng(0, "states")
    states = torch.randn(FIRST + 300, 24, generator=rng)[words] + 0.5 * torch.randn(ROWS, 5, 24, generator=rng)
    is_new = ~torch.isin(copied[KNOWN:], words[:KNOWN])
    assert is_new.double().mean() > 0.4
    rates = []
    for copies in (copied[:, None], copied[:, None][:, :0]):
        columns, y = x.numpy(), replace_copies(words[:KNOWN], copies[:KNOWN]).numpy()
        of_known, shares = fit_forests(columns[:KNOWN], y, {"all": columns}, 0)
        every = States(states, words > 0, shares["all"], x, copies)
        known, rows = every.select(torch.arange(KNOWN)), every.select(torch.arange(KNOWN, ROWS))
        read = fit_channel(known._replace(shares=of_known), words[:KNOWN], rows, None).words
        is_copy = words[KNOWN:] == copied[KNOWN:, None]
        rates.append(float((read == words[KNOWN:])[is_copy & is_new[:, None]].double().mean()))
        assert not (read >= COPIED).any()
    assert rates[0] > 0.7
    assert rates[1] == 0


def test_alone_guesses_numbers_that_texts_copy():
    """All texts have the copy at one place here."""
    x, words, copied = make_texts(share=0.0)
    words[:, 1] = copied
    guess, held_out = guess_alone(make_view(x, words), make_rng(0, "alone"))
    assert torch.equal(guess["test"][:, 1].long(), copied[ROWS // 2 :])
    assert torch.equal(held_out["test"][:, 1], copied[:KNOWN])


def test_of_two_spellings_of_a_number_that_of_known_texts_is_copied():
    """Words 4, 5, ... are 0, 1, ... here; the last 300 are the same numbers after zeros."""
    x, words, copied = make_texts()
    view = make_view(x, words)
    longer = Layout((), vocabulary=(*view.layout.vocabulary, *(f"00{n}" for n in range(300))))
    assert find_copies(dataclasses.replace(view, layout=longer))["test"].equal(copied[ROWS // 2 :, None])


def test_a_number_counts_for_one_column_of_several_equal_ones():
    x, words, copied = make_texts(0.5)
    copies = find_copies(make_view(x[:, :1].expand(-1, 5), words))["test"]
    assert copies.equal(copied[ROWS // 2 :, None])


def make_cities():
    """Two numbers around one-hot columns of 12 cities and 3 tones; known texts name the city, and 60 % of others do."""
    rng = make_rng(0, "cities")
    city, tone = torch.randint(12, (ROWS,), generator=rng), torch.randint(3, (ROWS,), generator=rng)
    words = torch.randint(2, FIRST, (ROWS, 5), generator=rng)
    place = torch.randint(5, (ROWS, 1), generator=rng)
    names = (torch.rand(ROWS, 1, generator=rng) < 0.6) | (torch.arange(ROWS) < KNOWN)[:, None]
    words.scatter_(1, place, torch.where(names, FIRST + city[:, None], words.gather(1, place)))
    x = torch.randn(ROWS, 2, generator=rng)
    one_hot = F.one_hot(city, 12).float(), F.one_hot(tone, 3).float()
    return torch.cat([x[:, :1], *one_hot, x[:, 1:]], dim=1), words, FIRST + city


def test_categories_whose_words_texts_have_anywhere_are_told_and_others_are_not():
    x, words, cities = make_cities()
    view = make_view(x, words)
    view = dataclasses.replace(view, layout=Layout((), vocabulary=tuple(f"word-{k}" for k in range(300))))
    assert find_copies(view)["test"].equal(cities[ROWS // 2 :, None])


def test_a_category_that_no_known_text_has_names_no_word():
    x, words, cities = make_cities()
    is_known = torch.arange(ROWS) < KNOWN
    words = torch.where((cities == FIRST)[:, None] & is_known[:, None], 2, words)
    view = make_view(x, words)
    view = dataclasses.replace(view, layout=Layout((), vocabulary=tuple(f"word-{k}" for k in range(300))))
    cities = torch.where(cities == FIRST, PADDING, cities)
    assert find_copies(view)["test"].equal(cities[ROWS // 2 :, None])
    rng = make_rng(0, "states")
    states = torch.randn(20, 12, generator=rng)[words] + torch.randn(ROWS, 5, 12, generator=rng)
    copies = cities[:, None]
    y = replace_copies(words[:KNOWN], copies[:KNOWN]).numpy()
    of_known, shares = fit_forests(x[:KNOWN].numpy(), y, {"all": x.numpy()}, 0)
    every = States(states, words > 0, shares["all"], x, copies)
    known, rows = every.select(torch.arange(KNOWN)), every.select(torch.arange(KNOWN, ROWS))
    decoded = fit_channel(known._replace(shares=of_known), words[:KNOWN], rows, None, has_network=True)
    assert (decoded.words > UNKNOWN).all()
    assert (decoded.texts > UNKNOWN).all()
