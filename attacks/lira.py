"""The likelihood ratio attack: compares the joint model with shadow federations that were trained on a row or not."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need, View
from vflsec.inference.shadows import check_shadow_count, expect_shadows, score_classes

MIN_SHADOWS_FOR_VARIANCES = 64
"""With fewer shadows, variances are of all candidates together."""

SMALLEST = 1e-6
"""The least variance of a candidate, as a share of the mean variance."""


@dataclass(kw_only=True, eq=False, repr=False)
class LikelihoodRatio(Attack):
    """Infers which candidates were training rows, by how likely shadows with and without each make the model.

    The confidence in the true class y is phi = log(p_y / (1 - p_y)), from the joint model's logits, between -15 and 15.
    Over the shadows that were trained on a candidate its phi has mean m_in and variance v_in, over the others m_out and
    v_out. The score of a candidate is

    * ``online``: log N(phi; m_in, v_in) - log N(phi; m_out, v_out)
    * ``offline``: (phi - m_out) / sqrt(v_out), which needs no shadow that was trained on it.

    The adversary is the active party, which has the labels and may query the joint model about the candidates. It can
    also train federations like this one, on these rows and with the columns of all parties. Only an auditor, or parties
    that collude, can: the leak is an upper bound for the active party alone. Shadows are trained as the attacked
    federation was, with the same defenses, each on a random half of the candidates and its other training rows.

    Source: Carlini et al., S&P 2022, "Membership inference attacks from first principles" (arXiv 2112.03570), sections
    IV (algorithm 1 and the offline attack) and VI-C (variance).

    Args:
        shadows: how many federations are trained, an even number of at least 4.
        mode: ``online`` or ``offline``.
        variance: ``candidate``, of each candidate; ``global``, the mean over all candidates, for few shadows; None for
            ``global`` with fewer than 64 shadows.
    """

    name = "lira"
    side = "active"
    target = "membership"
    needs = frozenset({Need.PREDICTIONS, Need.SHADOWS})
    reference = "Carlini et al., S&P 2022, arXiv 2112.03570"
    verified = "closed form on Gaussian confidences; figures of the source: unverified"
    differs = (
        "The joint model is queried about each candidate as it is; Carlini et al. also query augmented images.",
        "Offline, the score is the standardized confidence; Carlini et al. take its probability: the same order.",
        "Two shadows at a time train on complementary halves, all of the same size.",
        "Confidences are bounded, and shadows whose logits exploded are left out, so that none outweighs all others.",
    )
    costs = "the training of all shadows, which other attacks on the same federation share"
    fails = (
        "if the model generalizes, so that a row changes what the model says of it no more than the seed does; a "
        "defense that flips labels makes a member's confidence large or small, where shadow-classifier finds more"
    )

    version = 3

    shadows: int = 64
    mode: Literal["online", "offline"] = "online"
    variance: Literal["candidate", "global"] | None = None

    def __post_init__(self) -> None:
        check_shadow_count(shadows=self.shadows)

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, 2) of the candidates; the second is that of membership."""
        split, known = view.aux_split, expect_shadows(view)
        phi = score_classes(view.predictions[split], view.labels[split])  # (n,)
        of_shadows = score_classes(known.logits, view.labels[split])  # (S, n)
        pooled = len(of_shadows) < MIN_SHADOWS_FOR_VARIANCES if self.variance is None else self.variance == "global"
        mean, variance = _get_moments(of_shadows, ~known.members, pooled=pooled)
        if self.mode == "offline":
            score = (phi - mean) / variance.sqrt()
        else:
            score = _log_density(phi, *_get_moments(of_shadows, known.members, pooled=pooled))
            score -= _log_density(phi, mean, variance)
        return Guess({split: torch.stack([torch.zeros_like(score), score], dim=1)}, budget={"shadows": len(of_shadows)})


def _get_moments(values: Tensor, among: Tensor, *, pooled: bool) -> tuple[Tensor, Tensor]:
    """Return mean and variance (n,) of the values (S, n) of each column that are ``among`` (S, n)."""
    count = among.sum(dim=0)
    mean = (values * among).sum(dim=0) / count
    squares = ((values - mean).square() * among).sum(dim=0)
    all_together = (squares.sum() / (count - 1).sum()).clamp(min=torch.finfo(values.dtype).eps)
    if pooled:
        return mean, all_together.expand_as(mean)
    return mean, (squares / (count - 1)).clamp(min=SMALLEST * all_together)


def _log_density(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return the log density of a normal distribution, up to a constant."""
    return -((x - mean).square() / variance + variance.log()) / 2
