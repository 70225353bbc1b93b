"""Writes small files in the exact layout of datasets that cannot be bundled."""

import gzip
from functools import cache

import numpy as np
from PIL import Image

from vflsec.data import bundle, census_income
from vflsec.papers.datasets import avazu, criteo, nus_wide, ppdai


def write_avazu(folder, rows=600, *, compressed=True, seed=0):
    """Write ``train.gz`` or ``train.csv``: a header, hexadecimal categories, C20 that may be -1."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [",".join(avazu.COLUMNS)]
    for k in range(rows):
        click = int(rng.random() < 0.2)
        sites = [f"{rng.integers(0, 40) * (1 + click):08x}" for _ in range(9)]  # site_id to device_model
        counts = [rng.integers(320, 330), 50, rng.integers(1, 9), rng.integers(0, 3), 39, rng.choice([-1, 100075]), 23]
        lines.append(
            f"{10**18 + k},{click},141021{k % 24:02d},1005,{k % 3},{','.join(sites)},{k % 5},{k % 4},"
            f"{rng.integers(15000, 15010)},{','.join(map(str, counts))}"
        )
    text = ("\n".join(lines) + "\n").encode()
    path = folder / ("train.gz" if compressed else "train.csv")
    path.write_bytes(gzip.compress(text) if compressed else text)
    return path


def write_criteo(folder, rows=600, *, seed=0):
    """Write ``train.txt``: tabs, no header, empty and negative counts, empty categories."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for _ in range(rows):
        click = int(rng.random() < 0.3)
        counts = ["" if rng.random() < 0.2 else str(int(rng.integers(-2, 50)) + 5 * click) for _ in criteo.NUMBERS]
        codes = ["" if rng.random() < 0.1 else f"{rng.integers(0, 9):08x}" for _ in criteo.CATEGORIES]
        lines.append("\t".join([str(click), *counts, *codes]))
    path = folder / "train.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def write_ppdai(folder, rows=600, *, seed=0):
    """Write the master file: GBK, Chinese places, blanks after an operator, empty fields, -1 for absent numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ppdai.FILE
    path.write_bytes(make_ppdai(rows, seed))
    return path


@cache
def make_ppdai(rows, seed):
    """Return the content of the master file."""
    rng = np.random.default_rng(seed)
    lines = [",".join(ppdai.COLUMNS)]
    for k in range(rows):
        default = int(rng.random() < 0.2)
        fields = {name: str(rng.integers(0, 9) + 3 * default) for name in ppdai.COLUMNS}
        for name in ppdai.PERIODS:
            fields[name] = str(rng.choice([-1, 0, 20, 31415 * (1 + default)]))
        for name in ppdai.LOCATION:
            fields[name] = str(rng.choice(["深圳", "温州", "南充市", "四川省", "不详"]))
        fields |= {"Idx": str(10001 + k), "UserInfo_9": "中国移动 ", "UserInfo_11": "", "UserInfo_22": "D"}
        fields |= {"WeblogInfo_2": "", "WeblogInfo_20": f"I{k % 5}", "Education_Info2": "AM"[k % 2]}
        fields |= {"SocialNetwork_3": "-1", "target": str(default), "ListingInfo": f"2014/{1 + k % 12}/{1 + k % 28}"}
        lines.append(",".join(fields[name] for name in ppdai.COLUMNS))
    return ("\n".join(lines) + "\n").encode("gbk")


def write_nus_wide(folder, sizes=(60, 30), *, seed=0):
    """Write all files: images with one concept, with two and with none, blanks and tabs at the ends of lines."""
    rng = np.random.default_rng(seed)
    for part, rows in zip(nus_wide.PARTS, sizes, strict=True):
        truth = np.eye(10, dtype=int)[np.arange(rows) % 10]
        truth[0, :2] = 1
        truth[1] = 0
        for j, path in enumerate(folder / name for name in nus_wide._list_labels(part)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{value}\n" for value in truth[:, j]))
        for name, width in zip(nus_wide._list_features(part), nus_wide.FEATURES.values(), strict=True):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            values = rng.random((rows, width)) + truth[:, :1]
            path.write_text("".join(" ".join(f"{value:.6f}" for value in row) + " \n" for row in values))
        tags = folder / nus_wide._name_tags(part)
        tags.parent.mkdir(parents=True, exist_ok=True)
        words = (rng.random((rows, nus_wide.TAGS)) < 0.02).astype(int)
        tags.write_text("".join("\t".join(map(str, row)) + "\t\n" for row in words))
    return folder


def write_bhi(folder, patients=10, patches=(9, 6), *, seed=0):
    """Write 50 x 50 patches of ``patients``, so many of each class; one at a border is smaller."""
    rng = np.random.default_rng(seed)
    for patient in range(10253, 10253 + patients):
        for label, count in enumerate(patches):
            parent = folder / str(patient) / str(label)
            parent.mkdir(parents=True, exist_ok=True)
            for k in range(count):
                height = 34 if (patient, label, k) == (10253, 0, 0) else 50
                pixels = rng.integers(0, 120, (height, 50, 3), dtype=np.uint8)
                pixels[..., 0] += 100 * label
                place = f"x{1 + 50 * k}_y{1001 + 1000 * label}"
                Image.fromarray(pixels).save(parent / f"{patient}_idx5_{place}_class{label}.png")
    return folder


def write_modelnet(folder, classes=("airplane", "bathtub", "night_stand"), objects=(6, 3), *, side=40, turned=False):
    """Write 12 images of each object, so many for training and testing: view v of object k is gray at 10 v + k.

    ``turned`` writes the names of FedHSSL's renderer, with the angle.
    """
    for place, kind in enumerate(classes):
        first = 1
        for part, count in zip(("train", "test"), objects, strict=True):
            parent = folder / kind / part
            parent.mkdir(parents=True, exist_ok=True)
            for k in range(first, first + count):
                for view in range(1, 13):
                    pixels = np.full((side, side, 3), 10 * view + k, dtype=np.uint8)
                    pixels[: side // 2, place * 5 : place * 5 + 10] = 255
                    angle = f"060_{30 * (view - 1):03d}_" if turned else ""
                    Image.fromarray(pixels).save(parent / f"{kind}_{k:04d}_{angle}{view:03d}.png")
            first += count
    return folder


def write_imagenet(folder, photographs=(3, 1), *, seed=0):
    """Write JPEGs in 100 classes, wide and high, gray and CMYK ones: left of the middle dark, right bright."""
    rng = np.random.default_rng(seed)
    for k in range(100):
        word = f"n{1440764 + 1000 * k:08d}"
        for part, count in zip(("train", "val"), photographs, strict=True):
            parent = folder / part / word
            parent.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                height, width = ((40, 60), (60, 40), (40, 40))[(k + number) % 3]
                pixels = np.full((height, width, 3), 40, dtype=np.uint8)
                pixels[:, width // 2 :] = 200
                pixels += rng.integers(0, 8, pixels.shape, dtype=np.uint8)
                image = Image.fromarray(pixels).convert({5: "L", 7: "CMYK"}.get(k, "RGB"))
                name = f"{word}_{number}" if part == "train" else f"ILSVRC2012_val_{k * count + number + 1:08d}"
                image.save(parent / f"{name}.JPEG", "JPEG", quality=95)
    return folder


def write_census(folder, every=1, *, compressed=False):
    """Write UCI's two files from every n-th row of the bundled copy, with weights and years, which it leaves out."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = bundle.read_arrays("census-income")
    for name, is_test in zip(census_income.FILES, (False, True), strict=True):
        rows = np.flatnonzero(arrays["is_test"] == is_test)[::every]
        columns = []
        for column in census_income.COLUMNS:
            if column == "instance_weight":
                columns.append([f"{1000 + k % 977}.{k % 97:02d}" for k in range(len(rows))])
            elif column == "year":
                columns.append([str(94 + k % 2) for k in range(len(rows))])
            elif column == "label":
                columns.append(np.array(census_income.LABELS)[arrays["label"][rows]].tolist())
            elif f"{column}.categories" in arrays:
                columns.append(arrays[f"{column}.categories"][arrays[column][rows]].tolist())
            else:
                columns.append([str(value) for value in arrays[column][rows].tolist()])
        text = "".join(", ".join(row) + "\n" for row in zip(*columns, strict=True)).encode()
        path = folder / (f"{name}.gz" if compressed else name)
        path.write_bytes(gzip.compress(text, 1) if compressed else text)
    return folder
