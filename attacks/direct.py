"""Direct label inference: where logits are summed, the gradient is the label."""

from __future__ import annotations

import torch

from vflsec.core.attack import Attack
from vflsec.core.checks import positive_or_none
from vflsec.core.errors import InsufficientView
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.releases import received


class Direct(Attack):
    """Label inference where nothing is trained above the cut layer: embeddings are logits, which the top model adds up.

    The gradient for a row is then softmax(z) - onehot(y), divided by the batch: one entry is negative, that of its
    class. The score of a class is minus its entry, averaged over the releases of the row: the class of the smallest
    entry is guessed even where noise has left no entry negative.

    Costs one pass over the messages, and needs not one auxiliary label. Recovers every label without a defense.
    Fails under noise that is longer than the gradients. Cannot be mounted where there is a trained head
    (``model.head``), nor on an embedding that is not C wide.

    Source: Fu et al., USENIX Security 2022, section 4.3; first epoch alone in their code (``turns=1``).

    Args:
        turns: how many releases of each row are read, from the first; None for all.
    """

    name = "direct"
    needs = frozenset({Need.GRADIENTS})
    head = "none"
    reference = "Fu et al., USENIX Security 2022, section 4.3"
    verified = "exact: all labels are recovered without a defense"
    differs = (
        "A row whose gradient has no negative entry gets the class of its smallest entry; the released code counts "
        "it as wrong.",
        "Entries are averaged over all releases of a row; the released code reads the first epoch alone (turns=1).",
    )

    def __init__(self, *, turns: int | None = None) -> None:
        positive_or_none(turns=turns)
        self.turns = turns

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, C) of the training rows.

        Raises:
            InsufficientView: gradients are not C wide.
        """
        releases = received(view, Kind.GRADIENT).first(self.turns)
        if releases.values.shape[1] != view.n_classes:
            widths = f"{view.n_classes} logits, got {releases.values.shape[1]} entries"
            raise InsufficientView(f"attack 'direct' expects gradients of {widths}: set model.head=none")
        return Guess({"train": releases.mean(-releases.values)}, budget={"releases": len(releases.rows)})
