"""Shadow federations: trained as a cell is, on other halves of the candidates, for attacks on membership.

What they say of the candidates is stored beside the cell, a batch in ``cells/<key>/shadows.safetensors``, so that an
interrupted run resumes and other attacks on the cell use the same shadows. The models are not kept.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vflsec.base.errors import Diverged
from vflsec.core.view import Shadows
from vflsec.run.candidates import MEMBER, Candidates, asked
from vflsec.run.cell import Cell, digest
from vflsec.run.facts import StageFacts
from vflsec.run.federation import partition_of
from vflsec.run.store import Store
from vflsec.run.training import trained_in_turn

VERSION = 1
"""Raised whenever shadows of the same cell become others."""

BATCH = 16
"""Shadows that are trained, and stored, together."""


def batches(count: int) -> list[range]:
    """Return the numbers of the first ``count`` shadows in batches."""
    return [range(first, min(first + BATCH, count)) for first in range(0, count, BATCH)]


def batch_key(cell: Cell, batch: range) -> str:
    """Return the key of a batch of shadows of ``cell``."""
    return digest(["shadows", VERSION, cell.key, batch.start, batch.stop])


def shadows_of(cell: Cell, count: int, device: str, store: Store | None = None) -> Shadows:
    """Return what the first ``count`` shadows of ``cell`` say of its candidates; those that diverged are left out.

    Args:
        cell: of the attacked federation.
        count: of shadows, an even number.
        device: on which they are trained, and which their logits are on.
        store: of shadows that were trained before; those that are not there are trained now.

    Raises:
        Diverged: all have.
    """
    parts = [train_shadows(cell, batch, device, store) for batch in batches(count)]
    logits, members = (torch.cat(own).to(device) for own in zip(*parts, strict=True))
    finite = logits.isfinite().all(dim=(1, 2))
    if not finite.any():
        raise Diverged(f"all {count} shadow federations diverged: choose other settings, or leave the attack out")
    return Shadows(logits[finite], members[finite])


def seconds_of(cell: Cell, count: int, store: Store) -> float:
    """Return how long the first ``count`` shadows of ``cell``, which are stored, were trained."""
    found = (store.cell(batch_key(cell, batch)).read() for batch in batches(count))
    return sum(facts.seconds for facts in found if facts)


def train_shadows(cell: Cell, batch: range, device: str, store: Store | None = None) -> Shadows:
    """Return what the shadows with numbers ``batch`` say; they are trained and stored unless they are there."""
    folder = store.cell(batch_key(cell, batch)) if store else None
    if folder is None or not folder.read():
        began, shadows = time.perf_counter(), _trained(cell, batch, device)
        if folder is None:
            return shadows
        facts = StageFacts(stage=f"shadows {batch.start + 1} to {batch.stop}", seconds=time.perf_counter() - began)
        folder.write(facts, lambda path: _save(shadows, path))
    stored = load_file(folder.path / "shadows.safetensors")
    return Shadows(stored["logits"], stored["members"])


def _trained(cell: Cell, batch: range, device: str) -> Shadows:
    data = partition_of(cell)
    rows = {split: len(data.ids[split]) for split in MEMBER}
    target = Candidates.draw(cell.seed, rows["train"], rows["test"])
    is_member = {split: torch.full((rows[split],), bool(member)) for split, member in MEMBER.items()}
    logits: list[Tensor] = []
    members: list[Tensor] = []
    cells = [msgspec.structs.replace(cell, shadow=number) for number in batch]
    for number, trained in zip(batch, trained_in_turn(cells, device), strict=True):
        candidates = target.dealt(number)
        members.append(candidates.of(is_member))
        logits.append(
            candidates.of(asked(trained)).float().cpu()
            if trained
            else torch.full((len(members[-1]), len(data.classes)), torch.nan)
        )
    return Shadows(torch.stack(logits), torch.stack(members))


def _save(shadows: Shadows, folder: Path) -> None:
    folder.mkdir(parents=True)
    save_file(shadows._asdict(), folder / "shadows.safetensors")
