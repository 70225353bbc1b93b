"""One prediction from all source tables of a view together.

Gaussian processes on subsets of the tables are fitted to the auxiliary rows, and averaged by how well they explain
these rows. For classes, randomized trees on own columns and on all tables are pooled with them. Where a passive party
knows the nodes of federated trees, guesses from these nodes take their place: federated trees were grown by the
labels of all rows, and not of a few.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.core.view import Guess, View, memoize
from vflsec.inference.discrete import expect_values
from vflsec.inference.kernel_mixture import Kernel, Likelihood, Mixture, scale_rows, score_classes
from vflsec.inference.linear_replay import refine_by_replay
from vflsec.inference.opinion_pool import Forest, Opinion, blend_opinions, fit_out_of_bag, pool_opinions
from vflsec.inference.sources import COLUMNS, LOCAL, SourceTable, list_sources
from vflsec.inference.trees.bounds import find_bounds
from vflsec.inference.trees.guesses import FOLDS, guess_labels, regress_on_nodes
from vflsec.inference.trees.nodes import list_partners
from vflsec.inference.trees.values import fill_between, learn_columns, recover_columns, solve_histograms

_DISTANCES = ", distances"

MAX_GUESSED_ROWS = 1200
"""Rows whose guesses are learned, beside the auxiliary rows."""

LENGTHS = (0.5, 1.0, 2.0, 4.0, 16.0)
"""Candidate length scales of each part; standardized rows have a squared norm of about 1."""

SEARCHED = 400
"""Rows, evenly spaced, on which length scales are chosen at most."""

NOISE = torch.logspace(-3, 1, 5, dtype=torch.float64)
"""Candidate variances of the noise; a kernel has variance one."""


def fuse_classes(view: View, rng: torch.Generator) -> Guess:
    """Return the probability of each class (n, C) for every split.

    It is computed once for a view and its copies with the same auxiliary rows and the same ``rng``, and must not be
    changed.

    Args:
        view: whose ``aux_labels`` (m,) are classes.
        rng: draws the trees, the parts of the auxiliary rows, and the rows on which tables are chosen.
    """
    return view.memoize("fused", rng, lambda: _fuse_classes(view, rng))


def _fuse_classes(view: View, rng: torch.Generator) -> Guess:
    labels, known = view.aux_labels, view.aux_split
    of_nodes = _pool_nodes(view, rng)  # first, so that other attacks with this stream share it
    models = _fit_models(view, F.one_hot(labels, view.n_classes).double(), score_classes(labels), rng)
    forests: dict[tuple[str, ...], Forest] = {}
    scores = {}
    for split, model in models.items():
        opinions = [Opinion(model.predict(split), model.mixture.predict_left_out()), *of_nodes.get(split, [])]
        for names in model.read_by_trees if split not in of_nodes else []:
            if names not in forests:
                forests[names] = Forest(model.join_tables(names, known)[view.aux_rows], labels, view.n_classes, rng)
            opinions.append(forests[names].vote(model.join_tables(names, split)))
        scores[split] = pool_opinions(opinions, labels) if model.tables else opinions[0].scores
    return Guess(scores, budget=_count_budget(models.values()))


def _pool_nodes(view: View, rng: torch.Generator) -> dict[str, list[Opinion]]:
    """Return opinions on labels by split, from the nodes of federated trees; none without any."""
    if view.victim is not None or view.side != "passive" or not list_partners(view):
        return {}
    return guess_labels(view, regress_on_nodes(view, rng), rng)


def fuse_values(view: View, rng: torch.Generator) -> Guess:
    """Return values (n, d) for every split.

    What an active party recovers from the splits of trees (``vflsec.inference.trees.values``), and for other rows what
    it learns from these values (``vflsec.inference.trees.values``), is blended with them. So is, where rows have
    releases of several epochs, what it learns from their guesses for rows with one release. Columns of few values get
    their expectation given the guess (``vflsec.inference.discrete``). A linear bottom model is replayed
    (``vflsec.inference.linear_replay``).

    Args:
        view: whose ``aux_labels`` (m, d) are values.
        rng: draws the rows on which tables are chosen, the parts of the auxiliary rows, and the trees.
    """
    targets = view.aux_labels.double()
    models = _fit_models(view, targets, _score_values(targets), rng)
    of_splits = _pool_splits(view, rng)
    opinions = {} if of_splits else _pool_guesses(view, models, rng)
    blended = {}
    for split, model in models.items():
        if split not in opinions:
            direct = Opinion(model.predict(split), model.mixture.predict_left_out())
            opinions[split] = [direct, *of_splits.get(split, [])]
        together = blend_opinions(opinions[split], targets, by_column=split in of_splits)
        blended[split] = expect_values(together, targets, view.layout)
    refined = refine_by_replay(view, blended, targets)
    return Guess({split: opinion.scores for split, opinion in refined.items()}, budget=_count_budget(models.values()))


def _pool_guesses(view: View, models: Mapping[str, FusedModel], rng: torch.Generator) -> dict[str, list[Opinion]]:
    """Return opinions on rows of other splits: direct ones, and learned from guesses of rows with several releases.

    The known rows that judge opinions are left out of both, a fold at a time, also of the guesses.
    """
    known, rows, targets = view.aux_split, view.aux_rows, view.aux_labels.double()
    teacher, m = models[known], len(rows)
    if m < 2 or not any(source.rescaled for source in teacher.tables.values()):
        return {}
    pool, folds = draw_rows(len(view.features[known]), rows, rng), min(FOLDS, m)
    part = (torch.randperm(m, generator=rng) % folds).to(rows.device)
    out = [torch.zeros_like(part, dtype=torch.bool), *(part == fold for fold in range(folds))]
    guessed = teacher.mixture.predict_without(out, {n: x[pool] for n, x in teacher.units(known).items()})
    for left, guess in zip(out, guessed, strict=True):
        guess[:m] = torch.where(left[:, None], guess[:m], targets)
    d, opinions = targets.shape[1], {}
    for split, model in models.items():
        if model is teacher or not model.read_by_trees:
            continue
        parts = [[n for n in model.read_by_trees[-1] if (n in LOCAL) == is_local] for is_local in (False, True)]
        pairs = [(model.join_tables(names, known)[pool], model.join_tables(names, split)) for names in parts if names]
        learned = learn_guesses(torch.cat(guessed, dim=1), pairs, d, rng)
        units = {name: x[rows] for name, x in model.units(known).items()}
        indirect = torch.split(learned.left_out[:m], d, dim=1)[1:]
        opinions[split] = [
            Opinion(model.predict(split), _assemble_folds(model.mixture.predict_without(out[1:], units), out[1:])),
            Opinion(learned.guesses[:, :d], _assemble_folds(indirect, out[1:])),
        ]
    return opinions


def _assemble_folds(predictions: Iterable[Tensor], out: Iterable[Tensor]) -> Tensor:
    """Return from the predictions (m, d) of each fold the rows where ``out`` (m,) of this fold is true."""
    return torch.stack([x * left[:, None] for x, left in zip(predictions, out, strict=True)]).sum(dim=0)


def _pool_splits(view: View, rng: torch.Generator) -> dict[str, list[Opinion]]:
    """Return opinions on values that follow from the splits of trees by split; none without any."""
    victim = view.victim
    if view.side != "active" or victim is None or len(view.aux_rows) < 2 or find_bounds(view, victim) is None:
        return {}
    device, rows = view.aux_rows.device, view.aux_rows
    part = torch.randperm(len(rows), generator=rng).to(device) % FOLDS
    held_out = {s: torch.zeros(len(rows), view.n_classes, dtype=torch.float64, device=device) for s in view.features}
    for fold in range(min(FOLDS, len(rows))):
        rest, out = view.restrict(torch.nonzero(part != fold)[:, 0]), part == fold
        loose = fill_between(rest, victim)[view.aux_split]
        for s, values in held_out.items():  # rows of other splits are in no histogram
            known = solve_histograms(rest, victim) if s == view.aux_split else loose
            values[out] = known.to(device)[rows[out]]
    opinions = {s: [Opinion(x.to(device), held_out[s])] for s, x in recover_columns(view, victim).items()}
    for s, others in learn_columns(view, victim, rng).items():
        opinions[s] += others
    return opinions


class FusedModel(NamedTuple):
    """The model of the splits that the same tables cover.

    Attributes:
        mixture: Gaussian processes on the tables, fitted to the auxiliary rows.
        tables: those that cover the splits, by name.
        view: whose tables they are.
    """

    mixture: Mixture
    tables: Mapping[str, SourceTable]
    view: View

    @property
    def read_by_trees(self) -> list[tuple[str, ...]]:
        """Names of the tables of each forest: own columns, and all tables."""
        everything = tuple(name for name, source in self.tables.items() if not source.rescaled)
        columns = tuple(name for name in everything if name == COLUMNS)
        return [names for names in dict.fromkeys((columns, everything)) if names]

    def predict(self, split: str) -> Tensor:
        """Return predictions (n, d) of the rows of ``split``."""
        prediction = self.mixture.predict(self.units(split))
        return prediction.expand(len(self.view.features[split]), -1)  # one for all rows without tables

    def units(self, split: str) -> dict[str, Tensor]:
        """Return the tables of ``split`` that the mixture reads, by the name of the kernel."""
        names = self.mixture.coefficients
        return {name: _scale_source(self.view, name.removesuffix(_DISTANCES), split) for name in names}

    def join_tables(self, names: Iterable[str], split: str) -> Tensor:
        """Return tables of ``split`` side by side, (n, k)."""
        return torch.cat([self.tables[name].table[split].float() for name in names], dim=1)


def _fit_models(view: View, targets: Tensor, likelihood: Likelihood, rng: torch.Generator) -> dict[str, FusedModel]:
    """Return a model for each split, fitted to the ``targets`` (m, d) of the auxiliary rows."""
    held = list_sources(view)
    by_tables: dict[frozenset[str], FusedModel] = {}
    models = {}
    for split in view.features:
        covering = frozenset(name for name, source in held.items() if split in source.table)
        if covering not in by_tables:
            tables = {name: held[name] for name in held if name in covering}
            mixture = Mixture(_make_kernels(tables, view), view.aux_rows, targets, likelihood, rng)
            by_tables[covering] = FusedModel(mixture, tables, view)
        models[split] = by_tables[covering]
    return models


def _count_budget(models: Iterable[FusedModel]) -> dict[str, float]:
    return {"candidates": sum(mixture.n_tried for mixture in {id(m.mixture): m.mixture for m in models}.values())}


@memoize
def _scale_source(view: View, name: str, split: str) -> Tensor:
    """Return a source's rows of ``split``, scaled by those of the auxiliary split."""
    table = list_sources(view)[name].table
    return scale_rows(table[split], table[view.aux_split])


