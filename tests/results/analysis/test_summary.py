"""From records to points: the arithmetic on records whose numbers are chosen by hand."""

import copy

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from scipy import stats

from tests.results.analysis.invariants import check_report
from tests.results.analysis.made import made_baseline, made_result
from vflsec.report.formats import write_status
from vflsec.report.table import list_remarks
from vflsec.results.analysis.groups import summarize_budget
from vflsec.results.analysis.intervals import SHARED, find_detectable, find_few
from vflsec.results.analysis.scores import cap
from vflsec.results.analysis.summary import summarize
from vflsec.results.analysis.verdict import name_few
from vflsec.results.records.manifest import RunLimits
from vflsec.results.records.schema import Block
from vflsec.results.statistics import GROUPS, SHARE, bound_interval, bound_over_seeds, solve_mean
from vflsec.run import spec as specs
from vflsec.run.describe import build_manifest
from vflsec.run.plan import list_baselines, list_trials
from vflsec.run.spec import AttackSpec

SPEC = specs.read({"dataset": "toy", "defenses": [{"name": "iso"}], "strengths": [1, 5], "seeds": 3})
LEAK = {0.0: 0.80, 1.0: 0.70, 5.0: 0.60}
UTILITY = {0.0: 0.90, 1.0: 0.85, 5.0: 0.75}
JITTER = (-0.02, 0.0, 0.02)


def block(value, accuracy=0.5, n=100, apart=0.0):
    """A block whose halves differ by twice ``apart``."""
    metrics = {"auc": value, "accuracy": accuracy, "f1": 0.1, "ks": 0.2}
    halves = (value + apart, value - apart)
    ends, without = (value - 0.05, value + 0.05), (value,) * GROUPS  # whose rows are all alike
    return Block(metrics=metrics, ci95_rows=ends, chance=0.5, n=n, halves=halves, without=without)


def ends_of(values, bounds=SHARE):
    """The interval over seeds whose rows are all alike."""
    mean, low, _, _ = bound_over_seeds(values)
    return bound_interval(mean, mean - low, bounds)


def make_records(spec=SPEC, *, attack_fold=0.7, logistic_fold=0.6, mc_alone_fold=0.5):
    found = {}
    for row in list_trials(spec):
        value = LEAK[row.strength] + JITTER[row.seed]
        found[row.key] = made_result(
            method=row.method,
            seed=row.seed,
            utility=block(UTILITY[row.strength] - JITTER[row.seed]),
            leak={"test": block(value, accuracy=value - 0.1), "train": block(value + 0.03)},
            fold=attack_fold,
            budget={"updates": 600},
            nbytes=1000,
            seconds={"train": 1.0, "attack": 0.5},
        )
    for baseline in list_baselines(spec):
        alone, fold = (0.55, mc_alone_fold) if baseline.attack.name == "mc" else (0.58, logistic_fold)
        found[baseline.key] = made_baseline(
            leak={"test": block(alone + JITTER[baseline.seed]), "train": block(alone)}, fold=fold
        )
    return found


def summary_of(records=None, spec=SPEC, *, contrived=False, **limits):
    """The summary, checked as any report is, unless its halves differ by more than its intervals allow."""
    found = summarize(
        build_manifest(spec),
        make_records() if records is None else records,
        out="run",
        limits=RunLimits(**limits),
    )
    if not contrived:
        check_report(found)
    return found


def keys_of(strength, seed):
    return [row.key for row in list_trials(SPEC) if (row.strength, row.seed) == (strength, seed)]


def test_points_are_means_over_seeds_with_t_intervals():
    point = summary_of().points[1]
    assert (point.method, point.defense, point.strength, point.attack, point.status) == (
        "fedsplitnn",
        "iso",
        1.0,
        "mc",
        "ok",
    )
    assert point.leak.mean == pytest.approx(0.70)
    assert point.leak.ci95 == pytest.approx(ends_of([0.68, 0.70, 0.72]))
    assert point.leak_train.mean == pytest.approx(0.73)
    assert point.leak.accuracy == pytest.approx(0.60)
    assert (point.leak.n, point.leak.chance, point.nbytes) == (3, 0.5, 1000)
    assert point.seconds == pytest.approx(1.5)


def test_bits_are_those_beyond_alone_paired_by_seed():
    records = make_records()

    def with_bits(record, **metrics):
        leak = {split: replace(own, metrics=own.metrics | metrics) for split, own in record.leak.items()}
        return replace(record, leak=leak)

    for row in list_trials(SPEC):
        known = {"right@0.99": 1.0} if row.seed == 2 else {}
        bits = {"cross_entropy": 0.5 + 3 * JITTER[row.seed], "known@0.99": 0.1 * row.seed, **known}
        records[row.key] = with_bits(records[row.key], **bits)
    before = summary_of(records).points[0].leak
    assert (before.bits, before.bits_ci95) == (None, (None, None)), "records of alone of an earlier version"
    for baseline in list_baselines(SPEC):
        own = 0.75 + JITTER[baseline.seed]
        records[baseline.key] = with_bits(records[baseline.key], cross_entropy=own)
    leak = summary_of(records).points[0].leak
    expected = bound_over_seeds([0.25 - 2 * j for j in JITTER])
    assert leak.bits == pytest.approx(expected.mean)
    assert leak.bits_ci95 == pytest.approx((expected.low, expected.high))
    assert leak.others["known@0.99"] == pytest.approx(0.1)
    assert leak.others["right@0.99"] == 1.0, "over the seeds that know any row"
    assert leak.alone_others["cross_entropy"] == pytest.approx(0.75)


