"""Streams are named, stable and independent."""

import subprocess
import sys

import pytest
import torch

from vflsec.base.seeds import derive, make_rng


def test_a_stream_is_the_same_everywhere():
    assert derive(0, "model", "active") == 9062400593956721693


def test_another_process_with_another_hash_salt_agrees():
    code = "from vflsec.base.seeds import derive; print(derive(7, 'noise', 3))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "123"}, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == derive(7, "noise", 3)


@pytest.mark.parametrize("names", [(1, "a"), (0, "b"), (0, "a", "a"), (0,)])
def test_another_name_is_another_stream(names):
    assert derive(*names) != derive(0, "a")
    assert 0 <= derive(*names) < 2**63


def test_generators_start_afresh():
    first, again = (torch.rand(4, generator=make_rng(0, "x")) for _ in range(2))
    assert torch.equal(first, again)
