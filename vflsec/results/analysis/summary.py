"""From settings and records to the Summary that is reported."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import sub
from typing import Any

import msgspec

from vflsec.base.checks import count, group
from vflsec.results.analysis.gates import UNKNOWN, Model, PlaceKey, check_gates, check_limits, judge_models, list_alarms
from vflsec.results.analysis.groups import ALONE, SEVERITY, CellGroup, find_alone
from vflsec.results.analysis.intervals import DIFFERENCE, SeedValue, get_headline, make_interval, measure
from vflsec.results.analysis.results import Damage, GroupLeak, Measure, Point, Summary, name_defense
from vflsec.results.analysis.scores import average_dcs, find_front, fold, place_headlines, rank
from vflsec.results.analysis.trainings import find_spending, note_on_seeds, note_spending, note_trainings
from vflsec.results.analysis.verdict import list_first, state_verdict
from vflsec.results.records.manifest import INTEGRITY, AttackEntry, Manifest, RowEntry, RunLimits, Subgroup, Subgroups
from vflsec.results.records.schema import FAILED, Impact, Record, Result, Triggered
from vflsec.results.statistics import SHARE, correct_holm, get_error

MAX_DATA_NOTES = 8
"""So many warnings of the data are notes of a report."""

FAR_BELOW = 0.05
"""A joint model whose utility is lower than a quick model's by more than this is named in a note."""

NO_LIMITS = RunLimits()


def summarize(
    manifest: Manifest,
    records: Mapping[str, Record],
    *,
    out: str,
    limits: RunLimits = NO_LIMITS,
    stored: Sequence[RunLimits] = (),
    subgroups: Sequence[Subgroups] = (),
) -> Summary:
    """Fold ``records``, by key, into the points, scores and gates of the evaluation in the folder ``out``.

    ``limits`` are beside those ``stored`` by earlier runs, the last of which are in force.
    """
    check_limits(manifest, limits.max_leak)
    broken = list_damages(manifest, records)
    integrity = {damage.attack for damage in broken}
    inferring = [row for row in manifest.rows if row.attack not in integrity]
    rows = group(inferring, lambda row: (row.method, row.defense, row.strength))
    alone = find_alone(manifest, records)
    groups = [CellGroup(manifest, of_cell, records, alone) for of_cell in rows.values()]
    attacked = [cells for cells in groups if cells.has_adversary]
    models = judge_models(manifest, records)
    points = add_costs([point for cells in groups for point in cells.points()], models)
    worst = correct_advantages(add_costs([point for cells in attacked for point in cells.worst()], models))
    worst = add_highest(worst, points)
    measured = [*(point.utility for point in points), *(damage.utility for damage in broken)]
    caps, places = fold(groups), place_headlines(points, worst)
    ranked = rank(caps, places) if len({(cap.method, cap.defense) for cap in caps}) > 1 else []
    spending = find_spending(manifest, records)
    run, not_run = _list_mountable(manifest, records)
    summary = Summary(
        dataset=manifest.title or manifest.dataset, adversary=manifest.adversary, seeds=manifest.seeds,
        metric=next((utility.metric for utility in measured if utility.mean is not None), ""), target=manifest.target,
        points=points, worst=worst, picked=[point for cells in attacked for point in cells.pick_strongest()],
        cap=caps, c_dcs=average_dcs(caps), front=find_front(list(places.values())), ranks=ranked,
        gates=[], notes=[], spending=spending, out=out, integrity=broken,
        lost=_list_failed_baselines(manifest, records), failures=_list_failures(manifest, records),
        not_run=not_run, mountable=len(run) + len(not_run), left_out=manifest.left_out, audited=manifest.audited,
        columns=[point for cells in attacked for point in cells.columns()], undefended=manifest.baseline_defense,
        subgroups=group_leaks(subgroups, manifest), rows=_count_rows(records),
    )  # fmt: skip
    notes = [
        *_list_notes(manifest, records),
        *([] if manifest.audited else note_trainings(points)),
        *note_spending(spending, points),
        *([] if manifest.until is None else [note_on_seeds(summary, manifest.until)]),
    ]
    summary = msgspec.structs.replace(summary, notes=notes, alarms=list_alarms(manifest, records, summary, models))
    aux = manifest.settings.get("aux")
    known = aux.get("n") if isinstance(aux, dict) else None
    cards = manifest.provenance.cards.get("defenses", {})
    stated = {manifest.techniques.get(name, name): card.partition("Guarantee: ")[2] for name, card in cards.items()}
    sentences = state_verdict(summary, run, known if isinstance(known, int) else 0, stated)
    # The gates in force, stored ones first, then those whose limits a later run has replaced.
    in_force = [gate for given in (*stored[-1:], limits) for gate in check_gates(summary, given)]
    replaced = [gate for given in stored[:-1] for gate in check_gates(summary, given)]
    earlier = [msgspec.structs.replace(gate, replaced=True) for gate in replaced if gate not in in_force]
    return msgspec.structs.replace(summary, verdict=sentences, gates=list(dict.fromkeys([*in_force, *earlier])))


