"""Fixtures that several packages' tests share."""

import pytest

from vflsec.core.method import World
from vflsec.testing.worlds import tiny_world


@pytest.fixture
def world() -> World:
    """Bare parties, ``active`` and ``passive_1``, of eight rows on a bare wire."""
    return tiny_world()
