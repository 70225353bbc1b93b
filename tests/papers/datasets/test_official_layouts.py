"""Datasets from the user's own copies: read from files in their exact layout, and damage of their form is named."""

import gzip
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import vflsec
from tests.papers.datasets.layouts import write_avazu, write_criteo, write_nus_wide, write_ppdai
from vflsec.base.errors import DataError, UsageError
from vflsec.data.partition import DataSpec, split_dataset
from vflsec.papers.datasets import avazu, criteo, nus_wide, ppdai, sampling


@pytest.mark.parametrize("compressed", [True, False])
def test_avazu_is_split_as_in_fedhssl(tmp_path, compressed):
    path = write_avazu(tmp_path, compressed=compressed)
    data = vflsec.load_dataset("avazu", data_dir=str(tmp_path), rows=400)
    raw = pd.read_csv(path, dtype=str, keep_default_na=False)
    active, passive = data.parties
    assert tuple(active.frame) == avazu.FEDHSSL[0]
    assert tuple(passive.frame) == avazu.FEDHSSL[1]
    assert len(active.categorical | passive.categorical) == 14
    assert len(data.labels) == 400
    chosen = raw.iloc[data.labels.index]
    assert (chosen["click"].astype(int).to_numpy() == data.labels.to_numpy()).all()
    assert (chosen["hour"].str[-2:].astype(float).to_numpy() == passive.frame["hour"].to_numpy()).all()
    assert (chosen["device_ip"].to_numpy() == active.frame["device_ip"].astype(str).to_numpy()).all()


def test_avazu_is_split_as_in_vflhlp(tmp_path):
    write_avazu(tmp_path)
    data = vflsec.load_dataset("avazu", data_dir=str(tmp_path), rows=300, split="vflhlp", categories=5)
    assert [len(party.frame.columns) for party in data.parties] == [7, 7, 8]
    assert sum(len(party.categorical) for party in data.parties) == 22
    split = split_dataset(data, DataSpec(), 0)
    assert max(column.width for party in split.parties.values() for column in party.layout.columns) == 6


def test_fewer_rows_are_a_subset_of_more_and_do_not_depend_on_the_pieces(tmp_path, monkeypatch):
    path = write_avazu(tmp_path)

    def ids(rows):
        sampling._draw_rows.cache_clear()
        return set(sampling.draw_rows(path, avazu.LAYOUT, rows, seed=1).index)

    few, many, all_ = ids(50), ids(200), ids(5000)
    assert few < many < all_
    assert len(few) == 50
    assert len(all_) == 600
    monkeypatch.setattr(sampling, "PIECE", 37)
    assert ids(50) == few
    assert ids(200) == many


@pytest.mark.statistical
def test_every_row_is_drawn_equally_often(tmp_path):
    path = write_avazu(tmp_path, 200)
    counts = np.zeros(200)
    for seed in range(300):
        sampling._draw_rows.cache_clear()
        counts[sampling.draw_rows(path, avazu.LAYOUT, 40, seed).index] += 1
    expected = 300 * 40 / 200
    assert abs(counts - expected).max() < 4.5 * (expected * 0.8) ** 0.5


def test_criteo_has_categories_and_counts_with_gaps(tmp_path):
    path = write_criteo(tmp_path)
    data = vflsec.load_dataset("criteo", data_dir=str(tmp_path), rows=500)
    raw = pd.read_csv(path, sep="\t", header=None, dtype=str, keep_default_na=False).iloc[data.labels.index]
    active, passive = data.parties
    assert (raw[0].astype(int).to_numpy() == data.labels.to_numpy()).all()
    expected = pd.to_numeric(raw[1], errors="coerce").to_numpy()
    np.testing.assert_array_equal(passive.frame["I1"].to_numpy(), expected)
    assert (raw[14].replace("", "(missing)").to_numpy() == active.frame["C1"].astype(str).to_numpy()).all()
    assert len(active.frame.columns) == 26
    split_dataset(data, DataSpec(), 0)


def test_nus_wide_keeps_images_with_one_concept(tmp_path):
    write_nus_wide(tmp_path)
    data = vflsec.load_dataset("nus-wide", data_dir=str(tmp_path))
    active, passive = data.parties
    assert len(data.labels) == 58 + 28
    assert len(data.test_ids) == 28
    assert active.frame.shape[1] == 634
    assert passive.frame.shape[1] == 1000
    assert (data.labels.to_numpy()[:58] == np.delete(np.arange(60) % 10, [0, 1])).all()
    values = np.loadtxt(tmp_path / "Low_Level_Features" / "Test_Normalized_EDH.dat")[2:]
    np.testing.assert_allclose(active.frame.loc[data.test_ids, "EDH_0"], values[:, 0], rtol=1e-6)


