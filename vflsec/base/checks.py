"""Checks of a single argument: the keyword is the name the message shows.

>>> check_positive(epochs=0)
Traceback (most recent call last):
    ...
vflsec.base.errors.UsageError: expected epochs > 0, got 0
"""

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

from vflsec.base.errors import UsageError

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def check_positive(**named: float) -> None:
    """Raise UsageError unless every named number is greater than zero."""
    _check(named, "{} > 0", lambda value: value > 0)


def check_positive_or_none(**named: float | None) -> None:
    """Raise UsageError unless every named number that is not None is greater than zero."""
    check_positive(**{name: value for name, value in named.items() if value is not None})


def check_finite(**named: float) -> None:
    """Raise UsageError unless every named number is finite."""
    _check(named, "a finite {}", math.isfinite)


def check_non_negative(**named: float) -> None:
    """Raise UsageError unless every named number is at least zero."""
    _check(named, "{} >= 0", lambda value: value >= 0)


def check_fraction(**named: float) -> None:
    """Raise UsageError unless every named number lies in (0, 1]."""
    _check(named, "0 < {} <= 1", lambda value: 0 < value <= 1)


def check_inside(**named: float) -> None:
    """Raise UsageError unless every named number lies in (0, 1)."""
    _check(named, "0 < {} < 1", lambda value: 0 < value < 1)


def share(**named: float) -> None:
    """Raise UsageError unless every named number lies in [0, 1]."""
    _check(named, "0 <= {} <= 1", lambda value: 0 <= value <= 1)


def _check(named: Mapping[str, float], wanted: str, holds: Callable[[float], bool]) -> None:
    for name, value in named.items():
        if not holds(value):
            raise UsageError(f"expected {wanted.format(name)}, got {value}")


def expect_known(known: Collection[str], **named: str) -> None:
    """Raise UsageError, with a suggestion, unless every named string is among ``known``."""
    for name, value in named.items():
        if value not in known:
            raise UsageError(describe_unknown(name, value, known))


def count(n: int, what: str, plural: str = "") -> str:
    """Return ``1 run`` or ``2 runs``.

    >>> count(1, "run"), count(2, "run"), count(2, "pass", "passes")
    ('1 run', '2 runs', '2 passes')
    """
    return f"{n} {what if n == 1 else plural or what + 's'}"


def group(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items by their keys; keys and items keep their order.

    >>> group(["iso", "mid", "marvell"], lambda name: name[0])
    {'i': ['iso'], 'm': ['mid', 'marvell']}
    """
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def suggest(value: str, known: Collection[str]) -> str:
    """Return `` Did you mean NAME?`` with the known name that is most like ``value``, or nothing if none is.

    Capitals and underscores do not count. The beginning of several names suggests these.

    >>> suggest("ISO", ["iso", "marvell"]), suggest("fed", ["fedcvt", "fedpass", "iso"])
    (' Did you mean iso?', ' Did you mean fedcvt or fedpass?')
    """
    names = {_fold(name): name for name in sorted(known, reverse=True)}
    begun = sorted(names[name] for name in names if value and name.startswith(_fold(value)))
    near = [names[name] for name in get_close_matches(_fold(value), names, n=1)]
    nearest = [names[_fold(value)]] if _fold(value) in names else begun[:3] or near
    return f" Did you mean {', '.join(nearest[:-1])}{' or ' * (len(nearest) > 1)}{nearest[-1]}?" if nearest else ""


def _fold(name: str) -> str:
    return name.casefold().replace("_", "-")


def describe_unknown(what: str, value: str, known: Collection[str]) -> str:
    """Return the sentence for an unknown name: the nearest known one, then all of them."""
    hint = suggest(value, known)
    return f"unknown {what} {value!r}.{hint} Known: {', '.join(sorted(known)) or 'none'}"
