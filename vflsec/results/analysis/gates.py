"""Limits that turn a result into an exit code, and signs that no number is to be relied on, so that none may hold.

Limits are compared with the far end of an interval.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import add, sub
from statistics import fmean
from typing import NamedTuple, TypeVar

import msgspec

from vflsec.base.checks import count, describe_unknown, group
from vflsec.base.errors import UsageError
from vflsec.results.analysis.intervals import DIFFERENCE, make_interval, measure
from vflsec.results.analysis.results import Damage, Ends, Gate, Leak, Measure, Point, Summary, name_defense
from vflsec.results.records.manifest import AUDITED, INTEGRITY, Manifest, RowEntry, RunLimits
from vflsec.results.records.schema import Block, Record, Result

ALARMED = "see the NOTEs"
NO_DEFENSE = "no defense can change it"
ROWS = {"train": "training rows", "test": "test rows", "candidates": "candidate rows"}

SAME = 0.0005
"""Utilities that differ by less look equal in a table."""

NOT_SHOWN = " on average (not shown)"
"""How a joint model is worse whose difference may be noise."""

FAR = 0.1
"""How far below *alone* the strongest attack must be, and by half of what *alone* gains over chance."""

MAX_KNOWN_SHARE = 0.1
"""An adversary that knows the labels of a larger share of a class makes *alone* too strong to be compared with."""

MIN_USED_SHARE = 0.5
"""If all parties hold no more than this share of the smallest one's rows, their ids may be written differently."""

PlaceKey = tuple[str, str, float]
"""Method, defense and strength."""

Shown = TypeVar("Shown", Point, Damage)


class Model(NamedTuple):
    """A joint model beside the one without a defense, and beside the active party alone, paired by seed.

    Attributes:
        cost_ci95: of the utility that the defense costs.
        gain: of utility over that of the active party alone; None if unknown.
        useless: ``worse than bank alone``, with ``NOT_SHOWN`` if it may be noise, or ``no better than chance``.
        values: the utilities that are compared.
    """

    cost_ci95: Ends
    gain: float | None
    gain_ci95: Ends
    useless: str = ""
    values: str = ""


UNKNOWN = Model((None, None), None, (None, None))


def check_limits(manifest: Manifest, max_leak: Mapping[str, float]) -> None:
    """Raise UsageError if a limit is on an attack that was not run, or that has no leak."""
    targets = {attack.label: attack.target for attack in manifest.attacks}
    leaking = [label for label, target in targets.items() if target != INTEGRITY]
    for name in max_leak:
        if name not in leaking and (name in targets or not leaking):
            raise UsageError(
                f"expected an attack that recovers something with --max-leak, got {name}: "
                f"attacks on integrity leak nothing; bound the utility that they leave with --min-utility"
            )
        on_columns = {re.split("[:@]", attack.label)[0] for attack in manifest.attacks if attack.column}
        if name not in (*leaking, *on_columns, "worst"):
            raise UsageError(f"{describe_unknown('attack', name, [*leaking, 'worst'])}; --attack adds another")


def check_gates(summary: Summary, limits: RunLimits) -> list[Gate]:
    """Compare limits with the far end of each interval, on test and on training rows.

    Where an alarm doubts what the numbers are about, a gate that would hold is undecided; one that fails still fails.
    So it is where a joint model is shown to be of no use.

    A limit on ``worst`` is a limit on the headline and on every attack, so that it never holds if a limit on an attack
    fails. The limit on utility also bounds the utility under attacks on integrity.
    """
    points = _select_defended([*summary.points, *summary.worst, *summary.columns])
    gates = [_check_leak(summary, points, attack, limit) for attack, limit in limits.max_leak.items()]
    if limits.min_utility is not None:
        honest = [p for p in points if p.attack != "worst"]
        broken = _select_defended(summary.integrity)
        utilities: list[tuple[Measure, Point | Damage]] = [(p.utility, p) for p in honest]
        utilities += [(d.under_attack, d) for d in broken]
        lows = [(utility.lower, where) for utility, where in utilities if utility.mean is not None]
        lowest = min(lows, key=lambda low: low[0], default=None)
        kept = lowest is not None and lowest[0] >= limits.min_utility
        gates.append(_judge("min-utility", limits.min_utility, lowest, [*honest, *broken], kept, summary.undefended))
    if limits.max_undetected is not None:
        headlines = [p for p in points if p.attack == "worst"]
        seen = [(p.leak.detectable, p) for p in headlines if p.leak.detectable is not None]
        largest = max(seen, key=lambda pair: pair[0], default=None)
        kept = largest is not None and largest[0] <= limits.max_undetected
        gate = _judge("max-undetected", limits.max_undetected, largest, headlines, kept, summary.undefended)
        gates.append(_withhold(gate) if len(seen) < len(headlines) else gate)
    spoiled = [p for p in summary.points if p.useless and p.strength and not p.useless.endswith(NOT_SHOWN)]
    if summary.alarms:
        return [_withhold(gate, ALARMED) for gate in gates]
    if not spoiled:
        return gates
    why = f"with {spoiled[0].defense} {spoiled[0].strength:g} the joint model is {spoiled[0].useless}"
    return [_withhold(gate, why) for gate in gates]


