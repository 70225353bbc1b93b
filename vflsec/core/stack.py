"""Runs the hooks of the defenses of one party."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vflsec.core import hooks
from vflsec.core.defense import Defense, Release, touches
from vflsec.core.hooks import Hook


class DefenseStack(tuple[Defense, ...]):
    """The defenses of one party whose strength is above 0, in the order in which they run.

    Defenses at strength 0 are left out here and nowhere else, so that they are the identity whatever their hooks do.
    Only the hooks that a defense declares are called (``touches``).

    Args:
        defenses: at any strength.
    """

    _using: dict[Hook, list[Defense]]

    def __new__(cls, defenses: Iterable[Defense] = ()) -> DefenseStack:
        """Keep those of positive strength."""
        stack = super().__new__(cls, (defense for defense in defenses if defense.strength > 0))
        stack._using = {hook: [d for d in stack if hook in touches(d)] for hook in hooks.HOOKS}
        return stack

    def using(self, hook: Hook) -> list[Defense]:
        """Return the defenses that use ``hook``."""
        return self._using[hook]

    def modules(self) -> list[nn.Module]:
        """Return the learned modules of all defenses."""
        return [module for defense in self for module in defense.modules()]

    def released(self, value: Any, release: Release) -> Any:
        """Return the tensor that leaves in place of ``value``; ciphertexts and control messages leave unchanged."""
        hook = hooks.OF_KIND.get(release.kind)
        if not hook:
            return value
        for defense in self.using(hook):
            if not defense.acts(release.kind, release.phase):
                continue
            before = value.detach().clone()  # a defense that works in place must not change what its sender keeps
            value = getattr(defense, hook.name)(before, release)
            assert value.shape == before.shape, (
                f"{defense!r} changed the shape of a release from {before.shape} to {value.shape}"
            )
        return value

    def training_targets(
        self, y: Tensor, features: Tensor, *, n_classes: int, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the class numbers (N,) that the active party uses, and the targets it trains on, possibly soft.

        Whatever the order in which the defenses are named, those that change class numbers act first, then those that
        soften them, then those whose code ``on_predictions`` undoes. So randomized response acts on the true label, and
        later defenses see only its answer.

        Args:
            y: (N,) the active party's labels.
            features: (N, d) its own columns of the same rows.
            n_classes: C.
            rng: for the labels alone.
        """
        labels = targets = y
        coding = self.using(hooks.PREDICTIONS)
        for defense in sorted(self.using(hooks.LABELS), key=lambda d: (d.softens, d in coding)):
            targets = defense.on_labels(targets, features=features, n_classes=n_classes, rng=rng)
            labels = labels if defense.softens else targets
        return labels, targets

    def decode_logits(self, logits: Tensor) -> Tensor:
        """Return the logits (B, C) after undoing the codes of labels, the last one first."""
        for defense in reversed(self.using(hooks.PREDICTIONS)):
            logits = defense.on_predictions(logits)
        return logits

    def batch(self, embeddings: Sequence[Tensor], targets: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """Return the embeddings and targets that the top model learns from in one update."""
        for defense in self.using(hooks.BATCH):
            embeddings, targets = defense.on_batch(embeddings, targets)
        return embeddings, targets

    def received(self, h: Tensor, sender: str) -> Tensor:
        """Return the input of the top model in place of the embedding (B, d) received from ``sender``."""
        for defense in self.using(hooks.RECEIVED):
            h = defense.on_received(h, sender)
        return h

    def penalized(self, loss: Tensor, received: Mapping[str, Tensor], labels: Tensor) -> Tensor:
        """Return the active party's loss plus the penalties on the embeddings ``received`` from each sender."""
        for defense in self.using(hooks.PENALTY):
            for sender, h in received.items():
                term = defense.penalty(h, labels, sender)
                loss = loss if term is None else loss + term
        return loss

    def protocols(self) -> list[tuple[Any, dict[str, Any]]]:
        """Return each protocol with its options that a defense sets for the cut layer."""
        return [protocol for defense in self.using(hooks.PROTOCOL) if (protocol := defense.protocol())]

    @contextmanager
    def training_hooks(self, modules: nn.Module, penalties: Sequence[str]) -> Iterator[None]:
        """Run the training hooks of the defenses on their party's ``modules``.

        Raises:
            UsageError: a defense does not support them.
        """
        with ExitStack() as contexts:
            for defense in self.using(hooks.TRAINING):
                contexts.enter_context(defense.training_hooks(modules, penalties))
            yield

    def update(self, modules: nn.Module, rows: int, rng: torch.Generator) -> None:
        """Apply the defenses to the gradients of their party's ``modules``, which are of a mean over ``rows`` rows."""
        for defense in self.using(hooks.UPDATE):
            defense.on_update(modules, rows, rng)
