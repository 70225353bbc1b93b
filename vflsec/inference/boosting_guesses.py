"""Guesses of labels from the nodes of federated trees, and what they say of auxiliary rows without their labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.core.view import View
from vflsec.inference.chosen_splits import explained, explained_by_row
from vflsec.inference.instance_spaces import Regressed, regressed
from vflsec.inference.learned_labels import ROUNDS, Draw, draws, learned_labels, learned_scores
from vflsec.inference.opinion_pool import Opinion
from vflsec.inference.replay import LEAST, Ensemble, Replayed, observed, replayed

FOLDS = 5
"""Parts of the auxiliary rows, of which each is guessed without its labels."""

TOGETHER = 20_000
"""Training rows to which labels are fitted at once: guesses without a part of the labels, as many as fit."""

EVERYWHERE = "everywhere"
"""Start of the name of a replay by nodes that are told of rows of every split."""

LEARNED = "learned"
"""Name of the replay on labels of ``vflsec.inference.learned_labels``."""

LEARNING_RATE, L2 = 0.3, 1.0
"""The defaults of the method ``secureboost``."""


class Settings(NamedTuple):
    """How boosting is replayed.

    Attributes:
        replays: how often, before labels are fitted to the splits.
        learning_rate: of the training; None for what the parties agreed on, or else the default of ``secureboost``.
        l2: of the training, likewise.
    """

    replays: int = 2
    learning_rate: float | None = None
    l2: float | None = None

    def tried(self, view: View) -> list[Settings]:
        """Return the settings of each replay: with the rate of the training, and with the default if that differs.

        Guesses are not quite right, and with a high rate and many classes each tree exaggerates that.
        """
        rate = view.agreed.get("learning_rate", LEARNING_RATE) if self.learning_rate is None else self.learning_rate
        l2 = view.agreed.get("l2", L2) if self.l2 is None else self.l2
        rates = [rate, LEARNING_RATE] if self.learning_rate is None and rate != LEARNING_RATE else [rate]
        return [self._replace(learning_rate=one, l2=l2) for one in rates]


def guesses(
    view: View, first: Regressed, rng: torch.Generator, settings: Settings | None = None
) -> dict[str, list[Opinion]]:
    """Return the opinions of each split: the regression on shared nodes, and two replays with each of the settings.

    A replay takes the guess before it for the labels. More replays take labels that also explain the splits
    (``vflsec.inference.chosen_splits``, ``vflsec.inference.learned_labels``). Training rows are scored by all nodes
    that the party is told, other rows by those of its own splits, and by a forest that learned from training rows.
    Replays that say nothing of auxiliary rows are left out. There are no opinions if all nodes are withheld, or with a
    single auxiliary row. They are computed once for a view and its copies with the same auxiliary rows, settings and
    ``rng``, and must not be changed.

    Args:
        view: of a passive party.
        first: ``regressed`` of this view.
        rng: draws the parts of the auxiliary rows, and trees.
        settings: None for the defaults.
    """
    chosen = settings or Settings()
    return view.once(f"guesses {chosen}", rng, lambda: _guesses(view, first, rng, chosen))


def _guesses(view: View, first: Regressed, rng: torch.Generator, settings: Settings) -> dict[str, list[Opinion]]:
    trees = observed(view)
    if trees is None or first.left_out is None or len(view.aux_rows) < 2:
        return {}
    n_forests = ROUNDS + (len(first.scores) > 1)
    cases = [Case(view, first, draws(view, n_forests, rng))]
    parts = torch.randperm(len(view.aux_rows), generator=rng).to(view.aux_rows.device)
    held_out = [parts[fold::FOLDS] for fold in range(min(FOLDS, len(parts)))]
    for out in held_out:
        rest = torch.ones(len(parts), dtype=torch.bool, device=out.device).index_fill(0, out, False)
        part = view.knowing(torch.nonzero(rest)[:, 0])
        cases.append(Case(part, regressed(part, rng), draws(part, n_forests, rng)))
    size = max(1, TOGETHER // len(view.features[view.aux_split]))
    groups = [cases[start : start + size] for start in range(0, len(cases), size)]
    scored, *of_parts = [found for group in groups for found in _scored(group, trees, settings)]
    of_aux: dict[str, Tensor] = {}
    for out, tables in zip(held_out, of_parts, strict=True):
        for name, table in tables.items():
            own = table[view.aux_split][view.aux_rows[out]]
            of_aux.setdefault(name, own.new_zeros(len(parts), view.n_classes))[out] = own
    found = {}
    for split, start in first.scores.items():
        names = [n for n in scored if n != "start" and n.startswith(EVERYWHERE) == (split != view.aux_split)]
        replays = [Opinion(scored[name][split], of_aux[name]) for name in names]
        telling = [one for one in replays if one.tells(view.aux_labels)]
        found[split] = [Opinion(start, of_aux["start"]), *telling]
    return found


class Case(NamedTuple):
    """A view, the regression on its shared nodes, and what is random in its forests."""

    view: View
    first: Regressed
    drawn: Iterator[Draw]


def _scored(cases: Sequence[Case], trees: Ensemble, settings: Settings) -> list[dict[str, Mapping[str, Tensor]]]:
    """Return scores (n, C) by name and split, for each case.

    They are of the start, and of replays by all nodes or by those told everywhere. Labels of all cases are fitted to
    the splits at once.
    """
    found: list[dict[str, Mapping[str, Tensor]]] = [{"start": case.first.scores} for case in cases]
    views = [case.view for case in cases]
    split = views[0].aux_split
    seen = observed(views[0], everywhere=True) if len(cases[0].first.scores) > 1 else None
    for k, one in enumerate(settings.tried(views[0])):
        replays = [_improved(case, trees, one) for case in cases]
        starts = [_targets(last, view) for last, view in zip(replays, views, strict=True)]
        assert one.learning_rate is not None
        assert one.l2 is not None
        rates = {"learning_rate": one.learning_rate, "l2": one.l2}
        by_columns = explained(views, trees, starts, **rates)
        by_row = explained_by_row(views, trees, starts, **rates) if k == 0 else None
        learned = learned_labels(views, trees, starts, [case.drawn for case in cases], **rates) if k == 0 else None
        for place, (case, last) in enumerate(zip(cases, replays, strict=True)):
            view = case.view
            own = _replayed(trees, by_columns[place], view, one)
            guessed = {f"replayed {k}": (last, starts[place]), f"explained {k}": (own, _targets(own, view))}
            if by_row is not None:
                labels = by_row[place]
                scores = _logits(_log_odds(labels), view) + _replayed(trees, labels, view, one).scores
                guessed[f"explained by row {k}"] = Opinion(scores, scores[view.aux_rows]), labels
            if learned is not None:
                scores = _logits(_log_odds(learned[place]), view)
                guessed[LEARNED] = Opinion(scores, scores[view.aux_rows]), learned[place]
            for name, (opinion, targets) in guessed.items():
                found[place][name] = {split: opinion.scores}
                if seen is not None:
                    again = _boosted(seen, targets, view, one)
                    of_splits = again.scores
                    if name == LEARNED:
                        of_splits = learned_scores(view, again, targets, next(case.drawn))
                    found[place][f"{EVERYWHERE} {name}"] = {s: _logits(x, view) for s, x in of_splits.items()}
    return found


def _improved(case: Case, trees: Ensemble, settings: Settings) -> Opinion:
    """Return the last of some replays, each of which takes the guess before it for the labels."""
    split, left_out = case.view.aux_split, case.first.left_out
    assert left_out is not None
    last = Opinion(case.first.scores[split], left_out)
    for _ in range(settings.replays):
        last = _replayed(trees, _targets(last, case.view), case.view, settings)
    return last


def _replayed(trees: Ensemble, targets: Tensor, view: View, settings: Settings) -> Opinion:
    """Return what training rows score in a replay, each without its own target."""
    logits = _logits(_boosted(trees, targets, view, settings).left_out, view)
    return Opinion(logits, logits[view.aux_rows])


def _boosted(trees: Ensemble, targets: Tensor, view: View, settings: Settings) -> Replayed:
    assert settings.learning_rate is not None
    assert settings.l2 is not None
    return replayed(trees, targets, view.aux_split, learning_rate=settings.learning_rate, l2=settings.l2)


def _targets(guessed: Opinion, view: View) -> Tensor:
    """Return probabilities (n, C') of training rows, of the last of two classes only, with the known labels put in."""
    q = guessed.calibrated(view.aux_labels).scores.clone()
    q[view.aux_rows] = F.one_hot(view.aux_labels, view.n_classes).to(q)
    return q[:, 1:] if view.n_classes == 2 else q


def _log_odds(q: Tensor) -> Tensor:
    """Return the scores (n, C') of probabilities (n, C')."""
    q = q.clamp(LEAST, 1 - LEAST)
    return q.logit() if q.shape[1] == 1 else q.log()


def _logits(scores: Tensor, view: View) -> Tensor:
    """Return logits (n, C) of scores (n, C'); those of two classes sum to zero."""
    return torch.cat([-scores, scores], dim=1) / 2 if view.n_classes == 2 else scores
