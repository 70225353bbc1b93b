"""The numbers of every format are those of ``--format json``: each cell is read back and compared with its field."""

import csv
import io
import json
import math
import random
import re
from html import unescape
from itertools import count
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import to_builtins
from msgspec.structs import replace

from tests.report.test_columns import DAMAGE, LEAK, POINT, SHARE
from vflsec.report import columns, comparison, exchange, formats, page, table
from vflsec.report.report import Report
from vflsec.report.sweep import SweepReport
from vflsec.results.analysis.results import Cap, Empirical, Gate, GroupLeak, Rank, Summary
from vflsec.results.records.manifest import Sweep, SweepPoint
from vflsec.results.records.schema import Tuning
from vflsec.run import spec as specs
from vflsec.run.describe import build_manifest

MANIFEST = build_manifest(specs.EvalSpec())
NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
SHARES = ("tpr@0.001", "tpr@0.01", "known@0.99", "right@0.99", "known_of_class@0.99", "right_of_class@0.99")
ON_TEXT = ("exact", "gained")
SCORES = ("CAP", "calibrated CAP", "hypervolume", "strongest leak")


def make_report(seed, *, strength=None, audited=""):
    """A report of two defenses that has each kind of table, and any numbers in them."""
    source, on_text, numbers = random.Random(seed), random.Random(seed), count()  # noqa: S311

    def maybe(value):
        return None if source.random() < 0.15 else value

    def measure(kind=SHARE, signed=False):
        mean = maybe(source.uniform(-1.0 if signed else 0.0, 1.0))
        ends = (None, None)
        if mean is not None and source.random() < 0.9:
            low, high = mean - source.uniform(0, 0.4), mean + source.uniform(0, 0.4)
            ends = (low, high) if signed else (max(0.0, low), min(1.0, high))
        return replace(kind, mean=mean, ci95=ends)

    def leak(rows):
        leaked, gain, bits = measure(LEAK), measure(signed=True), measure(signed=True)
        gain = gain if leaked.mean is not None else replace(gain, mean=None, ci95=(None, None))
        return replace(
            leaked, rows=rows, chance=maybe(source.random()), alone=maybe(source.random()), advantage=gain.mean,
            advantage_ci95=gain.ci95, accuracy=maybe(source.random()), bits=bits.mean, bits_ci95=bits.ci95,
            detectable=maybe(source.random()), p_holm=maybe(source.uniform(0, 0.1)),
            others={name: source.random() for name in SHARES} | {name: on_text.random() for name in ON_TEXT},
            alone_others={name: source.random() for name in SHARES if source.random() < 0.8},
            by_seed={} if leaked.mean is None else {k: source.random() for k in range(2)},
        )  # fmt: skip

    def point(defense, strength, **fields):
        spent = {"defense": defense, "epsilon": 10 ** source.uniform(-2, 8), "delta": 10 ** -source.randint(3, 9)}
        bound = Empirical(epsilon=source.uniform(0, 9), delta=0.0, promised=None, attack="x", right=1, made=2, tossed=3)
        tuning = Tuning(settings={}, scores=[source.random()] * source.randint(1, 9), seconds=source.uniform(0, 1e4))
        return replace(
            POINT, defense=defense, strength=strength, utility=measure(), leak=leak("test"), leak_train=leak("train"),
            nbytes=maybe(source.randint(0, 10**9)), seconds=maybe(source.uniform(0, 1e5)), empirical=maybe(bound),
            budget={"steps": source.uniform(1, 1e6)} if source.random() < 0.8 else {}, sureness=maybe(source.random()),
            spent=[spent] if source.random() < 0.7 else [], cost=maybe(source.uniform(-1, 1)), tuning={0: tuning},
            above=maybe(source.uniform(-9, 9)), **fields,
            statuses={"ok": source.randint(1, 5), "error": source.randint(1, 5)},
            reached={"epochs": source.randint(1, 99), "true_bytes": source.randint(1, 10**9),
                     "paper_bytes": source.randint(1, 10**9)} if source.random() < 0.8 else None,
        )  # fmt: skip

    def headline(defense, strength, **fields):
        rows = source.choice(["test", "train", "test+train"])
        choice = f"{next(numbers):03}".translate(str.maketrans("0123456789", "abcdefghij"))  # its digits are no number
        highest = {"highest": maybe(source.random()), "highest_attack": "norm", "highest_rows": rows}
        made = point(defense, strength, attack="worst", choice=choice, **highest, **fields)
        return replace(made, leak=replace(made.leak, rows=rows), leak_test=leak("test"))

    places = [("iso", 0.0), ("iso", 0.25), ("iso", strength or source.uniform(1, 1e4)), ("mid", 3.0)]
    targets = ["labels", "features of bank"]
    each = [(*place, target) for target in targets for place in places for _ in range(2)]
    ranked = [
        Rank(
            target=target, method="fedsplitnn", defense=name, close=[source.choice(SCORES)],
            values={score: maybe(source.random()) for score in SCORES},
            ranks={score: source.randint(1, 9) for score in SCORES},
        )
        for target in targets
        for name in ("iso", "mid")
    ]  # fmt: skip

    def cap(target, name, attack):
        plain, above, area = measure(), measure(), measure(signed=True)
        return Cap(
            method="fedsplitnn", defense=name, attack=attack, n=2, value=plain.mean, ci95=plain.ci95, target=target,
            calibrated=above.mean, calibrated_ci95=above.ci95, hypervolume=area.mean, hypervolume_ci95=area.ci95,
            accuracy_value=maybe(source.random()), dcs=maybe(source.random()),
        )  # fmt: skip

    def damage(place):
        return replace(
            DAMAGE, defense=place[0], strength=place[1], attack=f"d{next(numbers)}", utility=measure(),
            under_attack=measure(), lost=measure(signed=True), success=measure(), chance=maybe(source.random()),
        )  # fmt: skip

    def group(name):
        return GroupLeak(
            column="AGE", method="fedsplitnn", defense="iso", strength=0.0, attack="mc", rows="test", group=name,
            n=source.randint(1, 999), leak=measure(), p=0.5, p_holm=maybe(source.random()),
        )  # fmt: skip

    gates = [
        Gate(gate=name, limit=round(source.random(), 3), worst=maybe(source.random()), at="iso 1",
             holds=source.choice([True, False, None]))
        for name in ("max-leak worst", "min-utility", "max-undetected")
    ]  # fmt: skip
    summary = Summary(
        dataset="toy", adversary="passive_1", metric="auc", seeds=2, c_dcs=[], notes=[], out="run", target=0.7,
        audited=audited,
        points=[point(name, s, target=target, attack=f"a{next(numbers)}") for name, s, target in each],
        worst=[headline(*place, target=target) for target in targets for place in places],
        cap=[cap(target, name, attack) for target in targets for name in ("iso", "mid") for attack in ("worst", "a0")],
        ranks=ranked, gates=gates, integrity=[damage(place) for place in places],
        subgroups=[group(f"g{k}") for k in range(3)],
        columns=[headline("iso", s, target="attribute", column=f"X{s:g}", victim="bank", among=3) for s in (0.0, 0.25)],
    )  # fmt: skip
    return Report(summary, MANIFEST)


