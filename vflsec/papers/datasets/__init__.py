"""Loaders of the papers' data, most of them from the user's copy; each has its card beside it."""

from pathlib import Path

FOLDER = Path(__file__).parent
"""Where the cards are."""
