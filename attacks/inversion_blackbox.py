"""Black-box inversion: the victim's columns from the embeddings that it sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vflsec.attacks.imputation import Imputation, Inputs, Model, missed
from vflsec.core.checks import positive_or_none
from vflsec.core.message import Kind
from vflsec.core.view import Need, View
from vflsec.inference.releases import averages, latest


class BlackBoxInversion(Imputation):
    """Recovery of the victim's columns by an inverse map, fitted on auxiliary rows: embedding -> columns.

    The inverse is the regression of ``imputation`` on what was received, (n, d), beside one's own columns, (n, p): an
    adversary has both. The network of the source is ``model=mlp``; on a few dozen auxiliary rows ridge regression is
    the stronger inverse.

    Of training rows the mean of the last 1, 3 or 10 releases is read, whichever ridge regression finds the best on
    auxiliary rows that it leaves out: over several, noise averages out. Of test rows there is the one release at
    prediction, and they have an inverse of their own, fitted on one release of each auxiliary row: as noisy as they.

    Costs 0.1 s. Fails where the embedding is narrow: of a cut as wide as there are classes little more than the label
    comes back. With noise on embeddings it falls back to what own columns say.

    Source: He et al., ACSAC 2019, "Model inversion attacks against collaborative inference", section 5 (black box).

    Args:
        victim: whose columns; None for the first passive party.
        model: ``ridge``, ``mlp``, ``better`` of both by column, or None: ridge up to 300 auxiliary rows, beyond
            ``better``.
        hidden: width of the network's hidden layer.
        own: whether own columns are read too.
        turns: of how many last releases of a training row the mean is taken; None for the best of 1, 3 and 10.
    """

    name = "inversion-blackbox"
    needs = frozenset({Need.EMBEDDINGS, Need.AUX_LABELS})
    reference = "He et al., ACSAC 2019, section 5"
    verified = "exact inversion of a linear bottom model; figures of the source: unverified"
    differs = (
        "The inverse is ridge regression up to 300 auxiliary rows, beyond these the better of it and a network; "
        "the source has a network.",
        "Own columns are read beside the embedding (own).",
        "The mean of several releases of a training row is read (turns); the source sends each input once.",
    )
    version = 2

    def __init__(
        self,
        *,
        victim: str | None = None,
        model: Model | None = None,
        hidden: int = 32,
        own: bool = True,
        turns: int | None = None,
    ) -> None:
        super().__init__(victim=victim, model=model, hidden=hidden)
        positive_or_none(turns=turns)
        self.own = own
        self.turns = turns

    @property
    def search(self) -> Mapping[str, Sequence[Any]]:
        """Vary the regression, and over how many of the last releases embeddings are averaged.

        A search knows how training rows fare alone, so it does not impose a network on test rows, which are noisier:
        ``better`` lets auxiliary rows decide for each.
        """
        return {"model": (None, "better"), "turns": (None, 1, 3, 10)}

    def inputs(self, view: View) -> list[Inputs]:
        """Return received embeddings, and own columns beside them: one release of each row, then means of several."""

        def beside(h: Tensor, split: str) -> Tensor:
            return torch.cat([h, view.features[split]], dim=1) if self.own else h

        known = view.aux_split
        means = [beside(h, known) for h in averages(view, Kind.EMBEDDING, sender=view.victim, turns=self.turns)]
        best = means[0] if len(means) == 1 else min(means, key=lambda x: missed(x, view))
        single = {s: beside(h, s) for s, h in latest(view, Kind.EMBEDDING, sender=view.victim).items()}
        return [single] if torch.equal(best, single[known]) else [single, {known: best}]
