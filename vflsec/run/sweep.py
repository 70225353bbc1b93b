"""Several evaluations that differ in a few settings: a grid of values, or values in pairs."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vflsec.base.errors import UsageError
from vflsec.results.records.folder import home
from vflsec.results.records.manifest import Manifest
from vflsec.results.records.schema import Record
from vflsec.results.records.sweep import Sweep, SweepPoint, exact, is_sweep, write_sweep
from vflsec.run import engine, plan
from vflsec.run import spec as specs
from vflsec.run.grammar import parse_value
from vflsec.run.manifest import manifest_of
from vflsec.run.spec import EvalSpec
from vflsec.run.store import StageDone, Store, writing

MOST_POINTS = 1000


class Point(NamedTuple):
    """One evaluation of a sweep, checked: the values of the settings that differ, and all that is computed there."""

    values: dict[str, Any]
    spec: EvalSpec
    manifest: Manifest
    left_out: dict[str, str]

    @property
    def name(self) -> str:
        """Return ``n_labeled=200,gamma=0.5``, which is the name of a folder."""
        text = ",".join(f"{path.rpartition('.')[2]}={_text(value)}" for path, value in self.values.items())
        return re.sub(r"[^\w.,=+-]", "_", text).encode()[:100].decode(errors="ignore")


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """Return path and values of ``path.to.key=1,2,3``; values that hold commas are written as a TOML list.

    Raises:
        UsageError: a text of another form.
    """
    path, equals, values = (part.strip() for part in text.partition("="))
    if not (equals and path and values):
        raise UsageError(f"expected --sweep path.to.key=value,value, got {text!r}")
    whole = parse_value(values)
    return path, whole if isinstance(whole, list) else [parse_value(one.strip()) for one in values.split(",")]


def is_several(assignment: str) -> bool:
    """Whether ``path.to.key=value`` names several values: an unquoted list with commas."""
    value = assignment.partition("=")[2].strip()
    return "," in value and isinstance(parse_value(value), str) and value[:1] not in ("'", '"')


def points(axes: Mapping[str, Sequence[Any]], *, paired: bool) -> list[dict[str, Any]]:
    """Return the values of each point by path: every combination, or the first of each axis, the second, and so on.

    Raises:
        UsageError: an axis without values, twice the same value, too many points, or pairs of unequal length.
    """
    for path, values in axes.items():
        if not values or any(one in values[:k] for k, one in enumerate(values)):
            raise UsageError(f"expected different values for {path}, got {list(values)}")
    if paired and len({len(values) for values in axes.values()}) > 1:
        sizes = ", ".join(f"{len(values)} of {path}" for path, values in axes.items())
        raise UsageError(f"expected as many values of each setting with --paired, got {sizes}")
    together = zip(*axes.values(), strict=True) if paired else product(*axes.values())
    found = [dict(zip(axes, values, strict=True)) for values in together]
    if len(found) > MOST_POINTS:
        raise UsageError(f"expected at most {MOST_POINTS} points, got {len(found)}: sweep fewer values")
    return found


def at(settings: Mapping[str, Any], values: Mapping[str, Any]) -> EvalSpec:
    """Return the evaluation at one point.

    Raises:
        UsageError: a setting that does not exist, or does not take its value.
    """
    chosen: dict[str, Any] = copy.deepcopy(dict(settings))
    for path, value in values.items():
        specs.put(chosen, _full(path, chosen), value, path)
    return specs.read(chosen)


def _full(path: str, settings: Mapping[str, Any]) -> str:
    """Return ``method.gamma`` with the name of the method, of which there must be one."""
    kind, _, rest = path.partition(".")
    named: Iterable[str] = settings.get("methods", EvalSpec().methods)
    methods = [specs.parse_method(text).name for text in named]
    if kind != "method" or rest.partition(".")[0] in {*methods, *specs.method_names()}:
        return path
    if len(methods) != 1:
        raise UsageError(f"expected method.NAME.{rest} for one of {', '.join(methods)}, got {path}")
    return f"method.{methods[0]}.{rest}"


def prepare(
    settings: Mapping[str, Any], axes: Mapping[str, Sequence[Any]], *, paired: bool, command: Sequence[str] = ()
) -> list[Point]:
    """Return the points of a sweep, after checking each; nothing is computed or written.

    Raises:
        UsageError: as of ``points``, ``at`` and ``engine.check``.
        DataError: the dataset of a point cannot be read.
        InsufficientView: an attack that cannot be mounted at a point.
    """
    found = []
    for values in points(axes, paired=paired):
        spec = at(settings, values)
        names = plan.names_of(spec)
        spec, left_out = engine.every_attack(plan.with_standard_names(spec, names))
        engine.check(spec)
        found.append(Point(values, spec, manifest_of(spec, command, names), left_out))
    return found


def write(axes: Mapping[str, Sequence[Any]], found: Sequence[Point], store: Store, *, paired: bool) -> None:
    """Write what the sweep varies, and settings and manifest of each point.

    Raises:
        StoreError: the folder cannot be written.
        UsageError: it holds an evaluation that is no sweep.
    """
    expect_kind(store.folder, sweep=True)
    listed = [SweepPoint(name=_folder(k, point), values=point.values) for k, point in enumerate(found)]
    with writing(store.folder):
        write_sweep(store.folder, Sweep(axes={k: list(v) for k, v in axes.items()}, paired=paired, points=listed))
    for one, point in zip(listed, found, strict=True):
        store.write_settings(specs.to_toml(point.spec), point.manifest, one.name)


def expect_kind(folder: Path, *, sweep: bool) -> None:
    """Raise UsageError if ``folder`` holds a sweep where one evaluation is expected, or the other way round.

    Also if it is a point of a sweep, whose results are those of the sweep.
    """
    if home(folder) != folder:
        of = f"a point of the sweep in {home(folder)}"
        raise UsageError(f"expected a folder of its own, got {of}: choose another --out")
    if sweep and (folder / "manifest.json").exists():
        raise UsageError(f"expected a folder for a sweep, got {folder} with an evaluation: choose another --out")
    if not sweep and is_sweep(folder):
        raise UsageError(f"expected a folder for an evaluation, got {folder} with a sweep: choose another --out")


def compute(found: Sequence[Point], store: Store, **how: Any) -> Iterator[Record | StageDone]:
    """Compute what ``store`` lacks, point by point, as ``engine.evaluate`` does; points share equal results.

    Points that differ in the number of trainings are computed together, and share these.
    """
    for spec, trainings in _together(found):
        yield from engine.evaluate(engine.plan(spec, store, trainings=trainings), store, **how)


def _together(found: Iterable[Point]) -> list[tuple[EvalSpec, list[int]]]:
    groups: dict[bytes, tuple[EvalSpec, list[int]]] = {}
    for point in found:
        like = msgspec.json.encode(msgspec.structs.replace(point.spec, trainings=1))
        groups.setdefault(like, (point.spec, []))[1].append(point.spec.trainings)
    return list(groups.values())


def title(first: Point, axes: Iterable[str]) -> str:
    """Return a name for the folder of a sweep."""
    return f"{first.spec.name}-by-{'-'.join(path.rpartition('.')[2] for path in axes)}"


def missing(found: Sequence[Point], store: Store | None) -> int:
    """Return the number of results and stages that ``store`` lacks, each counted once."""
    done: set[str] = set()
    for spec, trainings in _together(found):
        todo = engine.plan(spec, store, trainings=trainings)
        done |= {row.key for task in todo.tasks for row in task.rows}
        done |= {baseline.key for task in todo.tasks for baseline in task.baselines}
        done |= {task.cell.stage_key(task.stage) for task in todo.stages if task.stage}
        done |= {f"{task.shadows} {' '.join(cell.key for cell in task.group or (task.cell,))}" for task in todo.groups}
    return len(done)


def _folder(k: int, point: Point) -> str:
    return f"{k}-{point.name}"


def _text(value: Any) -> str:
    return exact(value) if isinstance(value, float) else str(value)