def is_near(shown, value, half=0.0005, digits=0):
    """Whether a number is rounded to so many digits, or else to ``half`` of its last decimal."""
    if digits:
        half = 0.51 * 10.0 ** (math.floor(math.log10(abs(value) or 1.0)) + 1 - digits)
    return abs(shown - value) <= half + 1e-9


def expect(condition, cell, value):
    assert condition, f"expected {value}, the cell has {cell!r}"


def check_number(cell, value, half=0.0005, digits=0):
    if value is None:
        expect(cell == "–", cell, value)
    else:
        shown = re.fullmatch(rf"({NUMBER})(k?)(?: %)?", cell)
        expect(shown and is_near(float(shown[1]) * (1000 if shown[2] else 1), value, half, digits), cell, value)


def check_interval(cell, mean, ends, is_exact=False):
    shown = re.fullmatch(rf"(–|{NUMBER})(?: ±({NUMBER})| \(({NUMBER}) to ({NUMBER})\))?", cell)
    expect(shown, cell, mean)
    check_number(shown[1], mean)
    low, high = ends
    if mean is None or low is None or is_exact:
        expect(shown[2] is shown[3] is None, cell, ends)
    elif shown[2]:
        expect(is_near(float(shown[2]), max(high - mean, mean - low)), cell, ends)
    else:
        expect(shown[3] and is_near(float(shown[3]), low) and is_near(float(shown[4]), high), cell, ends)


def check_pair(cell, first, second):
    """A number with another in brackets."""
    shown = re.fullmatch(r"(\S+) \((\S+)\)", cell)
    expect(shown, cell, (first, second))
    check_number(shown[1], first)
    check_number(shown[2], second)


def check_rows(cell, row):
    """The leak on other rows than those shown."""
    if row["leak"]["rows"] == "train":
        block, name = row["leak_test"], "test"
    else:
        block, name = row["leak_train"], "train"
    if block is None or block["mean"] is None:
        expect(cell == "–", cell, block)
    else:
        expect(cell.endswith(f" ({name})"), cell, name)
        check_number(cell.split()[0], block["mean"])


