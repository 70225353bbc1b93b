"""Runs that train as one get the results that they get by themselves."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import ks_2samp

from vflsec.base.errors import NotStackable
from vflsec.core import registry
from vflsec.core.method import Method
from vflsec.data import frames
from vflsec.results.metrics import METRICS
from vflsec.results.records.schema import Result
from vflsec.run import engine, plan, runner, training
from vflsec.run import spec as specs
from vflsec.run.questions import ask
from vflsec.run.spec import AuxSpec
from vflsec.run.store import Store
from vflsec.testing import federations

pytestmark = pytest.mark.usefixtures("few_trees_in_module")  # the subject is not how well trees guess

IsotropicNoise = registry.load("defenses", "iso")

STRENGTHS = {"compress": 0.5, "discrete": 0.5, "kd-k": 0.2, "sign": 0.5}
TRAIN = {"phe": {"optimizer": "sgd"}}
APART = {
    "coae": "learns",
    "dp-sgd": "changes how",
    "fedpass": "learns",
    "kd-k": "shapes",
    "mixup": "shapes",
    "mid": "learns",
    "phe": "shapes",
    "sealed": "shapes",
}  # defenses with which runs train one after the other, and why


ONE_BY_ONE = {
    "fedcvt": "differ in number",
    "prada-no-da-fg-ir": "drawn for one run|draw at random",
    "ss-vfl-c": "drawn for one run|draw at random",
    "ss-vfl-i": "drawn for one run|draw at random",
}  # methods of which runs train one after the other, and why


@pytest.fixture(scope="module")
def toy():
    return frames.keep(federations.make_toy(rows=400, columns=5))


def cells(dataset, seeds=2, **settings):
    """The different trainings of an evaluation."""
    spec = specs.read({"dataset": dataset, "attacks": ["mc"], "seeds": seeds, "train": {"epochs": 5}, **settings})
    return list({row.cell.key: row.cell for row in plan.list_trials(spec)}.values())


def trained_apart_and_as_one(own, tmp_path):
    as_one = training.train_together(own, "cpu", store=Store(tmp_path))
    return [training.train(cell, "cpu") for cell in own], as_one


def states(trained):
    parties = trained.federation.parties.items()
    return {f"{name}.{key}": x for name, party in parties for key, x in party.modules.state_dict().items()}


def expect_equal(apart, as_one):
    for (one, facts), (other, other_facts) in zip(apart, as_one, strict=True):
        found = states(other)
        for name, value in states(one).items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=name)
        assert facts.releases == other_facts.releases
        assert facts.traffic == other_facts.traffic
        assert facts.utility.headline == pytest.approx(other_facts.utility.headline, abs=1e-6)
        *_, phase = facts.history
        assert facts.history[phase] == pytest.approx(other_facts.history[phase], rel=1e-6)


@pytest.mark.parametrize("name", ["toy", "digits"])
def test_facts_and_models_are_the_same(name, toy, tmp_path):
    own = cells(toy if name == "toy" else name, defenses=[{"name": "iso", "strengths": [0, 5]}])
    assert len(own) == 4
    expect_equal(*trained_apart_and_as_one(own, tmp_path))


@pytest.mark.sampled
@pytest.mark.parametrize("name", sorted(registry.list_all("defenses")))
def test_every_defense_acts_on_its_own_run(name, toy, tmp_path):
    strength = STRENGTHS.get(name, 1.0)
    settings = {"train": {"epochs": 5, **TRAIN.get(name, {})}, "defenses": [{"name": name, "strengths": [0, strength]}]}
    own = cells(toy, **settings)
    if name in APART:
        with pytest.raises(NotStackable, match=APART[name]):
            training.train_together(own, "cpu", store=Store(tmp_path))
    else:
        expect_equal(*trained_apart_and_as_one(own, tmp_path))


FAMILIES = {"fedcssl": "byol", "fedgssl": "moco", "fedhssl": "simsiam", "fedlocal": "moco"}
"""Methods of one family differ in their pre-training alone: of each family one, and of each kind one."""


def is_sample(name):
    family, _, kind = name.partition("-")
    return FAMILIES.get(family, kind) == kind


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in sorted(registry.list_all("methods"))
        if is_sample(name)
        and training.is_stackable(plan.resolve(specs.parse_method(name)))
        and not registry.load("methods", name).source_phases
    ],
)
def test_every_method_is_the_same_after_a_hundred_updates(name, toy, tmp_path):
    train = {"epochs": 20, "batch": 56, "pretrain": {"epochs": 2}}  # 280 rows
    own = cells(toy, seeds=1, methods=[name], train=train, defenses=[{"name": "iso", "strengths": [0, 5]}])
    if name in ONE_BY_ONE:
        with pytest.raises(NotStackable, match=ONE_BY_ONE[name]):
            training.train_together(own, "cpu", store=Store(tmp_path))
        return
    as_one = training.train_together(own, "cpu", store=Store(tmp_path))
    expect_equal([training.train(cell, "cpu") for cell in own], as_one)


@pytest.mark.statistical
def test_utility_and_leak_have_the_same_distribution_over_twenty_seeds(toy, tmp_path):
    own = cells(toy, seeds=20, train={"epochs": 20}, defenses=[{"name": "iso", "strengths": [5]}])
    own = [cell for cell in own if cell.defenses]
    attack = registry.build("attacks", "mc", epochs=20)
    measured = []
    for kind in trained_apart_and_as_one(own, tmp_path):
        leaks = []
        for cell, (trained, _) in zip(own, kind, strict=True):
            question = ask(attack, trained, "passive_1", AuxSpec(n=40))
            guess = attack(question.view, seed=cell.seed)
            scores, truth = guess.scores["test"], question.truth.labels["test"]
            leaks.append(METRICS["auc"](scores.numpy(), truth.numpy()))
        measured.append(([facts.utility.headline for _, facts in kind], leaks))
    for apart, as_one in zip(*measured, strict=True):
        assert ks_2samp(apart, as_one).pvalue > 0.05
        assert np.mean(apart) == pytest.approx(np.mean(as_one), abs=0.2 * np.std(apart) + 1e-6)


def test_models_do_not_depend_on_what_else_was_missing(toy, tmp_path):
    """All at once, or seed by seed and the rest later."""

    def trained(folder, *pieces):
        store = Store(folder)
        for seeds, strengths in pieces:
            settings = {"attacks": ["mc"], "seeds": seeds, "defenses": [{"name": "iso", "strengths": strengths}]}
            todo = engine.plan(specs.read({"dataset": toy, "train": {"epochs": 5}, **settings}), store)
            for task in todo.groups:
                list(runner.run(task, folder, "cpu"))
        return {path.name: load_file(path / "active.safetensors") for path in sorted((folder / "cells").iterdir())}

    once = trained(tmp_path / "once", (3, [0, 5, 25]))
    pieces = trained(tmp_path / "pieces", (2, [0, 25]), (3, [0, 5, 25]))
    assert len(once) == 9
    assert once.keys() == pieces.keys()
    for key, tensors in once.items():
        for name, value in tensors.items():
            torch.testing.assert_close(pieces[key][name], value, rtol=0, atol=1e-6)


def test_groups_are_of_missing_cells_that_are_alike(toy, tmp_path):
    settings = {"dataset": toy, "seeds": 3, "defenses": [{"name": "iso", "strengths": [0, 1]}]}
    todo = engine.plan(specs.read({"attacks": ["mc"], **settings}), Store(tmp_path))
    assert [len(task.group) for task in todo.groups] == [6]
    assert engine.plan(specs.read({"attacks": ["direction"], **settings}), Store(tmp_path)).groups == []
    assert engine.plan(specs.read({"attacks": ["mc"], "methods": ["local"], **settings}), Store(tmp_path)).groups == []


@pytest.mark.long
def test_a_run_that_diverges_costs_the_others_nothing(toy, tmp_path):
    settings = {"dataset": toy, "attacks": ["mc"], "seeds": 2, "train": {"epochs": 2, "optimizer": "sgd"}}
    spec = specs.read({**settings, "defenses": [{"name": "iso", "strengths": [0, 1e38]}], "aux": {"folds": 0}})
    store = Store(tmp_path)
    found = list(engine.evaluate(engine.plan(spec, store), store))
    results = {(bool(one.defenses), one.status) for one in found if isinstance(one, Result)}
    assert (True, "diverged") in results
    assert (False, "diverged") not in results


FAILING = """
from defenses.iso import IsotropicNoise
from vflsec.base.errors import Diverged

