"""FedSplitNN: supervised split learning, end to end."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vflsec.core import registry
from vflsec.core.method import Method, ModelSpec, Progress, TrainSpec, World
from vflsec.core.party import Party
from vflsec.core.seeds import derive
from vflsec.core.view import Need
from vflsec.methods.split_training import SplitTraining
from vflsec.nn.bottoms import MLPBottom
from vflsec.nn.top import Top

_BOTH = frozenset({Need.OWN_FEATURES, Need.OWN_MODEL, Need.AUX_LABELS})


class FedSplitNN(Method):
    """Supervised split learning on the aligned labelled rows, with K >= 2 parties.

    Every party has a bottom model (B, features) -> (B, cut); the active party joins the embeddings, applies its head
    and returns to each passive party the gradient of the loss with respect to its embedding.

    Source: FedHSSL (He et al. 2022, arXiv 2208.10278), the baseline FedSplitNN.

    Args:
        train: how models are fitted.
        model: the shape of the networks.
        boundary: the protocol at the cut layer.
    """

    name = "fedsplitnn"
    reference = "He et al. 2022 (FedHSSL), arXiv 2208.10278, baseline FedSplitNN; Vepakomma et al. 2018"
    shows = {  # noqa: RUF012  (declared ClassVar in the base class)
        "passive": _BOTH | {Need.GRADIENTS},
        "active": _BOTH | {Need.EMBEDDINGS},
    }

    def __init__(self, train: TrainSpec, model: ModelSpec, *, boundary: str = "plain") -> None:
        super().__init__(train, model)
        self.boundary = boundary

    def build(self, world: World) -> None:
        """Draw each party's bottom model, and the active party's top model, from streams of their own."""
        spec = self.model_spec
        cut = spec.cut or world.n_classes
        for party in world.parties.values():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(derive(world.seed, "model", party.name))
                party.modules["bottom"] = MLPBottom(party.n_features, spec.bottom, cut)
                if party.active:
                    party.modules["top"] = Top(
                        [cut] * len(world.parties),
                        world.n_classes,
                        aggregation=spec.aggregation,
                        head=spec.head,
                        hidden=spec.head_hidden,
                    )
            party.modules.to(world.device)

    def train(self, phase: str, world: World, progress: Progress) -> list[float]:
        """Run the one phase, ``train``."""
        return self._split(world).fit(phase, progress)

    def predict(self, world: World, split: str) -> Tensor:
        """Return logits (n, C)."""
        return self._split(world).predict(split)

    def representation(self, party: Party) -> nn.Module:
        """Return the bottom model."""
        return party.modules["bottom"]

    def _split(self, world: World) -> SplitTraining:
        boundaries = {p.name: registry.build("protocols", self.boundary, p, world.active) for p in world.passive}
        bottoms = {party.name: party.modules["bottom"] for party in world.parties.values()}
        return SplitTraining(world, bottoms, world.active.modules["top"], boundaries, self.train_spec)