def test_ppdai_has_the_columns_of_the_original():
    assert len(ppdai.COLUMNS) == len(set(ppdai.COLUMNS)) == 228
    every = [column for group in (ppdai.ACTIVE, *ppdai.GROUPS) for column in group]
    assert len(every) == len(set(every)) == 187
    assert set(every) <= set(ppdai.COLUMNS)
    assert [len(group) for group in (ppdai.ACTIVE, *ppdai.GROUPS)] == [6, 6, 119, 8, 15, 33]
    # The order of the original around the blocks.
    place = ppdai.COLUMNS.index
    assert ppdai.COLUMNS[4:6] == ("UserInfo_4", "WeblogInfo_1")
    assert ppdai.COLUMNS[place("UserInfo_5") - 1] == "WeblogInfo_18"
    assert ppdai.COLUMNS[place("Education_Info8") + 1] == "WeblogInfo_19"
    assert ppdai.COLUMNS[place("WeblogInfo_21") + 1] == "WeblogInfo_23"
    assert ppdai.COLUMNS[place("WeblogInfo_58") + 1] == "ThirdParty_Info_Period1_1"
    assert ppdai.COLUMNS[-19:] == (*(f"SocialNetwork_{k}" for k in range(1, 18)), "target", "ListingInfo")


@pytest.mark.sampled
@pytest.mark.parametrize(("parties", "widths"), [(2, [6, 181]), (4, [6, 6, 119, 56]), (6, [6, 6, 119, 8, 15, 33])])
def test_ppdai_is_split_by_groups(tmp_path, parties, widths):
    path = write_ppdai(tmp_path)
    data = vflsec.load_dataset("ppdai", data_dir=str(tmp_path), parties=parties, rows=400)
    assert [len(party.frame.columns) for party in data.parties] == widths
    raw = pd.read_csv(path, encoding="gbk", dtype=str, keep_default_na=False).set_index("Idx")
    chosen = raw.loc[data.labels.index.astype(str)]
    assert len(chosen) == 400
    assert (chosen["target"].astype(int).to_numpy() == data.labels.to_numpy()).all()
    for party in data.parties:
        for name in party.frame:
            if name in ppdai.CATEGORIES:
                assert (party.frame[name].astype(str).to_numpy() == chosen[name].str.strip().to_numpy()).all()
            else:
                expected = pd.to_numeric(chosen[name], errors="coerce").to_numpy(float)
                absent = (expected == -1) & (name.startswith(("Third", "Social")))
                np.testing.assert_array_equal(party.frame[name].to_numpy(), np.where(absent, np.nan, expected))
    assert (data.classes, data.metric) == (("paid back", "default"), "auc")
    split_dataset(data, DataSpec(), 0)
    few = vflsec.load_dataset("ppdai", data_dir=str(tmp_path), rows=50)
    assert set(few.labels.index) < set(data.labels.index)


def test_ppdai_is_found_in_the_folder_of_the_archive(tmp_path):
    path = write_ppdai(tmp_path)
    (tmp_path / "Training Set").mkdir()
    moved = path.rename(tmp_path / "Training Set" / path.name)
    assert ppdai.source_files(str(tmp_path)) == [moved]


@pytest.mark.long
def test_they_are_trained_like_any_other(tmp_path):
    for name, write in (
        *(("avazu", write_avazu), ("criteo", write_criteo), ("nus-wide", write_nus_wide)),
        ("ppdai", write_ppdai),
    ):
        write(tmp_path / name)
        options = {"options": {"data_dir": str(tmp_path / name)}}
        trained = vflsec.train(dataset=name, data=options, train={"epochs": 2})
        assert len(trained.predict("test"))


@pytest.mark.parametrize("name", ["avazu", "criteo", "nus-wide", "ppdai"])
def test_errors_say_where_the_data_come_from(tmp_path, name):
    with pytest.raises(DataError, match="come with vflsec: .*https://.*FOLDER"):
        vflsec.load_dataset(name)
    with pytest.raises(DataError, match="none: download it from https://"):
        vflsec.load_dataset(name, data_dir=str(tmp_path))


def damaged(path, change):
    """Change the text of a file, which may be compressed."""
    packed = path.suffix == ".gz"
    content = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
    changed = change(content)
    path.write_bytes(gzip.compress(changed) if packed else changed)


