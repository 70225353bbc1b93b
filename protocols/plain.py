"""Plain split learning: embeddings go up and gradients come down in clear."""

from torch import Tensor

from vflsec.core.message import Kind, Step
from vflsec.core.protocol import Boundary


class PlainBoundary(Boundary):
    """The boundary of ordinary split learning; nothing is hidden but what the parties' own defenses hide.

    Source: Vepakomma et al. 2018 (arXiv 1812.00564), the vertically partitioned configuration.
    """

    name = "plain"
    reference = "Vepakomma et al. 2018, arXiv 1812.00564, vertically partitioned configuration"
    reveals = {  # noqa: RUF012  (declared ClassVar in the base class)
        "active": ("the embedding of every row that it asks for, after the passive party's defenses",),
        "passive": ("the loss gradient with respect to each embedding it sent, after the active party's defenses",),
    }

    def forward(self, h: Tensor, step: Step) -> Tensor:
        """Send the embedding (B, d); return what the active party received (B, d)."""
        message = self.passive.send(Kind.EMBEDDING, {"value": h}, to=self.active.name, **step.place)
        received: Tensor = message.payload["value"]
        return received

    def backward(self, g: Tensor, step: Step) -> Tensor:
        """Send the gradient (B, d); return what the passive party received (B, d)."""
        message = self.active.send(Kind.GRADIENT, {"value": g}, to=self.passive.name, labels=step.labels, **step.place)
        received: Tensor = message.payload["value"]
        return received
