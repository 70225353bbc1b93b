"""Noised sums over batches, solved for the numbers of each row that were summed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from vflsec.core.message import Kind, Message
from vflsec.core.view import View, memoize
from vflsec.nn.jacobians import compute_jacobians, get_learned, scale_to_unit
from vflsec.nn.wrappers import SideBySide

PRIOR, DRIFT = 0.25, 0.01
"""Variance of a number before any sum is read, and what it gains from one epoch to the next."""


def tabulate_sums(view: View) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Yield what the noised sums say of each training row."""
    if (solved := solve_sums(view)) is not None:
        yield "solved sums", {view.aux_split: solved}


@memoize
def solve_sums(view: View) -> Tensor | None:
    """Return what all sums say of each row's numbers: (n, 2 m), or None without any.

    The first half are the last means, and the second half the sums of the means over all epochs: where training fits
    the labels, the last residuals are 0.

    The sums are linear in the residuals of the rows, with weights and noise that the adversary knows. Residuals start
    independent, with mean 0, and drift from epoch to epoch. Batches are read in order by a Kalman filter that keeps the
    variance of each number, and forgets covariances between rows: each batch is solved exactly.
    """
    messages = [m for m in view.messages if m.kind is Kind.SUM and m.split == view.aux_split and m.rows is not None]
    if not messages or view.model is None:
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


def compute_weights(view: View, message: Message) -> Tensor:
    """Return the weights (B, m, P) of the rows in the sums of ``message``, as their receiver computed them."""
    model, columns = _get_model(view, message.receiver)
    shapes = get_learned(model)
    parts = torch.split(message.payload["parameters"], [p.numel() for p in shapes.values()])
    learned = {name: part.reshape(p.shape) for (name, p), part in zip(shapes.items(), parts, strict=True)}
    x = view.features[view.aux_split][message.rows, columns]
    jacobians = (block for block, _ in compute_jacobians(model, x, learned=learned))
    head = message.payload.get("head")
    return torch.cat([scale_to_unit(block if head is None else head @ block) for block in jacobians]).double()


def _get_model(view: View, party: str) -> tuple[nn.Module, slice]:
    """Return the bottom model of one of the adversary's parties, and its columns among all of the adversary's."""
    model = view.model
    assert model is not None
    if not isinstance(model, SideBySide):
        return model, slice(None)
    number = view.party.split("+").index(party)
    start = sum(model.columns[:number])
    return model.models[number], slice(start, start + model.columns[number])


def _update(mean: Tensor, variance: Tensor, weights: Tensor, total: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """Return the mean and variance (B, m) of the numbers, given their weighted sums (P,).

    Of the two systems that give the same answer, (P, P) and (B m, B m), the smaller one is solved.
    """
    a, v = weights.flatten(0, 1), variance.flatten()  # (B m, P), (B m,)
    surprise = total.double() - mean.flatten() @ a
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
    return mean + gain.reshape(mean.shape), (v - explained).clamp(min=1e-9).reshape(mean.shape)
