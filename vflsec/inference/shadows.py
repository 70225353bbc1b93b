"""What attacks with shadow federations share: the confidence of a model in the true class, and checks."""

from torch import Tensor, inf
from torch.nn import functional as F

from vflsec.base.errors import InsufficientView, UsageError
from vflsec.core.view import Shadows, View

MIN_SHADOWS = 2
"""Shadows with each candidate, and without it, from which a variance can be told."""

BOUND = 15.0
"""Of log odds, at which 1 - p_y is 3e-7. Beyond it they tell more of a model than of a row."""

EXPLODED = 10
"""Times the usual size of logits, at which a shadow has diverged, even if it is finite."""


def check_shadow_count(*, shadows: int) -> None:
    """Raise UsageError unless there are enough shadows, half of which were trained on each candidate."""
    if shadows < 2 * MIN_SHADOWS or shadows % 2:
        raise UsageError(f"expected an even number of shadows, at least {2 * MIN_SHADOWS}, got {shadows}")


def expect_shadows(view: View) -> Shadows:
    """Return the shadows of a view, without those whose logits exploded: one would outweigh all others in a mean.

    Raises:
        InsufficientView: fewer than two were trained on some candidate, or fewer than two were not.
    """
    shadows = view.shadows
    assert shadows is not None, "the attack needs shadows"
    size = shadows.logits.double().std(dim=-1).median(dim=-1).values  # (S,)
    shadows = Shadows(*(x[size <= EXPLODED * size.median()] for x in shadows))
    inside = shadows.members.sum(dim=0)
    fewest = int(min(inside.min(), (len(shadows.members) - inside).min()))
    if fewest < MIN_SHADOWS:
        raise InsufficientView(
            f"expected at least {MIN_SHADOWS} shadow federations with each candidate and {MIN_SHADOWS} without it, "
            f"got {fewest}, since others diverged: raise shadows"
        )
    return shadows


def log_probability(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log p_y (..., n) of the true classes (n,), given logits (..., n, C), in double precision."""
    return _select_class(F.log_softmax(logits.double(), dim=-1), labels)


def log_odds(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log(p_y / (1 - p_y)) (..., n) of the true classes (n,), given logits (..., n, C), in double precision.

    It is z_y - log sum of exp(z_c) over the other classes c, which is finite where 1 - p_y is rounded to 0.
    """
    z = logits.double()
    return _select_class(z, labels) - _mask_class(z, labels).logsumexp(dim=-1)


def score_classes(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log odds (..., n) of the true classes (n,), at most ``BOUND`` from 0, given logits (..., n, C)."""
    return log_odds(logits, labels).clamp(-BOUND, BOUND)


def log_rival(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the largest log p_c (..., n) of another than the true class, given logits (..., n, C)."""
    return _mask_class(F.log_softmax(logits.double(), dim=-1), labels).amax(dim=-1)


def _mask_class(values: Tensor, labels: Tensor) -> Tensor:
    return values.scatter(-1, _make_index(values, labels), -inf)


def _select_class(values: Tensor, labels: Tensor) -> Tensor:
    return values.gather(-1, _make_index(values, labels))[..., 0]


def _make_index(values: Tensor, labels: Tensor) -> Tensor:
    return labels[:, None].expand(*values.shape[:-1], 1)
