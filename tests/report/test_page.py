"""report.html: a verdict that records support, everything in one file, and nothing that runs or is fetched."""

import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from msgspec.structs import replace

from tests.report.test_columns import DAMAGE
from vflsec.base.errors import UsageError
from vflsec.report.comparison import write_plain
from vflsec.report.formats import write_number, write_status
from vflsec.report.page import Part, _write_figure, drop_hints, escape, write_page
from vflsec.report.report import Report, order_roles
from vflsec.report.table import SIMULATED, list_cap_notes, list_headlines, show_roles
from vflsec.results.analysis.results import Gate, Leak, Measure, Point, Summary, name_defense
from vflsec.results.analysis.verdict import state_verdict, suggest_run
from vflsec.results.records.manifest import TOO_DEAR, AttackEntry
from vflsec.run import engine
from vflsec.run import spec as specs
from vflsec.run.describe import build_manifest
from vflsec.run.plan import load_dataset
from vflsec.run.store import Store

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

SEALED = (
    "Labels stay readable, and sealed training, which sends no gradient of a single row, was not tested: add "
    "--defense sealed --epsilon 1,4."
)
VOID = {"meta", "link", "br", "path", "use", "rect", "img"}


def point(leak, *, strength=0.0, utility=0.8, alone=0.7, rows="train", advantage=0.1, target="labels", defense="iso"):
    return Point(
        method="fedsplitnn", defense=defense, strength=strength, attack="worst", status="ok", statuses={"ok": 5},
        utility=Measure(metric="auc", mean=utility, ci95=(0.7, 0.9), n=5),
        leak=Leak(
            metric="auc", mean=leak, ci95=(leak - 0.02, min(1.0, leak + 0.02)), n=5, chance=0.5, alone=alone,
            alone_ci95=(0.6, 0.8), advantage=advantage, advantage_ci95=(advantage - 0.05, advantage + 0.05),
            accuracy=None, rows=rows,
        ),
        leak_train=Leak(
            metric="auc", mean=None, ci95=(None, None), n=0, chance=None, alone=None, alone_ci95=(None, None),
            advantage=None, advantage_ci95=(None, None), accuracy=None,
        ),
        nbytes=1, seconds=1.0, budget={}, choice="mc", target=target,
    )  # fmt: skip


def made_summary(worst=(), adversary="bureau", **fields):
    return Summary(
        dataset="toy", adversary=adversary, metric="auc", seeds=5, worst=list(worst), cap=[], c_dcs=[], gates=[],
        notes=[], out="run", **{"points": [], **fields},
    )  # fmt: skip


def say(worst, adversary, known, run=("mc",), guarantees=None, **fields):
    """The verdict, by default where all attacks that could be mounted were run."""
    return state_verdict(made_summary(worst, adversary, **fields), run, known, guarantees or {})


def test_two_sentences_state_the_leak_and_what_a_defense_leaves():
    worst = [point(1.0), point(0.84, strength=5, utility=0.786), point(0.7, strength=25, utility=0.6)]
    fixed, further, *_ = say(worst, "bureau", 80, undefended="mid")
    assert (fixed, further[:28]) == ("Every training has the defense mid.", "Without a further defense an")
    first, second, third = say(worst, "bureau", 80)
    assert first == (
        "Without a defense and with 80 known labels, bureau infers the labels of training rows: it ranks almost every "
        "pair of them right (AUC 1.00; .70 without joining)."
    )
    assert second == (
        "By the upper end of the interval, the best defense that costs at most two points of utility on average is "
        "iso at strength 5: on training rows it leaves AUC .84 (interval up to .86; 1.00 without it, .70 without "
        "joining), at a cost of 1.4 points of utility."
    )
    assert third == SEALED


def test_no_defense_is_recommended_unless_all_attacks_that_could_be_mounted_were_run():
    worst = [point(1.0), point(0.9, strength=1, utility=0.79), point(0.84, strength=5, utility=0.786)]
    for ran, begins, who in (
        (["mc"], "only 1 of the 3 attacks that it could mount, on this and other targets, was run (mc). ", "mc"),
        (["mc", "norm"], "only 2 of the 4 ", "the strongest of them"),
    ):  # fmt: skip
        _, second = say(worst, "bureau", 80, ran, not_run=["fusion", "cluster"])
        assert second.startswith(f"None of the defenses is recommended: {begins}")
        assert second.endswith(
            f"Under the tested defenses, {who} reaches AUC .84 to .90; the others may infer far more: add --attack all "
            f"to run them."
        )
        assert "best" not in second


def test_no_more_than_alone_is_decided_by_what_the_attacks_reach():
    """Whichever the headline names: an advantage whose interval includes 0 is not shown."""
    strong, weak = point(0.73, strength=5), point(0.712, strength=25, advantage=0.0, utility=0.77)
    for headline in (weak, replace(weak, choice="alone")):
        _, last = say([point(0.8), strong, headline], "bureau", 80, not_run=["fusion"])
        assert "Under iso 5, mc reaches AUC .73. Under iso 25, 5 seeds do not show that mc reaches more than" in last
        assert "(AUC .71, .70 without joining" in last
    unclear = replace(weak, leak=replace(weak.leak, detectable=0.08))
    _, last = say([point(0.8), unclear], "bureau", 80, not_run=["fusion"])
    assert "; a gain of .08 would" in last
    assert "reaches AUC" not in last


@pytest.mark.parametrize(("gain", "shown"), [(0.04, False), (0.06, True)])
def test_an_attack_above_a_headline_of_alone_is_not_passed_over(gain, shown):
    """The interval of the advantage is .05 to both sides."""
    headline = replace(point(0.868, strength=5, alone=0.868, advantage=0.0), choice="alone")
    fusion = replace(point(0.868 + gain, strength=5, alone=0.868, advantage=gain), attack="fusion")
    _, last = say([point(0.95), headline], "net", 10, ["mc", "fusion"], not_run=["norm"], points=[fusion])
    assert ("of them reaches AUC .93" in last) is shown
    assert ("without joining (AUC .91, .87" in last) is not shown


