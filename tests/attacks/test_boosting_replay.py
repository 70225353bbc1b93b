"""A replay of the boosting improves the guess of instance-space, and is not trusted where it does not."""

import inspect
from dataclasses import replace

import pytest
import torch

from vflsec.attacks.boosting_replay import BoostingReplay
from vflsec.attacks.instance_space import InstanceSpaces
from vflsec.core import registry
from vflsec.core.errors import UsageError
from vflsec.core.message import Kind, Transcript
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.data.partition import DataSpec
from vflsec.experiment.cell import Cell
from vflsec.experiment.federation import build_federation, build_method
from vflsec.experiment.questions import ask
from vflsec.experiment.spec import AuxSpec, DefenseSpec
from vflsec.inference.boosting_guesses import L2, LEARNING_RATE


def question(method="secureboost", *, defenses=(), aux=80, **options):
    """What passive_1 is asked after trees were trained on digits."""
    cell = Cell(
        dataset="digits",
        data=DataSpec(),
        method=method,
        method_options={"rounds": 8, **options},
        train=TrainSpec(),
        model=ModelSpec(),
        defenses=defenses,
        seed=0,
    )
    federation, seen = build_federation(cell, "cpu"), Transcript(frozenset({"passive_1"}), frozenset(Kind))
    federation.channel.taps.append(seen)
    trained = build_method(cell).fit(federation)
    trained.predict("test")
    return ask(BoostingReplay(), trained, "passive_1", AuxSpec(n=aux), tuple(seen.messages))


def accuracy(asked, attack):
    """The accuracy on training rows that are not auxiliary, and on test rows."""
    found = attack(asked.view, seed=0).scores
    right = {s: (x.argmax(dim=1) == asked.truth.labels[s]).double() for s, x in found.items()}
    others = torch.ones(len(right["train"]), dtype=torch.bool)
    others[asked.view.aux_rows] = False
    return float(right["train"][others].mean()), float(right["test"].mean())


@pytest.mark.parametrize(
    ("method", "options", "gained"),
    [
        ("secureboost", {}, 0.04),
        ("secureboost", {"rows": 0.5}, 0.04),
        ("secureboost", {"exchange": "plain", "learning_rate": 0.1}, 0.02),
        ("secureboost-rl", {}, 0.03),
        ("secureboost-turns", {}, 0.02),
        ("secureboost-layers", {"rounds": 20}, 0.02),
    ],
)
def test_a_replay_of_digits_beats_shared_nodes(method, options, gained):
    asked = question(method, **options)
    train, test = accuracy(asked, InstanceSpaces())
    found, of_test = accuracy(asked, BoostingReplay())
    assert found > train + gained
    assert of_test > test + 0.01


@pytest.mark.parametrize(("name", "strength"), [("gaussian-dp", 5.0), ("id-lmid", 20.0)])
def test_a_replay_of_trees_that_do_not_follow_the_labels_gets_little_weight(name, strength):
    asked = question(defenses=(DefenseSpec(name=name, strength=strength),), rounds=20)
    train, test = accuracy(asked, InstanceSpaces())
    found, of_test = accuracy(asked, BoostingReplay())
    assert found > train - 0.02
    assert of_test > test - 0.02


@pytest.mark.parametrize("aux", [1, 2, 3, 7])
def test_a_few_known_labels_are_enough_to_run(aux):
    asked = question(aux=aux, rounds=2)
    found = BoostingReplay()(asked.view, seed=0).scores
    assert found["train"].isfinite().all()
    assert aux > 1 or torch.equal(found["train"], InstanceSpaces()(asked.view, seed=0).scores["train"])


def test_a_guess_is_the_same_for_a_copy_of_the_view_whose_memo_is_filled():
    asked = question(rounds=3)
    first, again = (BoostingReplay()(asked.view, seed=0).scores for _ in range(2))
    assert all(torch.equal(first[s], again[s]) for s in first)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replays": 0}, "expected replays > 0, got 0"),
        ({"learning_rate": 0.0}, "expected learning_rate > 0, got 0.0"),
        ({"l2": -1.0}, "expected l2 >= 0, got -1.0"),
    ],
)
def test_options_out_of_their_range_are_refused(options, said):
    with pytest.raises(UsageError, match=said):
        BoostingReplay(**options)


def test_the_rate_and_the_penalty_are_those_that_the_parties_agreed_on():
    asked = question(rounds=4, learning_rate=0.05, l2=3.0)
    assert asked.view.agreed == {"learning_rate": 0.05, "l2": 3.0}
    known, named, unknown = (
        attack(replace(asked.view, **changed), seed=0).scores["train"]
        for attack, changed in (
            (BoostingReplay(), {}),
            (BoostingReplay(learning_rate=0.05, l2=3.0), {}),
            (BoostingReplay(), {"agreed": {}}),
        )
    )
    assert not torch.equal(known, named), "the default rate is tried as well"
    assert not torch.equal(known, unknown)


def test_a_rate_at_which_replays_exaggerate_costs_little():
    asked = question(learning_rate=1.0)
    exaggerated, _ = accuracy(asked, BoostingReplay(learning_rate=1.0))
    found, _ = accuracy(asked, BoostingReplay())
    assert found > max(exaggerated, accuracy(asked, InstanceSpaces())[0]) - 0.005


def test_where_nothing_is_known_the_defaults_of_the_method_are_assumed():
    method = inspect.signature(registry.load("methods", "secureboost")).parameters
    assert (method["learning_rate"].default, method["l2"].default) == (LEARNING_RATE, L2)