def is_corrected(row):
    return row["leak"]["p_holm"] is None or row["leak"]["p_holm"] < 0.05


def check_beyond(cell, row):
    low, detectable = row["leak"]["advantage_ci95"][0], row["leak"]["detectable"]
    if row["leak"]["advantage"] is None or "(" not in cell:
        is_above = row["leak"]["advantage"] is not None and low is not None and low > 0
        expect((cell == "yes") is (is_above and is_corrected(row)), cell, low)
        expect((cell == "yes, before correction") is (is_above and not is_corrected(row)), cell, low)
    else:
        check_number(cell[cell.index("(") + 1 : -1], detectable)


def check_highest(cell, row):
    """The single attack that leaks more than the headline, where one does."""
    shown = re.search(rf" \(highest: (\w+) ({NUMBER}), (\S+)\)", cell)
    exceeds = row.get("highest") is not None and row["highest"] >= (row["leak"]["mean"] or 0.0) + 0.005
    expect(bool(shown) is exceeds, cell, row.get("highest"))
    if shown:
        expect((shown[1], shown[3]) == (row["highest_attack"], row["highest_rows"]), cell, row["highest_attack"])
        check_number(shown[2], row["highest"])


def check_seen(cell, row):
    """None where it is all that is left to be gained."""
    leak = row["leak"]
    if leak["alone"] is None or (leak["detectable"] or 0) + max(leak["alone"], leak["chance"] or 0) <= 1 - 1e-9:
        check_number(cell, leak["detectable"])
    else:
        expect(cell == ("–" if leak["detectable"] is None else "none"), cell, leak["detectable"])


def check_epsilon(cell, row):
    if row["spent"]:
        check_number(cell, row["spent"][0]["epsilon"], digits=3)
    else:
        expect(cell == "∞", cell, row["spent"])


def check_budget(cell, row):
    values = [(value, 0.0, 3 if value >= 999.5 else 6) for value in row["budget"].values()]
    values += [] if row["sureness"] is None else [(100 * row["sureness"], 0.5, 0)]
    texts = re.findall(rf"({NUMBER})(k?)", cell)
    expect(len(texts) == len(values), cell, values)
    for (text, thousand), value in zip(texts, values, strict=True):
        expect(is_near(float(text) * (1000 if thousand else 1), *value), cell, value)


def check_status(cell, row):
    shown = dict(re.findall(r"(\d+/\d+) (error)", cell))
    total = sum(row["statuses"].values())
    expect(("error" in row["statuses"]) == bool(shown), cell, row["statuses"])
    for counted, name in shown.items():
        expect(counted == f"{row['statuses'][name]}/{total}", cell, row["statuses"])


def of_leak(name):
    return lambda cell, row: check_number(cell, row["leak"][name])


def of_others(name):
    return lambda cell, row: check_pair(cell, row["leak"]["others"].get(name), row["leak"]["alone_others"].get(name))


def of_reached(name, unit):
    return lambda cell, row: check_number(cell, row["reached"] and row["reached"][name] / unit, 0.05)


def of_measure(name):
    return lambda cell, row: check_interval(cell, row[name]["mean"], row[name]["ci95"])


def of_score(name, ends):
    return lambda cell, row: check_interval(cell, row[name], row[ends])


def of_rank(score):
    def check(cell, row):
        value, place = row["values"][score], row["ranks"][score]
        shown = re.fullmatch(r"(\S+) \((≈?)(\d+)\)", cell)
        expect(shown and int(shown[3]) == place and bool(shown[2]) is (score in row["close"]), cell, place)
        check_number(shown[1], value)

    return check


def check_advantage(cell, row):
    leak = row["leak"]
    check_interval(cell, leak["advantage"], leak["advantage_ci95"], leak["advantage_ci95"] == [0.0, 0.0])


def check_chance(cell, row):
    check_number(cell, row["chance"] if "chance" in row else row["leak"]["chance"])


def count_trials(row):
    return sum(len(tuning["scores"]) for tuning in row["tuning"].values())