@pytest.mark.parametrize("leak", [0.51, 0.45, 1.0])
def test_what_is_not_told_from_chance_is_not_called_inferred(leak):
    few = point(leak, alone=0.55)
    few = replace(few, leak=replace(few.leak, ci95=(0.2, 1.0)))
    first, _ = say([few], "net", 10)
    assert first.startswith("These runs do not show")
    assert first.endswith(".50 by chance and .55 without joining.")


@pytest.mark.parametrize(
    ("target", "knowing"),
    [("labels", "With 80 known labels, "), ("attribute of bank age", "With the column known for"),
     ("features of bank", "With the columns known for")],
)  # fmt: skip
def test_the_adversary_knows_what_it_infers_for_some_rows(target, knowing):
    assert say([point(0.9, target=target)], "bureau", 80)[0].startswith(knowing)


@pytest.mark.parametrize(
    ("left_out", "audited", "way"),
    [({}, "", "add --attack all"), ({"lira": ""}, "", "add --attack all,lira"), ({}, "x.pt", "leave --attack out")],
)
def test_the_verdict_says_how_to_run_the_others(left_out, audited, way):
    assert suggest_run(made_summary(not_run=["lira", "norm"], left_out=left_out, audited=audited)) == way


def test_no_defense_is_recommended_where_an_attack_gave_no_number():
    lost = replace(point(0.84, strength=5, utility=0.786), statuses={"ok": 4, "error": 1})
    _, second = say([point(1.0), lost], "bureau", 80)
    assert second.startswith("None of the defenses is recommended: some results")


def test_no_defense_is_recommended_under_an_alarm():
    columns = point(0.6, target="features of bank", advantage=0.01)
    empty = replace(columns, target="membership", leak=columns.leak_train)
    worst = [point(1.0), point(0.84, strength=5, utility=0.786), columns, empty]
    first, labels, recovered, rows, last = say(worst, "bureau", 80, alarms=["a sign"])
    assert first == "Not usable for a decision: resolve the notes above first."
    assert "bureau infers the labels" in labels
    assert "these runs do not show whether this is more" in recovered
    assert rows == "No attack on which rows the model was trained on gave a number."
    assert last == "No defense is recommended."
    assert say([point(1.0)], "bureau", 80, alarms=["a sign"])[-1].startswith("With 80 known labels, bureau infers")
    assert say([empty], "bureau", 80, alarms=["a sign"]) == [first]


@pytest.mark.parametrize(
    ("mean", "known", "right", "said"),
    [(0.999, 1.0, 0.999, "practically all training rows ("), (0.999, 0.9, 1.0, "training rows: it ranks almost every"),
     (0.999, 1.0, 0.9, "training rows: it ranks almost every"), (0.98, 0.9, 1.0, "training rows (AUC")],
)  # fmt: skip
def test_only_rows_that_are_known_and_right_are_practically_all(mean, known, right, said):
    """An AUC is about their order."""
    start = point(mean)
    others = {"known@0.99": known, "right@0.99": right}
    first, _ = say([replace(start, leak=replace(start.leak, others=others))], "bureau", 80)
    assert f"infers the labels of {said}" in first
    shares = replace(start, leak=replace(start.leak, metric="accuracy"))
    assert ("practically all" in say([shares], "bureau", 80)[0]) is (mean >= 0.995)


SURE = "t knows 100 % of the rows of a class with a certainty of more than 99 % (90 % without joining)."


def rare(train, test, *, strength=0.0, utility=0.998, alone=(0.975, 0.980), sure=1.0):
    """A headline on both kinds of rows, of which an adversary alone knows almost all there is to know."""
    rows = {}
    for name, leak, own in (("train", train, alone[0]), ("test", test, alone[1])):
        gain = leak - own
        rows[name] = replace(
            point(leak, alone=own, rows=name, advantage=gain).leak,
            ci95=(leak - 0.02, min(1.0, leak + 0.02)),
            advantage_ci95=(gain - 0.005, gain + 0.005) if gain else (0.0, 0.0),
            others={"known_of_class@0.99": sure},
            alone_others={"known_of_class@0.99": 0.903},
        )
    largest = max(rows.values(), key=lambda leak: leak.mean)
    own = point(train, strength=strength, utility=utility)
    return replace(own, leak=largest, leak_train=rows["train"], leak_test=rows["test"])


def test_rows_are_compared_with_the_same_rows_where_the_headline_moves_between_them():
    """On training rows .997 fall to the .975 of *alone*, while the headline falls from .997 to the .98 of test rows."""
    worst = [rare(0.997, 0.981), rare(0.975, 0.980, strength=5, utility=0.989, sure=0.903)]
    assert [p.leak.rows for p in worst] == ["train", "test"]
    first, test, second = say(worst, "bureau", 80)
    assert first.endswith(f" I{SURE}")
    assert (
        "rows that the model was not trained on, the strongest attack reaches AUC .98 without a defense (.98 " in test
    )
    assert "Its row in the table, .980, is on rows that the model was not trained on." in second
    assert re.search(r"leaves AUC \.97 .* \.99; 1\.00 .*, \.97 .* 0\.9 points", second)
    assert " 90 % of the rows of a class are known by any measured attack (100 % without it)." in second


@pytest.mark.parametrize("gain", [0.003, -0.003])
def test_rows_that_are_known_for_certain_are_told_whatever_the_auc_shows(gain):
    """The interval of the advantage includes 0, and joining tells all rows of a class where few were told."""
    first, *_ = say([rare(0.975 + gain, 0.970)], "bureau", 80)
    assert "do not show whether" in first or "no better than without joining" in first
    assert "AUC" in first
    assert first.endswith(f"but i{SURE}")
    alike, *_ = say([rare(0.975 + gain, 0.970, sure=0.903)], "bureau", 80)
    assert "but" not in alike


def test_a_defense_that_moves_the_leak_to_other_rows_lowers_nothing():
    """Training rows fall to *alone*, and test rows now give as much away."""
    worst = [rare(0.997, 0.981), rare(0.975, 1.0, strength=5, utility=0.989)]
    assert say(worst, "bureau", 80)[-1].startswith("No tested defense")


