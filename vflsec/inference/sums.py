"""Noised sums over batches, solved for the numbers of each row that were summed, and for its label."""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad

from vflsec.core.message import Kind, Message
from vflsec.core.view import View, memoize_for_all
from vflsec.nn.jacobians import compute_jacobians, get_learned, scale_to_unit
from vflsec.nn.wrappers import SideBySide

PRIOR, DRIFT = 0.25, 0.01
"""Variance of a number before any sum is read, and what it gains from one epoch to the next."""

WAVES, SHARED, REST, MISSED, MOVED = 100, 0.04, 0.2, 1e-3, 1e-5
"""Number of random features of own columns. Variances before any sum is read: of the part of a label that is a function
of them, of the row's own part, of the function that p is besides what is known of it, and what that gains by batch."""


def tabulate_sums(view: View) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Yield what the noised sums say of each training row."""
    if (solved := solve_sums(view)) is not None:
        yield "solved sums", {view.aux_split: solved}
    if (labels := estimate_labels(view)) is not None:
        yield "labels by sums", {view.aux_split: labels}


@memoize_for_all
def solve_sums(view: View) -> Tensor | None:
    """Return what all sums say of each row's numbers: (n, 2 m), or None without any.

    The first half are the last means, and the second half the sums of the means over all epochs: where training fits
    the labels, the last residuals are 0.

    The sums are linear in the residuals of the rows, with weights and noise that the adversary knows. Residuals start
    independent, with mean 0, and drift from epoch to epoch. Batches are read in order by a Kalman filter that keeps the
    variance of each number, and forgets covariances between rows: each batch is solved exactly.
    """
    messages = _list_messages(view)
    if not messages:
        return None
    states: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for message in messages:
        weights = compute_weights(view, message)  # (B, m, P)
        source = "residuals" if "head" in message.payload else message.receiver  # which parties share, or not
        if source not in states:
            shape = (len(view.features[view.aux_split]), weights.shape[1])
            states[source] = weights.new_zeros(shape), weights.new_full(shape, PRIOR - DRIFT), weights.new_zeros(shape)
        mean, variance, over_epochs = states[source]
        rows, noise = message.rows, float(message.payload["noise"])
        assert rows is not None
        mean[rows], variance[rows] = _update(mean[rows], variance[rows] + DRIFT, weights, message.payload["sum"], noise)
        over_epochs[rows] += mean[rows]
    halves = zip(*((mean, over_epochs) for mean, _, over_epochs in states.values()), strict=True)
    return torch.cat([torch.cat(half, dim=1) for half in halves], dim=1).float()


@memoize_for_all
def estimate_labels(view: View) -> Tensor | None:
    """Return the mean of each row's label given all sums, (n, 1), or None without a linear head and two classes.

    A residual is p - y. Of p the adversary knows its own part of the score; the rest is a function of its columns that
    moves as training goes on. y is another one, which does not, plus a part of the row's own. All are Gaussian, the
    functions linear in random features. A Kalman filter over all batches gives the functions; with y's function given,
    a second one gives what the sums leave unexplained, which is the rows' own parts. It reads the batches at the same
    time, before that function is known: what it leaves is linear in it. No label has to be known.
    """
    messages = [m for m in _list_messages(view) if len(m.payload.get("head", ())) == 1]
    if not messages:
        return None
    scores: dict[int, Tensor] = {}
    for message in messages:  # colluding parties add theirs up
        scores[message.step] = scores.get(message.step, torch.zeros(())) + _compute_score(view, message)
    features = _draw_features(view.features[view.aux_split].cpu())
    width = features.shape[1]
    rest, informed = features.new_zeros(len(features), width + 1), features.new_zeros(len(features), 1)
    states = [features.new_zeros(2 * width, 1), pad(torch.eye(2 * width, width).to(features), (0, 1))]
    covariances = [torch.diag(features.new_tensor([v, MISSED]).repeat_interleave(width)) for v in (SHARED, 1e-9)]
    for message in messages:  # both filters at once, so that no weights are kept
        assert message.rows is not None
        rows, (weights, totals) = message.rows.cpu(), _whiten(view, message, torch.sigmoid(scores[message.step]))
        a = features[rows].T @ weights
        a = torch.cat([-a, a])  # of the function of y, and of that of p
        for k, state in enumerate(states):
            covariances[k].diagonal()[width:] += MOVED
            covariances[k] = torch.linalg.inv(torch.linalg.inv(covariances[k]) + a @ a.T)
            surprise = pad(totals[:, None], (state.shape[1] - 1, 0)) - a.T @ state
            states[k] = state + covariances[k] @ (a @ surprise)
        rest[rows] -= weights @ (pad(totals[:, None], (width, 0)) - a.T @ states[1])
        informed[rows] += weights.square().sum(dim=1, keepdim=True)
    mean = states[0][:width]
    apart = rest @ torch.cat([mean, mean.new_ones(1, 1)])
    labels: Tensor = features @ mean + REST * apart / (REST * informed).clamp(min=1)
    return labels.to(view.features[view.aux_split])


def _list_messages(view: View) -> list[Message]:
    """Return those with sums over the rows of the auxiliary split; none without a model to weigh rows with."""
    messages = [m for m in view.messages if m.kind is Kind.SUM and m.split == view.aux_split and m.rows is not None]
    return [] if view.model is None else messages


def _draw_features(x: Tensor) -> Tensor:
    """Return cosines (n, WAVES + 1) in random directions of the columns (n, p), and 1."""
    rng = torch.Generator().manual_seed(0)
    x = x.double() - x.double().median(dim=0).values  # not standardized, which would make rare categories the longest
    lengths = x.norm(dim=1)
    length = 1.5 * lengths[lengths > 0].median() if lengths.any() else 1.0
    directions = torch.randn(x.shape[1], WAVES, generator=rng, dtype=torch.float64) / length
    shifts = 2 * math.pi * torch.rand(WAVES, generator=rng, dtype=torch.float64)
    return pad(torch.cos(x @ directions + shifts) * (2 / WAVES) ** 0.5, (0, 1), value=1.0)


def _compute_score(view: View, message: Message) -> Tensor:
    """Return the part of the scores (B,) that the receiver of ``message`` knows."""
    model, learned, x = _restore(view, message)
    with torch.no_grad():
        score: Tensor = functional_call(model, learned, (x,)) @ message.payload["head"][0]
    return score.double().cpu()


def _whiten(view: View, message: Message, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights (B, k) of the rows and the sums (k,) of ``message``, less those of ``p`` (B,).

    In each direction the sum has variance 1 given the functions of own columns. Those that noise hides are left out.
    """
    noise, total = float(message.payload["noise"]), message.payload["sum"].double().cpu()
    a, group, total = _merge_rows(compute_weights(view, message)[:, 0].cpu(), total)
    roots = torch.bincount(group)[:, None].double().sqrt()
    a = a * roots
    energy, basis = torch.linalg.eigh(a.T @ a if a.shape[1] <= a.shape[0] else a @ a.T)
    seen = energy > 1e-9 * energy[-1] + 1e-3 * noise**2
    energy, basis = energy[seen], basis[:, seen]
    directions = basis if a.shape[1] <= a.shape[0] else a.T @ basis / energy.sqrt()
    directions = directions / (noise**2 + REST * energy).sqrt()
    weights = (a @ directions / roots)[group]
    return weights, total @ directions - p @ weights


