"""Optical digits (scikit-learn): 1,797 images of 8 x 8 pixels, of which each party holds a part."""

import numpy as np
import pandas as pd

from vflsec.data import bundle
from vflsec.data.dataset import VerticalDataset

NAME = "digits"
CLASSES = tuple("0123456789")


def load(*, parties: int = 2) -> VerticalDataset:
    """Images of handwritten digits cut into halves or quadrants, 10 classes. 1,797 rows, 2 or 4 parties.

    Args:
        parties: 2 for the left (active) and right half, 32 pixels each; 4 for the quadrants, 16 pixels each, in
            reading order.

    Raises:
        UsageError: another number of parties.
    """
    from sklearn.datasets import load_digits  # slow to import

    pixels, labels = load_digits(return_X_y=True)
    images = pixels.reshape(-1, 8, 8).astype(np.uint8)
    bundle.verify(NAME, images.tobytes())
    ids = bundle.shuffle_ids(NAME, len(images))
    series = pd.Series(labels, index=ids, name="label", dtype="int64")
    tables = bundle.split_images(NAME, images, ids, parties)
    return VerticalDataset(NAME, tables, series, CLASSES, card=bundle.get_card(NAME))