def with_metrics(record, test, train=None):
    changed = {"test": test, "train": test if train is None else train}
    leak = {split: replace(own, metrics=own.metrics | changed[split]) for split, own in record.leak.items()}
    return replace(record, leak=leak)


def test_alone_is_the_strongest_baseline_in_each_metric_by_the_mean_over_seeds():
    """mc has the lower AUC; it finds more rows surely, and is luckier in none but seed 0 of the cross-entropy."""
    records = make_records()
    for row in list_trials(SPEC):
        records[row.key] = with_metrics(records[row.key], {"tpr@0.01": 0.07, "cross_entropy": 0.5})
    for baseline in list_baselines(SPEC):
        s, is_mc = baseline.seed, baseline.attack.name == "mc"
        rare = {"tpr@0.01": 0.08 + JITTER[s] if is_mc else 0.05, "known@0.99": 0.1 if is_mc else 0.3}
        sure = {"right@0.99": 1.0 if is_mc else 0.9, "cross_entropy": (0.4, 0.9, 0.9)[s] if is_mc else 0.7}
        records[baseline.key] = with_metrics(records[baseline.key], rare | sure, {"tpr@0.01": 0.02 if is_mc else 0.03})
    summary = summary_of(records)
    point = summary.points[0]
    assert point.leak.alone == pytest.approx(0.58), "of the AUC"
    expected = {"tpr@0.01": 0.08, "known@0.99": 0.3, "right@0.99": 0.9, "cross_entropy": 0.7}
    assert {name: point.leak.alone_others[name] for name in expected} == pytest.approx(expected)
    assert point.leak_train.alone_others["tpr@0.01"] == pytest.approx(0.03), "of two rows each has its best"
    assert point.leak.bits == pytest.approx(0.2), "beyond the same cross-entropy"


def test_a_headline_that_is_alone_has_no_more_and_no_less_than_alone():
    records = make_records()
    for row in list_trials(SPEC):
        own = with_metrics(records[row.key], {"tpr@0.01": 0.01, "cross_entropy": 0.9})
        records[row.key] = replace(own, leak={split: replace_auc(one, 0.5) for split, one in own.leak.items()})
    for baseline in list_baselines(SPEC):
        tpr, bits = (0.08, 0.6) if baseline.attack.name == "mc" else (0.05, 0.7)
        records[baseline.key] = with_metrics(records[baseline.key], {"tpr@0.01": tpr, "cross_entropy": bits})
    for point in summary_of(records).worst:
        assert (point.choice, point.leak.bits, point.leak.bits_ci95) == ("alone", 0.0, (0.0, 0.0))
        own, alone = (
            {name: v for name, v in of.items() if name != "accuracy"}
            for of in (point.leak.others, point.leak.alone_others)
        )
        assert own == alone
        assert own["tpr@0.01"] == pytest.approx(0.08)


def replace_auc(one, value):
    made = block(value)
    return replace(made, metrics=one.metrics | {"auc": value})


def test_alone_is_the_strongest_baseline_on_the_truth_whatever_folds_say():
    for fold in (0.4, 0.9):
        assert summary_of(make_records(mc_alone_fold=fold)).points[0].leak.alone == pytest.approx(0.58)


def test_alone_is_chosen_on_one_half_and_scored_on_the_other():
    """On the first half the logistic regression is ahead and has .50 on the second; on the second mc, with .51."""
    records = make_records()
    for baseline in list_baselines(SPEC):
        own = block(0.54, apart=0.03) if baseline.attack.name == "mc" else block(0.56, apart=0.06)
        records[baseline.key] = replace(records[baseline.key], leak={"test": own})
    leak = summary_of(records).points[0].leak
    assert leak.alone == pytest.approx((0.50 + 0.57) / 2)
    assert leak.alone < 0.56, "the largest of the two has been lucky"


@pytest.mark.long
def test_alone_is_one_value_for_all_methods_defenses_and_attacks():
    spec = msgspec.structs.replace(
        SPEC, methods=("fedsplitnn", "vertical-lr"), attacks=(AttackSpec(name="mc"), AttackSpec(name="logistic"))
    )
    records = make_records(spec)
    summary = summary_of(records, spec)
    assert [p.leak.alone for p in summary.points] == pytest.approx([0.58] * 12)
    for baseline in list_baselines(spec):
        if baseline.method == "vertical-lr" and baseline.attack.name == "mc":
            records[baseline.key] = replace(records[baseline.key], leak={"test": block(0.65), "train": block(0.65)})
    summary = summary_of(records, spec)
    assert {p.leak.alone for p in summary.points} == {0.65}, "the rows of fedsplitnn as well"


def test_an_attack_that_reads_nothing_of_the_federation_gains_nothing_by_it():
    """Halves may choose another baseline than the best on all rows; its own row has advantage 0 all the same."""
    spec = msgspec.structs.replace(SPEC, attacks=(AttackSpec(name="mc"), AttackSpec(name="logistic")))
    summary = summary_of(make_records(spec), spec)
    found = {p.attack: p.leak for p in summary.points if p.strength == 0}
    assert found["logistic"].mean != found["logistic"].alone
    assert (found["logistic"].advantage, found["logistic"].advantage_ci95) == (0, (0, 0))
    assert "logistic" not in {p.choice for p in summary.worst}, "it is part of alone"


