"""One entry per column: what is added to ``RESULTS`` is in every form of a report, and nothing else lists columns."""

import csv
import io

import pytest
from msgspec.structs import replace

from vflsec.report import columns, formats, table
from vflsec.report.columns import RESULTS, Column
from vflsec.report.page import drop_repeated
from vflsec.report.report import Report
from vflsec.results.analysis.results import Damage, Leak, Measure, Point, Summary
from vflsec.run import spec as specs
from vflsec.run.describe import build_manifest

SHARE = Measure(metric="auc", mean=0.75, ci95=(0.7, 0.8), n=2)
LEAK = Leak(
    metric="auc", mean=0.8, ci95=(0.7, 0.9), n=2, chance=0.5, alone=0.6, alone_ci95=(0.5, 0.7), advantage=0.2,
    advantage_ci95=(0.1, 0.3), accuracy=0.7,
)  # fmt: skip
POINT = Point(
    method="fedsplitnn", defense="iso", strength=0.0, attack="mc", status="ok", statuses={"ok": 2}, utility=SHARE,
    leak=LEAK, leak_train=LEAK, nbytes=3_000_000, seconds=1.5, budget={}, choice="mc",
)  # fmt: skip
DAMAGE = Damage(
    method="fedsplitnn", defense="iso", strength=0.0, attack="backdoor", status="ok", statuses={"ok": 2}, utility=SHARE,
    under_attack=SHARE, lost=SHARE, success=SHARE, chance=0.1,
)  # fmt: skip


@pytest.fixture
def report():
    summary = Summary(
        dataset="toy", adversary="passive_1", metric="auc", seeds=2, points=[POINT],
        worst=[replace(POINT, attack="worst")], cap=[], c_dcs=[], gates=[], notes=[], out="run", integrity=[DAMAGE],
    )  # fmt: skip
    return Report(summary, build_manifest(specs.EvalSpec()))


def forms(report):
    """Table, CSV, frame, LaTeX, Markdown and page."""
    return [
        report.table(200, details=True), report.to_csv(), ",".join(report.to_frame().columns),
        report.to_latex(details=True), report.to_markdown(details=True), report.to_html(),
    ]  # fmt: skip


def test_a_column_that_is_added_in_one_place_is_in_every_form(report, monkeypatch):
    added = Column("minutes", lambda p: p.seconds / 60, "minutes", lambda p: f"{p.seconds / 60:.3f} min",
                   help="How long attacks take.", place=135)  # fmt: skip
    assert not any("minutes" in form for form in forms(report))
    monkeypatch.setattr(columns, "RESULTS", (*RESULTS, added))
    text, in_csv, frame, latex, markdown, page = forms(report)
    for form in (text, latex, markdown, page):
        assert "minutes" in form
        assert "0.025 min" in form
    assert frame.endswith(",minutes")
    first = next(csv.DictReader(io.StringIO(in_csv)))
    assert first["minutes"] == "0.025"
    assert "<dt>minutes</dt><dd>How long attacks take.</dd>" in page
    (cells,) = table.list_points(report.summary)
    assert cells.header[cells.header.index("minutes") - 1 :] == ["budget", "minutes", "MB", "status"]


def test_a_detail_is_left_out_in_a_narrow_terminal(report, monkeypatch):
    added = Column("minutes", lambda p: p.seconds, "minutes", detail=1, place=135)
    for detail, hidden in ((1, True), (0, False)):
        monkeypatch.setattr(columns, "RESULTS", (*RESULTS, added._replace(detail=detail)))
        text = report.table(90, details=True)
        assert ("minutes" in text[text.index("NOT SHOWN") :]) is hidden


def test_names_in_files_and_places_in_tables_are_unique():
    names = [column.name for column in columns.select_file_columns()]
    assert len(set(names)) == len(names)
    for kind in (Point, Damage):
        places = [c.place for c in RESULTS if c.title and kind in c.rows and c.where == "main"]
        assert 0 not in places
        assert len(set(places)) == len(places)


def test_a_row_without_a_column_has_an_empty_cell_there(report):
    lines = list(csv.DictReader(io.StringIO(report.to_csv())))
    assert [(line["leak"], line["lost"], line["chance"]) for line in lines] == [
        ("0.8", "", "0.5"), ("0.8", "", "0.5"), ("", "0.75", "0.1"),
    ]  # fmt: skip
    assert lines[2]["target"] == "integrity"


def test_no_text_in_a_file_is_a_formula(report):
    names = replace(report.summary, points=[replace(POINT, attack="=1+1", column="@a")], integrity=[])
    first = next(csv.DictReader(io.StringIO(columns.as_csv(names))))
    assert (first["attack"], first["column"], first["method"]) == ("'=1+1", "'@a", "fedsplitnn")


def test_text_is_flush_left_in_latex_and_html():
    shown = [
        Column("", title="n", cell=str),
        Column("", title="x", cell=str),
        Column("", title="a", cell=str, kind="name"),
    ]
    cells = formats.Cells.fill("t", shown, ["1"])
    assert r"\begin{tabular}{lrl}" in formats.as_latex(cells)
    assert '<td data-name="x">1</td><td class=text data-name="a">1</td>' in formats.as_html(cells)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("attribute-fusion:column=PAY_6", "attribute-fusion"),
        ("attribute-fusion:column=PAY_6,victim=shop", "attribute-fusion:victim=shop"),
        ("attribute-fusion:column=PAY_6@pretrain, alone", "attribute-fusion@pretrain, alone"),
        ("attribute-fusion:column=PAY_60", "attribute-fusion:column=PAY_60"),
    ],
)
def test_an_attack_is_named_without_the_column_of_its_table(name, short):
    """The title has it; of several columns the name stays whole."""
    point = replace(POINT, target="attribute PAY_6", column="PAY_6", attack=name)
    assert columns.name_of_attack(point) == short
    headline = replace(point, attack="worst", choice=name)
    assert columns.STRONGEST.cell(headline) == short
    assert columns.name_of_attack(headline) == f"worst: {short}"
    assert columns.STRONGEST.cell(replace(headline, among=3)) == name


def test_the_page_has_a_row_once_that_only_repeats_the_headline():
    same, other = replace(POINT, attack="norm"), replace(POINT, leak=replace(LEAK, mean=0.7))
    shown = [column for column in RESULTS if column.name in ("attack", "leak")]
    cells = formats.Cells.fill("t", shown, [replace(POINT, attack="worst"), POINT, same])
    assert [row[0] for row in drop_repeated(cells).rows] == ["worst: mc", "norm"]
    cells = formats.Cells.fill("t", shown, [replace(POINT, attack="worst"), other])
    assert drop_repeated(cells).rows == cells.rows
