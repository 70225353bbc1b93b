"""The columns of a party that could split each tree, as far as it knows them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vflsec.core.message import AFTERWARDS, Kind
from vflsec.core.view import View


def drawn_columns(view: View) -> dict[int, NDArray[np.bool_]]:
    """Return whether each own column (d,) could split a tree, by tree; a tree of which nothing is known is left out.

    A party knows the columns that it draws for a tree. In its histograms, other columns have no rows.
    """
    names = view.party.split("+")
    found: dict[int, list[NDArray[np.bool_]]] = {}
    for name in names:
        own = [m for m in view.messages if m.sender == name and m.phase not in AFTERWARDS]
        told_bins = [m.payload for m in own if m.kind is Kind.CONTROL and "column" in m.payload]
        if not told_bins:
            return {}
        column, ordered = (told_bins[0][key].cpu().numpy() for key in ("column", "ordered"))
        counts: dict[int, NDArray[np.float64]] = {}
        for m in own:
            in_clear = m.kind is Kind.HISTOGRAM
            if in_clear or (m.kind is Kind.CIPHERTEXT and "rows" in m.payload):
                rows = m.payload["value"][..., 2] if in_clear else m.payload["rows"]
                counts[m.step] = rows.double().sum(dim=0).cpu().numpy() + counts.get(m.step, 0)
        first = np.flatnonzero(np.diff(column, prepend=-1))
        widths = np.where(ordered[first], 1, np.diff(first, append=len(column)))  # a category is encoded by its values
        for tree, own_counts in counts.items():
            drawn = np.add.reduceat(own_counts, first) > 0 if len(first) else np.zeros(0, dtype=bool)
            found.setdefault(tree, []).append(np.repeat(drawn, widths))
    d = view.features[view.aux_split].shape[1]
    joined = {tree: np.concatenate(own) for tree, own in found.items() if len(own) == len(names)}
    return {tree: own for tree, own in joined.items() if len(own) == d}