def _check_leak(summary: Summary, defended: Sequence[Point], attack: str, limit: float) -> Gate:
    # a limit covers an attack of this name, on whatever column
    limited = [p for p in defended if attack == p.attack or (p.column and attack == re.split("[:@]", p.attack)[0])]
    covered = defended if attack == "worst" else limited
    leaks = [(leak, p) for p in covered for leak in (p.leak, p.leak_train) if leak.mean is not None]
    worst = max(leaks, key=lambda pair: (pair[0].upper, pair[1].choice == "alone"), default=None)
    kept = worst is not None and worst[0].upper <= limit
    end, rows = ((worst[0].upper, worst[1]), worst[0].rows) if worst else (None, "")
    gate = _judge(f"max-leak {attack}", limit, end, limited, kept, summary.undefended, rows)
    if attack != "worst":
        return gate
    alone = [leak.alone if leak.alone_ci95[1] is None else leak.alone_ci95[1] for leak, _ in leaks]
    if NO_DEFENSE not in gate.at and any(end is not None and end > limit for end in alone):
        at = f"{gate.at} (alone exceeds the limit without joining, too: {NO_DEFENSE})"
        gate = msgspec.structs.replace(gate, at=at)
    if summary.lost:  # *alone* competes for the headline
        gate = _withhold(gate, "an attack without the federation gave no number")
    if summary.not_run and gate.holds:
        why = f"{count(len(summary.not_run), 'attack')} that could be mounted did not run"
        gate = msgspec.structs.replace(gate, why=why)
    return gate


def _withhold(gate: Gate, why: str = "") -> Gate:
    """Return ``gate``, undecided where it would hold."""
    return msgspec.structs.replace(gate, holds=None, why=why) if gate.holds else gate


def _select_defended(points: Sequence[Shown]) -> list[Shown]:
    return [p for p in points if p.strength > 0] or list(points)


def _judge(
    name: str,
    limit: float,
    worst: tuple[float, Point | Damage] | None,
    among: Sequence[Point | Damage],
    kept: bool,
    undefended: str,
    rows: str = "",
) -> Gate:
    """Return the gate; it cannot hold if some cell gave no number."""
    if worst is None:
        return Gate(gate=name, limit=limit, worst=None, at="", holds=None)
    value, point = worst
    lost = any(set(p.statuses) - {"ok", "unconverged", "unseen"} for p in among)
    at = f"{point.method}, {name_defense(point, undefended)}"
    if isinstance(point, Damage):
        at += f" under {point.attack}"
    elif name.startswith("max-leak"):
        attack = point.choice or point.attack
        at = attack if point.method == AUDITED else f"{at}, by {attack}"
        at += f" on {' and '.join(ROWS.get(split, split) for split in rows.split('+'))}"
        at += f" (without joining: {NO_DEFENSE})" if point.choice == "alone" else ""
    return Gate(gate=name, limit=limit, worst=value, at=at, holds=None if kept and lost else kept)


def list_alarms(
    manifest: Manifest, records: Mapping[str, Record], summary: Summary, models: Mapping[PlaceKey, Model]
) -> list[str]:
    """Return a sentence for each sign that the numbers are not about the system they name, with the way out.

    With a defense, a joint model that is of no use is none: it may be the cause.
    """
    return [
        *manifest.misfit,
        *_warn_few_rows(manifest),
        *_warn_known(manifest, records),
        *_warn_collapsed(manifest, records),
        *(
            f"{method}: the joint model is {m.useless}: {m.values}: check labels and ids, or train a better model"
            for (method, _, strength), m in models.items()
            if not strength and m.useless and not m.useless.endswith(NOT_SHOWN)
        ),
        *_warn_constant(manifest, records),
        *_warn_far_below(manifest, records, summary.points),
        *_warn_no_leak(manifest, summary.worst),
    ]