def test_advantage_is_paired_by_seed():
    leak = summary_of().points[0].leak
    assert leak.advantage == pytest.approx(0.22)
    assert leak.advantage_ci95 == pytest.approx((0.22, 0.22)), "attack and alone share their seed, so nothing is left"


def test_worst_takes_the_rows_on_which_an_attack_leaks_most():
    worst = summary_of().worst
    assert [p.leak.mean for p in worst] == pytest.approx([0.83, 0.73, 0.63])
    assert {(p.choice, p.leak.rows) for p in worst} == {("mc", "train")}
    assert all(replace(p.leak, p_holm=None) == p.leak_train for p in worst)
    assert [p.leak_test.mean for p in worst] == pytest.approx([0.80, 0.70, 0.60]), "chosen anew on test rows"
    assert [p.leak_test.alone for p in worst] == pytest.approx([0.58] * 3)


def test_worst_may_throw_the_model_away_and_not_joining_has_no_advantage():
    records = make_records(attack_fold=0.9)
    for row in list_trials(SPEC):
        records[row.key] = replace(records[row.key], leak={"test": block(0.51), "train": block(0.51)})
    for point in summary_of(records).worst:
        assert (point.choice, point.leak.mean, point.leak.rows) == ("alone", pytest.approx(0.58), "test")
        assert (point.leak.advantage, point.leak.advantage_ci95) == (0.0, (0.0, 0.0))


def test_worst_is_chosen_on_one_half_of_the_rows_and_scored_on_the_other():
    """On the first half mc leads with .84 and has .76 on the second; there the other leads with .78, .72 on the first.

    mc's .80 on all rows would be the luck of its first half; what is reported is (.76 + .72) / 2.
    """
    spec = msgspec.structs.replace(SPEC, attacks=(AttackSpec(name="mc"), AttackSpec(name="spectral-embedding")))
    records = make_records(spec)
    for row in list_trials(spec):
        leak = block(0.80, apart=0.04) if row.label == "mc" else block(0.75, apart=-0.03)
        records[row.key] = replace(records[row.key], leak={"test": leak})
    point = summary_of(records, spec, contrived=True).worst[0]
    assert (point.choice, point.leak.rows) == ("mc, spectral-embedding", "test")
    assert point.leak.mean == pytest.approx(0.74)
    gap = (0.84 + 0.78) / 2 - 0.74
    assert point.leak.ci95 == pytest.approx((0.74, bound_interval(0.74, gap, SHARE)[1])), (
        "no seed differs; the choice does"
    )
    assert point.leak.others["accuracy"] == pytest.approx(0.5)
    assert point.budget == {}, "two attacks spent it"
    highest = (point.highest, point.highest_attack, point.highest_rows)
    assert highest == (pytest.approx(0.80), "mc", "test"), "which the same rows choose and score"
    single = summary_of(make_records()).worst[0]
    assert (single.highest, single.highest_rows) == (pytest.approx(0.83), "train")


@pytest.mark.parametrize(("picked", "mean"), [("mc", 0.80), ("spectral-embedding", 0.75)])
def test_worst_of_columns_is_at_least_the_pick_of_the_adversary(picked, mean):
    """As above, with R2: crossed halves would give .74, less than either of the two attacks."""
    spec = msgspec.structs.replace(SPEC, attacks=(AttackSpec(name="mc"), AttackSpec(name="spectral-embedding")))
    records = make_records(spec)

    def of_columns(value, apart=0.0):
        return {"test": replace(block(value, apart=apart), metrics={"r2": value})}

    for row in list_trials(spec):
        leak = of_columns(0.80, apart=0.04) if row.label == "mc" else of_columns(0.75, apart=-0.03)
        records[row.key] = replace(records[row.key], leak=leak, fold=0.9 if row.label == picked else 0.5)
    for baseline in list_baselines(spec):
        records[baseline.key] = replace(records[baseline.key], leak=of_columns(0.1), fold=0.1)
    point = summary_of(records, spec, contrived=True).worst[0]
    assert (point.choice, point.leak.rows, point.leak.mean) == (picked, "test", pytest.approx(mean))


def test_halves_that_choose_other_rows_are_held_against_alone_on_these():
    """mc has .84 and .76 on the halves of test rows, .72 and .78 on those of training rows."""
    records = make_records()
    for row in list_trials(SPEC):
        leak = {"test": block(0.80, apart=0.04), "train": block(0.75, apart=-0.03)}
        records[row.key] = replace(records[row.key], leak=leak)
    for baseline in list_baselines(SPEC):
        leak = {"test": block(0.60, apart=0.01), "train": block(0.50, apart=0.02)}
        records[baseline.key] = replace(records[baseline.key], leak=leak)
    leak = summary_of(records, contrived=True).worst[0].leak
    assert (leak.rows, leak.mean) == ("test+train", pytest.approx((0.76 + 0.72) / 2))
    assert leak.alone == pytest.approx((0.59 + 0.52) / 2), "on the same halves of the same rows"


