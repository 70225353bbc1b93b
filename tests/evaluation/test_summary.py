"""From records to points: the arithmetic on records whose numbers are chosen by hand."""

import copy
import json

import msgspec
import pytest

from vflsec.evaluation import spec as specs
from vflsec.evaluation.cap import cap
from vflsec.evaluation.plan import priors, rows
from vflsec.evaluation.spec import AttackSpec
from vflsec.evaluation.statistics import over_seeds
from vflsec.evaluation.summary import summarize

SPEC = specs.read({"dataset": "toy", "defenses": [{"name": "iso"}], "strengths": [1, 5], "seeds": 3})
LEAK = {0.0: 0.80, 1.0: 0.70, 5.0: 0.60}
UTILITY = {0.0: 0.90, 1.0: 0.85, 5.0: 0.75}
JITTER = (-0.02, 0.0, 0.02)


def block(value, accuracy=0.5, n=100):
    metrics = {"auc": value, "accuracy": accuracy, "f1": 0.1, "ks": 0.2}
    return {"metrics": metrics, "ci95_rows": [value - 0.05, value + 0.05], "chance": 0.5, "n": n}


def make_records(spec=SPEC, *, attack_fold=0.7, logistic_fold=0.6, mc_alone_fold=0.5):
    found = {}
    for row in rows(spec):
        value = LEAK[row.strength] + JITTER[row.seed]
        found[row.key] = {
            "kind": "result",
            "status": "ok",
            "attack": {"name": row.attack.name},
            "utility": block(UTILITY[row.strength] - JITTER[row.seed]),
            "leak": {"test": block(value, accuracy=value - 0.1), "train": block(value + 0.03)},
            "fold": attack_fold,
            "budget": {"updates": 600},
            "nbytes": 1000,
            "seconds": {"train": 1.0, "attack": 0.5},
        }
    for prior in priors(spec):
        alone, fold = (0.55, mc_alone_fold) if prior.attack.name == "mc" else (0.58, logistic_fold)
        found[prior.key] = {
            "kind": "prior",
            "status": "ok",
            "attack": {"name": prior.attack.name},
            "leak": {"test": block(alone + JITTER[prior.seed]), "train": block(alone)},
            "fold": fold,
            "budget": {},
        }
    return found


def summary_of(records=None, spec=SPEC, **limits):
    return summarize(
        spec,
        make_records() if records is None else records,
        out="run",
        max_leak=limits.get("max_leak", {}),
        min_utility=limits.get("min_utility"),
    )


def keys_of(strength, seed):
    return [row.key for row in rows(SPEC) if (row.strength, row.seed) == (strength, seed)]


def test_points_are_means_over_seeds_with_t_intervals():
    point = summary_of().points[1]
    assert (point.method, point.defense, point.strength, point.attack, point.status) == (
        "fedsplitnn",
        "iso",
        1.0,
        "mc",
        "ok",
    )
    expected = over_seeds([0.68, 0.70, 0.72])
    assert point.leak.mean == pytest.approx(expected.mean)
    assert point.leak.ci95 == pytest.approx((expected.low, expected.high))
    assert point.leak_train.mean == pytest.approx(0.73)
    assert point.leak.accuracy == pytest.approx(0.60)
    assert (point.leak.n, point.leak.chance, point.nbytes) == (3, 0.5, 1000)
    assert point.seconds == pytest.approx(1.5)


def test_alone_is_chosen_by_the_adversarys_own_folds():
    assert summary_of().points[0].leak.alone == pytest.approx(0.58), "the logistic regression's folds were better"
    weaker = make_records(logistic_fold=0.4)
    assert summary_of(weaker).points[0].leak.alone == pytest.approx(0.55)


def test_advantage_is_paired_by_seed():
    leak = summary_of().points[0].leak
    assert leak.advantage == pytest.approx(0.22)
    assert leak.advantage_ci95 == pytest.approx((0.22, 0.22)), "attack and alone share their seed, so nothing is left"


def test_worst_may_throw_the_model_away():
    assert [p.leak.mean for p in summary_of().worst] == pytest.approx([0.80, 0.70, 0.60])
    by_alone = summary_of(make_records(logistic_fold=0.9)).worst
    assert [p.leak.mean for p in by_alone] == pytest.approx([0.58] * 3)
    assert {p.choice for p in by_alone} == {"alone:logistic"}


def test_worst_is_chosen_by_folds_over_all_seeds():
    """One seed whose folds favour the other candidate does not change the choice, which the mean makes."""
    records = make_records()
    for key in keys_of(1.0, 0):
        records[key] = {**records[key], "fold": 0.45}  # the other two have 0.7, the logistic regression 0.6
    assert summary_of(records).worst[1].choice == "mc"