def _count_rows(records: Mapping[str, Record]) -> dict[str, int]:
    counts = [(split, block.n) for record in records.values() for split, block in record.leak.items()]
    return {split: max(n for name, n in counts if name == split) for split in sorted({name for name, _ in counts})}


def add_costs(points: Sequence[Point], models: Mapping[PlaceKey, Model]) -> list[Point]:
    """Return the points with what each defense costs in utility, and what joining gains, or why it is of no use."""
    whole = {point.method: point.utility.mean for point in points if not point.strength}
    several = []
    for point in points:
        before, after, model = whole.get(point.method), point.utility.mean, models.get(point.place, UNKNOWN)
        cost = None if before is None or after is None else before - after
        judged = {name: getattr(model, name) for name in ("cost_ci95", "gain", "gain_ci95", "useless")}
        several.append(msgspec.structs.replace(point, cost=cost, **judged))
    return several


def correct_advantages(headlines: Sequence[Point]) -> list[Point]:
    """Return the headlines with Holm's correction: for those of a target with a defense, and for those without.

    An advantage above 0 is half of a two-sided test: where there is none, at most 5 % of the tables show one.
    """
    corrected: dict[tuple[Any, ...], float] = {}
    for points in group(headlines, lambda p: (p.target, p.strength > 0)).values():
        known = {_get_row(p): p.leak.p for p in points if p.leak.p is not None}
        corrected.update(zip(known, correct_holm([*known.values()]), strict=True))
    leaks = [msgspec.structs.replace(p.leak, p_holm=corrected.get(_get_row(p))) for p in headlines]
    return [msgspec.structs.replace(p, leak=leak) for p, leak in zip(headlines, leaks, strict=True)]


def _get_row(p: Point) -> tuple[Any, ...]:
    return p.target, p.method, p.defense * bool(p.strength), p.strength


def add_highest(headlines: Sequence[Point], points: Sequence[Point]) -> list[Point]:
    """Return the headlines with the largest leak of a single attack, on its rows, and what had not converged."""
    listed = group(points, lambda p: (p.place, p.target))
    several: list[Point] = []
    for point in headlines:
        same = listed.get((point.place, point.target), ())
        leaks = [(leak.mean, p.attack, leak.rows) for p in same for leak in (p.leak, p.leak_train)
                 if leak.metric == point.leak.metric]  # fmt: skip
        mean, attack, rows = max(leaks, key=lambda leak: leak[0] or 0.0, default=(None, "", ""))
        weak = [p.attack for p in same if "unconverged" in p.statuses and ALONE in point.choice.split(", ")]
        highest = {"highest": mean, "highest_attack": attack, "highest_rows": rows, "unconverged": weak}
        several.append(msgspec.structs.replace(point, **highest))
    return several


