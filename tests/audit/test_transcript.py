"""The open transcript: what is written is read, and nothing that contradicts itself is."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from vflsec.audit import transcript_lines
from vflsec.audit.subject import collect_last
from vflsec.audit.transcript import TranscriptFolder, TranscriptWriter
from vflsec.audit.transcript_lines import NodePaths, Sent, TranscriptHeader
from vflsec.base.errors import DataError, UsageError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
HEADER = TranscriptHeader(observer="bureau", parties={"bank": "active", "bureau": "passive"}, classes=2)


def embedding(step=0, rows=("a", "b"), values=((1.0, 2.0), (3.0, 4.0)), **other):
    fields = {"kind": "embedding", "sender": "bureau", "receiver": "bank", "phase": "train", "split": "train"} | other
    return Sent(**fields, step=step, rows=np.asarray(rows), values=np.asarray(values, dtype=np.float32))


def gradient(step=0, **other):
    return embedding(step, kind="gradient", sender="bank", receiver="bureau", **other)


def written(folder, *messages, header=HEADER):
    TranscriptWriter(folder, header).write(messages)
    return folder


def same(one, other):
    assert one[:6] == other[:6]
    assert list(one.rows) == [str(row) for row in other.rows]
    np.testing.assert_array_equal(one.values, other.values)


def foreign(folder, table, *, parts=None, header=None):
    """A transcript that another program has written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "transcript.toml").write_text(
        header
        or 'format = "vflsec-transcript"\nversion = 1\nobserver = "bureau"\n'
        '[parties]\nbank = "active"\nbureau = "passive"\n'
    )
    parquet.write_table(table, folder / "p.parquet")
    found = hashlib.sha256((folder / "p.parquet").read_bytes()).hexdigest()
    lines = [{"file": "p.parquet", "rows": table.num_rows, "sha256": found}] if parts is None else parts
    (folder / "parts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def table(**columns):
    plain = {
        "kind": ["embedding", "embedding"],
        "sender": ["bureau", "bureau"],
        "receiver": ["bank", "bank"],
        "phase": ["train", "train"],
        "split": ["train", "train"],
        "step": [0, 0],
        "row": ["a", "b"],
        "value": [[1.0, 2.0], [3.0, 4.0]],
    }
    return pa.table({key: value for key, value in (plain | columns).items() if value is not None})


def test_what_is_written_is_read(tmp_path):
    messages = [embedding(0), gradient(0), embedding(1, rows=[7, 8]), embedding(0, split="test", phase="predict")]
    opened = TranscriptFolder(written(tmp_path / "t", *messages))
    assert (opened.header, sum(part.rows for part in opened.parts), opened.notes) == (HEADER, 8, [])
    found = list(opened.messages())
    assert len(found) == 4
    for one, other in zip(found, messages, strict=True):
        same(one, other)


@pytest.mark.long
@settings(max_examples=40)
@given(st.data())
def test_any_message_survives(tmp_path_factory, data):
    n = data.draw(st.integers(1, 40))
    width = data.draw(st.integers(1, 5))
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    values = data.draw(arrays.arrays(np.float32, (n, width), elements=finite))
    text = st.text("abc-é 1", min_size=1, max_size=8)
    rows = data.draw(st.one_of(arrays.arrays(np.int64, n), st.lists(text, min_size=n, max_size=n)))
    message = embedding(data.draw(st.integers(0, 2**40)), rows=rows, values=values)
    (found,) = TranscriptFolder(written(tmp_path_factory.mktemp("t") / "t", message)).messages()
    same(found, message)


def test_phases_may_send_vectors_of_other_layers(tmp_path):
    messages = [embedding(phase="pretrain", values=np.ones((2, 3))), embedding(1), embedding(phase="predict")]
    opened = TranscriptFolder(written(tmp_path / "t", *messages))
    assert [each.values.shape[1] for each in opened.messages()] == [3, 2, 2]
    assert collect_last(messages[:2]).shape == (2, 2)
    for phase in ("train", "predict"):
        other = embedding(2, values=np.ones((2, 4)), phase=phase)
        opened = TranscriptFolder(written(tmp_path / phase, embedding(), other))
        with pytest.raises(DataError, match="2 numbers as in earlier"):
            list(opened.messages())


def test_the_borders_of_batches_and_files_divide_no_message(tmp_path):
    n = 40_000
    values = np.arange(2 * n).reshape(n, 2)
    whole = embedding(rows=np.arange(n), values=values)
    writer = TranscriptWriter(tmp_path / "t", HEADER)
    writer.write([whole._replace(rows=whole.rows[:100], values=whole.values[:100])])
    writer.write([whole._replace(rows=whole.rows[100:], values=whole.values[100:]), gradient()])
    first, second = TranscriptFolder(tmp_path / "t").messages()
    same(first, whole)
    same(second, gradient())


def test_a_very_long_message_comes_in_pieces_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr("vflsec.audit.transcript.MAX_LINES", 1 << 14)
    values = np.arange(80_000).reshape(40_000, 2)
    written(tmp_path / "t", embedding(rows=np.arange(40_000), values=values))
    found = list(TranscriptFolder(tmp_path / "t").messages())
    assert len(found) == 3
    np.testing.assert_array_equal(np.concatenate([one.values for one in found]), values)


def test_a_writer_goes_on_where_it_was_killed(tmp_path):
    folder = written(tmp_path / "t", embedding(0))
    index = (folder / "parts.jsonl").read_text()
    (folder / "parts.jsonl").write_text(index + '{"file": "000001.par')
    (folder / "000001.parquet").write_bytes(b"half a file")
    opened = TranscriptFolder(folder)
    assert opened.notes == [
        "a torn line at the end of parts.jsonl dropped",
        "1 unfinished file dropped: 000001.parquet",
    ]
    assert sum(part.rows for part in opened.parts) == 2
    TranscriptWriter(folder, HEADER).write([embedding(1)])
    assert [one.step for one in TranscriptFolder(folder).messages()] == [0, 1]


def test_a_writer_does_not_mix_runs(tmp_path):
    written(tmp_path / "t", embedding())
    with pytest.raises(UsageError, match="same parties and task as"):
        TranscriptWriter(tmp_path / "t", TranscriptHeader(observer="bank", parties=HEADER.parties))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="new folder for a transcript"):
        TranscriptWriter(tmp_path / "other", HEADER)


