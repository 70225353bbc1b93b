"""Base class of defenses: named points at which a sender may change what leaves it; and the defenses of one party."""

from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from vflsec.base.checks import check_non_negative, expect_known
from vflsec.base.errors import UsageError
from vflsec.core import hooks
from vflsec.core.hooks import Hook
from vflsec.core.message import Kind

if TYPE_CHECKING:
    from vflsec.results.canaries import Tradeoff

LABELS = "labels"
"""The point of defenses that change the labels before training; nothing is sent there."""


@dataclass(frozen=True, slots=True)
class Release:
    """What the sender knows when something leaves it.

    Attributes:
        sender: its own name.
        receiver: name of the party that will hear.
        kind: what is released.
        step: number of the step.
        phase: the method's phase, or ``predict``.
        key: name of the tensor in the payload; for parameters, the parameter's name.
        rows: (B,) sample positions, or None.
        labels: (B,) class numbers of these rows if the sender owns them, else None; before any defense softens them.
        rng: the sender's own noise stream, on the tensor's device.
        buffer: whether this is a running statistic of a model (BatchNorm's), not what it has learned by gradients.
    """

    sender: str
    receiver: str
    kind: Kind
    step: int
    phase: str
    key: str
    rows: Tensor | None
    labels: Tensor | None
    rng: torch.Generator
    buffer: bool = False


