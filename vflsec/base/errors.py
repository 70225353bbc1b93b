"""All errors that vflsec raises on purpose, with the exit code of the command line.

VflsecError                 2   base class: one line that states what was expected, what was found, and the way out
├── UsageError              2   a setting, a name or an argument is wrong
├── DataError               2   a user's file is wrong; the line names file, column and row
├── MisfitError             2   what is audited does not belong to the data
├── InsufficientView        2   an attack needs something that its adversary does not see
├── StoreError              2   a results folder cannot be read or is in use
├── BadGuess                2   a guess of an attack cannot be scored (a status of its result)
├── PeerRefused             2   the other party, or one of its messages, is not as agreed
├── PeerLost                3   the connection to the other party is lost; finished work is kept
├── ProtocolError           3   another party sent a message that the protocol does not allow
└── Diverged                3   training produced a non-finite loss (a status, never a number)
"""

import re
from typing import ClassVar

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""Characters that control a terminal, change the direction of a text, or cannot be in XML."""

TRACEBACK = "VFLSEC_TRACEBACK"
"""The environment variable under which failures of single results print where they came from."""


class VflsecError(Exception):
    """Base of all deliberate errors; its text is one line with the way out."""

    exit_code: ClassVar[int] = 2


class UsageError(VflsecError):
    """A setting, a name or an argument is wrong."""


class DataError(VflsecError):
    """A data file or table is wrong."""


class MisfitError(VflsecError):
    """What is audited does not belong to the data."""


class InsufficientView(VflsecError):
    """An attack needs something that its adversary's view lacks."""


class BadGuess(VflsecError):
    """A guess has the wrong shape, or is not finite."""


class StoreError(VflsecError):
    """A results folder cannot be read or is in use."""


class PeerRefused(VflsecError):
    """The other party, or one of its messages, is not as agreed."""


class PeerLost(VflsecError):
    """The connection to the other party is lost."""

    exit_code = 3


class ProtocolError(VflsecError):
    """Another party sent a message that the protocol does not allow; it was not used."""

    exit_code = 3


class Diverged(VflsecError):
    """Training produced a non-finite loss or output."""

    exit_code = 3


class NotStackable(Exception):
    """An operation cannot act on several runs at once; the message says why."""


def clean(text: str) -> str:
    """Return ``text`` with a question mark in place of each character that would control a terminal."""
    return CONTROL.sub("?", text)
