"""Fashion-MNIST: its file format, the cut of its images between parties, and one clear line for every wrong file."""

import gzip
import hashlib
import math
import tomllib
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from vflsec.base.errors import DataError, UsageError, VflsecError
from vflsec.cli import cli, options
from vflsec.core import registry
from vflsec.data import bundle
from vflsec.data.dataset import Card
from vflsec.data.partition import DataSpec, split_dataset
from vflsec.papers.datasets import FOLDER, fashion_mnist
from vflsec.run import spec as specs
from vflsec.run.plan import build_cell

N_TRAIN, N_TEST = 60, 20
TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = fashion_mnist.FILES
RNG = np.random.default_rng(0)
ARRAYS = {
    TRAIN_IMAGES: RNG.integers(256, size=(N_TRAIN, 28, 28), dtype=np.uint8),
    TRAIN_LABELS: RNG.permutation(np.arange(N_TRAIN, dtype=np.uint8) % 10),
    TEST_IMAGES: RNG.integers(256, size=(N_TEST, 28, 28), dtype=np.uint8),
    TEST_LABELS: RNG.permutation(np.arange(N_TEST, dtype=np.uint8) % 10),
}
IMAGES = np.concatenate([ARRAYS[TRAIN_IMAGES], ARRAYS[TEST_IMAGES]])
LABELS = np.concatenate([ARRAYS[TRAIN_LABELS], ARRAYS[TEST_LABELS]])


def idx_bytes(values: np.ndarray, kind: int = 8) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, kind, values.ndim]) + sizes + values.tobytes()


@pytest.fixture(params=["plain", "gzip", "gzip called plain", "plain called gzip"])
def any_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    for name, values in ARRAYS.items():
        content = idx_bytes(values)
        suffix = ".gz" if request.param.endswith("gzip") else ""
        (tmp_path / (name + suffix)).write_bytes(gzip.compress(content) if request.param[0] == "g" else content)
    return tmp_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, values in ARRAYS.items():
        (tmp_path / name).write_bytes(idx_bytes(values))
    return tmp_path


def message(folder: Path, **settings: int) -> str:
    with pytest.raises(VflsecError) as caught:
        fashion_mnist.load(data_dir=str(folder), **settings)
    text = str(caught.value)
    assert "\n" not in text
    return text


# The file format


def test_bytes_written_by_hand_are_read():
    content = bytes.fromhex("00000803 00000002 00000001 00000003 010203 fdfeff")
    assert fashion_mnist._parse(content, 3, Path("x")).tolist() == [[[1, 2, 3]], [[253, 254, 255]]]
    assert fashion_mnist._parse(bytes.fromhex("00000801 00000002 0900"), 1, Path("x")).tolist() == [9, 0]


@pytest.mark.parametrize("shape", [(0,), (300,), (1, 1, 1), (3, 5, 2), (0, 28, 28)])
def test_what_is_written_is_read_again(shape):
    values = RNG.integers(256, size=shape, dtype=np.uint8)
    np.testing.assert_array_equal(fashion_mnist._parse(idx_bytes(values), len(shape), Path("x")), values, strict=True)


@pytest.mark.parametrize("dimensions", [1, 3])
def test_a_file_cut_off_anywhere_or_too_long_is_refused(dimensions):
    content = idx_bytes(np.ones((2,) * dimensions, np.uint8))
    for wrong in [content[:n] for n in range(len(content))] + [content + b"\0"]:
        with pytest.raises(DataError, match="^images: .*download it again$"):
            fashion_mnist._parse(wrong, dimensions, Path("images"))


def test_a_gzip_file_cut_off_or_damaged_anywhere_is_refused(tmp_path):
    path, content = tmp_path / "labels.gz", idx_bytes(ARRAYS[TRAIN_LABELS])
    packed = gzip.compress(content, mtime=0)
    cut = [packed[:n] for n in range(2, len(packed))]
    damaged = [packed[:n] + bytes([packed[n] ^ 1]) + packed[n + 1 :] for n in range(10, len(packed))]
    for wrong in cut + damaged:
        path.write_bytes(wrong)
        with pytest.raises(DataError, match=r"labels\.gz: .*whole gzip .*downl"):
            fashion_mnist._unpack(path)
    path.write_bytes(packed)
    assert fashion_mnist._unpack(path) == content