def judge_models(manifest: Manifest, records: Mapping[str, Record]) -> dict[PlaceKey, Model]:
    """Return the joint models, by method, defense and strength.

    Of several trainings with one seed the one of most attacks counts: one that acts in training has its own.
    """
    trained: dict[PlaceKey, dict[int, list[Block]]] = {}
    alone: dict[str, dict[int, float]] = {}
    for row in manifest.rows:
        record = records.get(row.key)
        if not isinstance(record, Result) or record.utility is None or record.control:
            continue
        by_seed = trained.setdefault((row.method, row.defense, row.strength), {})
        by_seed.setdefault(row.seed, []).append(record.utility)
        if record.active_alone is not None:  # it is measured without a defense
            alone.setdefault(row.method, {})[row.seed] = record.active_alone
    active = manifest.names.get("active", "the active party")
    blocks = {
        place: {seed: max(of, key=lambda block: (of.count(block), block.headline)) for seed, of in by_seed.items()}
        for place, by_seed in trained.items()
    }
    clean = {place[0]: by_seed for place, by_seed in blocks.items() if not place[2]}
    return {
        place: _judge_model(by_seed, clean.get(place[0], {}), alone.get(place[0], {}), active, manifest.seeds)
        for place, by_seed in blocks.items()
    }


def _judge_model(
    blocks: Mapping[int, Block], clean: Mapping[int, Block], alone: Mapping[int, float], active: str, seeds: int
) -> Model:
    """Compare utilities with those without a defense and of the active party alone, and with chance."""
    joint, chance = fmean(b.headline for b in blocks.values()), fmean(b.chance for b in blocks.values())
    metric = next(iter(blocks.values())).metric
    by_chance = f", {chance:.3f} by chance" * (joint <= chance)
    costs = [measure(sub, clean[seed], block) for seed, block in blocks.items() if seed in clean]
    gains = [measure(partial(add, -alone[seed]), block) for seed, block in blocks.items() if seed in alone]
    cost, gain = (make_interval(differences, seeds, DIFFERENCE) for differences in (costs, gains))
    model = Model(cost["ci95"], gain["mean"], gain["ci95"])
    if gains and gain["mean"] < -SAME:
        base = fmean(alone[seed] for seed in blocks if seed in alone)
        both = f"{metric} {base + gain['mean']:.3f}, and {base:.3f}"
        is_shown = bool(by_chance) or (gain["ci95"][1] is not None and gain["ci95"][1] < 0)
        why, values = f"worse than {active} alone", f"{both} by a quick model of its own columns{by_chance}"
        return model._replace(useless=f"{why}{'' if is_shown else NOT_SHOWN}", values=values)
    values = f"{metric} {joint:.3f}{by_chance}"
    return model._replace(useless="no better than chance", values=values) if by_chance else model


def _warn_few_rows(manifest: Manifest) -> Iterator[str]:
    if manifest.used <= MIN_USED_SHARE:
        yield (
            f"all parties hold only {manifest.used:.0%} of the rows of the smallest one: check that they write ids in "
            f"the same way"
        )


