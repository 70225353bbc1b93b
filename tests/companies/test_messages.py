"""The handshake: the same job, rows and run, or a line that names both values; and a batch counts exactly once."""

import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vflsec.base.errors import PeerRefused
from vflsec.companies.job import JobFile, JobTraining
from vflsec.companies.messages import Hello, agree

RUN, OTHER = "0" * 32, "1" * 32
JOB = JobFile(name="x")


def digest(*history):
    return hashlib.sha256(repr(history).encode()).hexdigest()


def hello(role, kept=(0,), *, run=RUN, job=JOB, rows="rows", **more):
    history = {k: digest(k) for k in kept}
    counts = {"train": 70, "test": 30}
    return Hello(
        role=role, settings=job.settings, rows=digest(rows), run=run, **{"history": history, "counts": counts, **more}
    )


@pytest.mark.parametrize(
    ("here", "there", "start"),
    [
        ((0,), (0,), 0),
        ((0, 1), (0, 1), 1),
        ((6, 7), (6, 7), 7),
        ((6, 7), (7, 8), 7),  # p has kept a batch whose last message C has not got
        ((0,), (0, 1), 0),
    ],
)
def test_both_go_on_after_the_last_batch_that_both_have(here, there, start):
    assert agree(hello("passive", here), hello("active", there)) == start
    assert agree(hello("active", there), hello("passive", here)) == start


def test_a_new_p_joins_a_run_without_batches():
    assert agree(hello("passive"), hello("active", run="")) == 0
    assert agree(hello("active", run=OTHER), hello("passive")) == 0


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"role": "passive"}, "passive on both sides"),
        ({"job": JobFile(name="x", seed=1)}, "seed = 0 here and 1 there"),
        ({"job": JobFile(name="x", train=JobTraining(lr=0.5))}, "train.lr = 0.1 here and 0.5 there"),
        ({"counts": {"train": 70, "test": 31}}, "30 test here.*31 test there"),
        ({"rows": "others"}, "other ids"),
        ({"run": OTHER, "kept": (4, 5)}, "00000000 after 5.*11111111 after 5"),
        ({"run": "", "kept": (0,)}, "and none after 0 batches there"),
        ({"kept": (0, 1)}, "got 5 batches here and 1 there"),
        ({"kept": (8, 9)}, "got 5 batches here and 9 there"),
        ({"history": {4: digest(4), 5: digest("of other messages")}}, "expected one history of 5 batches"),
    ],
)
def test_another_peer_is_refused_and_both_values_are_named(theirs, said):
    theirs = {"role": "active", "kept": (4, 5), **theirs}
    with pytest.raises(PeerRefused, match=said) as error:
        agree(hello("passive", (4, 5)), hello(**theirs))
    assert "\n" not in str(error.value)
    with pytest.raises(PeerRefused):
        agree(hello(**theirs), hello("passive", (4, 5)))


@given(st.lists(st.sampled_from(["kill C", "kill p", "cut", "C commits", "p commits"]), max_size=60))
def test_wherever_either_side_is_killed_both_go_on_from_one_state(events):
    """A model of the exchange: each side's disk and memory hold what was done, as a list of attempts."""
    disks = {"passive": [()], "active": [()]}  # histories kept, the newest last
    attempt = 0
    current, waiting = (), None

    def greet():
        nonlocal current, waiting
        ours, theirs = (
            hello(role, run=RUN, history={len(h): digest(h) for h in disks[role]}, kept=())
            for role in ("passive", "active")
        )
        step = agree(ours, theirs)
        assert max(len(h) for h in disks["passive"]) - step in (0,), "C never goes back"
        for role, kept in disks.items():
            disks[role] = [h for h in kept if len(h) <= step]
            assert len(disks[role][-1]) == step
        assert disks["passive"][-1] == disks["active"][-1], "one history"
        current, waiting = disks["passive"][-1], None

    greet()
    for event in events:
        if event == "p commits" and waiting is None:
            attempt += 1
            waiting = (*current, attempt)
            disks["active"] = [*disks["active"], waiting][-2:]
        elif event == "C commits" and waiting is not None:
            disks["passive"] = [*disks["passive"], waiting][-2:]
            current, waiting = waiting, None
        elif event.startswith(("kill", "cut")):
            greet()
    greet()
    assert len(set(disks["passive"][-1])) == len(disks["passive"][-1]), "each attempt counts once"


@pytest.mark.parametrize(
    "change",
    [
        {"run": "x" * 32},
        {"rows": "short"},
        {"history": {}},
        {"history": {-1: "0" * 64}},
        {"counts": {"train": 2**50}},
        {"role": "q"},
        {"settings": {str(i): "" for i in range(300)}},
        {"more": 1},
    ],
)
def test_a_greeting_out_of_range_is_refused(change):
    whole = msgspec.to_builtins(hello("passive"), builtin_types=(bytes,))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=Hello) == hello("passive")
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({**whole, **change}), type=Hello)
