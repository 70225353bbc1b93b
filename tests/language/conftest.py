"""Fewer trees than users have, for time."""

import pytest

from vflsec.language import text_prior


@pytest.fixture(autouse=True)
def _few_trees(monkeypatch):
    monkeypatch.setattr(text_prior, "TREES", 15)