CHECKS = {
    "λ": lambda cell, row: check_number(cell, row["strength"], digits=4),
    "ε": check_epsilon,
    "ε at least": lambda cell, row: check_number(cell, row["empirical"] and row["empirical"]["epsilon"]),
    "δ": lambda cell, row: check_number(cell, row["spent"][0]["delta"] if row["spent"] else None, digits=6),
    "utility": of_measure("utility"),
    "cost": lambda cell, row: check_number(cell, row["cost"] if row["strength"] else None),
    "leak": of_measure("leak"),
    "strongest attack": check_highest,
    "other rows": check_rows,
    "alone": of_leak("alone"),
    "chance": check_chance,
    "advantage": check_advantage,
    "more than alone": check_beyond,
    "seen from": check_seen,
    "budget": check_budget,
    "MB": lambda cell, row: check_number(cell, row["nbytes"] and row["nbytes"] / 1e6, 0.05),
    "trials": lambda cell, row: check_number(cell, count_trials(row), 0.0),
    "their CPU s": lambda cell, row: check_number(cell, sum(t["seconds"] for t in row["tuning"].values()), 0.05),
    "epochs to target": of_reached("epochs", 1.0),
    "MB to target": of_reached("true_bytes", 1e6),
    "as SS-VFL counts": of_reached("paper_bytes", 2**20),
    "status": check_status,
    "bits per row": lambda cell, row: check_interval(cell, row["leak"]["bits"], row["leak"]["bits_ci95"]),
    "whole texts": of_others("exact"),
    "gained": lambda cell, row: check_number(cell, row["leak"]["others"]["gained"]),
    "TPR at 0.1 % FPR": of_others("tpr@0.001"),
    "TPR at 1 % FPR": of_others("tpr@0.01"),
    "of a class known > 99 %": of_others("known_of_class@0.99"),
    "of these right": of_others("right_of_class@0.99"),
    "under attack": of_measure("under_attack"),
    "lost": of_measure("lost"),
    "success": of_measure("success"),
    "CAP": of_score("value", "ci95"),
    "calibrated": of_score("calibrated", "calibrated_ci95"),
    "hypervolume": of_score("hypervolume", "hypervolume_ci95"),
    "CAP (accuracy)": lambda cell, row: check_number(cell, row["accuracy_value"]),
    "DCS": lambda cell, row: check_number(cell, row["dcs"]),
    **{f"{score} (place)": of_rank(score) for score in SCORES},
    "n": lambda cell, row: check_number(cell, row["n"], 0.0),
    "p (Holm)": lambda cell, row: check_number(cell, row["p_holm"]),
}
"""What is read from a cell below each title that has a number, and from which fields of JSON."""

NAMES = {"method", "defense", "attack", "of", "rows", "column", "measure", "AGE"}
"""Titles of names, which say of what a row is."""


def list_rows(content):
    """Rows of JSON by what names them in a table."""
    rows = {row["attack"]: row for row in (*content["points"], *content["integrity"])}
    rows |= {row["choice"]: row for row in (*content["worst"], *content["columns"])}
    rows |= {row["group"]: row for row in content["subgroups"]}
    rows |= {(row["defense"], row["target"], row["attack"]): row for row in content["cap"]}
    return rows | {(row["defense"], row["target"]): row for row in content["ranks"]}


def find_row(cells, rows):
    """The row of JSON that a row of a table is about, its leak that of the rows which the table names."""
    if "AGE" in cells:
        return rows[cells["AGE"]]
    if "CAP" in cells:
        return rows[cells["defense"], cells["of"], cells.get("attack", "worst")]
    if "CAP (place)" in cells:
        return rows[cells["defense"], cells["of"]]
    name = (cells.get("strongest attack") or cells["attack"]).removeprefix("worst: ")
    row = rows[name.partition(" (highest")[0]]
    kept = "rows" in cells and "leak" in row and row["attack"] != "worst" and cells["rows"] == "train"
    return {**row, "leak": row["leak_train"], "leak_test": row["leak"]} if kept else row


def check_tables(tables, content):
    """Compare each cell with JSON; return the titles that were compared."""
    rows, seen = list_rows(content), set()
    for header, body in tables:
        titles = [title.rstrip(" ↑↓") for title in header]
        for texts in body:
            cells = dict(zip(titles, texts, strict=True))
            row = find_row(cells, rows)
            for title in set(titles) - NAMES:
                CHECKS[title](cells[title], row)
        seen |= {*titles} - NAMES
    return seen


def read_terminal(text):
    """Header and rows around each line of dashes."""
    lines = text.splitlines()
    for k, line in enumerate(lines):
        if line.strip() and not line.strip("─ "):
            until = next((i for i in range(k, len(lines)) if not lines[i].strip()), len(lines))
            yield split_columns(lines[k - 1]), list(map(split_columns, lines[k + 1 : until]))


def split_columns(line):
    return re.split(r"\s{2,}", line.strip())


def read_markdown(text):
    for block in re.findall(r"(?m)(?:^\|.*\n)+", text):
        header, _, *rows = [
            [re.sub(r"\\(.)", r"\1", cell.replace("@<!-- -->", "@")) for cell in line[2:-2].split(" | ")]
            for line in block.splitlines()
        ]
        yield header, rows


