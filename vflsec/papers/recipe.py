"""A paper's table as a grid of settings: what is measured at each of its cells.

A recipe is a TOML file in the folder ``recipes``, or one that the user names: ``settings`` of all cells, and
``[[groups]]`` (datasets), ``[[rows]]`` and ``[[columns]]`` with settings of their own, of which the later win.
``[quick]`` says what a quick run leaves out. Each row holds the values that the paper prints. With ``like``, a recipe
starts from another one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from vflsec.base.checks import describe_unknown
from vflsec.base.errors import UsageError
from vflsec.core import hooks, registry
from vflsec.core.attack import Target
from vflsec.core.defense import Defense, list_hooks
from vflsec.core.hooks import Runs
from vflsec.core.message import Kind
from vflsec.papers.grid import Table, convert, list_names, merge_tables, read_bundled, read_table
from vflsec.results.metrics import METRICS
from vflsec.run import spec as specs

FOLDER = Path(__file__).with_name("recipes")

MAX_SEEDS = 1000
UNDEFENDED = "no defense"
MAX_PRINTED = 1e6
"""Printed values are below this."""

Measure = Literal["utility", "leak", "alone", "cap", "hours", "megabytes"]
ATTACKED = ("leak", "alone", "cap")
"""Measures that need an evaluation with attacks; the others need trainings alone."""

Picture = Literal["", "curves", "tradeoff", "changes", "importance", "swarm", "domains", "density"]


class TablePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group, a row or a column: its name in the paper, and its settings.

    Attributes:
        group: of a row: the group that it belongs to.
        printed: of a row: the paper's value for each column; NaN where it has none. Of a row that is compared with
            another, the change that is expected.
        measure, attack, strength, metric: of a row or column, in place of those of the recipe; a column's win.
        defense: of a row: the defense whose strength it is, where settings have several; empty for the only one.
        target: of a column of leaks: what is recovered, or ``integrity``.
        guessed: of a column of leaks: ``train`` for the leak on training rows; by default on test rows where an attack
            guesses them.
        phase: of a column with hours: the phase of training that is timed; empty for all of them.
        panel: of a row: its diagram, where a group has several.
        curve: of a row: the curve that it belongs to, where each row is a point of one; empty for its name.
        trials: of a row: settings of which, for each seed, those with the best metric on validation rows count; in
            place of the recipe's ``rates``.
        original: of a group: the paper's data, if the settings name others, which stand in for them.
        paper: of a group, ``own`` in the file: the settings that take the place of ``settings`` where the user has the
            paper's data.
    """

    name: str
    settings: Table = {}
    group: str = ""
    printed: list[float] = []
    measure: Measure | None = None
    attack: str = ""
    strength: float | None = None
    metric: str = ""
    defense: str = ""
    target: Target = "labels"
    guessed: Literal["", "train"] = ""
    phase: str = ""
    panel: str = ""
    curve: str = ""
    trials: list[Table] = []
    original: str = ""
    paper: Table = msgspec.field(name="own", default_factory=dict)


class Asked(NamedTuple):
    """What is measured at one cell of the table."""

    measure: Measure
    attack: str
    strength: float
    metric: str
    phase: str
    defense: str = ""
    target: Target = "labels"
    guessed: Literal["", "train"] = ""


