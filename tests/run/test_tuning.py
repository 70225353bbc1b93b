"""One tuning rule for all methods: random settings, compared on held-out labels of the seed, never on test rows."""

import dataclasses

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from vflsec.base.errors import DataError, UsageError
from vflsec.cli import cli
from vflsec.core import registry
from vflsec.data import frames
from vflsec.report.columns import as_csv
from vflsec.report.report import Report
from vflsec.results.records.schema import Block, Result
from vflsec.run import engine
from vflsec.run import spec as specs
from vflsec.run.federation import build_method, get_partition
from vflsec.run.job import Job, prepare
from vflsec.run.plan import (
    build_cell,
    choose_settings,
    draw_settings,
    list_contenders,
    list_trials,
    load_dataset,
    make_training,
)
from vflsec.run.store import Store

SETTINGS = {
    "dataset": "toy",
    "data": {"stratify": False, "options": {"rows": 240, "columns": 4}},
    "train": {"epochs": 12, "batch": 32},
    "attacks": ["norm"],
    "aux": {"n": 0, "folds": 0},
    "seeds": 1,
    "tune": 3,
}


def read(**changes):
    return specs.read({**SETTINGS, **changes})


def tuned(folder, *choices, **changes):
    """Train FedSplitNN with the best of ``choices``; return its result, and those of all trials."""
    spec = read(**changes)
    row = make_training(spec, "fedsplitnn", build_cell(spec, "fedsplitnn", 0))
    row = msgspec.structs.replace(row, choices=choices, key=f"row-{len(choices)}")
    store = Store(folder)
    list(engine.evaluate(engine.plan_trials([row], (), store), store))
    records = store.records()
    return records.pop(row.key), records


def test_a_setting_given_over_a_stored_specification_is_not_varied():
    stored = msgspec.to_builtins(read(train={"epochs": 12}))
    again = specs.read(specs.merge(stored, ["train.lr=0.5", "train.pretrain.lr=0.25"]))
    assert again.explicit == ("train.epochs", "train.lr", "train.pretrain.lr")
    drawn = draw_settings(again, "fedsplitnn", 0)
    assert all("train.lr" not in settings for settings in drawn)
    assert any(drawn)


def test_the_sane_rate_wins_and_trains_the_result(tmp_path):
    sane = {"train.lr": 0.02}
    result, trials = tuned(tmp_path, {"train.lr": 1e-9}, sane, {"train.lr": 1e30})
    assert result.tuning.settings == sane
    assert result.tuning.scores[0] < result.tuning.scores[1] > 0.8
    assert result.tuning.scores[2] is None, "a model that diverged loses"
    assert result.tuning.seconds == pytest.approx(sum(trial.seconds["train"] for trial in trials.values()))
    plain = read(tune=1, train={**SETTINGS["train"], "lr": 0.02})
    assert result.cell == build_cell(plain, "fedsplitnn", 0).key
    assert result.utility.headline > 0.8


def test_no_test_row_is_in_a_trial():
    spec = read(seeds=1)
    cell = build_cell(spec, "fedsplitnn", 0)
    (first, *_) = list_contenders(make_training(spec, "fedsplitnn", cell))
    whole, trial = get_partition(cell), get_partition(first.cell)
    assert set(trial.ids["train"]) | set(trial.ids["test"]) == set(whole.ids["train"])
    assert len(trial.ids["test"]) == round(len(whole.ids["train"]) / 4)
    assert not len(trial.ids["val"]), "or a method could stop on the rows that compare trials"
    for party in trial.parties.values():
        assert len(party.features["test"]) == len(trial.labels["test"]) == len(trial.groups["test"])


def test_validation_rows_that_are_asked_for_stay():
    spec = read(data={**SETTINGS["data"], "validation": 0.5}, train={"select": "best_on_val"})
    (first, *_) = list_contenders(make_training(spec, "fedsplitnn", build_cell(spec, "fedsplitnn", 0)))
    trial = get_partition(first.cell)
    np.testing.assert_array_equal(trial.ids["val"], trial.ids["test"])


