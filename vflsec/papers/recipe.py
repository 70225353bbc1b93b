"""A paper's table as a grid of settings, and what was measured at each of its cells.

A recipe is a TOML file in the folder ``recipes``, or one that the user names: ``settings`` of all cells, and
``[[groups]]`` (datasets), ``[[rows]]`` and ``[[columns]]`` with settings of their own, of which the later win.
``[quick]`` says what a quick run leaves out. Each row holds the values that the paper prints. With ``like``, a recipe
starts from another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from vflsec.base.checks import unknown
from vflsec.base.errors import UsageError
from vflsec.core.attack import Target
from vflsec.core.federation import load_states
from vflsec.core.method import Trained
from vflsec.papers import every_defense
from vflsec.papers.grid import Grid, Place, Table, evaluation, expect_attack, merged, point, strengths, trainings
from vflsec.papers.settings_files import convert, list_names, read_bundled, read_table
from vflsec.results.metrics import METRICS
from vflsec.results.records.schema import Block, Result
from vflsec.run import spec as specs
from vflsec.run.cell import Cell
from vflsec.run.federation import build_federation, build_method
from vflsec.run.job import Evaluation
from vflsec.run.store import CellFacts, Store

FOLDER = Path(__file__).with_name("recipes")

MOST_SEEDS = 1000
LARGEST = 1e6
"""Printed values are below this."""

Measure = Literal["utility", "leak", "alone", "cap", "hours", "megabytes"]
ATTACKED = ("leak", "alone", "cap")
"""Measures that need an evaluation with attacks; the others need trainings alone."""

Picture = Literal["", "curves", "tradeoff", "changes", "importance", "swarm", "domains", "density"]


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group, a row or a column: its name in the paper, and its settings.

    Attributes:
        group: of a row: the group that it belongs to.
        printed: of a row: the paper's value for each column; NaN where it has none.
        measure, attack, strength, metric: of a row or column, in place of those of the recipe; a column's win.
        defense: of a row: the defense whose strength it is, where settings have several; empty for the only one.
        target: of a column of leaks: what is recovered, or ``integrity``.
        guessed: of a column of leaks: ``train`` for the leak on training rows; by default on test rows where an attack
            guesses them.
        phase: of a column with hours: the phase of training that is timed; empty for all of them.
        panel: of a row: its diagram, where a group has several.
        curve: of a row: the curve that it belongs to, where each row is a point of one; empty for its name.
        trials: of a row: settings of which, for each seed, those with the best metric on validation rows count.
        original: of a group: the paper's data, if the settings name others, which stand in for them.
        own: of a group: the settings that take the place of ``settings`` where the user has the paper's data.
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
    own: Table = {}


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
        metric: of utility or leak; empty for the headline metric of each dataset.
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
        notes: what else differs from the paper.
    """

    title: str
    source: str
    measure: Measure
    columns: list[Part]
    rows: list[Part]
    groups: list[Part] = []
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
    seeds: int = 5
    quick: Quick = Quick()
    notes: list[str] = []

    def __post_init__(self) -> None:
        """Check that rows, groups and printed values fit together."""
        if not 1 <= self.seeds <= MOST_SEEDS or not 1 <= self.quick.seeds <= MOST_SEEDS:
            got = f"{self.seeds} and {self.quick.seeds} for quick"
            raise ValueError(f"expected seeds from 1 to {MOST_SEEDS}, got {got}")
        for metric in (self.metric, *(part.metric for part in (*self.rows, *self.columns))):
            if metric not in ("", *METRICS):
                raise ValueError(unknown("metric", metric, METRICS))
        for kind, parts in (("column", self.columns), ("row", self.rows), ("group", self.groups)):
            _check_names(kind, parts, getattr(self.quick, f"{kind}s") or ())
        parts = [*self.groups, *self.rows, *self.columns]
        tables = (table for part in parts for table in (part.settings, part.own, *part.trials))
        for settings in (self.settings, self.quick.settings, *tables):
            _check_settings(settings)
        for group in self.groups:
            if not isinstance(dataset := group.own.get("dataset", ""), str):
                raise ValueError(f"group {group.name}: expected own.dataset to be a name, got {dataset!r}")
        for row in self.rows:
            self._check_row(row)
        if self.against and self.against not in {row.name for row in self.rows}:
            raise ValueError(unknown("row in against", self.against, [row.name for row in self.rows]))
        self._check_measures()

    def _check_row(self, row: Part) -> None:
        if len(row.printed) != len(self.columns):
            raise ValueError(f"row {row.name}: expected {len(self.columns)} printed values, got {len(row.printed)}")
        if any(math.isinf(value) or abs(value) > LARGEST for value in row.printed):
            raise ValueError(f"row {row.name}: expected printed values below {LARGEST:g}, got {row.printed}")
        if row.group and self.group_of(row) is None:
            raise ValueError(f"row {row.name}: unknown group {row.group!r}")
        if row.trials and self.attacked:
            raise ValueError(f"row {row.name}: expected no trials in a recipe with attacks, got {len(row.trials)}")

    def _check_measures(self) -> None:
        measures = {self.asked(row, column).measure for row in self.rows for column in self.columns}
        if self.attacked and measures & {"hours", "megabytes"}:
            raise ValueError(f"expected a measure of trainings or of attacks, got {', '.join(sorted(measures))}")
        if self.picture == "tradeoff" and not {"utility", "leak"} <= measures:
            raise ValueError("expected a column of utility and one of leak for picture tradeoff")

    @property
    def attacked(self) -> bool:
        """Whether any cell needs an evaluation with attacks; then utilities are those of that evaluation."""
        return any(self.asked(row, column).measure in ATTACKED for row in self.rows for column in self.columns)

    def asked(self, row: Part, column: Part) -> Asked:
        """Return what is measured at one cell."""
        strengths = (one.strength for one in (column, row) if one.strength is not None)
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

    def shortened(self) -> Recipe:
        """Return the recipe of a quick run."""
        quick = self.quick
        kept = [k for k, one in enumerate(self.columns) if quick.columns is None or one.name in quick.columns]
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
            settings=merged(self.settings, quick.settings),
        )

    def group_of(self, row: Part) -> Part | None:
        """Return the group of a row."""
        return next((group for group in self.groups if group.name == row.group), None)

    def settings_of(self, row: Part, column: Part) -> Table:
        """Return all settings of one cell of the table."""
        group = self.group_of(row)
        settings = merged(self.settings, group.settings if group else {}, row.settings, column.settings)
        own = {specs.parse_method(text).name for text in settings.get("methods", ())}
        others = set(specs.method_names()) - own  # a column may have options of the methods of several rows
        if "method" in settings:
            settings["method"] = {name: given for name, given in settings["method"].items() if name not in others}
        return merged({"model": {"encoder": self._encoder}}, settings) if self._encoder else settings

    @property
    def _encoder(self) -> str:
        """The encoder of all methods where settings name none: they are compared, and so they have the same."""
        parts = (self.settings, *(part.settings for part in (*self.groups, *self.rows, *self.columns)))
        named = {specs.parse_method(text).name for settings in parts for text in settings.get("methods", ())}
        known = [specs.class_of("methods", name) for name in named if name in specs.method_names()]
        return "auto" if any(method.encoder == "auto" for method in known) else ""


