"""Table, curve and files of a report: text in cells, plain data in curves, the same bytes each time."""

import csv
import io
import json
import math
import re

import msgspec
import numpy as np
import pandas as pd
import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg

from vflsec.base.errors import StoreError, UsageError
from vflsec.cli.options import print_to_terminal
from vflsec.report import columns, curve, formats, table
from vflsec.report.report import Report, plot
from vflsec.results.analysis import verdict
from vflsec.results.analysis.results import Cap, Damage, Gate, Leak, Measure, Place, Point, Rank, Summary
from vflsec.results.canaries import bound_accuracy
from vflsec.run import spec as specs
from vflsec.run.describe import build_manifest

NAMES = [column.name for column in columns.select_file_columns()]


def point(strength, utility, leak, *, attack="mc", method="fedsplitnn", statuses=None, interval="seeds"):
    ends = (None, None) if leak is None else (leak - 0.01, leak + 0.01)
    shared = {"mean": leak, "ci95": ends, "n": 5, "chance": 0.5, "alone": 0.676, "alone_ci95": (0.65, 0.70)}
    found = Leak(
        metric="auc",
        **shared,
        advantage=None if leak is None else leak - 0.676,
        advantage_ci95=(None, None),
        accuracy=0.6,
        interval=interval,
    )
    return Point(
        method=method,
        defense="iso",
        strength=strength,
        attack=attack,
        status=min(statuses or {"ok": 5}),
        statuses=statuses or {"ok": 5},
        utility=Measure(metric="auc", mean=utility, ci95=(None, None) if utility is None else (utility, utility), n=5),
        leak=found,
        leak_train=found,
        nbytes=None if leak is None else 6720000,
        seconds=1.0,
        budget={},
        choice=attack,
    )


def worst_of(points, choice=None):
    """Headlines that name these points' attacks, or ``choice``."""
    return [msgspec.structs.replace(p, attack="worst", choice=choice or p.attack) for p in points]


def with_points(summary, points):
    """A summary of one attack, whose headlines these points are as well."""
    return msgspec.structs.replace(summary, points=points, worst=worst_of(points))


@pytest.fixture
def summary():
    points = [
        point(0.0, 0.776, 0.746),
        point(1.0, 0.771, 0.67),
        point(25.0, None, None, statuses={"diverged": 3, "ok": 2}),
    ]
    worst = [msgspec.structs.replace(p, attack="worst") for p in points]
    cap = Cap(
        method="fedsplitnn",
        defense="iso",
        attack="worst",
        value=None,
        ci95=(None, None),
        calibrated=None,
        calibrated_ci95=(None, None),
        accuracy_value=None,
        dcs=None,
        n=0,
        note="3 cells gave no number",
    )
    gates = [
        Gate(gate="max-leak mc", limit=0.7, worst=0.756, at="fedsplitnn iso:1", holds=False),
        Gate(gate="min-utility", limit=0.7, worst=None, at="", holds=None),
    ]
    return Summary(
        dataset="credit-default",
        adversary="passive_1",
        metric="auc",
        seeds=5,
        points=points,
        worst=worst,
        cap=[cap],
        c_dcs=[],
        gates=gates,
        notes=[],
        out="run",
    )


def test_a_guess_of_one_class_stands_in_the_status():
    one = point(1.0, 0.8, 0.7, statuses={"ok": 4, "diverged": 1})
    blind = msgspec.structs.replace(one, leak=msgspec.structs.replace(one.leak, single_class=2))
    assert formats.write_status(blind) == "1/5 diverged, 2/5 guess one class"


def damage(strength, lost, success=None, **changed):
    def measure(mean, metric="auc"):
        ends = (None, None) if mean is None else (mean - 0.01, mean + 0.01)
        return Measure(metric=metric, mean=mean, ci95=ends, n=0 if mean is None else 5)

    whole = {"method": "fedsplitnn", "defense": "iso", "strength": strength, "attack": "backdoor", **changed}
    return Damage(
        **{"status": "ok", "statuses": {"ok": 5}, **whole},
        utility=measure(0.776),
        under_attack=measure(None if lost is None else 0.776 - lost),
        lost=measure(lost),
        success=measure(success, "share"),
        chance=None if success is None else 0.11,
    )


@pytest.fixture
def broken(summary):
    """An evaluation of attacks on integrity alone."""
    found = [
        damage(0.0, 0.003, 0.98),
        damage(1.0, -0.002, attack="missing-feature"),
        damage(25.0, None, statuses={"ok": 2, "diverged": 3}),
    ]
    return msgspec.structs.replace(summary, points=[], worst=[], cap=[], gates=[], integrity=found)


INTEGRITY = """\
Integrity: what a malicious party can break

 method      defense   λ  attack            utility ↑  under attack ↑       lost ↓   success ↓  chance  status
 ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────
 fedsplitnn      iso   0  backdoor         .776 ±.010      .773 ±.010   .003 ±.010  .980 ±.010    .110  ran
 fedsplitnn      iso   1  missing-feature  .776 ±.010      .778 ±.010  -.002 ±.010           –       –  ran
 fedsplitnn      iso  25  backdoor         .776 ±.010               –            –           –       –  3/5 diverged
"""


def test_what_is_broken_has_a_table_of_its_own(summary, broken):
    text = Report(broken, specs.EvalSpec()).table(width=120, details=True)
    expected = [line.rstrip(" ─") for line in INTEGRITY.splitlines()]
    assert [line.rstrip(" ─") for line in text.splitlines()[1 : 1 + len(expected)]] == expected
    both = msgspec.structs.replace(summary, integrity=broken.integrity)
    assert [cells.title for cells in table.show(both, details=True).tables] == [
        "fedsplitnn, iso", "CAP over the defended strengths", "Integrity: what a malicious party can break",
    ]  # fmt: skip
    assert "| fedsplitnn | iso | 0 | backdoor | .776 ±.010 |" in table.show(broken, details=True).markdown()


def test_csv_has_a_line_for_each_damage_in_the_same_columns(summary, broken):
    both = msgspec.structs.replace(summary, integrity=broken.integrity)
    lines = list(csv.DictReader(io.StringIO(columns.as_csv(both))))
    assert [line["target"] for line in lines] == ["labels"] * 6 + ["integrity"] * 3
    first = lines[6]
    assert (first["attack"], first["leak"], first["utility"]) == ("backdoor", "", "0.776")
    assert (first["lost"], first["lost_low"], first["success"], first["chance"]) == ("0.003", "-0.007", "0.98", "0.11")
    assert (lines[8]["lost"], lines[8]["seeds"], lines[0]["lost"]) == ("", "0", "")


