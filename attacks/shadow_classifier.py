"""The shadow classifier: learns from shadow federations what the joint model says of rows that it was trained on."""

import torch
from sklearn.ensemble import HistGradientBoostingClassifier
from torch import Tensor

from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need, View
from vflsec.inference.shadows import BOUND, check_shadow_count, expect_shadows, log_odds, log_probability, log_rival

ROWS = 200_000
"""At most as many pairs of a shadow and a candidate are learned from."""


class ShadowClassifier(Attack):
    """Infers which candidates were training rows, by a classifier that learned it of each shadow from the others.

    Of a model, it reads three confidences x of each candidate: the log odds and the log probability of the true class,
    and the largest log probability of another class, between -15 and 15. Over the shadows that were trained on the
    candidate, x has mean m_in and standard deviation s_in, over the others m_out and s_out. The features are x - m_in,
    x - m_out, their absolute values, s_in, s_out and m_in - m_out, of each x. Each shadow plays the attacked federation
    once, to show how these differ for rows that it was trained on. Boosted trees learn it, and give the log odds of
    membership as scores. The attack knows no member of the attacked federation.

    Unlike a likelihood ratio of two normal distributions, it takes any shape of these: if labels are flipped before
    training, a member's confidence is large or small, and a row that was not trained on is in between.

    The adversary and its shadows are those of ``lira``: an auditor, or parties that collude, so that the leak is an
    upper bound for the active party alone.

    Source: Shokri et al., S&P 2017, "Membership inference attacks against machine learning models" (arXiv 1610.05820),
    section V (a classifier fitted to shadows); Carlini et al., S&P 2022 (arXiv 2112.03570), section IV (statistics of
    each candidate over shadows with and without it).

    Args:
        shadows: how many federations are trained, an even number of at least 4.
    """

    name = "shadow-classifier"
    version = 2
    side = "active"
    target = "membership"
    needs = frozenset({Need.PREDICTIONS, Need.SHADOWS})
    reference = "Shokri et al., S&P 2017, arXiv 1610.05820; Carlini et al., S&P 2022, arXiv 2112.03570"
    verified = "closed form on Gaussian confidences; figures of the sources: unverified"
    differs = (
        "One classifier for all classes, of boosted trees; Shokri et al. fit a network for each class.",
        "Features compare a candidate with itself in other shadows; Shokri et al. take the probabilities alone.",
        "Shadows are trained on the candidates; Shokri et al. train them on other rows.",
    )
    costs = "the training of all shadows, which other attacks on the same federation share, and 100 trees"
    fails = "if the model generalizes, or if shadows or candidates are too few to learn from"

    def __init__(self, *, shadows: int = 64) -> None:
        check_shadow_count(shadows=shadows)
        self.shadows = shadows

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, 2) of the candidates; the second is the log odds of membership."""
        split, known = view.aux_split, expect_shadows(view)
        y, (logits, members) = view.labels[split], known
        drawn = torch.randperm(len(y), generator=rng)[: ROWS // len(logits)].to(y.device)
        of_shadows, inside = _score_classes(logits, y), members[:, drawn]
        # A shadow is left out of its own statistics. Were it left out alone, a mean over the others would tell whether
        # it was trained on the row: the one on the other half is left out, too, so that both have equal statistics.
        opposite = (members.double() @ (~members).double().T).argmax(dim=1)
        fair = inside != inside[opposite]  # not all, where the one on the other half diverged
        played = of_shadows[..., drawn]
        features = _make_features(played, played, inside, left_out=opposite)[fair]
        model = HistGradientBoostingClassifier(
            max_leaf_nodes=15, early_stopping=False, random_state=int(torch.randint(2**31, (), generator=rng))
        )
        model.fit(features.cpu().numpy(), inside[fair].cpu().numpy())
        features = _make_features(_score_classes(view.predictions[split], y), of_shadows, members)  # (n, F)
        score = torch.from_numpy(model.decision_function(features.cpu().numpy()))
        return Guess({split: torch.stack([torch.zeros_like(score), score], dim=1)}, budget={"shadows": len(logits)})


def _score_classes(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the confidences (3, ..., n) of models, given logits (..., n, C)."""
    return torch.stack([x(logits, labels) for x in (log_odds, log_probability, log_rival)]).clamp(-BOUND, BOUND)


def _make_features(x: Tensor, of_shadows: Tensor, members: Tensor, left_out: Tensor | None = None) -> Tensor:
    """Return the features (..., n, F) of confidences ``x`` (3, ..., n), given those of all shadows (3, S, n).

    If ``left_out`` (S,) is given, those of shadow k, without shadows k and ``left_out[k]`` in its statistics.
    """
    (m_in, s_in), (m_out, s_out) = (_get_moments(of_shadows, among, left_out) for among in (members, ~members))
    above = torch.stack([x - m_in, x - m_out])
    return torch.cat([*above, *above.abs(), s_in, s_out, m_in - m_out]).movedim(0, -1)


def _get_moments(values: Tensor, among: Tensor, left_out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (3, ..., n) of the values (3, S, n) that are ``among`` (S, n)."""

    def total(x: Tensor) -> Tensor:
        x = x * among
        return x.sum(dim=-2) if left_out is None else x.sum(dim=-2, keepdim=True) - (x + x[..., left_out, :])

    count = total(torch.ones_like(values)).clamp(min=1)
    mean = total(values) / count
    squares = total(values.square()) - count * mean.square()
    return mean, (squares / (count - 1).clamp(min=1)).clamp(min=0).sqrt()
