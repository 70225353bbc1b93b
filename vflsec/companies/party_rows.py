"""What one party brings to a job: its columns of the common rows, and the labels at the active party."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import pandas as pd

from vflsec.base.errors import DataError, UsageError
from vflsec.base.layout import Layout
from vflsec.base.seeds import derive
from vflsec.cipher.roles.exchange import RoleName
from vflsec.companies.job import JobFile
from vflsec.data.dataset import PartyTable
from vflsec.data.description import PartyFile
from vflsec.data.encode import ColumnEncoder
from vflsec.data.files import load_party
from vflsec.run.plan import load_dataset

PARTY: Mapping[RoleName, str] = {"passive": "passive_1", "active": "active"}
"""What a role is called where all parties are in one process."""


@dataclass(frozen=True)
class PartyRows:
    """A party's part of the rows, in the order of their ids, which is the same at the other party.

    Attributes:
        features: float32 (n, d) of ``train`` and ``test``.
        layout: what the d columns are.
        ids: (n,) of both splits.
        labels: class index (n,) of both splits; None at the passive party.
        classes: their names; none at the passive party.
    """

    features: dict[str, np.ndarray]
    layout: Layout
    ids: dict[str, pd.Index]
    labels: dict[str, np.ndarray] | None = None
    classes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """SHA-256 of the ids of both splits in their order: equal at both parties, or they hold other rows."""
        digest = sha256()
        for split, ids in self.ids.items():
            digest.update(f"{split} {len(ids)}\n".encode())
            for row in ids:
                text = str(row).encode()
                digest.update(len(text).to_bytes(8, "big") + text)
        return digest.hexdigest()


def read_dataset(job: JobFile, role: RoleName) -> PartyRows:
    """Return the columns of ``role`` in the job's registered dataset, and nothing of the other party's.

    Raises:
        UsageError: an unknown dataset, or one of more than two parties.
        DataError: the parties do not hold the same rows.
    """
    assert job.dataset is not None
    dataset = load_dataset(job.dataset, **job.options)
    if len(dataset.parties) != 2:
        raise UsageError(f"expected a dataset of two parties, got {len(dataset.parties)} in {job.dataset}")
    table = next(party for party in dataset.parties if party.name == PARTY[role])
    labels = dataset.labels if role == "active" else None
    return arrange(table, job, labels, dataset.classes if role == "active" else (), dataset.test_ids)


def read_file(path: Path, job: JobFile, role: RoleName, roles: PartyFile, *, key: str, label: str | None) -> PartyRows:
    """Return the columns of ``role`` in its own file.

    Args:
        path: CSV with a header line, or Parquet.
        job: the agreement.
        role: ``passive`` or ``active``.
        roles: which columns, and what they are.
        key: the column of row ids.
        label: the column of labels; None at the passive party.

    Raises:
        DataError: the file is wrong; the line names column and row.
    """
    table, labels, classes = load_party(path, role, roles, key=key, label=label)
    return arrange(table, job, labels, classes)


def arrange(
    table: PartyTable,
    job: JobFile,
    labels: pd.Series | None,
    classes: tuple[str, ...],
    test_ids: pd.Index | None = None,
) -> PartyRows:
    """Split and encode a party's rows, using only what both parties know.

    The passive party has no labels, so that the split is not stratified; it is the one of ``data.stratify=false``.

    Raises:
        DataError: a class is missing in either split.
        UsageError: a split has no row.
    """
    ids = split(table.frame.index, job, test_ids)
    encoder = ColumnEncoder(table, table.frame.loc[ids["train"]])
    codes = None if labels is None else {name: labels.loc[rows].to_numpy(np.int64) for name, rows in ids.items()}
    for name, values in (codes or {}).items():
        counts = np.bincount(values, minlength=len(classes))
        if not counts.all():
            missing = classes[int(counts.argmin())]
            raise DataError(
                f"expected every class among the {len(values)} {name} rows, got no {missing!r}: change test"
            )
    features = {name: encoder(table.frame.loc[rows]) for name, rows in ids.items()}
    return PartyRows(features, encoder.layout, ids, codes, classes)


def split(ids: pd.Index, job: JobFile, test_ids: pd.Index | None = None) -> dict[str, pd.Index]:
    """Return the training and test ids, each sorted: the official test set, or one drawn from the job's seed.

    Raises:
        UsageError: the job's ``test`` leaves no training or no test row.
    """
    ordered = ids.sort_values()
    if test_ids is not None:
        official = ordered.isin(test_ids)
        return {"train": ordered[~official], "test": ordered[official]}
    drawn = ordered[np.random.default_rng(derive(job.seed, "split", "test")).permutation(len(ordered))]
    count = round(job.test * len(ordered))
    if not 0 < count < len(ordered):
        raise UsageError(
            f"expected training and test rows with test = {job.test:g}, got {len(ordered) - count} and {count} of "
            f"{len(ordered)} rows: change test in the job, or bring more rows"
        )
    return {"train": drawn[count:].sort_values(), "test": drawn[:count].sort_values()}
