"""Columns that a linear bottom model embeds: the gradients that its owner received, replayed, and lattice decoding.

The gradient of a linear bottom model is X^T G, and the active party sent G. With the agreed optimizer, a guess of X
gives every change of the model, and releases of different times can be compared as if one model had sent them. Once
the model is known, the few numbers that it sends of a test row determine all columns whose values lie on grids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.core.message import Kind
from vflsec.core.settings import TrainSpec
from vflsec.core.view import View
from vflsec.inference.discrete import FOLDS, extend_grid, find_discrete, round_softly
from vflsec.inference.opinion_pool import Opinion, blend_opinions
from vflsec.inference.releases import read_last_values, read_releases
from vflsec.nn.wide import create_optimizer

ITERATIONS, PATIENCE = 16, 2
"""Iterations at most, and those without a smaller error after which the replay ends."""

GAIN = 0.9
"""Share of the error that is worth another iteration, or a blend with the guess to begin with."""

EXACT = 1e-12
"""Error at which the replay ends."""

CHUNK = 5_000_000
"""Entries of the models of several rows that are in memory at once."""

MAX_NUMBERS = 160
"""Of a row's releases: of more, epochs at equal distances are read."""

MAX_PATH = 20_000_000
"""Entries of all models of a training, beyond which it is not replayed."""

MAX_DESIGN = 20_000_000
"""Entries of the design of the corrections, of known rows and of sure rows each."""

MAX_KNOTS = 16

MAX_SURE_ROWS, SURE = 1200, 1e-3
"""Rows that count as known at most, and the distance of their guesses from values that makes them sure."""

RIDGES = (1e-6, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e4)
"""Candidate penalties of what the replay leaves of the models."""

TRIMMED = 4.0
"""Times the median residual beyond which a row does not count for the model."""

MAX_RESIDUAL = 8.0
"""Times the residual of the model, beyond which a decoded row is not believed."""

MIN_RESIDUAL = 3e-7
"""Of embeddings of length one: they are rounded to single precision."""

MAX_NOISE = 1e-3
"""Share of the deviation of embeddings that the last model may leave: its rows are points of a lattice up to that."""

MAX_DECODED = 48
"""Columns on grids, beyond which rows are not decoded."""

MIN_SPREAD = 0.1
"""Steps of a grid that a guess may be wrong by, at least."""

Grid = tuple[float, float]
"""First value and step."""


