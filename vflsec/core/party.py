"""A party: its private columns, models and defenses, and ``send``, the only way by which its data leaves it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vflsec.base.layout import Layout
from vflsec.core import hooks
from vflsec.core.defense import Defense, DefenseStack, Release
from vflsec.core.message import Channel, Kind, Message, Step

Model = TypeVar("Model", bound=nn.Module)

Noise = Callable[..., torch.Generator]
"""Makes a party's own stream of randomness for a part of the run, given the names of that part."""


class Party:
    """One company in the federation.

    Args:
        name: ``active``, ``passive_1``...
        features: its own columns by split; each (n, d) float.
        channel: between all parties.
        noise: makes its noise, one stream for each part of the run.
        layout: of its columns; numbers by default.
        labels: labels by split, (n,) long; only the active party has any.
        defenses: run in this order on each message that it sends.

    Attributes:
        defenses: those that are on; assigning any sequence makes a ``DefenseStack`` of it.
        modules: its models by role (``bottom``, ``top``...), set by the method.
    """

    def __init__(
        self,
        name: str,
        features: Mapping[str, Tensor],
        channel: Channel,
        *,
        noise: Noise,
        layout: Layout | None = None,
        labels: Mapping[str, Tensor] | None = None,
        defenses: Sequence[Defense] = (),
    ) -> None:
        self.name = name
        self.features = features
        self.layout = layout or Layout.numeric(next(iter(features.values())).shape[1] if features else 0)
        self.labels = labels or {}
        self.modules = nn.ModuleDict()
        self.defenses = defenses
        self._channel = channel
        self._noise = noise
        self.begin()

    @property
    def defenses(self) -> DefenseStack:
        """Its defenses that are on."""
        return self._defenses

    @defenses.setter
    def defenses(self, defenses: Iterable[Defense]) -> None:
        self._defenses = DefenseStack(defenses)
        learned = self._defenses.modules()
        if learned:  # trained and stored with the party's own models
            self.modules["defenses"] = nn.ModuleList(learned)
        elif "defenses" in self.modules:
            del self.modules["defenses"]

    def module(self, role: str, kind: type[Model]) -> Model:
        """Return its model of a role, which the method has made a ``kind``."""
        module = self.modules[role]
        assert isinstance(module, kind)
        return module

    @property
    def active(self) -> bool:
        """Whether this is the party that holds the labels."""
        return bool(self.labels)

    @property
    def holds_text(self) -> bool:
        """Whether its columns are the words of a text."""
        return bool(self.layout.vocabulary)

    @property
    def n_features(self) -> int:
        """Number of input columns after encoding."""
        return self.layout.width

    @property
    def penalties(self) -> list[str]:
        """Names of its defenses that add a term to the loss, which only the active party has."""
        return [defense.name for defense in self.defenses.select(hooks.PENALTY) if self.active]

    @property
    def rng(self) -> torch.Generator:
        """Its noise stream in this part of the run."""
        return self._rng

    def begin(self, *part: object) -> None:
        """Start the noise of one part of the run (a phase, an iteration), so that this part can be run alone."""
        self._rng = self._noise(*part)

    @contextmanager
    def pause_recording(self) -> Iterator[None]:
        """Draw noise from a separate stream in this context, so that the party's own does not advance."""
        before, self._rng = self._rng, self._noise("aside")
        try:
            yield
        finally:
            self._rng = before

    def run_hooks(self) -> AbstractContextManager[Any]:
        """Run the training hooks of its defenses on its models.

        Raises:
            UsageError: a defense does not support them.
        """
        return self.defenses.training_hooks(self.modules, self.penalties)

    def send(
        self,
        kind: Kind,
        payload: Mapping[str, Any],
        *,
        to: str,
        step: int,
        phase: str,
        rows: Tensor | None = None,
        labels: Tensor | None = None,
        split: str = "train",
        buffers: bool = False,
        defended: bool = False,
    ) -> Message:
        """Apply the defenses to ``payload``, deliver it and return what the receiver gets.

        Args:
            kind: of the payload; determines which defenses act.
            payload: named tensors, or ciphertexts, on which no defense acts.
            to: name of the receiver.
            step: number of the step.
            phase: the method's phase, or ``predict``.
            rows: (B,) sample positions in ``split``.
            labels: (B,) labels of these rows, if the sender owns them.
            split: that ``rows`` refers to.
            buffers: whether the payload is a model's running statistics, which no gradient has changed.
            defended: whether ``defend`` returned the payload, so that several receivers get the same release.
        """
        payload = {
            key: value
            if defended
            else self._defend_value(
                Release(self.name, to, kind, step, phase, key, rows, labels, self._rng, buffers), value
            )
            for key, value in payload.items()
        }
        return self._channel.deliver(Message(kind, self.name, to, step, phase, payload, rows, split))

    def defend(self, kind: Kind, value: Tensor, step: Step, *, to: str) -> Tensor:
        """Return ``value`` (B, d) after the defenses, for a protocol that encrypts it."""
        labels = step.labels if self.active else None
        release = Release(self.name, to, kind, step.number, step.phase, "value", step.rows, labels, self._rng)
        defended: Tensor = self._defend_value(release, value)
        return defended

    def defend_payload(
        self, kind: Kind, payload: Mapping[str, Tensor], *, to: str, step: int, phase: str, buffers: bool = False
    ) -> dict[str, Tensor]:
        """Return ``payload`` after the defenses, for a protocol that masks it; arguments as in ``send``."""
        release = Release(self.name, to, kind, step, phase, "", None, None, self._rng, buffers)
        return {key: self._defend_value(replace(release, key=key), value) for key, value in payload.items()}

    def note(
        self,
        kind: Kind,
        payload: Mapping[str, Tensor],
        *,
        sender: str,
        step: int,
        phase: str,
        rows: Tensor | None = None,
    ) -> None:
        """Pass to the taps what this party knows of an exchange beside its messages: what it masked or unmasked."""
        self._channel.open(Message(kind, sender, self.name, step, phase, payload, rows, noted=True))

    def count_release(self, kind: Kind, rows: Tensor, *, to: str, phase: str) -> None:
        """Count a release of rows whose values another party does not see, but only what follows from them."""
        self._channel.count_release(Message(kind, self.name, to, 0, phase, {}, rows))

    def open(self, kind: Kind, value: Tensor, step: Step, *, sender: str) -> Tensor:
        """Return the plaintext of what ``sender`` encrypted, and pass it to the taps; its bytes count as ciphertext."""
        message = Message(kind, sender, self.name, step.number, step.phase, {"value": value}, step.rows, step.split)
        opened: Tensor = self._channel.open(message).payload["value"]
        return opened

    def _defend_value(self, release: Release, value: Any) -> Any:
        assert release.labels is None or self.active, f"{self.name} owns no labels"
        return self.defenses.apply_to_release(value, release)

    def __repr__(self) -> str:
        """Show name and role, never data."""
        return f"Party({self.name!r}, {'active' if self.active else 'passive'}, defenses={list(self.defenses)})"