def test_all_that_joining_gave_away_is_gone_though_the_interval_of_alone_is_wide():
    gone = rare(0.975, 0.980, strength=5)
    wide = replace(gone, leak_train=replace(gone.leak_train, ci95=(0.95, 0.998)))
    assert "is iso at strength 5" in say([rare(0.997, 0.981), wide], "bureau", 80)[2]
    still = replace(wide, leak_train=replace(wide.leak_train, advantage=0.003, advantage_ci95=(0.001, 0.005)))
    assert say([rare(0.997, 0.981), still], "bureau", 80)[-1].startswith("No tested defense")


def test_a_defense_that_costs_more_is_named_only_if_every_one_does():
    _, second, _ = say([point(1.0), point(0.6, strength=25, utility=0.5)], "bureau", 80)
    assert "at most two points" not in second
    assert "30.0 points of utility; each" in second


@pytest.mark.parametrize("lower", [point(0.71), point(0.70), replace(point(0.6), leak=point(0.71).leak)])
def test_a_defense_that_is_not_told_from_none_is_not_recommended(lower):
    wide = replace(lower, strength=20, leak=replace(lower.leak, ci95=(0.6, 0.73)))
    _, second = say([point(0.71), wide], "bureau", 80)
    assert (
        second
        == f"No tested defense that costs at most two points of utility on average is shown to lower this. {SEALED}"
    )


def test_sealed_training_is_the_next_step_where_every_defense_leaves_labels_readable():
    """It is not where a defense leaves no more than *alone*, where it was tried, or where a method cannot have it."""
    left, gone = (point(0.9, strength=strength, advantage=gain) for strength, gain in ((5, 0.1), (25, 0.04)))
    attribute = [replace(point(0.9, strength=strength), target="attribute") for strength in (0, 5)]
    trees = [replace(point(0.9, strength=strength), method="secureboost") for strength in (0, 5)]
    tried = point(0.8, strength=1, defense="sealed")
    for worst in ([point(1.0), left, gone], [point(1.0), left, tried], attribute, trees):
        assert "sealed --" not in " ".join(say(worst, "bureau", 80))
    assert say([point(1.0), left], "bureau", 80)[-1] == SEALED


@pytest.mark.parametrize(
    ("name", "defense", "guarantee", "said"),
    [("iso", "iso@embedding", "none, empirical only.", "iso@embedding has no guarantee (empirical only): a stronger"),
     ("x.py:Mine", "x.py:Mine", "none", "x.py:Mine has no guarantee: a stronger attack may infer more."),
     ("iso", "iso", "epsilon = 1; no columns.", "The guarantee of iso: epsilon = 1; no columns.")],
)  # fmt: skip
def test_the_guarantee_of_the_recommended_defense_is_said(name, defense, guarantee, said):
    worst = [point(1.0), point(0.84, strength=5, utility=0.786, defense=defense)]
    stated = {"is": "another", name: guarantee}
    assert said in " ".join(say(worst, "bureau", 80, guarantees=stated))
    assert "guarantee" not in " ".join(say([point(1.0)], "bureau", 80, guarantees=stated)), "nothing is recommended"


def test_cost_and_what_joining_gains_have_their_intervals_in_the_verdict():
    left = replace(
        point(0.84, strength=5, utility=0.707),
        cost=0.017,
        cost_ci95=(0.006, 0.029),
        gain=0.027,
        gain_ci95=(-0.04, 0.09),
    )
    clean = replace(point(1.0, utility=0.724), gain=0.044, gain_ci95=(-0.02, 0.1))
    _, before, best, joining, _ = say([clean, left], "bureau", 80)
    assert before.startswith("With no defense, joining is not shown to pay: ")
    assert best.endswith("at a cost of 1.7 points of utility (interval 0.6 to 2.9).")
    assert joining.startswith("With iso 5, joining is not shown to pay: ")
    assert "AUC .707, " in joining
    assert " .680 (difference .027, interval -.040 to .090)." in joining
    assert "With iso 5, joining pays: " in " ".join(
        say([point(1.0), replace(left, gain_ci95=(0.01, 0.04))], "bureau", 80)
    )


@pytest.mark.parametrize(("known", "is_said"), [(0.98, True), (0.004, False)])
def test_rows_that_are_known_with_99_percent_are_counted_in_the_verdict(known, is_said):
    def knowing(of_class, leak, **fields):
        others = {"known_of_class@0.99": of_class, "right_of_class@0.99": 0.996}
        bare = point(leak, **fields)
        return replace(bare, leak=replace(bare.leak, others=others, alone_others={"known_of_class@0.99": 0.0}))

    cheap = [knowing(share, 0.9, strength=s) for share, s in ((0.483, 1), (0.286, 2))]
    dear = knowing(0.6, 0.9, strength=3, utility=0.6)
    worst = [knowing(known, 1.0), *cheap, dear, knowing(0.03, 0.84, strength=5)]
    single = replace(knowing(0.05, 0.83, strength=5), attack="fusion")  # it knows more rows than the strongest
    first, best, *_ = say(worst, "bureau", 80, points=[single])
    assert ("98 % of the rows of a class with a certainty of more than 99 % (0 % without" in first) is is_said
    assert ("joining), and is right on 100 % of these" in first) is is_said
    assert ("more than 99 %, 5 % of the rows of a class are known by any measured attack (98 %" in best) is is_said
    assert ("without it, and 29 % to 48 % under the others that cost at most two points)." in best) is is_said


@pytest.mark.parametrize(("low", "is_said"), [(-0.02, True), (0.01, False)])
def test_an_advantage_that_is_not_shown_is_no_proof(low, is_said):
    """It is said of the figure of the headline: a single attack may have a shown advantage beside it."""
    left = point(0.84, strength=5, utility=0.786)
    left = replace(left, leak=replace(left.leak, advantage=0.04, advantage_ci95=(low, 0.1), detectable=0.06))
    best = say([point(1.0), left], "bureau", 80)[1]
    said = (
        "That this is more than without joining is not shown; a gain of .06 would have been seen in about four of five"
    )
    assert (f"{said} cases: this is no proof that it is not." in best) is is_said


@pytest.mark.parametrize(("clean", "is_said"), [(0.06, True), (0.147, False)])
def test_columns_that_leak_most_under_the_recommended_defense_are_named(clean, is_said):
    leaks = {0.0: clean, 5.0: 0.15, 25.0: 0.12}
    columns = [point(leak, strength=s, alone=0.08, target="features", advantage=0.0) for s, leak in leaks.items()]
    labels = [point(1.0), point(0.8, strength=5), point(0.9, strength=25)]
    said = " ".join(say([*labels, *columns], "bureau", 80))
    assert (
        "Of all tested settings, iso 5 has the highest recovery of the columns of another party: AUC .15 " in said
    ) is is_said