def test_with_one_seed_the_interval_of_worst_is_over_rows_and_covers_the_choice():
    spec = msgspec.structs.replace(
        SPEC, seeds=1, attacks=(AttackSpec(name="mc"), AttackSpec(name="spectral-embedding"))
    )
    records = make_records(spec)
    for row in list_trials(spec):
        leak = block(0.80, apart=0.04) if row.label == "mc" else block(0.75, apart=-0.03)
        records[row.key] = replace(records[row.key], leak={"test": leak})
    leak = summary_of(records, spec, contrived=True).worst[0].leak
    half = 0.05 * 2**0.5  # of half the rows
    margin = (half**2 + half**2) ** 0.5 / 2
    assert leak.ci95 == pytest.approx((0.74 - margin, 0.74 + (margin**2 + 0.07**2) ** 0.5))
    assert leak.interval == "rows"


def test_too_few_rows_to_be_split_are_told():
    records = make_records()
    for key, record in records.items():
        records[key] = replace(record, leak={name: replace(own, halves=None) for name, own in record.leak.items()})
    summary = summary_of(records)
    assert summary.worst[0].leak.mean == pytest.approx(0.83)
    assert summary.notes[-1].startswith("too few rows")


def test_an_attack_that_fails_in_some_seeds_competes_on_those_that_all_have():
    """In seed 2, which is easy, one attack has no number. It leaks more in the others, and is not passed over."""
    spec = msgspec.structs.replace(SPEC, attacks=(AttackSpec(name="mc"), AttackSpec(name="spectral-embedding")))
    records = make_records(spec)
    for row in list_trials(spec):
        if row.label == "spectral-embedding":
            found = {"status": "error", "leak": {}} if row.seed == 2 else {"leak": {"test": block(0.85)}}
        else:
            found = {"leak": {"test": block(0.99 if row.seed == 2 else 0.80)}}
        records[row.key] = replace(records[row.key], **found)
    point = summary_of(records, spec).worst[0]
    assert (point.choice, point.leak.mean, point.leak.n) == ("spectral-embedding", pytest.approx(0.85), 2)
    assert point.statuses == {"ok": 2, "error": 1}
    assert summary_of(records, spec).cap[0].value is None, "CAP needs every cell"


def test_what_the_adversary_would_have_picked_is_a_figure_of_its_own():
    """Its folds favor the weaker attack; the headline does not listen to them."""
    spec = msgspec.structs.replace(SPEC, attacks=(AttackSpec(name="mc"), AttackSpec(name="spectral-embedding")))
    records = make_records(spec)
    for row in list_trials(spec):
        if row.label == "spectral-embedding":
            records[row.key] = replace(records[row.key], fold=0.9, leak={"test": block(0.52), "train": block(0.52)})
    summary = summary_of(records, spec)
    assert [(p.attack, p.choice) for p in summary.worst] == [("worst", "mc")] * 3
    assert [(p.attack, p.choice, p.leak.mean) for p in summary.picked] == [("picked", "spectral-embedding", 0.52)] * 3
    assert not summary_of(make_records(spec, attack_fold=None, logistic_fold=None, mc_alone_fold=None), spec).picked


def test_who_picks_not_to_join_has_the_one_value_of_alone():
    (first, *_) = summary_of(make_records(mc_alone_fold=0.95)).picked  # .55; the regression reaches .58
    assert (first.choice, first.leak.mean, first.leak.advantage) == ("alone", pytest.approx(0.58), 0.0)


def test_picks_are_by_folds_over_all_seeds():
    """One seed whose folds favor the other candidate does not change the pick, which the mean makes."""
    records = make_records()
    for key in keys_of(1.0, 0):
        records[key] = replace(records[key], fold=0.45)  # the other two have 0.7, the logistic regression 0.6
    assert summary_of(records).picked[1].choice == "mc"


def test_worst_shows_which_attacks_gave_no_number():
    spec = msgspec.structs.replace(SPEC, attacks=(AttackSpec(name="mc"), AttackSpec(name="spectral-embedding")))
    records = make_records(spec)
    for row in list_trials(spec):
        if row.label == "spectral-embedding" and row.strength == 1.0:
            records[row.key] = replace(records[row.key], status="error", leak={})
    summary = summary_of(records, spec, max_leak={"worst": 1.0})
    assert next(p for p in summary.worst if p.strength == 1.0).statuses == {"error": 3}
    assert summary.gates[0].holds is None


def test_worst_is_unconverged_only_where_an_attack_that_it_names_is():
    spec = msgspec.structs.replace(SPEC, attacks=(AttackSpec(name="mc"), AttackSpec(name="logistic")))
    for unconverged, statuses in (("logistic", {"ok": 3}), ("mc", {"unconverged": 3})):
        records = make_records(spec)
        for row in list_trials(spec):
            if row.label == unconverged:
                records[row.key] = replace(records[row.key], status="unconverged")
        found = next(p for p in summary_of(records, spec).worst if p.strength == 0.0)
        assert (found.choice, found.statuses) == ("mc", statuses)


def test_an_attack_on_training_rows_only_is_judged_on_these():
    records = make_records()
    for key, record in records.items():
        records[key] = replace(record, leak={"train": record.leak["train"]})
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
            records[key] = replace(records[key], status="diverged", utility=None, leak={})
    leak = summary_of(records).points[1].leak
    assert (leak.n, leak.ci95, leak.interval) == (1, (None, None), "none")


def test_notes_say_what_a_reader_must_know():
    spec = specs.read({"dataset": "toy", "train": {"select": "paper_best_on_test"}, "aux": {"folds": 0}})
    (note,) = summary_of({}, spec).notes
    assert "chosen on TEST rows" in note


