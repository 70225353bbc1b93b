"""A paper's table as a grid of settings, and what was measured at each of its cells.

A recipe is a TOML file in ``vflsec.recipes``, or one that the user names: ``settings`` of all cells, and ``[[groups]]``
(datasets), ``[[rows]]`` and ``[[columns]]`` with settings of their own, of which the later win. ``[quick]`` says what a
quick run leaves out. Each row holds the values that the paper prints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any, Literal

import msgspec

from vflsec.core import files
from vflsec.core.checks import unknown
from vflsec.core.errors import UsageError
from vflsec.core.metrics import METRICS
from vflsec.experiment import spec as specs
from vflsec.experiment.cell import Cell
from vflsec.experiment.grid import Grid, Table, evaluation, expect_attack, merged, point, strengths, trainings
from vflsec.experiment.spec import EvalSpec
from vflsec.experiment.store import Store
from vflsec.records.schema import Block

PACKAGE = "vflsec.recipes"

MOST_SEEDS = 1000
LARGEST = 1e6
"""Printed values are below this."""


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group, a row or a column: its name in the paper, and its settings.

    Attributes:
        group: of a row: the group that it belongs to.
        printed: of a row: the paper's value for each column; NaN where it has none.
        metric: of the utility in this column; empty for that of the recipe.
        original: of a group: the paper's data, if the settings name others, which stand in for them.
        own: of a group: the settings that take the place of ``settings`` where the user has the paper's data.
    """

    name: str
    settings: Table = {}
    group: str = ""
    printed: list[float] = []
    metric: str = ""
    original: str = ""
    own: Table = {}


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
        measure: ``utility``, the ``leak`` of ``attack`` at ``strength``, or ``cap`` of ``attack``.
        metric: of the utility; empty for the headline metric of each dataset.
        compared: whether the paper compares ``rows`` of one column or ``columns`` of one row.
        notes: what else differs from the paper.
    """

    title: str
    source: str
    measure: Literal["utility", "leak", "cap"]
    columns: list[Part]
    rows: list[Part]
    groups: list[Part] = []
    settings: Table = {}
    metric: str = ""
    attack: str = "mc"
    strength: float = 0.0
    compared: Literal["rows", "columns"] = "rows"
    seeds: int = 5
    quick: Quick = Quick()
    notes: list[str] = []

    def __post_init__(self) -> None:
        """Check that rows, groups and printed values fit together."""
        groups = {group.name for group in self.groups}
        if not 1 <= self.seeds <= MOST_SEEDS or not 1 <= self.quick.seeds <= MOST_SEEDS:
            got = f"{self.seeds} and {self.quick.seeds} for quick"
            raise ValueError(f"expected seeds from 1 to {MOST_SEEDS}, got {got}")
        if self.metric not in ("", *METRICS):
            raise ValueError(unknown("metric", self.metric, METRICS))
        for kind, parts in (("column", self.columns), ("row", self.rows), ("group", self.groups)):
            keys = [(part.group, part.name) for part in parts]
            if not keys and kind != "group":
                raise ValueError(f"expected a {kind}, got none")
            if len(set(keys)) < len(keys):
                raise ValueError(f"expected different names of each {kind}, got {', '.join(name for _, name in keys)}")
            chosen = getattr(self.quick, f"{kind}s")
            for name in chosen or ():
                if name not in {part.name for part in parts}:
                    raise ValueError(f"quick: {unknown(kind, name, [part.name for part in parts])}")
        parts = [*self.groups, *self.rows, *self.columns]
        for settings in (self.settings, self.quick.settings, *(part.settings for part in parts)):
            if "seeds" in settings:
                raise ValueError("expected seeds beside settings, got them in settings: move them")
        for row in self.rows:
            if len(row.printed) != len(self.columns):
                raise ValueError(f"row {row.name}: expected {len(self.columns)} printed values, got {len(row.printed)}")
            if any(math.isinf(value) or abs(value) > LARGEST for value in row.printed):
                raise ValueError(f"row {row.name}: expected printed values below {LARGEST:g}, got {row.printed}")
            if row.group not in groups | {""}:
                raise ValueError(f"row {row.name}: unknown group {row.group!r}")

    def shortened(self) -> Recipe:
        """Return the recipe of a quick run."""
        quick = self.quick
        kept = [k for k, one in enumerate(self.columns) if quick.columns is None or one.name in quick.columns]
        rows = [
            msgspec.structs.replace(row, printed=[row.printed[k] for k in kept])
            for row in self.rows
            if (quick.rows is None or row.name in quick.rows) and (quick.groups is None or row.group in quick.groups)
        ]
        return msgspec.structs.replace(
            self,
            columns=[self.columns[k] for k in kept],
            rows=rows,
            seeds=quick.seeds,
            settings=merged(self.settings, quick.settings),
        )

    def group_of(self, row: Part) -> Part | None:
        """Return the group of a row."""
        return next((group for group in self.groups if group.name == row.group), None)

    def settings_of(self, row: Part, column: Part) -> Table:
        """Return all settings of one cell of the table."""
        group = self.group_of(row)
        return merged(self.settings, group.settings if group else {}, row.settings, column.settings)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured at one cell: a number for each seed that gave one."""

    row: int
    column: int
    by_seed: dict[int, float]
    metric: str = ""


