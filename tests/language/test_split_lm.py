"""Text as a party's rows, its hidden states as messages, and a small transformer that is split between two parties."""

import numpy as np
import pandas as pd
import pytest
import torch

import vflsec
from vflsec.base.errors import InsufficientView, UsageError
from vflsec.base.layout import PADDING, UNKNOWN
from vflsec.base.sparse_rows import SparseRows, find_words, to_tensor
from vflsec.core import registry
from vflsec.core.message import Kind, Message, Transcript
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.data import encode, frames
from vflsec.data.bundle import make_table
from vflsec.data.dataset import VerticalDataset
from vflsec.data.partition import DataSpec
from vflsec.defenses.gaussian_dp import GaussianDP
from vflsec.language import census_text
from vflsec.language.split_lm import SplitLM
from vflsec.language.text import START, Tokenizer, make_text_table
from vflsec.language.transformer import Blocks, LowerModel
from vflsec.run.federation import build_federation
from vflsec.run.plan import make_cell
from vflsec.testing.conformance import MethodConformance

NOUNS, VERBS, TAILS = ("cat", "dog", "owl", "bee"), ("sees", "hears", "likes"), ("", "at night", "in the old house")
SMALL = {"cut": 1, "blocks": 2, "hidden": 8, "heads": 2}


def make_animals(rows=160, classes=2, parties=2):
    """Sentences such as ``cat sees bee at night``, whose first word tells the class; further parties have numbers."""
    rng, ids = np.random.default_rng(0), pd.RangeIndex(rows, name="id")
    labels = rng.permutation(np.arange(rows) % classes)
    words = [(NOUNS[y], rng.choice(VERBS), rng.choice(NOUNS), rng.choice(TAILS)) for y in labels]
    sentences = pd.Series([" ".join(row) for row in words], ids)
    text = make_text_table("animals", "passive_1", sentences, Tokenizer.from_texts([*NOUNS, *VERBS, *TAILS]), 8)
    others = [name for k in range(parties) if (name := f"passive_{k}" if k else "active") != "passive_1"]
    tables = {n: make_table("animals", n, pd.DataFrame(rng.normal(size=(rows, 2)), ids, ["a", "b"])) for n in others}
    ordered = sorted([*tables.values(), text], key=lambda table: table.name)
    return VerticalDataset("animals", tuple(ordered), pd.Series(labels, ids), tuple("uvwx"[:classes]))


def make_federation(seed=0, data=None, defenses=(), **options):
    name = frames.keep(make_animals(**options))
    settings = {"train": TrainSpec(), "model": ModelSpec(), "data": data or DataSpec()}
    cell = make_cell(dataset=name, method="split-lm", method_options={}, defenses=(), seed=seed, **settings)
    federation = build_federation(cell, "cpu")
    federation.parties["passive_1"].defenses = defenses
    return federation


def make_method(epochs=2, **options):
    return SplitLM(TrainSpec(epochs=epochs, batch=32), ModelSpec(bottom=(8,)), **{**SMALL, **options})


def test_states_of_the_first_positions_are_those_of_all():
    torch.manual_seed(0)
    h, mask, blocks = torch.randn(5, 7, 8), torch.arange(7) < torch.tensor([[7], [1], [0], [4], [6]]), Blocks(3, 8, 2)
    for most in (1, 3):
        torch.testing.assert_close(blocks(h, mask, most=most), blocks(h, mask)[:, :most])


def record(federation, method):
    """Train, and return the raw messages and those of a transcript of the active party."""
    raw, transcript = [], Transcript(frozenset({"active"}), frozenset(Kind))
    federation.channel.taps += [raw.append, transcript]
    return method.fit(federation), raw, transcript.messages


class TestMethodConformance_split_lm(MethodConformance):
    def make(self):
        return make_method()

    def federation(self, seed=0, *, parties=2, classes=2, **_):
        data = DataSpec(n_labeled=60, aligned=0.8, validation=0.2)
        return make_federation(seed, data, parties=parties, classes=classes)


def test_a_tokenizer_cuts_pads_and_knows_what_it_does_not_know():
    tokenizer = Tokenizer.from_texts(["The cat sleeps", "a cat"])
    assert tokenizer.vocabulary == ("[padding]", "[unknown]", "[start]", "a", "cat", "sleeps", "the")
    tokens = tokenizer.encode(["A cat, the CAT!", "a dog"], 4)
    assert tokens.tolist() == [[START, 3, 4, 6], [START, 3, UNKNOWN, PADDING]]
    assert tokenizer.decode(tokens[1]) == "a [unknown]"