@pytest.mark.parametrize(
    "columns",
    [
        {"value": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.large_list(pa.float64()))},
        {"value": pa.array(list(np.array([[1.0, 2.0], [3.0, 4.0]], np.float16)), pa.list_(pa.float16()))},
        {"value": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2))},
        {"kind": pa.array(["embedding"] * 2).dictionary_encode(), "row": pa.array(["a", "b"], pa.large_string())},
        {"step": pa.array([0, 0], pa.int16())},
        {"extra": ["ignored", "ignored"]},
    ],
)
def test_types_that_other_languages_write_are_read(tmp_path, columns):
    (found,) = TranscriptFolder(foreign(tmp_path / "t", table(**columns))).messages()
    same(found, embedding())


WRONG = [
    ({"value": [[1.0, 2.0], [3.0]]}, "row 2: .*2 numbers .*found 1"),
    ({"value": [[1.0, 2.0], [3.0, float("nan")]]}, "row 2: .*finite numbers as"),
    ({"value": [[1.0, 2.0], [3.0, 1e300]]}, "row 2: .*finite numbers as"),
    ({"value": [[1.0, 2.0], []]}, "row 2: .*1 to 1048576 numbers"),
    ({"value": [[1.0, 2.0], None]}, "row 2: .*value, found nothing"),
    ({"value": [[1, 2], [3, 4]]}, "'value': .*floating-point numbers, found list"),
    ({"value": None}, "expected one column 'value', found 0"),
    ({"row": ["a", None]}, "row 2: .*row, found nothing"),
    ({"row": ["a", "b" * 1001]}, "row 2: .*1000 .*found 1001"),
    ({"row": [0.5, 1.5]}, "'row': .*found double"),
    ({"kind": ["embedding", "weights"]}, "row 2: .*kind, found 'weights'"),
    ({"sender": ["bureau", "spy"]}, "row 2: .*sender, found 'spy'"),
    ({"receiver": ["bank", "bureau"]}, "row 2: .*'bureau' as sender"),
    ({"phase": ["train", "\x1b[31m"]}, "row 2: .*phase of 1 to 64"),
    ({"step": [0, -1]}, "row 2: .*step of .*negative"),
    ({"step": [0.0, 1.0]}, "'step': .*whole numbers, found double"),
]


