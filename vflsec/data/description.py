"""The TOML file that describes the user's own data: each party's file, or its columns of one file.

    label = "defaulted"             # a column of the active party's file
    id = "customer_id"              # in every file; a list for a key of several columns

    [parties.bank]
    file = "bank.csv"               # CSV with a header line, .parquet or .jsonl; relative to the TOML file
    categorical = ["job"]           # categories; columns that no list names are numbers, and true/false is 1/0

    [parties.bureau]
    file = "bureau.parquet"

The page on your own data (``docs/your_own_data.md``) has all settings.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec

from vflsec.base.checks import describe_unknown
from vflsec.base.errors import DataError, UsageError, clean
from vflsec.base.files import parse_toml, read

Imputation = Literal["mean", "median", "mode"]

MAX_CATEGORIES, MAX_WORDS = 100, 1024

LONGEST_NAME = 200
"""Characters of the name of a dataset."""


class Format(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a file is written; None where another section decides, or the default."""

    encoding: str | None = None
    separator: str | None = None
    decimal: str | None = None
    thousands: str | None = None
    date_format: str | None = None
    missing: list[str | int | float] | None = None
    impute: Imputation | None = None

    def fill_from(self, general: Format) -> Format:
        """Return these settings, with those of ``general`` where there are none."""
        named = Format.__struct_fields__
        return Format(**{k: getattr(general if getattr(self, k) is None else self, k) for k in named})


