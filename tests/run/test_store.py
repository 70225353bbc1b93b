"""The results folder survives a kill at any byte."""

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from tests.results.analysis.made import made_result
from vflsec.base.errors import StoreError
from vflsec.results.records.schema import Block
from vflsec.run.describe import build_manifest
from vflsec.run.spec import EvalSpec
from vflsec.run.store import CellFacts, CellFolder, Store

MANIFEST = build_manifest(EvalSpec())
BLOCK = Block(metrics={"auc": 0.75, "accuracy": 0.5}, ci95_rows=(0.7, 0.8), chance=0.5, n=90, halves=(0.7, 0.8))


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


def test_a_store_makes_its_folder_when_it_first_writes(tmp_path):
    store = Store(tmp_path / "a" / "run")
    assert (store.records(), store.cell("c").read()) == ({}, None)
    assert not list(tmp_path.iterdir())
    store.append(made_result(key="x"))
    assert list(store.records()) == ["x"]


def test_records_come_back_by_key(store):
    store.append(made_result(key="a", status="ok"))
    store.append(made_result(key="b", status="error"))
    assert {key: record.status for key, record in store.records().items()} == {"a": "ok", "b": "error"}


@pytest.mark.long
def test_torn_last_line_is_unfinished_at_every_byte(store):
    store.append(made_result(key="a"))
    store.append(made_result(key="b", error="é"))
    path = store.folder / "records.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        assert list(store.records()) == ["a"]
        store.trim()
        store.append(made_result(key="b", error="é"))
        assert path.read_bytes() == whole


def test_forget_keeps_what_it_is_told_to(store):
    store.append(made_result(key="a", status="ok"))
    store.append(made_result(key="b", status="diverged"))
    store.forget(lambda record: record.status == "ok")
    assert list(store.records()) == ["a"]


def test_clear_drops_results_and_cells(store):
    store.append(made_result(key="a"))
    store.cell("c").write(CellFacts(), lambda folder: folder.mkdir())
    store.clear()
    assert not store.records()
    assert store.cell("c").read() is None


def test_clear_leaves_what_is_not_ours(store):
    foreign = store.folder / "cells" / "mine" / "work.txt"
    foreign.parent.mkdir(parents=True)
    foreign.touch()
    with pytest.raises(StoreError, match=r"cells without spec\.toml or records\.jsonl"):
        store.clear()
    store.write_settings("", MANIFEST)
    store.clear()
    assert foreign.exists()


def test_failures_are_forgotten_with_their_cells(store):
    for key, status in (("a", "ok"), ("b", "diverged"), ("c", "error")):
        store.append(made_result(key=key, status=status, cell=key))
        store.cell(key).write(CellFacts(status=status), lambda folder: folder.mkdir())
    store.append(made_result(key="prior", status="error"))
    store.forget_failures()
    assert list(store.records()) == ["a"]
    assert [store.cell(key).read() for key in "abc"] == [CellFacts(), None, None]


def test_a_cell_appears_whole_or_not_at_all(store):
    def dies(folder):
        folder.mkdir()
        (folder / "active.safetensors").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.cell("c").write(CellFacts(), dies)
    assert store.cell("c").read() is None
    store.cell("c").write(CellFacts(), lambda folder: folder.mkdir())
    assert store.cell("c").read() == CellFacts()


def test_second_writer_is_refused(store):
    with store.lock(), pytest.raises(StoreError, match="another vflsec is writing to"):
        store.lock()


@pytest.mark.parametrize("line", ["not json", "{}", "[1]", '{"schema": 1}', '{"schema": 1, "check": "", "record": {}}'])
def test_foreign_lines_are_named(store, line):
    (store.folder / "records.jsonl").write_text(line + "\n")
    with pytest.raises(StoreError, match="records.jsonl line 1 is damaged, .*: compute .*--retry-errors"):
        store.records()


