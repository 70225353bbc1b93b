"""Alarms: each sign that numbers are not about the system leaves gates undecided, and a failed gate failed."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.results.analysis.made import made_baseline, made_result
from vflsec.base.errors import UsageError
from vflsec.core.view import GroundTruth, Guess
from vflsec.report.table import list_remarks, show
from vflsec.results.analysis.gates import FAR, is_far_below
from vflsec.results.analysis.summary import summarize
from vflsec.results.records.manifest import RunLimits
from vflsec.results.records.schema import Block
from vflsec.results.statistics import GROUPS
from vflsec.run import spec as specs
from vflsec.run.describe import build_manifest
from vflsec.run.plan import list_baselines, list_trials
from vflsec.run.score import is_constant, score, share_of_class

SPEC = specs.read({"dataset": "toy", "attacks": ["mc", "norm"], "defenses": [{"name": "iso"}], "strengths": [1],
                   "seeds": 2})  # fmt: skip


def block(value, **fields):
    ends = (value - 0.02, value + 0.02)
    return Block(
        metrics={"auc": value}, ci95_rows=ends, chance=0.5, n=100, halves=(value, value), without=(value,) * GROUPS,
        **fields,
    )  # fmt: skip


def summary_of(leak=None, *, spec=SPEC, changes=None, alone=0.7, **manifest):
    """A report whose attacks leak ``leak``, by default .75; ``changes`` are those of the record of a row."""
    leak = leak or (lambda row: block(0.75 + 0.01 * row.seed))
    records = {}
    for row in list_trials(spec):
        fields = {"seed": row.seed, "cell": row.cell.key, "utility": block(0.8), "leak": {"train": leak(row)}}
        fields["defenses"] = [f"iso:{row.strength:g}"] if row.strength else []
        records[row.key] = made_result(**{**fields, **(changes(row) if changes else {})})
    for one in list_baselines(spec):
        found = {} if one.label == "norm" else {"train": block(alone)}
        records[one.key] = made_baseline(seed=one.seed, leak=found)
    limits = RunLimits(max_leak={"worst": 0.9, "mc": 0.1}, min_utility=0.5, max_undetected=0.9)
    return summarize(replace(build_manifest(spec), **manifest), records, out="", limits=limits)


def expect_alarm(summary, text):
    """The alarm is in the verdict; gates that would hold are undecided, and the one on mc still fails."""
    (alarm,) = summary.alarms
    assert text in alarm
    assert f"VERDICT NOTE {alarm}" in list_remarks(summary)
    holds = {gate.gate: gate.holds for gate in summary.gates}
    assert holds.pop("max-leak mc") is False
    assert True not in holds.values()
    assert any("UNDECIDED: see the NOTEs" in line for line in list_remarks(summary))


@pytest.mark.long
def test_a_limit_that_alone_exceeds_is_one_that_no_defense_keeps():
    def gate(limit):
        records = summary_records(SPEC, changes=lambda _: {"leak": {"train": block(0.75)}}, alone=0.7)
        return summarize(build_manifest(SPEC), records, out="", limits=RunLimits(max_leak={"worst": limit})).gates[0]

    assert [gate(limit).holds for limit in (0.6, 0.74)] == [False, False]
    assert "no defense can change it" in gate(0.6).at
    assert "no defense" not in gate(0.74).at


def test_a_gate_names_the_defenses_that_every_training_has():
    settings = build_manifest(SPEC).settings | {"fixed": [{"name": "label-dp", "strength": 1.0}]}
    own = replace(SPEC, defenses=[], strengths=[])
    records = summary_records(own, changes=lambda _: {"leak": {"train": block(0.75)}}, alone=0.7)
    manifest = replace(build_manifest(own), settings=settings)
    (gate,) = summarize(manifest, records, out="", limits=RunLimits(max_leak={"mc": 0.6})).gates
    assert "label-dp 1" in gate.at


def test_verdict_and_tables_name_the_defenses_that_every_training_has():
    settings = build_manifest(SPEC).settings | {"fixed": [{"name": "label-dp", "strength": 1.0}]}
    for spec in (SPEC, replace(SPEC, defenses=[], strengths=[])):
        manifest = replace(build_manifest(spec), settings=settings)
        records = summary_records(spec, changes=lambda _: {"leak": {"train": block(0.75)}}, alone=0.7)
        summary = summarize(manifest, records, out="")
        assert "has the defense label-dp 1" in summary.verdict[0]
        shown = show(summary).markdown()
        assert "every training with label-dp 1" in shown
        assert "no defense" not in shown
        assert "none" not in shown


def test_an_ordinary_report_has_no_alarm():
    summary = summary_of()
    assert summary.alarms == []
    assert [gate.holds for gate in summary.gates] == [True, False, True, True]


@pytest.mark.long
def test_attacks_far_below_alone():
    below = summary_of(lambda row: block(0.5 if row.strength == 0 else 0.75), alone=0.84)
    expect_alarm(below, "all attacks on labels are far below what passive_1 infers without joining")
    assert not summary_of(lambda row: block(0.75 if row.strength == 0 else 0.5), alone=0.84).alarms, "a defense may"
    assert not summary_of(lambda row: block(0.5 if row.label == "mc" else 0.8), alone=0.84).alarms, "one is not"
    assert not summary_of(lambda row: block(0.5), alone=0.6).alarms, "too little to be told from"
    single = replace(SPEC, attacks=SPEC.attacks[1:])
    alone = {"changes": lambda _: {"leak": {"train": block(0.5)}}, "alone": 0.84}
    leaks = summarize(build_manifest(single), summary_records(single, **alone), out="")
    assert not leaks.alarms, "norm reads messages alone, and cannot be expected to reach what columns tell"


def summary_records(spec, *, changes, alone):
    found = {row.key: made_result(seed=row.seed, utility=block(0.8), **changes(row)) for row in list_trials(spec)}
    return found | {
        one.key: made_baseline(seed=one.seed, leak={} if one.label == "norm" else {"train": block(alone)})
        for one in list_baselines(spec)
    }


@pytest.mark.parametrize(("upper", "far"), [(0.66, True), (0.68, False)])
def test_far_below_is_less_than_half_of_what_alone_gains(upper, far):
    """*Alone* is .84 and at least .84: half of its gain over .5 ends at .67."""
    leak = replace(summary_of().points[0].leak, ci95=(0.5, upper), alone=0.84, alone_ci95=(0.84, 0.84))
    assert is_far_below(leak) is far
    near = replace(leak, ci95=(0.5, 0.5), alone_ci95=(0.5 + FAR, 0.7))
    assert not is_far_below(near)


def test_constant_scores_of_an_attack_that_has_others_without_the_federation():
    expect_alarm(summary_of(lambda row: block(0.75, constant=row.label == "mc")), "have the same score by mc (")


def test_constant_scores_that_a_defense_may_cause_are_no_alarm():
    assert not summary_of(lambda row: block(0.75, constant=row.label == "norm")).alarms
    only = replace(SPEC, attacks=SPEC.attacks[1:])
    for strength, alarms in ((1, 0), (0, 1)):
        records = summary_records(
            only,
            changes=lambda row, at=strength: {
                "cell": row.cell.key,
                "defenses": ["iso:1"] if row.strength else [],
                "leak": {"train": block(0.5, constant=row.strength == at)},
            },
            alone=0.55,
        )
        found = summarize(build_manifest(only), records, out="")
        assert len(found.alarms) == alarms


def test_constant_scores_in_an_audit_of_an_attack_without_a_number_of_its_own():
    """norm has none without the federation, and mc has other scores."""
    spec = replace(SPEC, defenses=(), strengths=())
    constant = {"spec": spec, "audited": "w"}
    expect_alarm(summary_of(lambda row: block(0.75, constant=row.label == "norm"), **constant), "same score by norm")
    assert not summary_of(lambda row: block(0.75, constant=row.label == "norm"), declared=True, **constant).alarms


def test_an_audit_that_infers_nothing_above_chance():
    chance = {"spec": replace(SPEC, defenses=(), strengths=()), "audited": "w", "alone": 0.5}
    expect_alarm(summary_of(lambda _: block(0.5), **chance), "nothing is shown to be inferred above chance")
    assert not summary_of(lambda _: block(0.5), confirmed=True, **chance).alarms
    assert not summary_of(lambda _: block(0.75), **chance).alarms


def judged(utilities, active=0.6, width=0.0):
    """A report by the utility of the joint model at each strength; ``width`` is that of the jackknife's values."""

    def changes(row):
        value, groups = utilities[row.strength], np.linspace(-width, width, GROUPS)
        utility = replace(block(value), without=tuple(value + groups))
        return {"utility": utility, "active_alone": None if row.strength else active}

    return summary_of(lambda row: block(0.75 if row.strength == 0 else 0.7), changes=changes)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("utility", "active", "text"),
    [(0.226, 0.896, "alone: auc 0.226, and 0.896"), (0.226, None, "no better than chance"),
     (0.5, None, "no better than chance"), (0.8, 0.896, "worse than")],
)  # fmt: skip
def test_a_joint_model_that_is_of_no_use(utility, active, text):
    summary = judged({0: utility, 1: utility}, active)
    assert text in summary.alarms[0]
    assert not any("best defense" in sentence for sentence in summary.verdict)
    assert True not in [gate.holds for gate in summary.gates]


