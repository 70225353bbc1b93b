"""Fewer trees and fewer batches than users have, for time."""

import pytest

from vflsec.language import text_prior, word_context


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch):
    monkeypatch.setattr(text_prior, "TREES", 15)
    monkeypatch.setattr(word_context, "STEPS", 60)