def read_latex(text):
    signs = {r"$\lambda$": "λ", r"$\varepsilon$": "ε", r"$\delta$": "δ", r"$\uparrow$": "↑", r"$\downarrow$": "↓",
             r"$\pm$": "±", r"$\approx$": "≈", r"$\infty$": "∞", "--": "–", "$>$": ">", "$-$": "-"}  # fmt: skip
    for sign, plain in signs.items():
        text = text.replace(sign, plain)
    text = re.sub(r"\$([+-][\d.]+)\$", r"\1", text).replace(r"\%", "%").replace(r"\_", "_")
    for header, body in re.findall(r"\\toprule\n(.*) \\\\\n\\midrule\n((?:.* \\\\\n)*)", text):
        yield header.split(" & "), [line.removesuffix(r" \\").split(" & ") for line in body.splitlines()]


def read_html(text):
    for part in re.findall(r"<table><thead>.*?</table>", text, re.DOTALL):
        rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", part)]
        header, *body = [[" ".join(unescape(re.sub("<[^>]*>", "", c)).split()) for c in row] for row in rows]
        if header[0] != "setting":
            yield header, body


READERS = {
    "table": lambda report, details: read_terminal(report.table(2000, details=details)),
    "markdown": lambda report, details: read_markdown(report.to_markdown(details=details)),
    "latex": lambda report, details: read_latex(report.to_latex(details=details)),
    "html": lambda report, details: read_html(page.write_page([page.Part(report.summary, report.manifest)])),
}
WIDE = {
    title
    for title in CHECKS
    if title in ("whole texts", "gained")
    or "bits" in title
    or "FPR" in title
    or "of a class" in title
    or "of these" in title
}
"""Columns of a table for which a terminal has no room."""
HEADLINES = {"cost", "more than alone", "δ", "strongest attack"}


def check_form(name, report):
    """Compare a format with JSON, and whether it has every column."""
    content = json.loads(report.to_json())
    both = [check_tables(READERS[name](report, details), content) for details in (True, False)]
    left = set(CHECKS) - both[0] - both[1]
    assert left == (WIDE if name == "table" else set()), "every column is in the format"
    assert both[1] >= HEADLINES


def get(row, *path):
    for key in path:
        row = None if row is None else row[key]
    return row


ENDS = {f"{name}_{side}": (path, k) for k, side in enumerate(("low", "high")) for name, path in {
    "utility": ("utility", "ci95"), "leak": ("leak", "ci95"), "advantage": ("leak", "advantage_ci95"),
    "bits": ("leak", "bits_ci95"), "lost": ("lost", "ci95"), "success": ("success", "ci95")}.items()}  # fmt: skip
PATHS = {
    **{name: (*path, k) for name, (path, k) in ENDS.items()},
    **{name: (name, "mean") for name in ("utility", "leak", "leak_train", "lost", "success")},
    **{name: (name,) for name in ("method", "defense", "strength", "attack", "target", "status", "cost", "nbytes",
                                  "seconds", "victim", "column", "above", "highest", "highest_attack",
                                  "highest_rows")},
    **{name: ("leak", name) for name in ("alone", "advantage", "detectable", "bits")},
    "utility_metric": ("utility", "metric"), "leak_metric": ("leak", "metric"), "leak_rows": ("leak", "rows"),
    "recovery_accuracy": ("leak", "accuracy"), "utility_under_attack": ("under_attack", "mean"),
    "epsilon_at_least": ("empirical", "epsilon"),
}  # fmt: skip
"""Where a column of a CSV is in JSON; ``get_field`` has the others."""
OF_POINTS = {"highest", "highest_attack", "highest_rows", "leak", "empirical", "cost", "nbytes", "seconds", "victim",
             "column", "above", "leak_train"}  # fmt: skip


def get_field(name, row, is_damage):
    if is_damage and name == "target":
        return "integrity"
    if name in PATHS:
        return None if PATHS[name][0] not in row else get(row, *PATHS[name])
    if name == "chance":
        return row["chance"] if is_damage else row["leak"]["chance"]
    if name == "seeds":
        return (row["lost"] if is_damage else row["utility"])["n"]
    if is_damage:
        return None
    if name in ("trials", "trials_seconds"):
        return count_trials(row) if name == "trials" else sum(t["seconds"] for t in row["tuning"].values())
    if name in ("epsilon", "delta", "epsilon_of"):
        return row["spent"][0].get({"epsilon_of": "of"}.get(name, name), "releases") if row["spent"] else None
    return row["leak"]["others"].get(name)