def test_json_has_damages_beside_the_agreed_keys(broken):
    report = Report(broken, specs.EvalSpec())
    found = json.loads(report.to_json())
    assert (found["schema"], found["points"], found["cap"]) == (1, [], [])
    assert [d["attack"] for d in found["integrity"]] == ["backdoor", "missing-feature", "backdoor"]
    assert found["integrity"][0]["success"]["ci95"] == [0.97, 0.99]
    assert report.integrity == broken.integrity


def test_a_curve_without_a_leak_says_so(broken, tmp_path):
    figure = curve.draw(broken)
    assert not figure.axes
    assert [text.get_text() for text in figure.texts] == [
        "nothing is inferred: attacks on integrity have a table of their own"
    ]
    assert all(path.exists() for path in curve.save(curve.draw(broken), tmp_path))


TABLE = """\
credit-default · adversary passive_1 · utility: AUC on test rows · 5 seeds, ± 95 % over seeds and rows
fedsplitnn, iso

 λ   attack      utility ↑      leak ↓  rows    other rows  alone  chance  advantage  budget   MB  status
 ────────────────────────────────────────────────────────────────────────────────────────────────────────────
 0   worst: mc  .776 ±.000  .746 ±.010  test  .746 (train)   .676    .500      +.070  –       6.7  ran
 0   mc         .776 ±.000  .746 ±.010  test  .746 (train)   .676    .500      +.070  –       6.7  ran
 1   worst: mc  .771 ±.000  .670 ±.010  test  .670 (train)   .676    .500      -.006  –       6.7  ran
 1   mc         .771 ±.000  .670 ±.010  test  .670 (train)   .676    .500      -.006  –       6.7  ran
 25  worst: mc           –           –     –             –   .676    .500          –  –         –  3/5
                                                                                                   diverged
 25  mc                  –           –     –             –   .676    .500          –  –         –  3/5
                                                                                                   diverged
"""


def test_table_is_readable_at_110_columns(summary):
    lines = [
        line.rstrip()
        for line in Report(summary, build_manifest(specs.EvalSpec())).table(width=110, details=True).splitlines()
    ]
    assert max(map(len, lines)) <= 110
    assert not any("…" in line for line in lines)
    expected = [line.rstrip("─") for line in TABLE.splitlines()]
    assert [line.rstrip("─") for line in lines[: len(expected)]] == expected
    gates = re.findall("^GATE .*?: [A-Z]+", "\n".join(lines), re.MULTILINE)
    assert gates == ["GATE max-leak mc 0.7: FAILED", "GATE min-utility 0.7: UNDECIDED"]


def test_the_way_to_a_target_is_three_columns(summary):
    reached = {"epochs": 3.0, "paper_bytes": 2.0**21, "true_bytes": 5e6}
    points = [msgspec.structs.replace(summary.points[0], reached=reached), summary.points[1]]
    (cells,) = table.list_points(msgspec.structs.replace(summary, points=points, worst=[], target=0.7))
    assert list(cells.header[-4:]) == ["epochs to target", "MB to target", "as SS-VFL counts", "status"]
    assert [row[-4:-1] for row in cells.rows] == [["3.0", "5.0", "2.0"], ["–", "–", "–"]]
    assert len({len(cells.header), *map(len, cells.rows)}) == 1


def test_the_strongest_attack_comes_first(summary):
    strong = [msgspec.structs.replace(p, attack="norm") for p in (point(0.0, 0.776, 0.9), point(1.0, 0.771, 0.6))]
    both = msgspec.structs.replace(summary, points=[*summary.points[:2], *strong], worst=summary.worst[:2])
    (cells,) = table.list_points(both)
    assert [row[:2] for row in cells.rows] == [
        ["0", "worst: mc"], ["0", "norm"], ["0", "mc"], ["1", "worst: mc"], ["1", "mc"], ["1", "norm"],
    ]  # fmt: skip


def test_what_the_adversary_would_have_picked_is_a_row_where_it_is_another(summary):
    points = [point(0.0, 0.776, 0.746), point(0.0, 0.776, 0.7, attack="norm")]
    worst = worst_of(points[:1])
    for choice, rows in (("norm", ["worst: mc", "adversary's pick: norm", "mc", "norm"]),
                         ("mc", ["worst: mc", "mc", "norm"])):  # fmt: skip
        picked = [msgspec.structs.replace(p, attack="picked") for p in worst_of(points[1:], choice)]
        (cells,) = table.list_points(msgspec.structs.replace(summary, points=points, worst=worst, picked=picked))
        assert [row[1] for row in cells.rows] == rows
        found = msgspec.structs.replace(summary, points=points, worst=worst, picked=picked)
        assert [p["choice"] for p in Report(found, specs.EvalSpec()).to_dict()["picked"]] == [choice]


@pytest.mark.parametrize(("high", "said"), [(0.499, "ran, below chance"), (0.501, "ran"), (None, "ran")])
def test_a_leak_below_chance_is_marked_where_the_whole_interval_is(high, said):
    one = point(1.0, 0.77, 0.45)
    low = msgspec.structs.replace(one.leak, ci95=(None if high is None else 0.4, high))
    assert formats.write_status(msgspec.structs.replace(one, leak=low)) == said.removeprefix("ran, ")
    lost = msgspec.structs.replace(one, leak=low, statuses={"ok": 3, "unconverged": 2})
    assert formats.write_status(lost) == said.replace("ran", "2/5 unconverged")


def test_how_sure_a_sign_is_stands_with_the_budget(summary):
    signed = msgspec.structs.replace(summary.points[0], budget={"releases": 4200}, sureness=0.973)
    (cells,) = table.list_points(msgspec.structs.replace(summary, points=[signed], worst=[]))
    assert cells.rows[0][cells.header.index("budget")] == "4.2k releases, sign 97 %"


def test_the_footer_counts_attacks_that_were_not_run(summary):
    assert not any("NOT RUN" in line for line in table.list_remarks(summary))
    told = msgspec.structs.replace(summary, not_run=["averaging", "norm"])
    line = "NOT RUN 2 attacks that passive_1 could mount: averaging, norm; add --attack all or name them"
    assert table.list_remarks(told)[-1] == line
    others = [msgspec.structs.replace(p, method="another") for p in told.points]
    two = table.list_remarks(msgspec.structs.replace(told, points=[*told.points, *others]))[-1]
    assert two.startswith(f"{line}, with one --method")