@pytest.mark.parametrize("wide", [1, 10**9])
def test_rows_are_tokens_whether_sparse_or_dense(wide, monkeypatch):
    monkeypatch.setattr(encode, "WIDE", wide)
    table = make_animals().parties[1]
    encoder = encode.ColumnEncoder(table, table.frame.iloc[:3])  # most words are in no training row
    x = to_tensor(encoder(table.frame))
    assert isinstance(x, SparseRows) == (wide == 1)
    assert torch.equal(find_words(x, len(table.vocabulary)), torch.tensor(table.frame.to_numpy()))


def test_a_model_reads_dense_rows_and_mixtures_as_it_reads_sparse_ones():
    table = make_animals().parties[1]
    encoder = encode.ColumnEncoder(table, table.frame)
    x = torch.from_numpy(encoder(table.frame))
    size = len(table.vocabulary)
    places = torch.tensor(table.frame.to_numpy()) + torch.arange(0, x.shape[1], size)
    sparse = SparseRows(torch.ones(places.shape), places, x.shape[1])
    model = LowerModel(encoder.layout, 8, 2, 1)
    torch.testing.assert_close(model(x), model(sparse), rtol=0, atol=1e-6)
    assert torch.isfinite(model(torch.zeros_like(x[:2]))).all()  # where an attack has removed all words


def test_padding_changes_nothing():
    """The logits of a sentence are those in a federation whose sentences have more room."""
    federation, method = make_federation(), make_method()
    expected = method.fit(federation).predict("test")
    lower, upper = federation.parties["passive_1"].modules["bottom"], federation.active.modules["top"]
    x = federation.parties["passive_1"].features["test"]
    states = lower(x).unflatten(1, (8, 8))
    short = (find_words(x, len(lower.layout.vocabulary))[:, 5:] == PADDING).all(dim=1)
    assert short.any()
    upper.lengths = (0, 5)
    a = method.representation(federation.active)(federation.active.features["test"])
    torch.testing.assert_close(upper([a, states[:, :5].flatten(1)])[short], expected[short])


def test_messages_are_sequences_with_a_mask_and_transcripts_have_a_row_for_each():
    _, raw, transcript = record(make_federation(), make_method())
    tokens = {}
    for message in raw:
        assert message.payload["value"].shape == (len(message.rows), 8, 8)
    embeddings = [m for m in raw if m.kind is Kind.EMBEDDING]
    for message, row in zip(embeddings, [m for m in transcript if m.kind is Kind.EMBEDDING], strict=True):
        mask = message.payload["mask"]
        assert mask.dtype == torch.bool
        assert row.payload["value"].shape == (len(message.rows), 64)
        assert torch.equal((row.payload["value"].unflatten(1, (8, 8)) != 0).any(dim=2), mask)
        tokens.update(zip(message.rows.tolist(), mask.sum(dim=1).tolist(), strict=True))
    assert len(set(tokens.values())) > 1  # sentences differ in length


def test_a_table_is_the_message_itself_without_a_mask():
    message = Message(Kind.EMBEDDING, "a", "b", 0, "train", {"value": torch.ones(2, 3)}, torch.arange(2))
    assert message.as_table() is message


def test_a_defense_protects_a_sequence_as_one_row_and_leaves_the_mask():
    """Clipping bounds the norm of all states of a text together; so does the epsilon, which is of a row."""
    clip = GaussianDP(1e-9, at=["embedding"], clip=0.2)
    _, raw, _ = record(make_federation(defenses=[clip]), make_method())
    for message in (m for m in raw if m.kind is Kind.EMBEDDING):
        norms = message.payload["value"].flatten(1).norm(dim=1)
        torch.testing.assert_close(norms, torch.full_like(norms, 0.2), rtol=1e-3, atol=0)
        assert message.payload["mask"].dtype == torch.bool
    noisy = GaussianDP(1.0, at=["embedding"], clip=0.2)
    _, raw, transcript = record(make_federation(defenses=[noisy]), make_method())
    message = next(m for m in raw if m.kind is Kind.EMBEDDING)
    assert (message.payload["value"] != 0).all()  # noise covers padding too, of which a reader keeps nothing
    assert not transcript[0].payload["value"].unflatten(1, (8, 8))[~message.payload["mask"]].any()


