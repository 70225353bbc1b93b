"""Reads a user's CSV or Parquet file into raw columns, and names the place of a wrong value."""

import codecs
import csv
import json
import re
import zlib
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import pandas as pd

from vflsec.base.checks import count
from vflsec.base.errors import DataError, clean
from vflsec.data.description import Format, PartyFile

MISSING = "(missing)"
MISSING_TEXTS = frozenset(["", "na", "n/a", "#n/a", "nan", "null", "none", "nat", "<na>"])
"""Texts, in small letters, that stand for a missing number, date, label or id."""
_USUAL_GAPS = ["NaN", "NaT", *{form(text) for text in MISSING_TEXTS for form in (str, str.upper, str.capitalize)}]
"""Those that pandas reads as gaps; a column of numbers with another spelling of them is read as text."""
MAX_NUMBER = 1e30
"""Numbers must be below this: standardizing larger ones overflows."""
_GAP = ("nothing", "fill it or drop the row")
EARLIEST, LATEST = 1700, 2200
"""The years of dates; others usually stand for a missing date, such as 9999-12-31."""
_NO_TEXT = ("utf-7", "unicode-escape", "raw-unicode-escape", "punycode", "idna", "undefined")
"""Encodings of Python that no table is written in, and that may give characters which no file can hold."""
_OFFSET = r"([T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?) ?(?:Z|[+-]\d{2}(?::?\d{2})?)$"
"""The time of day in ISO 8601, and its distance from UTC."""
_CONTROL = r"[\x00-\x08\x0b-\x1f\x7f]"