def test_attacks_that_could_be_mounted_and_were_not_run_are_told():
    records = make_records()
    for row in list_trials(SPEC):
        records[row.key] = replace(records[row.key], mountable=["mc", "norm"] if row.seed else ["averaging", "mc"])
    assert summary_of(records).not_run == ["averaging", "norm"]


def test_what_trainings_noted_is_told_once():
    records = make_records()
    for row in list_trials(SPEC):
        records[row.key] = replace(records[row.key], notes=["too narrow"])
    assert summary_of(records).notes == ["fedsplitnn: too narrow"]


def test_what_an_attack_does_not_see_is_told_by_defense_and_not_as_an_order_to_the_reader():
    records, way = make_records(), "choose --defense sealed"
    clean = [row for row in list_trials(SPEC) if not row.strength]
    for row in clean:
        records[row.key] = replace(records[row.key], status="unseen", utility=None, leak={}, notes=[way])
    notes = [note for note in summary_of(records, contrived=True).notes if "nothing is sent" in note]
    assert [note.startswith("no defense: ") for note in notes] == [True]
    assert all(row.label in notes[0] for row in clean)
    assert not any(way in note for note in summary_of(records, contrived=True).notes)


def test_cap_is_the_mean_of_each_seeds_cap_over_the_defended_strengths():
    worst, found = summary_of().cap
    assert (worst.attack, found.attack) == ("worst", "mc")
    by_seed = [cap([0.85 - j, 0.75 - j], [0.70 + j, 0.60 + j]) for j in JITTER]
    assert found.value == pytest.approx(sum(by_seed) / 3)
    assert found.ci95 == pytest.approx(ends_of(by_seed))
    calibrated = [cap([0.85 - j, 0.75 - j], [0.12, 0.02]) for j in JITTER]
    assert found.calibrated == pytest.approx(sum(calibrated) / 3)
    accuracy = [cap([0.85 - j, 0.75 - j], [0.60 + j, 0.50 + j]) for j in JITTER]
    assert found.accuracy_value == pytest.approx(sum(accuracy) / 3)


def reaching(alone, utility=UTILITY):
    """The records, where the active party alone reaches ``alone``."""
    records = make_records()
    for row in list_trials(SPEC):
        own = None if row.strength or alone is None else alone - JITTER[row.seed]
        value = utility[row.strength] - JITTER[row.seed]
        records[row.key] = replace(records[row.key], utility=block(value), active_alone=own)
    return records


def test_hypervolume_is_between_the_active_party_alone_and_the_best_undefended_model():
    for one in summary_of(reaching(0.70)).cap:
        kept = [[(0.30 - j) / (0.42 - j), (0.40 - j) / (0.42 - j)] for j in JITTER]  # alone on test rows is .58
        if one.attack == "mc":
            area = [(0.10 * first + 0.05 * second) / 0.20 for first, second in kept]
            assert one.hypervolume_by_seed == pytest.approx(dict(enumerate(area)))
            assert one.hypervolume == pytest.approx(sum(area) / 3)
            margin = stats.t.ppf(0.975, 2) * stats.sem(area)
            assert one.hypervolume_ci95 == pytest.approx(bound_interval(one.hypervolume, margin, SHARE))


def test_a_destroyed_model_has_no_hypervolume_whatever_its_leak():
    dead = summary_of(reaching(0.70, {0.0: 0.9, 1.0: 0.5, 5.0: 0.5})).cap
    assert [one.hypervolume for one in dead] == [0.0, 0.0]
    assert all(one.value > 0.1 and one.calibrated > 0.4 for one in dead), "CAP rewards it"


def test_hypervolume_needs_the_active_party_alone_and_a_gain():
    assert [one.hypervolume for one in summary_of(reaching(None)).cap] == [None, None]
    assert [one.hypervolume for one in summary_of(reaching(0.95)).cap] == [0.0, 0.0], "joining gains nothing"


def test_the_best_undefended_model_is_that_of_any_method():
    spec = msgspec.structs.replace(SPEC, methods=("fedsplitnn", "vertical-lr"))
    records = make_records(spec)
    for row in list_trials(spec):
        own, value = (0.90, 0.75) if row.method == "fedsplitnn" else (0.80, 0.75)
        utility = block(own if not row.strength else value)
        records[row.key] = replace(records[row.key], utility=utility, active_alone=None if row.strength else 0.70)
    found = {one.method: one.hypervolume for one in summary_of(records, spec).cap if one.attack == "mc"}
    assert found["fedsplitnn"] == pytest.approx(found["vertical-lr"]), "the weaker method is not its own ideal"
    assert found["vertical-lr"] < 0.25


def test_the_cap_of_worst_folds_the_headline_of_each_strength():
    """At 1 mc leaks most on training rows, .73; at 5 alone does on test rows."""
    records = make_records()
    for key in [key for seed in range(3) for key in keys_of(5.0, seed)]:
        records[key] = replace(records[key], leak={"test": block(0.51), "train": block(0.51)})
    worst = summary_of(records).cap[0]
    by_seed = [cap([0.85 - j, 0.75 - j], [0.73 + j, 0.58 + j]) for j in JITTER]
    assert worst.value == pytest.approx(sum(by_seed) / 3)
    calibrated = [cap([0.85 - j, 0.75 - j], [0.73 + j - 0.58, 0.0]) for j in JITTER]
    assert worst.calibrated == pytest.approx(sum(calibrated) / 3)


