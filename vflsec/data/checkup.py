"""Examines the user's own data before anything is trained: what is in them, what is wrong, and what looks wrong."""

import warnings
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, TargetEncoder
from sklearn.tree import DecisionTreeClassifier

from vflsec.base.checks import count
from vflsec.base.errors import VflsecError
from vflsec.data.dataset import GAPS, PartyTable, VerticalDataset
from vflsec.data.encode import Matrix, densify, join_columns
from vflsec.data.files import Reading, read_all
from vflsec.data.partition import DataSpec, Partition, draw_rows, split_dataset, stack_rows
from vflsec.data.tables import MISSING
from vflsec.results.metrics import METRICS, score_chance

MAX_NAMED_CLASSES = 8
"""So many classes with few rows are named."""

ALMOST = 0.99
"""A column that alone predicts the label better than this is nearly a copy of it."""

MAX_ROWS, MAX_SCORES, FEW = 30_000, 3_000_000, 5
"""Common rows on which columns and models are judged, rows times classes, and rows of each class that are kept."""
MAX_FITTED_ROWS, MAX_FITTED_VALUES = 20_000, 2_000_000
"""Rows, and rows times columns, that the models are fitted to; more hardly change what they show."""
TREES, MAX_ALL_BINS = 60, 255_000
PART = 10_000
"""Test rows that are dense at a time."""


class PartyFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The table of one party.

    Attributes:
        common: rows that all parties hold.
        columns: of the file that are used.
        encoded: columns that its network reads.
        guess: how well its columns alone tell common rows from its others: AUC of a quick model; NaN without others.
    """

    name: str
    role: str
    file: str
    rows: int
    common: int
    columns: int
    encoded: int
    guess: float = float("nan")


class ColumnFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One column as a party holds it.

    Attributes:
        missing: share of the common rows.
        values: number of different values in the common rows.
        encoded: columns that the network reads.
        predicts: how well it predicts the label alone, by folds: AUC, or accuracy for more than two classes.
    """

    party: str
    column: str
    kind: str
    missing: float
    values: int
    encoded: int
    predicts: float


class Checkup(msgspec.Struct, frozen=True, kw_only=True):
    """What ``vflsec data check`` reports.

    Attributes:
        classes: the number of common rows of each class.
        train: the number of labeled training rows of each class, in the split of seed 0.
        utility: of quick models on test rows of one split, by the parties whose columns they read.
        warnings: what can be used, but looks wrong.
        faults: what must be mended first; without the dataset there are no other facts.
    """

    name: str
    metric: str = ""
    parties: list[PartyFacts] = []
    classes: dict[str, int] = {}
    train: dict[str, int] = {}
    columns: list[ColumnFacts] = []
    utility: dict[str, float] = {}
    warnings: list[str] = []
    faults: list[str] = []


def check(path: Path) -> Checkup:
    """Return what is in the data of the TOML file ``path``, and everything that is wrong with them.

    Raises:
        DataError: the TOML file itself is wrong.
    """
    reading = read_all(path)
    if reading.dataset is None:
        return Checkup(name=path.stem, faults=list(reading.faults))
    rows, _ = draw_rows(reading.dataset, DataSpec(), 0)
    try:
        split = split_dataset(_draw_sample(reading.dataset, [rows["train"], rows["test"]]), DataSpec(), 0)
    except VflsecError as error:
        return Checkup(name=reading.dataset.name, warnings=list(reading.dataset.warnings), faults=[str(error)])
    return examine(reading.dataset, rows["train"], rows["test"], split, reading)


