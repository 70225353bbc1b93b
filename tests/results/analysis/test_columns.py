"""Of several columns of one party the strongest is chosen on one half of the rows and scored on the other."""

import csv
import io

import msgspec
import numpy as np
import pytest

from vflsec.report import table
from vflsec.report.columns import as_csv
from vflsec.results.analysis.choosing import choose_column, group_columns
from vflsec.results.analysis.summary import summarize
from vflsec.results.records.manifest import AttackEntry, BaselineEntry, Manifest, Provenance, RowEntry, RunLimits
from vflsec.results.records.schema import AttackRun, BaselineResult, Block, Result


def block(value, halves=None, metric="auc", chance=0.5):
    halves = halves or (value, value)
    return Block(metrics={metric: value}, ci95_rows=(value - 0.02, value + 0.02), chance=chance, n=1000, halves=halves)


def of(**leaks):
    return {(name, "test"): {0: found if isinstance(found, Block) else block(found)} for name, found in leaks.items()}


def test_the_largest_gain_beyond_alone_is_the_strongest_and_not_the_largest_leak():
    choice, leak, alone = choose_column(of(known=0.96, secret=0.9), of(known=0.95, secret=0.5))
    assert choice == [("secret", "test")]
    assert (leak[0].headline, alone[0].headline) == (0.9, 0.5)


def test_each_half_scores_what_the_other_has_chosen():
    """Column a is lucky on the first half and b on the second: their mean on the other halves is without luck."""
    leaks = of(a=block(0.65, (0.8, 0.5)), b=block(0.65, (0.5, 0.8)))
    choice, leak, alone = choose_column(leaks, of(a=0.5, b=0.5))
    assert choice == [("a", "test"), ("b", "test")]
    assert (leak[0].headline, alone[0].headline) == (0.5, 0.5)


def test_of_many_columns_that_leak_nothing_none_seems_to():
    rng, found = np.random.default_rng(0), []
    for _ in range(300):
        halves = 0.5 + 0.02 * rng.normal(size=(23, 2))
        leaks = of(**{f"c{k}": block(float(own.mean()), tuple(own.tolist())) for k, own in enumerate(halves)})
        found.append(choose_column(leaks, of(**{f"c{k}": 0.5 for k in range(23)}))[1][0].headline)
    assert np.mean(found) == pytest.approx(0.5, abs=3 * 0.02 / np.sqrt(600))
    assert np.mean(found) < 0.5 + 0.02, "the largest of 23 would be .527"


def test_columns_of_different_measures_are_compared_by_their_gain():
    category = block(0.9, metric="accuracy", chance=0.7)
    choice, leak, _ = choose_column(of(number=0.7, category=category), of(number=0.5, category=0.7))
    assert choice == [("category", "test")]
    assert leak[0].metric == "accuracy"
    choice, leak, _ = choose_column(of(number=0.9, category=category), of(number=0.5, category=0.7))
    assert choice == [("number", "test")]


def test_without_a_baseline_the_gain_is_beyond_chance():
    leaks = of(a=0.8, b=block(0.85, metric="accuracy", chance=0.8))
    assert choose_column(leaks, {name: {} for name in leaks})[0] == [("a", "test")]


LEAKS = {"age": (0.6, 0.55), "pay": (0.91, 0.6), "town": (0.58, 0.5)}


