"""A report for other programs: JUnit and SARIF for a pipeline, and Markdown for the comment on a pull request."""

import json
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from msgspec.structs import replace

from vflsec.base.checks import count
from vflsec.base.errors import clean
from vflsec.report.comparison import Comparison, Move
from vflsec.report.formats import as_markdown_text, format_signed, write_number
from vflsec.report.report import Report
from vflsec.report.table import write_gate, write_heading
from vflsec.results.analysis.results import Gate, Point, name_defense
from vflsec.results.analysis.verdict import MEASURES

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
LEVELS = {True: "note", False: "error", None: "warning"}


def check_rise(comparison: Comparison, limit: float) -> Gate:
    """Return the gate on how much more the strongest attack leaks than in an accepted run.

    It fails where the whole interval of a rise is above ``limit``. It is undecided where no headline can be compared,
    or where only one of the runs has it, since its defense may have been weakened or removed.
    """
    worst = [move for move in comparison.moves if move.attack == "worst"]
    rises = [(low, move) for move in worst if (low := move.leak.ci95[0]) is not None]
    gate = Gate(gate="max-rise", limit=limit, worst=None, at="", holds=None, why="no headline of both has an interval")
    if not rises:
        return gate
    rise, most = max(rises, key=lambda pair: pair[0])
    gate = replace(gate, worst=rise, at=f"{most.method} {name_defense(most, 'no defense')}, {most.target}")
    for line in (*comparison.only_after, *comparison.only_before):
        if line.startswith("worst (") and rise <= limit:
            return replace(gate, why=f"only one of the runs has {line}: compare runs of the same defenses and attacks")
    return replace(gate, holds=rise <= limit, why="")


def to_junit(report: Report, gates: Sequence[Gate]) -> bytes:
    """Return a test suite: a case for each gate, one for results without a number, and the verdict as its output."""
    summary = report.summary
    suites = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(suites, "testsuite", id="0", package="vflsec", hostname="localhost", time="0")
    suite.set("name", clean(f"{summary.dataset} {summary.adversary}"))
    suite.set("timestamp", report.manifest.provenance.time[:19])
    ElementTree.SubElement(suite, "properties")
    kinds = {True: "", False: "failure", None: "error"}
    cases = [(f"{gate.gate} {gate.limit:g}", kinds[gate.holds], write_gate(gate)) for gate in gates]
    cases.append(("results", "error" if summary.failures else "", "; ".join(summary.failures)))
    for name, kind, text in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=f"vflsec.{clean(summary.dataset)}", name=clean(name))
        case.set("time", "0")
        if kind:
            ElementTree.SubElement(case, kind, message=clean(text), type=kind).text = clean(text)
    counted = [kind for _, kind, _ in cases]
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(counted.count("failure")))
    suite.set("errors", str(counted.count("error")))
    ElementTree.SubElement(suite, "system-out").text = "\n".join(map(clean, summary.verdict))
    ElementTree.SubElement(suite, "system-err")
    ElementTree.indent(suites)
    content: bytes = ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)
    return content + b"\n"


def to_sarif(report: Report, gates: Sequence[Gate]) -> bytes:
    """Return a log with a result for each gate and for each headline that leaks more than is known without joining."""
    summary = report.summary
    # Without Holm's correction: a leak must not depend on how many other defenses are tested.
    leaks = [p for p in summary.worst if (p.leak.advantage_ci95[0] or 0.0) > 0]
    targets = dict.fromkeys(point.target for point in leaks)
    results = [
        *(_make_result("gate", LEVELS[gate.holds], write_gate(gate), f"{gate.gate} {gate.at}") for gate in gates),
        *(_make_result(_name_rule(p.target), "warning", _describe(p, report), _name_place(p, report)) for p in leaks),
    ]
    rules = [("gate", "A limit on leak or utility"), *((_name_rule(t), f"An adversary infers {t}") for t in targets)]
    driver = {
        "name": "vflsec",
        "version": report.manifest.provenance.versions.get("vflsec", "unknown"),
        "rules": [{"id": name, "shortDescription": {"text": text}} for name, text in rules],
    }
    invocation = {"executionSuccessful": not summary.failures, "exitCodeDescription": write_heading(summary)}
    run = {"tool": {"driver": driver}, "invocations": [invocation], "results": results}
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1).encode() + b"\n"


def to_comment(report: Report, gates: Sequence[Gate], comparison: Comparison | None) -> str:
    """Return what a pull request shows: gates, verdict, what has moved since an accepted run, and the table."""
    failed, undecided = ([gate for gate in gates if gate.holds is holds] for holds in (False, None))
    title = f"{len(failed)} of {count(len(gates), 'gate')} failed" if failed else "no gate failed"
    title += f", {len(undecided)} undecided" if undecided else ""
    parts = [f"### vflsec: {title}", *(f"* {as_markdown_text(write_gate(gate))}" for gate in gates)]
    parts += [f"> {as_markdown_text(sentence)}" for sentence in (*report.summary.alarms, *report.summary.verdict)]
    if comparison is not None:
        moves = [move for move in comparison.moves if move.attack == "worst"]
        moved = [_describe_move(move) for move in moves if move.leak.is_shown]
        parts.append(f"Compared with the accepted run, {len(moved) or 'none'} of {len(moves)} headlines moved.")
        parts += [f"* {as_markdown_text(line)}" for line in moved]
    parts.append(f"<details><summary>Table</summary>\n\n{report.to_markdown()}\n</details>")
    return "\n\n".join(parts) + "\n"


def _describe_move(move: Move) -> str:
    low, high = move.leak.ci95
    return (
        f"{move.target}, {move.method} {name_defense(move, 'no defense')}: {write_number(move.leak.before)} to "
        f"{write_number(move.leak.after)} ({format_signed(low)} to {format_signed(high)})"
    )


def _name_rule(target: str) -> str:
    return f"leak-of-{target.replace(' ', '-')}"


def _name_place(point: Point, report: Report) -> str:
    return f"{point.method} {name_defense(point, report.summary.undefended)} {point.target}"


def _describe(point: Point, report: Report) -> str:
    measure = MEASURES.get(point.leak.metric, point.leak.metric)
    where = f"{point.method}, {name_defense(point, report.summary.undefended)}"
    return (
        f"{where}: {report.summary.adversary} infers {point.question} by {point.choice} with {measure} "
        f"{write_number(point.leak.mean)}, and {write_number(point.leak.alone)} without joining"
    )


def _make_result(rule: str, level: str, text: str, fingerprint: str) -> dict[str, Any]:
    place = {"physicalLocation": {"artifactLocation": {"uri": "manifest.json"}}}
    return {
        "ruleId": rule,
        "level": level,
        "message": {"text": clean(text)},
        "locations": [place],
        "partialFingerprints": {"vflsec/v1": clean(fingerprint)},
    }