def _merge_rows(a: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return unique rows of weights (B, P), indices (B,) of all rows among them, and sums (P,), of used parameters."""
    used = a.any(dim=0)
    return *torch.unique(a[:, used], dim=0, return_inverse=True), total[used]


def compute_weights(view: View, message: Message) -> Tensor:
    """Return the weights (B, m, P) of the rows in the sums of ``message``, as their receiver computed them."""
    model, learned, x = _restore(view, message)
    jacobians = compute_jacobians(model, x, learned=learned, head=message.payload.get("head"))
    return torch.cat([scale_to_unit(block) for block, _ in jacobians]).double()


def _restore(view: View, message: Message) -> tuple[nn.Module, dict[str, Tensor], Tensor]:
    """Return the model of the receiver of ``message``, its parameters then, and its columns of the batch."""
    model, columns = view.model, slice(None)
    assert model is not None
    if isinstance(model, SideBySide):
        number, widths = view.party.split("+").index(message.receiver), model.columns
        start = sum(widths[:number])
        model, columns = model.models[number], slice(start, start + widths[number])
    shapes = get_learned(model)
    parts = torch.split(message.payload["parameters"], [p.numel() for p in shapes.values()])
    learned = {name: part.reshape(p.shape) for (name, p), part in zip(shapes.items(), parts, strict=True)}
    return model, learned, view.features[view.aux_split][message.rows, columns]


def _update(mean: Tensor, variance: Tensor, weights: Tensor, total: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """Return the mean and variance (B, m) of the numbers, given their weighted sums (P,).

    Of the two systems that give the same answer, (P, P) and (B m, B m), the smaller one is solved.
    """
    a = weights.flatten(0, 1)  # (B m, P)
    a, group, surprise = _merge_rows(a, total.double() - mean.flatten() @ a)
    v = variance.new_zeros(len(a)).index_add(0, group, variance.flatten())  # of the sum of numbers with equal weights
    share = variance.flatten() / v[group]
    floor = noise**2 + 1e-10
    if a.shape[1] <= a.shape[0]:
        covariance = a.T @ (v[:, None] * a)
        covariance.diagonal().add_(floor)
        factor = torch.linalg.cholesky(covariance)
        solved = torch.cholesky_solve(surprise[:, None], factor)[:, 0]
        half = torch.linalg.solve_triangular(factor, a.T, upper=False)  # (P, B m)
        gain, explained = v * (a @ solved), v**2 * half.square().sum(dim=0)
    else:
        precision = a @ a.T / floor
        precision.diagonal().add_(1 / v)
        inverse = torch.linalg.inv(precision)
        gain, explained = inverse @ (a @ surprise) / floor, v - inverse.diagonal()
    gain, explained = share * gain[group], share**2 * explained[group]
    return mean + gain.reshape(mean.shape), (variance - explained.reshape(mean.shape)).clamp(min=1e-9)