@pytest.fixture
def evaluated():
    """Two attacks on three columns of a bank, of which one leaks, and their baselines: manifest and records."""
    shared = {"method": "fedsplitnn", "seed": 0}
    attacks, rows, baselines, records = [], [], [], {}
    for name in ("attribute", "attribute-fusion"):
        for column, (leak, alone) in LEAKS.items():
            label, target = f"{name}:column={column}", f"attribute {column}"
            above = 140000.0 if column == "pay" else None
            attacks.append(
                AttackEntry(label=label, name=name, target=target, victim="passive_1", column=column, above=above)
            )
            rows.append(RowEntry(**shared, defense="none", strength=0.0, attack=label, key=label))
            baselines.append(BaselineEntry(**shared, label=label, target=target, key=f"alone {label}"))
            how = AttackRun(name=name, options={"column": column}, repr=label)
            own = block(leak - 0.01 * (name == "attribute"))
            utility = block(0.8)
            records[label] = Result(
                **shared, key=label, cell="c", defenses=[], adversary="active", attack=how, status="ok",
                leak={"test": own}, utility=utility,
            )  # fmt: skip
            records[f"alone {label}"] = BaselineResult(
                **shared, key=f"alone {label}", adversary="active", attack=how, leak={"test": block(alone)}
            )
    manifest = Manifest(
        dataset="d", adversary="active", seeds=1, target=None, selected_on_test=False, attacks=attacks, rows=rows,
        baselines=baselines, settings={}, names={"passive_1": "bank"},
        provenance=Provenance(time="", command=[], versions={}, commit=None, sources={}, cards={}),
    )  # fmt: skip
    return manifest, records


def summary_of(evaluated, **limits):
    return summarize(*evaluated, out="", limits=RunLimits(max_leak=limits))


def test_the_headline_names_the_column_that_leaks(evaluated):
    summary = summary_of(evaluated)
    (worst,) = summary.worst
    assert (worst.target, worst.choice) == ("attribute", "attribute-fusion:column=pay")
    assert (worst.victim, worst.column, worst.above, worst.among) == ("passive_1", "pay", 140000.0, 3)
    assert (worst.leak.mean, worst.leak.alone, worst.leak.advantage) == pytest.approx((0.91, 0.6, 0.31))
    assert [(p.attack, p.choice) for p in summary.points] == [
        ("attribute", "attribute:column=pay"), ("attribute-fusion", "attribute-fusion:column=pay"),
    ]  # fmt: skip
    assert len(summary.columns) == 3 + 6, "a headline of each column, and every attack"


def test_every_format_says_whose_column_by_which_measure_and_chance(evaluated):
    summary = summary_of(evaluated)
    title = "strongest attribute of 3 columns of passive_1 (leak: AUC, .500 by chance)"
    for text in (table.show(summary).markdown(), table.show(summary).latex().replace("\\", "")):
        assert title in text
        assert "passive_1, above its median 140000" in text
    assert "pay of passive_1, the strongest" in summary.verdict[0]
    assert "AUC .91" in summary.verdict[0]
    assert ".50 by chance" in summary.verdict[0]
    lines = csv.DictReader(io.StringIO(as_csv(summary)))
    assert {(line["victim"], line["column"], line["above"]) for line in lines} == {
        ("passive_1", "pay", "140000.0"), ("passive_1", "age", ""), ("passive_1", "town", ""),
    }  # fmt: skip
    point = msgspec.to_builtins(summary)["points"][0]
    assert (point["victim"], point["column"], point["above"]) == ("passive_1", "pay", 140000.0)


def test_a_terminal_names_the_next_columns_in_one_line(evaluated):
    (line,) = table.list_next(summary_of(evaluated))
    assert line == "COLUMNS of passive_1, leak and alone: pay .910 (.600), town .580 (.500), age .600 (.550)"
    assert len(table.show(summary_of(evaluated)).tables) == 1


@pytest.mark.parametrize(("name", "worst"), [("worst", 0.93), ("attribute", 0.92), ("attribute:column=age", 0.61)])
def test_a_limit_on_an_attack_covers_each_of_its_columns(evaluated, name, worst):
    (gate,) = summary_of(evaluated, **{name: 0.5}).gates
    assert (gate.holds, gate.worst) == (False, pytest.approx(worst))


def test_a_single_column_has_no_headline_of_several(evaluated):
    manifest, _ = evaluated
    assert group_columns(manifest.attacks[:1]) == {}
    assert group_columns(manifest.attacks)["attribute"].keys() == {"attribute", "attribute-fusion"}
    entry = msgspec.structs.replace(manifest.attacks[0], label="attribute:victim=a,column=age,folds=3")
    other = msgspec.structs.replace(manifest.attacks[1], label="attribute:victim=a,column=pay,folds=3")
    assert list(group_columns([entry, other])["attribute"]) == ["attribute:victim=a,folds=3"]
