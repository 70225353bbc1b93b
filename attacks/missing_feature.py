"""Missing features: a party sends zeros for some rows."""

from torch import Tensor

from vflsec.base.checks import share
from vflsec.core.attack import IntegrityAttack, When
from vflsec.core.message import Step


class MissingFeature(IntegrityAttack):
    """Send zeros in place of the embedding of each row with probability ``rate``.

    Rows are drawn anew in each step; colluding parties share the draw. The party learns nothing from a missing row.

    Source: Zou et al. 2024 (VFLAIR, arXiv 2310.09827) and released code, missing feature; ``when`` is ours.

    Args:
        rate: share of rows.
        when: in ``train``, at ``predict``, or ``both``.
    """

    name = "missing-feature"
    reference = "Zou et al. 2024 (VFLAIR), arXiv 2310.09827 and released code, missing feature"
    verified = "with rate=1: equality with a party that sends zeros"
    differs = ("The phase in which rows are missing can be chosen (when).",)
    costs = "nothing beyond training"
    fails = "if the other parties' columns suffice; has less effect if training included it (when=both)"

    def __init__(self, *, rate: float = 0.5, when: When = "both") -> None:
        share(rate=rate)
        self.rate = rate
        self.when = when

    def on_embedding(self, h: Tensor, step: Step) -> Tensor:
        """Return ``h`` (B, d) with zeros in the rows that are missing."""
        return self._draw_mask(h, step)

    def on_gradient(self, g: Tensor, step: Step) -> Tensor:
        """Return ``g`` (B, d) with zeros in the same rows."""
        return self._draw_mask(g, step)

    def _draw_mask(self, value: Tensor, step: Step) -> Tensor:
        if not step.is_part_of(self.when):
            return value
        return value.masked_fill(self.draw_rows(self.rate, step)[:, None], 0.0)
