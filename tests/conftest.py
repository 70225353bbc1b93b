"""Fixtures that several packages' tests share."""

import pytest
import torch

from vflsec.core.method import World
from vflsec.testing.worlds import tiny_world


@pytest.fixture
def world() -> World:
    """Bare parties, ``active`` and ``passive_1``, of eight rows on a bare wire."""
    return tiny_world()


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Leave the cores to pytest's workers: on small tensors more threads only wait for each other."""
    torch.set_num_threads(1)
