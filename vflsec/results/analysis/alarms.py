"""Signs that the numbers of a report are not about the system that it names, so that no limit on them may hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vflsec.base.checks import count
from vflsec.results.analysis.results import Leak, Point
from vflsec.results.analysis.usefulness import Place, Useless, sentences
from vflsec.results.records.manifest import Manifest, RowEntry
from vflsec.results.records.schema import Record, Result

FAR = 0.1
"""How far below *alone* the strongest attack must be, and by half of what *alone* gains over chance."""

MOST_KNOWN = 0.1
"""An adversary that knows the labels of a larger share of a class makes *alone* too strong to be compared with."""

LEAST_USED = 0.5
"""If all parties hold no more than this share of the smallest one's rows, their ids may be written differently."""


def alarms(
    manifest: Manifest, records: Mapping[str, Record], points: Sequence[Point], useless: Mapping[Place, Useless]
) -> list[str]:
    """Return a sentence for each sign, with the way out.

    Args:
        manifest: of the report.
        records: by key.
        points: of the attacks, without headlines.
        useless: the joint models that are of no use; with a defense, it may be the cause.
    """
    found = [*manifest.misfit, *_few_used(manifest), *_known(manifest, records), *_collapsed(manifest, records)]
    found += [f"{line}: check labels and ids, or train a better model" for line in sentences(useless, is_shown=True)]
    return [*found, *_constant(manifest, records), *_far_below(manifest, records, points)]


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
            by_place.setdefault(f"{_place(row, manifest)}: {record.error or 'the model collapsed'}", set()).add(
                row.seed
            )
    for place, seeds in by_place.items():
        yield f"{place} ({len(seeds)} of {count(manifest.seeds, 'training')})"


def _constant(manifest: Manifest, records: Mapping[str, Record]) -> Iterator[str]:
    """Yield the attacks that score all rows alike though they do not without the federation.

    If no attack on a target has another score, or an audit's attack has none without the federation, that is a sign by
    itself, but under a defense, which may cause it.
    """
    alone = {(one.label, one.seed): records.get(one.key) for one in manifest.baselines}
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
            own = alone.get((row.attack, row.seed))
            single = bool(manifest.audited) and not manifest.declared and not (own and own.leak)
            if every or single or (own and own.leak and not is_constant(own)):
                place = "" if manifest.audited else f" ({_place(row, manifest)})"
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
    own = {one.label for one in manifest.baselines if (record := records.get(one.key)) and record.leak}
    reading = {attack.label for attack in manifest.attacks if not attack.baseline}
    cells: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        if point.strength == 0 and point.attack in reading and point.leak.mean is not None:
            cells.setdefault((point.method, point.target), []).append(point)
    for (_, target), cell in cells.items():
        leaks = [leak for point in cell for leak in (point.leak, point.leak_train) if leak.mean is not None]
        if any(point.attack in own for point in cell) and all(map(is_far_below, leaks)):
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


def _place(row: RowEntry, manifest: Manifest) -> str:
    return f"{row.method}, {f'{row.defense} {row.strength:g}' if row.strength else manifest.undefended}"