@pytest.mark.parametrize(("columns", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_a_wrong_line_is_named(tmp_path, columns, message):
    with pytest.raises(DataError, match=message) as caught:
        list(TranscriptFolder(foreign(tmp_path / "t", table(**columns))).messages())
    assert "p.parquet" in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_row_is_counted_from_the_start_of_its_file(tmp_path):
    n = 20_000
    values = np.ones((n, 2), dtype=np.float32)
    values[17_000, 1] = np.inf
    with pytest.raises(DataError, match="000000.parquet, row 17001: expected finite numbers"):
        list(TranscriptFolder(written(tmp_path / "t", embedding(rows=np.arange(n), values=values))).messages())


def test_messages_of_others_are_no_part_of_ones_transcript(tmp_path):
    header = 'format = "vflsec-transcript"\nversion = 1\nobserver = "third"\n[parties]\nbank = "active"\n' \
             'bureau = "passive"\nthird = "passive"\n'  # fmt: skip
    folder = foreign(tmp_path / "t", table(), header=header)
    with pytest.raises(DataError, match="row 1.*third.*bureau to bank"):
        list(TranscriptFolder(folder).messages())
    (folder / "transcript.toml").write_text(header.replace('observer = "third"', 'observer = "auditor"'))
    assert len(list(TranscriptFolder(folder).messages())) == 1


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("", "missing required field"),
        ("format = 3", "format"),
        ('format = "vflsec-transcript"\nversion = 2\nobserver = "a"\n[parties]\na = "active"', "version"),
        ('format = "vflsec-transcript"\nversion = 1\nobserver = "x"\n[parties]\na = "active"', "of a or auditor"),
        (
            'format = "vflsec-transcript"\nversion = 1\nobserver = "a"\n[parties]\na = "passive"',
            "exactly one active party",
        ),
        (
            'format = "vflsec-transcript"\nversion = 1\nclasses = 1\nobserver = "a"\n[parties]\na = "active"',
            "at least 2",
        ),
        (
            'format = "vflsec-transcript"\nversion = 1\nrun = "rm"\nobserver = "a"\n[parties]\na = "active"',
            "unknown field",
        ),
        ("a = [" * 5000, "write the header again"),
    ],
)
def test_a_wrong_header_is_one_line(tmp_path, header, message):
    with pytest.raises(DataError, match="transcript.toml") as caught:
        TranscriptFolder(foreign(tmp_path / "t", table(), header=header or "\n"))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["../p.parquet", "/etc/passwd", "p.csv", "a/b.parquet", ".parquet", "a\nb.parquet"])
def test_a_path_in_the_index_stays_in_the_folder(tmp_path, name):
    folder = foreign(tmp_path / "t", table(), parts=[{"file": name, "rows": 2, "sha256": "0" * 64}])
    with pytest.raises(DataError, match=r"line 1.*\.parquet"):
        TranscriptFolder(folder)


