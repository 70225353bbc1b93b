"""The manifest of an evaluation or audit: what a report must know of it beside its records."""

import inspect
import math
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vflsec.base.errors import clean
from vflsec.base.layout import Layout
from vflsec.core.defense import Defense
from vflsec.data.encode import densify
from vflsec.data.partition import Partition, PartyData
from vflsec.results.records.manifest import AttackEntry, BaselineEntry, Manifest, Provenance, RowEntry
from vflsec.results.records.schema import MAX_TEXT
from vflsec.run import plan
from vflsec.run.cell import Technique
from vflsec.run.federation import get_partition
from vflsec.run.mounting import is_baseline
from vflsec.run.plan import Baseline, Names, Trial
from vflsec.run.spec import EvalSpec
from vflsec.run.store import get_environment


def build_manifest(spec: EvalSpec, command: Sequence[str] = (), names: Names | None = None) -> Manifest:
    """Return the manifest of ``spec``, which has passed its checks."""
    data = get_partition(plan.build_cell(spec, spec.methods[0], 0))
    methods = [plan.resolve(spec.get_method(label)) for label in spec.methods]
    defenses = [plan.resolve(defense) for defense in (*spec.defenses, *spec.fixed)]
    attacks = [plan.resolve(attack) for attack in spec.attacks]
    return Manifest(
        dataset=spec.dataset,
        adversary=spec.adversary,
        seeds=spec.seeds,
        target=spec.train.target,
        selected_on_test=spec.train.select == "paper_best_on_test",
        attacks=[describe_attack(a, b, spec.adversary, data) for a, b in zip(attacks, spec.labels, strict=True)],
        rows=list_rows(plan.list_trials(spec)),
        baselines=list_baselines(plan.list_baselines(spec)),
        settings=msgspec.to_builtins(spec),
        provenance=describe_provenance(
            {"methods": methods, "defenses": defenses, "attacks": attacks},
            {spec.dataset: plan.find_dataset(spec.dataset).key(spec.data)},
            command,
        ),
        title=names.dataset if names else "",
        names=dict(names.parties) if names else {},
        techniques=_find_declared_names(methods) | _find_declared_names(defenses),
        **describe_data(data),
    )


def describe_data(data: Partition) -> dict[str, Any]:
    """Return what a report must know of the data, and what each registered attack recovers of them."""
    card = msgspec.to_builtins(data.card) if data.card else {}
    return {
        "used": data.used,
        "data_notes": list(data.warnings),
        "columns": {name: _name_columns(party.layout) for name, party in data.parties.items()},
        "classes": list(data.classes),
        "card": {name: card[name] for name in ("title", "source", "license", "label") if card.get(name)},
        "questions": {attack.name: attack.kind.target for attack in plan.list_attacks()},
    }


def _name_columns(layout: Layout) -> list[str]:
    """Return the names of the raw columns; a text, which has a column for each position, is one."""
    is_text = bool(layout.vocabulary)
    return [f"text of up to {len(layout.columns)} words"] if is_text else [column.name for column in layout.columns]


def describe_attack(attack: Technique, label: str, adversary: str, data: Partition) -> AttackEntry:
    """Return what a report must know of an attack of ``adversary``, with what it recovers as far as that is known."""
    entry = AttackEntry(label=label, name=attack.name, target=plan.get_question(attack), baseline=is_baseline(attack))
    if not attack.has_option("victim"):
        return entry
    others = [name for name in data.parties if name not in adversary.split("+")]
    victim = attack.spec.options.get("victim") or next(iter(others), "")
    column = attack.spec.options.get("column") or ""
    above = _get_median(data.parties[victim], column) if column and victim in data.parties else None
    return msgspec.structs.replace(entry, victim=victim, column=column, above=above)


def _get_median(party: PartyData, name: str) -> float | None:
    """Return the median that splits a number, in its own units; None for a category."""
    learned = party.encoder.get(name, {})
    place = next((column.start for column in party.layout.columns if column.name == name), None)
    if place is None or not learned.get("inverse"):
        return None
    values = np.sort(densify(party.features["train"][:, place : place + 1]).ravel().astype(float))
    median = learned["mean"] + values[(len(values) - 1) // 2] / learned["inverse"]
    if learned.get("signed_log"):
        return float(f"{np.sign(median) * np.expm1(abs(median)):.6g}")
    return float(round(median, 6 + math.floor(math.log10(learned["inverse"])))) + 0.0  # features have seven digits


def _find_declared_names(techniques: Iterable[Technique]) -> dict[str, str]:
    """Return the declared name of each class from a file, unless another one has it."""
    names = {technique.name: technique.kind.name for technique in techniques}
    times = Counter(names.values())
    return {name: declared for name, declared in names.items() if ".py:" in name and times[declared] == 1}


def list_rows(trials: Iterable[Trial]) -> list[RowEntry]:
    """Return what a report must know of the results with the federation."""
    return [
        RowEntry(method=row.method, defense=row.defense, strength=row.strength, seed=row.seed, attack=row.label,
                 key=row.key, control=row.control)
        for row in trials
    ]  # fmt: skip


def list_baselines(baselines: Iterable[Baseline]) -> list[BaselineEntry]:
    """Return what a report must know of the results without the federation."""
    return [
        BaselineEntry(method=baseline.method, label=baseline.label, target=plan.get_question(baseline.attack),
                      seed=baseline.seed, key=baseline.key)
        for baseline in baselines
    ]  # fmt: skip


def describe_provenance(
    techniques: Mapping[str, Iterable[Technique]], dataset: Mapping[str, Any], command: Sequence[str] = ()
) -> Provenance:
    """Return where the records of an evaluation come from."""
    named = {group: {technique.name: technique for technique in some} for group, some in techniques.items()}
    sources = {group: {name: technique.identity for name, technique in some.items()} for group, some in named.items()}
    return Provenance(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        command=[clean(" ".join(word.split()))[:MAX_TEXT] for word in command],
        versions=get_environment(),
        commit=read_commit(),
        sources={"dataset": dict(dataset), **sources},
        cards={group: {name: _summarize(known.kind) for name, known in some.items()} for group, some in named.items()},
    )


def _summarize(kind: Any) -> str:
    first = (inspect.getdoc(kind) or "").split("\n")[0]
    return f"{first} Guarantee: {kind.guarantee}." if issubclass(kind, Defense) else first


def read_commit() -> str | None:
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