def test_labels_of_test_rows_change_no_choice(tmp_path):
    dataset = load_dataset("toy", rows=240, columns=4)
    flipped = dataset.labels.copy()
    spec = read()
    flipped.loc[get_partition(build_cell(spec, "fedsplitnn", 0)).ids["test"]] ^= 1
    choices = draw_settings(spec, "fedsplitnn", 0)
    names = [frames.keep(dataclasses.replace(dataset, labels=labels)) for labels in (dataset.labels, flipped)]
    data = {"stratify": False}
    first, second = (tuned(tmp_path / str(k), *choices, dataset=name, data=data)[0] for k, name in enumerate(names))
    assert first.tuning.scores == second.tuning.scores
    assert first.tuning.settings == second.tuning.settings
    assert first.utility.headline != second.utility.headline


def result(score):
    utility = Block(metrics={"auc": score}, ci95_rows=(0, 1), chance=0.5, n=9) if score else None
    status = "ok" if score else "diverged"
    return Result(key="k", cell="c", method="m", defenses=[], seed=0, adversary="a", attack=None, status=status,
                  utility=utility, seconds={"train": 2.0})  # fmt: skip


@pytest.mark.parametrize(
    ("scores", "best"), [((0.5, 0.7, 0.7), 1), ((0.7, 0.7, 0.6), 0), ((None, 0.4, None), 1), ((None, None, None), 0)]
)
def test_the_first_of_the_best_trials_is_chosen(scores, best):
    spec = read()
    row = make_training(spec, "fedsplitnn", build_cell(spec, "fedsplitnn", 0))
    contenders = list_contenders(row)
    done = {contender.key: result(score) for contender, score in zip(contenders, scores, strict=True)}
    chosen = choose_settings(row, done)
    assert chosen.tuning.settings == row.choices[best]
    assert (chosen.tuning.scores, chosen.tuning.seconds) == (list(scores), 6.0)
    assert chosen.cell.key == row.cell.with_settings(row.choices[best]).key
    assert (chosen.key, list_contenders(chosen)) == (row.key, [])
    del done[contenders[2].key]
    assert choose_settings(row, done) is row, "one is missing"


def test_without_tuning_everything_is_as_it_was():
    plain = {key: value for key, value in SETTINGS.items() if key != "tune"}
    once, none = read(tune=1, defenses=["iso:lambda=1"]), specs.read({**plain, "defenses": ["iso:lambda=1"]})
    assert once == none
    assert [row.choices for row in list_trials(once)] == [(), ()]
    keys = [row.key for row in list_trials(read(defenses=["iso:lambda=1"]))]
    assert not set(keys) & {row.key for row in list_trials(once)}, "tuned results are others"


def test_all_strengths_and_attacks_share_the_trials_of_the_undefended_training():
    rows = list(list_trials(read(defenses=["iso:lambda=1,5"], fixed=["max-norm:strength=1"])))
    trials = [[contender.key for contender in list_contenders(row)] for row in rows]
    assert len(rows) == 3
    assert trials[0] == trials[1] == trials[2]
    assert not list_contenders(rows[2])[0].cell.defenses
    assert engine.plan_trials(rows, (), None).trials.missing == 3


def test_draws_depend_on_seed_number_and_path_alone():
    eight, four = (draw_settings(read(tune=n, seeds=2), "fedsplitnn", 1) for n in (8, 4))
    assert eight[:4] == four
    assert eight[0] == {}, "the settings that are given"
    assert draw_settings(read(methods=["local"], tune=8), "local", 1) == eight, "paired between methods"
    assert draw_settings(read(tune=8), "fedsplitnn", 0)[1:] != eight[1:]
    rates = [draw_settings(read(), "fedsplitnn", seed)[1]["train.lr"] for seed in range(300)]
    assert 1e-4 <= min(rates) < 2e-4
    assert 5e-3 < max(rates) <= 1e-2
    assert np.mean(np.array(rates) < 1e-3) == pytest.approx(0.5, abs=0.1), "as many below the middle, on a log scale"