class Failing(IsotropicNoise):
    name = "failing"

    def on_gradient(self, rows, release):
        if self.strength == 2:
            raise Diverged("it cannot go on")
        return super().on_gradient(rows, release)
"""


def test_a_defense_that_fails_at_one_strength_costs_the_others_nothing(toy, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING.replace("defenses.iso", IsotropicNoise.__module__), "utf-8")
    defenses = [{"name": f"{tmp_path / 'failing.py'}:Failing", "strengths": [0, 1, 2]}]
    settings = {"dataset": toy, "attacks": ["mc"], "seeds": 1, "train": {"epochs": 2}, "aux": {"folds": 0}}
    spec, store = specs.read({**settings, "defenses": defenses}), Store(tmp_path / "runs")
    found = [one for one in engine.evaluate(engine.plan(spec, store), store) if isinstance(one, Result)]
    assert [one.status == "diverged" for one in found] == [False, False, True]


def test_methods_from_files_train_apart(toy, tmp_path):
    (tmp_path / "own.py").write_text(
        "from vflsec.methods.fedsplitnn import FedSplitNN\n\n\nclass Own(FedSplitNN):\n    name = 'own'\n", "utf-8"
    )
    method = f"{tmp_path / 'own.py'}:Own"
    spec = specs.read({"dataset": toy, "attacks": ["mc"], "seeds": 3, "methods": [method]})
    assert engine.plan(spec, Store(tmp_path / "runs")).groups == []


@pytest.mark.parametrize("setting", [{"clip": 1.0}, {"patience": 2}, {"select": "best_on_val"}, {"target": 0.9}])
def test_settings_that_measure_each_run_are_refused(setting, toy, tmp_path):
    own = cells(toy, data={"validation": 0.1}, train={"epochs": 2, **setting})
    with pytest.raises(NotStackable):
        training.train_together(own, "cpu", store=Store(tmp_path))


def test_the_documentation_names_what_trains_apart():
    """Both the defenses of ``APART`` and the methods without the last phase of split learning."""
    text = Path(__file__).parents[2].joinpath("docs", "scale_out.md").read_text(encoding="utf-8")
    section = text.partition("## Runs that train as one")[2].partition("\n## ")[0]
    together, apart = section.partition("* **One after the other**")[::2]
    for name in registry.list_all("methods"):
        inherits = registry.load("methods", name).together is Method.together
        forms = [f"`{name}`", *(f"`{name[:end]}*`" for end in range(2, len(name) + 1))]
        named = [part for part in (together, apart) if any(form in part for form in forms)]
        assert named == [apart] if inherits else len(named) == 1, name
    assert all(f"`{name}`" in apart for name in APART if name != "phe")
