"""Black-box inversion: the victim's columns from the embeddings that it sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from vflsec.attacks.imputation import Imputation, Inputs

from vflsec.core.checks import positive
from vflsec.core.message import Kind
from vflsec.core.releases import latest
from vflsec.core.view import Need, View


class BlackBoxInversion(Imputation):
    """Recovery of the victim's columns by an inverse map, fitted on auxiliary rows: embedding -> columns.

    The inverse is the regression of ``imputation`` on what was received, (n, d), beside one's own columns, (n, p): an
    adversary has both. Of training rows the last release is read, of test rows the one at prediction. The network of
    the source is ``model=mlp``; on a few dozen auxiliary rows ridge regression is the stronger inverse.

    Costs 0.02 s. Fails where the embedding is narrow: of a cut as wide as there are classes little more than the label
    comes back. With noise on embeddings it falls back to what own columns say.

    Source: He et al., ACSAC 2019, "Model inversion attacks against collaborative inference", section 5 (black box).

    Args:
        victim: whose columns; None for the first passive party.
        model: ``ridge``, ``mlp``, or None: ridge up to 300 auxiliary rows, beyond the better of both by column.
        hidden: width of the network's hidden layer.
        own: whether own columns are read too.
        turns: of how many last releases of a training row the mean is taken.
    """

    name = "inversion-blackbox"
    needs = frozenset({Need.EMBEDDINGS, Need.AUX_LABELS})
    reference = "He et al., ACSAC 2019, section 5"
    verified = "exact inversion of a linear bottom model; figures of the source: unverified"

    def __init__(
        self,
        *,
        victim: str | None = None,
        model: Literal["ridge", "mlp"] | None = None,
        hidden: int = 32,
        own: bool = True,
        turns: int = 1,
    ) -> None:
        super().__init__(victim=victim, model=model, hidden=hidden)
        positive(turns=turns)
        self.own = own
        self.turns = turns

    @property
    def search(self) -> Mapping[str, Sequence[Any]]:
        """Vary the regression, and over how many of the last releases embeddings are averaged."""
        return {"model": (None, "mlp"), "turns": (1, 3, 10)}

    def inputs(self, view: View) -> Inputs:
        """Return received embeddings, and own columns beside them."""
        received = latest(view, Kind.EMBEDDING, sender=view.victim, turns=self.turns)
        if not self.own:
            return received
        return {split: torch.cat([h, view.features[split]], dim=1) for split, h in received.items()}