def test_each_curve_has_its_own_table(summary):
    other = [msgspec.structs.replace(p, method="other") for p in summary.points]
    worst = [msgspec.structs.replace(p, attack="worst") for p in other]
    both = msgspec.structs.replace(summary, points=summary.points + other, worst=summary.worst + worst)
    assert [cells.title for cells in table.list_points(both)] == ["fedsplitnn, iso", "other, iso"]
    assert {len(cells.rows) for cells in table.list_points(both)} == {6}


def test_a_long_attack_name_wraps_and_takes_no_number_away(summary):
    named = [msgspec.structs.replace(p, attack="AnAttackWithAVeryLongName:k=15,mode=mixmatch") for p in summary.points]
    lines = (
        Report(msgspec.structs.replace(summary, points=named), specs.EvalSpec())
        .table(width=110, details=True)
        .splitlines()
    )
    assert max(map(len, lines)) <= 110
    assert not any("…" in line for line in lines)
    assert sum(".746 ±.010" in line for line in lines) == 2


def test_error_bars_end_where_the_interval_does(summary):
    leak = msgspec.structs.replace(summary.points[0].leak, mean=0.98, ci95=(0.90, 1.0))
    points = [msgspec.structs.replace(summary.points[0], leak=leak)]
    (line,) = curve.list_lines(points)
    (below,), (above,) = curve.get_margins([p.leak for p in line.points])
    assert (below, above) == pytest.approx((0.08, 0.02))
    assert formats.with_margin(leak) == ".980 (.900 to 1.000)", "±.080 would be more than can be"


def test_a_point_with_lost_seeds_says_how_many_are_left(summary):
    leak = msgspec.structs.replace(summary.points[1].leak, n=3)
    points = [msgspec.structs.replace(summary.points[1], leak=leak, statuses={"ok": 3, "diverged": 2})]
    (line,) = curve.list_lines(points)
    assert (list(line.strengths), list(line.seeds)) == ([1], ["3/5"])
    (text,) = curve.draw(with_points(summary, points)).axes[0].texts
    assert text.get_text() == "λ=1 (3/5)"


def test_notes_are_on_the_table_and_on_the_curve(summary):
    noted = msgspec.structs.replace(summary, notes=["chosen on TEST rows"])
    assert "NOTE chosen on TEST rows" in Report(noted, specs.EvalSpec()).table()
    assert "NOTE chosen on TEST rows" in table.show(noted).markdown()
    assert "chosen on TEST rows" in [text.get_text() for text in curve.draw(noted).axes[0].texts]


def test_notes_stand_above_the_diagram_where_no_error_bar_runs(summary):
    """However long they are, between the title and the diagram."""
    figure = curve.draw(msgspec.structs.replace(summary, notes=["chosen on TEST rows " * 9, "few rows"]))
    (axes,) = figure.axes
    renderer = FigureCanvasAgg(figure).get_renderer()
    (notes,) = [text for text in axes.texts if "few rows" in text.get_text()]
    box, title = notes.get_window_extent(renderer), axes._left_title.get_window_extent(renderer)
    assert axes.get_window_extent(renderer).y1 < box.y0 < box.y1 < title.y0 < title.y1 < figure.bbox.y1


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.746, ".746"), (1.0, "1.000"), (-0.0302, "-.030"), (-0.0004, ".000"), (None, "–"), (10.5, "10.500")],
)
def test_numbers(value, text):
    assert formats.write_number(value) == text


@pytest.mark.parametrize(("value", "text"), [(-0.0004, ".000"), (0.0, "+.000"), (-0.0006, "-.001"), (0.02, "+.020")])
def test_no_difference_has_a_minus(value, text):
    assert formats.format_signed(value) == text


def test_csv_has_full_precision_and_one_line_per_point(summary):
    lines = list(csv.DictReader(io.StringIO(columns.as_csv(summary))))
    assert len(lines) == 6
    assert float(lines[0]["leak"]) == 0.746
    assert lines[2]["leak"] == ""
    assert lines[2]["status"] == "diverged"


def test_a_frame_has_the_lines_of_the_csv_to_the_last_digit(summary):
    leak = msgspec.structs.replace(summary.points[0].leak, mean=0.1 + 0.2, accuracy=None)
    first = msgspec.structs.replace(summary.points[0], leak=leak, defense="none")
    changed = msgspec.structs.replace(summary, points=[first, *summary.points[1:]])
    frame = Report(changed, build_manifest(specs.EvalSpec())).to_frame()
    assert list(frame.columns) == ["dataset", *NAMES]
    assert set(frame["dataset"]) == {"credit-default"}
    assert len(frame) == 6
    assert frame["leak"][0] == 0.1 + 0.2
    assert frame["defense"][0] == "none"
    assert math.isnan(frame["leak"][2])
    assert math.isnan(frame["recovery_accuracy"][0])
    texts = [column.name for column in columns.select_file_columns() if column.kind != "number"]
    numbers = frame.drop(columns=["dataset", *texts]).dtypes
    assert {str(kind) for kind in numbers} == {"float64", "int64"}, "a column of missing numbers is one of numbers"


def test_frames_of_two_reports_are_joined(summary, broken):
    reports = [Report(one, build_manifest(specs.EvalSpec())) for one in (summary, broken)]
    joined = pd.concat([report.to_frame() for report in reports], ignore_index=True)
    assert list(joined["lost"].dropna()) == [0.003, -0.002]
    assert joined.groupby("attack")["leak"].max()["mc"] == 0.746


def test_latex_has_a_table_for_each_with_its_signs_escaped(summary):
    one = with_points(summary, [msgspec.structs.replace(summary.points[0], attack="a_b: 5%", defense="mc@{x}\\")])
    summed = msgspec.structs.replace(one, cap=[], notes=["two\nlines"])
    text = Report(summed, build_manifest(specs.EvalSpec())).to_latex(details=True)
    assert text.splitlines() == [
        "% credit-default · adversary passive_1 · utility: AUC on test rows · 5 seeds, ± 95 % over seeds and rows",
        "% NOTE two lines",
        "",
        r"\begin{table}",
        r"\caption{fedsplitnn, mc@\{x\}\textbackslash{}}",
        r"\begin{tabular}{llrrlrrrrlrl}",
        r"\toprule",
        r"$\lambda$ & attack & utility $\uparrow$ & leak $\downarrow$ & rows & other rows & alone & chance & "
        r"advantage & budget & MB & status \\",
        r"\midrule",
        *(
            rf"0 & {name} & .776 $\pm$.000 & .746 $\pm$.010 & test & .746 (train) & .676 & .500 & $+.070$ & -- & 6.7 & "
            r"ran \\"
            for name in (r"worst: a\_b: 5\%", r"a\_b: 5\%")
        ),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
        "",
        f"% WORST {columns.CHOSEN}",
        "% GATE max-leak mc 0.7: FAILED, upper end of the interval 0.756 at fedsplitnn iso:1",
        "% GATE min-utility 0.7: UNDECIDED: a cell gave no number",
    ]