def test_damage_is_noticed(tmp_path):
    folder = written(tmp_path / "t", embedding())
    part = folder / "000000.parquet"
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DataError, match=r"hash in parts\.jsonl"):
        list(TranscriptFolder(folder).messages())
    part.unlink()
    with pytest.raises(DataError, match=r"000000\.parquet.*No such file"):
        list(TranscriptFolder(folder).messages())
    part.symlink_to("/etc/passwd")
    with pytest.raises(DataError, match="000000.parquet: cannot be read"):
        list(TranscriptFolder(folder).messages())


def test_a_file_that_is_no_parquet_is_refused_though_its_hash_is_right(tmp_path):
    folder = foreign(tmp_path / "t", table())
    for content in (b"", b"PAR1", b"\x80\x04K\x01.", b"PAR1" + b"\xff" * 100 + b"PAR1"):
        (folder / "p.parquet").write_bytes(content)
        line = {"file": "p.parquet", "rows": 2, "sha256": hashlib.sha256(content).hexdigest()}
        (folder / "parts.jsonl").write_text(json.dumps(line) + "\n")
        with pytest.raises(DataError, match=r"p\.parquet: cannot be read"):
            list(TranscriptFolder(folder).messages())


def test_the_number_of_rows_must_be_right(tmp_path):
    folder = foreign(tmp_path / "t", table())
    (folder / "parts.jsonl").write_text((folder / "parts.jsonl").read_text().replace('"rows": 2', '"rows": 3'))
    with pytest.raises(DataError, match=r"3 rows as in parts\.jsonl.*2"):
        list(TranscriptFolder(folder).messages())


def test_a_folder_without_a_transcript_is_refused(tmp_path):
    with pytest.raises(DataError, match="found no transcript.toml"):
        TranscriptFolder(tmp_path)


def test_bytes_that_are_no_text_in_the_index(tmp_path):
    folder = foreign(tmp_path / "t", table())
    with (folder / "parts.jsonl").open("ab") as file:
        file.write(b'{"\xf9": 1}\n')
    with pytest.raises(DataError, match="parts.jsonl, line"):
        TranscriptFolder(folder)


@pytest.mark.long
def test_damage_below_a_right_hash_is_one_line(tmp_path):
    """Bytes that Parquet reads, but that are no text, or point outside of a dictionary."""
    folder = foreign(tmp_path / "t", table())
    content = (folder / "p.parquet").read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(400):
        damaged = bytearray(content)
        for at in rng.integers(4, len(content), size=rng.integers(1, 4)):
            damaged[at] = rng.integers(256)
        (folder / "p.parquet").write_bytes(damaged)
        line = {"file": "p.parquet", "rows": 2, "sha256": hashlib.sha256(damaged).hexdigest()}
        (folder / "parts.jsonl").write_text(json.dumps(line) + "\n")
        with suppress(DataError):
            list(TranscriptFolder(folder).messages())


def test_a_folder_or_a_pipe_in_the_place_of_a_file(tmp_path):
    folder = foreign(tmp_path / "t", table())
    for make in (Path.mkdir, os.mkfifo):
        path = folder / "p.parquet"
        path.unlink() if path.is_file() else None
        make(path)
        with pytest.raises(DataError, match="expected a plain file"):
            list(TranscriptFolder(folder).messages())
        path.rmdir() if path.is_dir() else None


def test_a_header_of_endless_names(tmp_path):
    folder = foreign(tmp_path / "t", table())
    (folder / "transcript.toml").write_text("a." * 60_000 + "a = 1\n")
    with pytest.raises(DataError, match="at most"):
        TranscriptFolder(folder)


