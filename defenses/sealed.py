"""Sealed training: a passive party receives noised sums over a batch in place of a gradient for each row."""

import math
from dataclasses import dataclass
from typing import Literal

from vflsec.base.checks import check_inside
from vflsec.cipher.noise import SealedPlan, compute_epsilon, find_mu
from vflsec.core.defense import Defense
from vflsec.core.protocol import Boundary
from vflsec.protocols.sealed_bfv import EncryptedSums
from vflsec.protocols.sealed_plain import SealedSums


@dataclass(kw_only=True, eq=False, repr=False)
class SealedGradients(Defense):
    """Split learning in which only noised sums over a batch reach a passive party.

    The active party seals the residual of each row; the passive party weighs the sealed numbers with the Jacobians of
    its own model, of which none is longer than 1, and returns masked sums over the batch; the active party adds noise
    and returns them. Noise as large as the part of one row is small beside a sum. The active party's own
    models learn from such sums as well while passive parties train, since later residuals depend on them; afterwards
    they are fitted in private to the embeddings that it has.

    Source: this project. Noise on sums: Abadi et al. 2016. Composition, exact for Gaussian noise: Dong et al. 2019
    (arXiv 1905.02383), corollaries 2.13 and 3.3.

    Guarantee: (epsilon, delta)-differential privacy of one training label, replaced by any other, in everything that
    all passive parties together learn in training, if all parties follow the protocol. A row is in one batch of each
    epoch and everybody knows in which, so sampling amplifies nothing. A passive party that puts one row into a sum with
    another weight than agreed can read it: it is not bounded. Predictions that the active party hands out, and
    settings that it chooses by labels, are not part of it.

    Noise comes from seeded generators: this measures a mechanism and protects no real data, with either backend. Both
    give the same numbers. ``vflsec party`` trains in this way between two companies, with noise that nobody can know.

    Args:
        strength: 1/epsilon.
        at: no point: it changes no release, but who learns what.
        epochs: passes over the training rows in which passive parties learn.
        batch: rows of a sum, about; all rows if they are fewer.
        lr: learning rate of Adam in these passes.
        delta: at which epsilon is meant.
        bits: of the fraction of both factors of a sum.
        backend: ``plain``, or ``bfv``: the same messages, encrypted, to see what they cost; it needs tenseal.

    Raises:
        UsageError: an option out of range.
    """

    name = "sealed"
    reference = "this project; Abadi et al. 2016; Dong et al. 2019 (Gaussian differential privacy)"
    guarantee = (
        "(epsilon, delta)-differential privacy of one training label in everything that all passive parties together "
        "learn in training, if they follow the protocol; noise is simulated, and protects no real data"
    )
    points = ()
    strength_name = "1/epsilon"
    by_epsilon = {}  # noqa: RUF012  (declared ClassVar in the base class)
    tradeoff = "gaussian"
    strengths = (0.25, 0.5, 1.0)
    hides = "from passive parties: the label of each training row, within epsilon"
    costs = (
        "memory and time for the Jacobian of each row; utility, less with fewer parameters and more rows; with "
        "backend=bfv megabytes and a fraction of a second for each batch"
    )
    fails = "against a passive party that breaks the protocol; and for how own columns go with labels, which it learns"

    epochs: int = 10
    batch: int = 2048
    lr: float = 0.02
    delta: float = 1e-5
    bits: int = 14
    backend: Literal["plain", "bfv"] = "plain"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_inside(delta=self.delta)
        mu = find_mu(1 / self.strength, self.delta) if self.strength else math.inf
        self.plan = SealedPlan(mu, self.epochs, self.batch, self.lr, self.bits)

    def protocol(self) -> tuple[type[Boundary], dict[str, SealedPlan]] | None:
        """Return the boundary of sealed sums, or None at strength 0."""
        if not self.strength:
            return None
        boundary = EncryptedSums if self.backend == "bfv" else SealedSums
        return boundary, {"plan": self.plan}

    def privacy_spent(self, releases: int) -> dict[str, float] | None:
        """Return epsilon and delta of one label after so many trainings, or None at strength 0."""
        if not self.strength:
            return None
        return {"epsilon": compute_epsilon(self.plan.mu * math.sqrt(releases), self.delta), "delta": self.delta}