AVAZU_DAMAGE = {
    "header": (lambda b: b.replace(b"banner_pos", b"banner_pox", 1), r"line 1: expected the names id,click,hour"),
    "no header": (lambda b: b.split(b"\n", 1)[1], r"line 1: expected the names id,click,hour"),
    "comma lost": (lambda b: b.replace(b",1005,", b",1005", 1), r"line 2: expected 24 fields"),
    "comma more": (lambda b: b.replace(b",1005,", b",1005,,", 1), r"line 2: expected 24 fields, got 25"),
    "click": (lambda b: b.replace(b",0,141021", b",7,141021"), r"'click', row \d+: .*'7'"),
    "hour": (lambda b: b.replace(b",141021", b",14102x"), r"column 'hour', row \d+: expected YYMMDDHH"),
    "number": (lambda b: b.replace(b",1005,", b",10o5,"), r"'C1', row \d+: .*'10o5'"),
    "bytes": (lambda b: b.replace(b"00000000", b"\xff\xfe000000", 1), r"expected utf-8 text"),
    "empty": (lambda b: b"", r"line 1: expected the names"),
    "header alone": (lambda b: b.split(b"\n", 1)[0] + b"\n", r"expected data rows, got none"),
    "cut": (lambda b: b[: len(b) // 2 - 40], r"expected 24 fields"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", AVAZU_DAMAGE)
def test_damage_of_avazu_is_named(tmp_path, kind):
    change, message = AVAZU_DAMAGE[kind]
    damaged(write_avazu(tmp_path), change)
    with pytest.raises(DataError, match=message) as caught:
        vflsec.load_dataset("avazu", data_dir=str(tmp_path), rows=600)
    assert "\n" not in str(caught.value)


def test_a_cut_archive_is_named(tmp_path):
    path = write_avazu(tmp_path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match="gzip archive, got Compressed file"):
        vflsec.load_dataset("avazu", data_dir=str(tmp_path), rows=600)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b"label\t" + b, r"line 1: expected 40 fields, got 41"),
        (lambda b: b.replace(b"\t", b" "), r"line 1: expected 40 fields"),
        (lambda b: b.replace(b"\n0\t", b"\n2\t"), r"'label', row \d+: .*'2'"),
        (lambda b: b.replace(b"\n1\t", b"\n1\tx", 1), r"'I1', row \d+: .*'x"),
    ],
)
def test_damage_of_criteo_is_named(tmp_path, change, message):
    damaged(write_criteo(tmp_path), change)
    with pytest.raises(DataError, match=message):
        vflsec.load_dataset("criteo", data_dir=str(tmp_path), rows=600)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "Low_Level_Features/Train_Normalized_CH.dat",
            lambda b: b.replace(b".", b"x", 1),
            r"expected 64 numbers a line",
        ),
        ("Low_Level_Features/Train_Normalized_CH.dat", lambda b: b[: b.rindex(b"\n", 0, -2) + 1], r"expected 60 lines"),
        ("Low_Level_Features/Test_Normalized_WT.dat", lambda b: b.replace(b" ", b"", 1), r"expected 128"),
        ("NUS_WID_Tags/Train_Tags1k.dat", lambda b: b.replace(b"1\t", b"3\t", 1), r"expected 0 or 1 everywhere"),
        ("NUS_WID_Tags/Test_Tags1k.dat", lambda b: b"", r"expected 1000 numbers a line"),
        ("Groundtruth/TrainTestLabels/Labels_sky_Train.txt", lambda b: b.replace(b"1", b"x", 1), r"expected 1 numbers"),
    ],
)
def test_damage_of_nus_wide_is_named(tmp_path, file, change, message):
    write_nus_wide(tmp_path)
    damaged(tmp_path / file, change)
    with pytest.raises((DataError, UsageError), match=message):
        vflsec.load_dataset("nus-wide", data_dir=str(tmp_path))


def nth(b, column, change, line=1):
    """Change a field of a line of the master file."""
    lines = b.split(b"\n")
    fields = lines[line].split(b",")
    place = ppdai.COLUMNS.index(column)
    fields[place] = change(fields[place])
    lines[line] = b",".join(fields)
    return b"\n".join(lines)