class RawTable(NamedTuple):
    """A file's columns before anything is converted: text as read from CSV, or Parquet's own types.

    Attributes:
        first_line: number of the first data row: line 2 of a CSV, row 1 of a Parquet file.
        settings: who names it, for the way out in errors: a section of a TOML file, options of the command line, or
            arguments of a function.
        style: how numbers and dates are written.
        lines: of a CSV in which a row has several lines, the first line of each row.
        read_text: of a CSV whose numbers are not kept as text, reads a column of it again.
    """

    frame: pd.DataFrame
    file: str
    first_line: int
    settings: Literal["toml", "options", "arguments"] = "toml"
    style: Format = Format()
    lines: np.ndarray | None = None
    read_text: Callable[[str], pd.Series] | None = None

    def place(self, column: str, position: int) -> str:
        """Return ``bank.csv, column 'age', line 7`` for the row at ``position``."""
        unit = "line" if self.first_line == 2 else "row"
        number = position + self.first_line if self.lines is None else self.lines[position]
        return f"{self.file}, column {column!r}, {unit} {number}"

    def setting(self, name: str, party: str = "") -> str:
        """Return the name of a party's setting, as its user writes it."""
        if self.settings == "options":
            return f"--{name.replace('_', '-')}"
        return f"parties.{party}.{name}" if party and self.settings == "toml" else name

    def numbers(self, column: str, *, gaps: bool = False) -> np.ndarray:
        """Return a column as float64; true and false are 1 and 0.

        Args:
            column: its name.
            gaps: whether missing values are allowed, and become NaN.

        Raises:
            DataError: a missing, infinite or non-numeric value.
        """
        raw = self.frame[column]
        if pd.api.types.is_datetime64_any_dtype(raw.dtype):
            way_out = f"list it in {self.setting('dates')}"
            raise DataError(f"{self.file}, column {column!r}: expected numbers, got {raw.dtype}; {way_out}")
        if pd.api.types.is_complex_dtype(raw.dtype) or not (pd.api.types.is_numeric_dtype(raw.dtype) or is_text(raw)):
            way_out = f"convert it, or list it in {self.setting('categorical')}"
            raise DataError(f"{self.file}, column {column!r}: expected numbers, got {raw.dtype}; {way_out}")
        values = self._parse_numbers(column)
        if self.style.missing:  # which may be numbers, such as -999
            values[self.find_missing(column)] = np.nan
        missing = np.isnan(values)
        if missing.any():  # of which some may be texts that are no numbers
            missing &= self.find_missing(column)
        bad = np.flatnonzero(~(np.abs(values) < MAX_NUMBER) & ~(missing & gaps))  # also NaN
        if len(bad):
            raise DataError(
                f"{self.place(column, bad[0])}: {self._explain_number(column, bad[0], values[bad[0]])}{count_more(bad)}"
            )
        return values

    def dates(self, column: str, *, gaps: bool = False) -> pd.Series:
        """Return a column as dates and times of the clock, as they are written; time zones are dropped.

        Args:
            column: its name.
            gaps: whether missing values are allowed, and become NaT.

        Raises:
            DataError: a missing value, one that is no date, or a year before 1700 or after 2200.
        """
        raw, form = self.frame[column], self.style.date_format
        missing = self.find_missing(column)
        if str(raw.dtype).startswith("date32") or str(raw.dtype).startswith("date64"):  # of pyarrow
            raw = raw.astype("datetime64[s]")
        if pd.api.types.is_datetime64_any_dtype(raw.dtype):
            text, form = raw.dt.tz_localize(None), None
        else:
            text = self._strip(column).str.replace(_OFFSET, r"\1", regex=True)
            form = form if _is_written(raw) else None
        try:
            values = pd.to_datetime(text.where(~missing), format=form or "ISO8601", errors="coerce", utc=True)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{self.file}, column {column!r}: {self.setting('date_format')} {form!r}: {error}"
            ) from None
        bad = np.flatnonzero(values.isna() & ~(missing & gaps))
        if len(bad):
            got = self._strip(column).iloc[bad[0]]
            written = form or "2026-01-31"
            mend = f"correct it, or say how dates are written with {self.setting('date_format')}"
            raise DataError(
                f"{self.place(column, bad[0])}: expected a date such as {written}, "
                + (f"got {got!r}; {mend}" if not missing[bad[0]] else f"got nothing; {self._fill()}")
                + count_more(bad)
            )
        years = values.dt.year
        far = np.flatnonzero((years < EARLIEST) | (years > LATEST))
        if len(far):
            got = self._strip(column).iloc[far[0]]
            mend = f"if it stands for no date, name it in {self.setting('missing')}"
            raise DataError(
                f"{self.place(column, far[0])}: expected a year from {EARLIEST} to {LATEST}, got {got!r}; {mend}"
                + count_more(far)
            )
        clock: pd.Series = values.dt.tz_localize(None)
        return clock

    def categories(self, column: str) -> pd.Series:
        """Return a column as text, with ``(missing)`` in its gaps."""
        text = self._strip(column)
        return text.where(text != "", MISSING)

    def words(self, column: str, most: int) -> list[list[str]]:
        """Return the first ``most`` words of each text, in small letters, as white space divides them.

        Raises:
            DataError: a text without a word.
        """
        words = [text.lower().split(maxsplit=most)[:most] for text in self._strip(column)]
        gaps = np.flatnonzero([not row for row in words])
        if len(gaps):
            got, way_out = _GAP
            raise DataError(f"{self.place(column, gaps[0])}: expected a text, got {got}; {way_out}{count_more(gaps)}")
        return words

    def keys(self, column: str, role: str) -> pd.Series:
        """Return a column as text without empty rows: ids and labels.

        Raises:
            DataError: an empty row, or control characters.
        """
        text = self._strip(column)
        gaps = np.flatnonzero(self.find_missing(column) & (text.str.lower() != "none"))  # a class may be called none
        if len(gaps):
            got, way_out = _GAP
            if mark := text.iloc[gaps[0]]:
                got, way_out = f"{mark!r}, which stands for a missing value", "name it otherwise or drop the row"
            raise DataError(f"{self.place(column, gaps[0])}: expected {role}, got {got}; {way_out}{count_more(gaps)}")
        hidden = np.flatnonzero(text.str.contains(_CONTROL, regex=True))
        if len(hidden):
            got = f"{text.iloc[hidden[0]]!r} with a control character"
            raise DataError(f"{self.place(column, hidden[0])}: expected {role}, got {got}; is the file damaged?")
        return text

    def find_missing(self, column: str) -> np.ndarray:
        """Return (n,) whether a value is missing: nothing, or a text that stands for it."""
        raw = self.frame[column]
        if not is_text(raw):
            named = pd.to_numeric(pd.Series(self.style.missing or (), dtype=object), errors="coerce").dropna()
            gaps: np.ndarray = raw.isna().to_numpy()
            numeric = pd.api.types.is_numeric_dtype(raw.dtype) and len(named)
            return gaps | raw.isin(named).to_numpy() if numeric else gaps
        named_texts = frozenset(str(text).strip().lower() for text in self.style.missing or ())
        return self._strip(column).str.lower().isin(MISSING_TEXTS | named_texts).to_numpy()

    def _parse_numbers(self, column: str) -> np.ndarray:
        """Return a column as float64 with NaN where a value is missing or no number."""
        raw = self.frame[column]
        if not is_text(raw):
            return raw.to_numpy(dtype=np.float64, na_value=np.nan, copy=True)
        if not _is_written(raw):
            return pd.to_numeric(raw, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan, copy=True)
        decimal, thousands = self.style.decimal or ".", self.style.thousands
        text = raw
        if thousands or decimal != ".":
            text = self._strip(column)
            if thousands:  # only between groups of three digits: 1,5 is not 15
                separated = rf"[+-]?\d{{1,3}}(?:{re.escape(thousands)}\d{{3}})+(?:{re.escape(decimal)}\d*)?"
                whole = text.str.fullmatch(separated)
                text = text.where(~whole, text.str.replace(thousands, "", regex=False))
            if decimal != ".":
                text = text.where(~text.str.contains(".", regex=False), "not a number")
                text = text.str.replace(decimal, ".", regex=False)
        values = pd.to_numeric(text, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan, copy=True)
        if np.isnan(values).all():
            truth = self._strip(column).str.lower().map({"true": 1.0, "false": 0.0}).to_numpy(dtype=np.float64)
            values = truth if (~np.isnan(truth) | self.find_missing(column)).all() else values
        return values

    def _explain_number(self, column: str, position: int, value: float) -> str:
        """Return what is wrong with the value at ``position``, and the way out."""
        if self.read_text and not is_text(self.frame[column]):
            frame = self.read_text(column).to_frame()
            return self._replace(frame=frame, read_text=None)._explain_number(column, position, value)
        text = self._strip(column).iloc[position]
        number = f"a number below {MAX_NUMBER:g}" if np.isfinite(value) else "a finite number"
        if self.find_missing(column)[position]:
            return f"expected {number}, got {f'{text!r}' if text else 'nothing'}; {self._fill()}"
        mend = f"correct it, or list the column in {self.setting('categorical')}"
        is_date = re.match(r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}", text)
        if is_date and not np.isfinite(pd.to_numeric(text, errors="coerce")):
            mend = f"list the column in {self.setting('dates')}"
        elif re.fullmatch(r"[+-]?\d{1,3}([,'. ]\d{3})+([.,]\d*)?|[+-]?\d+,\d+", text):
            mend = f"say how numbers are written with {self.setting('thousands')} and {self.setting('decimal')}"
        return f"expected {number}, got '{text}'; {mend}"

    def _fill(self) -> str:
        return _GAP[1] if self.settings == "options" else f'{_GAP[1]}, or set {self.setting("impute")} = "mean"'

    def _strip(self, column: str) -> pd.Series:
        """Return stripped text, empty in gaps; a column of whole floats is one of integers with gaps."""
        raw = self.frame[column]
        whole = pd.api.types.is_float_dtype(raw.dtype) and (raw.dropna() % 1 == 0).all()
        if whole and (raw.dropna().abs() < 2.0**63).all():
            raw = raw.astype("Int64")
        text = raw.fillna("") if raw.dtype == "str" else raw.astype(object).where(raw.notna(), "").astype(str)
        return text.str.strip()