# The dataset


def test_all_parties_agree_on_rows_labels_and_the_official_test_set(any_folder):
    dataset = fashion_mnist.load(data_dir=str(any_folder))
    assert dataset.labels.sort_index().tolist() == LABELS.tolist()
    assert dataset.test_ids is not None
    assert dataset.test_ids.tolist() == list(range(N_TRAIN, N_TRAIN + N_TEST))
    assert (dataset.name, dataset.metric, len(dataset.classes)) == ("fashion-mnist", "accuracy", 10)
    orders = [table.frame.index for table in dataset.parties]
    assert not orders[0].equals(orders[1])
    assert all(sorted(order) == list(range(N_TRAIN + N_TEST)) and not order.is_monotonic_increasing for order in orders)


@pytest.mark.parametrize(
    ("parties", "seen"),
    [
        (2, [np.s_[:, :, :14], np.s_[:, :, 14:]]),
        (4, [np.s_[:, :14, :14], np.s_[:, :14, 14:], np.s_[:, 14:, :14], np.s_[:, 14:, 14:]]),
    ],
)
def test_parties_see_their_part_row_by_row_as_bytes(folder, parties, seen):
    tables = fashion_mnist.load(data_dir=str(folder), parties=parties).parties
    assert [table.name for table in tables] == ["active", *(f"passive_{k}" for k in range(1, parties))]
    for table, part in zip(tables, seen, strict=True):
        expected = IMAGES[part]
        assert table.image == (1, *expected.shape[1:])
        found = table.frame.sort_index().to_numpy()
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found.reshape(-1, *table.image)[:, 0], expected)
    assert len({column for table in tables for column in table.frame.columns}) == 28 * 28


def test_columns_are_named_by_their_place_in_the_whole_image(folder):
    for table in fashion_mnist.load(data_dir=str(folder), parties=4).parties:
        for column in ("pixel_3_5", "pixel_3_20", "pixel_27_0", "pixel_14_14"):
            if column in table.frame:
                _, row, place = column.split("_")
                assert table.frame[column].sort_index().tolist() == IMAGES[:, int(row), int(place)].tolist()


def test_partition_keeps_the_test_set_and_the_shape(folder):
    split = split_dataset(fashion_mnist.load(data_dir=str(folder)), DataSpec(n_labeled=40), 0)
    assert split.ids["test"].tolist() == list(range(N_TRAIN, N_TRAIN + N_TEST))
    assert (len(split.ids["train"]), len(split.ids["unlabeled"])) == (40, 20)
    for party in split.parties.values():
        assert party.layout.image == (1, 28, 14)
        assert party.features["train"].shape == (40, math.prod(party.layout.image))
    # Scaling keeps the order of a pixel's values.
    right = split.parties["passive_1"].features["test"].reshape(-1, 28, 14)
    np.testing.assert_array_equal(right[:, 9, 3].argsort(), IMAGES[N_TRAIN:, 9, 17].argsort(kind="stable"))


def test_fewer_rows_are_a_subset_and_the_test_set_stays(folder):
    kept = {}
    for rows in (1, 25, 40, N_TRAIN, None):
        dataset = fashion_mnist.load(data_dir=str(folder), rows=rows)
        assert dataset.test_ids is not None
        assert dataset.test_ids.tolist() == list(range(N_TRAIN, N_TRAIN + N_TEST))
        ids = dataset.labels.index.difference(dataset.test_ids)
        assert len(ids) == (rows or N_TRAIN)
        assert dataset.labels.loc[ids].tolist() == LABELS[ids].tolist()
        left = dataset.parties[0].frame.loc[ids].to_numpy().reshape(-1, 28, 14)
        np.testing.assert_array_equal(left, IMAGES[ids, :, :14])
        kept[rows] = set(ids)
    assert kept[1] < kept[25] < kept[40] < kept[N_TRAIN] == kept[None]
    assert kept[25] != set(range(25))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rows": 61}, "expected rows <= 60, the images in "),
        ({"rows": 0}, "expected rows > 0, got 0"),
        ({"parties": 3}, "unknown parties '3'. Known: 2, 4"),
    ],
)
def test_impossible_options(folder, settings, expected):
    assert message(folder, **settings).startswith(expected)
    with pytest.raises(UsageError):
        fashion_mnist.load(data_dir=str(folder), **settings)