@pytest.mark.long
def test_a_guess_of_one_class_takes_the_accuracy_out_of_cap_and_nothing_else():
    records = make_records()
    (key,) = keys_of(5.0, 1)
    blocks = {split: replace(block, single_class=True) for split, block in records[key].leak.items()}
    records[key] = replace(records[key], leak=blocks)
    (_, before), (worst, found) = summary_of().cap, summary_of(records).cap
    assert found.accuracy_value is None
    assert worst.accuracy_value is None
    assert found.note == "no CAP (accuracy): 1 cell guesses one class"
    assert (found.value, found.calibrated, found.ci95) == (before.value, before.calibrated, before.ci95)
    assert [p.leak.single_class for p in summary_of(records).points] == [0, 0, 1]


def test_a_diverged_seed_gives_a_status_and_no_cap():
    records = make_records()
    for key in keys_of(5.0, 1):
        records[key] = replace(records[key], status="diverged", utility=None, leak={})
    summary = summary_of(records)
    point = summary.points[2]
    assert (point.status, point.statuses, point.leak.n) == ("diverged", {"ok": 2, "diverged": 1}, 2)
    assert summary.cap[0].value is None
    assert summary.cap[1].note == "1 run collapsed or failed, so there is no CAP"
    assert summary.worst[2].statuses == {"ok": 2, "diverged": 1}


def test_alone_is_one_value_for_rows_that_lost_a_seed():
    records = make_records()
    for seed in range(3):
        for key in keys_of(1.0, seed):
            records[key] = replace(records[key], leak={"test": block((0.9, 0.6, 0.6)[seed])})
    for baseline in list_baselines(SPEC):
        records[baseline.key] = replace(records[baseline.key], leak={"test": block((0.7, 0.5, 0.5)[baseline.seed])})
    first = keys_of(1.0, 0)[0]
    records[first] = replace(records[first], status="error", leak={})
    leaks = [p.leak for p in summary_of(records).points]
    assert [leak.alone for leak in leaks] == pytest.approx([1.7 / 3] * 3)
    assert leaks[1].advantage == pytest.approx(0.1), "over the two seeds that are left"


def test_a_point_with_nothing_has_no_number_at_all():
    records = make_records()
    for seed in range(3):
        for key in keys_of(5.0, seed):
            records[key] = replace(records[key], status="collapsed", utility=None, leak={})
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
    records[key] = replace(records[key], status="unconverged")
    point = summary_of(records).points[1]
    assert (point.status, point.leak.n) == ("unconverged", 3)


def test_one_seed_falls_back_to_rows():
    spec = specs.read({"dataset": "toy", "defenses": [{"name": "iso"}], "strengths": [1], "seeds": 1})
    point = summary_of(make_records(spec), spec).points[0]
    assert point.leak.interval == "rows"
    assert point.leak.ci95 == pytest.approx((0.73, 0.83))
    assert point.leak.advantage_ci95 == pytest.approx((0.22, 0.22)), "the same rows, which are all alike"


@pytest.mark.parametrize(
    ("limit", "holds"),
    [(0.80, True), (0.73, False)],  # the train rows' interval reaches 0.73 + t * s / sqrt(3) = 0.7797
)
def test_leak_gate_takes_the_far_end_on_the_worse_rows(limit, holds):
    (gate,) = summary_of(max_leak={"mc": limit}).gates
    assert gate.holds is holds
    assert gate.worst == pytest.approx(ends_of([0.71, 0.73, 0.75])[1])
    assert gate.at == "fedsplitnn, iso 1, by mc on training rows", "the undefended row is not what the gate is about"


def test_a_gate_on_worst_is_one_on_the_headline():
    """Folds favor not joining; a limit must not hold for that."""
    records = make_records(logistic_fold=0.9)
    assert {p.choice for p in summary_of(records).picked} == {"alone"}
    (gate,) = summary_of(records, max_leak={"worst": 0.7}).gates
    assert gate.holds is False
    assert gate.worst == pytest.approx(ends_of([0.71, 0.73, 0.75])[1])


@pytest.mark.long
def test_a_gate_on_worst_fails_where_one_on_an_attack_fails():
    """The headline is scored on halves of the rows, so that an attack may look stronger on all of them."""
    report = summary_of()
    far = max(p.leak.ci95[1] for p in report.points if p.strength > 0)
    for limit in (far - 0.001, far + 0.001):
        named, worst = summary_of(max_leak={"mc": limit, "worst": limit}).gates
        assert not (worst.holds and named.holds is False)


def test_utility_gate_takes_the_near_end():
    low, _ = ends_of([0.77, 0.75, 0.73])
    assert [summary_of(min_utility=limit).gates[0].holds for limit in (low - 0.01, low + 0.01)] == [True, False]


def test_a_gate_on_what_gave_no_number_is_undecided():
    records = make_records()
    key = keys_of(5.0, 0)[0]
    records[key] = replace(records[key], status="diverged", utility=None, leak={})
    assert summary_of(records, max_leak={"mc": 0.99}).gates[0].holds is None
    assert summary_of(records, max_leak={"mc": 0.1}).gates[0].holds is False
    assert summary_of({}, max_leak={"mc": 0.99}).gates[0].holds is None