def _check_names(kind: str, parts: Sequence[Part], quick: Collection[str]) -> None:
    """Raise ValueError unless the parts of one kind have different names, among them those of a quick run."""
    if not parts and kind != "group":
        raise ValueError(f"expected a {kind}, got none")
    names = [part.name for part in parts]
    if len({(part.group, part.name) for part in parts}) < len(parts):
        raise ValueError(f"expected different names of each {kind}, got {', '.join(names)}")
    for name in quick:
        if name not in names:
            raise ValueError(f"quick: {unknown(kind, name, names)}")


def _check_settings(settings: Table) -> None:
    methods, options = settings.get("methods", []), settings.get("method", {})
    if not isinstance(methods, list) or not all(isinstance(name, str) for name in methods):
        raise ValueError(f"expected methods to be a list of names, got {methods!r}")
    if not isinstance(options, dict):
        raise ValueError(f"expected method to be a table of options by method, got {options!r}")
    if "seeds" in settings:
        raise ValueError("expected seeds beside settings, got them in settings: move them")


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured at one cell: a number for each seed that gave one; of a leak also what is inferred alone."""

    row: int
    column: int
    by_seed: dict[int, float]
    metric: str = ""
    alone: dict[int, float] = {}


def names() -> list[str]:
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
        rows = every_defense.rows(len(columns) if isinstance(columns, list) else 0)
        table = merged({"rows": rows, "settings": {"defenses": every_defense.swept()}}, table)
    return convert(name, table, Recipe)


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


class RecipeGrid(Grid):
    """The measurements of a recipe: which are to be made, and how.

    Args:
        recipe: of the table.
        store: where trainings and results are kept; a second run computes what is missing.
    """

    def __init__(self, recipe: Recipe, store: Store) -> None:
        """Check every cell of the table; nothing is computed."""
        super().__init__(store)
        self.recipe = recipe
        self.trials: dict[Place, list[list[Cell]]] = {}  # by seed
        made: dict[bytes, Any] = {}
        for i, row in enumerate(recipe.rows):
            for j, column in enumerate(recipe.columns):
                settings = recipe.settings_of(row, column)
                asked = recipe.asked(row, column)
                if recipe.attacked:
                    found = _once(made, settings, lambda given: _point(recipe, given))
                    _check_asked(asked, found.spec)
                    self.points[i, j] = found._replace(values={"row": row.name, "column": column.name})
                    continue
                trials = [merged(settings, trial) for trial in row.trials] or [settings]
                cells = [_once(made, one, lambda given: trainings(given, recipe.seeds)) for one in trials]
                self.trials[i, j] = [list(by_trial) for by_trial in zip(*cells, strict=True)]
                self.trainings[i, j] = [cell for own in cells for cell in own]
                if len(trials) > 1:  # validation rows choose among them
                    self.validated |= {cell.key for cell in self.trainings[i, j]}

    def seconds(self) -> float | None:
        """Return the mean time that a training or a result in the store has taken; None if there is none."""
        if self.recipe.attacked:
            manifests = [one.manifest for one in self.different_points]
            keys = {row.key for one in manifests for row in one.rows}
            keys |= {baseline.key for one in manifests for baseline in one.baselines}
            found = [record for key, record in self.store.records().items() if key in keys]
            trained = {one.cell: one.seconds.get("train", 0.0) for one in found if isinstance(one, Result)}
            spent = [sum(trained.values()), *(one.seconds.get("attack", 0.0) for one in found)]
            return sum(spent) / len(found) if found else None
        read = [self.facts(cell) for cell in self.different_cells.values()]
        times = [facts.seconds for facts in read if facts]
        return sum(times) / len(times) if times else None

    def measured(self) -> list[Measured]:
        """Return what the trainings in the store give at each cell of the table."""
        return [self._of_trainings(place, seeds) for place, seeds in self.trials.items()]

    def _of_trainings(self, place: tuple[int, int], seeds: Sequence[Sequence[Cell]]) -> Measured:
        asked = self.recipe.asked(self.recipe.rows[place[0]], self.recipe.columns[place[1]])
        found, metric = {}, asked.metric
        for trials in seeds:
            facts = chosen([one for one in map(self.facts, trials) if one])
            if facts is None or facts.status != "ok" or facts.utility is None:
                continue
            metric = metric or facts.utility.metric
            value = _value(facts, asked, metric, trials[0].dataset.name)
            if value is not None:
                found[trials[0].seed] = value
        return Measured(row=place[0], column=place[1], by_seed=found, metric=metric)

    def trained(self, row: int, column: int = 0) -> Iterator[Trained]:
        """Yield the trained federations of one cell of the table, by seed, loaded from the store."""
        for trials in self.trials[row, column]:
            if self.facts(trials[0]):
                federation, method = build_federation(trials[0], "cpu"), build_method(trials[0])
                method.build(federation)
                load_states(federation, self.store.cell(trials[0].key).path)
                yield Trained(method, federation, {})


def chosen(trials: Sequence[CellFacts]) -> CellFacts | None:
    """Return the facts of the trial with the best metric on validation rows; test rows play no part."""
    if len(trials) < 2:
        return trials[0] if trials else None
    return max(trials, key=lambda facts: -math.inf if facts.validation is None else facts.validation)


def _value(facts: CellFacts, asked: Asked, metric: str, dataset: str) -> float | None:
    """Return what is asked of one training; None if it has no such number."""
    if asked.measure == "hours":
        spent = facts.phase_seconds
        seconds = spent.get(asked.phase) if asked.phase else sum(spent.values())
        return None if seconds is None else seconds / 3600
    if asked.measure == "megabytes":
        sent = facts.reached.get("paper_bytes")
        return None if sent is None else sent / 2**20
    assert facts.utility is not None
    return metric_of(facts.utility, metric, dataset)


def metric_of(block: Block, metric: str, dataset: str) -> float:
    """Return a metric of a block.

    Raises:
        UsageError: it has no such metric.
    """
    if metric not in block.metrics:
        raise UsageError(f"expected a metric of {dataset}, got {metric}; known: {', '.join(block.metrics)}")
    return block.metrics[metric]


def _once(made: dict[bytes, Any], settings: Table, make: Callable[[Table], Any]) -> Any:
    """Return what ``make`` returns for ``settings``, made once."""
    key = msgspec.json.encode(settings, order="deterministic")
    if key not in made:
        made[key] = make(settings)
    return made[key]


def _point(recipe: Recipe, settings: Mapping[str, Any]) -> Evaluation:
    """Return the evaluation of one cell of a table with attacks, checked; of all attacks those on labels."""
    spec = evaluation(settings, recipe.seeds, target="labels")
    return point(spec, {})


def _check_asked(asked: Asked, spec: specs.EvalSpec) -> None:
    """Raise UsageError unless an evaluation gives what is asked of it."""
    known = strengths(spec)
    if asked.measure in ATTACKED:
        expect_attack(spec, asked.attack)
    if asked.measure == "cap" and len(known) == 1:
        raise UsageError("expected a defense with strengths in settings.defenses for CAP, got none")
    if asked.measure in ("leak", "alone", "utility") and asked.strength not in known:
        raise UsageError(f"expected strength among {sorted(known)}, got {asked.strength:g}")
