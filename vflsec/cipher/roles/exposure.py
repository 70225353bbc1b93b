"""How much of the passive party's features the active party can compute from the scores, counted before training.

Every pass of a sample gives one linear equation in its features for each output. Frozen features of width g are
determined, up to a rotation that a few known rows fix, once there are g equations: the active party knows the updates
of W, and the g C numbers of W_0 are shared by all samples. Fewer equations determine that share of the directions of
independent numbers. This is no bound: one direction may hold most of the variance of features that depend on each
other (``score-regression`` measures it), and one score of fifty bits determines many columns of few values each
(``score-decoding``). Features that move give equations in ever new numbers.

Source: counting of unknowns; ``score-gram`` is the attack.
"""

import msgspec

from vflsec.base.checks import check_positive, count

FEWER = "features that depend on each other, or have few values, are read from fewer"


class Exposure(msgspec.Struct, frozen=True, kw_only=True):
    """What the scores of a run determine of the passive party's features.

    Attributes:
        passes: of each training sample.
        outputs: scores in a pass.
        width: g, of the features.
        rows: number of training samples.
        frozen: whether the features stay the same during training.

    Raises:
        UsageError: a number below 1.
    """

    passes: int
    outputs: int
    width: int
    rows: int
    frozen: bool = True

    def __post_init__(self) -> None:
        """Check every number."""
        check_positive(passes=self.passes, outputs=self.outputs, width=self.width, rows=self.rows)

    @property
    def equations(self) -> int:
        """Linear equations in the features of each sample."""
        return self.passes * self.outputs

    @property
    def share(self) -> float:
        """Share of the directions of a sample's features that is determined, from 0 to 1, were they independent."""
        return min(1.0, self.equations / self.width)

    def __str__(self) -> str:
        """Return one line for a terminal."""
        asked = f"{count(self.passes, 'pass', 'passes')} x {count(self.outputs, 'output')}"
        equations = count(self.equations, "equation")
        counted = (
            f"exposure {self.share:.2f}: {asked} give the active party {equations} in the {self.width} features of "
            f"each of {self.rows} training samples"
        )
        if not self.frozen:
            return f"{counted}, which move; {FEWER}"
        return f"{counted}; {'it can compute all of them up to a rotation' if self.share == 1 else FEWER}"
