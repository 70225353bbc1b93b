"""Tables as text: columns, cells, numbers with their margins, and their forms for terminals and files."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape as as_html_text
from typing import Any, Literal, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from vflsec.base.checks import count
from vflsec.results.analysis.intervals import get_longer_side
from vflsec.results.analysis.results import Damage, Ends, Measure, Point, Summary

MAX_NAME = 20
"""Up to this length names of attacks are not broken."""

NARROW = 110
"""Below this width of a terminal, the columns that decide the least are left out."""

LAST_DETAIL = 4
"""The turn at which the last columns are left out where there is little room."""

MIN_SHOWN = 0.0005
"""What three decimals do not show."""

BOTH = ("test+train", "train+test")
"""Rows of both kinds, whose names may stand in two lines where there is little room."""

MARKUP = r"[\\|<\[`~$]|(?<!\w)_|_(?!\w)|&(?=#?\w+;)|:(?=//)|(?<=www)\."
"""What Markdown would read as a link, an entity or a formula; cells may have *emphasis*."""

LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$",
    "λ": r"$\lambda$", "ε": r"$\varepsilon$", "δ": r"$\delta$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "±": r"$\pm$",
    "≈": r"$\approx$", "∞": r"$\infty$", "·": r"$\cdot$", "²": r"$^2$", "–": "--",
}  # fmt: skip
"""What stands for a sign in LaTeX."""

FOLDERS = re.compile(r"""(?<![\w.~/:-])/[^\s"',;:=]*/(?=[^\s"',;:=/])""")
"""The folders of an absolute path: they may name a user, and differ between machines."""


UNBROKEN = r"(?<!\S)--[a-z-]+|\d+e-\d+|[-+]?[\d.]+ ±[\d.]+|\([-\d.]+ to [-\d.]+\)"
"""What stays in one line: options and powers, which have dashes, and a number with its interval, or its ends."""


JOINTS = r"(?<=\w[:=])(?=\w)(?![^<]*>)"
"""Where a name may break in a cell of HTML: after a colon or equals sign, outside of tags."""


class Column(NamedTuple):
    """A column of a table, of a file, or of both.

    Attributes:
        name: in files; empty for a column of a table alone.
        value: of a row, in full precision.
        title: its heading; empty for a column of files alone.
        cell: the text of a row; by default its value.
        help: what it means, for the glossary of a page.
        kind: ``number``; ``name``, which is flush left except in a terminal; or ``prose``, which may wrap.
        detail: 0 if it is always shown, else the turn at which a narrow terminal leaves it out.
        rows: the types of rows that have it.
        where: the table of points that shows it: ``main``, ``headline`` or ``per row``.
        place: in that table, from the left.
        is_shown: whether a summary has it.
    """

    name: str
    value: Callable[[Any], Any] = str
    title: str = ""
    cell: Callable[[Any], str] | None = None
    help: str = ""
    kind: Literal["number", "name", "prose"] = "number"
    detail: int = 0
    rows: tuple[type, ...] = (Point,)
    where: Literal["main", "headline", "per row"] = "main"
    place: int = 0
    is_shown: Callable[[Summary], bool] = lambda summary: True

    def text(self, row: Any) -> str:
        """Return the cell of a row."""
        return str(self.value(row)) if self.cell is None else self.cell(row)


class Cells(NamedTuple):
    """A table as text: a title, columns, and a cell of each row for each column."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]

    @classmethod
    def from_texts(cls, title: str, header: Iterable[str], rows: Sequence[Sequence[str]]) -> Cells:
        """Return a table whose columns have a title and nothing else."""
        return cls(title, [Column("", title=name) for name in header], rows)

    @classmethod
    def fill(cls, title: str, columns: Sequence[Column], rows: Iterable[Any]) -> Cells:
        """Return a table with the text of each row."""
        return cls(title, columns, [[column.text(row) for column in columns] for row in rows])

    @property
    def header(self) -> list[str]:
        """The titles of the columns."""
        return [column.title for column in self.columns]

    def only(self, is_kept: Callable[[Column], bool]) -> Cells:
        """Return the table with some of its columns."""
        kept = [k for k, column in enumerate(self.columns) if is_kept(column)]
        return Cells(self.title, [self.columns[k] for k in kept], [[row[k] for k in kept] for row in self.rows])

    def narrow(self, detail: int = 1) -> Cells:
        """Return the table without details up to a turn; a method that all rows share moves to the title."""
        at = next((k for k, column in enumerate(self.columns) if column.name == "method"), None)
        methods: set[str] = set() if at is None else {row[at] for row in self.rows}
        narrow = [[cell.replace("+", "+\n") if cell in BOTH else cell for cell in row] for row in self.rows]
        hidden = "method" if len(methods) == 1 else None
        kept = self._replace(rows=narrow).only(lambda c: c.name != hidden and not 0 < c.detail <= detail)
        return kept._replace(title=f"{self.title}, {methods.pop()}") if hidden else kept


class Document(NamedTuple):
    """What a report shows: its tables, the lines above and below, and the tables for which a terminal has no room.

    The columns of the first tables, ``explained`` in number, are explained below them.
    """

    above: Sequence[str]
    tables: Sequence[Cells]
    below: Sequence[str]
    details: Sequence[Cells] = ()
    explained: int = 0

    def rich(self, width: int) -> RenderableType:
        """Return lines and tables for a terminal of ``width`` columns; a narrow one has fewer columns."""
        above, below = [list(map(Text, lines)) for lines in (self.above, self.below)]
        if width >= NARROW and all(can_fit(cells, width, narrow=False) for cells in self.tables):
            return Group(*above, *map(as_rich, self.tables), *map(Text, self.explain(self.tables)), *below)
        turns = range(1, LAST_DETAIL)
        turn = next((t for t in turns if all(can_fit(cells.narrow(t), width) for cells in self.tables)), LAST_DETAIL)
        parts: list[RenderableType] = [*above]
        tables = [cells.narrow(turn) for cells in self.tables]
        for cells in tables:
            parts += [Text(), as_rich(cells, width)]
        hidden = dict.fromkeys(c.title for cells in self.tables for c in cells.columns if 0 < c.detail <= turn)
        note = f"NOT SHOWN {', '.join(hidden)}: widen the terminal, or add --format markdown"
        return Group(*parts, Text(), *map(Text, self.explain(tables)), *below, *([Text(note)] if hidden else []))

    def explain(self, tables: Sequence[Cells]) -> list[str]:
        """Return a line for each column of the first ``tables``."""
        columns = [column for cells in tables[: self.explained] for column in cells.columns if column.help]
        lines = dict.fromkeys(f"{column.title.rstrip(' ↑↓')}: {column.help}" for column in columns)
        return [*lines, ""] if lines else []

    def markdown(self) -> str:
        """Return lines and tables as Markdown."""
        shown = [f"{as_markdown_text(c.title)}\n\n{as_markdown(c)}" for c in (*self.tables, *self.details)]
        lines = [self.above, [*self.explain(self.tables), *self.below]]
        above, below = (list(map(as_markdown_text, texts)) for texts in lines)
        return "\n\n".join([*above, *shown, *below]) + "\n"

    def latex(self) -> str:
        """Return the tables as LaTeX, what stands around them as comments."""
        above, below = (
            ["\n".join(f"% {' '.join(line.split())}" for line in lines)] if lines else []
            for lines in (self.above, self.below)
        )
        return "\n\n".join([*above, *map(as_latex, (*self.tables, *self.details)), *below]) + "\n"


def write_number(value: float | None) -> str:
    """Return three decimals without the leading zero, or a dash."""
    return "–" if value is None else _shorten(f"{value:.3f}")


def format_signed(value: float | None) -> str:
    """Return three decimals with a sign, or a dash."""
    return "–" if value is None else _shorten(f"{value:+.3f}")


def _shorten(text: str) -> str:
    return re.sub(r"^([+-]?)0\.", r"\1.", text.removeprefix("-") if float(text) == 0 else text)


def with_margin(measure: Measure) -> str:
    """Return ``mean ±margin``."""
    return with_ends(measure.mean, measure.ci95)


def with_ends(mean: float | None, ends: Ends) -> str:
    """Return ``mean ±margin`` of a mean and the ends of its interval."""
    return f"{write_number(mean)}{spread(mean, ends)}"


def spread(mean: float | None, ends: Ends) -> str:
    """Return `` ±margin``, the longer side of the interval, or nothing.

    Over rows, or near 0 or 1, the sides differ: both ends are shown where ± would cross 0 or 1 and they do not.
    """
    margin, (low, high) = get_longer_side(mean, ends), ends
    if mean is None or margin is None or low is None or high is None:
        return ""
    if any(mean - margin < x - MIN_SHOWN < low or high < x + MIN_SHOWN < mean + margin for x in (0.0, 1.0)):
        return f" ({write_number(low)} to {write_number(high)})"
    return f" ±{write_number(margin)}"


def write_status(row: Point | Damage) -> str:
    """Return ``ran``, or how many seeds ended in which way or guess one class, and what is below chance or useless."""
    bad = sorted((name, n) for name, n in row.statuses.items() if name != "ok")
    leak = row.leak if isinstance(row, Point) else None
    if leak and leak.single_class:
        bad.append(("guess one class", leak.single_class))
    parts = [f"{n}/{sum(row.statuses.values())} {name}" for name, n in bad]
    if isinstance(row, Point):
        parts += [f"{count(len(row.unconverged), 'attack')} unconverged"] * bool(row.unconverged)
        parts += [f"model {row.useless}"] * bool(row.useless)
    if leak and leak.chance is not None and leak.ci95[1] is not None and leak.ci95[1] < leak.chance:
        parts.append("below chance")
    return ", ".join(parts) or "ran"


def as_text(shown: RenderableType, width: int) -> str:
    """Return what a terminal of ``width`` columns shows."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_jupyter=False).print(shown)
    return out.getvalue()


def can_fit(cells: Cells, width: int, *, narrow: bool = True) -> bool:
    """Whether a table has room for whole words."""
    if narrow:
        return sum(_find_least(cells)) + 2 * (len(cells.columns) - 1) <= width
    shown = as_text(as_rich(cells), width).split()
    return all(word in shown for row in (cells.header, *cells.rows) for cell in row for word in cell.split())


def as_rich(cells: Cells, width: int | None = None) -> RichTable:
    """Return a table for a terminal; in a narrow one, of ``width`` columns, any cell may wrap and none is cut."""
    narrow = width is not None
    cells = _break_names(cells) if narrow else cells
    table = RichTable(
        title=Text(cells.title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=not narrow,
        pad_edge=not narrow,
    )  # fmt: skip
    widths = [None] * len(cells.columns) if width is None else _find_widths(cells, width)
    for i, (column, least) in enumerate(zip(cells.columns, _find_least(cells), strict=True)):
        is_prose = column.kind == "prose"
        longest = max((len(row[i]) for row in cells.rows), default=0)
        table.add_column(
            column.title,
            no_wrap=not (narrow or is_prose),  # numbers may not wrap
            overflow="fold",
            justify="left" if i == 0 or is_prose else "right",
            min_width=longest if not narrow and column.name == "attack" and longest <= MAX_NAME else least,
            width=widths[i],
        )
    for row in cells.rows:
        table.add_row(*map(Text, row))  # names are no markup
    return table


def _break_names(cells: Cells) -> Cells:
    """Return ``cells`` whose long words break after a colon, as in ``attribute-fusion:column=a0``."""
    long = re.compile(rf"\S{{{MAX_NAME + 1},}}")
    rows = [[long.sub(lambda word: word[0].replace(":", ":\n"), cell) for cell in row] for row in cells.rows]
    return cells._replace(rows=rows)


def _find_least(cells: Cells) -> list[int]:
    """Return the width of each column in which its words are whole, those of up to ``MAX_NAME`` letters."""
    columns = zip(cells.header, *_break_names(cells).rows, strict=True)
    return [min(MAX_NAME, max(cell_len(word) for text in column for word in ("", *text.split()))) for column in columns]


def _find_widths(cells: Cells, width: int) -> list[int]:
    """Return the width of each column of a table of at most ``width``: of as many as possible their whole cells."""
    cells_of = zip(cells.header, *cells.rows, strict=True)
    columns = [[line for text in column for line in ("", *text.splitlines())] for column in cells_of]
    parts = [[part for line in column for part in re.split(r" (?=[(±])|(?<= to) ", line)] for column in columns]
    widths = _find_least(cells)
    room = width - 2 * (len(widths) - 1) - sum(widths)
    for texts in (parts, columns):
        missing = [max(map(cell_len, column)) - least for column, least in zip(texts, widths, strict=True)]
        for k in sorted(range(len(widths)), key=missing.__getitem__):
            more = max(0, min(missing[k], room))
            widths[k], room = widths[k] + more, room - more
    while room < 0 and max(widths) > 1:  # words are broken rather than cut
        widths[widths.index(max(widths))] -= 1
        room += 1
    return widths


def as_markdown(cells: Cells) -> str:
    """Return a table as Markdown, whose cells are read as text."""
    header, *rows = [list(map(as_markdown_text, row)) for row in (cells.header, *cells.rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(cells.columns), *rows))


def as_markdown_text(text: str) -> str:
    """Return Markdown that is read as ``text``: addresses are no links, and names after @ mention nobody."""
    return re.sub(r"@(?=[\w.-]*\.\w)|(?<!\w)@", "@<!-- -->", re.sub(MARKUP, r"\\\g<0>", text))


def as_latex(cells: Cells) -> str:
    """Return a table as LaTeX with the rules of booktabs; the first column and columns of text are flush left."""
    sides = "".join("r" if i and column.kind == "number" else "l" for i, column in enumerate(cells.columns))
    header, *rows = [" & ".join(map(_as_latex_text, row)) + r" \\" for row in (cells.header, *cells.rows)]
    top = [r"\begin{table}", rf"\caption{{{_as_latex_text(cells.title)}}}", rf"\begin{{tabular}}{{{sides}}}"]
    bottom = [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join([*top, r"\toprule", header, r"\midrule", *rows, *bottom])


def _as_latex_text(cell: str) -> str:
    """Return a cell of LaTeX that is read as text; a number with a minus is set as one."""
    if re.fullmatch(r"[+-][\d.]+", cell):
        return f"${cell}$"
    text = "".join(LATEX.get(sign, sign) for sign in cell)
    return re.sub(r"(?<![\w.)}-])-(?=[.\d])", "$-$", text)  # else it is a hyphen


def as_html(cells: Cells) -> str:
    """Return a section of HTML with the table, which a phone shows as cards; cells of text have the class ``text``."""
    classes = {"number": "", "name": " class=text", "prose": ' class="text prose"'}
    kinds = [classes[column.kind] for column in cells.columns]
    names = [f' data-name="{as_html_text(title)}"' for title in cells.header]

    def write_row(values: Sequence[str]) -> str:
        parts = zip(kinds, names, (re.sub(JOINTS, "<wbr>", escape(value)) for value in values), strict=True)
        return f"<tr>{''.join(f'<td{kind}{name}>{value}</td>' for kind, name, value in parts)}</tr>"

    body = "".join(map(write_row, cells.rows))
    titles = "".join(f"<th{kind}>{escape(title)}</th>" for kind, title in zip(kinds, cells.header, strict=True))
    rows = f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody>"
    table = f"<div class=wide tabindex=0><table>{rows}</table></div>"
    return f"<section><h2>{escape(cells.title)}</h2>{table}</section>"


def escape(text: str) -> str:
    """Return ``text`` as HTML, of absolute paths their last part only; options, and intervals, do not break."""
    return re.sub(UNBROKEN, r"<span class=whole>\g<0></span>", as_html_text(FOLDERS.sub("", text)))