def test_a_joint_model_that_is_not_shown_to_be_worse_is_no_alarm_and_does_not_pay():
    summary = judged({0: 0.8, 1: 0.8}, 0.81, width=0.1)
    assert not summary.alarms
    assert any("joining is not shown to pay: the joint model has a utility of AUC .800" in s for s in summary.verdict)
    assert {point.useless for point in summary.worst} == {"worse than the active party alone on average (not shown)"}


@pytest.mark.sampled
@pytest.mark.parametrize(("utility", "why"), [(0.55, "worse than"), (0.45, "worse than"), (0.79, "")])
def test_a_defense_that_leaves_a_joint_model_of_no_use_is_not_recommended(utility, why):
    summary = judged({0: 0.8, 1: utility})
    assert not summary.alarms, "it is not what was set up"
    said = " ".join(summary.verdict)
    assert ("the only tested defense" in said) is not bool(why)
    assert ("None of the defenses is recommended" in said) is bool(why)
    assert ("iso has no guarantee (empirical only; " in said) is not bool(why), "as its class states"
    assert any(f"the joint model is {why}" in one for one in summary.verdict) is bool(why)
    holds = {gate.gate: (gate.holds, gate.why) for gate in summary.gates}
    assert holds["max-leak mc"][0] is False
    assert holds["max-leak worst"][0] is (None if why else True)
    assert why in holds["max-leak worst"][1]