def test_records_are_not_changed():
    records = make_records()
    before = copy.deepcopy(records)
    summary_of(records)
    assert records == before


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"alone": 0.6}, "alone is"),
        ({"mean": 0.5}, "interval of mc on test"),
        ({"mean": None}, "the headline has no number"),
    ],
)
def test_a_report_that_breaks_a_rule_is_caught(broken, said):
    found = summary_of()
    worst = [msgspec.structs.replace(p, leak=msgspec.structs.replace(p.leak, **broken)) for p in found.worst]
    with pytest.raises(AssertionError, match=said):
        check_report(msgspec.structs.replace(found, worst=worst))


def test_a_report_in_which_not_joining_pays_is_caught():
    found = summary_of()
    worst = [msgspec.structs.replace(p, choice="alone") for p in found.worst]
    with pytest.raises(AssertionError, match="not joining has advantage"):
        check_report(msgspec.structs.replace(found, worst=worst))


@pytest.mark.sampled
@pytest.mark.parametrize("lost", ["missing", "error", "diverged"])
def test_a_lost_baseline_leaves_a_gate_on_the_headline_undecided(lost):
    """*Alone* competes for the headline, so that without all of it a limit cannot hold."""
    records = make_records()
    whole = summary_of(records, max_leak={"worst": 0.99})
    assert (whole.lost, whole.gates[0].holds) == ([], True)
    baseline = next(one for one in list_baselines(SPEC) if one.label == "logistic")
    if lost == "missing":
        del records[baseline.key]
    else:
        records[baseline.key] = replace(records[baseline.key], status=lost, error="x", leak={}, fold=None)
    summary = summary_of(records, max_leak={"worst": 0.99, "mc": 0.99})
    assert summary.lost == ["logistic (1 seed)"]
    assert [gate.holds for gate in summary.gates] == [None, True]
    assert any("LOST without the federation: logistic" in line for line in list_remarks(summary))
    failed = summary_of(records, max_leak={"worst": 0.1})
    assert failed.gates[0].holds is False


def test_a_baseline_that_needs_the_federation_is_not_lost():
    records = make_records()
    baseline = next(one for one in list_baselines(SPEC) if one.label == "logistic")
    records[baseline.key] = replace(records[baseline.key], leak={}, fold=None)
    assert summary_of(records).lost == []


def seen_from(leaks, alone, chance=0.5):
    """By bisection: where an advantage is as large as its interval would be with 80 % power."""
    k, own = solve_mean(len(leaks) - 1, 0.025), sum(alone) / len(alone)
    e2 = stats.sem(np.subtract(leaks, alone)) ** 2
    total = stats.sem(leaks) ** 2 + stats.sem(alone) ** 2
    low, high = 1e-9, 1 - own
    for _ in range(100):
        d = (low + high) / 2
        apart = 1 - stats.norm.ppf(own) / stats.norm.ppf(own + d)
        low, high = (low, d) if d**2 > k**2 * (e2 + apart * SHARED * total) else (d, high)
    return low


@pytest.mark.parametrize("last", [0.82, 0.85])
def test_the_smallest_advantage_that_would_have_been_seen(last):
    leaks, alone = [0.78, 0.80, last], [0.56, 0.58, 0.60]
    pairs = [tuple(map(block, pair)) for pair in zip(leaks, alone, strict=True)]
    assert find_detectable(pairs, 3) == pytest.approx(seen_from(leaks, alone), rel=1e-4)


def test_where_little_is_left_to_be_gained_nothing_smaller_would_have_been_seen():
    pairs = [(block(0.99 - j), block(0.97 + j)) for j in (0.0, 0.02, -0.06)]
    assert find_detectable(pairs, 3) == pytest.approx(1 - np.mean([0.97, 0.99, 0.91]))


@pytest.mark.parametrize(("leak", "alone"), [(1.0, 1.0), (0.9, 1.0), (0.7, 0.7), (1.0, 0.6)])
def test_where_nothing_varies_or_is_left_it_is_not_known_what_would_have_been_seen(leak, alone):
    assert find_detectable([(block(leak), block(alone))] * 3, 3) is None
    assert find_detectable([(block(leak), block(alone))], 1) is None


def test_alone_at_its_end_leaves_nothing_to_be_seen():
    assert find_detectable([(block(0.9 + j), block(1.0)) for j in JITTER], 3) is None
    assert find_detectable([(block(0.9 + j), block(0.999)) for j in JITTER], 3) == pytest.approx(0.001)


def test_not_joining_states_what_the_strongest_attack_would_have_shown():
    records = make_records()
    for row in list_trials(SPEC):
        own = {"test": block(0.51 + JITTER[row.seed]), "train": block(0.40)}
        records[row.key] = replace(records[row.key], leak=own)
    summary = summary_of(records)
    assert {p.choice for p in summary.worst} == {"alone"}
    found = [p.leak.detectable for p in (*summary.worst, *summary.points)]
    assert found == pytest.approx([seen_from([0.49, 0.51, 0.53], [0.56, 0.58, 0.60])] * 6, rel=1e-4)
    assert f"; a gain of {found[0]:.2f} would".replace("0.", ".", 1) in summary.verdict[0]


def test_what_reads_nothing_of_the_federation_detects_nothing():
    spec = msgspec.structs.replace(SPEC, attacks=(AttackSpec(name="logistic"),))
    assert {p.leak.detectable for p in summary_of(make_records(spec), spec, contrived=True).points} == {None}