def _warn_known(manifest: Manifest, records: Mapping[str, Record]) -> Iterator[str]:
    """Yield whether the adversary knows a large share of a class, and how many labels are a tenth, if that is known."""
    on_labels = {attack.label for attack in manifest.attacks if attack.target == "labels"}
    rows = [records.get(row.key) for row in manifest.rows if row.attack in on_labels]
    shares = [block.known_of_class for record in rows if record for block in record.leak.values()]
    largest, n = max(shares, default=0.0), manifest.settings.get("aux", {}).get("n", 0)
    if largest > MAX_KNOWN_SHARE:
        fewer = max(2, int(n * MAX_KNOWN_SHARE / largest) // 2 * 2)  # an even number, for two balanced classes
        yield (
            f"{manifest.adversary} already knows the labels of {100 * largest:.0f} % of the training rows of one "
            f"class, so little is left to measure: use fewer known labels"
            f"{f', for example --set aux.n={fewer}' if n else ''}"
        )


def _warn_collapsed(manifest: Manifest, records: Mapping[str, Record]) -> Iterator[str]:
    by_place: dict[str, set[int]] = {}
    for row in manifest.rows:
        record = records.get(row.key)
        if record and record.status == "collapsed":
            place = f"{_describe(row, manifest)}: {record.error or 'the model collapsed'}"
            by_place.setdefault(place, set()).add(row.seed)
    for place, seeds in by_place.items():
        yield f"{place} ({len(seeds)} of {count(manifest.seeds, 'training')})"


def _warn_constant(manifest: Manifest, records: Mapping[str, Record]) -> Iterator[str]:
    """Yield the attacks that score all rows alike though they do not without the federation.

    If no attack on a target has another score, or an audit's attack has none without the federation, that is a sign by
    itself, but under a defense, which may cause it.
    """
    alone = {(entry.label, entry.seed): records.get(entry.key) for entry in manifest.baselines}
    targets = {attack.label: attack.target for attack in manifest.attacks if not attack.baseline}
    pairs = [(row, records.get(row.key)) for row in manifest.rows if row.attack in targets]
    leaking = [(row, record) for row, record in pairs if isinstance(record, Result) and record.leak]
    names: dict[str, None] = {}
    for cell in group(leaking, lambda pair: (pair[1].cell, targets[pair[0].attack], pair[0].seed)).values():
        constant = [(row, record) for row, record in cell if _is_constant(record)]
        every = len(constant) == len(cell) and not any(record.defenses for _, record in cell)
        for row, _ in constant:
            baseline = alone.get((row.attack, row.seed))
            is_single = bool(manifest.audited) and not manifest.declared and not (baseline and baseline.leak)
            if every or is_single or (baseline and baseline.leak and not _is_constant(baseline)):
                place = "" if manifest.audited else f" ({_describe(row, manifest)})"
                names[f"{row.attack}{place}"] = None
    if names:
        yield f"all rows have the same score by {', '.join(names)}: check that what it reads is not constant"


def _is_constant(record: Record) -> bool:
    return any(block.constant for block in record.leak.values())


def _warn_far_below(manifest: Manifest, records: Mapping[str, Record], points: Sequence[Point]) -> Iterator[str]:
    """Yield the targets on which all attacks are far below *alone*, without a defense, which may cause it.

    One of them must have a number without the federation as well: many attacks read single messages and know little.
    """
    if manifest.settings.get("fixed"):
        return
    baselines = {entry.label for entry in manifest.baselines if (record := records.get(entry.key)) and record.leak}
    reading = {attack.label for attack in manifest.attacks if not attack.baseline}
    clean = [p for p in points if p.strength == 0 and p.attack in reading and p.leak.mean is not None]
    for (_, target), cell in group(clean, lambda p: (p.method, p.target)).items():
        leaks = [leak for point in cell for leak in (point.leak, point.leak_train) if leak.mean is not None]
        if any(point.attack in baselines for point in cell) and all(map(is_far_below, leaks)):
            yield (
                f"all attacks on {target} are far below what {manifest.adversary} infers without joining: check that "
                f"what is attacked belongs to these rows and columns"
            )


def is_far_below(leak: Leak) -> bool:
    """Whether the interval of an attack lies far below that of *alone*."""
    upper, low = leak.ci95[1], leak.alone_ci95[0]
    return upper is not None and low is not None and low - upper > max(FAR, (low - (leak.chance or 0.0)) / 2)


def _warn_no_leak(manifest: Manifest, worst: Sequence[Point]) -> Iterator[str]:
    """Yield that audited labels may be of other rows, if its own columns are not shown to tell of them either."""
    leaks = [point.leak for point in worst if point.target == "labels"]
    ends = [end for leak in leaks for end in (leak.ci95[0], leak.alone_ci95[0])]
    chances = [leak.chance for leak in leaks if leak.chance is not None]
    if not manifest.audited or manifest.confirmed or not leaks or None in ends or len(chances) < len(leaks):
        return
    if all((low or 0.0) <= max(chances) for low in ends):
        yield (
            "nothing is shown to be inferred above chance, not even without joining: rows are too few, or labels are "
            "of other rows: check their ids, then --confirm-fit"
        )


def _describe(row: RowEntry, manifest: Manifest) -> str:
    return f"{row.method}, {name_defense(row, manifest.baseline_defense)}"
