"""The registered defenses at the cut layer of any PyTorch training loop."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vflsec.base.errors import UsageError
from vflsec.core import hooks
from vflsec.core.defense import Defense, DefenseStack, Release, list_hooks
from vflsec.core.message import Kind
from vflsec.run.plan import resolve
from vflsec.run.spec import parse_defense

CROSSING = frozenset({Kind.EMBEDDING, Kind.GRADIENT})  # the messages that cross a cut layer


def is_on_messages(defense: Defense | type[Defense]) -> bool:
    """Whether a defense changes messages alone."""
    return all(hook.kind is not None or hook is hooks.PLAN_RELEASES for hook in list_hooks(defense))


def defend(*defenses: str, releases: int | None = None, seed: int | None = None) -> CutLayerDefense:
    """Return the defenses for the cut layer of your own training loop.

    Example:
        >>> guard = defend("iso:lambda=5", seed=0)
        >>> h = torch.ones(4, 3, requires_grad=True)
        >>> received = guard(h)  # at the active party; its gradient comes back with noise
        >>> received.sum().backward()

    Args:
        defenses: one or several, as on the command line (``gaussian-dp:epsilon=2``), in order.
        releases: how often each row crosses the cut layer in the whole training, if the noise depends on it.
        seed: of the noise, for simulations. By default the noise is secret and different each time.

    Raises:
        UsageError: an unknown name or option, or a defense that changes more than messages.
    """
    built = [resolve(parse_defense(text)).defense() for text in defenses]
    for defense in built:
        if not is_on_messages(defense):
            raise UsageError(
                f"expected a defense that changes messages alone, got {defense.name}, which changes training: "
                f"train it with vflsec train"
            )
        if not defense.kinds <= CROSSING:
            points = ", ".join(sorted(defense.kinds - CROSSING))
            raise UsageError(f"expected {defense.name} at embedding or gradient, which cross a cut layer, got {points}")
        if hooks.PLAN_RELEASES in list_hooks(defense):
            if releases is None:
                raise UsageError(f"{defense.name} sets its noise by the number of releases of a row: add releases=")
            defense.plan_releases(releases)
    if not built:
        raise UsageError("expected the name of a defense, got none")
    return CutLayerDefense(built, secrets.randbits(63) if seed is None else seed)


class CutLayerDefense:
    """Changes what crosses a cut layer: embeddings on their way to the active party, gradients on their way back.

    ``guard(h)`` is both sides at once. To record the messages, put the recorder between the two sides::

        h = guard.passive(bottom(x))  # at the passive party
        h = recorder.cut(h, rows=ids)  # what crosses
        h = guard.active(h, labels=y)  # at the active party
        loss = F.cross_entropy(top(h), y)

    Args:
        defenses: in the order in which they act.
        seed: of the noise.
    """

    def __init__(self, defenses: Sequence[Defense], seed: int) -> None:
        self._stack = DefenseStack(defenses)
        self._seed = seed
        self._rngs: dict[tuple[str, torch.device], torch.Generator] = {}
        self._step = -1

    def __call__(self, h: Tensor, *, labels: Tensor | None = None, phase: str = "train") -> Tensor:
        """Return what the active party receives in place of the embedding ``h`` (B, d).

        Args:
            h: the output of the bottom model.
            labels: (B,) class numbers, for defenses of the active party that use them.
            phase: ``train``, or another for which a defense has a point.
        """
        return self.active(self.passive(h, phase=phase), labels=labels, phase=phase)

    def passive(self, h: Tensor, *, phase: str = "train") -> Tensor:
        """Return what leaves the passive party in place of ``h`` (B, d); gradients pass unchanged."""
        self._step += 1
        release = self._release(Kind.EMBEDDING, h, phase, None)
        left: Tensor = _Changed.apply(h, lambda value: self._stack.apply_to_release(value, release), None)  # type: ignore[no-untyped-call]
        return left

    def active(self, h: Tensor, *, labels: Tensor | None = None, phase: str = "train") -> Tensor:
        """Return ``h`` itself (B, d), whose gradient leaves the active party changed.

        Raises:
            ProtocolError, UsageError: in the backward pass, if a defense needs ``labels``.
        """
        release = self._release(Kind.GRADIENT, h, phase, labels)
        same: Tensor = _Changed.apply(h, None, lambda value: self._stack.apply_to_release(value, release))  # type: ignore[no-untyped-call]
        return same

    def _release(self, kind: Kind, h: Tensor, phase: str, labels: Tensor | None) -> Release:
        sender, receiver = ("passive_1", "active") if kind is Kind.EMBEDDING else ("active", "passive_1")
        place = (sender, h.device)
        if place not in self._rngs:
            offset = 0 if sender == "active" else 1
            self._rngs[place] = torch.Generator(h.device).manual_seed(self._seed ^ offset)
        rows = torch.arange(len(h), device=h.device)
        return Release(sender, receiver, kind, self._step, phase, "value", rows, labels, self._rngs[place])


class _Changed(torch.autograd.Function):
    """The identity, but for a change of the value on its way there, or of the gradient on its way back."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, there: Callable[[Tensor], Tensor] | None, back: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        """Return ``there(h)``."""
        ctx.back = back
        return h.view_as(h) if there is None else there(h.detach()).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return ``back(gradient)``."""
        (gradient,) = gradients
        return (gradient if ctx.back is None else ctx.back(gradient)), None, None
