"""Spectral attack on embeddings: the first principal component of own embeddings separates two classes."""

from collections.abc import Mapping

import torch
from torch import Tensor

from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need, View
from vflsec.inference.auxiliary import choose_guess, list_embeddings, separate
from vflsec.inference.releases import find_component


class SpectralEmbedding(Attack):
    """Label inference from the first principal component of the adversary's own embeddings. Two classes.

    Training separates the classes in the embeddings, often along their first principal axis. Auxiliary labels tell
    which end is class 1; without any, it is the end with the longer tail, as for a rare class.

    Source: Sun et al. 2022 (arXiv 2203.01451).
    """

    name = "spectral-embedding"
    version = 2
    needs = frozenset({Need.FEATURES, Need.MODEL})
    classes = 2
    reference = "Sun et al. 2022, arXiv 2203.01451"
    verified = "unverified: only the abstract could be read"
    differs = (
        "The axis is that of all training rows after training; the source may work batch by batch, which could not "
        "be read.",
        "Auxiliary labels choose the sign and the threshold.",
    )
    costs = "one eigenvalue decomposition"
    fails = "if something else than the class has the largest variance in the embeddings"

    def alone(self) -> Attack:
        """Return the same on an untrained bottom model."""
        return self

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return scores (n, 2) for every split, on the axis of the training rows."""
        return choose_guess(view, [self._guess(view, embedded) for embedded in list_embeddings(view)])

    def _guess(self, view: View, embedded: Mapping[str, Tensor]) -> Guess:
        together = find_component(torch.cat(list(embedded.values())))
        parts = dict(zip(embedded, torch.split(together, [len(h) for h in embedded.values()]), strict=True))
        return Guess({split: separate(view, score, train=parts["train"]) for split, score in parts.items()})