@pytest.mark.parametrize(("upper", "is_said"), [(0.885, True), (0.862, False)])
def test_a_single_attack_with_a_wider_interval_is_named_under_the_recommended_defense(upper, is_said):
    worst, single = [point(1.0), point(0.84, strength=5)], point(0.655, strength=5)
    single = replace(single, attack="forest-training", leak=replace(single.leak, ci95=(0.425, upper)))
    said = say(worst, "bureau", 80, points=[*worst, single])
    assert any("single attacks may reach more: forest-training .8" in sentence for sentence in said) is is_said


def test_attacks_that_had_not_converged_are_named_where_alone_is_the_headline():
    gone = replace(point(0.7, strength=5, advantage=0.0), choice="alone", unconverged=["exploit", "mc"])
    assert (
        "that had not converged under it, and may be too weak: exploit, mc." in say([point(1.0), gone], "bureau", 80)[1]
    )
    assert write_status(gone) == "2 attacks unconverged"


def test_no_more_than_without_joining_is_said_so():
    first, second = say(
        [point(0.71, rows="test", advantage=-0.01)], "bureau", 80, not_run=["fusion"], left_out={"a": "", "b": ""}
    )
    assert "AUC .71, interval up to .73" in first
    assert second == (
        "Not tested: 1 attack that it could mount on this and other targets (add --attack all to run them), and 2 "
        "attacks that could not be run on this material. The leak may be larger."
    )


def test_more_than_without_joining_within_the_interval_is_left_open():
    first, _ = say([point(1.0, advantage=0.01)], "bureau", 80)
    assert first == (
        "With 80 known labels, bureau infers the labels of training rows with AUC 1.00; these runs do not show whether "
        "this is more than without joining (.70)."
    )


def test_an_advantage_that_a_correction_leaves_open_is_not_claimed_and_speaks_for_no_defense():
    first, _ = say([replace(point(0.9), leak=replace(point(0.9).leak, p_holm=0.06))], "bureau", 80)
    assert "these runs do not show whether this is more" in first
    open_ = replace(point(0.9, strength=5), leak=replace(point(0.9).leak, p_holm=0.06))
    assert say([point(1.0), open_], "bureau", 80) == say([point(1.0), point(0.9, strength=5)], "bureau", 80)