def test_the_rows_of_a_gate_are_named():
    """The upper end .77 is of training rows; the table prints the interval on test rows."""
    changes = {"changes": lambda _: {"leak": {"train": block(0.75), "test": block(0.6)}}, "alone": 0.55}
    limits = RunLimits(max_leak={"mc": 0.7})
    (gate,) = summarize(build_manifest(SPEC), summary_records(SPEC, **changes), out="", limits=limits).gates
    assert gate.worst > 0.7
    assert gate.at.endswith("by mc on training rows")


def test_the_number_of_trainings_has_a_bound():
    with pytest.raises(UsageError, match="at most 1000 trainings, got 1000001"):
        replace(SPEC, trainings=1_000_001)


def test_a_collapsed_model():
    lost = {"status": "collapsed", "error": "the model predicts the same for every test row", "leak": {}}
    summary = summary_of(changes=lambda row: lost if row.strength == 0 else {})
    expect_alarm(summary, "fedsplitnn, no defense: the model predicts the same for every test row (2 of 2 trainings)")


def test_more_than_a_tenth_of_a_class_known():
    expect_alarm(summary_of(lambda _: block(0.75, known_of_class=0.31)), "31 % of the training rows of one class")
    assert not summary_of(lambda _: block(0.75, known_of_class=0.1)).alarms


@pytest.mark.sampled
@pytest.mark.parametrize(("share", "fewer"), [(0.71, 10), (0.4, 20), (0.19, 42)])
def test_a_number_of_labels_that_is_at_most_a_tenth_of_a_class(share, fewer):
    """Of 80 labels, 40 are of the class."""
    (alarm,) = summary_of(lambda _: block(0.75, known_of_class=share)).alarms
    assert alarm.endswith(f"--set aux.n={fewer}")
    assert share * fewer / 80 <= 0.1 < share * (fewer + 2) / 80


@pytest.mark.parametrize(("used", "alarmed"), [(0.5, True), (0.51, False)])
def test_half_of_the_rows_used(used, alarmed):
    assert bool(summary_of(used=used).alarms) is alarmed
    if alarmed:
        expect_alarm(summary_of(used=used), "only 50% of the rows of the smallest one")


def test_what_does_not_fit():
    expect_alarm(summary_of(misfit=["embeddings are not of these rows"]), "embeddings are not of these rows")


