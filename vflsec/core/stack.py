"""The defenses of one party that are on, and all that runs their hooks."""

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

    Strength 0 is left out here and nowhere else, so that it is the identity whatever a hook does. Of each defense only
    the hooks that it declares are called (``touches``).

    Args:
        defenses: at any strength.
    """

    _using: dict[Hook, list[Defense]]

    def __new__(cls, defenses: Iterable[Defense] = ()) -> DefenseStack:
        """Keep those that are on."""
        found = super().__new__(cls, (defense for defense in defenses if defense.strength > 0))
        found._using = {hook: [d for d in found if hook in touches(d)] for hook in hooks.HOOKS}
        return found

    def using(self, hook: Hook) -> list[Defense]:
        """Return the defenses that use ``hook``."""
        return self._using[hook]

    def modules(self) -> list[nn.Module]:
        """Return the learned parts of all."""
        return [module for defense in self for module in defense.modules()]

    def released(self, value: Any, release: Release) -> Any:
        """Return what leaves in place of ``value``, a tensor; anything else, of which no hook is told, as it is."""
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
        """Return the class numbers (N,) that the active party goes by, and what it trains on: these, or probabilities.

        Class numbers are changed first, then softened, then coded (where ``on_predictions`` undoes what was done), in
        whatever order the defenses are named: who answers at random does so on the label itself, and all that follows
        knows no other.

        Args:
            y: (N,) the active party's labels.
            features: (N, d) its own columns of the same rows.
            n_classes: C.
            rng: a stream of the labels' own.
        """
        labels = targets = y
        coding = self.using(hooks.PREDICTIONS)
        for defense in sorted(self.using(hooks.LABELS), key=lambda d: (d.softens, d in coding)):
            targets = defense.on_labels(targets, features=features, n_classes=n_classes, rng=rng)
            labels = labels if defense.softens else targets
        return labels, targets

    def decode_logits(self, logits: Tensor) -> Tensor:
        """Return the logits (B, C) that the active party uses: what was done to labels last is undone first."""
        for defense in reversed(self.using(hooks.PREDICTIONS)):
            logits = defense.on_predictions(logits)
        return logits

    def batch(self, embeddings: Sequence[Tensor], targets: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """Return what the top model learns from in one update, as ``on_batch`` has it."""
        for defense in self.using(hooks.BATCH):
            embeddings, targets = defense.on_batch(embeddings, targets)
        return embeddings, targets

    def received(self, h: Tensor, sender: str) -> Tensor:
        """Return what the top model is fed in place of the embedding (B, d) that arrived from ``sender``."""
        for defense in self.using(hooks.RECEIVED):
            h = defense.on_received(h, sender)
        return h

    def penalized(self, loss: Tensor, arrived: Mapping[str, Tensor], labels: Tensor) -> Tensor:
        """Return the active party's loss with the penalties on what ``arrived`` from each sender."""
        for defense in self.using(hooks.PENALTY):
            for sender, h in arrived.items():
                term = defense.penalty(h, labels, sender)
                loss = loss if term is None else loss + term
        return loss

    def protocols(self) -> list[tuple[str, dict[str, Any]]]:
        """Return name and options of each protocol that a defense puts at the cut layer."""
        return [found for defense in self.using(hooks.PROTOCOL) if (found := defense.protocol())]

    @contextmanager
    def training_hooks(self, modules: nn.Module, penalties: Sequence[str]) -> Iterator[None]:
        """Let the defenses watch their party's ``modules`` while they are trained.

        Raises:
            UsageError: a defense cannot serve them.
        """
        with ExitStack() as contexts:
            for defense in self.using(hooks.TRAINING):
                contexts.enter_context(defense.training_hooks(modules, penalties))
            yield

    def update(self, modules: nn.Module, rows: int, rng: torch.Generator) -> None:
        """Let the defenses change the gradients of their party's ``modules``, those of a mean over ``rows`` rows."""
        for defense in self.using(hooks.UPDATE):
            defense.on_update(modules, rows, rng)