@pytest.mark.long
def test_several_reports_stand_side_by_side_with_one_legend(summary):
    other = msgspec.structs.replace(summary, dataset="digits")
    several = msgspec.structs.replace(
        summary, worst=[*summary.worst, *(msgspec.structs.replace(p, defense="max-norm") for p in summary.worst)]
    )
    one, two, three = (Report(s, build_manifest(specs.EvalSpec())) for s in (summary, other, several))
    first, second = plot([one, two]).axes
    assert [axes.get_title(loc="left").partition(":")[0] for axes in (first, second)] == ["credit-default", "digits"]
    assert first.get_legend() is None
    assert second.get_legend() is not None
    assert all(axes.get_legend() is not None for axes in plot([one, three]).axes), "they say different things"
    renamed = with_points(summary, [msgspec.structs.replace(p, defense="max-norm") for p in summary.points])
    other = Report(renamed, build_manifest(specs.EvalSpec()))
    assert all(axes.get_legend() is not None for axes in plot([one, other]).axes), "a color has two meanings"
    assert plot(one)._repr_png_() == one.plot()._repr_png_()


@pytest.mark.parametrize(("given", "message"), [([], "least one report to plot"), (["runs/a"], "got str: read a")])
def test_what_is_no_report_is_not_drawn(given, message):
    with pytest.raises(UsageError, match=message):
        plot(given)


def test_markdown_rows_are_complete(summary):
    lines = [line for line in table.show(summary, details=True).markdown().splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines[:8]} == {13}


def test_json_keeps_its_contract(summary):
    found = json.loads(Report(summary, build_manifest(specs.EvalSpec())).to_json())
    assert {"schema", "dataset", "adversary", "points", "cap", "gates", "out"} <= set(found)
    one = found["points"][0]
    assert {"method", "defense", "strength", "attack", "status", "utility", "leak", "nbytes", "seconds"} <= set(one)
    assert {"metric", "mean", "ci95", "n"} <= set(one["utility"])
    assert {"metric", "mean", "ci95", "n", "chance", "alone", "advantage"} <= set(one["leak"])
    assert {"method", "defense", "attack", "value", "ci95", "calibrated"} <= set(found["cap"][0])
    assert found["schema"] == 1


def test_json_has_no_nan(summary):
    nan = msgspec.structs.replace(summary.points[0].utility, mean=math.nan)
    points = [msgspec.structs.replace(summary.points[0], utility=nan)]
    text = Report(msgspec.structs.replace(summary, points=points), specs.EvalSpec()).to_json()
    assert "NaN" not in text


def test_lines_leave_out_what_has_no_number(summary):
    (line,) = curve.list_lines(summary.points)
    assert (line.label, list(line.strengths), list(line.seeds)) == ("fedsplitnn, iso", [0, 1], ["", ""])
    for lengths in curve.get_margins([p.leak for p in line.points]):
        assert lengths == pytest.approx([0.01, 0.01])


def test_curve_shows_strengths_baselines_and_axes(summary):
    axes = curve.draw(summary).axes[0]
    assert [text.get_text() for text in axes.texts] == ["no defense", "λ=1"]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert sorted(legend) == ["adversary alone ± 95 %", "chance", "fedsplitnn, iso"]
    styles = {line.get_label(): line.get_linestyle() for line in axes.lines}
    assert (styles["adversary alone ± 95 %"], styles["chance"]) == ("--", ":")
    assert "utility" in axes.get_xlabel()
    assert "leak" in axes.get_ylabel()


def test_several_curves_have_their_strengths_beside_their_points_and_names_beside_the_diagram(summary):
    others = [msgspec.structs.replace(p, method="another") for p in summary.points]
    lost = msgspec.structs.replace(others[1].leak, n=3)
    others[1] = msgspec.structs.replace(others[1], leak=lost, statuses={"ok": 3, "diverged": 2})
    axes = curve.draw(with_points(summary, [*summary.points, *others])).axes[0]
    assert [text.get_text() for text in axes.texts] == ["no defense", "1", "1 (3/5)"]
    legend = axes.get_legend()
    assert legend.get_title().get_text() == "number: strength λ"
    assert {text.get_text() for text in legend.get_texts()} >= {"fedsplitnn, iso", "another, iso"}
    axes.figure.canvas.draw()
    assert legend.get_window_extent().x0 > axes.get_window_extent().x1


def test_of_more_curves_than_have_room_for_numbers_the_front_alone_is_named(summary):
    others = [msgspec.structs.replace(p, defense=f"d{i}") for i in range(7) for p in summary.points]
    front = [
        Place(target="labels", method="fedsplitnn", defense="d3", strength=s, utility=u, leak=u, by_seed={})
        for s, u in ((0.0, 0.776), (1.0, 0.771))
    ]
    ranks = [Rank(target="labels", method="fedsplitnn", defense=f"d{i}", values={}, ranks={}) for i in range(7)]
    axes = curve.draw(msgspec.structs.replace(with_points(summary, others), front=front, ranks=ranks)).axes[0]
    assert sorted(text.get_text() for text in axes.texts) == ["d3 1", "no defense"]


def test_curves_of_one_method_are_named_by_their_defenses(summary):
    others = [msgspec.structs.replace(p, defense="max-norm") for p in summary.points]
    assert [line.label for line in curve.list_lines([*summary.points, *others])] == ["iso", "max-norm"]
    attacks = [msgspec.structs.replace(p, attack="norm") for p in others]
    assert [line.label for line in curve.list_lines([*others, *attacks])] == [
        "fedsplitnn, max-norm, mc",
        "fedsplitnn, max-norm, norm",
    ]


@pytest.mark.parametrize(
    ("defenses", "labels"),
    [
        (["iso", "/home/me/noise.py:Mine:bits=3@gradient"], ["iso", "Mine:bits=3@gradient"]),
        (["a/noise.py:Mine", "b/noise.py:Mine"], ["a/noise.py:Mine", "b/noise.py:Mine"]),
    ],
)
def test_curves_of_files_are_named_by_their_classes_unless_these_are_equal(summary, defenses, labels):
    points = [msgspec.structs.replace(p, defense=name) for name in defenses for p in summary.points]
    assert [line.label for line in curve.list_lines(points)] == labels
    assert [line.label for line in curve.list_headlines(worst_of(points))] == labels