def test_without_a_number_there_is_no_verdict():
    lost = replace(point(1.0), leak=point(1.0).leak_train)
    assert say([lost], "bureau", 80) == []


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A finished evaluation of a small world."""
    folder = tmp_path_factory.mktemp("run")
    spec = specs.read({
        "dataset": "toy", "data": {"options": {"rows": 300}}, "train": {"epochs": 2}, "seeds": 2,
        "aux": {"n": 20, "folds": 0}, "attacks": ["norm", "mc"], "defenses": ["iso:lambda=1"],
    })  # fmt: skip
    store = Store(folder)
    with store.lock():
        store.write_settings(specs.to_toml(spec), build_manifest(spec, ["vflsec", "eval"]))
        list(engine.evaluate(engine.plan(spec, store), store))
    return Report.read(folder)


def test_each_number_of_the_verdict_is_in_the_summary(report):
    summary = report.summary
    numbers = {f"{value:.2f}".lstrip("0") for p in summary.worst for value in (
        p.leak.mean, p.leak.alone, p.leak.ci95[1], p.leak.detectable) if value is not None}  # fmt: skip
    found = [one for text in summary.verdict for one in re.findall(r"(?<![\d.])(?:1\.00|\.\d\d)(?!\d)", text)]
    assert len(found) >= 2
    assert set(found) <= numbers | {"1.00"}
    assert all(f"VERDICT {sentence}"[:60] in report.table() for sentence in summary.verdict)


class Reader(HTMLParser):
    """Collects tags, attributes and text; fails on tags that do not nest."""

    def __init__(self):
        super().__init__()
        self.tags, self.links, self.text, self.open = set(), [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "data", "action", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(text):
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


def test_it_is_one_small_file_without_scripts_or_requests(report):
    text = report.to_html()
    reader = parsed(text)
    assert len(text.encode()) < 300_000
    assert not reader.tags & {"script", "iframe", "object", "embed", "img", "form", "link"}
    assert all(link.startswith("#") for link in reader.links)
    assert "url(http" not in text
    assert "@import" not in text


def test_it_has_everything_that_can_be_filed(report):
    shown = " ".join(" ".join(parsed(report.to_html()).text).split())
    parts = [
        "What was not tested, and why",
        "Threat model",
        "What crosses between parties",
        "What the columns and words mean",
    ]
    parts += [
        "Where the numbers come from",
        "EDPB Opinion 28/2024",
        "Article 15(5)",
        "It is no certificate",
        "vflsec eval",
    ]
    for part in (*map(drop_hints, report.summary.verdict), *parts):
        assert part in shown
    for name in report.summary.not_run:
        assert name in shown


def list_rows(text, title):
    """The cells of the table below a title."""
    section = next(part for part in text.split("<section") if f"<h2>{title}" in part)
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in section.split("<tr>")]
    return [row for row in rows if row]


def test_each_defense_has_its_bytes_and_those_that_send_the_same_stand_together(report):
    same, less = [("active", "bank", "gradient", 4_000_000), ("bank", "active", "embedding", 2_000_000)], 1_500_000
    traffic = [(place, *route) for place in ("no defense", "iso 1") for route in same]
    text = Report(report.summary, report.manifest, [*traffic, ("topk 9", "active", "bank", "gradient", less)]).to_html()
    rows = list_rows(text, "What crosses between parties")
    assert rows[0] == ["no defense, iso 1", "active", "bank", "gradient", "4.00"]
    assert [(row[0], row[-1]) for row in rows if row[3] == "total"] == [
        ("no defense, iso 1", "6.00"),
        ("topk 9", "1.50"),
    ]
    alike = Report(report.summary, report.manifest, traffic).to_html()
    assert list_rows(alike, "What crosses")[0] == ["each tested setting", "active", "bank", "gradient", "4.00"]
    assert {place for place, *_ in report.traffic} == {"no defense", "iso 1"}
    totals = {
        place: sum(route[-1] for route in report.traffic if route[0] == place) for place in ("no defense", "iso 1")
    }
    by_point = {name_defense(point, "no defense"): point.nbytes for point in report.points}
    assert totals == by_point


def read_annex(summary, manifest):
    text = Report(summary, manifest).to_html()
    return re.sub("<[^>]*>", "", text[text.index("<h2>Annex: ") : text.index("<section class=sign>")])


def test_the_annex_claims_nothing_that_was_not_run(report):
    summary, manifest = report.summary, report.manifest
    shown = read_annex(summary, manifest)
    for name in ("An attribute", "Columns", "Membership", "Models", "Training itself"):
        assert re.search(rf"{name}: 0 attacks of vflsec run, \d+ more possible, \d+ not", shown)
    assert "Predictions that are handed out: no attack run, impossible for this adversary" in shown
    most = max(summary.worst, key=lambda p: p.leak.mean).leak
    numbers = rf"highest measured AUC {write_number(most.mean)} under no defense \({write_number(most.alone)}"
    assert re.search(rf"Labels: 2 attacks of vflsec run, \d+ more possible, \d+ not, {numbers}", shown)
    assert "leak and cost of iso 1" in shown
    assert "no gate was set" in shown
    assert shown.count("Labels: 2 attacks") == 1, "each number stands once, and the rows name it"
    assert shown.count("Evidence: labels; ") >= 3
    page = report.to_html()
    assert re.search(r"Not covered: ([a-z ,]+, )?training itself, on which no attack was run; attacks on the", shown)
    assert not re.search("Evidence: (?:(?!Not covered).)*training itself", shown)
    assert "Not measured here: what active may infer." in page
    assert "Nothing follows from them for other data." in page
    assert re.search(r"Not run: \d attacks on training itself, though this adversary could\.", page)
    assert "It has seen 1 training on these rows; more of them leak more." in page
    own = replace(manifest, card={**manifest.card, "license": ""})
    assert "Nothing follows from them for other data." not in Report(summary, own).to_html()
    untitled = replace(manifest, card={"license": "CC0"})
    assert "These are figures of toy (CC0)." in Report(summary, untitled).to_html()
    gate = Gate(gate="min-utility", limit=0.6, worst=0.7, at="iso 1", holds=True)
    others = [replace(p, target="membership") for p in (*summary.points, *summary.worst)]
    clean = [p for p in others if not p.strength]
    half = len(clean) // 2
    shown = read_annex(replace(summary, points=clean[:half], worst=clean[half:], gates=[gate]), manifest)
    assert "Labels: 0 attacks of vflsec run" in shown
    assert "Membership: 1 attack of vflsec run" in shown
    assert "no defense was tested" in shown
    assert "GATE min-utility 0.6: holds" in shown


def test_the_annex_states_the_highest_leak_that_was_measured_and_under_which_defense(report):
    lower, higher = point(0.8), replace(point(0.634, strength=25), highest=0.87, highest_attack="fusion")
    known = replace(higher, leak=replace(higher.leak, others={"known_of_class@0.99": 0.123}))
    shown = read_annex(replace(report.summary, worst=[lower, higher], points=[point(0.7), known]), report.manifest)
    labels = "AUC .870 under iso 25 by fusion on the rows that chose it; .634 if other rows choose (.700 without"
    assert f"highest measured {labels} joining; advantage +.100" in shown
    assert "known with more than 99 %: highest measured .123 by worst under iso 25" in shown
    assert "at most" not in shown


def test_the_annex_has_no_number_under_a_note_that_forbids_relying_on_them(report):
    doubtful = replace(report.summary, alarms=["a sign"])
    shown = read_annex(doubtful, report.manifest)
    assert shown.startswith("Annex: where this evidence belongsNo number is evidence: a NOTE")
    assert "Evidence:" not in shown
    assert not re.search(r"\d?\.\d{3}", shown)
    parts = [Part(doubtful, report.manifest), Part(replace(report.summary, adversary="shop"), report.manifest)]
    annex = re.sub("<[^>]*>", "", write_page(parts).partition("<h2>Annex: ")[2])
    assert "No number of 1. passive_1 is evidence" in annex
    assert "Labels: 2 attacks of vflsec run" in annex
    assert "(1. passive_1)" not in annex
    blind = replace(report.summary, points=[], worst=[], adversary="bank")  # none of its attacks gave a number
    annex = re.sub("<[^>]*>", "", write_page([parts[1], Part(blind, report.manifest)]).partition("<h2>Annex: ")[2])
    evidence = re.findall(r"Evidence: ([^()]*)\((\d\. \w+)\)", annex)
    named = {who: {said.split(";")[0].strip() for said, by in evidence if by == who} for _, who in evidence}
    assert {who.split(" ")[1]: "labels" in said for who, said in named.items()} == {"shop": True, "bank": False}


@pytest.mark.parametrize(("highest", "is_named"), [(0.66, True), (0.638, False), (None, False)])
def test_a_single_attack_above_the_headline_is_named(highest, is_named):
    """In the verdict, with and without a defense, and beside the headline in every table, also of several roles."""
    start, left = point(0.9), replace(point(0.634, strength=25), highest=highest, highest_attack="fusion")
    sentence = " A single attack, fusion, reaches .66 on rows that the model was not trained on; it was chosen and"
    left = replace(left, highest_rows="test", leak_train=left.leak)
    assert (sentence in say([start, left], "bureau", 80)[1]) is is_named
    assert (sentence in say([replace(left, strength=0.0)], "bureau", 80)[0]) is is_named
    summary = made_summary([start, left], points=[start, left])
    shown = [*list_headlines(summary), *show_roles([summary, replace(summary, adversary="shop")]).tables]
    assert [("highest: fusion .660, test" in str(cells.rows)) for cells in shown] == [is_named] * 2


def test_what_was_not_tested_stands_by_what_it_would_recover(report):
    way = "; this adversary has only own features: choose --adversary active"
    manifest = replace(
        report.manifest,
        questions={"fusion": "labels", "lira": "membership", "grn": "features", "logistic": "labels", "mc": "labels"},
        exclusions={
            "logistic": "part of alone",
            "lira": f"{TOO_DEAR}: trains 64 shadows: name it in --attack",
            "grn:victim=shop": f"needs x{way}",
            "mc:x=1": "needs what another method sends",
        },
    )
    text = Report(replace(report.summary, not_run=["fusion", "lira", "mc:x=1"]), manifest).to_html()
    section = next(part for part in text.split("<section") if "What was not tested" in part)
    items = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", section)[:3]
    assert items == [
        ("Labels: 2 attacks of vflsec run, 2 more possible, 0 not", "fusion, mc:x=1: was not asked for"),
        (
            "Columns: 0 attacks of vflsec run, 0 more possible, 1 not",
            "grn:victim=shop: impossible for this adversary: needs x",
        ),
        ("Membership: 0 attacks of vflsec run, 1 more possible, 0 not", "lira: too dear: trains 64 shadows"),
    ]


def test_the_verdict_and_the_list_of_untested_attacks_count_the_same(report):
    """Those that this adversary can mount, but for those on the training itself, which infer nothing."""
    text = report.to_html()
    section = next(part for part in text.split("<section") if "What was not tested" in part)
    counts = re.findall(r"<dt>([^<]*?): (\d+) attacks? of vflsec run, (\d+) more possible, \d+ not<", text)
    every = {name: int(n) + int(more) for name, n, more in counts if name != "Training itself"}
    assert sum(every.values()) == report.summary.mountable > every["Labels"] > 2
    assert f"only 2 of the {report.summary.mountable} attacks" in " ".join(report.summary.verdict)
    assert f"can mount {report.summary.mountable} attacks" in section


@pytest.mark.parametrize(
    ("mountable", "reason", "counts"),
    [(2, "impossible for this adversary", "0 more possible, 1"), (0, "was not asked for", "1 more possible, 0")],
)  # without a training it is not known what can be mounted
def test_an_attack_that_did_not_run_could_not_or_was_not_asked_for(report, mountable, reason, counts):
    manifest = replace(report.manifest, questions={"inversion": "features", "backdoor": "integrity"})
    text = write_page([Part(replace(report.summary, mountable=mountable, not_run=[]), manifest)])
    assert f"<dt>Columns: 0 attacks of vflsec run, {counts} not</dt><dd>inversion: {reason}</dd>" in text
    assert "not</dt><dd>backdoor: acts in training, and was not asked for</dd>" in text


def test_a_page_has_no_hints_for_a_command_line(report):
    """But for the command that made it; the terminal has them."""
    text = re.sub(r"<(style|code|pre)>.*?</\1>", "", report.to_html(), flags=re.DOTALL)
    assert "--attack all" in report.table()
    assert not re.search(r"(?<!-)--[a-z]|\b(aux|model|train|data)\.[a-z_]+=", "".join(parsed(text).text))
    assert "could mount" in text


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("use fewer known labels, for example --set aux.n=28", "use fewer known labels, for example 28"),
        ("4 attacks (leave --attack out to run them), and 5 others", "4 attacks, and 5 others"),
        ("others may infer more: add --attack all,mc:x=1 to run them. The end", "others may infer more. The end"),
        ("ids differ: check their ids, then --confirm-fit", "ids differ: check their ids"),
        ("a may leak more: try other train.epochs, model.head=mlp or a larger model.cut", "a may leak more"),
        (
            "needs model.head=none, got linear: set it, or leave it out",
            "needs a joint model whose last layer is not trained",
        ),
        (
            "mc: expected 10 rows for aux.n=20, got 3: set aux.balanced=false",
            "mc: expected 10 rows for aux.n=20, got 3",
        ),
        ("iso:lambda=1.5@embedding --> x", "iso:lambda=1.5@embedding --> x"),
    ],
)
def test_hints_become_plain_words_and_facts_stay(text, plain):
    assert drop_hints(text) == plain


def test_the_annex_counts_what_the_list_of_untested_attacks_counts(report):
    """A failed attack, one on the training, and one that reads predictions, which both parts once counted apart."""
    entries = [
        AttackEntry(label=label, name=label.partition(":")[0], target=target)
        for label, target in (
            ("prediction:top=1", "labels"),
            ("backdoor", "integrity"),
            ("model-recovery", "parameters"),
        )
    ]
    questions = {
        "mc": "labels", "norm": "labels", "prediction": "labels", "backdoor": "integrity", "steering": "integrity",
        "model-recovery": "parameters",
    }  # fmt: skip
    manifest = replace(report.manifest, attacks=[*report.manifest.attacks, *entries], questions=questions)
    read = replace(report.points[0], attack="prediction:top=1")
    broken = replace(DAMAGE, attack="backdoor")
    summary = replace(report.summary, points=[*report.points, read], integrity=[broken], not_run=["steering"])
    annex = read_annex(summary, manifest)
    text = Report(summary, manifest).to_html()
    section = next(part for part in text.split("<section") if "What was not tested" in part)
    assert re.findall(r"<dt>([^<]*? not)</dt><dd>(.*?)</dd>", section) == [
        ("Models: 0 attacks of vflsec run, 1 more possible, 0 not", "model-recovery: gave no number"),
        ("Training itself: 1 attack of vflsec run, 1 more possible, 0 not", "steering: was not asked for"),
    ]
    for counted in (
        "Labels: 3 attacks of vflsec run, 0 more",
        "Models: 0 attacks of vflsec run, 1 more",
        "Training itself: 1 attack of vflsec run, 1",
    ):
        assert counted in annex
    assert "Predictions that are handed out: attack run" in annex


def test_each_note_stands_once_and_where_its_number_stands(report):
    note, caps = "too few seeds", report.summary.cap
    noted = [replace(cap, note=note, defense=name) for name in ("iso", "mid") for cap in caps]
    text = Report(replace(report.summary, cap=noted), report.manifest).to_html()
    assert text.count(note) == 1
    assert f"CAP of iso, mid: {note}" in text
    rule, number = text.index("chosen on one half of the rows"), text.index("Strongest attack on labels")
    assert text.index("Threat model") < rule < number


def test_a_note_of_several_scores_stands_once(report):
    """As with attacks whose guesses are of one class, and with too few seeds for all."""
    noted = [replace(report.summary.cap[0], note=note) for note in ("few", "one class; few")]
    assert list_cap_notes(replace(report.summary, cap=noted)) == ["CAP of iso: few", "CAP of iso: one class"]


def test_parties_columns_label_and_data_are_said(report):
    """Those of the toy data; where columns are dealt by seed, they are those of the first."""

    def read_rows(manifest):
        text = Report(report.summary, manifest).to_html()
        section = next(part for part in text.split("<section") if "<h2>Parties and data" in part)
        return {
            name: re.sub("<.*?>", " ", facts)
            for name, facts in re.findall(r"<dt>(.*?)</dt>(.*?)(?=<dt>|</dl>)", section)
        }

    rows = read_rows(report.manifest)
    held = {name: ", ".join(f"{name}_x{k}" for k in range(6)) for name in ("active", "passive_1")}
    assert rows["active, holds the labels"].strip() == f"6 columns: {held['active']}"
    assert rows["passive_1, the adversary"].strip() == f"6 columns: {held['passive_1']}"
    card = load_dataset("toy").card
    assert rows["label"].strip() == f"{card.label}: class_0 or class_1"
    assert card.title in rows["data"]
    many = replace(
        report.manifest,
        columns={"active": [f"c{k}" for k in range(42)]},
        names={"active": "bank"},
        settings={"data": {"columns": "random"}},
    )
    last = read_rows(many)["bank, holds the labels"]
    assert last.strip().startswith("42 columns in the first seed: c0, c1,")
    assert last.strip().endswith(", c39 and 2 more")


def test_what_is_signed_is_named_with_its_version_and_command(report):
    origin = replace(report.manifest.provenance, commit="0123456789abcdef", command=["vflsec", "eval", "--seeds", "2"])
    text = Report(report.summary, replace(report.manifest, provenance=origin)).to_html()
    signed = " ".join("".join(parsed(text[text.index("<section class=sign>") : text.index("</main>")]).text).split())
    assert all(part in signed for part in ("0123456789ab", origin.versions["vflsec"], "vflsec eval --seeds 2"))
    assert "fedsplitnn on toy, passive_1" in signed
    assert "☐ no defense ☐ iso 1" in signed


def test_titles_say_what_was_run_and_when_and_words_are_explained(report):
    origin = replace(report.manifest.provenance, time="2026-01-02T03:04:05+00:00")
    text = Report(report.summary, replace(report.manifest, provenance=origin)).to_html()
    assert "<title>toy: what passive_1 infers under iso (2026-01-02 03:04)</title>" in text
    assert "<dt>AUC</dt>" in text
    assert "<dt>gate</dt>" in text  # the annex says that none was set
    assert "<dt>R²</dt>" not in text


def test_an_epsilon_is_said_to_be_simulated_before_the_first_number_of_the_page(report):
    spent = [{"defense": "sealed", "epsilon": 2.0, "delta": 1e-5}]
    worst, points = ([replace(p, spent=spent) for p in some] for some in (report.summary.worst, report.summary.points))
    text = Report(replace(report.summary, worst=worst, points=points), report.manifest).to_html()
    assert text.index(SIMULATED) < text.index("<table")
    assert "1e-05" in text[: text.index("<table")]


def test_settings_are_plain_words():
    assert write_plain([{"name": "iso", "strength": 0.0, "at": None, "options": {"unit": 2, "fixed": False}}]) == (
        "iso (unit=2, fixed=false)"
    )
    assert [write_plain(value) for value in (None, True, [], ["a", 1], 0.5)] == ["none", "true", "none", "a, 1", "0.5"]


def test_it_counts_rows_and_says_what_there_is_without_joining(report):
    summary = report.summary
    shown = " ".join(parsed(report.to_html()).text)
    assert summary.rows == {"test": 90, "train": 190}
    assert "Numbers are over 2 seeds, of 90 test rows and 190 training rows each: so many people" in shown
    assert "a quick model of the active party's own columns" in shown
    unknown = replace(summary, points=[replace(p, gain=None) for p in summary.points])
    assert "The utility without joining was not measured." in Report(unknown, report.manifest).to_html()


@pytest.mark.parametrize("alarms", [[], ["a sign"]])
def test_what_is_signed_says_whether_it_may_be_relied_on(report, alarms):
    text = write_page([report.draw_part()._replace(summary=replace(report.summary, alarms=alarms))])
    assert ("class=failed" in text[text.index("Sign-off") :]) is bool(alarms)


def test_hostile_names_are_text(report):
    bad = '<script>alert(1)</script>"&amp;'
    summary = replace(report.summary, dataset=bad, adversary=bad, notes=[bad], not_run=[bad], left_out={bad: bad})
    renamed = {
        field: [replace(p, defense=bad, choice=bad) for p in getattr(summary, field)] for field in ("points", "worst")
    }
    part = Part(replace(summary, **renamed, verdict=[bad]), report.manifest, [(bad, bad, bad, bad, 1)])
    for parts in ([part], [part, part]):
        reader = parsed(write_page(parts))
        assert "script" not in reader.tags
        assert any(bad in one for one in reader.text)


def with_role(report, adversary, gain, **fields):
    """The report as one of another adversary, which gains so much."""
    worst = [replace(p, leak=replace(p.leak, advantage=gain)) for p in report.summary.worst]
    summary = replace(report.summary, adversary=adversary, worst=worst, verdict=[f"{adversary} infers."], **fields)
    return Report(summary, replace(report.manifest, adversary=adversary), report.traffic)


def test_several_adversaries_have_one_page_that_is_signed_once_the_worst_first(report):
    """A part of another seed count says so; what is in the page of one adversary is in the joint one."""
    weak, strong = with_role(report, "bank", 0.1), with_role(report, "shop", 0.3)
    ordered = order_roles([weak, strong])
    assert ordered == [strong, weak]
    text = write_page([one.draw_part() for one in ordered])
    shown = " ".join(" ".join(parsed(text).text).split())
    assert shown.index("1. shop") < shown.index("shop infers.") < shown.index("bank infers.")
    assert (text.count("Sign-off"), text.count("Annex: "), text.count("What the columns and words mean")) == (1, 1, 1)
    assert (
        text.count("<article")
        == text.count("Threat model")
        == text.count("It knows the label, or what else it is after, of 20")
        == 2
    )
    assert "None: same data, methods, settings and versions." in shown
    words = {" ".join(one.split()) for part in ordered for one in parsed(part.to_html()).text} - {""}
    titled = re.compile(r"toy: what \w+ infers under iso \(.*\)|Not measured here: .*")
    assert [one for one in words if one not in shown and not titled.fullmatch(one)] == []
    other = Report(weak.summary, replace(weak.manifest, settings={**weak.manifest.settings, "seeds": 7}))
    assert '<td class="text prose" data-name="2. bank">7</td>' in write_page([strong.draw_part(), other.draw_part()])


def test_the_table_of_several_adversaries_has_the_numbers_of_their_headlines(report):
    summaries = [with_role(report, name, 0.1).summary for name in ("bank", "shop")]
    (cells,) = show_roles([summaries[0], replace(summaries[1], dataset="other")]).tables
    assert cells.header == ["defense", "1. bank on toy", "2. shop on other"]
    assert [row[0] for row in cells.rows] == ["without joining (alone)", "no defense", "iso 1"]
    assert [row[1].split(" ")[0] for row in cells.rows[1:]] == [
        f"{p.leak.mean:.3f}".removeprefix("0") for p in summaries[0].worst if p.strength in (0, 1)
    ]


def test_strengths_of_a_defense_stand_together_for_several_adversaries(report):
    points = [point(0.8, strength=5.0), point(0.7, strength=0.5, defense="mixup"), point(0.9), point(0.8, strength=1.0)]
    (cells,) = show_roles([replace(with_role(report, "bank", 0.1).summary, worst=points)]).tables
    assert [row[0] for row in cells.rows] == ["without joining (alone)", "no defense", "iso 1", "iso 5", "mixup 0.5"]


def test_defenses_of_several_adversaries_stand_in_one_order_and_name_what_was_not_run(report):
    """The first was not tested at strength 1, and the second not at 5; the title has the column of an attack."""
    name = "attribute-fusion:column=AGE"
    known = {"target": "attribute AGE", "column": "AGE", "victim": "shop", "highest": 0.9, "highest_rows": "train"}
    summary, worst = (
        report.summary,
        [replace(p, highest_attack=name, **known) for p in (point(0.7), point(0.8, strength=5.0))],
    )
    other = replace(summary, worst=[worst[0], replace(worst[1], strength=1.0)])
    (cells,) = show_roles([replace(summary, worst=worst), other]).tables
    assert [row[0] for row in cells.rows] == ["without joining (alone)", "no defense", "iso 1", "iso 5"]
    assert [row[1:].count("not run") for row in cells.rows] == [0, 0, 1, 1]
    assert "(highest: attribute-fusion .900, train)" in cells.rows[1][1]
    assert cells.header[1].endswith(": AGE of shop")


def test_an_evaluation_is_not_signed_twice_on_one_page(report):
    copied = Report(replace(report.summary, out="copy"), report.manifest)
    with pytest.raises(UsageError, match=r"found the same in .* and copy: name each once"):
        order_roles([report, copied])


def test_an_adversary_without_a_number_is_first(report):
    empty = with_role(report, "shop", None)
    assert order_roles([with_role(report, "bank", 0.9), empty])[0] is empty


def test_the_same_report_gives_the_same_bytes(report):
    assert report.to_html() == report.to_html()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it_without_a_message(report, tmp_path, width):
    """Headless Chromium: no message on the console, and a picture that is not blank."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs chromium")
    path = report.save_page(tmp_path)
    picture = tmp_path / "page.png"
    words = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    words += [f"--window-size={width},1200", f"--screenshot={picture}", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*words, path.as_uri()],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert picture.stat().st_size > 20_000
    assert "CONSOLE" not in done.stderr
    count_cut = (
        "<script>document.title = [...document.querySelectorAll('main *')].filter(e => !e.closest('figure') && "
        "!e.closest('details') && e.getBoundingClientRect().right > document.documentElement.clientWidth).length"
        "</script>"
    )
    path.write_text(
        re.sub("<meta http-equiv[^>]*>", "", path.read_text("utf-8")).replace("</main>", f"</main>{count_cut}")
    )
    done = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},1200", "--dump-dom",
         f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()],
        capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert "<title>0</title>" in done.stdout, "nothing is cut off"


