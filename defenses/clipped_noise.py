"""What the differentially private noises share: every row is bounded, then gets noise that knows no data."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vflsec.core.checks import positive
from vflsec.core.defense import Defense, Release
from vflsec.core.errors import UsageError
from vflsec.core.message import Kind

GUARANTEE = (
    "differential privacy of one row, against whoever receives it: replace the row (its label, where gradients leave; "
    "the sender's columns of it, where embeddings do), and what is released about that row, in all its releases "
    "together, changes by no more than epsilon. The receiver knows which row it hears of, so nothing is amplified by "
    "sampling, and colluding receivers add up. What other rows' releases carry of this row by way of the model, which "
    "learns in clear, is not in epsilon but in epsilon_transcript, which counts every release of all rows; with dp-sgd "
    "at the same party it is in dp-sgd's epsilon"
)


class ClippedNoise(Defense):
    """Base of ``gaussian-dp`` and ``laplace-dp``: rows (B, d) are clipped to norm C and get independent noise.

    A gradient is clipped as that of its row's own loss: the loss is the mean over the batch, so the row that is sent,
    times B, is clipped to C, and what is sent is that over B. B is known to both sides. Neighbors differ by the
    replacement of one row, whose release can move by 2 C. (Under addition or removal it would be C; but the receiver
    knows which rows there are.)

    Args:
        strength: in the given unit; 0 is off, without clipping.
        at: where it acts.
        clip: C. VFLAIR's 0.2, for each row; VFLAIR divides a batch by its largest norm, which is other rows' data.
        unit: ``noise``: the strength is the scale of the noise over the sensitivity 2 C. ``1/epsilon``: the noise is
            found, before training, for the number of releases of a row in all of it.

    Raises:
        UsageError: a clip that is not positive.
    """

    points: ClassVar[tuple[Kind, ...]] = (Kind.GRADIENT, Kind.EMBEDDING)
    guarantee = GUARANTEE
    by_epsilon = {"unit": "1/epsilon"}  # noqa: RUF012  (declared ClassVar in the base class)
    order: ClassVar[int]

    def __init__(
        self,
        strength: float,
        *,
        at: Iterable[str] | None = None,
        clip: float = 0.2,
        unit: Literal["noise", "1/epsilon"] = "noise",
    ) -> None:
        super().__init__(strength, at=at)
        positive(clip=clip)
        self.clip = clip
        self.unit = unit
        self._multiplier = self.strength if unit == "noise" else None

    def plan_releases(self, releases: int | None) -> None:
        """Find the noise for the epsilon that is asked for.

        Raises:
            UsageError: nobody knows how often a row will be released, or no noise is large enough.
        """
        if self.unit == "1/epsilon" and self.strength:
            if releases is None:
                raise UsageError(
                    f"{self.name} cannot be given an epsilon in a phase of which nobody knows beforehand how often it "
                    f"releases a row: give the noise (--lambda), and epsilon is reported, or another method or point"
                )
            self._multiplier = self.multiplier(1 / self.strength, releases) if releases else self.strength

    def spent(self, releases: int) -> dict[str, float] | None:
        """Return epsilon and delta of one row after ``releases`` releases, or None at strength 0."""
        return self.composed(self.scale, releases) if self.strength else None

    @property
    def scale(self) -> float:
        """The scale of the noise over the sensitivity."""
        assert self._multiplier is not None, "expect comes first"
        return self._multiplier

    @abstractmethod
    def composed(self, multiplier: float, releases: int) -> dict[str, float]:
        """Return epsilon and delta of that many releases with that scale over the sensitivity."""

    @abstractmethod
    def multiplier(self, epsilon: float, releases: int) -> float:
        """Return the scale over the sensitivity with which so many releases spend ``epsilon``."""

    @abstractmethod
    def draw(self, like: Tensor, rng: torch.Generator) -> Tensor:
        """Return noise of scale 1 with the shape, type and device of ``like``."""

    def on_gradient(self, g: Tensor, release: Release) -> Tensor:
        """Return clipped and noised gradients (B, d)."""
        return self._released(g, self.clip / max(len(g), 1), release.rng)

    def on_embedding(self, h: Tensor, release: Release) -> Tensor:
        """Return clipped and noised embeddings (B, d)."""
        return self._released(h, self.clip, release.rng)

    def _released(self, rows: Tensor, bound: float, rng: torch.Generator) -> Tensor:
        if not self.strength or rows.numel() == 0:
            return rows
        norms = torch.linalg.vector_norm(rows, ord=self.order, dim=1, keepdim=True)
        clipped = rows * (bound / norms.clamp(min=bound))
        return self.draw(rows, rng).mul_(self.scale * 2 * bound).add_(clipped)