# Wrong files


@pytest.mark.parametrize("name", fashion_mnist.FILES)
def test_a_missing_file_says_where_it_was_looked_for_and_how_to_get_it(folder, name):
    (folder / name).unlink()
    assert message(folder).startswith(f"fashion-mnist: expected {name} or {name}.gz in {folder}")
    assert message(folder).endswith(" and give --data-dir FOLDER")


def test_without_data_dir_it_is_the_folder_of_the_package(tmp_path, monkeypatch):
    assert Path("/usr/share/datasets/fashion-mnist") == fashion_mnist.PACKAGE_FOLDER
    monkeypatch.setattr(fashion_mnist, "PACKAGE_FOLDER", tmp_path / "none")
    with pytest.raises(DataError, match=f"train-images-idx3-ubyte.gz in {tmp_path / 'none'}, found neither"):
        fashion_mnist.load()


def test_a_folder_of_ones_own_that_lacks_files_is_not_replaced_by_the_package(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(fashion_mnist, "PACKAGE_FOLDER", folder)
    assert f" in {tmp_path / 'none'}, found neither" in message(tmp_path / "none")


def test_the_home_folder_may_be_short(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert fashion_mnist.source_files(f"~/{folder.name}") == [folder / name for name in fashion_mnist.FILES]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (TRAIN_IMAGES, b"<!DOCTYPE html>", "which begins 00 00 08 03"),
        (TRAIN_IMAGES, idx_bytes(ARRAYS[TRAIN_LABELS]), "begins 00 00 08 03, got 00 00 08 01; download it again"),
        (TEST_LABELS, idx_bytes(ARRAYS[TEST_IMAGES]), "begins 00 00 08 01, got 00 00 08 03; download it again"),
        (TEST_LABELS, idx_bytes(ARRAYS[TEST_LABELS], kind=9), "begins 00 00 08 01, got 00 00 09 01; download it again"),
        (TEST_LABELS, b"", "00 00 08 01, got nothing"),
        (TEST_IMAGES, idx_bytes(ARRAYS[TEST_IMAGES])[:-1], "own header, got 15695"),
        (TRAIN_LABELS, gzip.compress(idx_bytes(ARRAYS[TRAIN_LABELS]), mtime=0)[:-9], "a whole gzip file"),
        (TRAIN_LABELS, idx_bytes(ARRAYS[TRAIN_LABELS][1:]), "60 images in train-images-idx3-ubyte, got 59"),
        (TEST_LABELS, idx_bytes(ARRAYS[TRAIN_LABELS]), "20 images in t10k-images-idx3-ubyte"),
        (TRAIN_LABELS, idx_bytes(np.full(N_TRAIN, 10, np.uint8)), "labels 0 to 9, got 10"),
        (
            TEST_IMAGES,
            idx_bytes(np.zeros((N_TEST, 32, 28), np.uint8)),
            "expected images of 28 x 28 pixels, got 32 x 28",
        ),
    ],
    ids=range(11),
)
def test_a_wrong_file_is_named_in_one_line(folder, name, content, expected):
    (folder / name).write_bytes(content)
    text = message(folder)
    assert text.startswith(f"{folder / name}: ")
    assert expected in text


# The card and the package


def test_the_card_is_complete():
    path = FOLDER / "fashion-mnist.toml"
    assert set(tomllib.loads(path.read_text("utf-8"))) == set(Card.__dataclass_fields__)
    card = bundle.get_card("fashion-mnist", FOLDER)
    assert (card.license, card.rows, card.columns) == ("MIT", 70_000, 784)
    assert "No personal data" in card.notes
    assert registry.list_all("datasets")["fashion-mnist"].target == "vflsec.papers.datasets.fashion_mnist:load"


