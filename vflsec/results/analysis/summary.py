"""From settings and records to the Summary that is reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from vflsec.base.checks import count
from vflsec.results.analysis.alarms import alarms, sentences, useless_models
from vflsec.results.analysis.folding import by_defense, c_dcs, caps, reach
from vflsec.results.analysis.gates import Limits, check_limits, gates
from vflsec.results.analysis.groups import CellGroup, alone_by_target
from vflsec.results.analysis.integrity import damages, on_integrity
from vflsec.results.analysis.ranking import disagreements, exposed, front, orders, ranks
from vflsec.results.analysis.results import Gate, Point, Summary
from vflsec.results.analysis.stopping import stopped
from vflsec.results.analysis.trainings import notes_on_spending, notes_on_trainings, spending_of
from vflsec.results.analysis.verdict import Coverage, listed, verdict, way_to_run
from vflsec.results.records.limits import RunLimits
from vflsec.results.records.manifest import AttackEntry, Manifest, RowEntry
from vflsec.results.records.schema import FAILED, Record, Result

MOST_OF_DATA = 8
"""So many warnings of the data are notes of a report."""

UNGROUPED = (
    "some intervals are wider than they need be: rows were too few, or an earlier version has not measured what seeds "
    "have in common (add --fresh)"
)

FAR_BELOW = 0.05
"""A joint model whose utility is lower than a quick model's by more than this is named in a note."""


def summarize(
    manifest: Manifest,
    records: Mapping[str, Record],
    *,
    out: str,
    max_leak: Limits,
    min_utility: float | None,
    max_undetected: float | None = None,
    stored: Sequence[RunLimits] = (),
) -> Summary:
    """Fold ``records`` into the points, scores and gates of an evaluation.

    Args:
        manifest: of the evaluation.
        records: by key.
        out: the folder.
        max_leak: limits by attack.
        min_utility: a limit, or None.
        max_undetected: a limit, or None.
        stored: the limits of earlier runs, the last of which are in force beside those above.

    Raises:
        UsageError: a limit on an attack that was not run.
    """
    check_limits(manifest, max_leak)
    given = RunLimits(max_leak=dict(max_leak), min_utility=min_utility, max_undetected=max_undetected)
    alone = alone_by_target(manifest, records)
    groups: dict[tuple[str, str, float], list[RowEntry]] = {}
    integrity = on_integrity(manifest)
    for row in manifest.rows:
        if row.attack not in integrity:
            groups.setdefault((row.method, row.defense, row.strength), []).append(row)
    cell_groups = [CellGroup(manifest, group, records, alone) for group in groups.values()]
    points = [point for group in cell_groups for point in group.points()]
    worst = [point for group in cell_groups if group.attacked for point in group.worst()]
    columns = [point for group in cell_groups if group.attacked for point in group.columns()]
    picked = [point for group in cell_groups if group.attacked for point in group.picked()]
    broken = damages(manifest, records)
    utilities = [*(point.utility for point in points), *(damage.utility for damage in broken)]
    metrics = [utility.metric for utility in utilities if utility.mean is not None]
    reached = reach(cell_groups)
    folded = [cap for group in by_defense(cell_groups) for cap in caps(group, reached)]
    places, (run, not_run) = exposed(points, worst), _mountable(manifest, records)
    rest = way_to_run(not_run, manifest.left_out, audited=bool(manifest.audited))
    tested = Coverage(run, not_run, len(manifest.left_out), rest)
    lost, useless = _lost(manifest, records), useless_models(manifest, records)
    alarmed = alarms(manifest, records, points, useless)
    if manifest.audited and not manifest.confirmed:
        alarmed += _nothing_above_chance(worst)
    judged = partial(
        gates,
        points + worst + columns,
        damages=broken,
        alone_lost=bool(lost),
        alarmed=bool(alarmed),
        useless=useless,
        not_run=len(not_run),
        undefended=manifest.undefended,
    )
    spending = spending_of(manifest, records)
    ranked = ranks(folded, places) if len({(cap.method, cap.defense) for cap in folded}) > 1 else []
    summary = Summary(
        dataset=manifest.title or manifest.dataset,
        adversary=manifest.adversary,
        metric=metrics[0] if metrics else "",
        seeds=manifest.seeds,
        target=manifest.target,
        points=points,
        worst=worst,
        picked=picked,
        cap=folded,
        c_dcs=c_dcs(folded),
        front=front(list(places.values())),
        ranks=ranked,
        orders=orders(ranked),
        disagreements=disagreements(ranked),
        gates=_gates(given, stored, judged),
        notes=[
            *_notes(manifest, records),
            *sentences(useless, is_shown=False),
            *([] if manifest.audited else notes_on_trainings(points)),
            *notes_on_spending(spending, points),
        ],
        spending=spending,
        lost=lost,
        failures=_failures(manifest, records),
        out=out,
        integrity=broken,
        not_run=not_run,
        mountable=len(run) + len(not_run),
        left_out=manifest.left_out,
        verdict=verdict(
            worst,
            manifest.adversary,
            _known(manifest),
            tested,
            attacks=points,
            useless=useless,
            alarmed=bool(alarmed),
            undefended=manifest.undefended,
        ),
        audited=manifest.audited,
        alarms=alarmed,
        columns=columns,
        undefended=manifest.undefended,
    )
    if manifest.until is None:
        return summary
    return msgspec.structs.replace(summary, notes=[*summary.notes, stopped(summary, manifest.until)])


