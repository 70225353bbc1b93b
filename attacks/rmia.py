"""The robust membership inference attack: compares how much more likely the joint model makes a row than other rows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vflsec.base.checks import share
from vflsec.base.errors import UsageError
from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need, View
from vflsec.inference.shadows import check_shadow_count, expect_shadows, log_probability


@dataclass(kw_only=True, eq=False, repr=False)
class RobustMembershipInference(Attack):
    """Infers which candidates were training rows, by how much more likely training made each than other rows.

    With the joint model's probability p(x) of the true class, and P(x) its mean over shadow federations, the ratio of a
    candidate x to a point z of the population is LR(x, z) = (p(x) / P(x)) / (p(z) / P(z)). The score is the share of
    points z with LR(x, z) >= gamma. The points z are all candidates.

    * ``online``: P is (P_in + P_out) / 2, means over the shadows that were trained on the row and the others.
    * ``offline``: P is ((1 + a) P_out + 1 - a) / 2, which needs no shadow that was trained on it.

    The adversary and its shadows are those of ``lira``: an auditor, or parties that collude, so that the leak is an
    upper bound for the active party alone.

    Source: Zarifzadeh et al., ICML 2024, "Low-cost high-power membership inference attacks" (arXiv 2312.03262), section
    3 (test and score) and its appendix on the offline attack (a).

    Args:
        shadows: how many federations are trained, an even number of at least 4.
        mode: ``online`` or ``offline``.
        gamma: at least 1. With a larger one, more candidates have equal scores; the order of others stays.
        a: of ``offline``, from 0 to 1: how much more likely training makes a row, less with a larger one.
    """

    name = "rmia"
    side = "active"
    target = "membership"
    needs = frozenset({Need.PREDICTIONS, Need.SHADOWS})
    reference = "Zarifzadeh et al., ICML 2024, arXiv 2312.03262"
    verified = "scores: equality with the pairwise formula; figures of the source: unverified"
    differs = (
        "The points z are the candidates, half of which are members; Zarifzadeh et al. draw them from the population.",
        "gamma is 1; Zarifzadeh et al. take 2 for images, at which most rows of tables have equal scores.",
        "p is the softmax of the logits; for images, Zarifzadeh et al. also take its Taylor series.",
    )
    costs = "the training of all shadows, which other attacks on the same federation share"
    fails = (
        "if the model generalizes, so that training on a row hardly makes it more likely; a defense that flips labels "
        "makes a member more likely or less, where shadow-classifier finds more"
    )

    version = 3

    shadows: int = 64
    mode: Literal["online", "offline"] = "online"
    gamma: float = 1.0
    a: float = 0.3

    def __post_init__(self) -> None:
        check_shadow_count(shadows=self.shadows)
        share(a=self.a)
        if not 1 <= self.gamma < math.inf:
            raise UsageError(f"expected gamma >= 1, got {self.gamma}")

    @property
    def search(self) -> Mapping[str, Sequence[Any]]:
        """Offline, other weights of the shadows."""
        return {"a": (0.0, 0.3, 0.6, 1.0)} if self.mode == "offline" else {}

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, 2) of the candidates; the second is that of membership."""
        split, known = view.aux_split, expect_shadows(view)
        of_shadows = log_probability(known.logits, view.labels[split])  # (S, n)
        p_out = _log_mean(of_shadows, ~known.members)
        if self.mode == "online":
            prior = torch.logaddexp(_log_mean(of_shadows, known.members), p_out)
        else:
            unseen = torch.tensor(1 - self.a, dtype=p_out.dtype, device=p_out.device).log()
            prior = torch.logaddexp(p_out + math.log1p(self.a), unseen)
        ratio = log_probability(view.predictions[split], view.labels[split]) - prior + math.log(2)  # (n,)
        below = torch.searchsorted(ratio.sort().values, ratio - math.log(self.gamma), right=True)
        score = below / len(ratio) - 0.5
        return Guess({split: torch.stack([torch.zeros_like(score), score], dim=1)}, budget={"shadows": len(of_shadows)})


def _log_mean(values: Tensor, among: Tensor) -> Tensor:
    """Return the logarithm (n,) of the mean of exp(values) (S, n) over those of each column that are ``among``."""
    return values.masked_fill(~among, -torch.inf).logsumexp(dim=0) - among.sum(dim=0).log()