def names() -> list[str]:
    """Return the names of the recipes that come with vflsec."""
    found = (one.name for one in package_files(PACKAGE).iterdir())
    return sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml"))


def read_recipe(name: str) -> Recipe:
    """Return a recipe by its name, or from a TOML file of the user's.

    Raises:
        UsageError: no such recipe, or one that is wrong.
    """
    if name.endswith(".toml"):
        table = specs.read_toml(Path(name))
    elif name in names():
        table = files.parse_toml(package_files(PACKAGE).joinpath(f"{name}.toml").read_text(encoding="utf-8"))
    else:
        raise UsageError(unknown("recipe", name, names()))
    try:
        return msgspec.convert(table, Recipe)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"{name}: {error}") from None


def with_data(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe on the paper's data, as far as ``folder`` has a folder of theirs, such as ``avazu``.

    Raises:
        UsageError: it has none that the recipe could use.
    """
    known = {group.own["dataset"] for group in recipe.groups if "dataset" in group.own}
    found = {name for name in known if (folder / name).is_dir()}
    if not found:
        expected = f"a folder {' or '.join(sorted(known))}" if known else "no --data-dir with this recipe"
        raise UsageError(f"expected {expected}, got {folder}: vflsec show dataset NAME says where data come from")

    def on_own_data(group: Part) -> Part:
        name = group.own.get("dataset")
        if name not in found:
            return group
        place = {"data": {"options": {"data_dir": str(folder / str(name))}}}
        return msgspec.structs.replace(group, settings=merged(group.own, place), original="")

    return msgspec.structs.replace(recipe, groups=[on_own_data(group) for group in recipe.groups])


def with_seeds(recipe: Recipe, seeds: int | None, *, quick: bool) -> Recipe:
    """Return the recipe as it is to be run."""
    chosen = recipe.shortened() if quick else recipe
    return msgspec.structs.replace(chosen, seeds=seeds) if seeds else chosen


class Job(Grid):
    """The measurements of a recipe: which are to be made, and how.

    Args:
        recipe: of the table.
        store: where trainings and results are kept; a second run computes what is missing.
    """

    def __init__(self, recipe: Recipe, store: Store) -> None:
        """Check every cell of the table; nothing is computed."""
        super().__init__(store)
        self.recipe = recipe
        for i, row in enumerate(recipe.rows):
            for j, column in enumerate(recipe.columns):
                settings = recipe.settings_of(row, column)
                if recipe.measure == "utility":
                    self.trainings[i, j] = trainings(settings, recipe.seeds)
                else:
                    spec = _evaluation(recipe, settings)
                    self.points[i, j] = point(spec, {"row": row.name, "column": column.name})

    def utilities(self) -> list[Measured]:
        """Return the utility at each cell of the table, as far as it is in the store."""
        return [self._utility(place, cells) for place, cells in self.trainings.items()]

    def _utility(self, place: tuple[int, int], cells: Sequence[Cell]) -> Measured:
        found, metric = {}, self.recipe.columns[place[1]].metric or self.recipe.metric
        for cell in cells:
            facts = self.facts(cell)
            if facts is None or facts.status != "ok" or facts.utility is None:
                continue
            metric = metric or facts.utility.metric
            found[cell.seed] = metric_of(facts.utility, metric, cell.dataset)
        return Measured(row=place[0], column=place[1], by_seed=found, metric=metric)


def metric_of(block: Block, metric: str, dataset: str) -> float:
    """Return a metric of a block.

    Raises:
        UsageError: it has no such metric.
    """
    if metric not in block.metrics:
        raise UsageError(f"expected a metric of {dataset}, got {metric}; known: {', '.join(block.metrics)}")
    return block.metrics[metric]


def _evaluation(recipe: Recipe, settings: Mapping[str, Any]) -> EvalSpec:
    """Return the evaluation of one cell of a table of leaks or CAP, checked."""
    spec = evaluation(settings, recipe.seeds)
    expect_attack(spec, recipe.attack)
    if recipe.measure == "cap" and len(strengths(spec)) == 1:
        raise UsageError("expected a defense with strengths in settings.defenses for CAP, got none")
    if recipe.measure == "leak" and recipe.strength not in strengths(spec):
        raise UsageError(f"expected strength among {sorted(strengths(spec))}, got {recipe.strength:g}")
    return spec
