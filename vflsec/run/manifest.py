"""Makes the manifest of an evaluation, so that its report needs neither plug-ins nor data."""

from __future__ import annotations

import inspect
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from vflsec.core import registry
from vflsec.data.partition import Partition
from vflsec.results.records.manifest import NO_ADVERSARY, AttackEntry, BaselineEntry, Manifest, Provenance, RowEntry
from vflsec.run import plan
from vflsec.run.about import about
from vflsec.run.cell import dataset_identity, training_cell, versioned
from vflsec.run.federation import partition_of
from vflsec.run.naming import Names
from vflsec.run.plan import asked_of, baselines, is_baseline, rows
from vflsec.run.spec import AttackSpec, EvalSpec
from vflsec.run.store import environment


def manifest_of(spec: EvalSpec, command: Sequence[str] = (), names: Names | None = None) -> Manifest:
    """Return the manifest of ``spec``, which has passed its checks.

    Args:
        spec: the evaluation.
        command: the words of the command line.
        names: what the data call themselves and each party; None for the names that vflsec uses.
    """
    data = partition_of(training_cell(spec, spec.methods[0], 0))
    attacks = [
        attack_entry(attack, label, spec.adversary, data)
        for attack, label in zip(spec.attacks, spec.labels, strict=True)
    ]
    return Manifest(
        dataset=spec.dataset,
        adversary=spec.adversary,
        seeds=spec.seeds,
        target=spec.train.target,
        selected_on_test=spec.train.select == "paper_best_on_test",
        attacks=attacks,
        rows=[_row(row) for row in rows(spec)],
        baselines=[_baseline(baseline) for baseline in baselines(spec)],
        settings=msgspec.to_builtins(spec),
        provenance=provenance(
            {
                "methods": [spec.method_of(label).name for label in spec.methods],
                "defenses": [defense.name for defense in (*spec.defenses, *spec.fixed)],
                "attacks": [attack.name for attack in spec.attacks],
            },
            {spec.dataset: dataset_identity(spec.dataset, spec.data)},
            command,
        ),
        title=names.dataset if names else "",
        names=dict(names.parties) if names else {},
        techniques=_declared(spec),
        used=data.used,
        data_notes=list(data.warnings),
    )


def attack_entry(attack: AttackSpec, label: str, adversary: str, data: Partition) -> AttackEntry:
    """Return what a report must know of an attack of ``adversary``."""
    details, baseline = about(attack, adversary, data), is_baseline(attack.name)
    return AttackEntry(label=label, name=attack.name, target=asked_of(attack), baseline=baseline, **details)


def _declared(spec: EvalSpec) -> dict[str, str]:
    """Return the declared name of each method and defense from a file, unless another one of ``spec`` has it."""
    found: dict[str, str] = {}
    for kind, specs in (
        ("methods", [spec.method_of(label) for label in spec.methods]),
        ("defenses", [*spec.defenses, *spec.fixed]),
    ):
        names = {one.name: registry.load(kind, one.name).name for one in specs}
        told = Counter(names.values())
        found |= {name: own for name, own in names.items() if registry.is_file(name) and told[own] == 1}
    return found


def _row(row: plan.Row) -> RowEntry:
    attack = row.label if row.attack else NO_ADVERSARY
    return RowEntry(
        method=row.method,
        defense=row.defense,
        strength=row.strength,
        seed=row.seed,
        attack=attack,
        key=row.key,
        control=row.control,
    )


def _baseline(baseline: plan.Baseline) -> BaselineEntry:
    target = asked_of(baseline.attack)
    return BaselineEntry(
        method=baseline.method, label=baseline.label, target=target, seed=baseline.seed, key=baseline.key
    )


def provenance(
    named: Mapping[str, Iterable[str]], dataset: Mapping[str, Any], command: Sequence[str] = ()
) -> Provenance:
    """Return where the records of an evaluation come from.

    Args:
        named: the names of methods, defenses and attacks, by kind.
        dataset: the identity of the dataset by its name.
        command: the words of the command line.
    """
    names = {kind: list(dict.fromkeys(given)) for kind, given in named.items()}
    sources = {kind: {name: versioned(kind, name) for name in given} for kind, given in names.items()}
    return Provenance(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        command=list(command),
        versions=environment(),
        commit=commit(),
        sources={"dataset": dict(dataset), **sources},
        cards={kind: {name: _sentence(kind, name) for name in given} for kind, given in names.items()},
    )


def _sentence(kind: str, name: str) -> str:
    """Return the first sentence of a card, and for a defense what it guarantees."""
    found = registry.load(kind, name)
    first = (inspect.getdoc(found) or "").split("\n")[0]
    return f"{first} Guarantee: {found.guarantee}." if kind == "defenses" else first


def commit() -> str | None:
    """Return the commit of the source tree of this package; None if it is installed from elsewhere."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        shown = subprocess.run(  # noqa: S603  (nothing of it comes from a file)
            ["git", "-C", str(root), "rev-parse", "HEAD"],  # noqa: S607  (git is looked up on the path)
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return shown.stdout.strip()