def test_every_changed_byte_is_noticed(store):
    """Whatever byte of a line changes, it is refused, or it is the record that was written."""
    made = made_result(key="a", utility=BLOCK, leak={"test": BLOCK}, notes=["é"])
    store.append(made)
    path = store.folder / "records.jsonl"
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = []
    for at in range(len(whole) - 1):
        damaged = bytearray(whole)
        damaged[at] = rng.choice([b for b in range(256) if b not in (damaged[at], ord("\n"))])
        path.write_bytes(bytes(damaged))
        try:
            assert store.records() == {"a": made}
        except StoreError as error:
            refused.append(str(error))
    assert all("records.jsonl line 1 " in line for line in refused)
    assert len(refused) > 0.95 * len(whole)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"metrics": {"auc": 4.475}}, "test has auc = 4.475"),
        ({"metrics": {"accuracy": -0.1}}, "test has accuracy = -0.1"),
        ({"metrics": {"r2": 1.5}}, "test has r2 = 1.5"),
        ({"metrics": {}}, "test has no metric"),
        ({"n": 0}, "no metric, or no rows"),
        ({"halves": (0.5, 2.0)}, "test has auc = 2"),
        ({"ci95_rows": (-5.0, 7.0)}, "test has auc = -5"),
    ],
)
def test_a_number_out_of_range_is_refused(store, changed, fault):
    store.append(made_result(leak={"test": replace(BLOCK, **changed)}))
    with pytest.raises(StoreError, match=fault):
        store.records()


def test_damaged_lines_and_cells_are_computed_again(store):
    store.append(made_result(key="a"))
    store.append(made_result(key="b"))
    store.cell("c").write(CellFacts(), lambda folder: folder.mkdir())
    path, facts = store.folder / "records.jsonl", store.cell("c").path / "cell.json"
    path.write_bytes(path.read_bytes().replace(b'"b"', b'"x"'))
    facts.write_bytes(facts.read_bytes()[:-3])
    with pytest.raises(StoreError, match="line 2 .*checksum"):
        store.records()
    with pytest.raises(StoreError, match=r"cell.json is damaged .*--retry-errors"):
        store.cell("c").read()
    store.forget_failures()
    assert list(store.records()) == ["a"]
    assert store.cell("c").read() is None


def test_other_schema_is_refused(store):
    (store.folder / "records.jsonl").write_text('{"schema": 99, "key": "a"}\n')
    with pytest.raises(StoreError, match="line 1 has schema 99, expected 1"):
        store.records()


@pytest.mark.parametrize("write", [
    lambda store: store.lock(),
    lambda store: store.append(made_result(key="a")),
    lambda store: store.write_settings("", MANIFEST),
    lambda store: store.cell("c").write(CellFacts(), lambda folder: folder.mkdir()),
])  # fmt: skip
def test_folder_that_cannot_be_written(tmp_path, write):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="(Not a directory|File exists); choose"):
        write(Store(tmp_path / "file"))


def test_lock_that_cannot_be_made(store):
    (store.folder / ".lock").mkdir()
    with pytest.raises(StoreError, match="cannot write to"):
        store.lock()


def test_a_cell_folder_is_checked_before_it_is_needed(tmp_path):
    def make(folder):
        folder.mkdir(parents=True)
        (folder / "file").touch()

    CellFolder(tmp_path / "a" / "b" / "cell").check(make)
    assert not list(tmp_path.iterdir())
    with pytest.raises(StoreError, match="got .*, which exists: name"):
        CellFolder(tmp_path).check(make)
    with pytest.raises(StoreError, match="cannot write to /proc/x/y"):
        CellFolder(Path("/proc/x/y")).check(make)


def test_environment_names_no_person_and_no_place(store):
    store.write_settings("", MANIFEST)
    text = (store.folder / "env.json").read_text()
    assert "torch" in text
    assert "/" not in text


def test_a_store_does_not_write_through_a_link(store, tmp_path_factory):
    target = tmp_path_factory.mktemp("elsewhere") / "file"
    target.write_text("keep\n")
    for name in ("records.jsonl", "spec.toml", "env.json", "manifest.json"):
        (store.folder / name).symlink_to(target)
    with pytest.raises(StoreError, match="cannot write to .*symbolic link"):
        store.append(made_result(key="a"))
    with pytest.raises(StoreError, match="cannot write to .*symbolic link"):
        store.trim()
    store.write_settings("", MANIFEST)
    store.forget(lambda record: True, skip_damaged=True)
    assert target.read_text() == "keep\n"


