"""The impact of an attack on integrity: the utility under attack, and the success of a trigger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from vflsec.base.seeds import derive
from vflsec.core.attack import IntegrityAttack
from vflsec.core.federation import Federation
from vflsec.core.method import Trained
from vflsec.results.records.schema import Block, Impact, Triggered
from vflsec.results.statistics import over_rows


def impact(trained: Trained, malicious: Mapping[str, IntegrityAttack], utility: Block) -> Impact:
    """Return the impact on a federation under attack, or on the honest one that it is compared with.

    Args:
        trained: the federation.
        malicious: the attacks whose trigger is tried, by party.
        utility: of ``trained`` on test rows without a trigger; malicious parties act in its predictions.

    Raises:
        Diverged: a prediction is not finite.
    """
    aim = next((attack.aim for attack in malicious.values()), None)  # colluding parties share one
    return Impact(utility=utility, success=None if aim is None else success(trained, malicious, aim))


def success(trained: Trained, malicious: Mapping[str, IntegrityAttack], aim: int) -> Triggered:
    """Return the share of test rows of other classes that are predicted as class ``aim`` with the trigger."""
    federation = trained.federation
    with federation.without_recording(), triggered(federation, malicious, "test"):
        logits = trained.predict("test")
    others = (federation.active.labels["test"] != aim).cpu()
    z = logits.cpu()[others].numpy()
    aims = np.full(len(z), aim)
    rng = np.random.default_rng(derive(federation.seed, "bootstrap"))
    share = float((z.argmax(axis=1) == aims).mean())
    return Triggered(share=share, ci95_rows=over_rows("accuracy", z, aims, rng), n=len(z))


@contextmanager
def triggered(federation: Federation, malicious: Mapping[str, IntegrityAttack], split: str) -> Iterator[None]:
    """Add the trigger to the columns of malicious parties in ``split`` for this context."""
    before = {name: federation.parties[name].features for name in malicious}
    for name, attack in malicious.items():
        with torch.no_grad():
            federation.parties[name].features = {**before[name], split: attack.trigger(before[name][split].clone())}
    try:
        yield
    finally:
        for name, features in before.items():
            federation.parties[name].features = features
