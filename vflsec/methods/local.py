"""The active party alone, the baseline of every federation."""

from __future__ import annotations

from torch import Tensor, nn

from vflsec.core.federation import Federation
from vflsec.core.method import Method, Progress
from vflsec.core.party import Party
from vflsec.methods.early_stopping import selection_split
from vflsec.methods.epochs import Epochs
from vflsec.methods.local_training import LocalTraining, labeled_rows, local_model, logits


class Local(Method):
    """Supervised training of the active party on its own columns of all its labeled rows, aligned or not.

    A reference for utility, and no federation: no message is sent, so that there is no adversary, and no defense acts.
    Passive parties have no model; their representation is their columns.

    Source: VFLHLP (Li et al. 2024, arXiv 2405.11884), section 5, the baseline Local-A; its step 1 fits the same model.

    Args:
        train: how the model is fitted; ``local_steps``, ``target`` and ``pretrain`` mean nothing here.
        model: the shape of the network; the head reads the active party's embedding alone.
    """

    name = "local"
    reference = "Li et al. 2024 (VFLHLP), arXiv 2405.11884, section 5, baseline Local-A"
    differs = ("Encoder and training follow model and train; the paper names no settings for Local-A.",)
    messages = {"train": frozenset()}  # noqa: RUF012  (declared ClassVar in the base class)
    visible_to = {}  # noqa: RUF012

    def build(self, federation: Federation) -> None:
        """Draw the active party's encoder and head."""
        federation.active.modules["local"] = local_model(federation, self.model_spec)

    def check(self, federation: Federation) -> None:
        """Raise UsageError if validation rows are needed, and there are none."""
        selection_split(self.train_spec, federation)

    def train(self, phase: str, federation: Federation, progress: Progress) -> list[float]:
        """Fit the model and return its mean loss by epoch."""
        rows, labels = labeled_rows(federation)
        training = LocalTraining(federation, federation.active.modules["local"], rows, labels, self.train_spec)
        state, optimizers = training.state, [training.optimizer]
        epochs = Epochs(
            federation,
            phase,
            progress,
            state.epochs,
            kept={"local": state},
            optimizers=optimizers,
            done=lambda: state.done,
        )
        for _ in epochs:
            epochs.end(training.epoch())
        training.finish()
        return epochs.losses

    def predict(self, federation: Federation, split: str) -> Tensor:
        """Return logits (n, C) from the active party's columns alone."""
        return logits(federation.active.modules["local"], federation.active.features[split])

    def representation(self, party: Party) -> nn.Module:
        """Return the active party's encoder; any other party has its columns and no model."""
        return party.modules["local"].get_submodule("encoder") if party.active else nn.Identity()
