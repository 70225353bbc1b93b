"""Files for programs are valid by the schemas of others, and pages pass axe; `make checkers` fetches what judges."""

import importlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from msgspec.structs import replace

from tests.report.test_exchange import HOSTILE, make_report
from vflsec.report import exchange
from vflsec.report.report import Report

ROOT = Path(__file__).parents[2]
CHECKERS = Path(os.environ.get("VFLSEC_ENGINES", ROOT / ".engines")) / "checkers"
ODD = f"{HOSTILE} 'é' 🦊 \x00\x07\x85\u2028 \ud800"

pytestmark = pytest.mark.long  # `make engines` comes before


def find(name):
    if not (CHECKERS / name).is_file():
        pytest.skip(f"{name} is not in {CHECKERS}: make checkers")
    return CHECKERS / name


@pytest.fixture
def check_junit(monkeypatch):
    schema = find("junit-10.xsd")
    monkeypatch.syspath_prepend(CHECKERS)
    return importlib.import_module("xmlschema").XMLSchema(schema).validate


@pytest.fixture(scope="module")
def check_sarif():
    return jsonschema.Draft4Validator(json.loads(find("sarif-2.1.0-rtm.5.json").read_text("utf-8"))).validate


def make_case(case):
    name = ODD if case == "an odd name" else "toy"
    made = make_report(0.9, 0.7, name=name)
    summary = made.summary
    changes = {
        "a normal run": {"gates": []},
        "a failed threshold": {},
        "an audit": {"audited": "model.onnx", "alarms": ["all rows have the same score"], "gates": []},
        "lost seeds": {
            "failures": ["mc, iso 1 (1 of 2 seeds): diverged", "norm: ArithmeticError"], "lost": ["logistic (1 seed)"],
            "worst": [replace(point, status="error", statuses={"ok": 1, "error": 1}) for point in summary.worst],
        },
        "nothing to report": {"gates": [], "worst": [], "points": [], "verdict": []},
        "an odd name": {
            "adversary": name, "verdict": [name], "failures": [name], "out": name,
            "worst": [replace(point, choice=name, defense=name, method=name) for point in summary.worst],
            "gates": [replace(gate, gate=f"max-leak {name}", at=name) for gate in summary.gates],
        },
    }  # fmt: skip
    return Report(replace(summary, **changes[case]), made.manifest)


CASES = ["a normal run", "a failed threshold", "an audit", "lost seeds", "nothing to report", "an odd name"]


@pytest.mark.parametrize("case", CASES)
def test_files_for_programs_are_valid(case, check_junit, check_sarif):
    report = make_case(case)
    check_junit(exchange.to_junit(report, report.summary.gates).decode())
    check_sarif(json.loads(exchange.to_sarif(report, report.summary.gates)))


def test_what_is_not_valid_is_noticed(check_junit, check_sarif):
    report = make_case("a failed threshold")
    suites = ElementTree.fromstring(exchange.to_junit(report, report.summary.gates))  # noqa: S314
    del suites[0].attrib["tests"]
    with pytest.raises(ValueError, match="tests"):
        check_junit(ElementTree.tostring(suites, encoding="unicode"))
    log = json.loads(exchange.to_sarif(report, report.summary.gates))
    log["runs"][0]["results"][0]["level"] = "fatal"
    with pytest.raises(jsonschema.ValidationError, match="fatal"):
        check_sarif(log)


@pytest.mark.parametrize("colors", ["light", "dark"])
@pytest.mark.parametrize("is_bad", [False, True])
def test_a_page_passes_axe(colors, is_bad, tmp_path):
    """Contrast, names, roles and order, by axe in Chromium; grey text is noticed."""
    axe, chromium = find("axe.min.js").read_text("utf-8"), shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs chromium")
    page = make_case("an audit").save_page(tmp_path)
    html = re.sub("<meta http-equiv[^>]*>", "", page.read_text("utf-8"))  # which allows no script
    if colors == "dark":
        html = html.replace("(prefers-color-scheme: dark)", "all")
    style = "<style>main p { color: #777; }</style>" if is_bad else ""
    run = "axe.run().then(r => document.title = 'axe ' + r.violations.map(v => v.id + ' ' + v.nodes.map(n => n.html)))"
    page.write_text(html.replace("</main>", f"</main>{style}<script>{axe}</script><script>{run}</script>"), "utf-8")
    done = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom",
         f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()],
        capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    title = re.search("<title>(.*?)</title>", done.stdout, re.DOTALL)[1]
    assert "color-contrast" in title if is_bad else title.strip() == "axe", title