@pytest.mark.sampled
@pytest.mark.parametrize("lost", ["error", "diverged", "missing", "nothing scored"])
def test_a_lost_attack_leaves_a_gate_on_worst_undecided(lost):
    """Another attack has a number on each row, and the limit is above it."""
    change = {"leak": {}} if lost == "nothing scored" else {"status": lost, "leak": {}, "error": "x"}

    def changes(row):
        gone = (row.label, row.strength, row.seed) == ("norm", 1, 0)
        return {} if not gone or lost == "missing" else change

    records = summary_records(SPEC, changes=lambda row: {"leak": {"train": block(0.75)}, **changes(row)}, alone=0.7)
    if lost == "missing":
        del records[next(row.key for row in list_trials(SPEC) if (row.label, row.strength, row.seed) == ("norm", 1, 0))]
    limits = {"worst": 0.9, "mc": 0.9}
    found = summarize(build_manifest(SPEC), records, out="", limits=RunLimits(max_leak=limits))
    assert {gate.gate: gate.holds for gate in found.gates} == {"max-leak worst": None, "max-leak mc": True}
    failed = summarize(build_manifest(SPEC), records, out="", limits=RunLimits(max_leak={"worst": 0.6}))
    assert failed.gates[0].holds is False


def test_the_share_of_a_class_that_is_known():
    truth = torch.tensor([0] * 300 + [1] * 131 + [-1] * 10)
    known = torch.tensor([*range(40), *range(300, 340)])
    assert share_of_class(truth, known) == pytest.approx(40 / 131)
    few = torch.tensor([0, 300, 301])
    assert share_of_class(truth, few) == pytest.approx(3 / 431), "two of 131 may be luck"
    assert share_of_class(torch.rand(10), known[:2]) == share_of_class(truth, known[:0]) == 0.0


@pytest.mark.parametrize(
    ("scores", "constant"),
    [
        (np.zeros((4, 2)), True),
        (np.full((4, 2), 1e-9), True),
        (np.array([[0.0, 1.0], [0.0, 1.0 + 1e-8]]), True),
        (np.array([[1e-9, 0.0], [2e-9, 0.0]]), False),
        (np.array([[0.0, 1.0], [0.0, 0.99]]), False),
    ],
)
def test_scores_are_constant_but_for_rounding(scores, constant):
    assert is_constant(scores) is constant


def test_small_differences_of_scores_that_tell_labels_are_no_constant():
    """Gradients of text differ by far less than their size, and rank labels all the same."""
    labels = torch.arange(200) % 2
    rows = {"headline": "auc", "exclude": torch.arange(0), "seed": 0, "known": "train"}
    for differences, is_alarm in ((labels, False), (torch.rand(200, generator=torch.Generator().manual_seed(0)), True)):
        scores = torch.stack([torch.ones(200).double(), 1 + 1e-9 * differences.double()], dim=1)
        block = score(Guess({"train": scores}), GroundTruth({"train": labels}), **rows)["train"]
        assert block.constant is is_alarm


def test_the_scorer_says_so():
    truth = GroundTruth({"train": torch.tensor([0, 1] * 50)})
    for scores in (torch.ones(100, 2), torch.rand(100, 2)):
        found = score(Guess({"train": scores}), truth, headline="auc", exclude=torch.arange(12), seed=0)["train"]
        assert (found.constant, found.known_of_class) == (len(scores.unique()) == 1, 0.12)


def with_mountable(*names):
    changes = {"mountable": list(names)}
    records = summary_records(SPEC, changes=lambda row: {"leak": {"train": block(0.75)}, **changes}, alone=0.7)
    return summarize(build_manifest(SPEC), records, out="", limits=RunLimits(max_leak={"worst": 0.9, "mc": 0.9}))


def test_a_gate_on_worst_tells_which_attacks_it_is_not_about():
    partly, whole = with_mountable("mc", "norm", "fusion", "cluster"), with_mountable("mc", "norm")
    assert (partly.mountable, len(partly.not_run), whole.mountable, whole.not_run) == (4, 2, 2, [])
    for summary, why in ((partly, "holds, but 2 attacks that"), (whole, "holds, ")):
        assert [gate.holds for gate in summary.gates] == [True, True]
        assert any(f"GATE max-leak worst 0.9: {why}" in line for line in list_remarks(summary))
        assert any("GATE max-leak mc 0.9: holds, upper" in line for line in list_remarks(summary))


def test_a_defense_is_recommended_only_with_all_attacks():
    assert any("only 2 of the 4" in line for line in with_mountable(
        "mc", "norm", "fusion", "cluster").verdict)  # fmt: skip
    assert not any("None of the defenses is recommended" in line for line in with_mountable("mc", "norm").verdict)
