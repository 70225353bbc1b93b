"""A verdict for a terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vflsec.secure.transcripts.audit import Figure, Finding
from vflsec.secure.transcripts.run import Verdict

_MEASURES = {"auc": "AUC", "r2": "R²", "share": "share"}


def rich(verdict: Verdict) -> RenderableType:
    """Return one row for each audit, and what was found below."""
    scored = (
        "scored against the other role" if verdict.scored else "not scored: --truth takes the other role's recording"
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("audit", no_wrap=True)
    table.add_column("reads", overflow="fold")
    table.add_column("recovers ↓", no_wrap=True)
    table.add_column("chance", no_wrap=True, justify="right")
    table.add_column("verdict", no_wrap=True)
    table.add_column("what stops it", overflow="fold")
    for finding in verdict.findings:
        table.add_row(
            finding.audit,
            finding.reads,
            "\n".join(map(_recovered, finding.figures)) or "–",
            "\n".join(_number(figure.chance) for figure in finding.figures) or "–",
            _verdict(finding),
            finding.mitigation if finding.verdict != "holds" else "",
        )
    parts: list[RenderableType] = [Text(f"recording of role {verdict.role} · {verdict.steps} steps · {scored}"), table]
    untested = {finding.audit: "; ".join(finding.unmeasured) for finding in verdict.findings}
    for finding in verdict.findings:
        parts.append(Text(f"{finding.audit}: {finding.found}"))
        parts += [Text(f"{finding.audit}: not measured: {part}") for part in finding.unmeasured]
    for gate in verdict.gates:
        line = gate_line(gate.gate, gate.limit, gate.worst, gate.holds, scored=verdict.scored)
        parts.append(Text(line + (f"; not measured: {untested[gate.at]}" if untested[gate.at] else "")))
    return Group(*parts)


def _verdict(finding: Finding) -> str:
    if finding.verdict == "holds" and finding.unmeasured:
        return "holds in part"
    return "not measured" if finding.verdict == "unmeasured" else finding.verdict


def gate_line(name: str, limit: float, worst: float | None, holds: bool | None, *, scored: bool) -> str:
    """Return the sentence on one gate."""
    undecided = "not measured" if scored else "not measured without --truth"
    said = {True: "holds", False: "FAILED", None: f"UNDECIDED: {undecided}"}[holds]
    return f"GATE {name} {limit:g}: {said}" + (f", worst {worst:.3f}" if worst is not None else "")


def _recovered(figure: Figure) -> str:
    margin = f" ±{_number(max(figure.ci95[1] - figure.value, figure.value - figure.ci95[0]))}" if figure.ci95 else ""
    return f"{figure.of} {_MEASURES.get(figure.metric, figure.metric)} {_number(figure.value)}{margin}"


def _number(value: float) -> str:
    return f"{value:.3f}".removeprefix("0") if 0 <= value < 1 else f"{value:.3f}"
