"""Reads a user's CSV or Parquet file into raw columns, and names the place of a wrong value."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from vflsec.core.errors import DataError

MISSING = "(missing)"
LARGEST = 1e30
"""Numbers must be below this: standardizing larger ones overflows."""
_GAP = ("nothing", "fill it or drop the row")


class RawTable(NamedTuple):
    """A file's columns before anything is converted: text as read from CSV, or Parquet's own types."""

    frame: pd.DataFrame
    file: str
    first_line: int  # number of the first data row: line 2 of a CSV, row 1 of a Parquet file
    toml: bool = True  # whether a TOML file names it, rather than options of the command line

    def place(self, column: str, position: int) -> str:
        """Return ``bank.csv, column 'age', line 7`` for the row at ``position``."""
        unit = "line" if self.first_line == 2 else "row"
        return f"{self.file}, column {column!r}, {unit} {position + self.first_line}"

    def setting(self, name: str, party: str = "") -> str:
        """Return the name of a party's setting: a key of the TOML file, or an option of the command line."""
        if not self.toml:
            return f"--{name.replace('_', '-')}"
        return f"parties.{party}.{name}" if party else name

    def numbers(self, column: str) -> np.ndarray:
        """Return a column as float64.

        Raises:
            DataError: a missing, infinite or non-numeric value.
        """
        raw = self.frame[column]
        if not (pd.api.types.is_numeric_dtype(raw.dtype) or _is_text(raw)):
            way_out = f"convert it, or list it in {self.setting('categorical')}"
            raise DataError(f"{self.file}, column {column!r}: expected numbers, got {raw.dtype}; {way_out}")
        values = pd.to_numeric(raw, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
        bad = np.flatnonzero(~(np.abs(values) < LARGEST))  # also NaN
        if len(bad):
            text = self._stripped(column)[bad[0]]
            mend = f"correct it, or list the column in {self.setting('categorical')}"
            got, way_out = (f"'{text}'", mend) if text else _GAP
            number = f"a number below {LARGEST:g}" if np.isfinite(values[bad[0]]) else "a finite number"
            raise DataError(f"{self.place(column, bad[0])}: expected {number}, got {got}; {way_out}")
        return values

    def categories(self, column: str) -> pd.Series:
        """Return a column as text, with ``(missing)`` in its gaps."""
        text = self._stripped(column)
        return text.where(text != "", MISSING)

    def keys(self, column: str, role: str) -> pd.Series:
        """Return a column as text without empty rows: ids and labels.

        Raises:
            DataError: an empty row.
        """
        text = self._stripped(column)
        gaps = np.flatnonzero(text == "")
        if len(gaps):
            got, way_out = _GAP
            raise DataError(f"{self.place(column, gaps[0])}: expected {role}, got {got}; {way_out}")
        return text

    def _stripped(self, column: str) -> pd.Series:
        """Return stripped text, empty in gaps; a column of whole floats is one of integers with gaps."""
        raw = self.frame[column]
        if pd.api.types.is_float_dtype(raw.dtype) and (raw.dropna() % 1 == 0).all():
            raw = raw.astype("Int64")
        return raw.astype(object).where(raw.notna(), "").astype(str).str.strip()


def _is_text(values: pd.Series) -> bool:
    return bool(pd.api.types.is_string_dtype(values.dtype) or pd.api.types.is_object_dtype(values.dtype))


def read_table(path: Path, encoding: str, separator: str, *, toml: bool = True) -> RawTable:
    """Read ``path``: Parquet by its suffix ``.parquet``, else CSV with a header line.

    Args:
        path: of the file.
        encoding: of a CSV.
        separator: of its fields.
        toml: whether a TOML file names it, for the way out in errors.

    Raises:
        DataError: no such file, or one that cannot be read as a table.
    """
    if len(separator) != 1:
        raise DataError(f"expected a separator of one character, got {separator!r}; for example ';'")
    if path.is_dir():
        raise DataError(f"expected a file {path}, got a folder; name a file in it")
    if not path.is_file():
        where = "paths are relative to the TOML file" if toml else "check the path"
        raise DataError(f"expected a file {path}, found none; {where}")
    if path.suffix == ".parquet":
        table = RawTable(_read_parquet(path), path.name, 1, toml)
    else:
        # Spreadsheet programs put a byte order mark in front, which would become part of the first column's name.
        encoding = "utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding
        _check_lines(path, encoding, separator, toml=toml)
        frame = pd.read_csv(path, encoding=encoding, sep=separator, dtype=str, keep_default_na=False, index_col=False)
        table = RawTable(frame, path.name, 2, toml)
    if table.frame.empty:
        raise DataError(f"{path.name}: expected data rows, got none; is the export complete?")
    return table


def _read_parquet(path: Path) -> pd.DataFrame:
    try:
        import pyarrow  # type: ignore[import-untyped]
    except ImportError:
        raise DataError(f"{path.name}: reading Parquet needs pyarrow: pip install 'vflsec[parquet]'") from None
    try:
        frame = pd.read_parquet(path, engine="pyarrow")
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path.name}: expected a Parquet file, got {reason}; export it again") from None
    return frame.reset_index(drop=frame.index.names == [None])  # the id may be the index


def _check_lines(path: Path, encoding: str, separator: str, *, toml: bool) -> None:
    """Reject what pandas would read silently: ragged lines, repeated names, an open quote at the end."""
    try:
        with path.open(encoding=encoding, newline="") as stream:
            lines = csv.reader(stream, delimiter=separator, strict=True)
            header = next(lines, [])
            _check_header(path.name, header)
            blank = 0
            for fields in lines:
                if not fields:
                    blank = blank or lines.line_num  # allowed at the end of the file only
                elif blank or len(fields) != len(header):
                    line, n_fields = (blank, 0) if blank else (lines.line_num, len(fields))
                    raise DataError(
                        f"{path.name}, line {line}: expected {len(header)} fields as in the header, got {n_fields}; "
                        f"is the file cut off, or is {separator!r} not its separator?"
                    )
    except UnicodeDecodeError as error:
        way_out = "set encoding in the TOML file, for example encoding = 'latin-1'" if toml else "save it as UTF-8"
        got = f"byte {error.object[error.start]:#x}"
        raise DataError(f"{path.name}: expected {error.encoding} text, got {got}; {way_out}") from None
    except LookupError:
        raise DataError(f"{path.name}: expected a known encoding, got {encoding!r}; for example 'utf-8'") from None
    except csv.Error as error:
        raise DataError(f"{path.name}, line {lines.line_num}: {error}; is the file cut off?") from None


def _check_header(file: str, header: list[str]) -> None:
    if not header:
        raise DataError(f"{file}: expected a header line with column names, got an empty file")
    double = sorted({name for name in header if header.count(name) > 1})
    if double:
        raise DataError(f"{file}, line 1: expected different column names, got {double[0]!r} twice; rename one")
