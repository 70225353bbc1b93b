"""Batch label inference: labels from the gradient of the party's own last layer, summed over each batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from vflsec.base.checks import check_positive, check_positive_or_none
from vflsec.base.errors import InsufficientView
from vflsec.core.attack import THRESHOLD, Attack
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.releases import Releases, find_span, read_releases
from vflsec.inference.surrogate_head import (
    MAX_CHANGED_SHARE,
    KnownLabels,
    alternate,
    encode_labels,
    score_gradients,
    share_changed,
    start_fit,
)
from vflsec.nn.wide import WideLinear
from vflsec.nn.wrappers import SideBySide


class BatchLabel(Attack):
    """Label inference for a party that sees only the gradient of its own last layer, summed over each batch.

    That gradient is A'g, where A (B, k) holds the layer's inputs, with a one for the bias, and g (B, d) the gradients
    of the rows. Dummy labels, dummy probabilities of the wrong classes, which stand for the other parties, and a dummy
    top model W (C, d) give dummy gradients of each row, whose sums have to equal the observed ones. Two steps
    alternate: a projection onto the gradients with these sums, and a round of ``exploit``, which finds the labels,
    probabilities and top model that explain the gradients best. A row has one label and one set of probabilities in all
    its releases, so that the different batches of each epoch add information. All batches share W, which starts at the
    known labels.

    In split learning a party receives the gradient of each row. This attack sums them and uses the sums only: it
    measures what would be left if batches were summed before they were sent, for a model of any depth. A is taken from
    the model after training. For a model that does not end in a linear layer, A is its embeddings. Each of several
    colluding parties has an A of its own and observes the sums of its own columns of g.

    Source: Zou et al. 2022, batch-level label inference (arXiv 2112.05409); code of VFLAIR.

    Args:
        rounds: of the alternation.
        releases: number of releases of each row to use, from the first; None for all.
    """

    name = "batch-label"
    contrib = True
    needs = frozenset({Need.GRADIENTS, Need.FEATURES, Need.MODEL, Need.AUX_LABELS})
    reference = "Zou et al. 2022, arXiv 2112.05409, and code of VFLAIR, by alternating projections"
    verified = "recovers labels while a batch has no more rows than the layer has inputs; unverified against the source"
    differs = (
        "Alternating projections replace 10,000 steps of Adam on each batch separately.",
        "The top model and the labels of a row are shared by all batches and epochs, and known labels start the "
        "top model.",
        "Only the last layer's gradient is matched, of the model as it is after training.",
        "The variant without a top model, which needs no label, is left out.",
        THRESHOLD,
    )
    version = 4
    costs = "O(rounds x releases x (k d + C^3)) operations"
    fails = (
        "if batches have many more rows than the layer has inputs and there are few epochs, under noise sooner than "
        "exploit, and where exploit fails; with B <= k, sums hide nothing and it is as good as exploit"
    )

    def __init__(self, *, rounds: int = 60, releases: int | None = 5) -> None:
        check_positive(rounds=rounds)
        self.rounds = rounds
        check_positive_or_none(releases=releases)
        self.releases = releases

    @property
    def search(self) -> Mapping[str, Sequence[Any]]:
        """Vary the number of releases and of rounds."""
        return {"releases": (1, 5, 20), "rounds": (self.rounds, 2 * self.rounds)}

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, C) of the training rows."""
        sums = sum_gradients(read_releases(view, Kind.GRADIENT).take_first(self.releases), find_last_layers(view))
        known = KnownLabels(view.aux_rows, encode_labels(view, sums.values[0].dtype))
        gradients = smallest = sums.find_smallest(len(view.features["train"]))
        fit = before = start_fit(gradients, known)
        for _ in range(self.rounds):
            before, fit = fit, alternate(fit, gradients, known)
            gradients = smallest + sums.find_hidden(fit.compute_residuals(), fit.head.weights)
        return Guess(
            {"train": score_gradients(fit.head, gradients)},
            converged=share_changed(before, fit) <= MAX_CHANGED_SHARE,
            budget={"rounds": self.rounds, "batches": len(sums.rows)},
        )


