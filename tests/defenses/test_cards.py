"""Every defense has a card that an auditor can read."""

import pytest

from vflsec.cli.show_ import describe
from vflsec.core import registry


@pytest.mark.parametrize("name", sorted(registry.list_all("defenses")))
def test_a_card_tells_what_is_hidden_at_what_cost_and_where_it_fails(name):
    defense = registry.load("defenses", name)
    card = describe("defense", defense)
    assert "Source: " in defense.__doc__
    for fact in ("hides", "costs", "fails"):
        assert card[fact] == getattr(defense, fact)
        assert not card[fact].endswith("."), f"{fact} of {name} is no phrase"


def test_unverified_defenses_and_those_without_a_source_are_marked():
    marked = {name for name in registry.list_all("defenses") if registry.load("defenses", name).contrib}
    assert marked == {"sign", "average"}
    for name, entry in registry.list_all("defenses").items():
        assert registry.summarize(entry).endswith(" (contrib)") == (name in marked)
        assert ("contrib" in describe("defense", registry.load("defenses", name))) == (name in marked)
