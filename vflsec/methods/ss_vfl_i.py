"""SS-VFL-I: parties pre-train alone and send what they make of the labelled rows once; a head is trained on that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec
import torch
from torch import Tensor, nn

from vflsec.core.checks import positive
from vflsec.core.defense import decoded
from vflsec.core.errors import UsageError
from vflsec.core.layout import Layout
from vflsec.core.message import Kind
from vflsec.core.method import ModelSpec, Progress, TrainSpec, World
from vflsec.core.protocol import Boundary, Step
from vflsec.core.seeds import generator
from vflsec.core.view import Need
from vflsec.methods.split_method import SHOWS
from vflsec.methods.split_training import SplitTraining, selection_split
from vflsec.methods.ss_vfl import SSVFL, own_rows
from vflsec.nn.augment import ImageAugmentation, UniformCorruption

Alter = Callable[[Tensor, torch.Generator], Tensor]
Embedded = tuple[Tensor, dict[str, Tensor]]
"""The active party's own embeddings (B, d) and, by name, those that arrived from each passive party."""


class SSVFLIndependent(SSVFL):
    """Contrastive pre-training of each party alone; bottom models stay as they are, and the head alone is trained.

    Each passive party sends its embedding of every labelled row once, and never hears a gradient: what the labels are
    leaves the active party in no form. An epoch of the head costs no byte, so all of training costs what one epoch of
    split learning sends up. Validation rows, where an epoch is chosen by them, are sent with the others.

    The head follows ``train``, as every method that it is compared with does. For the small scale of frozen features
    the released code has ``train.optimizer`` ``sgd`` and ``server_lr`` 100. A boundary's own weights stay as drawn.

    Source: SS-VFL (Castiglia et al. 2022), algorithm 1.

    Args, besides those of ``SSVFL``:
        server_lr: learning rate of the head; None for ``train.lr``.
        recompute_augmented: whether embeddings of altered rows (crops and flips of images, else corrupted columns) are
            sent in every epoch, as released; all are counted.
    """

    name = "ss-vfl-i"
    reference = "Castiglia et al. 2022 (SS-VFL), FL-NeurIPS workshop, algorithm 1"
    sends = {"pretrain": frozenset[Kind](), "finetune": frozenset({Kind.EMBEDDING})}  # noqa: RUF012
    shows = {**SHOWS, "passive": SHOWS["passive"] - {Need.GRADIENTS}}  # noqa: RUF012
    late = SSVFL.late | {"server_lr", "recompute_augmented"}
    prior = "ss-vfl-i"
    shares_head = False

    def __init__(
        self,
        train: TrainSpec,
        model: ModelSpec,
        *,
        boundary: str = "plain",
        localcl: Literal["moco", "inbatch"] = "moco",
        projection: int | None = None,
        keep_projection: bool = False,
        server_lr: float | None = None,
        recompute_augmented: bool = False,
    ) -> None:
        super().__init__(
            train, model, boundary=boundary, localcl=localcl, projection=projection, keep_projection=keep_projection
        )
        if model.head == "none":
            raise UsageError("ss-vfl-i trains the head alone: expected model.head linear or mlp, got none")
        if server_lr is not None:
            positive(server_lr=server_lr)
        self.server_lr = server_lr
        self.recompute_augmented = recompute_augmented

    def split(self, world: World) -> SplitTraining:
        """Return the training of the head, on bottom models as they are."""
        bottoms = {party.name: self.representation(party) for party in world.parties.values()}
        spec = msgspec.structs.replace(self.train_spec, lr=self.server_lr or self.train_spec.lr)
        alter = {}
        if self.recompute_augmented:
            alter = {party.name: _alteration(party.layout, own_rows(party)) for party in world.parties.values()}
        return _HeadTraining(world, bottoms, world.active.modules["top"], self._boundaries, spec, alter)


