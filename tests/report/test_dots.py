"""The picture of all attacks: each dot is a leak of the table, on the rows where the attack gains most."""

import pytest
from msgspec.structs import replace

from tests.report.test_columns import LEAK, POINT
from vflsec.report.curve import ACROSS, MAX_PANELS, draw_attacks
from vflsec.results.analysis.results import Summary


def summarize(points):
    return Summary(
        dataset="toy", adversary="passive_1", metric="auc", seeds=2, points=points, worst=points, cap=[], c_dcs=[],
        gates=[], notes=[], out="run",
    )  # fmt: skip


def read_dots(figure):
    """The leak that each panel shows, by attack."""
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    return {
        axes.get_title(): {
            names[round(bar.lines[0].get_ydata()[0])]: float(bar.lines[0].get_xdata()[0]) for bar in axes.containers
        }
        for axes in figure.axes
    }


def test_a_dot_is_the_leak_on_the_rows_that_leak_most():
    train = replace(LEAK, mean=0.99, advantage=0.39, rows="train")
    fusion = replace(POINT, attack="fusion", leak_train=train)
    points = [POINT, fusion, replace(POINT, strength=5.0), replace(fusion, strength=5.0, leak_train=LEAK)]
    other = [replace(point, defense="marvell") for point in points]  # its row without a defense is the same
    shown = read_dots(draw_attacks(summarize([*points, *other])))
    assert list(shown) == ["no defense", "iso 5", "marvell 5"]
    assert shown["no defense"] == pytest.approx({"fusion": 0.99, "mc": 0.8})
    assert shown["iso 5"] == pytest.approx({"fusion": 0.8, "mc": 0.8})


def test_a_dot_is_named_without_the_column_of_its_color():
    attack = replace(POINT, attack="attribute-fusion:column=PAY_6", column="PAY_6", target="attribute PAY_6")
    (names,) = read_dots(draw_attacks(summarize([POINT, attack]))).values()
    assert names.keys() == {"mc", "attribute-fusion"}


def test_what_has_no_number_is_not_drawn():
    nothing = replace(LEAK, mean=None, ci95=(None, None), advantage=None)
    assert draw_attacks(summarize([replace(POINT, leak=nothing, leak_train=nothing)])) is None
    many = [replace(POINT, strength=float(k)) for k in range(MAX_PANELS + 3)]
    figure = draw_attacks(summarize(many))
    assert len(read_dots(figure)) == MAX_PANELS
    assert figure.get_supxlabel().count(",") == 2  # names the three that are left out


def test_leaks_of_another_measure_have_panels_of_their_own():
    """Every setting is drawn, in rows of a few; each axis has one measure, and the legend stands once."""
    columns = replace(POINT, attack="imputation", target="features", leak=replace(LEAK, metric="r2", mean=0.2))
    columns = replace(columns, leak_train=columns.leak)
    points = [replace(point, strength=float(k)) for k in range(ACROSS + 2) for point in (POINT, columns)]
    figure = draw_attacks(summarize(points))
    drawn = {}
    for axes in figure.axes:
        for bar in axes.containers:
            drawn.setdefault(float(bar.lines[0].get_xdata()[0]), []).append(axes)
    assert {leak: len(places) for leak, places in drawn.items()} == {0.8: ACROSS + 2, 0.2: ACROSS + 2}
    assert not {*drawn[0.8]} & {*drawn[0.2]}
    assert {axes.get_xlabel() for axes in figure.axes} == {"leak: AUC", "leak: R²", ""}
    assert len(figure.legends) == 1