def _gates(given: RunLimits, stored: Sequence[RunLimits], judged: Callable[..., list[Gate]]) -> list[Gate]:
    """Return the gates in force, stored ones first, then those whose limits a later run has replaced."""
    own, replaced = (
        [gate for limits in several for gate in judged(**msgspec.structs.asdict(limits))]
        for several in ([*stored[-1:], given], stored[:-1])
    )
    earlier = [msgspec.structs.replace(gate, replaced=True) for gate in replaced if gate not in own]
    return list(dict.fromkeys([*own, *earlier]))


def _nothing_above_chance(worst: Sequence[Point]) -> list[str]:
    """Return the alarm that labels may be of other rows, if its own columns are not shown to tell of them either."""
    leaks = [point.leak for point in worst if point.target == "labels"]
    ends = [end for leak in leaks for end in (leak.ci95[0], leak.alone_ci95[0])]
    chances = [leak.chance for leak in leaks]
    if not leaks or None in ends or None in chances:
        return []
    largest = max(float(chance or 0.0) for chance in chances)
    if any(float(low or 0.0) > largest for low in ends):
        return []
    return [
        "nothing is shown to be inferred above chance, not even without joining: rows are too few, or labels are of "
        "other rows: check their ids, then --confirm-fit"
    ]


def _known(manifest: Manifest) -> int:
    """Return how many labels the adversary knows."""
    aux = manifest.settings.get("aux")
    known = aux.get("n") if isinstance(aux, dict) else None
    return known if isinstance(known, int) else 0


def _mountable(manifest: Manifest, records: Mapping[str, Record]) -> tuple[list[str], list[str]]:
    """Return the attacks that this adversary can mount on some method, those that were run and those that were not."""
    own = (records[row.key] for row in manifest.rows if row.key in records)
    known = {name for record in own if isinstance(record, Result) for name in record.mountable}
    asked = [_on_victim(attack) for attack in manifest.attacks]
    return [name for name in dict.fromkeys(asked) if name in known], sorted(known - set(asked))


def _on_victim(attack: AttackEntry) -> str:
    """Return the name of an attack, with its victim unless that is the first other party."""
    victim = attack.target.partition(" of ")[2].partition(" ")[0]
    return f"{attack.name}:victim={victim}" if victim else attack.name


def _lost(manifest: Manifest, records: Mapping[str, Record]) -> list[str]:
    """Return the attacks without the federation that gave no number though they could have."""
    lost: dict[str, list[int]] = {}
    for one in manifest.baselines:
        record = records.get(one.key)
        if record is None or record.status in FAILED:
            lost.setdefault(one.label, []).append(one.seed)
    return [f"{label} ({count(len(set(seeds)), 'seed')})" for label, seeds in lost.items()]


def _weak_model(trained: Sequence[Result]) -> list[str]:
    """Return a note for each method whose joint model is far below a quick model of all columns, without a defense."""
    found = {
        one.method: f"{one.method}: the joint model reaches {one.utility.metric} {one.utility.headline:.3f}, and a "
        f"quick model of all columns {one.quick_joint:.3f}; one that is trained better may leak more: try other "
        f"train.epochs, model.head=mlp or a larger model.cut"
        for one in trained
        if one.utility is not None and one.quick_joint is not None and not one.control and one.nbytes
        if one.utility.headline < one.quick_joint - FAR_BELOW
    }
    return list(found.values())


def _failures(manifest: Manifest, records: Mapping[str, Record]) -> list[str]:
    """Return the causes of results without a number, each with its place, its attacks and the number of seeds."""
    found: dict[tuple[str, str], dict[str, set[int]]] = {}
    for row in manifest.rows:
        record = records.get(row.key)
        if record is not None and record.status in FAILED:
            defense = f"{row.defense} {row.strength:.4g}" if row.strength else manifest.undefended
            place = f"{row.method}, {defense}" if len({r.method for r in manifest.rows}) > 1 else defense
            attacks = found.setdefault((place, record.error or record.status), {})
            attacks.setdefault(row.attack, set()).add(row.seed)
    return [
        f"{listed(list(attacks))}, {place} ({len(set.union(*attacks.values()))} of "
        f"{count(manifest.seeds, 'seed')}): {cause}"
        for (place, cause), attacks in found.items()
    ]


def _notes(manifest: Manifest, records: Mapping[str, Record]) -> list[str]:
    """Return the caveats of the numbers, and what looks wrong in the data."""
    notes = manifest.data_notes[:MOST_OF_DATA]
    if (more := len(manifest.data_notes) - MOST_OF_DATA) > 0:
        notes.append(f"{count(more, 'more warning')} of the data: see vflsec data check")
    if manifest.selected_on_test:
        notes.append("epochs were chosen on TEST rows (train.select=paper_best_on_test): utility is flattered")
    data = manifest.settings.get("data")
    if isinstance(data, dict) and data.get("canaries"):
        notes.append(
            f"labels of {data['canaries']} training rows were tossed (--audit-epsilon): compare utility and leaks with "
            f"no other report"
        )
    keys = {row.key for row in manifest.rows} | {baseline.key for baseline in manifest.baselines}
    own = [record for key, record in records.items() if key in keys]
    if any(block.halves is None for record in own for block in record.leak.values()):
        notes.append(
            "too few rows to be split: the strongest attack was chosen on rows that score it, which flatters it"
        )
    trained = [one for one in own if isinstance(one, Result)]
    blocks = [*(block for one in own for block in one.leak.values()), *(one.utility for one in trained if one.utility)]
    if manifest.seeds > 1 and any(block.without is None for block in blocks):
        notes.append(UNGROUPED)
    notes += _weak_model(trained)
    notes += [note if manifest.audited else f"{one.method}: {note}" for one in trained for note in one.notes]
    return list(dict.fromkeys(notes))