def _list_mountable(manifest: Manifest, records: Mapping[str, Record]) -> tuple[list[str], list[str]]:
    """Return the attacks that this adversary can mount on some method, those that were run and those that were not."""
    results = [records[row.key] for row in manifest.rows if row.key in records]
    known = {name for record in results if isinstance(record, Result) for name in record.mountable}
    chosen = [name_with_victim(attack) for attack in manifest.attacks]
    return [name for name in dict.fromkeys(chosen) if name in known], sorted(known - set(chosen))


def name_with_victim(attack: AttackEntry) -> str:
    """Return the name of an attack, with its victim unless that is the first other party."""
    victim = attack.target.partition(" of ")[2].partition(" ")[0]
    return f"{attack.name}:victim={victim}" if victim else attack.name


def _list_failed_baselines(manifest: Manifest, records: Mapping[str, Record]) -> list[str]:
    lost: dict[str, set[int]] = {}
    for baseline in manifest.baselines:
        record = records.get(baseline.key)
        if record is None or record.status in FAILED:
            lost.setdefault(baseline.label, set()).add(baseline.seed)
    return [f"{label} ({count(len(seeds), 'seed')})" for label, seeds in lost.items()]


def _list_failures(manifest: Manifest, records: Mapping[str, Record]) -> list[str]:
    """Return the causes of results without a number, each with its place, its attacks and the number of seeds."""
    several = len({row.method for row in manifest.rows}) > 1
    failures: dict[tuple[str, str], dict[str, set[int]]] = {}
    for row in manifest.rows:
        record = records.get(row.key)
        if record is not None and record.status in FAILED:
            place = f"{row.method}, " * several + name_defense(row, manifest.baseline_defense)
            attacks = failures.setdefault((place, record.error or record.status), {})
            attacks.setdefault(row.attack, set()).add(row.seed)
    return [
        f"{list_first(list(attacks))}, {place} ({len(set.union(*attacks.values()))} of "
        f"{count(manifest.seeds, 'seed')}): {cause}"
        for (place, cause), attacks in failures.items()
    ]


def _list_notes(manifest: Manifest, records: Mapping[str, Record]) -> list[str]:
    notes = manifest.data_notes[:MAX_DATA_NOTES]
    if (more := len(manifest.data_notes) - MAX_DATA_NOTES) > 0:
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
    requested = [record for key, record in records.items() if key in keys]
    trained = [record for record in requested if isinstance(record, Result)]
    if any(block.halves is None for record in requested for block in record.leak.values()):
        notes.append(
            "too few rows to be split: the strongest attack was chosen on rows that score it, which flatters it"
        )
    notes += _note_weak(trained)
    notes += _note_unseen(manifest, records)
    seen = [result for result in trained if result.status != "unseen"]
    notes += [note if manifest.audited else f"{result.method}: {note}" for result in seen for note in result.notes]
    return list(dict.fromkeys(notes))


def _note_unseen(manifest: Manifest, records: Mapping[str, Record]) -> list[str]:
    """Return a note for each group of places where the same attacks see nothing that they read."""
    unseen = [row for row in manifest.rows if (record := records.get(row.key)) and record.status == "unseen"]
    by_place = group(unseen, lambda row: name_defense(row, manifest.baseline_defense))
    attacks = group(by_place, lambda place: ", ".join(dict.fromkeys(row.attack for row in by_place[place])))
    return [
        f"{', '.join(places)}: nothing is sent that {names} could read, so there is nothing to attack and no number"
        for names, places in attacks.items()
    ]


def _note_weak(trained: Sequence[Result]) -> list[str]:
    """Return a note for each method whose joint model is far below a quick model of all columns, without a defense."""
    notes = {
        result.method: f"{result.method}: the joint model reaches {result.utility.metric} "
        f"{result.utility.headline:.3f}, and a quick model of all columns {result.quick_joint:.3f}; one that is "
        f"trained better may leak more: try other train.epochs, model.head=mlp or a larger model.cut"
        for result in trained
        if result.utility is not None and result.quick_joint is not None and not result.control and result.nbytes
        if result.utility.headline < result.quick_joint - FAR_BELOW
    }
    return list(notes.values())