def test_the_headline_is_drawn_and_named_where_it_is_not_the_only_attack(summary):
    points = [point(0.0, 0.78, 0.9), point(1.0, 0.77, 0.6)]
    worst = [*worst_of(points[:1]), *worst_of([point(1.0, 0.77, 0.676)], "alone")]
    (line,) = curve.list_headlines(worst)
    assert (line.leak, line.attacks) == ([0.9, 0.676], ["mc", "alone"])
    axes = curve.draw(msgspec.structs.replace(summary, points=points, worst=worst)).axes[0]
    assert [text.get_text() for text in axes.texts] == ["no defense", "λ=1 alone"]


def test_the_front_is_told_in_words(summary):
    def place(defense, strength, utility, leak):
        return Place(
            target="labels", method="fedsplitnn", defense=defense, strength=strength, utility=utility, leak=leak,
            by_seed={},
        )  # fmt: skip

    both = [Rank(target="labels", method="fedsplitnn", defense=d, values={}, ranks={}) for d in ("iso", "marvell")]
    front = [place("iso", 0.0, 0.776, 1.0), place("marvell", 0.0, 0.776, 1.0), place("marvell", 16.0, 0.763, 0.708)]
    told = msgspec.structs.replace(summary, front=front, ranks=both)
    line = "PARETO FRONT (utility, strongest leak): no defense (.776, 1.000); marvell 16 (.763, .708)"
    assert line in table.list_remarks(told)
    assert not any("PARETO" in one for one in table.list_remarks(summary))  # of a single defense there is none


def test_a_curve_of_nothing_can_be_drawn(summary):
    points = [summary.points[2]]
    axes = curve.draw(msgspec.structs.replace(summary, points=points, worst=[])).axes[0]
    assert not axes.texts


