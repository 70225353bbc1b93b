"""One guess from the guesses of the same attack on several trainings with the same rows."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vflsec.core.message import AFTERWARDS
from vflsec.core.scaling import RELEASED, Bounds, clip_softly
from vflsec.core.view import Guess, View
from vflsec.inference.releases import OF_TRAINING
from vflsec.results.metrics import compute_margins

CLEAR = 5.0
"""Standard deviations from zero beyond which guesses agree clearly enough to weigh trainings by it."""


def join_views(views: Sequence[View]) -> View:
    """Return the view of the last training with the models, embeddings and gradients of all others beside its own.

    In the others the phases of messages have further names, so that each is a source by itself. A model that weighs
    all sources infers more from it than the sum of its guesses tells. What was heard of trees is left out.
    """
    *others, last = views
    names, trained = last.party.split("+"), {last.aux_split, *last.places}
    earlier = [
        replace(m, phase=f"{m.phase}{OF_TRAINING}{number}")
        for number, view in enumerate(others, 1)
        for m in view.messages
        if m.kind in RELEASED and m.receiver in names and m.sender not in names
        if m.phase not in AFTERWARDS or m.split not in trained
    ]
    models = {f"own embedding of training {k}": view.model for k, view in enumerate(others, 1) if view.model}
    drawn = {split: torch.cat([view.defended[split] for view in views], dim=1) for split in last.defended}
    return replace(last, messages=(*earlier, *last.messages), models={**last.models, **models}, defended=drawn)


def pool_guesses(guesses: Sequence[Guess], *, values: bool) -> Guess:
    """Return the mean of recovered ``values``, or else the sum of the evidence for each class, of every split.

    Trainings are repetitions of each other, so that a unit of the scores of each is worth the same evidence.
    """
    scores = {
        s: [guess.scores[s] for guess in guesses] for s in guesses[0].scores if all(s in g.scores for g in guesses)
    }
    converged = [guess.converged for guess in guesses]
    return Guess(
        {s: torch.stack(x).double().mean(dim=0) if values else sum_margins(x) for s, x in scores.items()},
        converged=None if None in converged else all(converged),
        budget={name: sum(guess.budget.get(name, 0) for guess in guesses) for name in guesses[0].budget},
    )


def join_guesses(pooled: Guess, whole: Guess, view: View) -> Guess:
    """Return the guess from all sources side by side, or of labels the sum of both guesses of training rows.

    Gradients of each training tell labels by themselves. Columns and attributes are in embeddings, of which each
    training shows other projections: the pooled guess has seen one at a time.
    """
    if view.victim:
        return replace(pooled, scores={**pooled.scores, **whole.scores})
    split = view.aux_split
    return replace(pooled, scores={**pooled.scores, split: sum_margins([pooled.scores[split], whole.scores[split]])})


def sum_margins(scores: Sequence[Tensor]) -> Tensor:
    """Return the weighted sum (n, C) of the margins of each class, in units of their scale in each training.

    Of ``scores`` (n, C) only the margin of a class over the best other one is used. If they were log-odds with
    independent errors, the sum would be the log-odds by all trainings. Known labels are too few to calibrate each
    training. Where trainings agree clearly, a training has a lower weight the less it agrees with the others than they
    do, and a negative one if its guess is the wrong way round.
    """
    margin = [torch.as_tensor(compute_margins(score.double().numpy())) for score in scores]
    z = torch.stack([clip_softly(m / Bounds.from_columns(m.reshape(-1, 1)).scale) for m in margin])  # (K, n, C)
    return torch.einsum("k,knc->nc", weigh_trainings(z), z)


def weigh_trainings(z: Tensor) -> Tensor:
    """Return a weight (K,), at most 1, of each of the standardized scores (K, n, C)."""
    trainings, rows = z.shape[:2]
    if trainings < 3:
        return z.new_ones(trainings)
    centered = (z - z.mean(dim=1, keepdim=True)).flatten(1)
    length = torch.linalg.vector_norm(centered, dim=1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)
    alike = (centered / length) @ (centered / length).T
    others = alike[~torch.eye(trainings, dtype=torch.bool)].view(trainings, -1)
    agreement = others.sort(dim=1).values[:, others.shape[1] // 2]  # the upper median, as few may tell nothing
    usual = agreement.sort().values[trainings // 2]
    return (agreement / usual).clamp(-1, 1) if usual > CLEAR / rows**0.5 else z.new_ones(trainings)
