"""Exchanges training rows for test rows of a split dataset, so that the same rows can be split in other ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.sparse import issparse, vstack

from vflsec.data.partition import Partition

SPLITS = ("train", "test")


def exchanged(data: Partition, rows: NDArray[np.integer]) -> Partition:
    """Return ``data`` with other training and test rows, encoded as before.

    All splits that hold training rows, such as ``aligned``, hold the new ones in their place. The result has no
    canaries.

    Args:
        data: a split dataset.
        rows: (n_train + n_test,) a permutation: the new training and test rows, by their positions in the old training
            and test rows together.
    """
    n_train = len(data.ids["train"])
    of_training = {
        split: pd.Index(data.ids["train"]).get_indexer(pd.Index(ids))
        for split, ids in data.ids.items()
        if split not in SPLITS
    }

    def swapped(by_split: dict[str, Any]) -> dict[str, Any]:
        pool = _stacked([by_split[split] for split in SPLITS])
        found = {**by_split, "train": pool[rows[:n_train]], "test": pool[rows[n_train:]]}
        for split in by_split.keys() & of_training.keys():
            at, own = of_training[split], by_split[split]
            if own is by_split["train"]:  # the same rows need no second copy
                found[split] = found["train"]
            elif (at >= 0).any():
                found[split] = _stacked([own, pool])[np.where(at >= 0, len(at) + rows[at], np.arange(len(at)))]
        return found

    parties = {name: replace(own, features=swapped(own.features)) for name, own in data.parties.items()}
    labels, ids, groups = (swapped(dict(own)) if own else {} for own in (data.labels, data.ids, data.groups))
    return replace(data, parties=parties, labels=labels, ids=ids, groups=groups, canaries=None)


def _stacked(parts: Sequence[Any]) -> Any:
    return vstack(parts, format="csr") if issparse(parts[0]) else np.concatenate(parts)
