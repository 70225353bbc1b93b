"""The manifest of a results folder: everything that a report needs besides the records.

``manifest.json`` names each requested result by its key in ``records.jsonl``. It holds the settings, the hashes of data
and plug-ins, and the environment as plain data, so that a report neither imports the plug-ins nor opens the data.
Limits, sweeps and leaks of groups of rows have files beside it.
"""

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from vflsec.results.records.schema import Maybe

NO_ADVERSARY = "no adversary"
"""The name of the attack on a method that has no adversary."""

AUDITED = "audited"
"""The name of the method of a system that was trained elsewhere."""

UNDEFENDED = "no defense"
"""What strength 0 is called, where no defense is in every training."""

INTEGRITY = "integrity"
"""The target of attacks that change the training instead of inferring something."""

UNASKED, ACTS_UNASKED, TOO_DEAR = COULD = ("was not asked for", "acts in training, and was not asked for", "too dear")
"""How the reasons begin why an attack that could be mounted was not run; each other reason is that it could not."""

LARGEST_STRENGTH = 1e100
"""The strengths of a defense are below this."""

TARGETS = ("labels", "attribute", "features", "text", "membership", "parameters", "exposure", INTEGRITY)
"""The targets of attacks."""


class AttackEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An attack of the evaluation.

    Attributes:
        label: its name in the report, unique within an evaluation.
        name: its registered name, or ``path/to/file.py:Class``.
        target: what it recovers, and of whom and which column as far as that was chosen.
        baseline: whether it is part of *alone*, since it reads nothing of the federation.
        victim: the name of the party that it is on; empty for an attack on labels or membership.
        column: the name of the column that it recovers; empty for all or none.
        above: the median of a number, which is inferred as above it or not; of the training rows of the first seed.
    """

    label: str
    name: str
    target: str
    baseline: bool = False
    victim: str = ""
    column: str = ""
    above: float | None = None


class RowEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A requested result.

    Attributes:
        attack: the label of an attack, or ``no adversary``.
        key: of its record.
        control: whether it is the honest training to which an attack on integrity is compared.
    """

    method: str
    defense: str
    strength: float
    seed: int
    attack: str
    key: str
    control: bool = False


class BaselineEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A requested result without the federation.

    Attributes:
        label: of the attack.
        target: as of an attack.
        key: of its record.
    """

    method: str
    label: str
    target: str
    seed: int
    key: str


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the records come from.

    Attributes:
        time: when the evaluation was last started, UTC, ISO 8601.
        command: the words of the command line; empty from Python.
        versions: of vflsec, Python and libraries, and the kind of machine.
        commit: of the source tree of vflsec; None if it is not run from one.
        sources: the plug-ins and data of the settings, by kind and name, with version or hash of the content.
        cards: the first sentence on each method, defense and attack; for a defense with its guarantee.
    """

    time: str
    command: list[str]
    versions: dict[str, str]
    commit: str | None
    sources: dict[str, dict[str, Any]]
    cards: dict[str, dict[str, str]]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of an evaluation.

    Attributes:
        target: the utility at which ``reached`` is measured, ``train.target``.
        selected_on_test: whether epochs were chosen on test rows.
        audited: the file or folder of a system that was trained elsewhere, of which the utility may be unknown and
            seeds are draws of auxiliary samples; empty for an evaluation.
        rows: the requested results.
        baselines: the requested results without the federation.
        settings: all of them, as in ``spec.toml``.
        left_out: why each other attack was not run, by name.
        title: what the data call themselves; empty for ``dataset``.
        names: what the data call each party, by its name in records; others keep theirs.
        until: the half width of intervals at which no more seeds were added; None for a fixed number of seeds.
        used: the share of the smallest party's rows that all parties hold.
        misfit: what of the audited material does not fit the data, or cannot be verified to, though it was audited.
        confirmed: whether the user has checked that the audited material fits the data.
        declared: whether a defense was on in the training of the audited material.
        limited: whether limits were given, which ``gates.json`` then holds.
        data_notes: what looks wrong in the data.
        columns: the names of each party's columns, by its name in records; the active party, which holds the labels,
            is the first.
        classes: what a label can be.
        card: title, source, license and label of registered data.
        techniques: the declared names of methods and defenses from files, by ``path/to/file.py:Class``.
        exclusions: why ``all`` does not stand for each other attack of an evaluation, by name.
        questions: what each registered attack recovers, by name; empty in earlier versions.
    """

    dataset: str
    adversary: str
    seeds: int
    target: float | None
    selected_on_test: bool
    attacks: list[AttackEntry]
    rows: list[RowEntry]
    baselines: list[BaselineEntry] = msgspec.field(name="priors")
    settings: dict[str, Any]
    provenance: Provenance
    audited: str = ""
    left_out: dict[str, str] = {}
    title: str = ""
    names: dict[str, str] = {}
    techniques: dict[str, str] = {}
    until: float | None = None
    used: float = 1.0
    data_notes: list[str] = []
    columns: dict[str, list[str]] = {}
    classes: list[str] = []
    card: dict[str, str] = {}
    misfit: list[str] = []
    confirmed: bool = False
    declared: bool = False
    limited: bool = False
    exclusions: dict[str, str] = {}
    questions: dict[str, str] = {}

    @property
    def baseline_defense(self) -> str:
        """What strength 0 has: the defenses that are in every training, or no defense."""
        fixed = self.settings.get("fixed") or []
        return " + ".join(f"{defense['name']} {defense['strength']:.4g}" for defense in fixed) or UNDEFENDED

    def faults(self) -> Iterator[str]:
        """Yield the faults of a manifest that no evaluation can have written."""
        labels = {attack.label for attack in self.attacks} | {NO_ADVERSARY}
        for target in [attack.target for attack in self.attacks] + [baseline.target for baseline in self.baselines]:
            if target.partition(" ")[0] not in TARGETS:
                yield f"it has an unknown target {target!r}"
        for row in self.rows:
            if row.attack not in labels:
                yield f"it has a row of an unknown attack {row.attack!r}"
            if not (math.isfinite(row.strength) and 0 <= row.strength < LARGEST_STRENGTH):
                yield f"it has a row of strength {row.strength:g}"
        if _has_gap(self.settings):
            yield "its settings have null in a list"
        seeds = {row.seed for row in self.rows}
        if not self.rows or seeds != set(range(len(seeds))) or len(seeds) != self.seeds:
            yield f"its {self.seeds} seeds are not those of its rows"


def _has_gap(value: Any) -> bool:
    """Whether plain data has a null in a list, which TOML cannot hold."""
    if isinstance(value, dict):
        return any(map(_has_gap, value.values()))
    return isinstance(value, list) and any(item is None or _has_gap(item) for item in value)


class RunLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of one run.

    Attributes:
        max_leak: on the leak, by attack.
        min_utility: on the utility; None for no limit.
        max_undetected: on an advantage that could have been overlooked; None for no limit.
    """

    max_leak: dict[str, float] = {}
    min_utility: float | None = None
    max_undetected: float | None = None

    def __post_init__(self) -> None:
        """Check that limits are numbers to which a result can be compared."""
        for value in (*self.max_leak.values(), self.min_utility, self.max_undetected):
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"expected finite limits from 0 to 1, found {value:g}")


class SweepPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One evaluation of a sweep.

    Attributes:
        name: of its folder in ``points``.
        values: of the settings that differ, by path.
    """

    name: str
    values: dict[str, Any]

    def __post_init__(self) -> None:
        """Refuse names that lead elsewhere."""
        if not self.name or {"/", "\\", "\0"} & set(self.name) or self.name in (".", ".."):
            raise ValueError(f"{self.name!r} is no name of a point")


class Sweep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sweep varies.

    Attributes:
        axes: the values of each setting, by path.
        paired: whether the values belong together in their order; else every combination is a point.
        points: in the order of the axes.
    """

    axes: dict[str, list[Any]]
    paired: bool
    points: list[SweepPoint]


class Subgroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One group of rows.

    Attributes:
        group: the category, or the interval of a number.
        n: rows per seed.
        by_seed: the leak; empty if the group has too few rows of a class.
        ci95_rows: of the first seed.
    """

    group: str
    n: int
    by_seed: dict[int, float] = {}
    ci95_rows: tuple[Maybe, Maybe] = (None, None)


class Subgroups(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one attack on labels leaks of each group of rows, at one method, defense and strength.

    Attributes:
        keys: of its results, one for each seed.
        rows: the split that the leak is reported on.
        p: of the test that all groups leak the same; None with fewer than two groups that are large enough.
    """

    column: str
    keys: list[str]
    rows: str
    metric: str
    groups: list[Subgroup]
    p: Maybe


def to_text(value: Any) -> str:
    """Return a setting as text: a number is short if nothing is lost, else in full, so that no two look the same."""
    if not isinstance(value, float):
        return str(value)
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
