"""Every attack has a card that an auditor can read."""

import inspect

import numpy as np
import pytest

from vflsec.core import registry
from vflsec.core.attack import describe
from vflsec.core.errors import UsageError


@pytest.mark.parametrize("name", sorted(registry.entries("attacks")))
def test_a_card_tells_source_threat_cost_and_failure(name):
    attack = registry.load("attacks", name)
    card = describe(attack)
    assert card["name"] == name
    assert all(str(value) for value in card.values())
    malicious = ("active-mc", "backdoor", "missing-feature", "noisy-sample")
    assert card["behavior"] == ("acts in training" if name in malicious else "honest-but-curious")
    for heading in ("Source: ", "Costs ", "Fails"):
        assert heading in attack.__doc__, f"the card of {name} does not say {heading}"


READ_AGAIN = [
    name
    for name in sorted(registry.entries("attacks"))
    if "turns" in inspect.signature(registry.load("attacks", name)).parameters
]


@pytest.mark.parametrize("turns", [0, -1])
@pytest.mark.parametrize("name", READ_AGAIN)
def test_a_number_of_releases_that_is_none_is_refused(name, turns):
    with pytest.raises(UsageError, match=f"expected turns > 0, got {turns}"):
        registry.build("attacks", name, turns=turns)
    assert registry.build("attacks", name, turns=2).turns == 2


@pytest.mark.parametrize("name", sorted(registry.entries("attacks")))
def test_the_name_in_tables_is_options_and_no_need(name):
    alone = registry.build("attacks", name).alone()
    assert all("needs=" not in repr(attack) for attack in (registry.build("attacks", name), alone))


@pytest.mark.parametrize("name", sorted(registry.entries("attacks")))
def test_a_search_tries_other_settings_of_the_same_attack(name):
    attack = registry.build("attacks", name)
    variants = attack.variants(16, np.random.default_rng(0))
    assert all(type(variant) is type(attack) for variant in variants)
    assert len({repr(one) for one in (attack, *variants)}) == 1 + len(variants)
    size = np.prod([len(values) for values in attack.search.values()])
    assert len(variants) == (min(15, size - 1) if attack.search else 0)