def check_csv(report):
    """Every digit is that of JSON."""
    content = json.loads(report.to_json())
    rows = [*content["points"], *content["worst"], *content["columns"], *content["integrity"]]
    lines = list(csv.DictReader(io.StringIO(report.to_csv())))
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        is_damage = "lost" in row
        for name, cell in line.items():
            if name == "budget":
                if not is_damage:
                    check_budget(cell, row)
                continue
            value = get_field(name, row, is_damage)
            is_same = (
                cell == ("" if value is None else value) if isinstance(value, str | None) else float(cell) == value
            )
            expect(is_same, f"{name}: {cell}", value)


def check_gates(text, content):
    """Limits and numbers of the gates, each in a line of its own."""
    for gate in content["gates"]:
        lines = re.findall(rf"GATE {gate['gate']} .*", text)
        assert lines
        for line in lines:
            limit, worst = re.match(rf"GATE {gate['gate']} ({NUMBER}):.*?(?:({NUMBER}) at iso 1)?$", line).groups()
            expect(float(limit) == gate["limit"], line, gate["limit"])
            expect((worst is None) is (gate["worst"] is None), line, gate["worst"])
            expect(worst is None or is_near(float(worst), gate["worst"]), line, gate["worst"])


def check_junit(report):
    text = exchange.to_junit(report, report.summary.gates).decode()
    suites = ElementTree.fromstring(text)  # noqa: S314
    cases = {case.get("name"): [child.get("message") for child in case] for case in suites.iter("testcase")}
    content = json.loads(report.to_json())
    assert {f"{gate['gate']} {gate['limit']:g}" for gate in content["gates"]} == cases.keys() - {"results"}
    bad = {**content, "gates": [gate for gate in content["gates"] if gate["holds"] is not True]}
    check_gates("\n".join(message for messages in cases.values() for message in messages), bad)


def check_sarif(report):
    content = json.loads(report.to_json())
    (run,) = json.loads(exchange.to_sarif(report, report.summary.gates))["runs"]
    texts = [result["message"]["text"] for result in run["results"]]
    check_gates("\n".join(texts), content)
    rows, leaks = list_rows(content), [text for text in texts if not text.startswith("GATE")]
    shown = [row for row in content["worst"] if (row["leak"]["advantage_ci95"][0] or 0) > 0]
    assert len(leaks) == len(shown)
    for text in leaks:
        choice, leak, alone = re.search(rf"by (\w+) with \S+ (–|{NUMBER}), and (–|{NUMBER}) without", text).groups()
        check_number(leak, rows[choice]["leak"]["mean"])
        check_number(alone, rows[choice]["leak"]["alone"])


def check_comment(report, before):
    moved = comparison.compare((before.summary, MANIFEST), (report.summary, MANIFEST))
    text, content = exchange.to_comment(report, report.summary.gates, moved), json.loads(report.to_json())
    check_tables(read_markdown(text), content)
    check_gates(text, content)
    moves = {
        (move["target"], move["defense"] if move["strength"] else "no", f"{move['strength']:.4g}"): move["leak"]
        for move in to_builtins(moved.moves)
        if move["attack"] == "worst"
    }
    shown = re.findall(rf"\* (.*), fedsplitnn (\w+) (\S+): ({NUMBER}) to ({NUMBER}) \(({NUMBER}) to ({NUMBER})\)", text)
    assert len(shown) == sum(
        None not in leak["ci95"] and leak["ci95"][0] * leak["ci95"][1] > 0 for leak in moves.values()
    )
    for target, defense, strength, *texts in shown:
        leak = moves[target, defense, "0" if defense == "no" else strength]
        for text_, value in zip(texts, (leak["before"], leak["after"], *leak["ci95"]), strict=True):
            check_number(text_, value)


OTHERS = {
    "csv": check_csv,
    "junit": check_junit,
    "sarif": check_sarif,
    "comment": lambda report: check_comment(
        report,
        make_report(7),
    ),
}


@pytest.mark.parametrize("name", [*READERS, *OTHERS])
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_numbers_of_every_format_are_those_of_json(name, seed):
    report = make_report(seed)
    OTHERS[name](report) if name in OTHERS else check_form(name, report)


DOCUMENTS = {
    "table": lambda document: read_terminal(formats.as_text(document.rich(2000), 2000)),
    "markdown": lambda document: read_markdown(document.markdown()),
    "latex": lambda document: read_latex(document.latex()),
}


def check_audit(name, seed):
    report = make_report(seed, audited="m.onnx")
    seen = check_tables(READERS[name](report, True), json.loads(report.to_json()))
    assert set(CHECKS) - seen - (WIDE if name == "table" else set()) == {
        "λ",
        "utility",
        "MB",
        "cost",
        "δ",
        "more than alone",
        "strongest attack",
    }
    return seen