def count_more(bad: np.ndarray) -> str:
    """Return how many further rows have the same fault."""
    return f" (and {count(len(bad) - 1, 'more row')})" if len(bad) > 1 else ""


def _is_written(values: pd.Series) -> bool:
    """Whether a column holds text; Parquet and frames also have objects, such as decimals and dates."""
    if not pd.api.types.is_object_dtype(values.dtype) or pd.api.types.infer_dtype(values) == "string":
        return True
    return not values.dropna().map(lambda value: isinstance(value, Decimal | date | np.number)).any()


def is_text(values: pd.Series) -> bool:
    """Whether a column has a type of text, or that of any objects."""
    return bool(pd.api.types.is_string_dtype(values.dtype) or pd.api.types.is_object_dtype(values.dtype))


def read_table(path: Path, style: Format, texts: Collection[str] | None = None, *, toml: bool = True) -> RawTable:
    """Read ``path``: Parquet or JSON lines by its suffix, ``.parquet`` or ``.jsonl``, else CSV with a header line.

    Args:
        path: of the file.
        style: how it is written.
        texts: the columns of a CSV that are kept as text; the others are if they hold more than plain numbers and gaps.
            By default all.
        toml: whether a TOML file names it, for the way out in errors.

    Raises:
        DataError: no such file, or one that cannot be read as a table.
    """
    encoding, separator = style.encoding or "utf-8", style.separator or ","
    settings: Literal["toml", "options"] = "toml" if toml else "options"
    file = clean(path.name[:100])
    for name, mark in (("decimal", style.decimal), ("thousands", style.thousands)):
        if mark is not None and (len(mark) != 1 or mark.isalnum() or mark in "+-"):
            raise DataError(f"{file}: expected {name} of one character, got {mark!r}; for example ','")
    if style.thousands is not None and style.thousands == (style.decimal or "."):
        got = f"{style.thousands!r} for both"
        raise DataError(f"{file}: expected decimal and thousands to differ, got {got}; correct one")
    if len(separator) != 1 or separator in '\r\n"\0':
        way_out = 'write separator = "\\t"' if separator == "\\t" else "for example ';'"
        raise DataError(f"{file}: expected a separator of one character, got {separator!r}; {way_out}")
    try:
        text = codecs.lookup(encoding).name not in _NO_TEXT
        "x".encode(encoding)  # base64 encodes no text
    except (LookupError, ValueError):  # also a null character in its name
        text = False
    if not text:
        raise DataError(f"{file}: expected a known encoding, got {encoding!r}; for example 'utf-8'")
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError):
        is_folder = is_file = False
    if is_folder:
        raise DataError(f"expected a file {path}, got a folder; name a file in it")
    if not is_file:
        where = "paths are relative to the TOML file" if toml else "check the path"
        raise DataError(f"expected a file {path.parent / file}, found none; {where}")
    if path.suffix == ".parquet":
        table = RawTable(_read_parquet(path), path.name, 1, settings, style)
    elif path.suffix == ".jsonl":
        table = RawTable(_read_json_lines(path), path.name, 1, settings, style)
    else:
        # Spreadsheet programs put a byte order mark in front, which would become part of the first column's name.
        encoding = "utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding
        starts = _check_lines(path, encoding, separator, toml=toml)
        form = {"encoding": encoding, "sep": separator, "compression": None}
        read: Any = partial(pd.read_csv, path, **form, keep_default_na=False, index_col=False)
        frame = read(dtype=str) if texts is None else _read_numbers(read, texts, style)
        read_text = None if texts is None else lambda column: read(dtype=str, usecols=[column])[column]
        table = RawTable(frame, path.name, 2, settings, style, starts, read_text)
    if table.frame.empty:
        raise DataError(f"{path.name}: expected data rows, got none; is the export complete?")
    return table


