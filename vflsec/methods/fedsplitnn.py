"""FedSplitNN: supervised split learning, end to end."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vflsec.core import registry
from vflsec.core.message import Kind
from vflsec.core.method import Method, ModelSpec, Progress, TrainSpec, World
from vflsec.core.party import Party
from vflsec.core.protocol import Boundary
from vflsec.core.seeds import derive
from vflsec.core.view import Need
from vflsec.methods.split_training import SplitTraining, selection_split
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
    sends = frozenset({Kind.EMBEDDING, Kind.GRADIENT})
    shows = {  # noqa: RUF012  (declared ClassVar in the base class)
        "passive": _BOTH | {Need.GRADIENTS},
        "active": _BOTH | {Need.EMBEDDINGS},
    }

    def __init__(self, train: TrainSpec, model: ModelSpec, *, boundary: str = "plain") -> None:
        super().__init__(train, model)
        self.boundary = boundary
        self._boundaries: dict[str, Boundary] = {}

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
        for party in world.passive:
            boundary = registry.build("protocols", self.boundary, party, world.active)
            self._boundaries[party.name] = boundary
            for owner, module in boundary.modules().items():  # trained and stored with its owner's own models
                world.parties[owner].modules[f"boundary_{party.name}"] = module
        for party in world.parties.values():
            party.modules.to(world.device)

    def check(self, world: World) -> None:
        """Raise UsageError if validation rows are needed, and there are none."""
        selection_split(self.train_spec, world)

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
        bottoms = {party.name: party.modules["bottom"] for party in world.parties.values()}
        return SplitTraining(world, bottoms, world.active.modules["top"], self._boundaries, self.train_spec)