class _HeadTraining(SplitTraining):
    """Training of the top model alone, on what every bottom model made of the rows once; no gradient leaves it.

    Args, besides those of ``SplitTraining``:
        alter: by party, what changes rows before each of many transfers; empty for one transfer of rows as they are.
    """

    def __init__(
        self,
        world: World,
        bottoms: Mapping[str, nn.Module],
        top: nn.Module,
        boundaries: Mapping[str, Boundary],
        spec: TrainSpec,
        alter: Mapping[str, Alter],
    ) -> None:
        super().__init__(world, bottoms, top, boundaries, spec)
        self.alter = alter
        self._noise: dict[str, torch.Generator] = {}
        self._sent: dict[str, Embedded] = {}  # by split

    def fit(self, phase: str, progress: Progress) -> list[float]:
        """Have rows sent once, and train the head on them; return the mean loss of each epoch."""
        self._switch(training=False)
        if not self.alter:
            self._sent["train"] = self._all("train", phase)
        for name in self.alter:
            self._noise[name] = generator(self.world.seed, "views", phase, name, device=self.world.device)
        selection = selection_split(self.spec, self.world)
        if selection:
            self._sent[selection] = self._all(selection, "validate")
        return super().fit(phase, progress)

    @torch.no_grad()
    def predict(self, split: str, phase: str = "predict") -> Tensor:
        """Return logits (n, C) for ``split``; where an epoch is chosen by it, from what was sent before the first."""
        if phase == "predict" or split not in self._sent:
            return super().predict(split, phase)
        self._switch(training=False)
        own, arrived = self._sent[split]
        return decoded(self.world.active.defenses, self.top([own, *self._received(arrived)]))

    def _update(self, step: Step, optimizers: list[torch.optim.Optimizer]) -> Tensor:
        """Take as many steps of the head on one batch as there are local steps."""
        if self.alter:
            own, arrived = self._exchange(step)
        else:
            own, arrived = self._sent["train"]
            own, arrived = own[step.rows], {name: h[step.rows] for name, h in arrived.items()}
        losses = []
        for _ in range(self.spec.local_steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = self._loss(own, arrived, step)
            loss.backward()  # type: ignore[no-untyped-call]
            self._clip()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.detach())
        return losses[0]

    def _all(self, split: str, phase: str) -> Embedded:
        """Have every row of ``split`` sent, in batches and in order."""
        everybody = torch.arange(self.world.n_rows(split), device=self.world.device)
        steps = [Step(k, phase, rows, split=split) for k, rows in enumerate(torch.split(everybody, self.spec.batch))]
        own, arrived = zip(*map(self._exchange, steps), strict=True)
        return torch.cat(own), {name: torch.cat([h[name] for h in arrived]) for name in arrived[0]}

    @torch.no_grad()
    def _exchange(self, step: Step) -> Embedded:
        """Every party embeds the rows of ``step``, those that train the head altered if need be; they go up."""
        embedded = {}
        for party in self.world.parties.values():
            x = self._fed(party, step)
            if party.name in self.alter and step.split == "train":
                x = self.alter[party.name](x, self._noise[party.name])
            embedded[party.name] = self.bottoms[party.name](x)  # (B, d)
        own = embedded.pop(self.world.active.name)
        return own, {name: self._up(name, h, step) for name, h in embedded.items()}

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizer of what the active party holds besides its bottom model; there is no other."""
        held = self.world.active.modules
        return [self.spec.optimize(p for role, module in held.items() if role != "bottom" for p in module.parameters())]

    def _switch(self, *, training: bool) -> None:
        super()._switch(training=False)
        self.top.train(training)


def _alteration(layout: Layout, rows: Tensor) -> Alter:
    """Return random crops and flips of images; corruption of a table's rows (n, d)."""
    if layout.image is None:
        return UniformCorruption(layout, rows)
    return ImageAugmentation(layout.image, scale=(0.08, 1.0), jitter_p=0.0, blur_p=0.0)