def _read_numbers(read: Callable[..., pd.DataFrame], texts: Collection[str], style: Format) -> pd.DataFrame:
    """Return a CSV with numbers in the columns of plain numbers and gaps that ``texts`` does not name, and text."""
    header = read(dtype=str, nrows=0).columns
    gaps = [*_USUAL_GAPS, *(str(text) for text in style.missing or ())]
    frame = read(
        dtype={name: str for name in header if name in texts},
        na_values={name: gaps for name in header if name not in texts},
        decimal=style.decimal or ".",
        low_memory=False,  # which takes a column for numbers or for text as a whole
    )
    mixed = [name for name in header if name not in texts and frame.dtypes[name].kind not in "iuf"]
    return frame.assign(**read(dtype=str, usecols=mixed)) if mixed else frame


def _read_parquet(path: Path) -> pd.DataFrame:
    try:
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError:
        raise DataError(f"{path.name}: reading Parquet needs pyarrow: pip install 'vflsec[parquet]'") from None
    try:
        table = pyarrow.parquet.read_table(path)
        table.validate(full=True)  # pandas reads invalid UTF-8
        frame = pd.read_parquet(path, engine="pyarrow")
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path.name}: expected a Parquet file, got {reason}; export it again") from None
    for field in table.schema:
        if pyarrow.types.is_nested(field.type):
            got = f"expected one value in each row, got {field.type}; export its parts as columns"
            raise DataError(f"{path.name}, column {field.name!r}: {got}")
    for name in frame.columns:
        if pd.api.types.is_object_dtype(frame[name].dtype) and frame[name].map(lambda v: isinstance(v, bytes)).any():
            raise DataError(f"{path.name}, column {name!r}: expected text, got bytes; export it as text")
    return frame.reset_index(drop=frame.index.names == [None])  # the id may be the index


