"""Two sides of a small job, in two threads over real TLS, and masks that can be drawn again."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch._dynamo  # which every first optimizer would import, for seconds

from vflsec.base.layout import Layout
from vflsec.cipher.arithmetic.layout import CipherSpec
from vflsec.companies.identity import Identity
from vflsec.companies.job import JobFile, JobModel, JobTraining
from vflsec.companies.link import Dialer, Listener
from vflsec.companies.party_rows import PartyRows, split
from vflsec.companies.session import Session, make_side
from vflsec.companies.snapshots import Snapshots
from vflsec.methods.checkpoint import select_entries

HERE = "127.0.0.1"
CIPHER = CipherSpec(bits=1024)
SEEDS = {"passive": 11, "active": 12}


def make_job(*, rows=40, encoder="mlp", outputs=1, model=None, paillier=CIPHER, sealed=None, **train):
    shape = {"hidden": (5,), "width": 3} if encoder != "identity" else {}
    return JobFile(
        name=f"{rows} rows",
        model=JobModel(encoder=encoder, outputs=outputs, **{**shape, **(model or {})}),
        train=JobTraining(**{"epochs": 2, "batch": 16, "lr": 0.2, **train}),
        paillier=CipherSpec() if sealed else paillier,
        sealed=sealed,
    )


def owns(job, rows=40, classes=2):
    """What C and p bring: labels depend on the columns of both."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 6)).astype(np.float32)
    scores = x @ rng.normal(size=(6, classes)) + 0.1 * rng.normal(size=(rows, classes))
    y = scores.argmax(axis=1)
    ids = split(pd.Index([f"{i:03}" for i in range(rows)]), job)
    positions = {name: found.astype(int).to_numpy() for name, found in ids.items()}
    names = tuple(f"class {c}" for c in range(classes))
    return {
        "passive": PartyRows({s: x[at, :4].copy() for s, at in positions.items()}, Layout.numeric(4), ids),
        "active": PartyRows(
            {s: x[at, 4:].copy() for s, at in positions.items()},
            Layout.numeric(2),
            ids,
            {s: y[at] for s, at in positions.items()},
            names,
        ),
    }


class Masks:
    """Masks of one role that depend on the batch alone, so that a batch done again has the same."""

    def __init__(self, role):
        self.role = role
        self.begin(-1)

    def begin(self, step):
        self.rng = random.Random(f"{self.role} {step}")  # noqa: S311

    def __call__(self, bits):
        return self.rng.getrandbits(bits)


def session(role, job, own, folder, link, masks=None, **options):
    """A session of ``role``, with the key and the state that ``folder`` keeps."""
    snapshots = Snapshots(folder)
    more = {"batches": 1, **({"randbits": masks} if masks else {})}
    begin = {"begin": masks.begin} if masks else {}
    try:
        side = make_side(role, own, job, snapshots, seed=SEEDS[role], **more)
        return Session(side, link, snapshots, **{"timeout": 10, "patience": 20, **begin, **options})
    except BaseException:
        snapshots.close()
        raise


def run_both(keys, job, own, folder, *, masks=False, each=None, **options):
    """Run both sides to their ends, with the options of both and of ``each``; return sessions, results and errors."""
    found, errors, made = {}, {}, {}
    with Listener((HERE, 0), Identity(keys / "passive"), 5) as listener:
        links = {"passive": listener, "active": Dialer((HERE, listener.port), Identity(keys / "active"), 5)}
        for role in ("passive", "active"):
            drawn = Masks(role) if masks else None
            own_options = {**options, **(each or {}).get(role, {})}
            made[role] = session(role, job, own[role], folder / role, links[role], drawn, **own_options)

        def one(role):
            try:
                found[role] = made[role].finish()
            except BaseException as error:  # noqa: BLE001  (told to the test)
                errors[role] = error
            finally:
                made[role].snapshots.close()

        threads = [threading.Thread(target=one, args=(role,)) for role in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return made, found, errors


def work(role, keys, job, own, folder, port, pause, repeats=10):
    """A process of one role, to be killed; C listens on ``port``, p dials it. A batch starts after a ``pause``."""
    torch.set_num_threads(1)
    identity, masks = Identity(keys / role), Masks(role)

    def begin(step):
        time.sleep(pause)
        masks.begin(step)

    link = Listener((HERE, port), identity, 2) if role == "passive" else Dialer((HERE, port), identity, 2)
    with link:
        made = session(role, job, own, folder, link, masks, timeout=1.5, patience=60, begin=begin, repeats=repeats)
        made.finish()


def shares(state):
    """Return a role's share of the weights (g, C) from its state, integers in units of 2^-64; both add up to W."""
    saved = state["share"]
    found = [int.from_bytes(entry.tobytes(), "little", signed=True) for entry in saved.reshape(-1, saved.shape[-1])]
    return np.array(found, object).reshape(saved.shape[:-1])


def weights(models):
    """The weights over C's embedding (g, C), from what both parties take home."""
    total = sum(shares(select_entries("share", models[role])) for role in ("passive", "active"))
    return (total / 2**64).astype(float)


def killed_at_a_state(kills, folder, *given):
    """A process of C that is killed in the middle of writing a state, soon, as long as there are ``kills`` to do."""
    whole, writes = os.fsync, iter([True] * random.randrange(2))  # noqa: S311

    def fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.name.startswith(".writing-state-") and kills.value and not next(writes, False):
            with kills.get_lock():
                kills.value -= 1
            os.ftruncate(descriptor, random.randrange(path.stat().st_size))  # noqa: S311
            os.kill(os.getpid(), signal.SIGKILL)
        whole(descriptor)

    os.fsync = fsync
    work("passive", *given[:3], folder, *given[3:])


def train_calmly(keys, job, own, folder):
    """Return the models of an undisturbed run with masks and noise that can be drawn again, by role."""
    made, _, errors = run_both(keys, job, own, folder, masks=True)
    assert not errors
    return {role: side.side.models() for role, side in made.items()}


def assert_same(made, calm):
    for role, expected in calm.items():
        models = made[role].side.models()
        assert all((models[key] == value).all() for key, value in expected.items()), role
