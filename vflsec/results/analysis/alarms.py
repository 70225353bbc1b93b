"""Signs that the numbers of a report are not about the system that it names, so that no limit on them may hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from vflsec.base.checks import count
from vflsec.results.analysis.intervals import DIFFERENCE, interval, seen
from vflsec.results.analysis.results import Leak, Point
from vflsec.results.records.manifest import Manifest, RowEntry
from vflsec.results.records.schema import Block, Record, Result

SAME = 0.0005
"""Utilities that differ by less look equal in a table."""

FAR = 0.1
"""How far below *alone* the strongest attack must be, and by half of what *alone* gains over chance."""

MOST_KNOWN = 0.1
"""An adversary that knows the labels of a larger share of a class makes *alone* too strong to be compared with."""

LEAST_USED = 0.5
"""If all parties hold no more than this share of the smallest one's rows, their ids may be written differently."""


PlaceKey = tuple[str, str, float]
"""Method, defense and strength."""


class Useless(NamedTuple):
    """Why a joint model is of no use.

    Attributes:
        why: ``worse than bank alone`` or ``no better than chance``.
        values: the utilities that are compared.
        is_shown: whether the interval shows it, and not the mean alone.
    """

    why: str
    values: str
    is_shown: bool


def alarms(
    manifest: Manifest, records: Mapping[str, Record], points: Sequence[Point], useless: Mapping[PlaceKey, Useless]
) -> list[str]:
    """Return a sentence for each sign, with the way out.

    Args:
        manifest: of the report.
        records: by key.
        points: of the attacks, without headlines.
        useless: the joint models that are of no use; with a defense, it may be the cause.
    """
    models = sentences(useless, is_shown=True)
    return [
        *manifest.misfit,
        *_few_used(manifest),
        *_known(manifest, records),
        *_collapsed(manifest, records),
        *(f"{line}: check labels and ids, or train a better model" for line in models),
        *_constant(manifest, records),
        *_far_below(manifest, records, points),
    ]


def useless_models(manifest: Manifest, records: Mapping[str, Record]) -> dict[PlaceKey, Useless]:
    """Return the joint models that are of no use, by method, defense and strength.

    Of several trainings with one seed the best counts: an attack that acts in training may harm the model.
    """
    blocks: dict[PlaceKey, dict[int, Block]] = {}
    alone: dict[str, dict[int, float]] = {}
    for row in manifest.rows:
        record = records.get(row.key)
        if not isinstance(record, Result) or record.utility is None or record.control:
            continue
        by_seed = blocks.setdefault((row.method, row.defense, row.strength), {})
        both = (by_seed.get(row.seed, record.utility), record.utility)
        by_seed[row.seed] = max(both, key=lambda block: block.headline)
        if record.active_alone is not None:  # it is measured without a defense
            alone.setdefault(row.method, {})[row.seed] = record.active_alone
    active = manifest.names.get("active", "the active party")
    judged = {
        place: _judge_model(some, alone.get(place[0], {}), active, manifest.seeds) for place, some in blocks.items()
    }
    return {place: useless for place, useless in judged.items() if useless}


def sentences(useless: Mapping[PlaceKey, Useless], *, is_shown: bool) -> list[str]:
    """Return a sentence for each method whose joint model is of no use without a defense."""
    return list(
        dict.fromkeys(
            f"{method}: the joint model is {model.why}: {model.values}"
            for (method, _, strength), model in useless.items()
            if strength == 0 and model.is_shown is is_shown
        )
    )


def _judge_model(blocks: Mapping[int, Block], alone: Mapping[int, float], active: str, seeds: int) -> Useless | None:
    """Compare utilities with those of the active party alone, paired by seed, and with chance."""
    joint, chance = fmean(b.headline for b in blocks.values()), fmean(b.chance for b in blocks.values())
    metric = next(iter(blocks.values())).metric
    by_chance = f", {chance:.3f} by chance" * (joint <= chance)
    shared = [seed for seed in blocks if seed in alone]
    if shared:
        gain = interval([seen(lambda u, base=alone[s]: u - base, blocks[s]) for s in shared], seeds, DIFFERENCE)
        alone_mean, high = fmean(alone[s] for s in shared), gain["ci95"][1]
        if gain["mean"] < -SAME:
            both = f"{metric} {alone_mean + gain['mean']:.3f}, and {alone_mean:.3f}"
            values = f"{both} by a quick model of its own columns{by_chance}"
            return Useless(f"worse than {active} alone", values, bool(by_chance) or (high is not None and high < 0))
    return Useless("no better than chance", f"{metric} {joint:.3f}{by_chance}", True) if by_chance else None


def _few_used(manifest: Manifest) -> Iterator[str]:
    if manifest.used <= LEAST_USED:
        yield (
            f"all parties hold only {manifest.used:.0%} of the rows of the smallest one: check that they write ids in "
            f"the same way"
        )