PPDAI_DAMAGE = {
    "header": (lambda b: b.replace(b"UserInfo_14", b"UserInfo_l4", 1), r"line 1: expected the names Idx,UserInfo_1,"),
    "no header": (lambda b: b.split(b"\n", 1)[1], r"line 1: expected the names Idx"),
    "test file": (lambda b: b.replace(b"target,", b"", 1), r"line 1: expected the names Idx"),
    "comma lost": (lambda b: b.replace(b"\n10002,", b"\n10002", 1), r"line 3: expected 228 fields, got 227"),
    "comma more": (lambda b: nth(b, "UserInfo_3", lambda v: v + b","), r"line 2: expected 228 fields, got 229"),
    "semicolons": (lambda b: b.replace(b",", b";"), r"line 1: expected the names"),
    "label": (lambda b: nth(b, "target", lambda v: b"2"), "'target', row 1: .*'2'"),
    "no label": (lambda b: nth(b, "target", lambda v: b"", 7), "'target', row 7: .*''"),
    "id": (lambda b: nth(b, "Idx", lambda v: b"1000l"), "'Idx', row 1: .*'1000l'"),
    "id twice": (lambda b: nth(b, "Idx", lambda v: b"10002"), "'Idx', row 2: .*'10002'"),
    "date": (lambda b: nth(b, "ListingInfo", lambda v: b"2014/13/1"), r"row 1: expected YYYY/M/D, got '2014/13/1'"),
    "date form": (lambda b: nth(b, "ListingInfo", lambda v: b"2014-3-1"), r"row 1: expected YYYY/M/D, got '2014-3-1'"),
    "number": (
        lambda b: nth(b, "ThirdParty_Info_Period3_9", lambda v: b"3l"),
        "'ThirdParty_Info_Period3_9', row 1: .*'3l'",
    ),
    "infinity": (lambda b: nth(b, "UserInfo_18", lambda v: b"1e999"), r"'UserInfo_18', row 1: expected a number"),
    "word for a gap": (lambda b: nth(b, "UserInfo_18", lambda v: b"nan"), r"'UserInfo_18', row 1: expected a number"),
    "utf-8": (lambda b: b.decode("gbk").encode("utf-8"), r"expected gbk text, got"),
    "a byte": (lambda b: nth(b, "UserInfo_2", lambda v: b"\xff" + v[1:]), r"expected gbk text, got"),
    "half a character": (lambda b: nth(b, "UserInfo_2", lambda v: v[:-1]), r"expected gbk text, got|expected 228"),
    "empty": (lambda b: b"", r"line 1: expected the names"),
    "header alone": (lambda b: b.split(b"\n", 1)[0] + b"\n", r"expected data rows, got none"),
    "cut": (lambda b: b[: len(b) // 2 - 300], r"expected 228 fields"),
    "empty line": (lambda b: b + b"\n", r"line 602: expected 228 fields, got 1"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", PPDAI_DAMAGE)
def test_damage_of_ppdai_is_named(tmp_path, kind):
    change, message = PPDAI_DAMAGE[kind]
    damaged(write_ppdai(tmp_path), change)
    with pytest.raises(DataError, match=message) as caught:
        vflsec.load_dataset("ppdai", data_dir=str(tmp_path))
    assert "\n" not in str(caught.value)


def test_options_of_ppdai_are_checked(tmp_path):
    write_ppdai(tmp_path)
    with pytest.raises(UsageError, match="unknown parties '7'"):
        vflsec.load_dataset("ppdai", data_dir=str(tmp_path), parties=7)
    with pytest.raises(UsageError, match="expected categories >= 2"):
        vflsec.load_dataset("ppdai", data_dir=str(tmp_path), categories=1)


def test_a_changed_file_is_another_dataset(tmp_path):
    from vflsec.run.plan import find_dataset

    data = DataSpec(options={"data_dir": str(tmp_path)})
    path = write_criteo(tmp_path)
    before = find_dataset("criteo").key(data)
    damaged(path, lambda b: b + b"\n")
    assert find_dataset("criteo").key(data) != before
    assert criteo.source_files(str(tmp_path)) == [path]
    assert len(nus_wide.source_files(str(write_nus_wide(tmp_path)))) == 32


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell the peak of a process")
def test_a_file_of_a_million_rows_takes_little_memory(tmp_path):
    path = write_avazu(tmp_path, 2000, compressed=False)
    lines = path.read_bytes().split(b"\n", 1)
    with path.open("wb") as file:
        file.write(lines[0] + b"\n")
        for _ in range(500):
            file.write(lines[1])
    code = (
        "import sys, vflsec; d = vflsec.load_dataset('avazu', data_dir=sys.argv[1], rows=100_000);"
        "assert len(d.labels) == 100_000; print(open('/proc/self/status').read())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    peak = re.search(r"VmHWM:\s*(\d+) kB", done.stdout)[1]  # that of getrusage begins with the peak of this process
    assert int(peak) < 2_000_000
