"""Writes small files in the exact layout of datasets that cannot be bundled."""

import gzip

import numpy as np

from vflsec.data import avazu, criteo, nus_wide


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


def write_nus_wide(folder, sizes=(60, 30), *, seed=0):
    """Write all files: images with one concept, with two and with none, blanks and tabs at the ends of lines."""
    rng = np.random.default_rng(seed)
    for part, rows in zip(nus_wide.PARTS, sizes, strict=True):
        truth = np.eye(10, dtype=int)[np.arange(rows) % 10]
        truth[0, :2] = 1
        truth[1] = 0
        for j, path in enumerate(nus_wide._labels(folder, part)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{value}\n" for value in truth[:, j]))
        for path, width in zip(nus_wide._features(folder, part), nus_wide.FEATURES.values(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            values = rng.random((rows, width)) + truth[:, :1]
            path.write_text("".join(" ".join(f"{value:.6f}" for value in row) + " \n" for row in values))
        tags = nus_wide._tags(folder, part)
        tags.parent.mkdir(parents=True, exist_ok=True)
        words = (rng.random((rows, nus_wide.TAGS)) < 0.02).astype(int)
        tags.write_text("".join("\t".join(map(str, row)) + "\t\n" for row in words))
    return folder