class Training(NamedTuple):
    """What the active party knows of a training, in which every row is in as many batches.

    Attributes:
        values: (n, T, c) the embeddings of each row in order.
        steps: (n, T) in which they were sent.
        batches: rows (B,) and sent gradient (B, c) of each step.
        spec: of the optimizer and its rate.
    """

    values: Tensor
    steps: Tensor
    batches: list[tuple[Tensor, Tensor]]
    spec: TrainSpec

    def replay(self, x: Tensor) -> Tensor:
        """Return the changes (S + 1, d + 1, c) of the model until each step, if the rows are ``x`` (n, d + 1)."""
        weights = nn.Parameter(torch.zeros(x.shape[1], self.values.shape[2], dtype=x.dtype, device=x.device))
        optimizer, changes = create_optimizer([weights], self.spec), [weights.detach().clone()]
        passes, n_batches = self.spec.count_epochs(len(x)), math.ceil(len(x) / self.spec.batch)
        for step, (rows, gradient) in enumerate(self.batches):
            optimizer.param_groups[0]["lr"] = self.spec.rate(step // n_batches, passes)
            weights.grad = x[rows].T @ gradient
            optimizer.step()
            changes.append(weights.detach().clone())
        return torch.stack(changes)

    def infer(self, rows: Tensor, models: Tensor, noise: Tensor, targets: Tensor) -> Tensor:
        """Return the posterior mean (b, d) of ``rows`` (b,) given their releases.

        Args:
            rows: their positions.
            models: (S, d + 1, c) of all steps.
            noise: (T c, T c) inverse of the covariance of the errors.
            targets: (m, d) known rows, whose mean and covariance are the prior's.
        """
        mean, inferred = targets.mean(dim=0), []
        prior = _invert(targets - mean)
        for part in torch.split(rows, max(1, CHUNK // (models[0].numel() * self.steps.shape[1]))):
            functions = models[self.steps[part]].movedim(1, 2).flatten(2)  # (b, d + 1, T c)
            slopes = functions[:, :-1]
            weighed = slopes @ noise
            missing = self.values[part].flatten(1) - functions[:, -1] - mean @ slopes
            squares, products = weighed @ slopes.mT + prior, (weighed @ missing[:, :, None])[..., 0]
            inferred.append(mean + torch.linalg.solve(squares, products))
        return torch.cat(inferred)

    def embed_last(self, x: Tensor, changes: Tensor) -> Tensor:
        """Return the last embedding (n, c) of each row of ``x`` (n, d + 1) as if the last model had sent it."""
        drift = [
            torch.einsum("nd,ndc->nc", rows, changes[-1] - changes[steps])
            for rows, steps in zip(torch.split(x, 256), torch.split(self.steps[:, -1], 256), strict=True)
        ]
        return self.values[:, -1] + torch.cat(drift)


def read_training(view: View) -> Training | None:
    """Return the training of the victim's bottom model; None if it cannot be replayed."""
    spec, names = view.agreed.get("train"), view.party.split("+")
    sent = [m for m in view.messages if m.kind is Kind.GRADIENT and m.sender in names and m.receiver == view.victim]
    if spec is None or not sent or view.aux_split != "train" or not view.adaptive:
        return None
    releases = read_releases(view, Kind.EMBEDDING, sender=view.victim, phase=sent[-1].phase)
    batches = [(m.rows, m.payload["value"].double()) for m in sent if m.rows is not None]
    times, width = int(releases.epoch.max()) + 1, releases.values.shape[1]
    if (
        len(releases.rows) != times * releases.n_rows
        or len(batches) * (view.n_classes + 1) * width > MAX_PATH
        or not torch.equal(torch.cat([rows for rows, _ in batches]), releases.rows)
    ):
        return None
    order = releases.rows.argsort(stable=True)
    entries = (MAX_KNOTS + 1) * (view.n_classes + 1) * len(view.aux_rows)
    most = max(2, min(MAX_NUMBERS // width, MAX_DESIGN // max(1, entries)))
    read = torch.linspace(0, times - 1, min(times, most)).round().long()
    values = releases.values[order].double().view(-1, times, width)[:, read]
    return Training(values, releases.message[order].view(-1, times)[:, read], batches, spec)


def refine_by_replay(view: View, opinions: Mapping[str, Opinion], targets: Tensor) -> dict[str, Opinion]:
    """Return the opinions on rows of each split, or nearer ones if the victim's bottom model is linear.

    Every iteration replays the training from the guesses, corrects the models smoothly so that known rows fit, infers
    the rows from all their releases, and rounds columns of few values softly. Rows that are then sure count as known.
    Known rows are left out of what infers them; their errors choose the iteration.

    Source: this project; Lenstra, Lenstra, Lovasz 1982 and Babai 1986 for the decoding of test rows.

    Args:
        view: of an active party.
        opinions: to begin with, by split.
        targets: (m, d) values of the known rows.
    """
    training = read_training(view)
    if training is None or len(targets) < 2 * FOLDS:
        return dict(opinions)
    first = best = current = opinions["train"]
    worse = 0
    for _ in range(ITERATIONS):
        current = _infer(training, current, view, targets)
        blended = blend_opinions([current, first], targets)
        nearer = current if GAIN * _compute_error(current, targets) <= _compute_error(blended, targets) else blended
        is_better = _compute_error(nearer, targets) < GAIN * _compute_error(best, targets)
        best, worse = (nearer, 0) if is_better else (best, worse + 1)
        if worse == PATIENCE or _compute_error(best, targets) < EXACT:
            break
    if best is first:
        return dict(opinions)
    others = {s: _decode_split(view, training, best, opinions[s], s, targets) for s in opinions if s != "train"}
    return {**opinions, "train": best, **others}


def _compute_error(opinion: Opinion, targets: Tensor) -> float:
    return float((opinion.held_out - targets).square().mean())


def _with_constant(opinion: Opinion, known: Tensor) -> Tensor:
    """Return the guesses (n, d + 1) of all rows and a one; of ``known`` rows those that left them out."""
    x = opinion.scores.double().clone()
    x[known] = opinion.held_out.double()
    return F.pad(x, (0, 1), value=1.0)


def _infer(training: Training, current: Opinion, view: View, targets: Tensor) -> Opinion:
    """Return the opinion from all releases and a replay of the ``current`` guesses.

    What the replay leaves of the models is a smooth function of time, which known and sure rows give. The residuals of
    known rows, cross-fitted, are the noise.
    """
    x, known = _with_constant(current, view.aux_rows), view.aux_rows
    changes, bases = training.replay(x)[:-1], _make_ramps(training)
    sure = _find_sure(x[:, :-1], targets, view)
    room = min(MAX_SURE_ROWS, MAX_DESIGN // (bases.shape[1] * x.shape[1] * training.steps.shape[1]))
    sure = sure[~torch.isin(sure, known)][:room]
    rows = F.pad(torch.cat([targets, x[sure, :-1]]), (0, 1), value=1.0)
    part = torch.arange(len(rows), device=rows.device) % FOLDS
    places = torch.cat([known, sure])
    parts = [Normal.build(training, places[part == fold], rows[part == fold], changes, bases) for fold in range(FOLDS)]
    in_order = torch.cat([torch.nonzero(part == fold)[:, 0] for fold in range(FOLDS)])
    residual, fits, ridge = _fit_across(parts, x.shape[1], in_order < len(targets))
    noise, held_out = _invert(residual.flatten(1)), torch.zeros_like(targets)
    for fold, fit in enumerate(fits):
        left = part[: len(targets)] == fold
        models = changes + torch.einsum("sk,kdc->sdc", bases, fit)
        held_out[left] = training.infer(known[left], models, noise, targets[~left])
    models = changes + torch.einsum("sk,kdc->sdc", bases, Normal.add(parts).solve(ridge, x.shape[1]))
    everything = torch.arange(len(x), device=x.device)
    inferred = Opinion(training.infer(everything, models, noise, targets), held_out)
    return round_softly(inferred, targets, view.layout)


def _fit_across(parts: Sequence[Normal], width: int, judges: Tensor) -> tuple[Tensor, list[Tensor], float]:
    """Return residuals (m, T, c) of rows that ``judges`` marks, the correction without each part, and the penalty."""
    tried = []
    for ridge in RIDGES:
        fits = [Normal.add(parts, leave=fold).solve(ridge, width) for fold in range(len(parts))]
        residual = torch.cat([part.residual(fit) for part, fit in zip(parts, fits, strict=True)])[judges]
        tried.append((residual, fits, ridge))
    return min(tried, key=lambda each: float(each[0].square().mean()))


def _make_ramps(training: Training) -> Tensor:
    """Return a constant and functions of time (S, k) that rise from 0 to 1, each between two knots."""
    knots = torch.linspace(0, len(training.batches) - 1, min(training.values.shape[1], MAX_KNOTS) + 1).double()
    time = torch.arange(len(training.batches))[:, None]
    ramps = ((time - knots[:-1]) / knots.diff()).clamp(0, 1)
    return F.pad(ramps, (1, 0), value=1.0).to(training.values)


def _find_sure(guess: Tensor, targets: Tensor, view: View) -> Tensor:
    """Return the positions of rows of which every column is at a value that it takes; none with continuous columns."""
    gap = torch.zeros_like(guess).masked_fill(targets.std(dim=0) > 0, torch.inf)
    for block in find_discrete(targets, view.layout):
        distance, _ = torch.cdist(guess[:, block.columns], block.values).min(dim=1)
        gap[:, block.columns] = (distance / block.values.std(dim=0).max())[:, None]
    return torch.nonzero(gap.amax(dim=1) < SURE)[:, 0]


class Normal(NamedTuple):
    """Normal equations of the correction of models, from rows that are known.

    Attributes:
        squares: (p, p) of the ``design``.
        products: (p, c).
        design: (m, T, p) time functions of each release times the row.
        rest: (m, T, c) what the replay does not explain.
    """

    squares: Tensor
    products: Tensor
    design: Tensor
    rest: Tensor

    @classmethod
    def build(cls, training: Training, places: Tensor, rows: Tensor, changes: Tensor, bases: Tensor) -> Normal:
        """Read the releases of ``rows`` (m, d + 1) at ``places`` (m,)."""
        steps = training.steps[places]
        design = torch.einsum("mtk,md->mtkd", bases[steps], rows).flatten(2)
        drift = [torch.einsum("md,mdc->mc", rows, changes[step]) for step in steps.T]
        rest = training.values[places] - torch.stack(drift, dim=1)
        flat = design.flatten(0, 1)
        return cls(flat.T @ flat, flat.T @ rest.flatten(0, 1), design, rest)

    @classmethod
    def add(cls, parts: Sequence[Normal], leave: int = -1) -> Normal:
        """Return the sum of the equations of all parts but one; the rows are those of the first."""
        kept = [part for k, part in enumerate(parts) if k != leave]
        squares, products = (torch.stack(terms).sum(dim=0) for terms in list(zip(*kept, strict=True))[:2])
        return cls(squares, products, *kept[0][2:])

    def solve(self, ridge: float, width: int) -> Tensor:
        """Return the correction (k, d + 1, c) with a penalty on all but the constant."""
        penalty = torch.full((len(self.squares),), ridge).to(self.squares)
        penalty[:width] = min(RIDGES)
        solution: Tensor = torch.linalg.solve(self.squares + penalty.diag(), self.products)
        return solution.view(-1, width, solution.shape[1])

    def residual(self, fit: Tensor) -> Tensor:
        """Return what the correction leaves (m, T, c)."""
        return self.rest - self.design @ fit.flatten(0, 1)


def _invert(errors: Tensor) -> Tensor:
    """Return the inverse (q, q) of the covariance of ``errors`` (m, q), shrunk toward its diagonal."""
    m, q = errors.shape
    covariance, share = errors.T @ errors / m, q / (q + m)
    shrunk = (1 - share) * covariance + share * covariance.diagonal().diag()
    return torch.as_tensor(
        torch.linalg.inv(shrunk + torch.eye(q).to(errors) * (1e-13 + 1e-4 * shrunk.diagonal().mean()))
    )


def _decode_split(
    view: View, training: Training, opinion: Opinion, guess: Opinion, split: str, targets: Tensor
) -> Opinion:
    """Return the opinion ``guess`` on ``split``, blended with the columns that the last model determines.

    Known rows are decoded from their last releases, to judge.
    """
    x = _with_constant(opinion, view.aux_rows)
    embeddings = training.embed_last(x, training.replay(x))
    sent = read_last_values(view, Kind.EMBEDDING, sender=view.victim).get(split)
    model = LastModel.fit(x, embeddings)
    grids = _find_grids(view, targets)
    is_exact = model.residual <= MAX_NOISE * float(embeddings.std())
    if sent is None or not is_exact or not 0 < len(grids) <= MAX_DECODED:
        return guess
    deviation = (guess.held_out - targets).square().mean(dim=0).sqrt()
    decoded = [
        model.decode(e.double(), center.double(), deviation, grids)
        for e, center in ((sent, guess.scores), (embeddings[view.aux_rows], guess.held_out))
    ]
    return blend_opinions([Opinion(*decoded), guess], targets)


def _find_grids(view: View, targets: Tensor) -> dict[int, Grid]:
    """Return the first value and the step of each column whose values are evenly spaced, by its number."""
    grids = {}
    for block in find_discrete(targets, view.layout):
        for place, column in enumerate(block.columns):
            values = torch.unique(block.values[:, place])
            grid = extend_grid(values) if len(values) > 1 else None
            if grid is not None:
                grids[column] = float(grid[0]), float(grid[1] - grid[0])
    return grids


class LastModel(NamedTuple):
    """Weights (d + 1, c) of the last bottom model, and the root mean square of its residuals."""

    weights: Tensor
    residual: float

    @classmethod
    def fit(cls, x: Tensor, embeddings: Tensor) -> LastModel:
        """Fit ``embeddings`` (n, c) to rows ``x`` (n, d + 1) by trimmed least squares."""
        kept = torch.ones(len(x), dtype=torch.bool, device=x.device)
        for _ in range(12):
            weights = torch.linalg.lstsq(x[kept].cpu(), embeddings[kept].cpu(), driver="gelsd").solution.to(x)
            missing = (embeddings - x @ weights).abs().amax(dim=1)
            enough = missing.kthvalue(min(len(x), 10 * x.shape[1])).values
            kept = missing <= torch.maximum(TRIMMED * missing[kept].median(), enough)
        residual = float(missing[kept].square().mean().sqrt())
        return cls(weights, max(residual, MIN_RESIDUAL * float(embeddings.std())))

    def decode(self, embeddings: Tensor, center: Tensor, deviation: Tensor, grids: Mapping[int, Grid]) -> Tensor:
        """Return the rows (n, d) near ``center`` (n, d) with these ``embeddings`` (n, c) and values on ``grids``.

        Other columns are solved for afterwards. Rows without such values stay at the center.

        Args:
            embeddings: of the model.
            center: guesses of the rows.
            deviation: (d,) of their errors.
            grids: first value and step of columns.
        """
        x, on_grid = center.clone(), list(grids)
        constant = deviation <= 1e-6 * deviation.max()
        others = [j for j in range(len(deviation)) if j not in grids and not constant[j]]
        if len(others) >= embeddings.shape[1]:
            return x
        fixed = [j for j in range(len(deviation)) if j not in grids and constant[j]]
        w, start, step = self.weights[:-1], *torch.tensor([grids[j] for j in on_grid], dtype=x.dtype).to(x).T
        rest = embeddings - self.weights[-1] - x[:, fixed] @ w[fixed] - start @ w[on_grid]
        free = torch.linalg.svd(w[others].T).U[:, len(others) :] / self.residual  # (c, r), orthogonal to the others
        near = 1 / deviation[on_grid].clamp_min(MIN_SPREAD * step)
        basis = torch.cat([step[:, None] * w[on_grid] @ free, (step * near).diag()], dim=1)
        points = torch.cat([rest @ free, (x[:, on_grid] - start) * near], dim=1)
        moves = step * find_nearest(basis, points)
        x[:, on_grid] = start + moves
        rest = rest - moves @ w[on_grid]
        if others:
            x[:, others] = torch.linalg.lstsq(w[others].T, rest.T).solution.T
        missing = (rest - x[:, others] @ w[others]).abs().amax(dim=1)
        return torch.where((missing <= MAX_RESIDUAL * self.residual)[:, None], x, center)


def find_nearest(basis: Tensor, points: Tensor) -> Tensor:
    """Return integers (n, k) whose sums of the rows of ``basis`` (k, p) are near ``points`` (n, p).

    Source: Babai 1986, "On Lovasz' lattice reduction and the nearest lattice point problem", on a basis that is reduced
    as by Lenstra, Lenstra, Lovasz 1982.
    """
    from sympy import ZZ  # it takes a second, and few attacks need it
    from sympy.polys.matrices import DomainMatrix

    scaled = (basis * 256).round().long().tolist()
    _, transform = DomainMatrix(scaled, (len(basis), basis.shape[1]), ZZ).lll_transform()
    turns = torch.tensor([[float(x) for x in row] for row in transform.to_list()], dtype=basis.dtype)
    q, r = torch.linalg.qr((turns @ basis.cpu()).T)  # columns of the reduced basis
    y, z = points.cpu() @ q, torch.zeros(len(points), len(basis), dtype=basis.dtype)
    for j in reversed(range(len(basis))):
        z[:, j] = ((y[:, j] - z[:, j + 1 :] @ r[j, j + 1 :]) / r[j, j]).round()
    return (z @ turns).round().to(points)