def test_the_same_summary_gives_the_same_bytes(summary, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        curve.save(curve.draw(summary), tmp_path / name)
    for file in ("curve.svg", "curve.png"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_figure_does_not_obey_the_users_matplotlibrc(summary):
    report = Report(summary, build_manifest(specs.EvalSpec()))
    plain = report.plot()._repr_png_()
    with rc_context({"axes.facecolor": "black", "font.size": 30.0, "savefig.facecolor": "red", "text.usetex": True}):
        figure = report.plot()
        assert figure._repr_png_() == plain
    assert figure.axes[0].get_facecolor() == (1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("targets", "defenses", "omitted"),
    [(300, 1, "294 targets of 300"), (1, 300, "276 curves of 300"), (curve.MAX_TARGETS, curve.MAX_CURVES, None)],
)
def test_a_picture_has_no_more_than_can_be_read(summary, targets, defenses, omitted):
    names = ["labels", *(f"attribute c{i}" for i in range(1, targets))]
    points = [
        msgspec.structs.replace(p, target=name, defense=f"d{i}")
        for name in names for i in range(defenses) for p in summary.points
    ]  # fmt: skip
    figure = curve.draw(with_points(summary, points))
    (legend,) = ([t.get_text() for t in shown.get_texts()] for axes in figure.axes if (shown := axes.get_legend()))
    assert len(figure.axes) == min(targets, curve.MAX_TARGETS)
    assert len([text for text in legend if "d" in text and "adversary" not in text]) == min(defenses, curve.MAX_CURVES)
    notes = [text.get_text() for text in figure.axes[0].texts if "not drawn" in text.get_text()]
    assert notes == ([f"{omitted} are not drawn: see the table"] if omitted else [])


def test_a_folder_without_results(tmp_path):
    with pytest.raises(StoreError, match=r"found no manifest\.json.*vflsec eval"):
        Report.read(tmp_path)


def test_report_shows_itself(summary):
    report = Report(summary, build_manifest(specs.EvalSpec()))
    assert "iso" in repr(report)
    assert "fedsplitnn, iso" in report.table(details=True)
    assert (report.points, report.worst, report.cap) == (summary.points, summary.worst, summary.cap)


def test_a_notebook_shows_verdict_and_tables(summary):
    said = msgspec.structs.replace(summary, verdict=["It leaks <all>."], notes=["few rows"], not_run=["norm"])
    said = msgspec.structs.replace(said, cap=[msgspec.structs.replace(said.cap[0], attack="worst")])
    shown = Report(said, build_manifest(specs.EvalSpec()))._repr_html_()
    assert "<p><b>It leaks &lt;all&gt;.</b></p>" in shown
    assert (
        shown.index("It leaks")
        < shown.index("NOTE few rows")
        < shown.index("<table>")
        < shown.index("NOT RUN 1 attack")
    )
    assert shown.count("<table>") == 2
    assert shown.count("It leaks") == 1
    assert "<h4>CAP over the defended strengths</h4>" in shown
    assert '<td data-name="leak ↓"><span class=whole>.746 ±.010</span></td>' in shown


def test_of_many_attacks_the_strongest_is_drawn_at_each_strength(summary):
    def many(strength, utility, leaks):
        named = enumerate(leaks)
        return [msgspec.structs.replace(point(strength, utility, leak), attack=f"a{i}") for i, leak in named]

    points = many(0.0, 0.78, [0.5, 0.9]) + many(1.0, 0.77, [0.5, 0.6])
    worst = worst_of([points[1]]) + worst_of([points[3]], "a0, a1")
    (line,) = curve.list_headlines(worst)
    assert (line.leak, line.attacks, line.strengths) == ([0.9, 0.6], ["a1", "a0, a1"], [0.0, 1.0])
    figure = curve.draw(msgspec.structs.replace(summary, points=points, worst=worst))
    (axes,) = figure.axes
    assert {text.get_text() for text in axes.texts} >= {"no defense a1", "λ=1 a0, a1"}
    assert "each attack" in [text.get_text() for text in axes.get_legend().get_texts()]
    figure.canvas.draw()
    assert not any(text.arrow_patch for text in axes.texts), "the picture of all attacks names them, without leaders"
    assert axes.get_legend().get_window_extent().y1 < axes.get_window_extent().y0, "no curve runs below the diagram"


@pytest.mark.parametrize("shift", [0.0, 0.002, 0.02])
@pytest.mark.parametrize("defenses", [1, 3, 6])
def test_no_label_covers_another_or_leaves_the_diagram(summary, defenses, shift):
    """Curves lie on each other, or almost; what has no room is left out, and is in the table."""
    points = [
        msgspec.structs.replace(point(strength, 0.78 - shift * k, 0.9 - shift * strength), defense=f"d{k}")
        for k in range(defenses)
        for strength in (0.0, 1.0, 2.0)
    ]
    figure = curve.draw(with_points(summary, points))
    figure.canvas.draw()
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts if text.get_visible()]
    assert len(boxes) >= 2
    assert not [1 for k, box in enumerate(boxes) for other in boxes[:k] if box.overlaps(other)]
    inside = axes.get_window_extent().padded(1)
    assert all(inside.contains(*corner) for box in boxes for corner in box.get_points())


def test_leaks_on_training_rows_are_open_points(summary):
    def on(rows, one):
        return msgspec.structs.replace(one, leak=msgspec.structs.replace(one.leak, rows=rows))

    points = [on("train", point(0.0, 0.78, 0.9)), on("test", point(1.0, 0.77, 0.6))]
    (axes,) = curve.draw(with_points(summary, points)).axes
    faces = {
        tuple(line.get_xydata()[0]): line.get_markerfacecolor() for line in axes.lines if len(line.get_xydata()) == 1
    }
    assert faces == {(0.78, 0.9): "white"}
    assert "open: on training rows only" in [text.get_text() for text in axes.get_legend().get_texts()]


def test_several_targets_are_drawn_two_in_a_row_under_their_names(summary):
    points = [
        msgspec.structs.replace(p, target=target)
        for target in ("labels", "features", "membership")
        for p in summary.points
    ]
    figure = curve.draw(with_points(summary, points))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["labels", "features", "membership"]
    assert figure.get_suptitle() == "credit-default: what passive_1 infers"
    places = [axes.get_subplotspec() for axes in figure.axes]
    assert [(place.rowspan.start, place.colspan.start) for place in places] == [(0, 0), (0, 1), (1, 0)]


def test_an_axis_does_not_blow_up_noise(summary):
    points = [point(0.0, 0.78, 0.501), point(1.0, 0.77, 0.499)]
    still = [msgspec.structs.replace(p, leak=msgspec.structs.replace(p.leak, alone=0.5, chance=0.5)) for p in points]
    (axes,) = curve.draw(with_points(summary, still)).axes
    low, high = axes.get_ylim()
    assert high - low >= curve.NARROW


@pytest.mark.parametrize("width", [80, 100])
def test_a_narrow_terminal_has_whole_words_and_is_told_what_is_left_out(summary, width):
    unconverged = [msgspec.structs.replace(p, statuses={"unconverged": 1, "ok": 1}) for p in summary.points]
    report = Report(msgspec.structs.replace(summary, points=unconverged), build_manifest(specs.EvalSpec()))
    both = [msgspec.structs.replace(p, leak=msgspec.structs.replace(p.leak, rows="test+train")) for p in unconverged]
    narrow = Report(msgspec.structs.replace(summary, points=both), build_manifest(specs.EvalSpec())).table(
        width, details=True
    )
    for word in ("unconverged", "advantage", "test+", "train"):
        assert word in narrow
    spent = [{"defense": "gaussian-dp", "epsilon": 1234567.0, "delta": 1e-5}]
    private = [msgspec.structs.replace(p, spent=spent) for p in both]
    shown = Report(msgspec.structs.replace(summary, points=private), build_manifest(specs.EvalSpec())).table(
        width, details=True
    )
    for word in ("unconverged", "advantage"):  # an epsilon takes the room of the rows
        assert word in shown
    assert max(map(len, shown.splitlines())) <= width
    lines = report.table(width, details=True).splitlines()
    assert any("CAP ↑" in line for line in lines)
    assert max(map(len, lines)) <= width
    assert not any("budget" in line for line in lines if " attack " in line)
    for word in ("worst:", "unconverged", "advantage", "NOT SHOWN other rows, chance, budget, MB, CAP (accuracy)"):
        assert any(word in line for line in lines), word
    assert not any("NOT SHOWN" in line for line in report.table(140, details=True).splitlines())


def on_both_rows(one, advantage_on_train):
    """A point with .950 on test rows, .012 below *alone*, and 1.000 on training rows."""
    test = msgspec.structs.replace(one.leak, mean=0.95, alone=0.962, advantage=-0.012, others={"tpr@0.01": 0.2})
    train = msgspec.structs.replace(
        test,
        mean=1.0,
        alone=1.0 - advantage_on_train,
        advantage=advantage_on_train,
        others={"tpr@0.01": 0.9},
        rows="train",
    )
    return msgspec.structs.replace(one, leak=test, leak_train=train)


@pytest.mark.parametrize(("advantage", "rows"), [(0.038, "train"), (-0.02, "test")])
def test_an_attack_that_gains_most_on_training_rows_is_not_told_by_test_rows_alone(summary, advantage, rows):
    first, *others = summary.points
    one = msgspec.structs.replace(summary, points=[on_both_rows(first, advantage), *others])
    for width in (80, 100):
        shown = Report(one, build_manifest(specs.EvalSpec())).table(width, details=True)
        assert max(map(len, shown.splitlines())) <= width
        assert (".950" in shown, "1.000" in shown) == (True, rows == "train")
        hidden = shown[shown.index("NOT SHOWN") :]
        assert ("other rows" in hidden) == (rows == "test")
    (cells,) = table.list_points(one)
    line = dict(zip(cells.header, next(line for line in cells.rows if line[1] == first.attack), strict=True))
    assert (line["leak ↓"][:5].strip(), line["rows"]) == (("1.000", "train") if rows == "train" else (".950", "test"))
    assert line["other rows"] == (".950 (test)" if rows == "train" else "1.000 (train)")
    assert float(line["advantage"]) == (advantage if rows == "train" else -0.012)
    assert columns.list_lines(one)[0][NAMES.index("leak")] == 0.95, "the row is of test rows"


@pytest.mark.parametrize(
    ("mean", "ends", "shown"),
    [
        (0.8, (0.75, 0.84), " ±.050"),
        (1.0, (0.92, 1.0), " (.920 to 1.000)"),
        (0.003, (0.0, 0.02), " (.000 to .020)"),
        (0.04, (0.01, 0.09), " (.010 to .090)"),
        (-0.01, (-0.06, 0.04), " ±.050"),
        (0.97, (0.96, 1.0), " ±.030"),
        (1.0, (1.0, 1.0), " ±.000"),
        (0.5, (None, None), ""),
        (0.02, (-0.28, 0.3), " ±.300"),
    ],
)
def test_an_interval_stays_within_its_range(mean, ends, shown):
    """Both ends where ±, the wider side, would say that a share exceeds 1, or that an advantage may be none."""
    assert formats.spread(mean, ends) == shown


def test_how_much_of_how_many_rows_stands_beside_alone(summary):
    first, *others = summary.points
    known = {"tpr@0.001": 0.05, "tpr@0.01": 0.2, "known_of_class@0.99": 0.031}
    leak = msgspec.structs.replace(
        first.leak, bits=0.042, bits_ci95=(0.03, 0.054), others=known, alone_others={"tpr@0.01": 0.1}
    )
    one = with_points(summary, [msgspec.structs.replace(first, leak=leak), *others])
    cells = table.list_row_shares(one)
    assert cells.rows[-1][-5:] == [".031 (–)", "– (–)", ".042 ±.012", ".050 (–)", ".200 (.100)"]
    assert cells.title in table.show(one, details=True).markdown()
    assert cells.title not in Report(one, build_manifest(specs.EvalSpec())).table(140, details=True), (
        "a terminal has no room"
    )
    assert not table.list_row_shares(summary).rows, "records of an earlier version"
    line = next(csv.DictReader(io.StringIO(columns.as_csv(one))))
    assert [line[name] for name in ("bits", "bits_low", "tpr@0.001", "right@0.99")] == ["0.042", "0.03", "0.05", ""]


@pytest.mark.parametrize("width", [80, 110, 120, 140])
def test_words_are_whole_at_every_width(summary, width):
    long = [
        msgspec.structs.replace(p, budget={"candidates": 1530}, statuses={"unconverged": 5}) for p in summary.points
    ]
    worst = [msgspec.structs.replace(p, choice="alone, label-regression") for p in summary.worst]
    text = Report(msgspec.structs.replace(summary, points=long, worst=worst), None).table(width, details=True)
    assert {"unconverged", "label-regression"} <= set(text.split())
    assert "candidates" in text.split() or "NOT SHOWN" in text
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [80, 120])
def test_a_table_is_never_wider_than_the_terminal_whose_attacks_have_long_names(width):
    row = ["0", "attribute-fusion:column=a0", "1.000 (.920 to 1.000)", "1.000 (.920 to 1.000)", "train", ".755", ".7"]
    header = ["λ", "attack", "utility ↑", "leak ↓", "rows", "other rows", "alone", "advantage", "status"]
    cells = formats.Cells.from_texts("title (leak: AUC, .500 by chance)", header, [[*row, "+.042", "below chance"]])
    shown = formats.as_text(formats.as_rich(cells, width), 500)
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width
    assert {"attribute-fusion:", "column=a0", "below", "chance", "status", ".755"} <= set(shown.split()) or width == 120