class Quick(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a quick run changes: fewer seeds, groups, rows or columns by their names, and other settings."""

    seeds: int = 2
    groups: list[str] | None = None
    rows: list[str] | None = None
    columns: list[str] | None = None
    settings: Table = {}


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a paper.

    Attributes:
        source: the paper, its arXiv number and the table.
        measure: ``utility``, the ``leak`` of ``attack`` at ``strength``, what is reached ``alone`` on the same rows,
            ``cap`` of ``attack``, ``hours`` of training,
            or the ``megabytes`` until ``train.target`` is reached, as SS-VFL counts them.
        metric: of utility or leak, of CAP that of the leak; empty for the headline metric of each dataset.
        attack: its label, or ``worst`` for the strongest of all that are run. ``all`` among the attacks in settings
            stands for every attack on labels that the adversary can mount.
        picture: what ``curve.png`` shows: by default a point for each cell, or ``curves`` over the columns, the
            ``tradeoff`` of utility against leak, the ``changes`` against another row, or pictures of the trained
            models.
        axis: what the columns are, below curves.
        hours: that a whole run takes on two cores of a laptop, estimated from a quick run; 0 if that is unknown.
        against: the row whose values are taken from those of all others, paired by seed; leaks are then advantages
            over the adversary alone, or over chance if it infers nothing alone, and of ``integrity`` the success of a
            trigger beyond chance.
        every: makes the rows and ``settings.defenses``: ``defense of labels`` for each of these at two strengths.
        compared: whether the paper compares ``rows`` of one column or ``columns`` of one row.
        rates: on the paper's data, the learning rates of which, for each seed and each method that has one, that with
            the best metric on validation rows counts. With attacks, the training without the compared defenses decides.
            These rows are a quarter of ``data.n_labeled``, and come on top.
        notes: what else differs from the paper.
    """

    title: str
    source: str
    measure: Measure
    columns: list[TablePart]
    rows: list[TablePart]
    groups: list[TablePart] = []
    settings: Table = {}
    metric: str = ""
    attack: str = "mc"
    strength: float = 0.0
    picture: Picture = ""
    axis: str = ""
    hours: float = 0.0
    against: str = ""
    every: Literal["", "defense of labels"] = ""
    compared: Literal["rows", "columns"] = "rows"
    rates: list[float] = []
    seeds: int = 5
    quick: Quick = Quick()
    notes: list[str] = []

    def __post_init__(self) -> None:
        """Check that rows, groups and printed values fit together."""
        if not 1 <= self.seeds <= MAX_SEEDS or not 1 <= self.quick.seeds <= MAX_SEEDS:
            got = f"{self.seeds} and {self.quick.seeds} for quick"
            raise ValueError(f"expected seeds from 1 to {MAX_SEEDS}, got {got}")
        for metric in (self.metric, *(part.metric for part in (*self.rows, *self.columns))):
            if metric not in ("", *METRICS):
                raise ValueError(describe_unknown("metric", metric, METRICS))
        for kind, parts in (("column", self.columns), ("row", self.rows), ("group", self.groups)):
            _check_names(kind, parts, getattr(self.quick, f"{kind}s") or ())
        parts = [*self.groups, *self.rows, *self.columns]
        tables = (table for part in parts for table in (part.settings, part.paper, *part.trials))
        for settings in (self.settings, self.quick.settings, *tables):
            _check_settings(settings)
        for group in self.groups:
            if not isinstance(dataset := group.paper.get("dataset", ""), str):
                raise ValueError(f"group {group.name}: expected own.dataset to be a name, got {dataset!r}")
        for row in self.rows:
            self._check_row(row)
        if self.against and self.against not in {row.name for row in self.rows}:
            raise ValueError(describe_unknown("row in against", self.against, [row.name for row in self.rows]))
        self._check_measures()

    def _check_row(self, row: TablePart) -> None:
        if len(row.printed) != len(self.columns):
            raise ValueError(f"row {row.name}: expected {len(self.columns)} printed values, got {len(row.printed)}")
        if any(math.isinf(value) or abs(value) > MAX_PRINTED for value in row.printed):
            raise ValueError(f"row {row.name}: expected printed values below {MAX_PRINTED:g}, got {row.printed}")
        if row.group and self.group_of(row) is None:
            raise ValueError(f"row {row.name}: unknown group {row.group!r}")

    def _check_measures(self) -> None:
        measures = {self.get_question(row, column).measure for row in self.rows for column in self.columns}
        if self.has_attacks and measures & {"hours", "megabytes"}:
            raise ValueError(f"expected a measure of trainings or of attacks, got {', '.join(sorted(measures))}")
        if self.picture == "tradeoff" and not {"utility", "leak"} <= measures:
            raise ValueError("expected a column of utility and one of leak for picture tradeoff")

    @property
    def has_attacks(self) -> bool:
        """Whether any cell needs an evaluation with attacks; then utilities are those of that evaluation."""
        return any(self.get_question(row, column).measure in ATTACKED for row in self.rows for column in self.columns)

    def get_question(self, row: TablePart, column: TablePart) -> Asked:
        """Return what is measured at one cell."""
        strengths = (part.strength for part in (column, row) if part.strength is not None)
        return Asked(
            measure=column.measure or row.measure or self.measure,
            attack=column.attack or row.attack or self.attack,
            strength=next(strengths, self.strength),
            metric=column.metric or row.metric or self.metric,
            phase=column.phase,
            defense=row.defense,
            target=column.target,
            guessed=column.guessed,
        )

    def shorten(self) -> Recipe:
        """Return the recipe of a quick run."""
        quick = self.quick
        kept = [k for k, column in enumerate(self.columns) if quick.columns is None or column.name in quick.columns]
        rows = [
            msgspec.structs.replace(row, printed=[row.printed[k] for k in kept])
            for row in self.rows
            if (quick.rows is None or row.name in quick.rows) and (quick.groups is None or row.group in quick.groups)
        ]
        if not rows or not kept:
            raise UsageError("expected rows and columns for --quick, got none: change groups, rows or columns in quick")
        return msgspec.structs.replace(
            self,
            columns=[self.columns[k] for k in kept],
            rows=rows,
            seeds=quick.seeds,
            settings=merge_tables(self.settings, quick.settings),
        )

    def group_of(self, row: TablePart) -> TablePart | None:
        """Return the group of a row."""
        return next((group for group in self.groups if group.name == row.group), None)

    def get_settings(self, row: TablePart, column: TablePart) -> Table:
        """Return all settings of one cell of the table."""
        group = self.group_of(row)
        settings = merge_tables(self.settings, group.settings if group else {}, row.settings, column.settings)
        methods = {specs.parse_method(text).name for text in settings.get("methods", ())}
        others = set(specs.list_methods()) - methods  # a column may have options of the methods of several rows
        if "method" in settings:
            settings["method"] = {name: given for name, given in settings["method"].items() if name not in others}
        return merge_tables({"model": {"encoder": self._encoder}}, settings) if self._encoder else settings

    def list_trials(self, row: TablePart, column: TablePart) -> list[Table]:
        """Return the settings that one cell of the table compares, usually a single one.

        Raises:
            UsageError: rates without a number of labels.
        """
        settings, group = self.get_settings(row, column), self.group_of(row)
        names = [specs.parse_method(text).name for text in settings.get("methods", ())]
        has_rate = all("train.lr" in specs.load_class("methods", name).list_ranges() for name in names)
        if row.trials or not self.rates or not has_rate or (group and group.original):
            return [merge_tables(settings, trial) for trial in row.trials or [{}]]
        labels = settings.get("data", {}).get("n_labeled")
        if not isinstance(labels, int):
            raise UsageError(f"expected a number of labels in data.n_labeled with rates, got {labels!r}")
        data = {"n_labeled": labels + round(labels / 4), "validation": 0.2}  # so that ``labels`` are left to learn from
        return [merge_tables(settings, {"data": data, "train": {"lr": rate}}) for rate in self.rates]

    @property
    def _encoder(self) -> str:
        """The encoder of all methods where settings name none: they are compared, and so they have the same."""
        parts = (self.settings, *(part.settings for part in (*self.groups, *self.rows, *self.columns)))
        named = {specs.parse_method(text).name for settings in parts for text in settings.get("methods", ())}
        known = [specs.load_class("methods", name) for name in named if name in specs.list_methods()]
        return "auto" if any(method.encoder == "auto" for method in known) else ""


def _check_names(kind: str, parts: Sequence[TablePart], quick: Collection[str]) -> None:
    """Raise ValueError unless the parts of one kind have different names, among them those of a quick run."""
    if not parts and kind != "group":
        raise ValueError(f"expected a {kind}, got none")
    names = [part.name for part in parts]
    if len({(part.group, part.name) for part in parts}) < len(parts):
        raise ValueError(f"expected different names of each {kind}, got {', '.join(names)}")
    for name in quick:
        if name not in names:
            raise ValueError(f"quick: {describe_unknown(kind, name, names)}")


def _check_settings(settings: Table) -> None:
    methods, options = settings.get("methods", []), settings.get("method", {})
    if not isinstance(methods, list) or not all(isinstance(name, str) for name in methods):
        raise ValueError(f"expected methods to be a list of names, got {methods!r}")
    if not isinstance(options, dict):
        raise ValueError(f"expected method to be a table of options by method, got {options!r}")
    if "seeds" in settings:
        raise ValueError("expected seeds beside settings, got them in settings: move them")


def list_recipes() -> list[str]:
    """Return the names of the recipes that come with vflsec."""
    return list_names(FOLDER)


def read_recipe(name: str) -> Recipe:
    """Return a recipe by its name, or from a TOML file of the user's.

    Raises:
        UsageError: no such recipe, or one that is wrong.
    """
    table = read_table(FOLDER, "recipe", name)
    if "like" in table:
        base = read_bundled(FOLDER, "recipe", str(table["like"]))
        table = {key: value for key, value in {**base, **table}.items() if key != "like"}
    if table.get("every") and not table.get("rows"):
        columns = table.get("columns")
        rows = list_rows(len(columns) if isinstance(columns, list) else 0)
        table = merge_tables({"rows": rows, "settings": {"defenses": list_sweeps()}}, table)
    return convert(name, table, Recipe)


def apply_data(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe on the paper's data, as far as ``folder`` has a folder of theirs, such as ``avazu``.

    Raises:
        UsageError: it has none that the recipe could use.
    """
    known = {group.paper["dataset"] for group in recipe.groups if "dataset" in group.paper}
    there = {name for name in known if (folder / name).is_dir()}
    if not there:
        expected = f"a folder {' or '.join(sorted(known))}" if known else "no --data-dir with this recipe"
        raise UsageError(f"expected {expected}, got {folder}: vflsec show dataset NAME says where data come from")

    def use_papers_data(group: TablePart) -> TablePart:
        name = group.paper.get("dataset")
        if name not in there:
            return group
        place = {"data": {"options": {"data_dir": str(folder / str(name))}}}
        return msgspec.structs.replace(group, settings=merge_tables(group.paper, place), original="")

    return msgspec.structs.replace(recipe, groups=[use_papers_data(group) for group in recipe.groups])


def apply_seeds(recipe: Recipe, seeds: int | None, *, quick: bool) -> Recipe:
    """Return the recipe as it is to be run."""
    chosen = recipe.shorten() if quick else recipe
    return msgspec.structs.replace(chosen, seeds=seeds) if seeds else chosen


def list_defenses() -> dict[str, type[Defense]]:
    """Return the built-in defenses of labels by name: the active party, which alone has them, carries these.

    They change the gradients that it sends, or how it learns from labels. Encryption of what it receives is no such
    defense.
    """
    known = {name: registry.load("defenses", name) for name in registry.list_all("defenses")}
    return {
        name: kind
        for name, kind in known.items()
        if registry.get_origin("defenses", name) == "built in"
        and (kind.points[:1] == (Kind.GRADIENT,) or _is_on_learning(kind))
    }


def _is_on_learning(kind: type[Defense]) -> bool:
    return any(hook.run_by is Runs.ACTIVE for hook in list_hooks(kind) - {hooks.PROTOCOL})


def _find_ends(kind: type[Defense]) -> tuple[float, ...]:
    """Return the first and the last of a defense's usual strengths."""
    return tuple(dict.fromkeys((kind.strengths[0], kind.strengths[-1])))


def list_sweeps() -> list[str]:
    """Return each defense of labels with its strengths, as settings name them."""
    return [f"{name}:lambda={','.join(map(repr, _find_ends(kind)))}" for name, kind in list_defenses().items()]


def list_rows(columns: int) -> list[Table]:
    """Return the rows of a recipe: without a defense, then each defense at each of its strengths."""
    printed = [math.nan] * columns
    return [
        {"name": UNDEFENDED, "printed": printed},
        *(
            {"name": f"{name} {strength:.4g}", "printed": printed, "defense": name, "strength": strength}
            for name, kind in list_defenses().items()
            for strength in _find_ends(kind)
        ),
    ]
