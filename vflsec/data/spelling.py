"""Texts that differ only in how they are written: by capital letters, spaces, Unicode forms, or as numbers."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from decimal import Context, Decimal

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?")
_SIGNS = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d"), "-")


def canonical(text: str) -> str:
    """Return the form that all spellings of ``text`` share: of ``297.0``, ``2.97e2`` and full-width digits ``297``."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).translate(_SIGNS)
        text = "".join(one for one in text if unicodedata.category(one) != "Cf")  # invisible characters
    text = " ".join(text.casefold().split())
    if not _NUMBER.fullmatch(text):
        return text
    number = Decimal(text)
    return str(number.normalize(Context(prec=len(text)))) if number else "0"


def alike(texts: Iterable[str]) -> list[list[str]]:
    """Return the groups of different texts that differ only in how they are written."""
    groups: dict[str, list[str]] = {}
    for text in dict.fromkeys(texts):
        groups.setdefault(canonical(text), []).append(text)
    return [group for group in groups.values() if len(group) > 1]
