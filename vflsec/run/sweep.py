"""The points of a sweep: one evaluation for each combination of values."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from vflsec.base.errors import UsageError
from vflsec.run import spec as specs
from vflsec.run.job import Evaluation, prepare
from vflsec.run.spec import EvalSpec

MAX_POINTS = 1000


def list_points(axes: Mapping[str, Sequence[Any]], *, paired: bool) -> list[dict[str, Any]]:
    """Return the values of each point by path: every combination, or the first of each axis, the second, and so on.

    Raises:
        UsageError: an axis without values, twice the same value, too many points, or pairs of unequal length.
    """
    for path, values in axes.items():
        if not values or any(value in values[:k] for k, value in enumerate(values)):
            raise UsageError(f"expected different values for {path}, got {list(values)}")
    if paired and len({len(values) for values in axes.values()}) > 1:
        sizes = ", ".join(f"{len(values)} of {path}" for path, values in axes.items())
        raise UsageError(f"expected as many values of each setting with --paired, got {sizes}")
    combined = list(zip(*axes.values(), strict=True) if paired else product(*axes.values()))
    if len(combined) > MAX_POINTS:
        raise UsageError(f"expected at most {MAX_POINTS} points, got {len(combined)}: sweep fewer values")
    return [dict(zip(axes, values, strict=True)) for values in combined]


def read_point(settings: Mapping[str, Any], values: Mapping[str, Any]) -> EvalSpec:
    """Return the evaluation at one point.

    Raises:
        UsageError: a setting that does not exist, or does not take its value.
    """
    chosen: dict[str, Any] = copy.deepcopy(dict(settings))
    for path, value in values.items():
        specs.put(chosen, _with_method(path, chosen), value, path)
    return specs.read(chosen)


def _with_method(path: str, settings: Mapping[str, Any]) -> str:
    """Return ``method.gamma`` with the name of the method, of which there must be a single one."""
    kind, _, rest = path.partition(".")
    named: Iterable[str] = settings.get("methods", EvalSpec().methods)
    methods = [specs.parse_method(text).name for text in named]
    if kind != "method" or rest.partition(".")[0] in {*methods, *specs.list_methods()}:
        return path
    if len(methods) != 1:
        raise UsageError(f"expected method.NAME.{rest} for one of {', '.join(methods)}, got {path}")
    return f"method.{methods[0]}.{rest}"


def prepare_sweep(
    settings: Mapping[str, Any], axes: Mapping[str, Sequence[Any]], *, paired: bool, command: Sequence[str] = ()
) -> list[Evaluation]:
    """Return the points of a sweep, after checking each; nothing is computed or written.

    Raises:
        UsageError: as of ``points``, ``settings_at`` and ``prepare``.
        DataError: the dataset of a point cannot be read.
        InsufficientView: an attack that cannot be mounted at a point.
    """
    return [prepare(read_point(settings, values), command, values) for values in list_points(axes, paired=paired)]


def name_sweep(first: Evaluation, axes: Iterable[str]) -> str:
    """Return a name for the folder of a sweep."""
    return f"{first.spec.name}-by-{'-'.join(path.rpartition('.')[2] for path in axes)}"
