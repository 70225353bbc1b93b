"""A text in a file of the user's: words, the vocabulary of training rows, and one line for what is wrong."""

import json

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

import vflsec
from vflsec.base.errors import DataError
from vflsec.base.layout import PADDING, UNKNOWN
from vflsec.base.sparse_rows import find_words, to_tensor
from vflsec.cli import cli
from vflsec.data.checkup import check
from vflsec.data.files import load_toml
from vflsec.data.partition import DataSpec, split_dataset

IDS = [f"p{number}" for number in range(40)]
TEXTS = [f"The cat {word}" for word in ("sat", "ran", "sat down", "ran away") for _ in range(10)]
"""Ten rows each, so that every word is in some training row."""


@pytest.fixture
def write(tmp_path):
    """Writes the description of a bank with labels and of a clinic with these lines, and returns its path."""
    (tmp_path / "bank.csv").write_text("id,late\n" + "".join(f"{each},{k % 2}\n" for k, each in enumerate(IDS)))

    def write(content, suffix="jsonl", text="note", more=""):
        content = content if isinstance(content, bytes) else content.encode()
        (tmp_path / f"notes.{suffix}").write_bytes(content)
        toml = tmp_path / "notes.toml"
        parties = (
            f'[parties.bank]\nfile = "bank.csv"\n[parties.clinic]\nfile = "notes.{suffix}"\ntext = "{text}"\n{more}'
        )
        toml.write_text(f'label = "late"\nid = "id"\n{parties}')
        return toml

    return write


def make_lines(texts=TEXTS):
    return "\n".join(json.dumps({"id": each, "note": text, "age": 7}) for each, text in zip(IDS, texts, strict=True))


def read(toml):
    """Return the words of each split by the ids of rows, and the vocabulary."""
    split = split_dataset(load_toml(toml), DataSpec(), 0)
    part = split.parties["passive_1"]
    vocabulary = part.layout.vocabulary
    words = {each: find_words(to_tensor(part.features[each]), len(vocabulary)) for each in ("train", "test")}
    return {
        row: " ".join(vocabulary[word] for word in words[each][k] if word != PADDING)
        for each in words
        for k, row in enumerate(split.ids[each])
    }, vocabulary


def test_the_check_names_the_method_for_texts(write):
    shown = CliRunner().invoke(cli, ["data", "check", str(toml := write(make_lines()))]).stdout
    assert f"next: vflsec eval --dataset {toml} --method split-lm" in shown


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_texts_are_words_in_small_letters(write, suffix):
    lines = (
        make_lines()
        if suffix == "jsonl"
        else "id,note\n" + "".join(f"{i},{t}\n" for i, t in zip(IDS, TEXTS, strict=True))
    )
    texts, vocabulary = read(write(lines, suffix))
    assert texts == {each: text.lower() for each, text in zip(IDS, TEXTS, strict=True)}
    assert vocabulary == ("[padding]", "[unknown]", "away", "cat", "down", "ran", "sat", "the")


def test_the_vocabulary_is_that_of_training_rows(write):
    """A word that only test rows have is unknown, and no other party sees it."""
    ids = split_dataset(load_toml(write(make_lines())), DataSpec(), 0).ids
    texts = [f"{text} {'secret' if each in ids['test'] else 'known'}" for each, text in zip(IDS, TEXTS, strict=True)]
    words, vocabulary = read(write(make_lines(texts)))
    assert "known" in vocabulary
    assert "secret" not in vocabulary
    assert all(words[each].endswith("[unknown]") for each in ids["test"])
    assert not any("[unknown]" in words[each] for each in ids["train"])
    assert UNKNOWN == 1


def test_a_text_of_a_million_words_is_cut_off_with_a_warning(write):
    toml = write(make_lines([*TEXTS[:-1], "word " * 1_000_000]), more="max_words = 3")
    assert max(len(text.split()) for text in read(toml)[0].values()) == 3
    assert load_toml(toml).warnings[0] == (
        "clinic: notes.jsonl, column 'note', row 21 (and 19 more rows): of more than 1024 words the first 3 are used; "
        "set max_words to use more"
    )


def test_data_check_counts_a_text_as_one_column(write):
    facts = next(facts for facts in check(write(make_lines())).columns if facts.column == "note")
    assert (facts.kind, facts.values, facts.encoded) == ("text", 4, 4 * 8)
    assert np.isnan(facts.predicts)


def test_split_lm_reads_the_text_of_a_file(write):
    texts = [f"{'late' if k % 2 else 'early'} {text}" for k, text in enumerate(TEXTS)]
    trained = vflsec.train(
        dataset=str(write(make_lines(texts))), method="split-lm", train={"epochs": 60, "batch": 8},
        options={"hidden": 16, "heads": 2, "blocks": 2},
    )  # fmt: skip
    labels = trained.federation.active.labels["test"]
    assert (trained.predict("test").argmax(dim=1) == labels).float().mean() > 0.9


LINES = make_lines().split("\n")
BAD = {
    "empty": (["p3", "  "], r"notes.jsonl, column 'note', row 4: expected a text, got nothing"),
    "missing": (["p3", None], r"row 4: expected a text, got nothing"),
    "a list": (["p3", ["a", "b"]], r"notes.jsonl, line 4: expected a JSON object of texts and numbers"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_text_is_named_by_its_row(write, case):
    (row, text), expected = BAD[case]
    lines = [*LINES[:3], json.dumps({"id": row, "note": text}), *LINES[4:]]
    with pytest.raises(DataError, match=rf"^[^\n]*{expected}[^\n]*$"):
        load_toml(write("\n".join(lines)))


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        ("\n".join([*LINES[:3], LINES[3][:-4], *LINES[4:]]), {}, "line 4: expected a JSON object"),
        ("", {}, "line 1: expected a JSON object"),
        (make_lines().replace('"note": ', '"note": "", "note": ', 1), {}, "line 1: expected .*: a key occurs twice"),
        (make_lines().encode()[:-2] + b"\xff}", {}, "line 40: expected a JSON object"),
        (b"id,note\np1,\xff\n", {"suffix": "csv"}, "expected utf-8 text, got byte 0xff"),
        (make_lines(), {"text": "notes"}, "unknown column 'notes'. Did you mean note?"),
        (make_lines(), {"more": 'drop = ["age"]\ncategorical = ["age"]'}, "no other role beside a text"),
        (make_lines(), {"more": "max_words = 0"}, "max_words between 1 and 1024, got 0"),
        (make_lines(range(40)), {}, "column 'note': expected texts, got a number in each row; leave out text = 'note'"),
        (make_lines(["same text"] * 40), {}, "column 'note': expected texts that differ"),
    ],
)
def test_a_bad_file_is_refused_in_a_line(write, content, options, expected):
    with pytest.raises(DataError, match=rf"^[^\n]*{expected}[^\n]*$"):
        load_toml(write(content, **options))


def test_a_text_that_parquet_lacks_is_named_by_its_row(write, tmp_path):
    toml = write("", suffix="parquet")
    pd.DataFrame({"id": IDS, "note": [*TEXTS[:3], None, *TEXTS[4:]]}).to_parquet(tmp_path / "notes.parquet")
    with pytest.raises(DataError, match=r"row 4: expected a text, got nothing"):
        load_toml(toml)


def test_texts_of_unknown_words_only_are_refused_in_a_line(write):
    with pytest.raises(DataError, match=r"^expected texts with words of the training rows, got only words[^\n]*$"):
        split_dataset(load_toml(write(make_lines([f"w{k} v{k}" for k in range(40)]))), DataSpec(), 0)