def _make_kernels(held: Mapping[str, SourceTable], view: View) -> dict[str, Kernel]:
    """Return a linear kernel for each source, and one of distances where the source asks for it."""
    kernels = {}
    for name, source in held.items():
        x = _scale_source(view, name, view.aux_split)
        if source.linear:
            kernels[name] = Kernel(x)
        if source.distances:
            kernels[name + _DISTANCES] = Kernel(x, nonlinear=True)
    return kernels


def _score_values(targets: Tensor) -> Likelihood:
    """Return the log likelihood of values with Gaussian errors, divided by the number of columns."""

    def likelihood(predicted: Tensor, rows: Tensor) -> Tensor:
        errors = (predicted - targets[rows]).square().mean(dim=(1, 2)).clamp_min(torch.finfo(targets.dtype).tiny)
        return -len(rows) / 2 * errors.log()

    return likelihood


class Distilled(NamedTuple):
    """Guesses (m, k) of other rows, and those (P, k) of the rows that are learned from, each without its own target."""

    guesses: Tensor
    left_out: Tensor


def draw_rows(n_rows: int, known: Tensor, rng: torch.Generator) -> Tensor:
    """Return the positions of the rows to learn from: the ``known`` ones, then up to ``MAX_GUESSED_ROWS`` at random."""
    others = torch.randperm(n_rows, generator=rng).to(known.device)
    return torch.cat([known, others[~torch.isin(others, known)][:MAX_GUESSED_ROWS]])


