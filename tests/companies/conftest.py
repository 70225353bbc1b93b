"""Two identities that know each other, and a third that nobody knows."""

import sys
from pathlib import Path

import pytest

from vflsec.companies import identity

sys.path.append(str(Path(__file__).parent))  # remote_pair, which processes that tests start import as well


@pytest.fixture(scope="session")
def keys(tmp_path_factory):
    """A folder with the identities C and p."""
    folder = tmp_path_factory.mktemp("keys")
    identity.make_pair(folder)
    return folder


@pytest.fixture(scope="session")
def stranger(tmp_path_factory, keys):
    """A folder with identities C and p of another pair, who would like to talk to the first."""
    folder = tmp_path_factory.mktemp("stranger")
    identity.make_pair(folder)
    for role, other in ("passive", "active"), ("active", "passive"):
        (folder / role / identity.PEER).write_bytes((keys / other / identity.CERTIFICATE).read_bytes())
    return folder
