"""Vertical logistic regression: no party has a bottom model, the head is linear."""

from __future__ import annotations

from vflsec.core.federation import Federation
from vflsec.core.message import Kind
from vflsec.core.party import Party
from vflsec.core.view import Need
from vflsec.methods.feature_group_method import FeatureGroupMethod
from vflsec.methods.split_method import SHOWS
from vflsec.methods.split_training import SplitTraining
from vflsec.nn.columns import Columns


class VerticalLogisticRegression(FeatureGroupMethod):
    """Logistic regression on the columns of all parties, trained by split learning; softmax for more than two classes.

    With the boundary ``plain`` the active party is sent the columns themselves, once, and holds the whole regression;
    under encryption this is what FATE calls SecureLR. No gradient comes back: there is nothing that it could move. Its
    penalty is ``train.weight_decay``.

    Source: the baseline SecureLR of PrADA (Kang et al. 2022), table I; Hardy et al. 2017, arXiv 1711.10677.

    Args:
        train: how models are fitted.
        model: the head must be linear on concatenated inputs.
        boundary: the protocol at the cut layer.
    """

    name = "vertical-lr"
    reference = "Kang et al. 2022 (PrADA), table I, baseline SecureLR; Hardy et al. 2017, arXiv 1711.10677"
    differs = (
        "Categories are one-hot; FATE's numbers in the paper read numbered categories.",
        "It is trained by SGD or Adam as train says; the paper has FATE's defaults.",
        "Unencrypted, the active party receives the columns themselves; with more than two classes it is a softmax "
        "regression.",
    )
    messages = {"train": frozenset({Kind.EMBEDDING})}  # noqa: RUF012  (declared ClassVar in the base class)
    visible_to = {**SHOWS, "passive": SHOWS["passive"] - {Need.GRADIENTS}}  # noqa: RUF012

    def build_party(self, party: Party, federation: Federation) -> None:
        """Leave the columns as they are."""
        party.modules["bottom"] = Columns(party.n_features)

    def split(self, federation: Federation) -> SplitTraining:
        """Return the training of the regression alone."""
        return self.head_alone(federation)