@dataclass(eq=False, repr=False)
class Defense(ABC):
    """Changes what a party releases. A subclass overrides only the hooks it needs; each is the identity here.

    ``vflsec.core.hooks`` says of each hook who runs it, when, and what it changes.

    Strength 0 is the exact identity, bit for bit, for every defense: it is the common baseline of every curve. An empty
    batch stays empty.

    Args:
        strength: how strong; 0 is off, larger never protects less on average.
        at: the kinds of release to act on, each in every phase (``embedding``) or in one (``pretrain.embedding``);
            default the first of ``points``, which is empty where no release is changed. ``labels`` is a point of a
            defense that changes the labels that the active party trains on.

    Class attributes:
        hides: what it hides, and from whom; empty where its author does not say.
        costs: what it takes in time, traffic or utility; empty where its author does not say.
        fails: against which attacks, or where, it hides little; empty where its author does not say.
        contrib: whether it is not verified against a source, or was made for this project.
        by_epsilon: options under which the strength is 1/epsilon, or None where there is no differential privacy.
        tradeoff: the kind of its noise, whose trade-off function bounds attacks more tightly than epsilon does; None
            for another, or none.
        softens: whether ``on_labels`` gives probabilities of the classes in place of their numbers.
        fixed: whether ``on_labels`` draws the same in every training on the same rows; an option may set it.
        strengths: the usual ones, over which it is swept where nobody says any: of the source where these spread over
            the curve, else such that on credit-default the first costs two points of AUC at most, and the last no more
            than joining is worth to the active party, five points, if the defense is of use at so little.

    Attributes:
        kinds: those of ``at``.
        phases: for a kind limited to phases, these.

    Raises:
        UsageError: a negative strength, or a point at which this defense cannot act.
    """

    name: ClassVar[str]
    reference: ClassVar[str]
    guarantee: ClassVar[str]
    hides: ClassVar[str] = ""
    costs: ClassVar[str] = ""
    fails: ClassVar[str] = ""
    contrib: ClassVar[bool] = False
    points: ClassVar[tuple[Kind, ...]]
    strength_name: ClassVar[str] = "strength"
    by_epsilon: ClassVar[Mapping[str, Any] | None] = None
    tradeoff: ClassVar["Tradeoff | None"] = None
    softens: ClassVar[bool] = False
    fixed = False
    strengths: ClassVar[tuple[float, ...]] = (1.0, 5.0, 25.0)
    version: ClassVar[int] = 1

    strength: float
    at: Iterable[str] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_non_negative(strength=self.strength)
        if self.strength == float("inf"):
            raise UsageError("expected a finite strength, got inf")
        self.strength = float(self.strength)
        phases: dict[Kind, set[str]] = {}
        on_labels = [LABELS] if list_hooks(self) & {hooks.LABELS, hooks.BATCH} else []
        for point in self.at or [point.value for point in self.points[:1]]:
            if point in on_labels:  # it acts there whatever else is said
                continue
            phase, _, kind = point.rpartition(".")
            known = [*(kind.value for kind in self.points), *on_labels]
            if not known:
                raise UsageError(f"expected {self.name} without a point, since it changes no message, got @{point}")
            expect_known(known, at=kind)
            phases.setdefault(Kind(kind), set()).add(phase)
        self.kinds = frozenset(phases)
        self.phases = {kind: frozenset(names) for kind, names in phases.items() if "" not in names}

    def acts(self, kind: Kind, phase: str) -> bool:
        """Whether a release of ``kind`` in ``phase`` is changed: never at strength 0, whatever a hook does."""
        return self.strength > 0 and kind in self.kinds and phase in self.phases.get(kind, {phase})

    def runs(self, hook: Hook, phase: str) -> bool:
        """Whether a phase that runs ``hook`` runs it of this defense, as it is set."""
        return self.strength > 0 and hook in list_hooks(self) and (hook.kind is None or self.acts(hook.kind, phase))

    def check_task(self, n_classes: int) -> None:
        """Raise UsageError if this defense cannot serve a task of C classes; asked before training."""
        return

    def on_embedding(self, h: Tensor, release: Release) -> Tensor:
        """Return what leaves in place of the embeddings ``h`` (B, d)."""
        return h

    def on_gradient(self, g: Tensor, release: Release) -> Tensor:
        """Return what leaves in place of the cut-layer gradients ``g`` (B, d)."""
        return g

    def on_parameters(self, p: Tensor, release: Release) -> Tensor:
        """Return what leaves in place of one named parameter tensor, any shape."""
        return p

    def on_nodes(self, nodes: Tensor, release: Release) -> Tensor:
        """Return what leaves in place of ``nodes`` (B, T), the node of each row in T trees; 0 tells nothing of it."""
        return nodes

    def on_text(self, text: Any, *, rng: torch.Generator) -> Any:
        """Return what the party's model reads in place of its text, drawn once in each training."""
        return text

    def on_labels(self, y: Tensor, *, features: Tensor, n_classes: int, rng: torch.Generator) -> Tensor:
        """Return the labels that the active party trains on; called once before training for each set of its rows.

        Args:
            y: (N,) class numbers, N >= 0; for a defense that softens it may be probabilities (N, C), from another one.
            features: (N, d) the active party's own columns of these rows.
            n_classes: C.
            rng: a stream of the labels' own, on their device.

        Returns:
            Class numbers (N,); probabilities (N, C) of a defense that softens.
        """
        return y

    def on_predictions(self, logits: Tensor) -> Tensor:
        """Return the logits (B, C) that the active party uses, from those the trained model gives."""
        return logits

    def on_batch(self, embeddings: Sequence[Tensor], targets: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """Return what the top model learns from in one update.

        Args:
            embeddings: one (B, d) of each party, the active one's first, the others as ``on_received`` left them.
            targets: (B,) class numbers, or (B, C) probabilities, as ``on_labels`` left them.
        """
        return embeddings, targets

    def on_received(self, h: Tensor, sender: str) -> Tensor:
        """Return what the active party feeds its top model in place of the embedding (B, d) it received."""
        return h

    def penalty(self, h: Tensor, labels: Tensor, sender: str) -> Tensor | None:
        """Return an extra term (scalar) of the active party's loss on one received embedding (B, d), or None.

        Args:
            h: as it arrived.
            labels: (B,) class numbers, as ``Release`` has them.
            sender: whose it is.
        """
        return None

    def protocol(self) -> tuple[Any, dict[str, Any]] | None:
        """Return the protocol with its options that this defense puts at the cut layer, or None."""
        return None

    def training_hooks(self, modules: nn.Module, penalties: Sequence[str]) -> AbstractContextManager[Any]:
        """Return a context in which the party that carries this defense trains its own ``modules``.

        Args:
            modules: all of the party's models.
            penalties: names of the defenses that add a term to the party's loss.

        Raises:
            UsageError: this defense cannot serve such models.
        """
        return nullcontext()

    def on_update(self, modules: nn.Module, rows: int, rng: torch.Generator) -> None:  # noqa: B027  (a hook)
        """Change the gradients of the party's own ``modules`` in place, before its optimizer reads them.

        Args:
            modules: all of the party's models.
            rows: B; the loss is a mean over as many.
            rng: the party's own noise stream.
        """

    def modules(self) -> Iterable[nn.Module]:
        """Return the learned parts: every module that is an attribute, in the order in which they were assigned.

        They are trained and stored with the models of the party that carries this defense.
        """
        return [value for value in vars(self).values() if isinstance(value, nn.Module)]

    def prepare(  # noqa: B027  (most have none)
        self, widths: Mapping[str, int], *, n_classes: int, rng: torch.Generator
    ) -> None:
        """Fill in learned parts whose size is only known when the active party has its models, before training.

        Args:
            widths: of the embedding that each party will send, by the sender's name.
            n_classes: C.
            rng: a stream of this defense's own, on the models' device; first weights come from torch's, seeded here.
        """

    def plan_releases(self, releases: int | None) -> None:  # noqa: B027  (a hook)
        """Hear, before anything leaves, how often one row will be released to one party; None where nobody knows.

        A defense of updates hears in how many updates a row will take part.
        """

    def privacy_spent(self, releases: int) -> dict[str, float] | None:
        """Return the privacy spent on one row by ``releases`` releases of it, as {"epsilon", "delta"}.

        A defense of labels hears in how many trainings on the row its label was changed.
        None where there is no such guarantee, as at strength 0.
        """
        return None

    def __repr__(self) -> str:
        """Show every option: the label in tables and the id in tests."""
        points = [f"{phase}.{kind}" for kind in self.kinds for phase in self.phases.get(kind, ())]
        points += [kind.value for kind in self.kinds if kind not in self.phases]
        where = f"@{'+'.join(sorted(points))}" if points else ""
        rest = {k: v for k, v in vars(self).items() if k not in ("strength", "at", "kinds", "phases") and k[0] != "_"}
        options = "".join(f",{key}={value}" for key, value in sorted(rest.items()))
        return f"{self.name}:{self.strength_name}={self.strength:g}{options}{where}"


def list_hooks(defense: Defense | type[Defense]) -> frozenset[Hook]:
    """Return the hooks that a defense uses: those that it overrides, of messages only where it has a point."""
    used = set()
    for hook in (*hooks.HOOKS, hooks.PLAN_RELEASES):
        method = getattr(defense, hook.name)
        overridden = getattr(method, "__func__", method) is not getattr(Defense, hook.name)
        if overridden and (hook.kind is None or hook.kind in defense.points):
            used.add(hook)
    return frozenset(used)


class DefenseStack(tuple[Defense, ...]):
    """The defenses of one party whose strength is above 0, in the order in which they run.

    Defenses at strength 0 are left out here and nowhere else, so that they are the identity whatever their hooks do.
    Only the hooks that a defense declares are called (``list_hooks``).

    Args:
        defenses: at any strength.
    """

    _using: dict[Hook, list[Defense]]

    def __new__(cls, defenses: Iterable[Defense] = ()) -> "DefenseStack":
        """Keep those of positive strength."""
        stack = super().__new__(cls, (defense for defense in defenses if defense.strength > 0))
        stack._using = {hook: [d for d in stack if hook in list_hooks(d)] for hook in hooks.HOOKS}
        return stack

    def select(self, hook: Hook) -> list[Defense]:
        """Return the defenses that use ``hook``."""
        return self._using[hook]

    def modules(self) -> list[nn.Module]:
        """Return the learned modules of all defenses."""
        return [module for defense in self for module in defense.modules()]

    def apply_to_release(self, value: Any, release: Release) -> Any:
        """Return the tensor that leaves in place of ``value``; ciphertexts, masks and control messages are unchanged.

        A sequence (B, T, d) is a row (B, T·d) to a defense, which so protects it as a whole.
        """
        hook, of_rows = hooks.OF_KIND.get(release.kind), release.rows is not None
        if not hook or (of_rows and release.key == "mask"):
            return value
        released = value.flatten(1) if of_rows and value.dim() > 2 else value
        for defense in self.select(hook):
            if not defense.acts(release.kind, release.phase):
                continue
            before = released.detach().clone()  # a defense that works in place must not change what its sender keeps
            released = getattr(defense, hook.name)(before, release)
            assert released.shape == before.shape, (
                f"{defense!r} changed the shape of a release from {before.shape} to {released.shape}"
            )
        return released.reshape(value.shape)

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
        coding = self.select(hooks.PREDICTIONS)
        for defense in sorted(self.select(hooks.LABELS), key=lambda d: (d.softens, d in coding)):
            targets = defense.on_labels(targets, features=features, n_classes=n_classes, rng=rng)
            labels = labels if defense.softens else targets
        return labels, targets

    def decode_logits(self, logits: Tensor) -> Tensor:
        """Return the logits (B, C) after undoing the codes of labels, the last one first."""
        for defense in reversed(self.select(hooks.PREDICTIONS)):
            logits = defense.on_predictions(logits)
        return logits

    def batch(self, embeddings: Sequence[Tensor], targets: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """Return the embeddings and targets that the top model learns from in one update."""
        for defense in self.select(hooks.BATCH):
            embeddings, targets = defense.on_batch(embeddings, targets)
        return embeddings, targets

    def apply_to_received(self, h: Tensor, sender: str) -> Tensor:
        """Return the input of the top model in place of the embedding (B, d) received from ``sender``."""
        for defense in self.select(hooks.RECEIVED):
            h = defense.on_received(h, sender)
        return h

    def penalize(self, loss: Tensor, received: Mapping[str, Tensor], labels: Tensor) -> Tensor:
        """Return the active party's loss plus the penalties on the embeddings ``received`` from each sender."""
        for defense in self.select(hooks.PENALTY):
            for sender, h in received.items():
                term = defense.penalty(h, labels, sender)
                loss = loss if term is None else loss + term
        return loss

    def protocols(self) -> list[tuple[Any, dict[str, Any]]]:
        """Return each protocol with its options that a defense sets for the cut layer."""
        return [protocol for defense in self.select(hooks.PROTOCOL) if (protocol := defense.protocol())]

    @contextmanager
    def training_hooks(self, modules: nn.Module, penalties: Sequence[str]) -> Iterator[None]:
        """Run the training hooks of the defenses on their party's ``modules``.

        Raises:
            UsageError: a defense does not support them.
        """
        with ExitStack() as contexts:
            for defense in self.select(hooks.TRAINING):
                contexts.enter_context(defense.training_hooks(modules, penalties))
            yield

    def update(self, modules: nn.Module, rows: int, rng: torch.Generator) -> None:
        """Apply the defenses to the gradients of their party's ``modules``, which are of a mean over ``rows`` rows."""
        for defense in self.select(hooks.UPDATE):
            defense.on_update(modules, rows, rng)