def test_what_a_killed_run_was_writing_is_removed(store):
    store.cell("c").write(CellFacts(), lambda folder: folder.mkdir())
    (store.folder / ".writing-spec.toml").touch()
    (store.folder / "cells" / ".writing-d-123").mkdir()
    (store.folder / "cells" / "d.partial-123").touch()
    (store.folder / "cells" / "d.partial").touch()
    store.lock().release()
    assert sorted(path.name for path in (store.folder / "cells").iterdir()) == ["c", "d.partial"]
    assert not list(store.folder.glob(".writing-*"))


def test_only_a_line_feed_ends_a_line(store):
    """A carriage return, one flipped bit of a minus, neither hides a line nor lets ``trim`` cut others off."""
    for key in "abc":
        store.append(made_result(key=key, error="a-b"))
    path = store.folder / "records.jsonl"
    damaged = path.read_bytes().replace(b"a-b", b"a\rb", 1)
    path.write_bytes(damaged)
    store.trim()
    assert path.read_bytes() == damaged
    with pytest.raises(StoreError, match="line 1 is damaged"):
        store.records()
    store.forget_failures()
    assert list(store.records()) == ["b", "c"]


@pytest.mark.parametrize("name", [".lock", "cells"])
def test_a_linked_lock_or_folder_of_cells_is_refused(store, tmp_path_factory, name):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / ".writing-mine").mkdir()
    (store.folder / name).symlink_to(elsewhere)
    with pytest.raises(StoreError, match=f"no link in .*{name}: remove"):
        store.lock()
    assert (elsewhere / ".writing-mine").exists()


def test_what_lies_in_the_place_of_a_cell_is_replaced(store, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "work").touch()
    cells = store.folder / "cells"
    (cells / "a").mkdir(parents=True)
    (cells / "a" / "active.safetensors").touch()
    (cells / "b").touch()
    (cells / "c").symlink_to(elsewhere)
    (cells / ".writing-x").symlink_to(elsewhere)
    (store.folder / ".writing-records.jsonl").mkdir()
    store.lock().release()
    for key in "abc":
        store.cell(key).write(CellFacts(), lambda folder: folder.mkdir())
        assert store.cell(key).read() == CellFacts()
    assert (elsewhere / "work").exists()


def test_facts_that_are_no_file_are_damage_that_can_be_healed(store):
    (store.folder / "cells" / "a" / "cell.json").mkdir(parents=True)
    (store.folder / "cells" / "a.partial").mkdir()
    with pytest.raises(StoreError, match="is damaged .*--retry-errors"):
        store.cell("a").read()
    store.forget_failures()
    assert not list((store.folder / "cells").iterdir())


def written(folder, name="c"):
    """Return a cell with one model."""
    cell = CellFolder(folder / name)
    cell.write(CellFacts(), lambda path: save_file({"w": torch.ones(3)}, path.mkdir() or path / "active.safetensors"))
    return cell


def test_other_models_are_not_taken_for_those_of_the_cell(tmp_path):
    """Flipped bytes, a file of another cell and a lost file: the cell must be computed again."""
    for k, damage in enumerate(
        (
            lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x41"),
            lambda path: save_file({"w": torch.zeros(3)}, path),
            lambda path: path.unlink(),
        )
    ):
        cell = written(tmp_path, f"c{k}")
        assert cell.read() == CellFacts()
        damage(cell.path / "active.safetensors")
        assert cell.read() is None
        cell.write(CellFacts(), lambda path: path.mkdir())
        assert cell.read() == CellFacts()


def test_the_facts_of_another_cell_are_not_taken_for_its_own(tmp_path):
    written(tmp_path, "a").path.rename(tmp_path / "b")
    assert CellFolder(tmp_path / "b").read() is None


def test_every_change_of_the_facts_is_noticed(tmp_path):
    cell = written(tmp_path)
    path = cell.path / "cell.json"
    content = path.read_bytes()
    for old, new in ((b'"ok"', b'"no"'), (b'"seconds":0.0', b'"seconds":9.0'), (b'"models"', b'"modelz"')):
        assert old in content
        path.write_bytes(content.replace(old, new))
        with pytest.raises(StoreError, match="cell.json is damaged .*--retry-errors"):
            cell.read()
