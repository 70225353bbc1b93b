"""Marvell: Gaussian noise that, for its power, makes the gradients of two classes hardest to distinguish."""

import logging
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vflsec.base.errors import UsageError
from vflsec.core.defense import Defense, Release
from vflsec.core.message import Kind

_SEARCH_STEPS = 40  # 0.618**40 = 4e-9 of the interval is left
_ROUNDING = 1e-24  # relative to squared means, in float64: means that differ by less are equal
_GOLDEN = (math.sqrt(5) - 1) / 2
_LOG = logging.getLogger(__name__)


class Noise(NamedTuple):
    """Variances of the noise. First digit: 1 along Delta, 2 orthogonal to it. Second: class, 0 negative, 1 positive.

    Attributes:
        sum_kl: the remaining symmetrized Kullback-Leibler divergence between the classes.
    """

    l10: float
    l11: float
    l20: float
    l21: float
    sum_kl: float


class Moments(NamedTuple):
    """Moments of two classes: variances u of negatives and v of positives, distance, share p of positives."""

    u: float
    v: float
    g: float
    p: float
    delta: Tensor


@dataclass(kw_only=True, eq=False, repr=False)
class Marvell(Defense):
    """Zero-mean Gaussian noise, different for each class, that minimizes their divergence for a given noise power.

    For rows g_i in R^d with binary labels, p is the share of positives, Delta the mean of positives minus that of
    negatives, g = ||Delta||^2, u and v the variances of negatives and positives, averaged over coordinates, and P = s ·
    g. Rows of class c get sqrt(l1c - l2c) · n · Delta / ||Delta|| + sqrt(l2c) · N(0, I), with n ~ N(0, 1) for each row.
    ``solve`` chooses the four variances such that the expected squared norm of the noise is P. Noise is drawn anew for
    each release.

    Source: Li et al. 2022 (arXiv 2102.08504), section 4, and its code, which calls s ``init_scale``.

    Guarantee: for one release of one row, with variances=uv, if both classes are isotropic Gaussians with these
    moments. Then (Pinsker) total variation <= sqrt(sumKL) / 2, so every guess of the label errs with probability >= 1/2
    - sqrt(sumKL) / 4, and no score has a leak AUC above 1/2 + sqrt(eps) / 2 - eps / 8 for sumKL <= eps < 4.

    Gradients are (B, d); the sender must own their labels.

    | case | result |
    |---|---|
    | one class in the batch, or Delta = 0 | white noise, of the last P to the receiver, else as ``iso``; logged |
    | d = 1 | two variances instead of four |
    | more than two classes | refused, unless one is named as ``positive``; the others are negatives then |
    | rows without labels | as one class, if the sender has labels of other rows (FedCVT); else refused |

    Args:
        strength: s, power of the noise in units of g; the source's grid is 0.1 to 25.
        variances: ``uv`` as measured, ``same`` their average for both, ``zero`` as if each class were one point.
        error: dynamic mode: s is multiplied by 1.5, in each batch, until the bound on the detection error is at least
            this.
        positive: the class to hide among all others; None for class 1 of two.

    Raises:
        UsageError: unknown variances, or an error that is not in [0, 0.5).
    """

    name = "marvell"
    strength_name = "s"
    strengths = (1.0, 4.0, 16.0)
    points = (Kind.GRADIENT,)
    reference = "Li et al. 2022 (Marvell), arXiv 2102.08504, section 4"
    guarantee = (
        "Pinsker's bound, for one release of one row whose class is an isotropic Gaussian: detection error >= 1/2 - "
        "sqrt(sumKL)/4, leak AUC <= 1/2 + sqrt(sumKL)/2 - sumKL/8 if sumKL < 4; none for other gradients or for "
        "several releases of a row; it is not differential privacy"
    )
    hides = "from the passive party: which of two classes a row belongs to, not its other features"
    costs = "two passes over the batch, B (d + 1) random numbers and a search in one variable"
    fails = (
        "over epochs, since no bound covers the mean of a row's releases (averaging); if classes are not Gaussian; and "
        "if their means nearly coincide but their spreads do not, because P is then small"
    )

    variances: Literal["uv", "same", "zero"] = "uv"
    error: float | None = None
    positive: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.error is not None and not 0 <= self.error < 0.5:
            raise UsageError(
                f"expected 0 <= error < 0.5, got {self.error}: 0.5 is a random guess, which takes infinite noise"
            )
        self._powers: dict[tuple[str, str], float] = {}  # the last P by phase and receiver, for batches of one class
        self._labeled = False  # whether a release had labels, so that the sender owns some

    def check_task(self, n_classes: int) -> None:
        """Raise UsageError unless there are two classes, or the one to hide is named."""
        if self.positive is None and n_classes != 2:
            raise UsageError(
                f"marvell hides one class of two, got {n_classes} classes: name the one to hide from the rest, as in "
                "marvell:positive=0, or use iso or max-norm"
            )
        if self.positive is not None and self.positive not in range(n_classes):
            raise UsageError(f"expected marvell's positive in 0 to {n_classes - 1}, got {self.positive}")

    def on_gradient(self, g: Tensor, release: Release) -> Tensor:
        """Return noised gradients (B, d)."""
        if g.numel() == 0:
            return g
        positives = self._find_positives(release)
        where = (release.phase, release.receiver)
        classes = None if positives is None else get_moments(g.double(), positives)
        if positives is None or classes is None:
            return self._add_white(g, self._powers.get(where), release)
        noise, self._powers[where] = self._search(classes, len(classes.delta))
        along = _list_deviations(noise.l10 - noise.l20, noise.l11 - noise.l21, positives, g)
        everywhere = _list_deviations(noise.l20, noise.l21, positives, g)
        line = (classes.delta / classes.g**0.5).to(g.dtype)
        n = _draw_gaussian(g[:, 0], release.rng)
        return _draw_gaussian(g, release.rng).mul_(everywhere[:, None]).addr_(along * n, line).add_(g)

    def _find_positives(self, release: Release) -> Tensor | None:
        """Return which rows (B,) belong to the class to hide; None if the sender only has labels of other rows."""
        if release.labels is None:
            if self._labeled:
                return None
            raise UsageError(
                f"marvell needs the labels of the rows whose gradients it hides, and {release.sender} has none in "
                f"{release.phase}: use iso or max-norm there"
            )
        self._labeled = True
        if self.positive is None and (most := int(release.labels.max())) > 1:
            self.check_task(most + 1)
        return release.labels == (1 if self.positive is None else self.positive)

    def _search(self, classes: Moments, d: int) -> tuple[Noise, float]:
        """Return the noise and its power P."""
        u, v = classes.u, classes.v
        power = self.strength * classes.g
        if self.variances != "uv":
            u = v = (u + v) / 2 if self.variances == "same" else 0.0
        noise = solve(u, v, classes.g, d, classes.p, power)
        while self.error is not None and noise.sum_kl > (2 - 4 * self.error) ** 2:
            power *= 1.5
            noise = solve(u, v, classes.g, d, classes.p, power)
        return noise, power

    def _add_white(self, g: Tensor, power: float | None, release: Release) -> Tensor:
        """Return ``g`` with isotropic noise, for a batch without two distinguishable classes."""
        _LOG.info(
            "marvell: one class, equal means or no labels in step %d of %s: white noise", release.step, release.phase
        )
        norm = power**0.5 if power else self.strength * float(torch.linalg.vector_norm(g, dim=1).max())
        return _draw_gaussian(g, release.rng).mul_(norm / g.shape[1] ** 0.5).add_(g)


