"""PPDL: a few noisy entries are released, chosen by the sparse vector technique; all others are zero."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vflsec.base.checks import check_fraction, check_positive
from vflsec.core.defense import Defense, Release
from vflsec.core.message import Kind


@dataclass(kw_only=True, eq=False, repr=False)
class SparseVector(Defense):
    """Sparse vector technique: at most c = max(1, floor(released·n)) of n entries are released, with Laplace noise.

    epsilon = 1 / strength, epsilon_1 = 8/9 epsilon, epsilon_2 = 2/9 epsilon, s_j = 2·c / epsilon_j, and clip means to
    [-gamma, gamma]. Entries are visited in a random order. An entry is released if |clip(g)| + Lap(2·s_1) >= tau +
    Lap(s_1), whose right side is drawn anew after each release; the released value is clip(clip(g) + Lap(s_2)). After c
    releases, or after all entries, the rest is zero.

    Source: Shokri and Shmatikov 2015 (CCS), section 5, as in the released code of Fu et al. 2022 (USENIX Security):
    epsilon 1.8 (strength .556), gamma .001, tau .0001, and .75, .5, .25 or .1 released. Their code sends all entries
    that it has not released in clear when it runs out of entries before c releases, as it does with .75; here they are
    zero. It does not clip g before it adds noise to a released value, so that no sensitivity bounds an entry far beyond
    gamma; here it is clipped. Their parameter is the share released. For a given epsilon a smaller share takes less
    noise and reveals more, so the strength is 1 / epsilon. Released values have magnitudes of at most gamma, whatever
    the scale of g.

    Guarantee: each release is epsilon-differentially private, epsilon = 1 / strength, for any change of all of its
    entries (Dwork and Roth 2014, section 3.6, NumericSparse; queries of sensitivity 1 >= 2·gamma: epsilon_1 and half of
    epsilon_2 are spent). Releases add up: T batches with a row spend T·epsilon on it, which is reported, and large
    after an epoch or two. Through the model, a row affects batches that do not contain it; ``epsilon_transcript``
    counts a release for every row of every batch, which overestimates by a factor of the batch size. The noise cannot
    be found for an epsilon of a whole training (``--epsilon``): divide it by the number of epochs.

    Args:
        strength: 1 / epsilon.
        released: largest share of released entries, in (0, 1].
        gamma: bound of the magnitude of an entry, at most half the sensitivity of 1.
        tau: magnitude below which an entry is less likely to be released.
        at: the kinds of release to act on.

    Raises:
        UsageError: a share, bound or threshold out of range.
    """

    name = "ppdl"
    strengths = (1e-7, 1e-6, 1e-5)
    points = (Kind.GRADIENT,)
    reference = (
        "Shokri and Shmatikov 2015, Privacy-Preserving Deep Learning, CCS, section 5; "
        "Fu et al. 2022, Label Inference Attacks Against Vertical Federated Learning, USENIX Security, section 6"
    )
    guarantee = (
        "epsilon-differential privacy of all entries of each release together, epsilon = 1 / strength, against the "
        "receiver; releases add up, so that one row spends it once an epoch"
    )
    version = 2
    hides = "from the passive party: almost everything at the usual settings; released values are random signs of gamma"
    costs = (
        "3 n random numbers and one pass over n entries in Python; utility, because the passive party's model hardly "
        "learns"
    )
    fails = "together with the model, and at an epsilon so large that signs survive"

    released: float = 0.1
    gamma: float = 1e-3
    tau: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction(released=self.released)
        check_positive(gamma=self.gamma, tau=self.tau)
        check_fraction(**{"2*gamma": 2 * self.gamma})

    def on_gradient(self, g: Tensor, release: Release) -> Tensor:
        """Return the gradients (B, d), all zero but for a few noised and clipped entries."""
        n, rng = g.numel(), release.rng
        if n == 0:
            return g
        most = max(1, int(self.released * n + 1e-6))
        choosing, answering = 2 * most * self.strength / (8 / 9), 2 * most * self.strength / (2 / 9)  # s_1, s_2
        order = torch.randperm(n, generator=rng, device=g.device)
        entries = g.flatten()[order]
        heights = entries.abs().clamp(max=self.gamma) + _draw_laplace(entries, 2 * choosing, rng)
        thresholds = self.tau + _draw_laplace(entries[:most], choosing, rng)
        chosen = order.new_tensor(_find_crossings(heights.tolist(), thresholds.tolist()))
        values = entries[chosen].clamp(-self.gamma, self.gamma) + _draw_laplace(entries[chosen], answering, rng)
        released = torch.zeros_like(entries)
        released[order[chosen]] = values.clamp(-self.gamma, self.gamma)
        return released.reshape(g.shape)

    def privacy_spent(self, releases: int) -> dict[str, float] | None:
        """Return epsilon, which adds up over the batches that a row is in, or None at strength 0."""
        return {"epsilon": releases / self.strength, "delta": 0.0} if self.strength else None


def _find_crossings(heights: list[float], thresholds: list[float]) -> list[int]:
    """Return, for each threshold in turn, the first place after the last one where the height reaches it."""
    crossings: list[int] = []
    places = iter(enumerate(heights))
    for threshold in thresholds:
        place = next((i for i, height in places if height >= threshold), None)
        if place is None:  # all visited
            break
        crossings.append(place)
    return crossings


def _draw_laplace(like: Tensor, scale: float, rng: torch.Generator) -> Tensor:
    """Return Laplace noise, the difference of two exponentials, of the shape of ``like``."""
    first, second = (torch.empty_like(like).exponential_(generator=rng) for _ in range(2))
    return first.sub_(second).mul_(scale)