def test_worst_is_never_below_alone():
    records = make_records(attack_fold=0.9)  # the folds favour the federated model, which was trained on their labels
    for key, record in records.items():
        if record["kind"] == "result":
            records[key] = {**record, "leak": {"test": block(0.51), "train": block(0.51)}}
    worst = summary_of(records).worst[1]
    assert (worst.leak.mean, worst.choice) == (pytest.approx(0.58), "alone:logistic")
    assert worst.leak.advantage == pytest.approx(0.0)


def test_without_folds_worst_is_the_largest_leak():
    records = make_records(attack_fold=None, logistic_fold=None, mc_alone_fold=None)
    summary = summary_of(records)
    assert [(p.choice, p.leak.mean) for p in summary.worst] == [
        ("mc", pytest.approx(0.80)),
        ("mc", pytest.approx(0.70)),
        ("mc", pytest.approx(0.60)),
    ]
    assert summary.points[0].leak.alone == pytest.approx(0.58), "the logistic regression"


def test_an_attack_that_folds_could_not_test_is_not_passed_over():
    spec = msgspec.structs.replace(SPEC, attacks=(AttackSpec(name="mc"), AttackSpec(name="logistic")))
    records = make_records(spec)
    for row in rows(spec):
        if row.label == "logistic":
            leak = {"test": block(0.95), "train": block(0.95)}
            records[row.key] = {**records[row.key], "fold": None, "leak": leak}
    assert {p.choice for p in summary_of(records, spec).worst} == {"logistic"}


def test_worst_shows_what_happened_to_every_attack():
    spec = msgspec.structs.replace(SPEC, attacks=(AttackSpec(name="mc"), AttackSpec(name="logistic")))
    records = make_records(spec)
    for row in rows(spec):
        if row.label == "logistic" and row.strength == 1.0:
            records[row.key] = {**records[row.key], "status": "error", "leak": None}
    summary = summary_of(records, spec, max_leak={"worst": 1.0})
    assert next(p for p in summary.worst if p.strength == 1.0).statuses == {"error": 3}
    assert summary.gates[0].holds is None


def test_an_attack_on_training_rows_only_is_judged_on_these():
    records = make_records()
    for key, record in records.items():
        records[key] = {**record, "leak": {"train": record["leak"]["train"]}}
    summary = summary_of(records, max_leak={"mc": 0.1})
    assert {p.leak.rows for p in summary.points} == {"train"}
    assert all(p.leak == p.leak_train for p in summary.points)
    assert summary.cap[0].value is not None
    assert summary.points[1].leak_train.mean == pytest.approx(0.73)
    assert summary.gates[0].holds is False


def test_the_only_survivor_of_several_seeds_has_no_interval():
    records = make_records()
    for seed in (0, 1):
        for key in keys_of(1.0, seed):
            records[key] = {**records[key], "status": "diverged", "utility": None, "leak": None}
    leak = summary_of(records).points[1].leak
    assert (leak.n, leak.ci95, leak.interval) == (1, (None, None), "none")


def test_notes_say_what_a_reader_must_know():
    spec = specs.read({"dataset": "toy", "train": {"select": "paper_best_on_test"}, "aux": {"folds": 0}})
    notes = summary_of({}, spec).notes
    assert "chosen on TEST rows" in notes[0]
    assert notes[1].startswith("no folds")


def test_what_trainings_noted_is_told_once():
    records = {
        key: {**record, "method": "fedsplitnn", "notes": ["too narrow"]} for key, record in make_records().items()
    }
    assert summary_of(records).notes == ["fedsplitnn: too narrow"]


def test_cap_is_the_mean_of_each_seeds_cap_over_the_defended_strengths():
    (found,) = summary_of().cap
    by_seed = [cap([0.85 - j, 0.75 - j], [0.70 + j, 0.60 + j]) for j in JITTER]
    assert found.value == pytest.approx(sum(by_seed) / 3)
    assert found.ci95 == pytest.approx(over_seeds(by_seed)[1:3])
    calibrated = [cap([0.85 - j, 0.75 - j], [0.12, 0.02]) for j in JITTER]
    assert found.calibrated == pytest.approx(sum(calibrated) / 3)
    accuracy = [cap([0.85 - j, 0.75 - j], [0.60 + j, 0.50 + j]) for j in JITTER]
    assert found.accuracy_value == pytest.approx(sum(accuracy) / 3)


