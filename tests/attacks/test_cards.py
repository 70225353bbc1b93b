"""Every attack has a card that an auditor can read."""

import inspect
from typing import get_type_hints

import numpy as np
import pytest

from vflsec.base.errors import UsageError
from vflsec.cli.show_ import describe
from vflsec.core import registry
from vflsec.core.options import list_choices
from vflsec.core.view import Need
from vflsec.run.adversary import draw_variants


@pytest.mark.parametrize("name", sorted(registry.list_all("attacks")))
def test_a_card_tells_source_threat_cost_and_failure(name):
    attack = registry.load("attacks", name)
    card = describe("attack", attack)
    assert card["name"] == name
    assert all(str(value) for value in card.values())
    malicious = ("active-mc", "backdoor", "fsha", "missing-feature", "noisy-sample", "steering", "urvfl", "villain")
    assert card["behavior"] == ("acts in training" if name in malicious else "honest-but-curious")
    assert "Source: " in attack.__doc__
    for fact in ("costs", "fails"):
        assert card[fact] == getattr(attack, fact)
        assert not card[fact].endswith("."), f"{fact} of {name} is no phrase"


SEVERAL = {
    name: option
    for name in sorted(registry.list_all("attacks"))
    for option in ("releases", "iterations")
    if option in inspect.signature(registry.load("attacks", name)).parameters
}


@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize(("name", "option"), SEVERAL.items())
def test_a_number_of_releases_that_is_none_is_refused(name, option, number):
    with pytest.raises(UsageError, match=f"expected {option} > 0, got {number}"):
        registry.build("attacks", name, **{option: number})
    assert getattr(registry.build("attacks", name, **{option: 2}), option) == 2


CHOICES = [
    pytest.param(kind, name, option, id=f"{name}-{option}")
    for kind in ("attacks", "defenses")
    for name in sorted(registry.list_all(kind))
    for option, hint in get_type_hints(registry.load(kind, name).__init__).items()
    if list_choices(hint)
]


@pytest.mark.parametrize(("kind", "name", "option"), CHOICES)
def test_a_choice_that_there_is_not_is_refused(kind, name, option):
    strength = () if kind == "attacks" else (1.0,)
    with pytest.raises(UsageError, match=f"{name}: unknown {option} 'other'"):
        registry.build(kind, name, *strength, **{option: "other"})


def test_baselines_read_own_columns_and_nothing_else():
    baselines = {name for name in registry.list_all("attacks") if registry.load("attacks", name).baseline}
    assert baselines == {"logistic", "trees", "squares", "pseudo-labels", "imputation", "text-prior"}
    assert all(registry.load("attacks", name).needs <= {Need.FEATURES, Need.AUX_LABELS} for name in baselines)


def test_unverified_attacks_and_those_without_a_source_are_marked():
    marked = {name for name in registry.list_all("attacks") if registry.load("attacks", name).contrib}
    made_here = {
        name for name in registry.list_all("attacks") if registry.load("attacks", name).reference == "this project"
    }
    assert marked == {"exploit", "batch-label", "residual", *made_here}
    for name, entry in registry.list_all("attacks").items():
        assert registry.summarize(entry).endswith(" (contrib)") == (name in marked)
        assert ("contrib" in describe("attack", registry.load("attacks", name))) == (name in marked)


@pytest.mark.parametrize("name", sorted(registry.list_all("attacks")))
def test_the_name_in_tables_is_options_and_no_need(name):
    alone = registry.build("attacks", name).alone()
    assert all("needs=" not in repr(attack) for attack in (registry.build("attacks", name), alone))


@pytest.mark.parametrize("name", sorted(registry.list_all("attacks")))
def test_a_search_tries_other_settings_of_the_same_attack(name):
    attack = registry.build("attacks", name)
    variants = draw_variants(attack, 16, np.random.default_rng(0))
    assert all(type(variant) is type(attack) for variant in variants)
    assert len({repr(one) for one in (attack, *variants)}) == 1 + len(variants)
    size = np.prod([len(values) for values in attack.search.values()])
    assert len(variants) == (min(15, size - 1) if attack.search else 0)