def check_roles(name, seed):
    """The leak of each headline in the column of its adversary, and what is known without joining."""
    reports = [make_report(seed + k) for k in range(2)]
    for report in reports:  # each threshold would be a target of its own
        worst = [replace(p, above=None, victim=p.target.partition(" of ")[2]) for p in report.summary.worst]
        report.summary = replace(report.summary, worst=worst)
    contents, seen = [json.loads(report.to_json()) for report in reports], set()
    if name == "html":
        tables = read_html(page.write_page([page.Part(report.summary, report.manifest) for report in reports]))
    else:
        tables = DOCUMENTS[name](table.show_roles([report.summary for report in reports]))
    for header, body in tables:
        if not header[1].startswith("1. passive_1"):
            continue
        for label, *cells in body:
            for cell, content in zip(cells, contents, strict=True):
                rows = [row for row in content["worst"] if row["target"].endswith("bank") is header[1].endswith("bank")]
                rows = {f"{row['defense']} {row['strength']:.4g}" * (row["strength"] > 0): row for row in rows}
                if label == table.ALONE:
                    check_number(cell, rows[""]["leak"]["alone"])
                elif row := rows.get(label if label != "no defense" else ""):
                    check_highest(cell, row)
                    ends = row["leak"]["ci95"] or (None, None)
                    check_interval(cell.partition(" (highest")[0], row["leak"]["mean"], ends)
                else:
                    expect(cell == "not run", cell, None)
        seen.add(header[1])
    assert seen == {"1. passive_1", "1. passive_1: of bank"}
    return seen


MOVED = {
    "leak before": lambda cell, move: check_number(cell, move["leak"]["before"]),
    "leak after": lambda cell, move: check_number(cell, move["leak"]["after"]),
    "change": lambda cell, move: check_number(cell, move["leak"]["change"]),
    "95 % interval": lambda cell, move: check_ends(cell, move["leak"]["ci95"]),
    "utility": lambda cell, move: check_number(cell, move["utility"]["change"]),
}


def check_ends(cell, ends):
    for text, end in zip(cell.split(" to ") if " to " in cell else [cell] * 2, ends, strict=True):
        check_number(text, end)


def check_comparison(name, seed):
    moved = comparison.compare(*((make_report(seed + k).summary, MANIFEST) for k in range(2)))
    moves = {
        f"worst: {move['choice'][0]}" if move["attack"] == "worst" else move["attack"]: move
        for move in to_builtins(moved)["moves"]
    }
    ((header, body),) = DOCUMENTS[name](comparison.show(moved))
    for texts in body:
        cells = dict(zip(header, texts, strict=True))
        for title, check in MOVED.items():
            check(cells[title], moves[cells["attack"]])
    assert len(body) == len(moves) > 6
    return set(MOVED)


def check_sweep(name, seed):
    """Headlines and CAP at each point, and the rise of the last step."""
    points = [SweepPoint(name=f"p{n}", values={"aux.n": n}) for n in (20, 40)]
    made = [make_report(seed + k, strength=7.5) for k in range(2)]
    report = SweepReport(Sweep(axes={"aux.n": [20, 40]}, paired=False, points=points), made)
    content = json.loads(report.to_json())
    rows = {str(point["values"]["aux.n"]): list_rows(point["summary"]) for point in content["points"]}
    rises = {(rise["defense"], rise["strength"], rise["target"], rise["attack"]): rise for rise in content["rises"]}
    seen = set()
    for header, body in read_html(report._repr_html_()) if name == "html" else DOCUMENTS[name](report.document()):
        titles = [title.rstrip(" ↑↓") for title in header]
        for texts in body:
            cells = dict(zip(titles, texts, strict=True))
            if "rise" in cells:
                rise = rises[cells["defense"], float(cells["λ"]), cells["of"], cells["attack"]]
                check_number(cells["20"], rise["before"])
                check_number(cells["40"], rise["after"])
                check_interval(cells["rise"], rise["rise"], rise["ci95"])
                continue
            key = (cells["defense"], cells["of"], "worst") if "CAP" in cells else cells["strongest"].partition(" (")[0]
            check_highest(cells.get("strongest", ""), {} if "CAP" in cells else rows[cells["n"]][key])
            for title in {*titles} & {*CHECKS} - {"n"}:  # the swept setting
                CHECKS[title](cells[title], rows[cells["n"]][key])
        seen |= {*titles} - NAMES
    assert seen >= {"λ", "ε", "utility", "leak", "alone", "advantage", "CAP", "calibrated", "hypervolume", "rise"}
    return seen & ({*CHECKS} - {"n"} | {"20", "40", "rise"})