def _read_json_lines(path: Path) -> pd.DataFrame:
    """Return a table of an object a line, as text."""
    rows: list[dict[str, str | int | float | bool | None]] = []
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n")
    for number, line in enumerate(content.split(b"\n"), start=1):
        try:
            rows.append(msgspec.json.decode(line, type=dict[str, str | int | float | bool | None]))
            if len(json.loads(line, object_pairs_hook=list)) > len(rows[-1]):
                raise msgspec.DecodeError("a key occurs twice")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(
                f"{path.name}, line {number}: expected a JSON object of texts and numbers: {clean(str(error))}; "
                f"correct or remove it"
            ) from None
    _check_header(path.name, list(rows[0]))
    frame = pd.DataFrame(rows, dtype=object)  # or whole numbers with gaps would become others
    return frame.where(frame.notna(), "").astype(str)


def _check_lines(path: Path, encoding: str, separator: str, *, toml: bool) -> np.ndarray | None:
    """Reject what pandas reads silently: ragged lines, repeated names, an open quote, null characters.

    Returns:
        The first line of each row where a row has several lines; None where each has its own.
    """
    try:
        with path.open(encoding=encoding, newline="") as stream:
            lines = csv.reader(stream, delimiter=separator, strict=True)
            header = next(lines, [])
            _check_header(path.name, header)
            commas = len(header) - 1
            if commas and all(
                line.count(separator) == commas and '"' not in line and "\0" not in line for line in stream
            ):
                return None  # each line is a row without quotes
            stream.seek(0)
            lines = csv.reader(stream, delimiter=separator, strict=True)
            next(lines)
            blank, starts = 0, [lines.line_num + 1]
            for fields in lines:
                if not fields:
                    blank = blank or lines.line_num  # allowed at the end of the file only
                elif blank or len(fields) != len(header):
                    line, n_fields = (blank, 0) if blank else (lines.line_num, len(fields))
                    raise DataError(
                        f"{path.name}, line {line}: expected {len(header)} fields as in the header, got {n_fields}; "
                        f"is the file cut off, or is {separator!r} not its separator?"
                    )
                elif "\0" in "".join(fields):
                    raise DataError(f"{path.name}, line {lines.line_num}: expected no null character; remove it")
                starts.append(lines.line_num + 1)
            return np.array(starts[:-1]) if lines.line_num > len(starts) else None
    except UnicodeError as error:
        got = "other bytes"
        if isinstance(error, UnicodeDecodeError):
            got, encoding = f"byte {error.object[error.start]:#x}", error.encoding
        raise DataError(
            f"{path.name}: expected {encoding} text, got {got}; {_advise_encoding(path, toml=toml)}"
        ) from None
    except csv.Error as error:
        raise DataError(f"{path.name}, line {lines.line_num}: {error}; is the file cut off?") from None


def _advise_encoding(path: Path, *, toml: bool) -> str:
    """Return the way out for a file that is not in its encoding."""
    with path.open("rb") as stream:
        start = stream.read(4)
    if start.startswith((b"\x1f\x8b", b"PK\x03\x04", b"\xfd7zX", b"(\xb5/\xfd", b"BZh")):
        return "it is compressed: unpack it"
    name = "utf-16" if start.startswith((b"\xff\xfe", b"\xfe\xff")) else "latin-1"
    return f"set encoding in the TOML file, for example encoding = '{name}'" if toml else "save it as UTF-8"


def _check_header(file: str, header: list[str]) -> None:
    if not header or "\0" in "".join(header):
        got = "a null character" if header else "an empty file"
        raise DataError(f"{file}: expected a header line with column names, got {got}")
    if "" in header:
        nth = header.index("") + 1
        raise DataError(
            f"{file}, line 1: expected a name for each column, got none for column {nth}; name it, or export the table "
            f"without its index"
        )
    double = sorted({name for name in header if header.count(name) > 1})
    if double:
        raise DataError(f"{file}, line 1: expected different column names, got {double[0]!r} twice; rename one")


class PartyColumns(NamedTuple):
    """The columns of a party by name, and which of them are categories."""

    values: dict[str, Any]
    categorical: list[str]


