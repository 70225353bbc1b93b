"""Generated tables of pages that people write: a table stands between two comments."""

from __future__ import annotations

import re
from pathlib import Path


def replace_table(page: Path, name: str, table: str) -> None:
    """Write ``table`` into ``page`` between ``<!-- name: ... -->`` and ``<!-- /name -->``.

    Raises:
        ValueError: the page has no such place, or several.
    """
    place = rf"(<!-- {re.escape(name)}: .*? -->\n).*?(<!-- /{re.escape(name)} -->)"
    text, places = re.subn(
        place, lambda match: f"{match[1]}{table}\n{match[2]}", page.read_text("utf-8"), flags=re.DOTALL
    )
    if places != 1:
        raise ValueError(f"expected one table {name!r} in {page.name}, found {places}")
    page.write_text(text, encoding="utf-8")