FURTHER = {"audit": check_audit, "roles": check_roles, "compare": check_comparison, "sweep": check_sweep}


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in FURTHER for name in READERS if (kind, name) != ("compare", "html")],
)
def test_the_numbers_of_further_tables_are_those_of_json(kind, name):
    """Audits, several adversaries side by side, comparisons and sweeps."""
    for seed in range(3):
        FURTHER[kind](name, seed)


@pytest.mark.parametrize("kind", FURTHER)
def test_a_number_that_a_further_table_changes_is_noticed(kind, monkeypatch):
    plain, changed = formats.as_markdown, set()
    titles = FURTHER[kind]("markdown", 1)
    for title in sorted(titles):

        def change(cells, title=title):
            at = [i for i, column in enumerate(cells.columns) if column.title.rstrip(" ↑↓") == title]
            rows = [[shift(cell, 0) if i in at else cell for i, cell in enumerate(row)] for row in cells.rows]
            changed.update(title for _ in at if rows != [*map(list, cells.rows)])
            return plain(cells._replace(rows=rows))

        monkeypatch.setattr(formats, "as_markdown", change)
        with pytest.raises((AssertionError, KeyError), match=None if title == "λ" else "the cell has"):
            FURTHER[kind]("markdown", 1)
    assert changed == titles


def shift(cell, k):
    """Change the last digit of the number ``k`` of a cell."""
    numbers = list(re.finditer(r"[\d.]*\d", cell))
    if k >= len(numbers):
        return cell
    at = numbers[k].end() - 1
    return f"{cell[:at]}{(int(cell[at]) + 5) % 10}{cell[at + 1 :]}"


RENDERERS = {"markdown": (formats, "as_markdown"), "latex": (formats, "as_latex"), "html": (page, "as_html"),
             "table": (formats.Document, "rich")}  # fmt: skip


@pytest.mark.parametrize("name", ["markdown", "latex", "html", pytest.param("table", marks=pytest.mark.long)])
def test_a_number_that_one_format_changes_is_noticed(name, monkeypatch):
    """In each column, and in both ends of an interval."""
    report, (module, function) = make_report(1), RENDERERS[name]
    plain, changed = getattr(module, function), set()
    titles = sorted(set(CHECKS) - (WIDE if name == "table" else set()))
    cases = [*((title, 0) for title in titles), ("leak", 1), ("leak", 2), ("advantage", 1)]
    for title, k in cases:

        def find(cells, title=title):
            return [i for i, column in enumerate(cells.columns) if column.title.rstrip(" ↑↓") == title]

        def change(cells, title=title, k=k, find=find):
            at = find(cells)
            rows = [[shift(cell, k) if i in at else cell for i, cell in enumerate(row)] for row in cells.rows]
            changed.update((title, k) for _ in at if rows != [*map(list, cells.rows)])
            return cells._replace(rows=rows)

        def render(shown, *width, change=change, find=find):
            if not isinstance(shown, formats.Document):
                return plain(change(shown), *width)
            with_column = filter(find, shown.tables)  # a terminal takes long to lay out the others
            return plain(shown._replace(tables=[*map(change, with_column)]), *width)

        monkeypatch.setattr(module, function, render)
        with pytest.raises(AssertionError, match="the cell has"):
            check_form(name, report)
    assert changed == set(cases)


def test_a_number_that_a_csv_changes_is_noticed(monkeypatch):
    report, every = make_report(1), columns.select_file_columns()

    def change(value):
        return None if value is None else float(shift(repr(value), 0))

    for k, column in enumerate(every):
        if column.kind == "number":
            changed = column._replace(value=lambda row, column=column: change(column.value(row)))
            shown = [*every[:k], changed, *every[k + 1 :]]
            monkeypatch.setattr(columns, "select_file_columns", lambda shown=shown: shown)
            with pytest.raises(AssertionError, match=f"the cell has '{column.name}: "):
                check_csv(report)


@pytest.mark.parametrize(
    ("name", "function"),
    [("junit", "write_gate"), ("sarif", "write_gate"), ("sarif", "write_number"), ("comment", "write_gate"),
     ("comment", "write_number"), ("comment", "format_signed")],
)  # fmt: skip
def test_a_number_that_a_file_for_programs_changes_is_noticed(name, function, monkeypatch):
    plain = getattr(exchange, function)
    report = make_report(1)
    OTHERS[name](report)
    monkeypatch.setattr(exchange, function, lambda value: shift(plain(value), 0))
    with pytest.raises(AssertionError, match="the cell has"):
        OTHERS[name](report)
