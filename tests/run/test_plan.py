"""Cells and keys: what changes a result changes the key, and nothing else does."""

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from vflsec.base.errors import InsufficientView, UsageError
from vflsec.run import engine
from vflsec.run import spec as specs
from vflsec.run.plan import list_baselines, list_trials

SWEEP = {"dataset": "toy", "defenses": [{"name": "iso"}], "strengths": [1, 5], "seeds": 2}


def keys(**settings):
    return [row.key for row in list_trials(specs.read({**SWEEP, **settings}))]


def test_rows_cover_the_grid_with_the_undefended_row():
    grid = [(row.seed, row.strength) for row in list_trials(specs.read(SWEEP))]
    assert grid == [(0, 0.0), (0, 1.0), (0, 5.0), (1, 0.0), (1, 1.0), (1, 5.0)]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "change",
    [
        {"data": {"n_labeled": 100}},
        {"train": {"lr": 0.01}},
        {"model": {"cut": 3}},
        {"aux": {"n": 40}},
        {"adversary": "passive_2"},
        {"attacks": [{"name": "mc", "options": {"mode": "mixmatch"}}]},
        {"defenses": [{"name": "iso", "at": ["embedding"]}]},
        {"fixed": [{"name": "iso", "strength": 0.5, "at": ["embedding"]}]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_a_result_changes_every_defended_key(change):
    before, after = keys(), keys(**change)
    assert not {key for i, key in enumerate(before) if i % 3} & set(after)


def test_all_sweeps_share_one_undefended_training():
    spec = specs.read({**SWEEP, "defenses": [{"name": "iso"}, {"name": "iso", "at": ["embedding"]}]})
    clean = {row.cell.key for row in list_trials(spec) if row.strength == 0 and row.seed == 0}
    assert len(clean) == 1


def test_more_strengths_seeds_and_attacks_keep_the_keys_there_were():
    more = keys(strengths=[1, 5, 25], seeds=3, attacks=[{"name": "mc"}, {"name": "logistic"}])
    assert set(keys()) < set(more)


def test_who_said_a_strength_changes_no_key():
    others = keys(strengths=[], defenses=["iso:lambda=1,5"])
    assert others == keys()
    assert keys(strengths=[1], defenses=[{"name": "iso", "strengths": [1, 5]}, {"name": "perp"}])[:3] == others[:3]


def test_a_new_version_of_an_attack_is_another_result(monkeypatch):
    from vflsec.attacks.model_completion import ModelCompletion

    before = keys()
    monkeypatch.setattr(ModelCompletion, "version", 99)
    assert not set(before) & set(keys())


def test_an_edited_plug_in_file_is_another_result(tmp_path):
    file = tmp_path / "mine.py"
    source = "from vflsec.attacks.logistic import LogisticRegression\nclass Mine(LogisticRegression):\n    pass\n"
    file.write_text(source)
    attacks = [{"name": f"{file}:Mine"}]
    before = keys(attacks=attacks)
    file.write_text(source + "# edited\n")
    assert not set(before) & set(keys(attacks=attacks))


def test_an_attack_that_acts_in_training_gets_its_own(tmp_path):
    file = tmp_path / "active.py"
    file.write_text(
        "from vflsec.attacks.logistic import LogisticRegression\n"
        "class Active(LogisticRegression):\n"
        "    def optimizer(self, parameters, lr):\n        return None\n"
    )
    spec = specs.read({**SWEEP, "attacks": [{"name": "mc"}, {"name": f"{file}:Active"}]})
    cells = {row.attack.name: row.cell.key for row in list_trials(spec) if row.strength == 0 and row.seed == 0}
    assert len(set(cells.values())) == 2


@pytest.mark.long
@limits(max_examples=25)
@given(st.integers(0, 10**6), st.floats(1e-5, 1.0))
def test_keys_survive_a_round_trip_through_toml(n, lr):
    import tomllib

    spec = specs.read({**SWEEP, "data": {"n_labeled": n + 1}, "train": {"lr": lr}})
    again = specs.read(tomllib.loads(specs.to_toml(spec)))
    assert [row.key for row in list_trials(again)] == [row.key for row in list_trials(spec)]


def test_priors_need_no_training_of_their_own():
    found = list(list_baselines(specs.read(SWEEP)))
    names = ("mc", "logistic", "trees", "squares", "pseudo-labels")
    assert [(p.seed, p.attack.name) for p in found] == [(s, a) for s in (0, 1) for a in names]
    assert all(not baseline.cell.defenses for baseline in found)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"adversary": "pasive_1"}, UsageError, "'pasive_1'. Did you mean passive_1"),
        ({"adversary": "active"}, InsufficientView, "'mc' .*passive side"),
        ({"aux": {"n": 0}}, InsufficientView, "attack 'mc' needs auxiliary labels"),
        ({"methods": ["fedsplit"]}, UsageError, "'fedsplit'. Did you mean fedsplitnn"),
        ({"dataset": "credit"}, UsageError, "'credit'. Did you mean credit-default"),
        ({"attacks": [{"name": "mc", "options": {"mode": "magic"}}]}, UsageError, "mc: unknown mode 'magic'"),
        ({"defenses": [{"name": "iso", "at": ["labels"]}]}, UsageError, "unknown at 'labels'"),
    ],
)
def test_what_cannot_run_is_refused_before_any_training(change, error, message):
    with pytest.raises(error, match=message):
        engine.check(specs.read({**SWEEP, **change}))


@pytest.mark.sampled
@pytest.mark.parametrize("method", ["fedhssl-simsiam", "ss-vfl-i", "vflhlp-p"])
def test_what_an_adversary_infers_after_pre_training_alone_depends_on_who_is_guessed(method):
    """The pre-training is shared by label budgets, the guess is not."""
    found = []
    for n_labeled in (100, 200):
        settings = {"dataset": "toy", "methods": [method], "data": {"n_labeled": n_labeled}, "attacks": ["mc"]}
        found.append([baseline for baseline in list_baselines(specs.read(settings)) if baseline.pretrained])
    few, many = found
    assert few
    assert not {baseline.key for baseline in few} & {baseline.key for baseline in many}
    assert [p.cell.stage_key("pretrain") for p in few] == [p.cell.stage_key("pretrain") for p in many]


def test_a_defense_acts_where_an_option_has_something_said():
    settings = {"dataset": "toy", "methods": ["fedlocal-simsiam"], "defenses": ["iso@parameters"], "strengths": [1]}
    with pytest.raises(UsageError, match="parameters, where fedlocal-simsiam sends"):
        engine.check(specs.read(settings))
    engine.check(specs.read({**settings, "method": {"fedlocal-simsiam": {"pma": True}}}))


def test_methods_share_the_baselines_of_their_data_and_nothing_else():
    def logistic(**changed):
        settings = {"dataset": "toy", "methods": ["fedsplitnn", "ss-vfl-c"], "seeds": 1, **changed}
        return [p.key for p in list_baselines(specs.read(settings)) if p.attack.name == "logistic"]

    one, other = logistic()
    assert one == other
    for changed in (
        {"data": {"n_labeled": 100}},
        {"aux": {"n": 20}},
        {"adversary": "passive_1+passive_2"},
        {"seeds": 2},
    ):
        assert set(logistic(**changed)) - {one}
    found = [
        p.key for p in list_baselines(specs.read({"dataset": "toy", "methods": ["fedsplitnn", "ss-vfl-c"], "seeds": 1}))
    ]
    assert len(set(found)) == len(found) - 4, "one for each baseline"
