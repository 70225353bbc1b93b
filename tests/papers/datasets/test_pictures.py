"""Images from the user's own folders: pixels and pairs are known, and damage is named in one line."""

import io
import os
import shutil
import zlib

import numpy as np
import pytest
from PIL import Image

import vflsec
from tests.papers.datasets.layouts import write_bhi, write_imagenet, write_modelnet
from vflsec.base.errors import DataError, UsageError
from vflsec.data.partition import DataSpec, split_dataset
from vflsec.papers.datasets import bhi, imagenet_100, modelnet, pictures

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

WRITERS = {"bhi": write_bhi, "modelnet": write_modelnet, "imagenet-100": write_imagenet}
OPTIONS = {
    "bhi": {"size": 8},
    "modelnet": {"classes": 3, "size": 8},
    "imagenet-100": {"size": 8},
}


@pytest.fixture(scope="session")
def originals(tmp_path_factory):
    return {name: write(tmp_path_factory.mktemp(name)) for name, write in WRITERS.items()}


@pytest.fixture
def copied(originals, tmp_path):
    """Return a function that copies the folder of a dataset, so that it can be damaged."""
    return lambda name: shutil.copytree(originals[name], tmp_path / name)


def load(name, folder, **options):
    return vflsec.load_dataset(name, data_dir=str(folder), **OPTIONS[name], **options)


def opened(path):
    with Image.open(path) as image:
        return image.copy()


def images(party):
    """Return the pixels (n, c, h, w) of a party, in order of the ids."""
    return party.frame.sort_index().to_numpy().reshape(-1, *party.image)


# BHI


