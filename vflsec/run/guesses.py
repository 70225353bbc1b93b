"""Guesses on single rows, kept only if asked for: a table of rows for their owner, and leaks by subgroup.

They are in ``DIR/guesses/<key>.safetensors``, which only its owner may read: scores (n, C) by split, NaN for rows that
are not scored.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import safetensors.numpy
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from vflsec.base import files
from vflsec.base.checks import count, describe_unknown
from vflsec.base.errors import StoreError, UsageError, clean
from vflsec.base.seeds import derive
from vflsec.data.dataset import VerticalDataset
from vflsec.results import statistics
from vflsec.results.metrics import Labels, Scores, calibrate, list_metrics
from vflsec.results.records.folder import read_records
from vflsec.results.records.manifest import Subgroup, Subgroups
from vflsec.results.records.schema import Record
from vflsec.results.statistics import MIN_CLASS_ROWS, Scored, differ, find_leaks
from vflsec.run.federation import get_partition
from vflsec.run.plan import Trial, find_dataset, list_trials
from vflsec.run.questions import is_about_source
from vflsec.run.score import draw_first_half
from vflsec.run.spec import EvalSpec
from vflsec.run.store import guard_writing

Place = tuple[str, str, float, str]
"""Method, defense, strength and attack."""

QUARTILES = 4
MISSING = "(missing)"


class _Guessed(NamedTuple):
    key: str
    seed: int
    ids: NDArray[np.generic]
    scores: Scores
    labels: Labels


def is_kept(row: Trial) -> bool:
    """Whether the guesses of a result are kept: those on the labels of the active party."""
    if row.attack is None or row.control:
        return False
    attack, method = row.attack.make(), row.cell.method.kind
    return attack.target == "labels" and not is_about_source(attack, row.attack.spec.after, method, row.adversary)


def get_path(folder: Path, key: str) -> Path:
    """Return the file with the guesses of a result."""
    return folder / "guesses" / f"{key}.safetensors"


def list_lacking(wanted: Iterable[Trial], done: Mapping[str, Record], folder: Path) -> list[Trial]:
    """Return the results with numbers whose guesses should be kept and are not."""
    return [
        row
        for row in wanted
        if row.key in done and done[row.key].leak and is_kept(row) and not get_path(folder, row.key).exists()
    ]


def keep(folder: Path, key: str, scores: Mapping[str, torch.Tensor]) -> None:
    """Write the scores (n, C) of each split, NaN for rows that are not scored."""
    path = get_path(folder, key)
    with guard_writing(folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, safetensors.numpy.save({split: s.float().numpy() for split, s in scores.items()}))


COLUMNS = ("id", "label", "method", "defense", "strength", "attack", "seeds", "probability", "highest")
"""Of a table of rows."""


def tabulate_rows(spec: EvalSpec, folder: Path) -> pd.DataFrame:
    """Return, for each attack on labels and each row that it guesses, the probability that it gives to the true label.

    The probability is calibrated, see ``vflsec.results.metrics``. It is over the ``seeds`` in which the row was a
    training row: the mean in ``probability``, the largest in ``highest``.
    """
    parts = []
    for place, seeds in _read_guesses(spec, folder, "train").items():
        for guessed in seeds:
            first = draw_first_half(torch.from_numpy(guessed.labels), derive(guessed.seed, "bootstrap"))
            of_truth = calibrate(guessed.scores, guessed.labels, first)[np.arange(len(guessed.labels)), guessed.labels]
            names = dict(zip(("method", "defense", "strength", "attack"), place, strict=True))
            parts.append(pd.DataFrame({"id": guessed.ids, "label": guessed.labels, **names, "probability": of_truth}))
    if not parts:
        raise UsageError("expected an attack that guesses the labels of training rows with --rows, got none: add one")
    by_row = pd.concat(parts).groupby(list(COLUMNS[:6]), sort=False)
    table = by_row["probability"].agg(seeds="count", probability="mean", highest="max").reset_index()
    classes = find_dataset(spec.dataset).load_once(spec.data).classes
    return table.assign(label=[classes[label] for label in table["label"]]).sort_values(
        "probability", ascending=False, kind="stable", ignore_index=True
    )


def measure_subgroups(spec: EvalSpec, folder: Path, column: str) -> list[Subgroups]:
    """Return what each attack on labels leaks of each group of rows, and whether the groups differ."""
    groups = get_groups(find_dataset(spec.dataset).load_once(spec.data), column)
    by_results: dict[tuple[str, ...], Subgroups] = {}
    for split in ("test", "train"):  # as the leak is reported
        for seeds in _read_guesses(spec, folder, split).values():
            keys = tuple(guessed.key for guessed in seeds)  # several defenses share the undefended row
            if keys not in by_results:
                by_results[keys] = _score_groups(column, split, seeds, groups)
    return list(by_results.values())


def get_groups(dataset: VerticalDataset, column: str) -> pd.Series:
    """Return the group of each row by id, in their order: its category, or the quartile of its number."""
    holder = next((table for table in dataset.parties if column in table.frame.columns), None)
    if holder is None:
        names = [str(name) for table in dataset.parties for name in table.frame.columns]
        raise UsageError(describe_unknown("column", column, names))
    values = holder.frame[column]
    if column in holder.categorical:
        groups = values.astype(str).astype("category").cat.rename_categories(clean)
    else:
        cut = pd.qcut(values, QUARTILES, duplicates="drop")
        groups = cut.cat.rename_categories(lambda interval: f"{interval.left:.6g} to {interval.right:.6g}")
    return groups.cat.add_categories(MISSING).fillna(MISSING) if groups.isna().any() else groups


def _read_guesses(spec: EvalSpec, folder: Path, split: str) -> dict[Place, list[_Guessed]]:
    """Return the scored rows of each attack that guesses ``split``, by seed."""
    by_place: dict[Place, list[_Guessed]] = {}
    lost = list_lacking(list_trials(spec), read_records(folder), folder)
    if lost:
        raise StoreError(
            f"expected kept guesses in {folder / 'guesses'}, found none of {count(len(lost), 'result')}: run on one "
            f"machine, or let all workers share this folder"
        )
    for row in list_trials(spec):
        if is_kept(row) and (scores := _read(get_path(folder, row.key)).get(split)) is not None:
            data, kept = get_partition(row.cell), ~np.isnan(scores).any(axis=1)
            guessed = _Guessed(row.key, row.seed, data.ids[split][kept], scores[kept], data.labels[split][kept])
            by_place.setdefault((row.method, row.defense, row.strength, row.label), []).append(guessed)
    return by_place


def _read(path: Path) -> dict[str, NDArray[np.floating]]:
    """Return the kept scores by split; none of a result that has no number."""
    try:
        return safetensors.numpy.load(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, SafetensorError) as error:
        raise StoreError(f"cannot read {path}: {error}; remove it and run the same vflsec eval again") from None


def _score_groups(column: str, split: str, seeds: list[_Guessed], groups: pd.Series) -> Subgroups:
    people = pd.Index(np.unique(np.concatenate([guessed.ids for guessed in seeds])))
    of_people = groups.loc[people].cat.remove_unused_categories()
    code, names = of_people.cat.codes.to_numpy().astype(int), of_people.cat.categories
    scored = [Scored(people.get_indexer(pd.Index(guessed.ids)), guessed.scores, guessed.labels) for guessed in seeds]
    n_classes = seeds[0].scores.shape[1]
    counts = np.array(
        [
            np.bincount(code[guessed.person] * n_classes + guessed.labels, minlength=len(names) * n_classes)
            for guessed in scored
        ]
    ).reshape(len(seeds), len(names), n_classes)
    large = counts.min(axis=(0, 2) if n_classes == 2 else 0).reshape(len(names), -1).sum(axis=1) >= MIN_CLASS_ROWS
    tested = np.where(large[code], code, -1)
    by_seed = np.array([find_leaks(guessed, tested, len(names)) for guessed in scored])
    metric = list_metrics(n_classes)[0]
    rng = np.random.default_rng(derive(0, "subgroups", column, seeds[0].key))
    return Subgroups(
        column=clean(column), keys=[guessed.key for guessed in seeds], rows=split, metric=metric,
        p=differ(scored, tested, len(names), rng) if large.sum() > 1 else None,
        groups=[
            Subgroup(
                group=str(name),
                n=round(counts[:, g].sum(axis=1).mean()),
                by_seed=dict(zip((s.seed for s in seeds), by_seed[:, g].tolist(), strict=True)) if is_large else {},
                ci95_rows=_bound(metric, scored[0], tested == g, rng) if is_large else (None, None),
            )
            for g, (name, is_large) in enumerate(zip(names, large, strict=True))
        ],
    )  # fmt: skip


def _bound(metric: str, scored: Scored, member: NDArray[np.bool_], rng: np.random.Generator) -> tuple[float, float]:
    rows = member[scored.person]
    return statistics.bound_over_rows(metric, scored.scores[rows], scored.labels[rows], rng)
