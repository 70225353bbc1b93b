"""Forecasts of time against sums worked out by hand, and the shapes of trainings."""

import msgspec
import pytest

from vflsec.results.records.schema import AttackRun, BaselineResult, Result
from vflsec.run import engine
from vflsec.run import spec as specs
from vflsec.run.forecast import describe_networks, forecast_time, read_past_results
from vflsec.run.store import Store

SPEC = {"dataset": "toy", "attacks": ["mc", "direction"], "defenses": ["iso:lambda=1"], "seeds": 2}


def result(train, attack, name, defenses=(), status="ok"):
    run = AttackRun(name=name, options={}, repr=name)
    return Result(
        key="k", cell="c", method="fedsplitnn", defenses=list(defenses), seed=0, adversary="passive_1", attack=run,
        status=status, seconds={"train": train, "attack": attack},
    )  # fmt: skip


def alone(attack, name):
    run = AttackRun(name=name, options={}, repr=name)
    return BaselineResult(
        key="k", method="fedsplitnn", seed=0, adversary="passive_1", attack=run, seconds={"attack": attack}
    )


def test_a_forecast_sums_medians_of_past_trainings_and_attacks():
    todo = engine.plan(specs.read(SPEC), None)
    past = [result(1, 10, "mc"), result(3, 20, "mc"), result(100, 30, "mc", ["iso:5"]), result(0, 9, "mc", [], "error")]
    past += [alone(2, name) for name in ("logistic", "trees", "squares", "pseudo-labels")]
    found = forecast_time(todo, past)
    # Two seeds: an undefended training (median of 1, 3, 100) and one under iso (100), mc in both and alone (20 each),
    # and four baselines (2 each); direction is unknown.
    assert found.seconds == 2 * (3 + 100 + 3 * 20 + 4 * 2)
    assert (found.unlike, found.past) == (["direction"], 7)
    assert found.text(2) == "time: at least 0:02:51 with --jobs 2, by 7 past results; no past result of direction"


def test_without_past_results_the_time_is_unknown(tmp_path):
    found = forecast_time(engine.plan(specs.read(SPEC), None), read_past_results(tmp_path / "run", "toy"))
    assert found.text(1).startswith("time: unknown, since no results")


def test_past_results_are_those_on_the_same_dataset_that_can_be_read(tmp_path):
    from vflsec.run.describe import build_manifest

    for name, dataset in (("a", "toy"), ("b", "digits"), ("c", "toy")):
        spec = msgspec.structs.replace(specs.read(SPEC), dataset=dataset)
        store = Store(tmp_path / name)
        store.write_settings(specs.to_toml(spec), build_manifest(spec))
        store.append(msgspec.structs.replace(result(1, 1, "mc"), key=name))
    (tmp_path / "c" / "records.jsonl").write_text("damaged\n", "utf-8")
    assert [record.key for record in read_past_results(tmp_path / "new", "toy")] == ["a"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "fedsplitnn: 420 labeled rows, 150 epochs of batches of 256; mlp: active 6 -> 2 (588 weights); pass"),
        ({"methods": ["lightgbm"]}, "lightgbm: 420 labeled rows, without messages"),
        (
            {"dataset": "census-text", "data": {"options": {"rows": 200}}, "methods": ["split-lm"]},
            "split-lm: 140 labeled rows, 12 epochs of batches of 256",
        ),
        ({"train": {"epochs": 3}, "model": {"cut": 5}}, "fedsplitnn: 420 labeled rows, 3 "),
    ],
)  # fmt: skip
def test_the_shape_of_a_training_is_one_line(settings, expected):
    (line,) = describe_networks(specs.read({"dataset": "toy", **settings}))
    assert line.startswith(expected)
