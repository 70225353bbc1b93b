"""Text as rows of tokens: a tokenizer of words, and the table of the party that holds the text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from vflsec.base.layout import PADDING, SPECIAL, UNKNOWN
from vflsec.data.bundle import make_table
from vflsec.data.dataset import PartyTable

FOLDER = Path(__file__).parent
"""Where the cards are."""

START = 2
"""The word before each text of a dataset of this guest."""


class Tokenizer(NamedTuple):
    """Words in lower case, by their number in a vocabulary.

    Attributes:
        vocabulary: the special words, [start] among them, then the others in alphabetical order.
    """

    vocabulary: tuple[str, ...]

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> Tokenizer:
        """Return the tokenizer of all words of some texts."""
        return cls((*SPECIAL, "[start]", *sorted({word for text in texts for word in _split_words(text)})))

    def encode(self, texts: Iterable[str], length: int) -> NDArray[np.int64]:
        """Return the tokens (n, T) of texts after [start]: cut off at ``length``, or padded."""
        numbers = {word: number for number, word in enumerate(self.vocabulary)}
        rows = [[START, *(numbers.get(word, UNKNOWN) for word in _split_words(text))][:length] for text in texts]
        return np.array([row + [PADDING] * (length - len(row)) for row in rows]).reshape(-1, length)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a row of tokens (T,)."""
        return " ".join(self.vocabulary[token] for token in tokens if token not in (PADDING, START))


def _split_words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def make_text_table(dataset: str, party: str, texts: pd.Series, tokenizer: Tokenizer, length: int) -> PartyTable:
    """Return the table of a party that holds text: a column for each of ``length`` positions, the token there."""
    names = [f"word_{position}" for position in range(length)]
    tokens = pd.DataFrame(tokenizer.encode(texts, length), index=texts.index, columns=names)
    return make_table(dataset, party, tokens, names, vocabulary=tokenizer.vocabulary)
