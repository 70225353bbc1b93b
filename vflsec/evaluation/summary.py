"""From settings and records to the Summary that is reported."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import filterfalse

from vflsec.evaluation.folding import by_defense, c_dcs, caps
from vflsec.evaluation.gates import Limits, check_limits, gates
from vflsec.evaluation.integrity import damages, on_integrity
from vflsec.evaluation.plan import Row, rows
from vflsec.evaluation.points import Curve, priors_by_method
from vflsec.evaluation.ranking import disagreements, exposed, front, orders, ranks
from vflsec.evaluation.results import Summary
from vflsec.evaluation.spec import EvalSpec
from vflsec.evaluation.store import Record


def summarize(
    spec: EvalSpec, records: Mapping[str, Record], *, out: str, max_leak: Limits, min_utility: float | None
) -> Summary:
    """Fold ``records`` into the points, scores and gates of ``spec``.

    Raises:
        UsageError: a limit on an attack that was not run.
    """
    check_limits(spec, max_leak)
    alone = priors_by_method(spec, records)
    groups: dict[tuple[str, str, float], list[Row]] = {}
    for row in filterfalse(on_integrity, rows(spec)):
        groups.setdefault((row.method, row.defense, row.strength), []).append(row)
    curves = [Curve(spec, group, records, alone.get(method, {})) for (method, *_), group in groups.items()]
    points = [point for curve in curves for point in curve.points()]
    worst = [point for curve in curves if curve.attacked for point in curve.worst()]
    broken = damages(spec, records)
    utilities = [*(point.utility for point in points), *(found.utility for found in broken)]
    metrics = [utility.metric for utility in utilities if utility.mean is not None]
    folded = [cap for curve in by_defense(curves) for cap in caps(curve)]
    places = exposed(points)
    ranked = ranks(folded, places) if len({(cap.method, cap.defense) for cap in folded}) > 1 else []
    return Summary(
        dataset=spec.dataset,
        adversary=spec.adversary,
        metric=metrics[0] if metrics else "",
        seeds=spec.seeds,
        target=spec.train.target,
        points=points,
        worst=worst,
        cap=folded,
        c_dcs=c_dcs(folded),
        front=front(list(places.values())),
        ranks=ranked,
        orders=orders(ranked),
        disagreements=disagreements(ranked),
        gates=gates(points + worst, max_leak, min_utility, broken),
        notes=_notes(spec, records),
        out=out,
        integrity=broken,
    )


def _notes(spec: EvalSpec, records: Mapping[str, Record]) -> list[str]:
    """What a reader must know before believing a number."""
    notes = []
    if spec.train.select == "paper_best_on_test":
        notes.append("epochs were chosen on TEST rows (train.select=paper_best_on_test): utility is flattered")
    if not spec.aux.folds:
        notes.append("no folds: worst is the largest leak, alone the logistic regression")
    notes += [f"{record['method']}: {note}" for record in records.values() for note in record.get("notes", ())]
    return list(dict.fromkeys(notes))
