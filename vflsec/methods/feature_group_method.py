"""Split learning with a logistic regression at the active party, on feature groups as in PrADA, or on columns."""

from typing import ClassVar

from vflsec.base.errors import UsageError
from vflsec.base.layout import Group
from vflsec.core.federation import Federation
from vflsec.core.message import Kind
from vflsec.core.party import Party
from vflsec.methods.split_method import RECEIVES, SplitMethod
from vflsec.methods.split_training import HeadTraining, SharedHeadTraining, SplitTraining
from vflsec.nn.feature_groups import FeatureGroups, group_all
from vflsec.nn.wrappers import Columns, Frozen

UNGROUPED_WIDTH = 4
"""Numbers that the aggregator of all columns together returns, as in the authors' code."""


class FeatureGroupMethod(SplitMethod):
    """The active party's head is a logistic regression on its own columns and on what passive parties send, mu.

    A passive party whose columns have no groups has one group.

    Source: PrADA (Kang et al. 2022), section 5; section 8.1 for its ablations.

    Class attributes:
        grouped: whether columns are read in groups; else one extractor reads all of them.
        interacting: whether pairs of groups are groups as well.
        ungrouped_differs: what else differs from the paper without groups.

    Args:
        model: the head must be linear on concatenated inputs; encoders are not read.
        boundary: the protocol at the cut layer.
    """

    differs: ClassVar[tuple[str, ...]] = (
        "The head and what is trained with it follow train: by default Adam at 0.001 with batches of 256. The paper "
        "has the rate 0.0008 and batches of 128 (Loan Default: 64); the authors' code has SGD with momentum 0.99.",
        "Encoded columns are standardized by training rows of each domain. Household columns have an embedding "
        "each; the authors' code shares one.",
        "Extractors have Dropout 0.1 and return rows f_i of length one, as in the authors' code; the paper mentions "
        "neither.",
        "Columns without groups of their own are one group, with layers of 2n, n and n/2.",
    )
    ungrouped_differs: ClassVar[tuple[str, ...]] = (
        "The extractor sends four numbers, as in the authors' code; the paper does not say how many.",
    )
    logistic = True
    grouped: ClassVar[bool] = True
    interacting: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        """Add what differs without groups."""
        super().__init_subclass__()
        if not cls.grouped:
            shared = tuple(sentence for sentence in cls.differs if sentence not in cls.ungrouped_differs)
            cls.derive(differs=shared + cls.ungrouped_differs)

    def build_party(self, party: Party, federation: Federation) -> None:
        """Give a passive party its extractors and aggregators; the active party's columns stay as they are."""
        party.modules["bottom"] = Columns(party.n_features) if party.active else self.extractors(party)

    def extractors(self, party: Party) -> FeatureGroups:
        """Draw the bottom model of a passive party."""
        grouping = party.layout.grouping or group_all(party.layout)
        groups: tuple[Group, ...] = (grouping.whole,)
        if self.grouped:
            groups = (*grouping.single, *(grouping.pairs if self.interacting else ()))
        aggregated = 1 if self.grouped else UNGROUPED_WIDTH
        return FeatureGroups(party.layout, groups, grouping.embeddings, aggregated=aggregated)

    def check(self, federation: Federation) -> None:
        """Raise UsageError if the head would be no logistic regression, or rows are lacking."""
        super().check(federation)
        spec = self.model_spec
        if (spec.head, spec.aggregation) != ("linear", "concat"):
            raise UsageError(
                f"{self.name} expects model.head=linear and model.aggregation=concat, a logistic regression, got "
                f"{spec.head} and {spec.aggregation}"
            )

    def build_head_training(self, federation: Federation) -> SplitTraining:
        """Return the training of the head on bottom models that stay: no gradient comes back.

        Rows are sent once; in every epoch, where a boundary itself learns.
        """
        bottoms = {party.name: self.representation(party) for party in federation.parties.values()}
        top = federation.active.modules["top"]
        if any(boundary.modules() for boundary in self._boundaries.values()):
            stay = {name: Frozen(bottom) for name, bottom in bottoms.items()}
            return SharedHeadTraining(federation, stay, top, self._boundaries, self.train_spec)
        return HeadTraining(federation, bottoms, top, self._boundaries, self.train_spec)


class VerticalLogisticRegression(FeatureGroupMethod):
    """Logistic regression on the columns of all parties, trained by split learning; softmax for more than two classes.

    With the boundary ``plain`` the active party is sent the columns themselves, once, and holds the whole regression;
    under encryption this is what FATE calls SecureLR. No gradient comes back: there is nothing that it could move. Its
    penalty is ``train.weight_decay``.

    Source: the baseline SecureLR of PrADA (Kang et al. 2022), table I; Hardy et al. 2017, arXiv 1711.10677.

    Args:
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
    receives = {**RECEIVES, "passive": frozenset[Kind]()}  # noqa: RUF012

    def build_party(self, party: Party, federation: Federation) -> None:
        """Leave the columns as they are."""
        party.modules["bottom"] = Columns(party.n_features)

    def split(self, federation: Federation) -> SplitTraining:
        """Return the training of the regression alone."""
        return self.build_head_training(federation)