def test_rows_stay_in_a_narrow_terminal_and_pipes_hide_nothing(summary, capsys):
    unconverged = [msgspec.structs.replace(p, statuses={"unconverged": 5}) for p in summary.points]
    both = [msgspec.structs.replace(p, leak=msgspec.structs.replace(p.leak, rows="test+train")) for p in unconverged]
    both = [msgspec.structs.replace(p, attack="attribute-fusion:column=a0", budget={"r" * 60: 9}) for p in both]
    report = Report(msgspec.structs.replace(summary, points=both), build_manifest(specs.EvalSpec()))
    narrow = report.table(80, details=True)
    assert "NOT SHOWN" in narrow
    assert "rows" in narrow[: narrow.index("NOT SHOWN")]
    assert "NOT SHOWN" in report.table(140, details=True), "so wide is this table"
    print_to_terminal(report.rich)
    assert "NOT SHOWN" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["attribute", "attribute-fusion"])
def test_the_attack_that_was_mounted_is_named_for_the_other_columns(summary, name):
    one = msgspec.structs.replace(summary.points[0], attack=f"{name}:column=a0", column="a0", victim="bank")
    (line,) = [text for text in table.list_remarks(with_points(summary, [one])) if text.startswith("ONE COLUMN")]
    assert line.endswith(f"run {name}:column=all")
    assert "categorical" not in line


def test_no_name_is_a_link_or_a_mention_in_markdown():
    text = formats.as_markdown_text("https://a.b www.a.b a@b.de @octocat iso@gradient &lt;i&gt; _y_ a_b $z$ ~")
    assert text == (
        r"https\://a.b www\.a.b a@<!-- -->b.de @<!-- -->octocat iso@gradient \&lt;i\&gt; "
        r"\_y\_ a_b \$z\$ \~"
    )


def test_names_are_text_in_markdown_and_minus_signs_are_no_hyphens():
    cells = formats.Cells.from_texts("[a](b) <i>", ["x|y"], [["-.060 to -.010"], ["mc-mixmatch"], ["2024-01"]])
    made = formats.Document(["of `c`"], [cells], [])
    assert made.markdown() == (
        "of \\`c\\`\n\n\\[a](b) \\<i>\n\n| x\\|y |\n| --- |\n| -.060 to -.010 |\n| mc-mixmatch |\n| 2024-01 |\n"
    )
    for expected in ("$-$.060 to $-$.010", "mc-mixmatch", "2024-01"):
        assert expected in made.latex()


def test_the_table_has_a_row_for_each_defense_and_strength_and_none_twice(summary):
    iso = [msgspec.structs.replace(p, choice="fusion") for p in summary.worst]
    marvell = [msgspec.structs.replace(p, defense="marvell") for p in iso]
    several = msgspec.structs.replace(summary, worst=[*iso, *marvell])
    (cells,) = table.list_headlines(several)
    at = {column.title: k for k, column in enumerate(cells.columns)}
    places = [(row[at["defense"]], row[at["λ"]]) for row in cells.rows]
    assert places == [("none", "0"), ("iso", "1"), ("iso", "25"), ("marvell", "1"), ("marvell", "25")]
    assert {row[at["strongest attack"]] for row in cells.rows} == {"fusion"}
    assert "method" not in at
    two = msgspec.structs.replace(several, worst=[*iso, *(msgspec.structs.replace(p, method="fedhssl") for p in iso)])
    (cells,) = table.list_headlines(two)
    assert [row[:2] for row in cells.rows].count(["fedhssl", "none"]) == 1
    assert len(cells.rows) == 6


def test_rows_without_a_defense_stand_once_and_first_in_the_table_of_attacks(summary):
    others = [msgspec.structs.replace(p, defense="marvell") for p in summary.points]
    first, second = table.list_points(with_points(summary, [*summary.points, *others]))
    strengths = [[row[0] for row in cells.rows] for cells in (first, second)]
    assert strengths == [["0", "0", "1", "1", "25", "25"], ["1", "1", "25", "25"]]


