"""Multiple Features (UCI): 2,000 handwritten digits with six sets of features, for up to six parties."""

import pandas as pd

from vflsec.base.checks import expect_known
from vflsec.data import bundle
from vflsec.data.dataset import VerticalDataset

NAME = "multiple-features"
CLASSES = tuple("0123456789")

# The default parties hold two weak, different views, so that neither predicts well alone.
PASSIVE = ["fourier", "profile_correlations", "karhunen_loeve", "pixel_averages"]


def load(*, parties: int = 2) -> VerticalDataset:
    """Handwritten digits described in six ways, 10 classes. 2,000 rows, 2 to 6 parties.

    Args:
        parties: 2 to 6. The active party holds Zernike moments and morphological features (53 columns), passive_1
            the Fourier coefficients (76). Further parties hold the profile correlations (216), the Karhunen-Loeve
            coefficients (64), the pixel averages (240); the sixth takes the 6 morphological features from the
            active party.

    Raises:
        UsageError: another number of parties.
    """
    expect_known([str(count) for count in range(2, len(PASSIVE) + 3)], parties=str(parties))
    arrays = bundle.read_arrays(NAME)
    ids = bundle.shuffle_ids(NAME, len(arrays["label"]))
    held = [["zernike", "morphological"], *([view] for view in PASSIVE[: parties - 1])]
    if parties == len(PASSIVE) + 2:
        held = [["zernike"], *held[1:], ["morphological"]]
    names = ["active", *bundle.name_passive(parties - 1)]
    blocks = {view: pd.DataFrame(arrays[view], ids).add_prefix(f"{view}_") for views in held for view in views}
    tables = tuple(
        bundle.make_table(NAME, name, pd.concat([blocks[view] for view in views], axis=1))
        for name, views in zip(names, held, strict=True)
    )
    labels = pd.Series(arrays["label"], index=ids, name="label", dtype="int64")
    return VerticalDataset(NAME, tables, labels, CLASSES, card=bundle.get_card(NAME))
