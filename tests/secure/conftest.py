"""The same pair of roles as in the tests of the cipher."""

from tests.cipher.conftest import *  # noqa: F403