@pytest.mark.parametrize(
    ("label", "changes", "open_"),
    [
        ("fedsplitnn", {"train": {"lr": 0.5}}, {"train.weight_decay"}),
        ("lightgbm:rounds=7", {}, {"leaves"}),
        ("lightgbm", {"method": {"lightgbm": {"leaves": 7}}}, {"rounds"}),
        ("vflhlp-p", {}, {"train.lr", "train.weight_decay", "train.pretrain.lr", "train.pretrain.weight_decay"}),
        ("fedhssl-byol", {"train": {"pretrain": {"lr": 1.0}, "lr": 0.1}},
         {"train.weight_decay", "train.pretrain.weight_decay"}),
        ("fedhssl-byol", {"train": {"pretrain": {"paper": True}}}, {"train.lr", "train.weight_decay"}),
    ],
)  # fmt: skip
def test_settings_that_are_given_stay(label, changes, open_):
    spec = read(methods=[label], **changes)
    drawn = draw_settings(spec, spec.methods[0], 0)
    assert [set(settings) for settings in drawn] == [set(), open_, open_]
    assert specs.read(specs.files.parse_toml(specs.to_toml(spec))) == spec, "as the folder's own spec.toml says"


def test_every_method_can_be_made_with_what_is_drawn():
    for name in registry.list_all("methods"):
        spec = read(methods=[name], tune=12, train={})
        cell = build_cell(spec, name, 0)
        for settings in draw_settings(spec, name, 0):
            build_method(cell.with_settings(settings))


def test_an_interrupted_search_goes_on(tmp_path):
    evaluation = prepare(read(defenses=["iso:lambda=1"], seeds=1))
    job = Job(tmp_path, [evaluation])
    with job.open():
        records = job.run(job.plan())
        next(records)
        records.close()
    todo = job.plan()
    assert todo.trials.missing == 2
    with job.open():
        computed = list(job.run(todo))
    assert not job.plan().missing
    assert sum(isinstance(record, Result) and record.attack is None for record in computed) == 2
    report = Report.read(tmp_path)
    point = report.points[0]
    assert [len(tuning.scores) for tuning in point.tuning.values()] == [3]
    assert "trials,trials_seconds" in as_csv(report.summary).splitlines()[0]
    assert "their CPU s" in report.to_markdown(details=True)
    assert '"scores"' in report.to_json()


@pytest.mark.parametrize("given", ["0", "-1", "1.5", "x"])
def test_bad_numbers_of_trials_take_one_line(given):
    answer = CliRunner().invoke(cli, ["eval", "--tune", given])
    assert answer.exit_code == 2
    assert answer.stderr.startswith("Error: Invalid value for '--tune'")
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tune": 0}, UsageError, "expected tune > 0, got 0"),
        ({"tune": 1.5}, UsageError, "Expected 'int', got 'float' - at 'tune'"),
        ({"tune": "x"}, UsageError, "Expected 'int', got 'str' - at 'tune'"),
        ({"tune": 10**9}, UsageError, "at most 1000 trials"),
        ({"train": {"lr": 1, "weight_decay": 0}}, UsageError, "expected a setting of fedsplitnn that is not given"),
        ({"data": {"n_labeled": 5, "options": {"rows": 240}}}, DataError, "expected two classes to validate on"),
        ({"defenses": ["label-dp:epsilon=1"]}, UsageError, "expected no --tune with label-dp"),
        ({"fixed": ["sealed:epsilon=1"]}, UsageError, "expected no --tune with sealed"),
        ({"data": {"canaries": 10, "options": {"rows": 240}}}, UsageError, "expected no --tune with --audit-epsilon"),
    ],
)  # fmt: skip
def test_what_cannot_be_tuned_is_refused_in_one_line(changes, error, message):
    with pytest.raises(error) as raised:
        engine.check(read(**changes))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
