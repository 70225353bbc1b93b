"""Batch label inference: labels of a batch from the one gradient of one's own model that the batch amounts to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from vflsec.core.attack import Attack
from vflsec.core.checks import positive, positive_or_none
from vflsec.core.errors import InsufficientView
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.directions import span
from vflsec.inference.releases import Releases, received
from vflsec.inference.surrogate_head import SETTLED, Known, alternated, changed, onehot, scored, started
from vflsec.nn.side_by_side import SideBySide


class BatchLabel(Attack):
    """Label inference where only the gradient of a party's own last layer is seen, summed over each batch.

    That gradient is A'g: A (B, k) what the layer reads, with a one for its bias, and g (B, d) what each row sent back.
    Dummy labels, dummy probabilities of the wrong classes, which stand for the other parties, and a dummy top model W
    (C, d) make dummy gradients of each row; their sums must be those that were seen. Two steps alternate: the nearest
    gradients that have these sums (a projection), and the labels, probabilities and top model that explain them best,
    which is a round of ``replay``. A row's label and probabilities are the same in all its releases, so that each
    epoch's other batches say more about it; W is shared by all batches, and known labels start it.

    In split learning a party receives each row's gradient. This attack sums them and forgets them: it measures what
    would be left if batches were summed before they were sent, for a model of any depth. A is that of the model as it
    is in the end. Where the model does not end in a linear layer, A are its embeddings. Each of several
    colluding parties has an A of its own, and sees the sums of its own columns of g.

    Departs from the source, which has Adam on each batch by itself for 10,000 steps, and needs no label where there is
    no top model.

    Costs rounds · releases · (k · d + C³ · 100) operations. While B <= k sums hide nothing, and it is as good as
    ``replay``. Beyond, it lives on further epochs: with batches of 256 rows and 65 inputs of the layer, credit-default
    has an AUC of .88 after one epoch, .997 after five. Fails where batches have many times more rows than the layer has
    inputs and epochs are few, under noise sooner than ``replay``, and where that fails.

    Source: Zou et al. 2022, batch-level label inference (arXiv 2112.05409); code of VFLAIR.

    Args:
        rounds: of the alternation.
        turns: how many releases of each row are read, from the first; None for all.
    """

    name = "batch-label"
    needs = frozenset({Need.GRADIENTS, Need.OWN_FEATURES, Need.OWN_MODEL, Need.AUX_LABELS})
    reference = "Zou et al. 2022, arXiv 2112.05409, and code of VFLAIR, by alternating projections"
    verified = "recovers labels while a batch has no more rows than the layer has inputs; unverified against the source"
    differs = (
        "Alternating projections take the place of 10,000 steps of Adam on each batch by itself.",
        "The top model and the labels of a row are shared by all batches and epochs, and known labels start the "
        "top model.",
        "The last layer's gradient alone is matched, of the model as it is after training.",
        "The variant without a top model, which needs no label, is left out.",
        "Two classes: where argmax divides the auxiliary labels badly, a threshold that they support takes its place.",
    )

    version = 3

    def __init__(self, *, rounds: int = 60, turns: int | None = 5) -> None:
        positive(rounds=rounds)
        self.rounds = rounds
        positive_or_none(turns=turns)
        self.turns = turns

    @property
    def search(self) -> Mapping[str, Sequence[Any]]:
        """Vary how many releases are read, and for how long they are fitted."""
        return {"turns": (1, 5, 20), "rounds": (self.rounds, 2 * self.rounds)}

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, C) of the training rows."""
        sums = summed(received(view, Kind.GRADIENT).first(self.turns), last_layers(view))
        known = Known(view.aux_rows, onehot(view, sums.values[0].dtype))
        gradients = sums.nearest(
            sums.values[0].new_zeros(len(view.features["train"]), sum(v.shape[2] for v in sums.values))
        )
        fit = before = started(gradients, known)
        for _ in range(self.rounds):
            before, fit = fit, alternated(fit, gradients, known)
            gradients = sums.nearest(fit.modelled())
        return Guess(
            {"train": scored(fit.head, gradients)},
            converged=changed(before, fit) <= SETTLED,
            budget={"rounds": self.rounds, "batches": len(sums.rows)},
        )