def test_a_run_says_that_no_epsilon_covers_the_length_of_a_text():
    """The mask is the same with noise and without, and a note says so."""
    noisy = make_federation(defenses=[GaussianDP(1.0, at=["embedding"], clip=0.2)])
    method = make_method()
    masks = [
        [m.payload["mask"] for m in record(federation, model)[1] if m.kind is Kind.EMBEDDING]
        for federation, model in ((noisy, method), (make_federation(), make_method()))
    ]
    assert all(map(torch.equal, *masks))
    assert method.notes(noisy) == [
        "the mask tells the length of each text of passive_1: no defense hides it, and no epsilon covers it"
    ]


def test_it_learns_the_word_that_tells_the_class():
    federation = make_federation()
    logits = make_method(epochs=30, hidden=16).fit(federation).predict("test")
    assert (logits.argmax(dim=1) == federation.active.labels["test"]).float().mean() > 0.95


def test_impossible_settings_are_refused_in_a_line():
    with pytest.raises(UsageError, match="cut below the 2 blocks"):
        make_method(cut=2)
    with pytest.raises(UsageError, match="heads to divide hidden=8"):
        make_method(heads=3)
    with pytest.raises(
        UsageError, match="text at a passive party for split-lm, got none: choose --dataset census-text"
    ):
        vflsec.train(dataset="toy", method="split-lm")


@pytest.mark.parametrize("defense", ["phe", "sealed"])
def test_encrypted_layers_are_refused_before_training(defense, tmp_path):
    with pytest.raises(UsageError, match="no encrypted layer with split-lm"):
        vflsec.evaluate(attack="norm", dataset=make_animals(), methods=["split-lm"], defense=defense, out=tmp_path)


@pytest.mark.parametrize("attack", ["column-fusion", "attribute"])
def test_attacks_on_columns_are_refused_before_training(attack, tmp_path):
    with pytest.raises(InsufficientView, match="recovers (columns|attribute), and passive_1 holds text"):
        vflsec.evaluate(attack=attack, adversary="active", dataset=make_animals(), methods=["split-lm"], out=tmp_path)


def test_the_bundled_sentences_are_of_the_survey():
    dataset, tokenizer = census_text.load(rows=50), census_text.build_tokenizer()
    text = dataset.parties[1].frame.sort_index().to_numpy()
    assert text.shape == (50, census_text.LENGTH)
    assert UNKNOWN not in text
    assert tokenizer.decode(text[0]).split(" ")[0] in tokenizer.vocabulary
    fewer = census_text.load(rows=20)
    sentences = {tokenizer.decode(row) for row in text}
    assert {tokenizer.decode(row) for row in fewer.parties[1].frame.to_numpy()} <= sentences
    with pytest.raises(UsageError, match="rows between 1 and 148318"):
        census_text.load(rows=0)


STRENGTHS = {"compress": 0.5, "discrete": 0.5, "id-lmid": 1.5, "kd-k": 0.2, "sign": 0.5}
REFUSED = {"id-lmid", "phe", "sealed"}
"""One of trees, and two that encrypt a linear layer."""


@pytest.mark.parametrize("name", sorted(registry.list_all("defenses")))
def test_every_defense_acts_on_texts_or_refuses_in_a_line(name, monkeypatch):
    monkeypatch.setattr(encode, "WIDE", 1)  # rows are sparse, as those of any longer text
    points = registry.load("defenses", name).points
    at = "@gradient+embedding" if {Kind.GRADIENT, Kind.EMBEDDING} <= set(points) else ""
    settings = {"options": SMALL, "train": {"epochs": 1, "batch": 64}, "data": {"test": 0.5}}
    settings |= {"dataset": make_animals(), "method": "split-lm"}
    settings |= {"defense": f"{name}:strength={STRENGTHS.get(name, 1)}{at}"}
    if name in REFUSED:
        with pytest.raises(UsageError, match=r"^[^\n]+: (drop|choose)[^\n]+$"):
            vflsec.train(**settings)
        return
    assert torch.isfinite(vflsec.train(**settings).predict("test")).all()