def test_a_guess_of_one_class_takes_the_accuracy_out_of_cap_and_nothing_else():
    records = make_records()
    (key,) = keys_of(5.0, 1)
    blocks = {split: {**block, "one_class": True} for split, block in records[key]["leak"].items()}
    records[key] = {**records[key], "leak": blocks}
    (before,), (found,) = summary_of().cap, summary_of(records).cap
    assert found.accuracy_value is None
    assert found.note == "no CAP (accuracy): 1 cells guess one class"
    assert (found.value, found.calibrated, found.ci95) == (before.value, before.calibrated, before.ci95)
    assert [p.leak.one_class for p in summary_of(records).points] == [0, 0, 1]


def test_a_diverged_seed_gives_a_status_and_no_cap():
    records = make_records()
    for key in keys_of(5.0, 1):
        records[key] = {**records[key], "status": "diverged", "utility": None, "leak": None}
    summary = summary_of(records)
    point = summary.points[2]
    assert (point.status, point.statuses, point.leak.n) == ("diverged", {"ok": 2, "diverged": 1}, 2)
    assert summary.cap[0].value is None
    assert summary.cap[0].note == "1 cells gave no number on test rows"
    assert summary.worst[2].statuses == {"ok": 2, "diverged": 1}


def test_a_point_with_nothing_has_no_number_at_all():
    records = make_records()
    for seed in range(3):
        for key in keys_of(5.0, seed):
            records[key] = {**records[key], "status": "collapsed", "utility": None, "leak": None}
    point = summary_of(records).points[2]
    assert (point.status, point.leak.mean, point.utility.mean, point.leak.alone, point.nbytes) == (
        "collapsed",
        None,
        None,
        None,
        None,
    )


def test_missing_results_are_said():
    records = make_records()
    del records[keys_of(1.0, 0)[0]]
    assert summary_of(records).points[1].statuses == {"ok": 2, "missing": 1}


def test_an_unconverged_attack_keeps_its_number_and_says_so():
    records = make_records()
    key = keys_of(1.0, 0)[0]
    records[key] = {**records[key], "status": "unconverged"}
    point = summary_of(records).points[1]
    assert (point.status, point.leak.n) == ("unconverged", 3)


def test_one_seed_falls_back_to_rows():
    spec = specs.read({"dataset": "toy", "defenses": [{"name": "iso"}], "strengths": [1], "seeds": 1})
    point = summary_of(make_records(spec), spec).points[0]
    assert point.leak.interval == "rows"
    assert point.leak.ci95 == pytest.approx((0.73, 0.83))
    assert point.leak.advantage_ci95 == (None, None)


@pytest.mark.parametrize(
    ("limit", "holds"),
    [(0.80, True), (0.73, False)],  # the train rows' interval reaches 0.73 + t * s / sqrt(3) = 0.7797
)
def test_leak_gate_takes_the_far_end_on_the_worse_rows(limit, holds):
    (gate,) = summary_of(max_leak={"mc": limit}).gates
    assert gate.holds is holds
    assert gate.worst == pytest.approx(over_seeds([0.71, 0.73, 0.75]).high)
    assert gate.at == "fedsplitnn iso:1", "the undefended row is not what the gate is about"


def test_a_gate_on_worst_is_one_on_every_attack():
    """Folds may choose the logistic regression where an attack infers more; a limit must not hold for that."""
    records = make_records(logistic_fold=0.9)
    assert {p.choice for p in summary_of(records).worst} == {"alone:logistic"}
    (gate,) = summary_of(records, max_leak={"worst": 0.7}).gates
    assert gate.holds is False
    assert gate.worst == pytest.approx(over_seeds([0.71, 0.73, 0.75]).high)


def test_utility_gate_takes_the_near_end():
    low = over_seeds([0.77, 0.75, 0.73]).low
    assert [summary_of(min_utility=limit).gates[0].holds for limit in (low - 0.01, low + 0.01)] == [True, False]


def test_a_gate_on_what_gave_no_number_is_undecided():
    records = make_records()
    key = keys_of(5.0, 0)[0]
    records[key] = {**records[key], "status": "diverged", "utility": None, "leak": None}
    assert summary_of(records, max_leak={"mc": 0.99}).gates[0].holds is None
    assert summary_of(records, max_leak={"mc": 0.1}).gates[0].holds is False
    assert summary_of({}, max_leak={"mc": 0.99}).gates[0].holds is None


def test_records_are_not_changed():
    records = make_records()
    before = copy.deepcopy(records)
    summary_of(records)
    assert json.dumps(records) == json.dumps(before)
