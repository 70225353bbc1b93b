"""What sabotage does to a trained federation: the utility that is left, and where a trigger leads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from vflsec.core.federation import World
from vflsec.core.method import Trained
from vflsec.core.sabotage import Sabotage
from vflsec.core.seeds import derive
from vflsec.core.statistics import over_rows
from vflsec.records.schema import Block, Impact, Triggered


def damage(trained: Trained, saboteurs: Mapping[str, Sabotage], utility: Block) -> Impact:
    """Return the block of a record that says what came of sabotage, or of none where ``trained`` is honest.

    Args:
        trained: the federation; whoever acts against its rules at prediction does so in ``utility`` already.
        saboteurs: those whose trigger is tried, by party.
        utility: of ``trained`` on test rows, none of which has a trigger.

    Raises:
        Diverged: a prediction is not finite.
    """
    aim = next((attack.aim for attack in saboteurs.values()), None)  # those who collude have one
    return Impact(utility=utility, success=None if aim is None else success(trained, saboteurs, aim))


def success(trained: Trained, saboteurs: Mapping[str, Sabotage], aim: int) -> Triggered:
    """Return the share of test rows of other classes that are taken for class ``aim`` once they bear the trigger."""
    world = trained.world
    with world.aside(), triggered(world, saboteurs, "test"):
        logits = trained.predict("test")
    others = (world.active.labels["test"] != aim).cpu()
    z = logits.cpu()[others].numpy()
    wanted = np.full(len(z), aim)
    rng = np.random.default_rng(derive(world.seed, "bootstrap"))
    share = float((z.argmax(axis=1) == wanted).mean())
    return Triggered(share=share, ci95_rows=over_rows("accuracy", z, wanted, rng), n=len(z))


@contextmanager
def triggered(world: World, saboteurs: Mapping[str, Sabotage], split: str) -> Iterator[None]:
    """Let the saboteurs' columns of ``split`` bear their trigger for a while."""
    before = {name: world.parties[name].features for name in saboteurs}
    for name, attack in saboteurs.items():
        with torch.no_grad():
            world.parties[name].features = {**before[name], split: attack.trigger(before[name][split].clone())}
    try:
        yield
    finally:
        for name, features in before.items():
            world.parties[name].features = features
