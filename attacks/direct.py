"""Direct label inference: if the top model sums logits, the gradient reveals the label."""

import torch

from vflsec.base.errors import InsufficientView
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.releases import OnReleases, read_releases


class Direct(OnReleases):
    """Label inference if nothing is trained above the cut layer: embeddings are logits, which the top model adds up.

    The gradient of a row is then softmax(z) - onehot(y), divided by the batch size: only the entry of its class is
    negative. The score of a class is its negative entry, averaged over the releases of the row. The class of the
    smallest entry is guessed even if noise leaves no entry negative.

    The attack needs a model without a trained head (``model.head=none``) and embeddings of width C.

    Source: Fu et al., USENIX Security 2022, section 4.3; their code uses the first epoch only (``releases=1``).

    Args:
        releases: number of releases of each row to use, from the first; None for all.
    """

    name = "direct"
    version = 2
    needs = frozenset({Need.GRADIENTS})
    head = "none"
    reference = "Fu et al., USENIX Security 2022, section 4.3"
    verified = "exact: all labels are recovered without a defense"
    differs = (
        "A row whose gradient has no negative entry gets the class of its smallest entry; the released code counts "
        "it as wrong.",
        "Entries are averaged over all releases of a row; the released code uses the first epoch only (releases=1).",
    )
    costs = "one pass over the messages; no auxiliary label"
    fails = "under noise that is longer than the gradients; without a defense it recovers every label"

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, C) of the training rows.

        Raises:
            InsufficientView: gradients are not C wide.
        """
        releases = read_releases(view, Kind.GRADIENT).take_first(self.releases)
        if releases.values.shape[1] != view.n_classes:
            widths = f"{view.n_classes} logits, got {releases.values.shape[1]} entries"
            raise InsufficientView(f"attack 'direct' expects gradients of {widths}: set model.head=none")
        return Guess({"train": releases.mean(-releases.values)}, budget={"releases": len(releases.rows)})
