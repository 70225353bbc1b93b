"""The contribution of each input to a prediction: exact for a linear head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vflsec.base.errors import UsageError
from vflsec.core.method import Trained
from vflsec.core.party import Party
from vflsec.methods.split_method import SplitMethod
from vflsec.methods.split_training import SplitTraining
from vflsec.nn.feature_groups import FeatureGroups
from vflsec.nn.top import Top


class Attribution(NamedTuple):
    """The contribution of each input to a prediction of class 1, in log odds.

    Attributes:
        names: of the J inputs, the active party's first.
        phi: (n, J); the sum over inputs is a row's log odds minus those of the background.
        values: (n, J), the inputs themselves.
    """

    names: tuple[str, ...]
    phi: Tensor
    values: Tensor


def exact(trained: Trained, split: str = "test", *, background: str = "train") -> Attribution:
    """Return phi_j = w_j (x_j - E x_j), the Shapley values of a linear model of independent inputs.

    Source: Lundberg and Lee 2017, "A unified approach to interpreting model predictions", corollary 1.

    Args:
        trained: by split learning, with a linear head of two classes whose weights the active party holds.
        split: rows to explain.
        background: split over which the expectation is taken.

    Raises:
        UsageError: the head is another.
    """
    training = _training(trained)
    inputs, mean = (torch.cat(list(_inputs(training, rows).values()), dim=1) for rows in (split, background))
    top = training.top
    assert isinstance(top, Top)
    if not isinstance(top.head, nn.Linear) or top.aggregation != "concat" or top.head.in_features != inputs.shape[1]:
        raise UsageError(
            "expected a linear head whose weights the active party holds, got another: name a method that has one"
        )
    weight = top.head.weight.detach()
    weight = weight[0] if len(weight) == 1 else weight[1] - weight[0]
    return Attribution(_names(training), weight * (inputs - mean.mean(dim=0)), inputs)


def _training(trained: Trained) -> SplitTraining:
    method, federation = trained.method, trained.federation
    if not isinstance(method, SplitMethod) or federation.n_classes != 2:
        got = f"{method.name} and {federation.n_classes} classes"
        raise UsageError(f"expected a method of split learning and two classes to attribute predictions, got {got}")
    training = method.split(federation)
    for module in (*training.bottoms.values(), training.top):
        module.eval()
    return training


@torch.no_grad()
def _inputs(training: SplitTraining, split: str) -> dict[str, Tensor]:
    """Return each party's embeddings of the rows of ``split`` before its defenses, the active party's first."""
    parties = training.federation.parties.items()
    return {name: training.bottoms[name](party.features[split]) for name, party in parties}


def _names(training: SplitTraining) -> tuple[str, ...]:
    several = len(training.federation.passive) > 1
    return tuple(
        name for party in training.federation.parties.values() for name in _own_names(training, party, several)
    )


def _own_names(training: SplitTraining, party: Party, several: bool) -> Iterator[str]:
    bottom = training.bottoms[party.name]
    width = bottom.width
    assert isinstance(width, int)
    prefix = f"{party.name} " if several and not party.active else ""
    columns = [column.name for column in party.layout.columns]
    if isinstance(bottom, FeatureGroups) and width == len(bottom.names):
        yield from (prefix + name for name in bottom.names)
    elif party.active and width == len(columns):
        yield from columns
    else:
        yield from (f"{party.name} {k + 1}" for k in range(width))