def _draw_sample(dataset: VerticalDataset, parts: list[pd.Index]) -> VerticalDataset:
    """Return ``dataset`` with some of its training and test rows, ``parts``, of which each prefix is a fair sample."""
    common, kept = dataset.common, []
    for ids in parts:
        most = min(MAX_ROWS, MAX_SCORES // len(dataset.classes)) * len(ids) / len(common)
        labels = dataset.labels.loc[ids]
        kept.append(ids[(np.arange(len(ids)) < most) | (labels.groupby(labels).cumcount() < FEW).to_numpy()])
    parties = []
    for table in dataset.parties:
        others = table.frame.index[common.get_indexer(table.frame.index) < 0][:MAX_ROWS]
        parties.append(replace(table, frame=table.frame.loc[others.append(kept)]))
    return replace(dataset, parties=tuple(parties), test_ids=kept[1])


def examine(dataset: VerticalDataset, train: pd.Index, test: pd.Index, split: Partition, reading: Reading) -> Checkup:
    """Return what is in ``dataset``, given its training and test rows of seed 0 and the split of a sample of them."""
    labels = dataset.labels.loc[dataset.common].to_numpy()
    parties = [
        PartyFacts(
            name=given,
            role="active" if table is dataset.parties[0] else "passive",
            file=reading.raw[given].file,
            rows=len(table.frame),
            common=len(labels),
            columns=len(reading.columns[given]),
            encoded=split.parties[table.name].layout.width,
            guess=_score_guess_of_common(split, table.name),
        )
        for table in dataset.parties
        for given in [dataset.display_name(table.name)]
    ]
    columns = [facts for table in dataset.parties for facts in _inspect(dataset, table, split, reading)]
    counts = np.bincount(labels, minlength=len(dataset.classes))
    trained = np.bincount(dataset.labels.loc[train], minlength=len(dataset.classes))
    utility = _score_best(dataset, split)
    warnings = [
        *dataset.warnings,
        *_warn_of_copies(columns, dataset),
        *_warn_of_rare(dict(zip(dataset.classes, counts.tolist(), strict=True))),
        *_warn_of_repeats(dataset, train, test),
        *_check_gain(utility, dataset),
    ]
    return Checkup(
        name=dataset.name,
        metric=dataset.metric,
        parties=parties,
        classes=dict(zip(dataset.classes, counts.tolist(), strict=True)),
        train=dict(zip(dataset.classes, trained.tolist(), strict=True)),
        columns=columns,
        utility=utility,
        warnings=warnings,
    )


def _inspect(dataset: VerticalDataset, table: PartyTable, split: Partition, reading: Reading) -> list[ColumnFacts]:
    frame, given = table.frame, dataset.display_name(table.name)
    is_common = dataset.common.get_indexer(frame.index) >= 0
    ids = pd.Index(np.concatenate([split.ids["train"], split.ids["test"]])).sort_values()
    sample, labels = frame.index.get_indexer(ids), dataset.labels.loc[ids].to_numpy()
    facts = []
    if table.vocabulary:
        different = int((~frame[is_common].duplicated()).sum())
        width, (column,), nan = split.parties[table.name].layout.width, reading.columns[given], float("nan")
        text = {"party": given, "column": column, "kind": "text"}
        return [ColumnFacts(**text, missing=0.0, values=different, encoded=width, predicts=nan)]
    dates = reading.config.parties[given].dates
    widths: dict[str, int] = {}
    for name, _, _, width in split.parties[table.name].layout.columns:
        raw = name if name in frame else name.removesuffix(GAPS)
        widths[raw] = widths.get(raw, 0) + width
    for name in frame.columns:
        values = frame.loc[is_common, name]
        is_category = name in table.categorical
        missing = (values == MISSING) if is_category else values.isna()
        kind = "category" if is_category else "signed log" if name in table.signed_log else "number"
        kind = "date" if name in dates else kind
        facts.append(
            ColumnFacts(
                party=given,
                column=name,
                kind=kind,
                missing=float(missing.mean()),
                values=int(values.nunique()),
                encoded=widths[name],
                predicts=_score_column(frame[name].iloc[sample], labels, dataset.metric, is_category=is_category),
            )
        )
    return facts


def _score_column(values: pd.Series, labels: np.ndarray, metric: str, *, is_category: bool) -> float:
    """Return how well one column predicts the label, by a small tree on folds."""
    folds = min(3, rarest := int(np.bincount(labels).min()))
    within = min(3, rarest - -(-rarest // max(1, folds)))  # folds of the rows that are not held out
    if folds < 2 or (is_category and within < 2):
        return float("nan")
    tree = DecisionTreeClassifier(max_leaf_nodes=16, min_samples_leaf=5, random_state=0)
    # A tree could not find a few telling ones among thousands of categories: it reads the class shares of each.
    model = make_pipeline(TargetEncoder(cv=StratifiedKFold(within)), tree) if is_category else tree
    column = values.astype(str if is_category else np.float64).to_numpy()[:, None]
    scores = np.empty((len(labels), labels.max() + 1))
    for train, test in StratifiedKFold(folds).split(labels, labels):
        scores[test] = model.fit(column[train], labels[train]).predict_proba(column[test])
    return METRICS[metric](scores, labels)


def _score_best(dataset: VerticalDataset, split: Partition) -> dict[str, float]:
    """Return the utility of the better of two quick models on the columns of all parties, and of each."""
    names = list(split.parties)
    labels, answers = split.labels["train"], split.labels["test"]
    utility = {}
    for who, parties in {"all": names, **{dataset.display_name(name): [name] for name in names}}.items():
        train, test = (join_columns([split.parties[p].features[part] for p in parties]) for part in ("train", "test"))
        utility[who] = score_quickly(train, labels, test, answers, n_classes=len(split.classes), metric=split.metric)
    return utility


def _score_guess_of_common(split: Partition, name: str) -> float:
    """Return how well a party's columns alone tell which of its rows are common, by a quick model on half of them."""
    parts = [split.parties[name].features[part] for part in ("train", "test", "local")]
    x = stack_rows(parts)
    is_common = (np.arange(x.shape[0]) < x.shape[0] - parts[-1].shape[0]).astype(np.int64)
    first, second = np.array_split(np.random.default_rng(0).permutation(x.shape[0]), 2)
    if any(len(np.unique(is_common[half])) < 2 for half in (first, second)):
        return float("nan")
    return score_quickly(x[first], is_common[first], x[second], is_common[second], n_classes=2, metric="auc")


def _warn_of_copies(columns: list[ColumnFacts], dataset: VerticalDataset) -> list[str]:
    measure = "AUC" if dataset.metric == "auc" else dataset.metric
    unknown_share = 1 - score_chance(dataset.metric, dataset.labels.to_numpy())
    return [
        f"{facts.party}, column {facts.column!r} alone predicts the label with {measure} {facts.predicts:.3f}: is "
        f"it known before the label is?"
        for facts in columns
        if facts.predicts > ALMOST
        and 1 - facts.predicts < 0.5 * unknown_share  # far better than naming the largest class
    ]


def _warn_of_rare(classes: dict[str, int]) -> list[str]:
    few = [f"{name!r} ({rows})" for name, rows in classes.items() if rows < 50]
    others = f" and {len(few) - MAX_NAMED_CLASSES} more" if len(few) > MAX_NAMED_CLASSES else ""
    named = ", ".join(few[:MAX_NAMED_CLASSES]) + others
    return [f"few common rows of class {named}: their figures will vary by seed"] if few else []


def _warn_of_repeats(dataset: VerticalDataset, train: pd.Index, test: pd.Index) -> list[str]:
    """Warn of test rows whose columns are all equal to those of a training row."""
    hashes = [pd.util.hash_pandas_object(table.frame, index=False).loc[dataset.common] for table in dataset.parties]
    rows = pd.util.hash_pandas_object(pd.concat(hashes, axis=1), index=False)
    double = int(rows.loc[test].isin(rows.loc[train]).sum())
    if double < 0.01 * len(test):
        return []
    return [
        f"{count(double, 'test row')} of {len(test)} equal a training row in all columns: has a person several ids?"
    ]


def _check_gain(utility: dict[str, float], dataset: VerticalDataset) -> list[str]:
    active = dataset.display_name("active")
    measure = "AUC" if dataset.metric == "auc" else dataset.metric
    if not utility["all"] <= utility[active]:  # also where they are unknown
        return []
    return [
        f"the joint model is no better than {active} alone ({measure} {utility['all']:.3f} and {utility[active]:.3f}): "
        f"joining pays nothing here; are rows of one id about one person?"
    ]


def score_quickly(
    train: Matrix, labels: np.ndarray, test: Matrix, answers: np.ndarray, *, n_classes: int, metric: str
) -> float:
    """Return the utility on test rows of logistic regression or boosted trees, whichever does better in training.

    ``train`` (n, d) and ``test`` (m, d) are encoded columns, ``labels`` (n,) and ``answers`` (m,) class numbers. The
    choice is made on a fifth of the training rows, to which neither is fitted; the chosen model is then fitted to all.
    NaN if a class is missing there.
    """
    rows = min(MAX_FITTED_ROWS, max(200, MAX_FITTED_VALUES // max(1, train.shape[1])))
    train, labels = train[:rows], labels[:rows]
    if not isinstance(train, np.ndarray):  # no model can use a category that does not occur in these rows
        seen = np.unique(train.indices)
        train, test = densify(train[:, seen]), test[:, seen]
    held_out = np.arange(len(labels)) % 5 == 4
    if any(len(np.unique(some)) < n_classes for some in (labels[held_out], labels[~held_out])):
        return float("nan")
    trees = max(5, 2 * TREES // n_classes)
    bins = max(2, min(255, MAX_ALL_BINS // max(1, train.shape[1])))  # each node of a tree counts the rows of each
    models = (
        make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=200)),
        HistGradientBoostingClassifier(max_iter=trees, max_bins=bins, early_stopping=False, random_state=0),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the budget is fixed
        fitted = [model.fit(train[~held_out], labels[~held_out]) for model in models]
        chosen = max(fitted, key=lambda model: METRICS[metric](model.predict_proba(train[held_out]), labels[held_out]))
        chosen.fit(train, labels)
    parts = [densify(test[at : at + PART]) for at in range(0, test.shape[0], PART)]
    return METRICS[metric](np.concatenate([chosen.predict_proba(part) for part in parts]), answers)