@pytest.mark.parametrize("number", [-3.0, 2.5, 32768.0, 1e9, 2.0**62])
def test_a_number_that_no_node_has_is_named(tmp_path, number):
    header = TranscriptHeader(observer="auditor", parties={"bank": "active", "bureau": "passive"})
    values = np.array([[1.0], [number], [1.0]], dtype=np.float32)
    sent = Sent("nodes", "bank", "bureau", "train", "train", 0, np.array(["a", "b", "c"]), values)
    TranscriptWriter(tmp_path / "t", header).write([sent])
    with pytest.raises(DataError, match="row 2.*nodes.*0 to 32767"):
        list(TranscriptFolder(tmp_path / "t").messages())


AUDITED = TranscriptHeader(observer="auditor", parties={"bank": "active", "bureau": "passive", "shop": "passive"})


def nodes(values, *, rows="abc", step=0, phase="train", split="train", **route):
    """A message of the active party, or of another route: a row's nodes in trees from ``step`` on."""
    route = {"sender": "bank", "receiver": "bureau", **route}
    values = np.array(values, dtype=np.float32).reshape(len(rows), -1)
    return Sent("nodes", phase=phase, split=split, step=step, rows=np.array(list(rows)), values=values, **route)


def read(folder, *messages):
    return list(TranscriptFolder(written(folder, *messages, header=AUDITED)).messages())


ANSWER = {"sender": "bureau", "receiver": "bank"}


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([nodes([1, 1, 1]), nodes([2, 3, 3]), nodes([4, 6, 7])], id="levels"),
        pytest.param([nodes([1, 1, 1]), nodes([4, 13, 7])], id="levels that others split are left out"),
        pytest.param([nodes([1, 1, 1]), nodes([2, 0, 0]), nodes([0, 13, 0])], id="withheld"),
        pytest.param([nodes([2, 3, 3]), nodes([5, 6], rows="ab", **ANSWER)], id="an answer about some rows"),
        pytest.param([nodes([4, 6, 7]), nodes([2, 3, 3], receiver="shop")], id="another party is told less"),
        pytest.param([nodes([2, 3, 3]), nodes([3, 2, 2], step=1)], id="another tree"),
        pytest.param([nodes([2, 3, 3]), nodes([3, 2, 2], phase="predict")], id="after training"),
        pytest.param(
            [nodes([2, 3, 3]), nodes([[0, 2]], rows="a", receiver="shop"), nodes([3], rows="b", step=1)],
            id="other trees",
        ),
        pytest.param([nodes([[2, 0], [0, 3]], rows="ab"), nodes([[5, 2], [3, 7]], rows="ab")], id="several trees"),
        pytest.param([nodes([1, 2, 5], rows="aaa"), nodes([10], rows="a")], id="one row in several lines"),
        pytest.param([nodes([2, 3, 3]), nodes([[5, 2]], rows="a", receiver="shop")], id="one tree and two"),
    ],
)
def test_nodes_on_one_path_are_read(tmp_path, messages):
    found = read(tmp_path / "t", *messages)
    assert sum(len(one.rows) for one in found) == sum(len(one.rows) for one in messages)


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        pytest.param(
            [nodes([1, 1, 1]), nodes([2, 3, 3]), nodes([4, 5, 7])],
            "row 8.*tree 0.*with 3.*'b'.*5",
            id="no child of the node before",
        ),
        pytest.param(
            [nodes([2, 3, 3]), nodes([4, 4, 6])],
            "row 5.*with 3.*'b'.*4",
            id="a node shared by rows whose earlier nodes differ",
        ),
        pytest.param([nodes([2, 3, 3]), nodes([2, 2, 3])], r"row 5: .* with 3, .* found 2", id="another node"),
        pytest.param([nodes([4, 6, 7]), nodes([2, 3, 2])], r"row 6: .* with 7, .* found 2", id="another node above"),
        pytest.param(
            [nodes([2, 3, 3]), nodes([6], rows="a", **ANSWER)], r"row 4: .* with 2, .* found 6", id="an answer"
        ),
        pytest.param(
            [nodes([4, 6, 7]), nodes([5, 6, 7], receiver="shop")], r"row 4: .* with 4, .* found 5", id="two parties"
        ),
        pytest.param(
            [nodes([[2, 3]], rows="a", step=6), nodes([[4, 5]], rows="a", step=6)],
            "row 2.*tree 7.*with 3.*'a'.*5",
            id="one of several trees",
        ),
        pytest.param([nodes([2, 3], rows="aa")], r"row 2: .* with 2, .* found 3", id="two lines of one message"),
        pytest.param(
            [nodes([2, 3, 3]), nodes([3], rows="a", split="val")], r"row 4: .* with 2, .* found 3", id="another split"
        ),
        pytest.param(
            [nodes([2, 3, 3]), nodes([3], rows="a", phase="train-2")], r"row 4: .* with 2, .* found 3", id="two phases"
        ),
        pytest.param(
            [nodes([2], rows="a", step=1), nodes([[2, 3]], rows="a", receiver="shop")],
            r"row 2: .* tree 1 .* with 2, .* found 3",
            id="one tree in messages that begin at others",
        ),
        pytest.param(
            [nodes([[2, 3]], rows="a", receiver="shop"), nodes([2], rows="a"), nodes([3], rows="a")],
            r"row 3: .* tree 0 .* with 2, .* found 3",
            id="after messages of another width",
        ),
    ],
)
def test_nodes_that_contradict_each_other_are_named(tmp_path, messages, match):
    with pytest.raises(DataError, match=match) as caught:
        read(tmp_path / "t", *messages)
    assert "\n" not in str(caught.value)
    assert "000000.parquet" in str(caught.value)