@pytest.mark.long
@pytest.mark.parametrize("pairs", ["drawn", "ordered"])
def test_bhi_pairs_patches_of_a_patient_with_one_label(originals, pairs):
    data = vflsec.load_dataset("bhi", data_dir=str(originals["bhi"]), pairs=pairs, size=50)
    assert data.metric == "f1"
    assert len(data.labels) == 10 * (9 // 2 + 6 // 2)
    assert data.labels.sum() == 10 * 3
    # Every image is at most once in a row, and both images of a row are of its patient and label.
    every = {path: np.asarray(opened(path)) for path in originals["bhi"].glob("*/*/*.png")}
    owner = {one.transpose(2, 0, 1).tobytes(): path for path, one in every.items() if one.shape == (50, 50, 3)}
    seen = []
    for left, right, label in zip(*(images(party) for party in data.parties), data.labels.sort_index(), strict=True):
        found = [owner[one.tobytes()] for one in (left, right) if one.tobytes() in owner]
        assert {path.parent.name for path in found} == {str(label)}
        assert len({path.parent.parent for path in found}) == 1
        seen += found
        if pairs == "ordered" and len(found) == 2:
            names = sorted(path.name for path in found[0].parent.iterdir())
            assert names.index(found[1].name) == names.index(found[0].name) + 1
            assert names.index(found[0].name) % 2 == 0
    assert len(seen) == len(set(seen)) in (2 * 70, 2 * 70 - 1)


def test_bhi_tests_on_other_patients(originals):
    data = load("bhi", originals["bhi"])
    assert len(data.test_ids) == 2 * 7
    # Ids count the pairs by patient, seven each.
    patients = {patient // 7 for patient in data.test_ids}
    assert len(patients) == 2
    split = split_dataset(data, DataSpec(), 0)
    assert len(split.labels["test"]) == 14
    assert not {row // 7 for row in split.ids["train"]} & patients
    few = load("bhi", originals["bhi"], rows=40)
    assert set(few.labels.index) < set(data.labels.index)
    assert set(few.test_ids) == set(data.test_ids) & set(few.labels.index)
    np.testing.assert_array_equal(
        few.parties[1].frame.sort_index(), data.parties[1].frame.loc[few.labels.index].to_numpy()
    )


def test_bhi_scales_a_patch_of_a_border(originals):
    path = originals["bhi"] / "10253" / "0" / "10253_idx5_x1_y1001_class0.png"
    found = bhi._read_patch(path, 10)
    expected = opened(path).resize((10, 10), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(found, np.asarray(expected).transpose(2, 0, 1))
    assert opened(path).size == (50, 34)


def test_bhi_finds_the_patients_where_the_archive_has_them(originals, copied, tmp_path):
    expected = load("bhi", originals["bhi"])
    folder = copied("bhi")
    shutil.copytree(originals["bhi"], folder / bhi.NESTED)
    assert load("bhi", folder).parties[0].frame.equals(expected.parties[0].frame)
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.move(folder / bhi.NESTED, alone)
    assert load("bhi", alone).parties[0].frame.equals(expected.parties[0].frame)


# ModelNet


@pytest.mark.sampled
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("parties", [2, 4, 12])
def test_modelnet_gives_each_party_neighboring_views(tmp_path, parties, turned):
    write_modelnet(tmp_path, turned=turned)
    data = load("modelnet", tmp_path, parties=parties)
    each = 12 // parties
    assert data.classes == ("airplane", "bathtub", "night_stand")
    assert (len(data.parties), len(data.labels), len(data.test_ids)) == (parties, 27 * each, 9 * each)
    # Image v of object k has the gray level 10 v + k in its lower half.
    levels = np.stack([images(party)[:, 0, -1, -1] for party in data.parties], axis=1).astype(int)
    things = levels[:, 0] - 10 * (levels[:, 0] // 10)
    views = (levels - things[:, None]) // 10
    for k in range(parties):
        assert set(views[:, k]) == set(range(k * each + 1, (k + 1) * each + 1))
    assert (levels == 10 * views + things[:, None]).all()  # one object in a row
    test = views[-9 * each :].reshape(9, each, parties)
    assert (test == np.arange(1, 13).reshape(parties, each).T).all()  # the order of the views
    if each > 1:
        train = views[: -9 * each].reshape(18, each, parties)
        assert len({tuple(one[:, 0]) for one in train}) > 1
        assert (np.sort(train, axis=1) == np.arange(1, 13).reshape(parties, each).T).all()  # each view once


def test_modelnet_takes_the_first_classes_and_fewer_rows(originals):
    data = vflsec.load_dataset("modelnet", data_dir=str(originals["modelnet"]), classes=2, size=8, rows=20)
    assert data.classes == ("airplane", "bathtub")
    assert len(data.labels) == 20 + 2 * 3 * 3
    every = vflsec.load_dataset("modelnet", data_dir=str(originals["modelnet"]), classes=2, size=8)
    assert set(data.labels.index) < set(every.labels.index)
    kept = every.parties[2].frame.loc[data.labels.index]
    np.testing.assert_array_equal(data.parties[2].frame.sort_index(), kept.sort_index())
    split_dataset(data, DataSpec(), 0)


# ImageNet-100


def test_imagenet_is_cut_into_halves_of_the_middle_square(originals):
    data = load("imagenet-100", originals["imagenet-100"])
    left, right = (images(party) for party in data.parties)
    assert left.shape == right.shape == (400, 3, 8, 4)
    assert len(data.classes) == 100
    assert len(data.test_ids) == 100
    assert (data.labels.sort_index().to_numpy()[:300] == np.repeat(np.arange(100), 3)).all()
    colored = ~np.isin(data.labels.sort_index().to_numpy(), [5, 7])
    # Pixels beside the edge are blurred.
    assert (abs(left[colored][..., :3].astype(int) - 43) < 12).all()
    assert (abs(right[colored][..., 1:].astype(int) - 203) < 12).all()
    assert (left[..., :3].mean(axis=(1, 2, 3)) < 80).all()
    assert (right[..., 1:].mean(axis=(1, 2, 3)) > 160).all()


def test_a_square_of_a_photograph_is_known(tmp_path):
    pixels = np.zeros((20, 32, 3), dtype=np.uint8)
    pixels[:, 6:16] = (10, 20, 30)
    pixels[:, 16:26] = (110, 120, 130)
    Image.fromarray(pixels).save(tmp_path / "one.JPEG", "PNG")  # as one of ImageNet's is
    found = imagenet_100._read_square(tmp_path / "one.JPEG", 20)
    np.testing.assert_array_equal(found, pixels[:, 6:26].transpose(2, 0, 1))


def test_imagenet_takes_fewer_rows_and_classes_and_links(originals, tmp_path):
    for part in ("train", "val"):
        (tmp_path / part).mkdir()
        for source in (originals["imagenet-100"] / part).iterdir():
            (tmp_path / part / source.name).symlink_to(source)
    data = load("imagenet-100", tmp_path, rows=30, classes=5)
    assert len(data.classes) == 5
    assert len(data.labels) == 15 + 5
    few = load("imagenet-100", tmp_path, rows=6, classes=5)
    assert len(few.labels) == 6 + 5
    assert set(few.labels.index) < set(data.labels.index)


# All of them


@pytest.mark.parametrize("name", WRITERS)
def test_the_same_rows_are_drawn_each_time(name, originals):
    module = {"bhi": bhi, "modelnet": modelnet, "imagenet-100": imagenet_100}[name]
    first = load(name, originals[name], rows=25)
    assert load(name, originals[name], rows=25) is first
    module._load.cache_clear()
    again = load(name, originals[name], rows=25)
    assert again is not first
    for one, other in zip(first.parties, again.parties, strict=True):
        assert one.frame.equals(other.frame)
    assert first.test_ids.equals(again.test_ids)


@pytest.mark.parametrize("name", WRITERS)
def test_only_drawn_images_are_decoded(name, originals, monkeypatch):
    read, counts = pictures.read, []
    monkeypatch.setattr(pictures, "read", lambda *a: counts.append(1) or read(*a))
    data = load(name, originals[name], rows=11)
    views = 1 if name == "imagenet-100" else len(data.parties)  # images per row
    assert len(counts) == views * len(data.labels)


@pytest.mark.long
def test_the_utility_is_judged_by_f1_and_the_leak_by_auc(originals, tmp_path):
    report = vflsec.evaluate(
        dataset="bhi",
        data={"options": {"data_dir": str(originals["bhi"]), **OPTIONS["bhi"]}},
        attacks=["norm"],
        aux={"n": 20, "folds": 0},
        train={"epochs": 1},
        seeds=1,
        jobs=1,
        out=str(tmp_path / "run"),
    )
    (point, *_) = report.points
    assert point.utility.metric == "f1"
    assert point.leak.metric == "auc"


@pytest.mark.parametrize(("name", "shape"), [("modelnet", (27, 3)), ("imagenet-100", (100, 100))])
def test_they_are_trained_like_any_other(name, shape, originals):
    options = {"data_dir": str(originals[name]), **OPTIONS[name]}
    trained = vflsec.train(dataset=name, data={"options": options}, train={"epochs": 1})
    assert trained.predict("test").shape == shape


def test_a_changed_folder_is_another_dataset(copied):
    from vflsec.run.plan import find_dataset

    folder = copied("bhi")
    data = DataSpec(options={"data_dir": str(folder)})
    before = find_dataset("bhi").key(data)
    assert find_dataset("bhi").key(data) == before
    path = next(folder.glob("*/1/*.png"))
    path.unlink()
    after = find_dataset("bhi").key(data)
    assert after != before
    pictures._hash.cache_clear()
    other = next(folder.glob("*/0/*.png"))
    os.utime(other, (1, 1))
    assert find_dataset("bhi").key(data) != after


@pytest.mark.parametrize("name", WRITERS)
def test_errors_say_where_the_data_come_from(name, tmp_path):
    for options in ({}, {"data_dir": str(tmp_path / "none")}, {"data_dir": str(tmp_path)}):
        with pytest.raises(DataError, match="https://.*--data-dir FOLDER$"):
            vflsec.load_dataset(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bhi", {"pairs": "near"}, "unknown pairs 'near'"),
        ("bhi", {"rows": 0}, "expected rows > 0"),
        ("bhi", {"size": 0}, "expected size > 0"),
        ("modelnet", {"parties": 5}, "unknown parties '5'"),
        ("modelnet", {"classes": 1}, "expected classes >= 2"),
        ("imagenet-100", {"size": 7}, "expected an even size"),
        ("imagenet-100", {"classes": 101}, "expected 2 <= classes <= 100"),
    ],
)
def test_options_are_checked(name, options, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        vflsec.load_dataset(name, data_dir=str(tmp_path), **options)


# Damage


def png(pixels, **options):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", **options)
    return buffer.getvalue()


def chunk(kind, content):
    return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")


def bomb(side):
    """Return a PNG of few bytes that claims ``side`` x ``side`` pixels."""
    header = side.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")
    )


def text_bomb():
    """Return a small PNG whose compressed text unpacks to 100 MB."""
    good = png(np.zeros((50, 50, 3), dtype=np.uint8))
    return good[:33] + chunk(b"zTXt", b"a\0\0" + zlib.compress(b"\0" * 10**8)) + good[33:]


IMAGES = {
    "empty": (lambda b: b"", "got something else"),
    "cut in the header": (lambda b: b[:20], "image, got "),
    "cut in the pixels": (lambda b: b[: len(b) // 2], "image, got "),
    "cut at the end": (lambda b: b[:-12], "image, got "),
    "a byte of the pixels": (lambda b: b[:200] + bytes([b[200] ^ 1]) + b[201:], "image, got "),
    "a byte of the size": (lambda b: b[:19] + bytes([b[19] ^ 1]) + b[20:], "image, got |expected at most"),
    "no image": (lambda b: b"hello", "got something else"),
    "another format": (lambda b: b"BM" + b[2:], "got something else"),
    "gray": (lambda b: png(np.zeros((50, 50), dtype=np.uint8)), "expected the mode RGB, got L"),
    "transparent": (lambda b: png(np.zeros((50, 50, 4), dtype=np.uint8)), "mode RGB, got RGBA"),
    "deep": (lambda b: png(np.zeros((50, 50), dtype=np.uint16)), "expected the mode RGB, got I"),
    "large": (lambda b: png(np.zeros((51, 50, 3), dtype=np.uint8)), "at most 50 x 50 pixels, got 50 x 51"),
    "bomb": (lambda b: bomb(60_000), "image, got |at most 50 x 50"),
    "text bomb": (lambda b: text_bomb(), "image, got "),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_damage_of_an_image_is_named(kind, originals, tmp_path):
    change, message = IMAGES[kind]
    path = tmp_path / "one.png"
    path.write_bytes(change((originals["bhi"] / "10254" / "0" / "10254_idx5_x1_y1001_class0.png").read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        bhi._read_patch(path, 8)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_every_changed_byte_of_an_image_is_noticed_or_changes_nothing(tmp_path):
    good = png(np.random.default_rng(0).integers(0, 255, (6, 7, 3), dtype=np.uint8))
    path = tmp_path / "one.png"
    path.write_bytes(good)
    expected = bhi._read_patch(path, 6)
    passed = 0
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x55]) + good[place + 1 :])
        try:
            found = bhi._read_patch(path, 6)
        except DataError as error:
            assert "\n" not in str(error)  # noqa: PT017
        else:
            np.testing.assert_array_equal(found, expected)
            passed += 1
    for size in range(len(good)):
        path.write_bytes(good[:size])
        try:
            found = bhi._read_patch(path, 6)
        except DataError:
            continue
        np.testing.assert_array_equal(found, expected)
        passed += 1
    assert passed <= 12


@pytest.mark.long
def test_a_photograph_may_not_be_cut(originals, tmp_path):
    good = next((originals["imagenet-100"] / "train" / "n01440764").iterdir()).read_bytes()
    path = tmp_path / "one.JPEG"
    for size in range(0, len(good), 5):
        path.write_bytes(good[:size])
        with pytest.raises(DataError):
            imagenet_100._read_square(path, 8)
    for place in range(0, len(good), 3):  # it has no checksum; but the reader says one line or gives an image
        path.write_bytes(good[:place] + bytes([good[place] ^ 0xFF]) + good[place + 1 :])
        try:
            assert imagenet_100._read_square(path, 8).shape == (3, 8, 8)
        except DataError as error:
            assert "\n" not in str(error)  # noqa: PT017


def test_what_is_no_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "one.png")
    with pytest.raises(DataError, match="of at most .*something else"):
        bhi._read_patch(tmp_path / "one.png", 8)
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(pictures.MAX_FILE_BYTES + 1)
    with pytest.raises(DataError, match="33,554,432 bytes, got 33,554,433"):
        bhi._read_patch(tmp_path / "large.png", 8)
    (tmp_path / "dead.png").symlink_to(tmp_path / "none.png")
    with pytest.raises(DataError, match="image, got .*No such file"):
        bhi._read_patch(tmp_path / "dead.png", 8)


def renamed(pattern, change):
    def apply(folder):
        path = sorted(folder.glob(pattern))[0]
        path.rename(path.with_name(change(path.name)))

    return apply


def removed(pattern):
    def apply(folder):
        for path in sorted(folder.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return apply


def also(pattern, change):
    def apply(folder):
        path = sorted(folder.glob(pattern))[0]
        shutil.copy(path, path.parent / change(path.name))

    return apply


def made(name):
    return lambda folder: (folder / name).mkdir(parents=True)


def written(pattern, content):
    """Change every image, so that the drawn ones are among them."""

    def apply(folder):
        for path in folder.glob(pattern):
            path.write_bytes(content)

    return apply


NAMES = {
    "bhi": {
        "class in the name": (
            renamed("10254/0/*", lambda n: n.replace("class0", "class1")),
            "10254_idx5_xX_yY_class0.png",
        ),
        "patient in the name": (renamed("10254/0/*", lambda n: n.replace("10254", "10255")), "named 10254_idx5"),
        "letter in a place": (renamed("10254/1/*", lambda n: n.replace("_x", "_z")), "got '10254_idx5_z"),
        "suffix": (renamed("10254/1/*", lambda n: n.replace(".png", ".jpg")), "class1.jpg'"),
        "line break": (renamed("10254/1/*", lambda n: n + "\n"), r"class1.png\\n'"),
        "class folder": (renamed("10254/1", lambda n: "2"), "expected the folders 0 and 1, got '2'"),
        "patient folder": (renamed("10254", lambda n: "1025x"), "patient in .*'1025x'"),
        "another patient": (renamed("10254", lambda n: "10554"), "named 10554_idx5"),
        "place twice": (also("10254/0/*", lambda n: n.replace("_x", "_x0")), "one image of each place"),
        "both classes": (
            lambda f: shutil.copy(
                f / "10254/0/10254_idx5_x1_y1001_class0.png", f / "10254/1/10254_idx5_x1_y1001_class1.png"
            ),
            "one image of each place",
        ),
        "no images": (removed("10254/*/*"), "folders 0 and 1, found none"),
        "no classes": (removed("10254/*"), "folders 0 and 1, found none"),
        "no pair": (removed("*/*/*_x[12345]*"), "images in the folders|two images"),
        "one patient": (
            lambda f: [shutil.rmtree(f / str(patient)) for patient in range(10254, 10263)],
            "two patients .*found 1.*https",
        ),
        "cut images": (written("*/*/*.png", b"\x89PNG\r\n\x1a\n"), "expected a PNG image, got"),
    },
    "modelnet": {
        "class in the name": (
            renamed("bathtub/train/*", lambda n: n.replace("bathtub", "bathtux")),
            "got 'bathtux_0001",
        ),
        "class folder": (renamed("bathtub", lambda n: "bathtuc"), "expected images named bathtuc_NUMBER_VIEW.png"),
        "missing view": (removed("airplane/train/airplane_0002_007.png"), "airplane_0002, found no view 007"),
        "view 13": (
            also("airplane/train/*_012.png", lambda n: n.replace("_012", "_013")),
            "got 'airplane_0001_013.png'",
        ),
        "view 0": (
            renamed("airplane/test/*_001.png", lambda n: n.replace("_001", "_000")),
            "got 'airplane_0007_000.png'",
        ),
        "view twice": (
            also("airplane/train/*_002.png", lambda n: n.replace("_002", "_060_030_002")),
            "view 2 of airplane_0001 once",
        ),
        "angle": (
            renamed("airplane/train/*_002.png", lambda n: n.replace("_002", "_060_060_002")),
            "_060_060_002.png'",
        ),
        "letter": (renamed("airplane/train/*_002.png", lambda n: n.replace("_002", "_0o2")), "airplane_0001_0o2.png'"),
        "suffix": (renamed("airplane/train/*_002.png", lambda n: n[:-4] + ".jpg"), "airplane_0001_002.jpg'"),
        "no test": (removed("airplane/test"), "folder test in .*airplane"),
        "no train": (renamed("airplane/train", lambda n: "trein"), "folder train in .*airplane"),
        "empty": (removed("airplane/test/*"), "airplane/test: expected images, found none"),
        "in both": (
            lambda f: [shutil.copy(one, f / "airplane" / "test") for one in f.glob("airplane/train/*_0001_*")],
            "airplane_0001 in both",
        ),
        "few classes": (removed("bathtub"), "folders of 3 .*found 2.*https"),
        "one bit": (written("*/*/*.png", png(np.zeros((9, 9), dtype=bool))), "RGB or RGBA, got 1"),
        "large": (written("*/*/*.png", bomb(4096)), "at most 2048 x 2048 pixels, got 4096 x 4096"),
    },
    "imagenet-100": {
        "no val": (removed("val"), "folder val in .*https"),
        "no train": (renamed("train", lambda n: "trein"), "folder train in"),
        "class missing in val": (removed("val/n01440764"), "100 classes, got 99"),
        "class missing in train": (removed("train/n01440764"), "100 classes, got 99"),
        "class renamed": (renamed("train/n01440764", lambda n: "n01440765"), "got n01440764 in one"),
        "letter in a class": (renamed("train/n01440764", lambda n: "n0144076x"), "like n01558993, got 'n0144076x'"),
        "too many": (
            lambda f: [shutil.copytree(f / part / "n01440764", f / part / "n00000001") for part in ("train", "val")],
            "100 classes, got 101",
        ),
        "other folder": (made("train/other"), "n01558993, got 'other'"),
        "suffix": (
            renamed("train/n01440764/*", lambda n: n.replace("JPEG", "JPEH")),
            "named NAME.JPEG, got 'n0.*JPEH'",
        ),
        "line break": (renamed("train/n01440764/*", lambda n: "\n" + n), r"named NAME.JPEG, got '\\n"),
        "empty class": (removed("val/n01440764/*"), "val/n01440764: expected photographs, found none"),
        "empty file": (written("val/n01440764/*", b""), "PNG image, got something else"),
        "no photograph": (written("val/n01440764/*", b"GIF89a" + bytes(99)), "PNG image, got something"),
        "large": (written("val/n01440764/*", bomb(20_000)), "image, got |at most 10000 x 10000"),
        "deep": (written("val/n01440764/*", png(np.zeros((9, 9), dtype=np.uint16))), "CMYK or RGBA, got I"),
    },
}


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in NAMES.items() for kind in kinds])
def test_damage_of_a_folder_is_named(name, kind, copied):
    change, message = NAMES[name][kind]
    folder = copied(name)
    change(folder)
    with pytest.raises(DataError, match=message) as caught:
        load(name, folder)
    assert "\n" not in str(caught.value)
