"""Checks of one argument: the keyword is the name in the message."""

import pytest

from vflsec.base import checks, errors
from vflsec.base.errors import UsageError

NAN = float("nan")


@pytest.mark.parametrize(
    ("check", "good", "bad", "expected"),
    [
        (checks.check_positive, [1, 1e-9], [0, -1, NAN], "x > 0"),
        (checks.check_non_negative, [0, 1], [-1e-9, NAN], "x >= 0"),
        (checks.check_fraction, [1, 0.5], [0, 1.01, -1, NAN], "0 < x <= 1"),
    ],
)
def test_numbers_in_range(check, good, bad, expected):
    for value in good:
        check(x=value)
    for value in bad:
        with pytest.raises(UsageError, match=f"^expected {expected}, got {value}$"):
            check(fine=1, x=value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("gradeint", "unknown at 'gradeint'. Did you mean gradient? Known: embedding, gradient"),
        ("zzz", "unknown at 'zzz'. Known: embedding, gradient"),
    ],
)
def test_an_unknown_name_gets_a_suggestion(value, message):
    with pytest.raises(UsageError) as caught:
        checks.expect_known(["gradient", "embedding"], at=value)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("UsageError", 2),
        ("DataError", 2),
        ("InsufficientView", 2),
        ("StoreError", 2),
        ("Diverged", 3),
        ("BadGuess", 2),
    ],
)
def test_errors_carry_their_exit_code(error, code):
    kind = getattr(errors, error)
    assert issubclass(kind, errors.VflsecError)
    assert kind.exit_code == code
    assert f"{error} " in errors.__doc__