def test_labels_come_first_and_other_targets_follow_if_joining_tells_more():
    attribute = point(0.9, target="attribute of bank age", rows="test")
    nothing = point(0.71, target="features of bank", advantage=0.0)
    guessed = point(-0.1, target="features of agency", alone=-0.3)
    worse = replace(guessed, leak=replace(guessed.leak, chance=0.0))
    first, also, last = say([attribute, nothing, worse, point(0.95)], "bureau", 80, left_out={"a": ""})
    assert "infers the labels of" in first
    assert also == (
        "With the column known for 80 rows, bureau infers an attribute of another party (bank age) of rows that the "
        "model was not trained on (AUC .90, interval up to .92; .70 without joining)."
    )
    assert last.startswith("Not tested")


def test_each_sentence_of_the_verdict_stands_once():
    """Each defense has its row without a defense, and so has each further target."""
    further = [point(0.9, target="attribute of bank age", rows="test", defense=name) for name in ("iso", "marvell")]
    said = say([point(0.95), *further], "bureau", 80)
    assert len(said) == len(set(said)) == 3


def test_a_picture_of_several_diagrams_fits_a_screen():
    figure = _write_figure('<svg width="1382.4pt" height="9pt"></svg>', "x")
    assert "min-width: 1200px" in figure
    assert "min-width: 504px" in _write_figure('<svg width="504pt" height="9pt"></svg>', "x")


def test_options_do_not_break_at_their_dashes():
    assert escape("add --attack all") == "add <span class=whole>--attack</span> all"
    assert escape("a--b <c>") == "a--b &lt;c&gt;"


@pytest.mark.parametrize("text", [".746 ±.010", "+.100 ±1.049", "(.984 to 1.000)", "(-.2 to .1)", "1e-05"])
def test_a_number_does_not_break_from_its_interval(text):
    assert escape(f"x {text} y") == f"x <span class=whole>{text}</span> y"