def list_damages(manifest: Manifest, records: Mapping[str, Record]) -> list[Damage]:
    """Return the cost of each attack on integrity at each method, defense and strength."""
    labels = [attack.label for attack in manifest.attacks if attack.target == INTEGRITY]
    curves = group([row for row in manifest.rows if row.attack in labels], _get_place)
    return [_find_damage(rows, records, manifest.seeds) for rows in curves.values()]


def _get_place(row: RowEntry) -> tuple[str, str, float, str]:
    return row.method, row.defense, row.strength, row.attack


def _find_damage(rows: Sequence[RowEntry], records: Mapping[str, Record], seeds: int) -> Damage:
    first = rows[0]
    statuses = {seed: "ok" for seed in range(seeds)}
    honest: dict[int, Impact] = {}
    attacked: dict[int, Impact] = {}
    for row in sorted(rows, key=lambda row: row.seed):
        record = records.get(row.key)
        status = str(record.status) if record else "missing"
        statuses[row.seed] = min(statuses[row.seed], status, key=SEVERITY.index)
        if isinstance(record, Result) and record.damage:
            (honest if row.control else attacked)[row.seed] = record.damage
    both = [(honest[seed].utility, attacked[seed].utility) for seed in attacked if seed in honest]
    counts = Counter(statuses.values())
    metric = next((impact.utility.metric for impact in (*honest.values(), *attacked.values())), "")

    def utility(impacts: Mapping[int, Impact]) -> Measure:
        values = [get_headline(impact.utility) for impact in impacts.values()]
        return Measure(metric=metric, **make_interval(values, seeds, SHARE))

    def success(triggered: Mapping[int, Triggered]) -> Measure:
        return Measure(metric="share", **make_interval([get_headline(t) for t in triggered.values()], seeds, SHARE))

    honestly, then = ({seed: i.success for seed, i in each.items() if i.success} for each in (honest, attacked))
    return Damage(
        method=first.method, defense=first.defense, strength=first.strength, attack=first.attack,
        status=min(counts, key=SEVERITY.index), statuses=dict(counts),
        utility=utility(honest), under_attack=utility(attacked),
        lost=Measure(metric=metric, **make_interval([measure(sub, *pair) for pair in both], seeds, DIFFERENCE)),
        success=success(then), success_by_seed={seed: triggered.share for seed, triggered in then.items()},
        chance=success(honestly).mean, chance_by_seed={seed: triggered.share for seed, triggered in honestly.items()},
    )  # fmt: skip


def group_leaks(tested: Sequence[Subgroups], manifest: Manifest) -> list[GroupLeak]:
    """Return the leak of each group of rows, with Holm's correction over all tests.

    There is one for each attack, strength and curve; what other settings gave is left out.
    """
    keys = {place: {row.key for row in rows} for place, rows in group(manifest.rows, _get_place).items()}
    kept = [(place, groups) for place in keys for groups in tested if set(groups.keys) == keys[place]]
    p_values = {id(groups): groups.p for _, groups in kept if groups.p is not None}
    corrected = dict(zip(p_values, correct_holm(list(p_values.values())), strict=True))
    return [
        GroupLeak(
            column=groups.column, method=method, defense=defense, strength=strength, attack=attack, rows=groups.rows,
            group=part.group, n=part.n, leak=_group_measure(part, groups.metric, manifest.seeds), p=groups.p,
            p_holm=corrected.get(id(groups)),
        )
        for (method, defense, strength, attack), groups in kept
        for part in groups.groups
    ]  # fmt: skip


def _group_measure(part: Subgroup, metric: str, seeds: int) -> Measure:
    values = list(part.by_seed.values())
    low, high = (math.nan if end is None else end for end in part.ci95_rows)
    first = [SeedValue(value, get_error(low, high) ** 2, part.n, ends=(low, high)) for value in values[:1]]
    return Measure(metric=metric, **make_interval([*first, *map(SeedValue, values[1:])], seeds, SHARE))
