"""What the conformance suites share: exemptions with a reason, an expected refusal, and standard errors."""

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import skip

import numpy as np
import torch
from torch import Tensor

from vflsec.base.errors import VflsecError
from vflsec.core.federation import Federation

SIGMAS = 4.0
"""How many standard errors a random quantity may be away; beyond lie 6 of 100,000 sound plug-ins."""


class Suite:
    """Base of the suites.

    Class attributes:
        exempt: checks that do not apply to this plug-in, each with the reason.
    """

    exempt: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls) -> None:
        """Put a skip with the reason in the place of each exempted check."""
        super().__init_subclass__()
        for check, reason in cls.exempt.items():
            assert hasattr(cls, check), f"{cls.__name__} exempts itself from {check!r}, which is not a check"
            setattr(cls, check, skip(reason)(getattr(cls, check)))


@contextmanager
def expect_refusal(error: type[VflsecError], *, naming: str) -> Iterator[None]:
    """Fail unless the block raises ``error`` with ``naming`` in its text."""
    expected = f"expected {error.__name__} that names {naming!r}"
    try:
        yield
    except Exception as raised:
        if not isinstance(raised, error) or naming not in str(raised):
            raise AssertionError(f"{expected}, got {raised!r}") from raised
        return
    raise AssertionError(f"{expected}, nothing was raised")


def check_stated(plugin: Any, names: Iterable[str]) -> None:
    """Fail unless each named class attribute is there and says something."""
    for name in names:
        assert getattr(plugin, name, None), f"expected {plugin} to state {name!r}"


def are_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, NaN included."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7.25), b.nan_to_num(7.25))


def get_generators() -> dict[str, Any]:
    """Return the states of the generators that everybody shares, by what they are called."""
    return {
        "torch's global generator": torch.get_rng_state(),
        "numpy's global generator": repr(np.random.get_state(legacy=False)),  # noqa: NPY002  (to see that it stays)
        "Python's global generator": random.getstate(),
    }


def get_parameters(federation: Federation) -> dict[str, Tensor]:
    """Return the state of the models of all parties, by party and name."""
    return {
        f"{party.name}.{key}": value
        for party in federation.all_parties
        for key, value in party.modules.state_dict().items()
    }


def list_changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return what is not as it was, by what it is called."""
    pairs = {name: (value, after[name]) for name, value in before.items()}
    return [name for name, (a, b) in pairs.items() if not (are_same(a, b) if isinstance(a, Tensor) else a == b)]


def estimate_auc_error(labels: Tensor, runs: int) -> float:
    """Return the standard error of the mean, over ``runs``, of the AUC of a score that knows nothing of ``labels``."""
    positive = int((labels == 1).sum())
    negative = len(labels) - positive
    return math.sqrt((positive + negative + 1) / (12 * positive * negative * runs))
