"""Optical digits (scikit-learn): 1,797 images of 8 x 8 pixels, of which each party sees a part."""

from __future__ import annotations

import numpy as np
import pandas as pd

from vflsec.core.checks import one_of
from vflsec.data import bundle
from vflsec.data.dataset import VerticalDataset

NAME = "digits"
CLASSES = tuple("0123456789")

ALL, FIRST, SECOND = slice(0, 8), slice(0, 4), slice(4, 8)
# (rows, columns) of the image that each party sees, the active party first.
PARTS = {
    "2": [(ALL, FIRST), (ALL, SECOND)],
    "4": [(FIRST, FIRST), (FIRST, SECOND), (SECOND, FIRST), (SECOND, SECOND)],
}


def load(*, parties: int = 2) -> VerticalDataset:
    """Images of handwritten digits cut into halves or quadrants, 10 classes. 1,797 rows, 2 or 4 parties.

    Args:
        parties: 2 for the left (active) and right half, 32 pixels each; 4 for the quadrants, 16 pixels each, in
            reading order.

    Raises:
        UsageError: another number of parties.
    """
    from sklearn.datasets import load_digits  # imported where it is needed: slow

    one_of(PARTS, parties=str(parties))
    pixels, labels = load_digits(return_X_y=True)
    images = pixels.reshape(-1, 8, 8).astype(np.uint8)
    bundle.verify(NAME, images.tobytes())
    ids = bundle.shuffled_ids(NAME, len(images))
    names = np.array([[f"pixel_{row}_{column}" for column in range(8)] for row in range(8)])
    tables = []
    for party, (rows, columns) in zip(["active", *bundle.passive_names(parties - 1)], PARTS[str(parties)], strict=True):
        part = images[:, rows, columns].reshape(len(images), -1)
        frame = pd.DataFrame(part, index=ids, columns=names[rows, columns].ravel().tolist())
        tables.append(bundle.party_table(NAME, party, frame))
    series = pd.Series(labels, index=ids, name="label", dtype="int64")
    return VerticalDataset(NAME, tuple(tables), series, CLASSES, card=bundle.card(NAME))