@pytest.mark.parametrize(("deviation", "few"), [(0.02, "seeds"), (0.4, "rows")])
def test_what_is_too_few_for_any_advantage_to_be_seen(deviation, few):
    """Two seeds that differ hide what the rows of each would show, unless these are too few by themselves."""
    apart = np.linspace(-1, 1, GROUPS) * deviation * np.sqrt(3 / (GROUPS - 1))  # a jackknife of this deviation

    def scored(value):
        return replace(block(value), without=tuple(value + apart))

    pairs = [(scored(0.9), scored(0.7)), (replace(scored(0.6), without=tuple(0.6 - apart)), scored(0.7))]
    assert find_detectable(pairs, 2) == pytest.approx(0.3)
    assert find_few(pairs) == few
    assert find_few(pairs[:1]) == "rows"


def test_two_seeds_that_differ_are_named_as_the_cause():
    spec = msgspec.structs.replace(SPEC, seeds=2)
    records = make_records(spec)
    for row in list_trials(spec):
        records[row.key] = replace(records[row.key], leak={"test": block((0.9, 0.5)[row.seed])})
    summary = summary_of(records, spec, contrived=True)
    assert {p.leak.few for p in summary.points} == {"seeds"}
    assert {p.leak.few for p in summary_of(make_records()).points} == {""}
    assert name_few(summary.points[0].leak) == "only 2 seeds"


def test_cost_and_gain_of_joining_are_paired_by_seed():
    """All utilities share the jitter of their seed, which no difference has; the active party alone has none."""
    records = make_records()
    for row in list_trials(SPEC):
        records[row.key] = replace(records[row.key], active_alone=None if row.strength else 0.8)
    for points in (summary_of(records).points, summary_of(records).worst):
        assert [p.cost for p in points] == pytest.approx([0.0, 0.05, 0.15])
        assert [p.cost_ci95 for p in points] == [pytest.approx((cost, cost)) for cost in (0.0, 0.05, 0.15)]
        assert [p.gain for p in points] == pytest.approx([0.1, 0.05, -0.05])
        gains = [0.85 - jitter - 0.8 for jitter in JITTER]
        assert points[1].gain_ci95 == pytest.approx(ends_of(gains, bounds=(-1.0, 1.0)))
    assert {p.gain for p in summary_of().points} == {None}


def test_a_joint_model_that_is_worse_than_the_active_party_alone_is_marked():
    records = make_records()
    for row in list_trials(SPEC):
        records[row.key] = replace(records[row.key], active_alone=0.8)
    why = {0.0: "", 1.0: "", 5.0: "worse than the active party alone"}
    summary = summary_of(records)
    assert {p.strength: p.useless for p in summary.points} == why
    assert {p.strength: p.useless for p in summary.worst} == why
    assert [write_status(p) for p in summary.worst][1:] == ["ran", f"model {why[5.0]}"]
    assert list(summary.front) == [place for place in summary.front if place.strength < 5]


@pytest.mark.long
def test_a_gate_on_what_could_have_been_overlooked():
    records = make_records()
    worst = max(p.leak.detectable for p in summary_of(records).worst if p.strength > 0)
    gates = [summary_of(records, max_undetected=limit).gates[0] for limit in (worst + 0.001, worst - 0.001)]
    assert [(gate.gate, gate.holds) for gate in gates] == [("max-undetected", True), ("max-undetected", False)]
    assert gates[0].worst == pytest.approx(worst)
    for key in keys_of(1.0, 0):
        records[key] = replace(records[key], status="diverged", leak={}, utility=None)
    assert summary_of(records, max_undetected=0.9).gates[0].holds is None


def test_a_gate_on_what_is_not_known_is_undecided():
    records = make_records()
    for baseline in list_baselines(SPEC):
        records[baseline.key] = replace(records[baseline.key], leak={"test": block(1.0), "train": block(1.0)})
    found = summary_of(records, max_undetected=0.0)
    assert [(gate.gate, gate.worst, gate.holds) for gate in found.gates] == [("max-undetected", None, None)]
    assert "GATE max-undetected 0: UNDECIDED" in "\n".join(list_remarks(found))
    assert "seen from 0.000" not in "\n".join(list_remarks(found))


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([84, None, 6], {"seeds with an alarm": 2, "seeds without": 1, "batches to an alarm": 45}),
        ([1, 1, 7], {"seeds with an alarm": 3, "seeds without": 0, "batches to an alarm": 1}),
        (
            [None, None],
            {"seeds with an alarm": 0, "seeds without": 2, "batches without an alarm": 299.5}
            | {"batches too faint to tell": 0.5},
        ),
    ],
)
def test_alarms_of_all_seeds_are_counted(batches, expected):
    """What else is spent is that of the first seed."""
    budgets = [
        {"candidates": 5 + k}
        | ({"batches to an alarm": n} if n else {"batches without an alarm": 300 - k, "batches too faint to tell": k})
        for k, n in enumerate(batches)
    ]
    assert summarize_budget(budgets) == {"candidates": 5} | expected


def test_without_an_alarm_the_budget_is_that_of_the_first_seed():
    assert summarize_budget([{"updates": 600}, {"updates": 300}]) == {"updates": 600}
    assert summarize_budget([]) == {}
