"""For how many trainings numbers hold, and what all trainings of a report would spend if their labels were real."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vflsec.base.checks import count
from vflsec.results.analysis.results import Point
from vflsec.results.records.manifest import Manifest
from vflsec.results.records.schema import Record, Result

Spending = dict[str, dict[str, tuple[float, int]]]
"""By defense and training, or trainings that share one draw, the epsilon that it spends and how many these are."""


def spending_of(manifest: Manifest, records: Mapping[str, Record]) -> Spending:
    """Return what each defense spends in each training of an evaluation; of an audited system nothing."""
    found: dict[str, dict[str, tuple[float, int]]] = {}
    trainings = manifest.settings.get("trainings", 1)
    for row in manifest.rows if not manifest.audited else ():
        record = records.get(row.key)
        if not isinstance(record, Result):
            continue
        for one in record.spent:
            split = f"{manifest.dataset} {manifest.settings.get('data')} {row.seed} {one['defense']}"
            own, key = found.setdefault(one["defense"].partition(":")[0], {}), split if "fixed" in one else record.cell
            own[key] = max(own.get(key, (0.0, 0)), (one["epsilon"], trainings))
    return found


def together(each: Iterable[Spending]) -> Spending:
    """Return the spending of several evaluations, which may share trainings."""
    found: dict[str, dict[str, tuple[float, int]]] = {}
    for spending in each:
        for defense, by_training in spending.items():
            own = found.setdefault(defense, {})
            own |= {key: max(own.get(key, (0.0, 0)), spent) for key, spent in by_training.items()}
    return found


def notes_on_spending(spending: Spending, points: Sequence[Point]) -> list[str]:
    """Return a note for each defense with several trainings: what they would spend on one row in all.

    Args:
        spending: of these trainings.
        points: of all trainings.
    """
    trained = [{one["defense"].partition(":")[0] for one in p.spent} for p in points if p.status != "missing"]
    found = []
    for defense, own in spending.items():
        others = ", and trainings without it have no bound" if any(defense not in one for one in trained) else ""
        if len(own) > 1:
            found.append(
                f"the {sum(n for _, n in own.values())} trainings with {defense} here would spend epsilon "
                f"{sum(epsilon for epsilon, _ in own.values()):.4g} together on a row that is in all of "
                f"them{others}: choose settings on data that are not sensitive"
            )
    return found


def notes_on_trainings(points: Iterable[Point]) -> list[str]:
    """Return the note for how many trainings the numbers hold, if several or if an epsilon depends on it."""
    found = [point for point in points if point.trainings > 1 or point.spent]
    if not found:
        return []
    trainings = max(point.trainings for point in found)
    numbers = "leak and ε are" if any(point.spent for point in found) else "the leak is"
    more = "" if trainings > 1 else "; more of them leak more (--trainings)"
    return [f"{numbers} for an adversary who has seen {count(trainings, 'training')} on the same rows{more}"]