@pytest.mark.long
@settings(max_examples=60)
@given(st.data())
def test_nodes_are_refused_exactly_where_no_tree_has_them(tmp_path_factory, data):
    """Against pairs of all that is said, one by one."""
    said = data.draw(
        st.lists(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9)), min_size=1, max_size=3), max_size=4)
    )
    messages = [nodes([v for _, v in one], rows="".join(row for row, _ in one), step=0) for one in said]
    paths: dict[str, list[int]] = {}
    for row, node in (pair for one in said for pair in one if pair[1]):
        paths.setdefault(row, []).append(node)

    def above(a, b):
        return a in {b >> k for k in range(b.bit_length())}

    agree = all(above(a, b) or above(b, a) for own in paths.values() for a in own for b in own)
    try:
        read(tmp_path_factory.mktemp("t") / "t", *messages)
    except DataError:
        assert not agree
    else:
        assert agree


def test_trees_that_would_fill_the_memory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(transcript_lines, "MAX_PATHS", 8)
    with pytest.raises(DataError, match="8 rows times trees.*9"):
        read(tmp_path / "t", nodes([2, 3, 3]), nodes([[2, 2]] * 3, step=1, receiver="shop"))


def test_more_trees_than_any_training_has_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(transcript_lines, "MAX_TREES", 2)
    read(tmp_path / "few", nodes([[2, 2]] * 3))
    with pytest.raises(DataError, match="row 1.*2 trees, found 3"):
        read(tmp_path / "many", nodes([[2, 2, 2]] * 3))


def test_many_messages_of_nodes_are_read_in_time_that_grows_with_their_number():
    def operations(n):
        paths, counted = NodePaths(), []
        grow = np.zeros
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                transcript_lines.np,
                "zeros",
                lambda shape, **kind: counted.append(np.prod(shape)) or grow(shape, **kind),
            )
            for k in range(n):
                paths.check(nodes([2], rows=[str(k)]))
        return sum(counted)

    assert operations(2000) < 3 * operations(1000)


@pytest.mark.parametrize("split", ["Test", " test", "VAL"])
def test_a_split_that_is_written_in_another_way_is_refused(tmp_path, split):
    with pytest.raises(DataError, match="row 1.*val or test.*'"):
        read(tmp_path / "t", nodes([2, 3, 3], split=split))
