"""FedSplitNN: supervised split learning, end to end."""

from typing import ClassVar

from vflsec.core.federation import Federation
from vflsec.methods.split_method import SplitMethod


class FedSplitNN(SplitMethod):
    """Supervised split learning on the aligned labeled rows, with K >= 2 parties.

    Every party has a bottom model (B, features) -> (B, cut); the active party joins the embeddings, applies its head
    and returns to each passive party the gradient of the loss with respect to its embedding. ``train.local_steps``
    above one makes it FedBCD (Liu et al. 2019, arXiv 1912.11187): several updates on one exchange.

    Source: FedHSSL (He et al. 2022, arXiv 2208.08934), the baseline FedSplitNN.

    Args:
        boundary: the protocol at the cut layer.
    """

    name = "fedsplitnn"
    reference = "He et al. 2022 (FedHSSL), arXiv 2208.08934, baseline FedSplitNN; Vepakomma et al. 2018"
    differs: ClassVar[tuple[str, ...]] = (
        "Training follows train and model, by default Adam at 0.001, batches of 256 and small networks; FedHSSL's "
        "settings are those of its fine-tuning.",
        "With train.local_steps above 1 it is FedBCD.",
    )

    def updates(self, federation: Federation) -> int:
        """Return the number of epochs, times the local steps: a row is in one batch of each epoch."""
        return self.train_spec.count_epochs(federation.n_rows("train")) * self.train_spec.local_steps