class Sums(NamedTuple):
    """What is seen of each of M batches, in an orthonormal basis of its inputs; shorter ones are padded with zeros.

    Attributes:
        rows: (M, B) which training rows.
        basis: for each party (M, B, r), of the span of its A.
        values: for each party (M, r, d) the sums, basis'g, in units of the root mean square of a row's gradient.
        shared: (n, 1) in how many batches each training row is, at least 1.
    """

    rows: Tensor
    basis: Sequence[Tensor]
    values: Sequence[Tensor]
    shared: Tensor

    def nearest(self, gradients: Tensor) -> Tensor:
        """Return ``gradients`` (n, d) moved to where they have these sums; of a row's batches, by the mean move."""
        blocks = torch.split(gradients, [values.shape[2] for values in self.values], dim=1)
        moves = torch.cat(
            [
                basis @ (values - basis.mT @ block[self.rows])
                for basis, values, block in zip(self.basis, self.values, blocks, strict=True)
            ],
            dim=2,
        )  # (M, B, d)
        total = torch.zeros_like(gradients).index_add_(0, self.rows.flatten(), moves.flatten(0, 1))
        return gradients + total / self.shared


def summed(releases: Releases, layers: Sequence[Layer]) -> Sums:
    """Return the sums of each batch; nothing else of the gradients goes on from here.

    Args:
        releases: of gradients, those of several parties side by side.
        layers: the last one of each party.

    Raises:
        InsufficientView: several parties, and which of them received which columns cannot be told.
    """
    widths = [layer.width for layer in layers] if len(layers) > 1 else [releases.values.shape[1]]
    if sum(widths) != releases.values.shape[1]:
        raise InsufficientView(
            f"attack 'batch-label' needs a gradient of each embedding: colluding parties have {sum(widths)} numbers of "
            f"embeddings for a row, and received {releases.values.shape[1]} of gradients"
        )
    rows: list[Tensor] = []
    bases: list[list[Tensor]] = [[] for _ in layers]
    values: list[list[Tensor]] = [[] for _ in layers]
    for lines in releases.by_message():
        about, g = releases.rows[lines], releases.values[lines]
        own = [span(layer.inputs[about].to(g.dtype)) for layer in layers]
        seen = [basis.T @ block for basis, block in zip(own, torch.split(g, widths, dim=1), strict=True)]
        rank = sum(basis.shape[1] * width for basis, width in zip(own, widths, strict=True)) / sum(widths)
        norm = torch.cat([s.flatten() for s in seen]).norm().clamp_min(torch.finfo(g.dtype).tiny)
        rows.append(about)
        for k, basis in enumerate(own):
            bases[k].append(basis.T)
            values[k].append(seen[k] * rank**0.5 / norm)
    shared = torch.bincount(releases.rows, minlength=releases.n_rows).clamp_min(1)[:, None]
    return Sums(
        pad_sequence(rows, batch_first=True),
        [_stacked(one, max(map(len, rows))).mT for one in bases],
        [pad_sequence(one, batch_first=True) for one in values],
        shared,
    )


def _stacked(bases: list[Tensor], widest: int) -> Tensor:
    """Return bases (r, B) as one (M, r, B), padded with zeros."""
    rank = max(map(len, bases))
    return torch.stack([nn.functional.pad(b, (0, widest - b.shape[1], 0, rank - len(b))) for b in bases])


class Layer(NamedTuple):
    """The last linear layer of a model: what it reads of each training row, and a one, (n, k + 1); and its width."""

    inputs: Tensor
    width: int


def last_layers(view: View) -> list[Layer]:
    """Return the last layer of the party's own model; of colluding parties that of each."""
    model, x = view.model, view.features["train"]
    assert model is not None
    if isinstance(model, SideBySide):
        return [
            last_layer(one, own) for one, own in zip(model.models, torch.split(x, model.columns, dim=1), strict=True)
        ]
    return [last_layer(model, x)]


def last_layer(model: nn.Module, x: Tensor) -> Layer:
    """Return the last linear layer of ``model``; where it does not end in one, its embeddings stand for the inputs."""
    model, seen = model.eval(), dict[str, Tensor]()

    def keep(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen.update(inputs=args[0], output=output)

    handles = [layer.register_forward_hook(keep) for layer in model.modules() if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        embedded = model(x)
    for handle in handles:
        handle.remove()
    ends = "output" in seen and seen["output"].shape == embedded.shape and torch.equal(seen["output"], embedded)
    inputs = seen["inputs"] if ends else embedded
    return Layer(torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1), embedded.shape[1])