def test_the_package_must_hold_what_the_card_says(any_folder, monkeypatch):
    monkeypatch.setattr(fashion_mnist, "PACKAGE_FOLDER", any_folder)
    with pytest.raises(DataError, match="^expected .*sha256 1441.*Reinstall dataset-fashion-mnist$"):
        fashion_mnist.load()
    whole = b"".join(idx_bytes(values) for values in ARRAYS.values())
    card = replace(bundle.get_card("fashion-mnist", FOLDER), sha256=hashlib.sha256(whole).hexdigest())
    monkeypatch.setattr(bundle, "get_card", lambda *_: card)
    assert fashion_mnist.load().card == card


@pytest.mark.long
@pytest.mark.skipif(not fashion_mnist.PACKAGE_FOLDER.is_dir(), reason="needs apt install dataset-fashion-mnist")
def test_the_package_itself():
    dataset = fashion_mnist.load()
    assert dataset.test_ids is not None
    assert (len(dataset.labels), len(dataset.test_ids)) == (70_000, 10_000)
    assert dataset.labels.loc[dataset.test_ids].value_counts().to_dict() == dict.fromkeys(range(10), 1_000)
    assert dataset.labels.loc[:7].tolist() == [9, 0, 0, 3, 0, 2, 7, 2]
    assert dataset.labels.loc[60_000:60_007].tolist() == [9, 2, 1, 1, 6, 1, 4, 6]


# The command line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {}),
        (["--data-dir", "some/folder"], {"options": {"data_dir": "some/folder"}}),
        (["--data-dir", "2024"], {"options": {"data_dir": "2024"}}),
        (["--data-dir", 'a "b" \\c é'], {"options": {"data_dir": 'a "b" \\c é'}}),
        (["--data-dir", "a", "--set", "data.options.data_dir=b"], {"options": {"data_dir": "b"}}),
        (["--data-dir", "a", "--set", "data.options.rows=9"], {"options": {"data_dir": "a", "rows": 9}}),
    ],
)
def test_data_dir_on_the_command_line_is_an_option_of_the_dataset(words, expected):
    found = {}

    @click.command()
    @options.settings
    @options.data_dir
    def command(assignments, **chosen):
        found.update(options.resolve({}, assignments, **chosen))

    result = CliRunner().invoke(command, words)
    assert result.exit_code == 0, result.output
    assert found.get("data", {}) == expected


def test_data_dir_on_the_command_line_wins_over_a_file_of_settings_and_keeps_the_rest():
    file = {"data": {"n_labeled": 7, "options": {"data_dir": "old", "parties": 4}}}
    found = options.resolve(file, (), data_dir="new")
    assert found == {"data": {"n_labeled": 7, "options": {"data_dir": "new", "parties": 4}}}
    assert file["data"]["options"]["data_dir"] == "old"


def test_keys_follow_the_files_and_not_their_folder(folder, tmp_path_factory):
    def key(where):
        settings = {"dataset": "fashion-mnist", "data": {"options": {"data_dir": str(where)}}}
        return build_cell(specs.read_training({**settings, "methods": ["fedsplitnn"]}), "fedsplitnn", 0).key

    moved = tmp_path_factory.mktemp("moved")
    for file in folder.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    assert key(moved) == key(folder)
    labels = moved / TEST_LABELS
    labels.write_bytes(labels.read_bytes()[:-1] + bytes([(labels.read_bytes()[-1] + 1) % 10]))
    assert key(moved) != key(folder)


def test_its_card_is_shown_without_its_files(monkeypatch, tmp_path):
    monkeypatch.setattr(fashion_mnist, "PACKAGE_FOLDER", tmp_path)
    shown = CliRunner().invoke(cli, ["show", "dataset", "fashion-mnist"])
    assert shown.exit_code == 0, shown.output
    assert "license: MIT" in shown.output
    assert "apt install dataset-fashion-mnist" in shown.output