def _known(manifest: Manifest, records: Mapping[str, Record]) -> Iterator[str]:
    on_labels = {attack.label for attack in manifest.attacks if attack.target == "labels"}
    rows = [records.get(row.key) for row in manifest.rows if row.attack in on_labels]
    shares = [block.known_of_class for record in rows if record for block in record.leak.values()]
    if (largest := max(shares, default=0.0)) > MOST_KNOWN:
        yield (
            f"{manifest.adversary} already knows the labels of {100 * largest:.0f} % of the training rows of one "
            f"class, so little is left to measure: use fewer known labels{_fewer(manifest, largest)}"
        )


def _fewer(manifest: Manifest, largest: float) -> str:
    """Return how many labels are a tenth of a class, if that is known: an even number, for two balanced classes."""
    n = manifest.settings.get("aux", {}).get("n", 0)
    return f", for example --set aux.n={max(2, int(n * MOST_KNOWN / largest) // 2 * 2)}" if n else ""


def _collapsed(manifest: Manifest, records: Mapping[str, Record]) -> Iterator[str]:
    by_place: dict[str, set[int]] = {}
    for row in manifest.rows:
        record = records.get(row.key)
        if record and record.status == "collapsed":
            by_place.setdefault(f"{_describe(row, manifest)}: {record.error or 'the model collapsed'}", set()).add(
                row.seed
            )
    for place, seeds in by_place.items():
        yield f"{place} ({len(seeds)} of {count(manifest.seeds, 'training')})"


def _constant(manifest: Manifest, records: Mapping[str, Record]) -> Iterator[str]:
    """Yield the attacks that score all rows alike though they do not without the federation.

    If no attack on a target has another score, or an audit's attack has none without the federation, that is a sign by
    itself, but under a defense, which may cause it.
    """
    alone = {(entry.label, entry.seed): records.get(entry.key) for entry in manifest.baselines}
    by_cell: dict[tuple[str, str], list[tuple[RowEntry, Result]]] = {}
    targets = {attack.label: attack.target for attack in manifest.attacks if not attack.baseline}
    for row in manifest.rows:
        record = records.get(row.key)
        if isinstance(record, Result) and record.leak and row.attack in targets:
            by_cell.setdefault((record.cell, f"{targets[row.attack]} {row.seed}"), []).append((row, record))
    names: dict[str, None] = {}
    for cell in by_cell.values():
        constant = [(row, record) for row, record in cell if is_constant(record)]
        every = len(constant) == len(cell) and not any(record.defenses for _, record in cell)
        for row, _ in constant:
            baseline = alone.get((row.attack, row.seed))
            is_single = bool(manifest.audited) and not manifest.declared and not (baseline and baseline.leak)
            if every or is_single or (baseline and baseline.leak and not is_constant(baseline)):
                place = "" if manifest.audited else f" ({_describe(row, manifest)})"
                names[f"{row.attack}{place}"] = None
    if names:
        yield f"all rows have the same score by {', '.join(names)}: check that what it reads is not constant"


def is_constant(record: Record) -> bool:
    """Whether some split has the same scores in all rows."""
    return any(block.constant for block in record.leak.values())


def _far_below(manifest: Manifest, records: Mapping[str, Record], points: Sequence[Point]) -> Iterator[str]:
    """Yield the targets on which all attacks are far below *alone*, without a defense, which may cause it.

    One of them must have a number without the federation as well: many attacks read single messages and know little.
    """
    if manifest.settings.get("fixed"):
        return
    baselines = {entry.label for entry in manifest.baselines if (record := records.get(entry.key)) and record.leak}
    reading = {attack.label for attack in manifest.attacks if not attack.baseline}
    cells: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        if point.strength == 0 and point.attack in reading and point.leak.mean is not None:
            cells.setdefault((point.method, point.target), []).append(point)
    for (_, target), cell in cells.items():
        leaks = [leak for point in cell for leak in (point.leak, point.leak_train) if leak.mean is not None]
        if any(point.attack in baselines for point in cell) and all(map(is_far_below, leaks)):
            yield (
                f"all attacks on {target} are far below what {manifest.adversary} infers without joining: check that "
                f"what is attacked belongs to these rows and columns"
            )


def is_far_below(leak: Leak) -> bool:
    """Whether the interval of an attack lies far below that of *alone*."""
    upper, low = leak.ci95[1], leak.alone_ci95[0]
    if upper is None or low is None:
        return False
    return low - upper > max(FAR, (low - (leak.chance or 0.0)) / 2)


def _describe(row: RowEntry, manifest: Manifest) -> str:
    return f"{row.method}, {f'{row.defense} {row.strength:g}' if row.strength else manifest.undefended}"
