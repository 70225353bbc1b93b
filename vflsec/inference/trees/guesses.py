"""Guesses of labels from the nodes of federated trees, and what they say of auxiliary rows without their labels."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.core.view import View
from vflsec.inference.kernel_mixture import Kernel, Mixture, scale_rows, score_classes
from vflsec.inference.opinion_pool import Opinion
from vflsec.inference.trees.labels import (
    ROUNDS,
    ForestDraw,
    draw_forests,
    fit_labels_by_columns,
    fit_labels_by_forest,
    fit_labels_by_row,
    score_by_forest,
)
from vflsec.inference.trees.nodes import POWERS, get_components, list_partners, weigh_components
from vflsec.inference.trees.replay import MIN_CLASS_SHARE, Ensemble, Rates, observe_trees, replay_boosting

FOLDS = 5
"""Parts of the auxiliary rows, of which each is guessed without its labels."""

TOGETHER = 20_000
"""Training rows to which labels are fitted at once: guesses without a part of the labels, as many as fit."""

EVERYWHERE = "everywhere"
"""Start of the name of a replay by nodes that are known of rows of every split."""

LEARNED = "learned"
"""Name of the replay on labels near those that forests predict."""

LEARNING_RATE, L2 = 0.3, 1.0
"""The defaults of the method ``secureboost``."""


class NodeRegression(NamedTuple):
    """Scores of classes, regressed on the nodes that rows share and on nothing else.

    Attributes:
        scores: (n, C) by split; of the training rows, and of each other split of whose rows the party knows nodes.
        left_out: (m, C) of the auxiliary rows, each without its own label; None if all nodes were withheld.
        tried: number of candidates.
    """

    scores: Mapping[str, Tensor]
    left_out: Tensor | None
    tried: int


def regress_on_nodes(view: View, rng: torch.Generator) -> NodeRegression:
    """Return the regression of the auxiliary rows' classes on principal components of shared nodes.

    It is computed once for a view and its copies with the same auxiliary rows and the same ``rng``, and must not be
    changed.
    """
    return view.memoize("instance spaces", rng, lambda: _regress(view, rng))


def _regress(view: View, rng: torch.Generator) -> NodeRegression:
    targets = F.one_hot(view.aux_labels, view.n_classes).double()
    scores: dict[str, Tensor] = {}
    left_out, tried = None, 0
    for everywhere in (False, True):
        tables = _list_tables(view, everywhere=everywhere)
        splits = [s for s in view.features if tables and all(s in table for table in tables.values())]
        if not set(splits) - scores.keys():
            continue
        x = {name: {s: scale_rows(table[s], table[view.aux_split]) for s in splits} for name, table in tables.items()}
        kernels = {name: Kernel(units[view.aux_split]) for name, units in x.items()}
        mixture = Mixture(kernels, view.aux_rows, targets, score_classes(view.aux_labels), rng)
        tried += mixture.n_tried
        if view.aux_split not in scores:
            left_out = mixture.predict_left_out()
        for s in splits:
            scores.setdefault(s, mixture.predict({name: units[s] for name, units in x.items()}))
    if view.aux_split not in scores:  # all nodes were withheld
        scores[view.aux_split] = targets.mean(dim=0).expand(len(view.features[view.aux_split]), -1)
    return NodeRegression(scores, left_out, tried)


def _list_tables(view: View, *, everywhere: bool) -> dict[str, dict[str, Tensor]]:
    """Return tables (n, k) by split, for each party that sends nodes and each power."""
    device = view.aux_rows.device
    tables = {}
    for other in list_partners(view):
        components = get_components(view, other, everywhere=everywhere)
        for power in POWERS if components else ():
            tables[f"{other} {power}"] = {s: weigh_components(*x, power).to(device) for s, x in components.items()}
    return tables


class ReplaySettings(NamedTuple):
    """How boosting is replayed.

    Attributes:
        replays: how often, before labels are fitted to the splits.
        learning_rate: of the training; None for what the parties agreed on, or else the default of ``secureboost``.
        l2: of the training, likewise.
    """

    replays: int = 2
    learning_rate: float | None = None
    l2: float | None = None

    def rates(self, view: View) -> list[Rates]:
        """Return the rates of each replay: with that of the training, and with the default if that differs.

        Guesses are not quite right, and with a high rate and many classes each tree exaggerates that.
        """
        rate = view.agreed.get("learning_rate", LEARNING_RATE) if self.learning_rate is None else self.learning_rate
        l2 = view.agreed.get("l2", L2) if self.l2 is None else self.l2
        differs = self.learning_rate is None and rate != LEARNING_RATE
        return [Rates(rate, l2), *([Rates(LEARNING_RATE, l2)] if differs else [])]


def guess_labels(
    view: View, first: NodeRegression, rng: torch.Generator, settings: ReplaySettings | None = None
) -> dict[str, list[Opinion]]:
    """Return the opinions of each split: the regression on shared nodes, and two replays with each of the settings.

    A replay takes the guess before it for the labels. More replays take labels that also explain the splits
    (``vflsec.inference.trees.labels``). Training rows are scored by all nodes that the party knows, other rows by those
    of its own splits, and by a forest that learned from training rows. Replays that say nothing of auxiliary rows are
    left out. There are no opinions if all nodes are withheld, or with a single auxiliary row. They are computed once
    for a view and its copies with the same auxiliary rows, settings and ``rng``, and must not be changed.
    """
    chosen = settings or ReplaySettings()
    return view.memoize(f"guesses {chosen}", rng, lambda: _guess(view, first, rng, chosen))


def _guess(
    view: View, first: NodeRegression, rng: torch.Generator, settings: ReplaySettings
) -> dict[str, list[Opinion]]:
    trees = observe_trees(view)
    if trees is None or first.left_out is None or len(view.aux_rows) < 2:
        return {}
    n_forests = ROUNDS + (len(first.scores) > 1)
    cases = [Case(view, first, draw_forests(view, n_forests, rng))]
    parts = torch.randperm(len(view.aux_rows), generator=rng).to(view.aux_rows.device)
    held_out = [parts[fold::FOLDS] for fold in range(min(FOLDS, len(parts)))]
    for out in held_out:
        rest = torch.ones(len(parts), dtype=torch.bool, device=out.device).index_fill(0, out, False)
        part = view.restrict(torch.nonzero(rest)[:, 0])
        cases.append(Case(part, regress_on_nodes(part, rng), draw_forests(part, n_forests, rng)))
    size = max(1, TOGETHER // len(view.features[view.aux_split]))
    groups = [cases[start : start + size] for start in range(0, len(cases), size)]
    whole, *by_fold = [scores for group in groups for scores in _score_cases(group, trees, settings)]
    of_aux: dict[str, Tensor] = {}
    for out, tables in zip(held_out, by_fold, strict=True):
        for name, table in tables.items():
            scores = table[view.aux_split][view.aux_rows[out]]
            of_aux.setdefault(name, scores.new_zeros(len(parts), view.n_classes))[out] = scores
    opinions = {}
    for split, start in first.scores.items():
        names = [n for n in whole if n != "start" and n.startswith(EVERYWHERE) == (split != view.aux_split)]
        replays = [Opinion(whole[name][split], of_aux[name]) for name in names]
        useful = [replay for replay in replays if replay.is_informative(view.aux_labels)]
        opinions[split] = [Opinion(start, of_aux["start"]), *useful]
    return opinions


class Case(NamedTuple):
    """A view, the regression on its shared nodes, and what is random in its forests."""

    view: View
    first: NodeRegression
    draws: Iterator[ForestDraw]


def _score_cases(
    cases: Sequence[Case], trees: Ensemble, settings: ReplaySettings
) -> list[dict[str, Mapping[str, Tensor]]]:
    """Return scores (n, C) by name and split, for each case.

    They are of the start, and of replays by all nodes or by those known everywhere. Labels of all cases are fitted to
    the splits at once.
    """
    scores: list[dict[str, Mapping[str, Tensor]]] = [{"start": case.first.scores} for case in cases]
    views = [case.view for case in cases]
    split = views[0].aux_split
    seen = observe_trees(views[0], everywhere=True) if len(cases[0].first.scores) > 1 else None
    for k, rates in enumerate(settings.rates(views[0])):
        replays = []
        for case in cases:
            assert case.first.left_out is not None
            last = Opinion(case.first.scores[case.view.aux_split], case.first.left_out)
            for _ in range(settings.replays):  # each takes the guess before it for the labels
                last = _replay(trees, _get_targets(last, case.view), case.view, rates)
            replays.append(last)
        starts = [_get_targets(replay, view) for replay, view in zip(replays, views, strict=True)]
        by_columns = fit_labels_by_columns(views, trees, starts, rates)
        by_row = fit_labels_by_row(views, trees, starts, rates) if k == 0 else None
        draws = [case.draws for case in cases]
        by_forest = fit_labels_by_forest(views, trees, starts, draws, rates) if k == 0 else None
        for place, (case, replay) in enumerate(zip(cases, replays, strict=True)):
            view = case.view
            explained = _replay(trees, by_columns[place], view, rates)
            guessed = {
                f"replayed {k}": (replay, starts[place]),
                f"explained {k}": (explained, _get_targets(explained, view)),
            }
            if by_row is not None:
                logits = _to_logits(_log_odds(by_row[place]), view) + _replay(trees, by_row[place], view, rates).scores
                guessed[f"explained by row {k}"] = Opinion(logits, logits[view.aux_rows]), by_row[place]
            if by_forest is not None:
                logits = _to_logits(_log_odds(by_forest[place]), view)
                guessed[LEARNED] = Opinion(logits, logits[view.aux_rows]), by_forest[place]
            for name, (opinion, targets) in guessed.items():
                scores[place][name] = {split: opinion.scores}
                if seen is not None:
                    again = replay_boosting(seen, targets, split, rates)
                    table = score_by_forest(view, again, targets, next(case.draws)) if name == LEARNED else again.scores
                    scores[place][f"{EVERYWHERE} {name}"] = {s: _to_logits(x, view) for s, x in table.items()}
    return scores


def _replay(trees: Ensemble, targets: Tensor, view: View, rates: Rates) -> Opinion:
    """Return what training rows score in a replay, each without its own target."""
    logits = _to_logits(replay_boosting(trees, targets, view.aux_split, rates).left_out, view)
    return Opinion(logits, logits[view.aux_rows])


def _get_targets(guess: Opinion, view: View) -> Tensor:
    """Return probabilities (n, C') of training rows, of the last of two classes only, with the known labels put in."""
    q = guess.calibrate(view.aux_labels).scores.clone()
    q[view.aux_rows] = F.one_hot(view.aux_labels, view.n_classes).to(q)
    return q[:, 1:] if view.n_classes == 2 else q


def _log_odds(q: Tensor) -> Tensor:
    """Return the scores (n, C') of probabilities (n, C')."""
    q = q.clamp(MIN_CLASS_SHARE, 1 - MIN_CLASS_SHARE)
    return q.logit() if q.shape[1] == 1 else q.log()


def _to_logits(scores: Tensor, view: View) -> Tensor:
    """Return logits (n, C) of scores (n, C'); those of two classes sum to zero."""
    return torch.cat([-scores, scores], dim=1) / 2 if view.n_classes == 2 else scores
