"""Datasets of this process, which settings name by their content."""

from __future__ import annotations

import hashlib

import pandas as pd

from vflsec.base.errors import UsageError
from vflsec.data.dataset import VerticalDataset

PREFIX = "memory:"
_KEPT: dict[str, VerticalDataset] = {}


def keep(dataset: VerticalDataset) -> str:
    """Keep ``dataset`` for this process, and return the name that settings use for it.

    The name ends in a hash of the content, so that results of other data are never taken for results of these.
    """
    name = f"{PREFIX}{dataset.name}-{_hash(dataset)}"
    _KEPT[name] = dataset
    return name


def has(name: str) -> bool:
    """Whether this process has the dataset that ``keep`` has named so."""
    return name in _KEPT


def get_kept(name: str) -> VerticalDataset:
    """Return the dataset that ``keep`` has named so.

    Raises:
        UsageError: this process has none.
    """
    if name not in _KEPT:
        raise UsageError(
            f"expected the data frames of {name.removeprefix(PREFIX)} in this process, found none: make them again "
            f"with vflsec.dataset(...), or save them as files"
        )
    return _KEPT[name]


def _hash(dataset: VerticalDataset) -> str:
    tables = [*dataset.parties, *([dataset.source] if dataset.source else [])]
    hashed = hashlib.sha256(repr((dataset.classes, dataset.test_ids is None)).encode())
    for table in tables:
        roles = (
            sorted(table.categorical),
            sorted(table.signed_log),
            table.image,
            table.impute,
            sorted(table.rare.items()),
        )
        hashed.update(repr((table.name, list(table.frame.columns), roles)).encode())
        hashed.update(pd.util.hash_pandas_object(table.frame).to_numpy().tobytes())
    hashed.update(pd.util.hash_pandas_object(dataset.labels).to_numpy().tobytes())
    if dataset.test_ids is not None:
        hashed.update(pd.util.hash_pandas_object(dataset.test_ids).to_numpy().tobytes())
    return hashed.hexdigest()[:12]