def test_a_row_says_whether_more_than_alone_is_shown(summary):
    low = summary.worst[0]
    for ends, detectable, text in (
        ((0.01, 0.1), 0.03, "yes"), ((-0.01, 0.1), 0.031, "not shown (.031)"), ((None, None), None, "not shown"),
        ((-0.6, 0.9), 1 - low.leak.alone, "cannot be shown"), ((0.1, 0.9), 1 - low.leak.alone, "yes"),
    ):  # fmt: skip
        leak = msgspec.structs.replace(low.leak, advantage_ci95=ends, detectable=detectable)
        assert columns.compare_with_alone(msgspec.structs.replace(low, leak=leak)) == text
        if text == "yes":
            for p_holm, corrected in ((0.049, "yes"), (0.051, "yes, before correction")):
                leak = msgspec.structs.replace(leak, p_holm=p_holm)
                assert columns.compare_with_alone(msgspec.structs.replace(low, leak=leak)) == corrected
    nothing = msgspec.structs.replace(low.leak, advantage=None)
    assert columns.compare_with_alone(msgspec.structs.replace(low, leak=nothing)) == "–"


def test_a_gain_that_nothing_could_have_shown_is_not_said_to_have_been_visible(summary):
    leak = msgspec.structs.replace(summary.worst[0].leak, alone=0.6, chance=0.5)
    for detectable, is_blind, few, words in (
        (0.4, True, "rows", "; with so few rows no gain could have been seen"),
        (0.4, True, "seeds", "; with only 5 seeds no gain could have been seen"),
        (0.3, False, "", "a gain of .30 would"),
        (None, False, "", ""),
    ):
        found = msgspec.structs.replace(leak, detectable=detectable, few=few)
        assert found.is_blind is is_blind
        assert words in verdict._state_detectable(found)
        (seen,) = columns.select_columns("detectable")
        at_its_end = msgspec.structs.replace(summary.worst[0], leak=found)
        assert seen.text(at_its_end) == ("none" if is_blind else formats.write_number(detectable))


def test_an_advantage_has_the_interval_of_its_own_difference(summary):
    low = summary.worst[0]
    for advantage, ends, text in (
        (0.05, (0.03, 0.07), "+.050 ±.020"), (0.01, (0.002, 0.05), "+.010 (.002 to .050)"), (0.0, (0.0, 0.0), "+.000"),
        (0.05, (None, None), "+.050"), (None, (None, None), "–"),
    ):  # fmt: skip
        leak = msgspec.structs.replace(low.leak, ci95=(0.1, 0.9), advantage=advantage, advantage_ci95=ends)
        assert columns.write_advantage(msgspec.structs.replace(low, leak=leak)) == text


def test_an_epsilon_has_its_delta_and_is_said_to_be_simulated_above_the_table(summary):
    loss = {"defense": "sealed:batch=9", "epsilon": 2.0, "delta": 1e-5}
    private = msgspec.structs.replace(summary, points=[msgspec.structs.replace(summary.points[0], spent=[loss])])
    line = table.show(private).above[1]
    assert "1e-05" in line
    assert "names the right one in at most 88.1 % at ε = 2" in line, "e^2 / (1 + e^2)"
    private = msgspec.structs.replace(private, points=[*private.points, summary.points[1]])
    assert table.SIMULATED in table.show(private).above
    assert table.SIMULATED not in table.write_epsilon(msgspec.structs.replace(private, audited="x.pt"))
    (cells, *_) = table.list_headlines(msgspec.structs.replace(private, worst=worst_of(private.points)))
    assert (cells.rows[0][cells.header.index("ε")], cells.rows[0][cells.header.index("δ")]) == ("2", "1e-05")
    assert "EPSILON" not in " ".join(table.show(summary).above)
    page = Report(summary, build_manifest(specs.EvalSpec())).to_html()
    assert page.count(table.SIMULATED) == 1, "of noise without an epsilon, too"


def test_an_epsilon_that_permits_nearly_everything_is_called_so(summary):
    """ln 19 = 2.944 permits 95 %, the level of the intervals; what bounds models bounds no row."""
    losses = [
        {"defense": "ppdl", "epsilon": epsilon, "delta": 0.0, **of}
        for epsilon, of in ((2.94, {}), (2.95, {}), (1e9, {}), (9.0, {"of": "models"}))
    ]
    line = table.write_epsilon(
        msgspec.structs.replace(summary, points=[msgspec.structs.replace(summary.points[0], spent=losses)])
    )[0]
    assert (
        "at most 95.0 % at ε = 2.94; an ε of 2.95, 1e+09 permits more than 95 %, and so practically everything" in line
    )
    assert "9," not in line


@pytest.mark.parametrize(("epsilon", "delta", "right"), [(0.0, 0.0, 0.5), (math.log(3), 0.0, 0.75), (0.0, 0.1, 0.55)])
def test_epsilon_bounds_how_often_two_values_are_told_apart(epsilon, delta, right):
    assert bound_accuracy(epsilon, delta) == pytest.approx(right)
    assert bound_accuracy(1e9, 0.0) == 1.0


def test_columns_are_explained_below_the_table_where_they_are_shown(summary):
    text = Report(summary, build_manifest(specs.EvalSpec())).table(120)
    assert "advantage: Leak minus alone," in text
    assert "cost:" in text
    assert "budget" not in text
    assert "Leak minus alone" not in Report(summary, build_manifest(specs.EvalSpec())).table(120, details=True)


def test_a_label_is_nearest_to_its_own_point(summary):
    """Two points side by side: a label beside the first must not stand above the second."""
    near = [point(0.0, 0.7758, 1.0), point(1.0, 0.7717, 0.999), point(5.0, 0.762, 0.853), point(25.0, 0.746, 0.713)]
    points = [
        msgspec.structs.replace(
            one,
            utility=msgspec.structs.replace(one.utility, ci95=(one.utility.mean - 0.0064, one.utility.mean + 0.0064)),
            leak=msgspec.structs.replace(one.leak, ci95=(one.leak.mean - 0.017, min(1.0, one.leak.mean + 0.017))),
        )
        for one in near
    ]
    figure = curve.draw(with_points(summary, points))
    figure.canvas.draw()
    (axes,) = figure.axes
    labels = [text for text in axes.texts if text.get_text()]
    places = axes.transData.transform([label.xy for label in labels])
    assert len(labels) == 4
    for label, place in zip(labels, places, strict=True):
        box = label.get_window_extent()
        gaps = np.linalg.norm(np.clip(places, box.min, box.max) - places, axis=1)
        assert gaps.min() == np.linalg.norm(np.clip(place, box.min, box.max) - place)