class Sums(NamedTuple):
    """The observed sums of M batches, in an orthonormal basis of each batch's inputs, padded with zeros.

    Attributes:
        rows: (M, B) positions of the training rows in each batch.
        basis: for each party (M, B, r), of the column space of its A.
        values: for each party (M, r, d) the sums basis'g, in units of the root mean square of a row's gradient.
        shared: (n, 1) number of batches that contain each training row, at least 1.
    """

    rows: Tensor
    basis: Sequence[Tensor]
    values: Sequence[Tensor]
    shared: Tensor

    def find_smallest(self, n: int) -> Tensor:
        """Return the mean (n, d) over a row's batches of the smallest gradients that give the sums."""
        parts = [basis @ values for basis, values in zip(self.basis, self.values, strict=True)]  # (M, B, d) each
        return self._average(torch.cat(parts, dim=2), n)

    def find_hidden(self, residuals: Tensor, weights: Tensor) -> Tensor:
        """Return the mean over a row's batches of the part of ``residuals @ weights`` (n, d) that is in no sum.

        With ``find_smallest`` it is the nearest that gives the sums. Projections act on rows: residuals are narrower.
        """
        seen = [basis @ (basis.mT @ residuals[self.rows]) for basis in self.basis]  # (M, B, C) each
        parts = zip(seen, torch.split(weights, [values.shape[2] for values in self.values], dim=1), strict=True)
        return torch.cat([(residuals - self._average(x, len(residuals))) @ part for x, part in parts], dim=1)

    def _average(self, values: Tensor, n: int) -> Tensor:
        """Return the mean (n, k) over a row's batches of values (M, B, k) of the rows of each."""
        total = values.new_zeros(n, values.shape[2])
        return total.index_add_(0, self.rows.flatten(), values.flatten(0, 1)) / self.shared


def sum_gradients(releases: Releases, layers: Sequence[Layer]) -> Sums:
    """Return the sums of each batch, over the last layer of each party. The attack uses nothing else of the gradients.

    Raises:
        InsufficientView: the columns of the gradients cannot be assigned to the parties.
    """
    widths = [layer.width for layer in layers] if len(layers) > 1 else [releases.values.shape[1]]
    if sum(widths) != releases.values.shape[1]:
        raise InsufficientView(
            f"attack 'batch-label' needs a gradient of each embedding: colluding parties have {sum(widths)} numbers of "
            f"embeddings for a row, and received {releases.values.shape[1]} of gradients"
        )
    batches: list[Tensor] = []
    bases: list[list[Tensor]] = [[] for _ in layers]
    values: list[list[Tensor]] = [[] for _ in layers]
    for indices in releases.group_by_message():
        rows, g = releases.rows[indices], releases.values[indices]
        spans = [find_span(layer.inputs[rows].to(g.dtype)) for layer in layers]
        observed = [basis.T @ block for basis, block in zip(spans, torch.split(g, widths, dim=1), strict=True)]
        rank = sum(basis.shape[1] * width for basis, width in zip(spans, widths, strict=True)) / sum(widths)
        norm = torch.cat([block.flatten() for block in observed]).norm().clamp_min(torch.finfo(g.dtype).tiny)
        batches.append(rows)
        for party, basis in enumerate(spans):
            bases[party].append(basis)
            values[party].append(observed[party] * rank**0.5 / norm)
    return Sums(
        rows=pad_sequence(batches, batch_first=True),
        basis=[_pad_bases(of_batches) for of_batches in bases],
        values=[pad_sequence(of_batches, batch_first=True) for of_batches in values],
        shared=torch.bincount(releases.rows, minlength=releases.n_rows).clamp_min(1)[:, None],
    )


def _pad_bases(bases: list[Tensor]) -> Tensor:
    """Return bases (B, r) of different sizes as one tensor (M, B, r), padded with zeros."""
    rows, rank = (max(basis.shape[dim] for basis in bases) for dim in (0, 1))
    return torch.stack([nn.functional.pad(b, (0, rank - b.shape[1], 0, rows - len(b))) for b in bases])


class Layer(NamedTuple):
    """A model's last linear layer: its inputs for each training row, with a one for the bias (n, k), and its width."""

    inputs: Tensor
    width: int


def find_last_layers(view: View) -> list[Layer]:
    """Return the last layer of the party's own model, or of the model of each colluding party."""
    model, x = view.model, view.features["train"]
    assert model is not None
    if view.defended:  # gradients refer to the text that the model has read, and none ends in a linear layer
        return [_make_layer(view.defended["train"], view.defended["train"].shape[1])]
    if isinstance(model, SideBySide):
        return list(map(find_last_layer, model.models, torch.split(x, model.columns, dim=1)))
    return [find_last_layer(model, x)]


def find_last_layer(model: nn.Module, x: Tensor) -> Layer:
    """Return the last linear layer of ``model``; if the model ends in another layer, its embeddings are the inputs."""
    model, last = model.eval(), dict[str, Tensor]()

    def keep(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        last.update(inputs=args[0], output=output)

    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear | WideLinear)]
    handles = [layer.register_forward_hook(keep) for layer in linear]
    with torch.no_grad():
        embedded = model(x)
    for handle in handles:
        handle.remove()
    ends = "output" in last and last["output"].shape == embedded.shape and torch.equal(last["output"], embedded)
    return _make_layer(torch.clone(last["inputs"]) if ends else embedded, embedded.shape[1])


def _make_layer(inputs: Tensor, width: int) -> Layer:
    return Layer(torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1), width)