class PartyFile(Format, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ``[parties.NAME]`` section."""

    file: str | None = None
    id: str | list[str] | None = None
    columns: list[str] | None = None
    drop: list[str] = []
    categorical: list[str] = []
    signed_log: list[str] = []
    dates: list[str] | dict[str, str] = []
    group_rare: dict[str, int] = {}
    hash: dict[str, int] = {}
    image: list[int] | None = None
    text: str | None = None
    max_words: int = 64

    def __post_init__(self) -> None:
        """Check the limit of words."""
        if not 1 <= self.max_words <= MAX_WORDS:
            raise ValueError(f"expected max_words between 1 and {MAX_WORDS}, got {self.max_words}")

    def list_texts(self, key: list[str]) -> set[str]:
        """Return the columns whose values are read as text: ids, categories, dates and texts."""
        texts = [] if self.text is None else [self.text]
        return set(key).union(self.categorical, self.dates, self.group_rare, self.hash, texts)


ROLES = ("categorical", "signed_log", "dates", "group_rare", "hash")
"""Settings of a party that name columns by what they hold."""


class DataFile(Format, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole TOML file."""

    label: str
    parties: dict[str, PartyFile]
    id: str | list[str] | None = None
    name: str | None = None
    active: str | None = None
    file: str | None = None
    max_categories: int = MAX_CATEGORIES

    def __post_init__(self) -> None:
        """Check the limit of categories."""
        if self.max_categories < 2:
            raise ValueError(f"expected max_categories >= 2, got {self.max_categories}")

    def key(self, party: str) -> list[str]:
        """Return the columns that identify a row in a party's file."""
        key = self.parties[party].id or self.id
        return [key] if isinstance(key, str) else key or []


def read_description(path: Path) -> DataFile:
    """Return the checked TOML file.

    Raises:
        DataError: no such file, not TOML, an unknown key, or sections that do not fit together.
    """
    try:
        config = msgspec.convert(parse_toml(read(path).decode()), DataFile)
    except OSError as error:
        got = "none" if isinstance(error, FileNotFoundError) else "a folder" if path.is_dir() else error.strerror
        raise DataError(f"expected a TOML file {path}, found {got}") from None
    except msgspec.ValidationError as error:
        field = re.match(r"Object contains unknown field `([^`]+)`", str(error))
        of_party = " - at `$.parties" in str(error)
        known = (PartyFile if of_party else DataFile).__struct_fields__
        text = describe_unknown(f"key{' in [parties.*]' * of_party}", field[1], known) if field else str(error)
        raise DataError(f"{path.name}: {text}; vflsec data init drafts one") from None
    except ValueError as error:
        way_out = "; vflsec data init drafts a description of tables" if path.suffix in (".csv", ".parquet") else ""
        raise DataError(f"{path.name}: expected TOML in utf-8: {error}{way_out}") from None
    check_title(config.name or path.stem)
    _check_parties(path.name, config)
    _check_files(path.name, config)
    return config


def _check_parties(file: str, config: DataFile) -> None:
    names = list(config.parties)
    if len(names) < 2:
        got = ", ".join(names) or "none"
        raise DataError(f"{file}: expected a section [parties.NAME] for each of two parties or more, got {got}")
    for name in names:
        try:
            check_name(name)
        except DataError as error:
            raise DataError(f"{file}: {error}") from None
    if config.active is not None and config.active not in names:
        raise DataError(f"{file}: {describe_unknown('active', config.active, names)}")
    reserved = "active" in names and config.active not in (None, "active")
    if reserved or any(re.fullmatch(r"passive_\d+", name) and name == config.active for name in names):
        raise DataError(
            f"{file}: expected names that fit the roles, got active = {config.active!r}; rename the sections"
        )
    numbered = [name for name in names if re.fullmatch(r"passive_\d+", name)]
    others = [name for name in names if name not in (*numbered, config.active or "active")]
    if numbered and others and config.active in (None, "active") and "active" in names:
        raise DataError(
            f"{file}: expected a name of its own for each passive party, or passive_1, passive_2... for all, got "
            f"{', '.join([*numbered, *others])}; rename the sections"
        )
    for name in names:
        key = config.key(name)
        if not all(key) or not key or len(set(key)) < len(key):
            place = f"at the top or in [parties.{name}]"
            raise DataError(f"{file}: expected id to name one column or several, {place}, got {key or 'none'}")


def check_title(name: str) -> None:
    """Raise DataError unless a report can call a dataset so."""
    if not 0 < len(name) <= LONGEST_NAME or clean(name) != name:
        expected = f"a name of one line of at most {LONGEST_NAME} characters"
        raise DataError(f"expected {expected}, got {name[:LONGEST_NAME]!r}; set another name")


def check_name(party: str) -> None:
    """Raise DataError unless tables and options can call a party so."""
    reserved = party in ("server", "source", "all", "none", "passive")
    if reserved or not re.fullmatch(r"[A-Za-z][\w-]*", party) or len(party) > LONGEST_NAME:
        raise DataError(
            f"expected a party's name of letters, digits, - and _, got {party!r}; call it as its tables should, for "
            f"example bureau"
        )


def _check_files(file: str, config: DataFile) -> None:
    """Check that the files are given in one of the two forms."""
    for name, party in config.parties.items():
        if (party.file is None) == (config.file is None):
            got = "none" if party.file is None else "two"
            way_out = "give file either at the top or with every party"
            raise DataError(f"{file}: expected one file for parties.{name}, got {got}; {way_out}")
        if config.file is not None and (party.encoding or party.separator):
            raise DataError(f"{file}: expected encoding and separator beside file at the top, got them in {name}")
    if config.file is None:
        return
    owner: dict[str, str] = {}
    for name, party in config.parties.items():
        if party.columns is None:
            raise DataError(f"{file}: expected columns = [...] for parties.{name}, got none, and all share one file")
        for column in party.columns:
            if column in owner:
                got = f"{owner[column]} and {name}"
                raise DataError(f"{file}: expected one party for column {column!r}, got {got}; drop it from one")
            owner[column] = name


def expect_no_table(dataset: str) -> None:
    """Raise UsageError if a dataset is named by one of its tables."""
    if dataset.endswith((".csv", ".parquet")):
        raise UsageError(f"expected a TOML file that describes {dataset}, got the table: vflsec data init drafts one")


def source_files(path: Path) -> list[Path]:
    """Return ``path`` and every file that it names. If one changes, stored results are invalid.

    Raises:
        DataError: the TOML file is missing or wrong.
    """
    config = read_description(path)
    named = [config.file, *(party.file for party in config.parties.values())]
    return [path, *sorted({path.parent / name for name in named if name})]
