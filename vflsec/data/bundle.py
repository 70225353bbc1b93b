"""Shared parts of the datasets: cards, bundled arrays, shuffled tables, images cut into parts."""

import hashlib
import inspect
import tomllib
from collections.abc import Callable, Collection, Iterable, Sequence
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from vflsec.base.checks import expect_known
from vflsec.base.errors import DataError
from vflsec.base.seeds import derive
from vflsec.data.dataset import Card, PartyTable

FOLDER = Path(__file__).with_name("bundled")


def find_card(name: str, loader: Callable[..., object]) -> Card | None:
    """Return the card of a dataset without its files: it is bundled or beside the module of the loader."""
    folders = (FOLDER, Path(getattr(inspect.getmodule(loader), "__file__", None) or __file__).parent)
    return next((get_card(name, folder) for folder in folders if (folder / f"{name}.toml").is_file()), None)


def get_card(name: str, folder: Path = FOLDER) -> Card:
    """Return the card of the dataset ``name``, which is the file ``name.toml`` in ``folder``."""
    return msgspec.convert(tomllib.loads((folder / f"{name}.toml").read_text("utf-8")), Card)


def read_arrays(name: str) -> dict[str, np.ndarray]:
    """Return the arrays of the bundled dataset ``name``, by their names.

    Raises:
        DataError: the file is missing, or its hash is not the card's.
    """
    path = FOLDER / f"{name}.npz"
    if not path.is_file():
        raise DataError(f"expected {path}, which comes with vflsec; got no such file. Reinstall vflsec")
    content = path.read_bytes()
    verify(name, content)
    with np.load(BytesIO(content), allow_pickle=False) as archive:
        return dict(archive)


def verify(name: str, content: bytes, way_out: str = "Reinstall vflsec", folder: Path = FOLDER) -> None:
    """Raise DataError unless the sha256 of ``content`` is the one on the card of ``name`` in ``folder``."""
    sha256, expected = hashlib.sha256(content).hexdigest(), get_card(name, folder).sha256
    if sha256 != expected:
        raise DataError(f"expected {name} with sha256 {expected}, got {sha256}. {way_out}")


def find_files(name: str, folder: str | None, wanted: Iterable[Sequence[str]], page: str) -> list[Path]:
    """Return the files of a dataset in the user's folder, of each the first of several names that it may have.

    Raises:
        DataError: no folder was given, or a file is not there; the line says where the data come from.
    """
    way_out = f"download it from {page} and give --data-dir FOLDER"
    if folder is None:
        raise DataError(f"{name} does not come with vflsec: {way_out}")
    paths = []
    for names in wanted:
        path = next((path for path in (Path(folder).expanduser() / name for name in names) if path.is_file()), None)
        if path is None:
            raise DataError(f"{name}: expected {' or '.join(names)} in {folder}, found none: {way_out}")
        paths.append(path)
    return paths


def make_table(
    dataset: str,
    party: str,
    frame: pd.DataFrame,
    categorical: Collection[str] = (),
    signed_log: Collection[str] = (),
    **facts: Any,
) -> PartyTable:
    """Return a party's table with its rows in an order of its own, as companies would store them.

    Args:
        dataset: determines the fixed permutation, together with ``party``.
        party: ``active``, ``passive_1``, ...
        frame: the party's columns, indexed by id.
        categorical: categories among ``frame``'s columns; names of other parties' columns are ignored.
        signed_log: likewise for heavy-tailed numbers.
        facts: other attributes of the table.
    """
    order = np.random.default_rng(derive(0, dataset, party, "order")).permutation(len(frame))
    columns = frozenset(frame.columns)
    roles = columns & frozenset(categorical), columns & frozenset(signed_log)
    return PartyTable(party, frame.iloc[order], *roles, **facts)


def split_images(dataset: str, images: np.ndarray, ids: pd.Index, parties: int) -> tuple[PartyTable, ...]:
    """Return each party's part of gray ``images`` (n, height, width), with columns ``pixel_row_column``, row by row.

    Args:
        dataset: determines the parties' row orders.
        images: pixel values.
        ids: of the n rows.
        parties: 2 for the left (active) and right half; 4 for the quadrants in reading order.

    Raises:
        UsageError: another number of parties.
    """
    expect_known(("2", "4"), parties=str(parties))
    _, height, width = images.shape
    bands = (slice(height),) if parties == 2 else (slice(height // 2), slice(height // 2, height))
    sides = (slice(width // 2), slice(width // 2, width))
    names = np.array([[f"pixel_{row}_{column}" for column in range(width)] for row in range(height)])
    tables = []
    for party, region in zip(["active", *name_passive(parties - 1)], product(bands, sides), strict=True):
        part, columns = images[:, *region], names[region]
        frame = pd.DataFrame(part.reshape(len(part), -1), index=ids, columns=columns.ravel().tolist())
        tables.append(make_table(dataset, party, frame, image=(1, *columns.shape)))
    return tuple(tables)


def shuffle_ids(dataset: str, rows: int) -> pd.Index:
    """Return ids 0..rows-1 in a fixed random order, for a source that sorts its rows by class."""
    return pd.Index(np.random.default_rng(derive(0, dataset, "ids")).permutation(rows), name="id")


def name_passive(count: int) -> list[str]:
    """Return ``passive_1`` to ``passive_{count}``."""
    return [f"passive_{k}" for k in range(1, count + 1)]