def learn_guesses(
    targets: Tensor, parts: Sequence[tuple[Tensor, Tensor]], n_scored: int, rng: torch.Generator
) -> Distilled:
    """Learn guesses of rows with a Gaussian process and with randomized trees, and predict other rows.

    The process has a kernel of distances. The leave-one-out error of the first ``n_scored`` targets chooses its noise
    and a length scale of each part: a few numbers that another party sent can say more than many local columns. Trees
    follow steps and interactions. Errors of left-out rows weigh the two for each target.

    Source: Hinton, Vinyals, Dean 2015, "Distilling the knowledge in a neural network"; Rasmussen and Williams 2006,
    sections 2.2, 5.1 and 5.4.2; Geurts, Ernst, Wehenkel 2006, "Extremely randomized trees".

    Args:
        targets: (P, k) guesses of the rows to learn from, repetitions of ``n_scored`` columns.
        parts: what is known of these rows (P, q), and the same of the other rows (m, q).
        n_scored: targets that choose.
        rng: draws the trees.
    """
    units = [(scale_rows(x.double(), x.double()), scale_rows(new.double(), x.double())) for x, new in parts]
    process, trees = _learn_by_process(targets, units, n_scored), _learn_by_trees(targets, units, rng)
    difference = (trees.left_out - process.left_out)[:, :n_scored]
    missing = (targets - process.left_out)[:, :n_scored]
    smallest = torch.finfo(targets.dtype).tiny
    share = ((difference * missing).sum(dim=0) / difference.square().sum(dim=0).clamp_min(smallest)).clamp(0, 1)
    share = share.repeat(targets.shape[1] // n_scored)
    return Distilled(*(a + share * (b - a) for a, b in zip(process, trees, strict=True)))


def _learn_by_trees(targets: Tensor, units: Sequence[tuple[Tensor, Tensor]], rng: torch.Generator) -> Distilled:
    x, new = (torch.cat(side, dim=1).cpu().numpy() for side in zip(*units, strict=True))
    seed = int(torch.randint(2**31, (), generator=rng))
    trees, left_out = fit_out_of_bag(x, targets.cpu().numpy(), seed, share=0.6)
    predicted = trees.predict(new).reshape(len(new), -1)
    return Distilled(*(torch.from_numpy(part).to(targets) for part in (predicted, left_out)))


def _learn_by_process(targets: Tensor, units: Sequence[tuple[Tensor, Tensor]], n_scored: int) -> Distilled:
    given, new = zip(*units, strict=True)
    searched = slice(None, None, -(-len(targets) // SEARCHED))
    tried = (
        _fit_process([x[searched] for x in given], lengths, targets[searched], n_scored)
        for lengths in product(LENGTHS, repeat=len(units))
    )
    process = _fit_process(given, min(tried, key=lambda each: each.error).lengths, targets, n_scored)
    kernel = process.kernel
    predicted = kernel.times(_scale(new, process.lengths), kernel.x, process.coefficients) + targets.mean(dim=0)
    return Distilled(predicted, process.left_out)


class _Process(NamedTuple):
    error: float
    lengths: tuple[float, ...]
    kernel: Kernel
    coefficients: Tensor
    left_out: Tensor


def _scale(units: Sequence[Tensor], lengths: Sequence[float]) -> Tensor:
    return torch.cat([x / length for x, length in zip(units, lengths, strict=True)], dim=1)


def _fit_process(units: Sequence[Tensor], lengths: tuple[float, ...], targets: Tensor, n_scored: int) -> _Process:
    """Return the process with the noise of the least leave-one-out error."""
    kernel, mean = Kernel(_scale(units, lengths), nonlinear=True), targets.mean(dim=0)
    values, vectors = torch.linalg.eigh(kernel.compute_similarity(kernel.x, kernel.x))
    rotated, squares, tried = vectors.T @ (targets - mean), vectors.square(), []
    for noise in NOISE.tolist():
        inverse = 1 / (values.clamp_min(0) + noise)
        solved = vectors @ (rotated * inverse[:, None])
        errors = solved / (squares @ inverse)[:, None]
        error = float(errors[:, :n_scored].square().mean())
        tried.append(_Process(error, lengths, kernel, solved, targets - errors))
    return min(tried, key=lambda process: process.error)
