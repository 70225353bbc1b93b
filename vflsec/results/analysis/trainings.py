"""What more seeds, trainings or means of the adversary add: when to stop, what is spent, and what still rises."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from vflsec.base.checks import count
from vflsec.results.analysis.groups import ALONE
from vflsec.results.analysis.intervals import get_longer_side
from vflsec.results.analysis.results import Ends, Point, Summary
from vflsec.results.records.manifest import Manifest
from vflsec.results.records.schema import Record, Result
from vflsec.results.statistics import compare_pairs

BLOCK = 5
"""Seeds that are added at once."""

MAX_SEEDS = 50
"""Seeds at which to stop in any case, unless another number is asked for."""

VISIBLE = 0.0005
"""A smaller rise is none."""

Spending = dict[str, dict[str, tuple[float, int]]]
"""By defense and training, or trainings that share one draw, the epsilon that it spends and how many these are."""


def list_stops(most: int) -> Iterator[int]:
    """Yield the numbers of seeds after which to look."""
    yield from range(BLOCK, most, BLOCK)
    yield most


def find_widest(summary: Summary) -> float | None:
    """Return the longest side of an interval of a headline's leak or of a utility; None if one is missing."""
    sides = [get_longer_side(point.leak.mean, point.leak.ci95) for point in summary.worst]
    sides += [get_longer_side(point.utility.mean, point.utility.ci95) for point in summary.points]
    known = [side for side in sides if side is not None]
    return max(known) if known and len(known) == len(sides) else None


def is_reached(summary: Summary, until: float) -> bool:
    """Whether each interval is at most ``until`` wide to one side."""
    half = find_widest(summary)
    return half is not None and half <= until


def note_on_seeds(summary: Summary, until: float) -> str:
    """Return the note on how many seeds there are, and why."""
    half = find_widest(summary)
    if half is None:
        return f"seeds were added until each interval is at most ±{until:g}: some result gave none"
    reached = "reached" if half <= until else "not reached"
    return f"seeds were added until each interval is at most ±{until:g}: {reached} with {summary.seeds}, ±{half:.4f}"


def find_spending(manifest: Manifest, records: Mapping[str, Record]) -> Spending:
    """Return what each defense spends in each training of an evaluation; of an audited system nothing."""
    spending: Spending = {}
    trainings = manifest.settings.get("trainings", 1)
    for row in manifest.rows if not manifest.audited else ():
        record = records.get(row.key)
        if not isinstance(record, Result):
            continue
        for spent in record.spent:
            split = f"{manifest.dataset} {manifest.settings.get('data')} {row.seed} {spent['defense']}"
            training = split if "fixed" in spent else record.cell
            _add(spending, spent["defense"].partition(":")[0], training, (spent["epsilon"], trainings))
    return spending


def add_up(each: Iterable[Spending]) -> Spending:
    """Return the spending of several evaluations, which may share trainings."""
    total: Spending = {}
    for spending in each:
        for defense, by_training in spending.items():
            for training, spent in by_training.items():
                _add(total, defense, training, spent)
    return total


def _add(spending: Spending, defense: str, training: str, spent: tuple[float, int]) -> None:
    by_training = spending.setdefault(defense, {})
    by_training[training] = max(by_training.get(training, (0.0, 0)), spent)


def note_spending(spending: Spending, points: Sequence[Point]) -> list[str]:
    """Return a note for each defense with several trainings: what they would spend on one row in all."""
    trained = [{spent["defense"].partition(":")[0] for spent in p.spent} for p in points if p.status != "missing"]
    notes = []
    for defense, by_training in spending.items():
        others = ", and trainings without it have no bound" if any(defense not in names for names in trained) else ""
        if len(by_training) > 1:
            notes.append(
                f"the {sum(n for _, n in by_training.values())} trainings with {defense} here, also those that an "
                f"attack acts in, would spend epsilon "
                f"{sum(epsilon for epsilon, _ in by_training.values()):.4g} together on a row that is in all of "
                f"them{others}: choose settings on data that are not sensitive"
            )
    return notes


def note_trainings(points: Iterable[Point]) -> list[str]:
    """Return the note for how many trainings the numbers hold, if several or if an epsilon depends on it."""
    relevant = [point for point in points if point.trainings > 1 or point.spent]
    if not relevant:
        return []
    trainings = max(point.trainings for point in relevant)
    numbers = "leak and ε are" if any(point.spent for point in relevant) else "the leak is"
    more = "" if trainings > 1 else "; more of them leak more (--trainings)"
    return [f"{numbers} for an adversary who has seen {count(trainings, 'training')} on the same rows{more}"]


class Rise(msgspec.Struct, frozen=True, kw_only=True):
    """By how much a leak exceeds that of the same attack with fewer means, or labels, paired by seed.

    Attributes:
        attack: its name, or ``worst`` for the headline.
        where: the values of the other settings that differ between the points of a sweep.
        before: the mean leak with fewer means; ``after`` is that with more.
        rise: the mean difference over ``n`` seeds, with its 95 % interval; its ends are None with one seed.
    """

    method: str
    defense: str
    strength: float
    target: str
    attack: str
    where: dict[str, str] = {}
    before: float
    after: float
    rise: float
    ci95: Ends
    n: int

    @property
    def still_rising(self) -> bool | None:
        """Whether the interval is above 0, by what three digits show; None without an interval."""
        return None if self.ci95[0] is None else self.ci95[0] >= VISIBLE


def compare(before: Summary, after: Summary, where: Mapping[str, str]) -> list[Rise]:
    """Return the rise of each headline and attack; none if the evaluations have other attacks.

    The undefended row, which all defenses share, comes once. A headline that is *alone* is left out: it rises with what
    the adversary knows without the federation.
    """
    first, second = _index_by_place(before), _index_by_place(after)
    if first.keys() != second.keys():
        return []
    return [
        _find_rise(point, second[place], where)
        for place, point in first.items()
        if point.leak.by_seed.keys() & second[place].leak.by_seed.keys() and second[place].choice != ALONE
    ]


def _index_by_place(summary: Summary) -> dict[tuple[str, str, float, str, str], Point]:
    points: dict[tuple[str, str, float, str, str], Point] = {}
    for point in (*summary.worst, *summary.points):
        defense = point.defense if point.strength else "none"
        points.setdefault((point.method, defense, point.strength, point.target, point.attack), point)
    return points


def _find_rise(before: Point, after: Point, where: Mapping[str, str]) -> Rise:
    a, b = before.leak.by_seed, after.leak.by_seed
    seeds = sorted(a.keys() & b.keys())
    test = compare_pairs([b[seed] - a[seed] for seed in seeds])
    return Rise(
        method=before.method, defense=before.defense if before.strength else "none", strength=before.strength,
        target=before.target, attack=before.attack, where=dict(where),
        before=sum(a[seed] for seed in seeds) / len(seeds), after=sum(b[seed] for seed in seeds) / len(seeds),
        rise=test.mean, ci95=(test.low, test.high) if test.n > 1 else (None, None), n=test.n,
    )  # fmt: skip