def read_columns(
    table: RawTable,
    party: str,
    roles: PartyFile,
    columns: list[str],
    max_categories: int | None,
    caught: Callable[[], AbstractContextManager[None]],
) -> PartyColumns:
    """Return the values of ``columns`` in their order.

    Args:
        table: the file.
        party: whose file it is.
        roles: of the columns.
        columns: their names in the file.
        max_categories: how many values a category may have, or None for any number.
        caught: a context that keeps a DataError, so that the other columns are read, too.
    """
    read = PartyColumns({}, [])
    for column in columns:
        with caught():
            made = _read(table, party, roles, column, max_categories)
            double = sorted(set(made.values) & set(read.values))
            if double:
                raise DataError(f"{table.file}: expected different columns, got {double[0]!r} twice; rename one")
            # Pixels may be constant: the margins of many images are blank.
            values = pd.Series(made.values[column])
            if roles.image is None and all(values[:n].nunique(dropna=False) == 1 for n in (1000, None)):
                leave = "columns" if table.settings == "options" else "drop"
                way_out = f"drop it, or leave it out with {table.setting(leave)}"
                got = made.values[column][0]
                raise DataError(
                    f"{table.file}, column {column!r}: expected values that differ, got {got} only; {way_out}"
                )
            read.values.update(made.values)
            read.categorical.extend(made.categorical)
    return read


def _read(table: RawTable, party: str, roles: PartyFile, column: str, limit: int | None) -> PartyColumns:
    several = [r for r in ("categorical", "dates", "group_rare", "hash") if column in getattr(roles, r)]
    if column in roles.signed_log and set(several) & {"dates", "group_rare", "hash"}:
        several.append("signed_log")
    if len(several) > 1 and several != ["categorical", "group_rare"] and several != ["categorical", "hash"]:
        raise DataError(
            f"{table.setting(several[0], party)}: expected one role for {column!r}, got {' and '.join(several)}"
        )
    gaps = bool(roles.impute or table.style.impute)
    if column in roles.dates:
        if isinstance(roles.dates, dict):
            table = table._replace(style=msgspec.structs.replace(table.style, date_format=roles.dates[column]))
        return _expand_dates(table, column, gaps=gaps)
    if not several:
        return PartyColumns({column: table.numbers(column, gaps=gaps)}, [])
    texts = table.categories(column)
    if column in roles.hash:
        buckets = _check_at_least_two(table, party, "hash", roles.hash[column])
        digits = len(str(buckets - 1))  # CRC-32 is the same on every machine
        texts = texts.map({t: f"{zlib.crc32(t.encode()) % buckets:0{digits}}" for t in texts.unique()})
    elif column in roles.group_rare:
        _check_at_least_two(table, party, "group_rare", roles.group_rare[column])
    elif limit is not None and (different := texts.nunique()) > limit:
        raise DataError(f"{table.file}, column {column!r}: expected at most {limit} categories, got {different}; "
                        f"{_suggest(table, column, different)}")  # fmt: skip
    return PartyColumns({column: pd.Categorical(texts)}, [column])


def _check_at_least_two(table: RawTable, party: str, role: str, number: int) -> int:
    if number < 2:
        raise DataError(f"{table.setting(role, party)}: expected 2 or more, got {number}")
    return number


def _suggest(table: RawTable, column: str, different: int) -> str:
    """Return what to do with a category of too many values."""
    key = column if column.replace("-", "_").isidentifier() and column.isascii() else f'"{column}"'
    try:
        table.dates(column, gaps=True)
    except DataError:
        pass
    else:
        return f"list it in {table.setting('dates')}"
    start = "it looks like an id: " if different > len(table.frame) / 2 else ""
    ways = [f"{table.setting('group_rare')} = {{ {key} = 50 }}", f"{table.setting('hash')} = {{ {key} = 32 }}"]
    if table.settings == "arguments":
        ways = [f"group_rare={{{column!r}: 50}}", f"hash={{{column!r}: 32}}"]
    return (
        f"{start}leave it out with {table.setting('drop')}, keep the most frequent with {ways[0]}, hash it with "
        f"{ways[1]}, or raise max_categories"
    )


def _expand_dates(table: RawTable, column: str, *, gaps: bool) -> PartyColumns:
    """Return days since 1970, and as categories month and weekday, and the hour if there are times."""
    dates = table.dates(column, gaps=gaps)
    days = (dates - pd.Timestamp(0)) / pd.Timedelta(days=1)
    values: dict[str, Any] = {column: days.to_numpy(dtype=np.float64)}
    parts = {"month": dates.dt.strftime("%m"), "weekday": dates.dt.day_name().str[:3], "hour": dates.dt.strftime("%H")}
    for part, texts in parts.items():
        known = texts.dropna()
        if known.nunique() > 1:
            values[f"{column}.{part}"] = pd.Categorical(texts.fillna(MISSING))
    return PartyColumns(values, [name for name in values if name != column])
