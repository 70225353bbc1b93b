"""Base class of differentially private noise: every row is clipped, then gets noise that depends on no data."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vflsec.base.checks import check_positive
from vflsec.base.errors import UsageError
from vflsec.core.defense import Defense, Release
from vflsec.core.message import Kind

GUARANTEE = (
    "differential privacy of one row against the receiver: replacing the row (its label, for gradients; the sender's "
    "columns of it, for embeddings) changes all releases of that row together by at most epsilon. The receiver knows "
    "which row a release is of, so sampling amplifies nothing, and colluding receivers add up. Releases of other rows "
    "depend on this row through the model, which learns in clear; this is not part of epsilon but of "
    "epsilon_transcript, which counts every release of all rows, or of dp-sgd's epsilon at the same party"
)


@dataclass(kw_only=True, eq=False, repr=False)
class ClippedNoise(Defense):
    """Base of ``gaussian-dp`` and ``laplace-dp``: rows (B, d) are clipped to norm C and get independent noise.

    A gradient is clipped like the gradient of its row's own loss. The loss is the mean over the batch, so B times the
    row is clipped to C, and the result is divided by B. Both sides know B. Neighboring data sets differ by the
    replacement of one row, whose release can change by 2 C. (Under addition or removal it would be C, but the receiver
    knows which rows exist.)

    Args:
        strength: in the given unit; 0 is off, without clipping.
        at: where it acts.
        clip: C. VFLAIR's 0.2, for each row; VFLAIR divides a batch by its largest norm, which depends on other rows.
        unit: ``noise``: the strength is the scale of the noise over the sensitivity 2 C. ``1/epsilon``: the noise is
            found before training, for the total number of releases of a row.

    Raises:
        UsageError: a clip that is not positive.
    """

    points: ClassVar[tuple[Kind, ...]] = (Kind.GRADIENT, Kind.EMBEDDING)
    guarantee = GUARANTEE
    by_epsilon = {"unit": "1/epsilon"}  # noqa: RUF012  (declared ClassVar in the base class)
    order: ClassVar[int]
    hides = "from the receiver: a row's label (gradients) or the sender's columns (embeddings), within epsilon"
    costs = (
        "one norm and d random numbers for each row; utility, because small epsilons take noise longer than gradients"
    )
    fails = "with a large epsilon, which adds up over all releases of a row"

    clip: float = 0.2
    unit: Literal["noise", "1/epsilon"] = "noise"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(clip=self.clip)
        self._multiplier = self.strength if self.unit == "noise" else None

    def plan_releases(self, releases: int | None) -> None:
        """Find the noise for the requested epsilon.

        Raises:
            UsageError: the number of releases is not known, or no noise is large enough.
        """
        if self.unit == "1/epsilon" and self.strength:
            if releases is None:
                raise UsageError(
                    f"{self.name} needs a number of releases to reach an epsilon, and this phase does not know how "
                    f"often it releases a row: give the noise (--lambda), or choose another method or point"
                )
            self._multiplier = self.find_multiplier(1 / self.strength, releases) if releases else self.strength

    def privacy_spent(self, releases: int) -> dict[str, float] | None:
        """Return epsilon and delta of one row after ``releases`` releases, or None at strength 0."""
        return self.compose(self.scale, releases) if self.strength else None

    @property
    def scale(self) -> float:
        """The scale of the noise over the sensitivity."""
        assert self._multiplier is not None, "plan_releases comes first"
        return self._multiplier

    @abstractmethod
    def compose(self, multiplier: float, releases: int) -> dict[str, float]:
        """Return epsilon and delta of ``releases`` releases with noise of scale ``multiplier`` over the sensitivity."""

    @abstractmethod
    def find_multiplier(self, epsilon: float, releases: int) -> float:
        """Return the scale over the sensitivity with which ``releases`` releases spend ``epsilon``."""

    @abstractmethod
    def draw(self, like: Tensor, rng: torch.Generator) -> Tensor:
        """Return noise of scale 1 with the shape, type and device of ``like``."""

    def on_gradient(self, g: Tensor, release: Release) -> Tensor:
        """Return clipped and noised gradients (B, d)."""
        return self._add_noise(g, self.clip / max(len(g), 1), release.rng)

    def on_embedding(self, h: Tensor, release: Release) -> Tensor:
        """Return clipped and noised embeddings (B, d)."""
        return self._add_noise(h, self.clip, release.rng)

    def _add_noise(self, rows: Tensor, bound: float, rng: torch.Generator) -> Tensor:
        if not self.strength or rows.numel() == 0:
            return rows
        norms = torch.linalg.vector_norm(rows, ord=self.order, dim=1, keepdim=True)
        clipped = rows * (bound / norms.clamp(min=bound))
        return self.draw(rows, rng).mul_(self.scale * 2 * bound).add_(clipped)