def get_moments(rows: Tensor, positives: Tensor) -> Moments | None:
    """Return the moments of two classes of ``rows`` (B, d), of which ``positives`` (B,) is one.

    None if all rows belong to one class, or if the means are equal up to rounding.
    """
    member = torch.stack([~positives, positives]).double()  # (2, B)
    counts = member.sum(dim=1)
    means = member @ rows / counts[:, None]  # (2, d)
    squares = member @ torch.linalg.vector_norm(rows, dim=1).square() / counts - means.square().sum(dim=1)  # (2,)
    delta = means[1] - means[0]
    numbers = torch.stack([delta @ delta, means.square().sum(), counts[1] / len(rows)])
    g, size, p, u, v = torch.cat([numbers, squares / rows.shape[1]]).tolist()
    if not 0 < p < 1 or not g > _ROUNDING * size:
        return None
    return Moments(max(u, 0.0), max(v, 0.0), g, p, delta)


def solve(u: float, v: float, g: float, d: int, p: float, P: float) -> Noise:
    """Return the noise of power ``P`` under which two isotropic Gaussian classes diverge least.

    Minimizes sumKL = 1/2 [(d-1) (c2/e2 + e2/c2) + (c1 + g)/e1 + (e1 + g)/c1] - d, with c1 = l10 + u, c2 = l20 + u,
    e1 = l11 + v and e2 = l21 + v, subject to l10 >= l20 >= 0, l11 >= l21 >= 0 and p (l11 + (d-1) l21) +
    (1-p) (l10 + (d-1) l20) = P. Only the tighter class needs noise orthogonal to Delta: l21 = 0 if u <= v.

    The source alternates between three blocks from a random start. In the logarithms of c1, c2 and e1 the problem is
    convex (a geometric program), and given l20 the other two have a closed form (the source's first block). The rest is
    a unimodal function of l20, which golden-section search minimizes.

    Args:
        u: variance of negatives in each coordinate.
        v: variance of positives.
        g: squared distance of their means.
        d: dimensions.
        p: fraction of positives, in (0, 1).
        P: expected squared norm of the noise.
    """
    if u > v:
        other = solve(v, u, g, d, 1 - p, P)
        return Noise(other.l11, other.l10, other.l21, other.l20, other.sum_kl)
    q = 1 - p

    def find_best_noise(l20: float) -> tuple[float, float]:
        """Return the best l10 and l11."""
        rest = P - q * (d - 1) * l20
        total = rest + p * v + q * u
        ratio = math.sqrt((total + q * g) / (total + p * g))  # of l11 + v to l10 + u
        l10 = min(max(total / (p * ratio + q) - u, l20), rest / q)
        return l10, max((rest - q * l10) / p, 0.0)

    def divergence(l20: float) -> float:
        l10, l11 = find_best_noise(l20)
        a, b, c = l10 + u, l11 + v, l20 + u
        # x/y + y/x - 2 = (x-y)^2 / xy, without cancellation
        across = 0.0 if c == v else math.inf if c == 0 else (d - 1) * ((c - v) / c) * ((c - v) / v)
        return (across + ((a - b) / a) * ((a - b) / b) + g / a + g / b) / 2

    low, high = 0.0, min(v - u, P / (q * d)) if d > 1 else 0.0  # beyond v - u the classes differ more again
    for _ in range(_SEARCH_STEPS if high > 0 else 0):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if divergence(left) <= divergence(right):
            high = right
        else:
            low = left
    l20 = min(low, high, key=divergence)
    return Noise(*find_best_noise(l20), l20, 0.0, divergence(l20))


def _list_deviations(negative: float, positive: float, positives: Tensor, like: Tensor) -> Tensor:
    """Return the standard deviation (B,) of each row's noise, from the variances of the two classes."""
    both = torch.tensor([negative, positive], device=like.device, dtype=torch.float64).clamp(min=0).sqrt()
    return both.to(like.dtype)[positives.long()]


def _draw_gaussian(like: Tensor, rng: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=rng, device=like.device, dtype=like.dtype)
