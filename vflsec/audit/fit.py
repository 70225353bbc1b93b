"""The fit check: whether what is audited belongs to the auditor's rows and columns, before anything is attacked.

An attack on material of other rows infers nothing, which looks like a system that leaks nothing.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import nn

from vflsec.audit.evaluation import SystemAudit
from vflsec.audit.foreign import SPLITS
from vflsec.audit.matching import ColumnRegression, Floats, Ints, accuracy, correlate_labels, spread
from vflsec.audit.subject import Subject
from vflsec.base.checks import count, group
from vflsec.base.errors import DataError, clean
from vflsec.core.message import Kind, Message, Transcript
from vflsec.core.method import Trained
from vflsec.data.encode import Matrix, densify
from vflsec.data.partition import Partition
from vflsec.run.score import measure
from vflsec.run.store import CellFacts

MAX_P = 0.01  # the rate at which material of other rows passes for that of the stated ones
MAX_COMPARED_ROWS = 600  # rows that are compared; of more, some are drawn
MAX_COUNTED_ROWS = 2000  # rows among which those with vectors of other rows are counted
MIN_R2_OF_COUNTS = 0.8  # the R2 above which the rows that are predicted badly are counted
MAX_COLUMNS = 2000  # columns of a party that are read; of more, those that are filled most
MAX_COORDINATES = 256  # of vectors that are compared; of more, such as the states of a whole text, some are drawn
MIN_ROWS = 50  # fewer rows than this never show a misfit
WILD_FACTOR = 1e4  # times the median size of a coordinate
MIN_R2_WITH_NOISE = 0.3  # a smaller R2 of noisy embeddings or of predictions may be that of other rows in part
# a smaller R2 of embeddings without noise may be that of the same people at another time, who change in part
MIN_R2_WITHOUT_NOISE = 0.7
MIN_CORRELATION = 0.5  # two releases of the same rows whose components correlate less are noise
CLEAR_CORRELATION = 0.9  # the same, above which gradients have so little noise that they would tell of labels
REPEATED_SHARE = 0.2  # the share of rows with one embedding for other columns, at which it may stand for a missing one
CONSTANT_SHARE = 0.99  # the share of rows with the same vector at which a model counts as constant
SAME_UTILITY = 0.05  # a utility of a checkpoint that differs by more from that of its training is of other data
LOST_RANGE = 0.002  # the largest range of a column that is lost, as a multiple of the standard deviation of others
N_RESPONSES = 50  # rows on which it is measured how a model responds to a column
N_ORDERS = 59  # random orders of the columns to which the stated one is compared
ROWS_OF_ORDERS = 600  # rows on which a model is run in each order


class Finding(NamedTuple):
    """What a check has shown: whether the material belongs to the data, and by what."""

    outcome: Literal["fits", "misfit", "unverified"]
    text: str


@dataclass(frozen=True)
class Rows:
    """The auditor's rows, training rows before test rows, and orders in which others may have numbered them.

    Attributes:
        data: the split data.
        file: the ids as text in the order of the adversary's file; empty to try no other order.
        material: the ids as text in the order of the material.
    """

    data: Partition
    file: Sequence[str] = ()
    material: Sequence[str] = ()

    @property
    def ids(self) -> pd.Index:
        """The ids (N,) as text."""
        ids: pd.Index = pd.Index(np.concatenate([self.data.ids[split] for split in SPLITS])).astype(str)
        return ids

    def columns(self, drawn: Ints, *parties: str) -> Floats:
        """Return the encoded columns (n, p) of some rows at parties."""
        held = (self.data.parties[name].features for name in parties)
        return np.concatenate([_read_columns(x, SPLITS, drawn) for x in held], axis=1)

    def list_alignments(self) -> dict[str, Ints]:
        """Return likely misalignments by name: of each row (N,), the row whose vector may have its id; -1 for none."""
        if not len(self.file):
            return {}
        ids = self.ids
        file, material = (ids.get_indexer(pd.Index(order)) for order in (self.file, self.material))
        file, material = file[file >= 0], material[material >= 0]
        numbers = pd.to_numeric(pd.Series(ids), errors="coerce").to_numpy()
        by_text = np.argsort(ids.to_numpy(), kind="stable")
        numeric = bool(np.isfinite(numbers).all()) and len(np.unique(numbers)) == len(ids)
        by_number = np.argsort(numbers, kind="stable") if numeric else by_text
        # the rows, and those that the material may call by their ids
        pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for name, order in (("in the order of the ids", by_number), ("in the order of the file", file)):
            pairs |= {f"shifted by {by} {name}": (order, np.roll(order, -by)) for by in (1, -1, 2, -2)}
            pairs[f"reversed {name}"] = (order, order[::-1])
        for base in (0, 1) if numeric else ():
            named = pd.Index(numbers).get_indexer(np.arange(len(self.file)) + base)
            at = ids.get_indexer(pd.Index(self.file))
            pairs[f"read as positions in the file, counted from {base}"] = (at[at >= 0], named[at >= 0])
        pairs["sorted as text where they should be as numbers"] = (by_number, by_text)
        pairs["sorted as numbers where they should be as text"] = (by_text, by_number)
        pairs["sorted where they should be in the order of the file"] = (file, by_number)
        pairs["in the order of the file where they should be sorted"] = (by_number, file)
        if len(material) == len(file):
            pairs["replaced by the order of lines in both files"] = (file, material)
        result = {name: np.full(len(ids), -1) for name in pairs}
        for name, (rows, others) in pairs.items():
            result[name][rows] = others
        return result


def _read_columns(features: Mapping[str, Matrix], splits: Sequence[str], drawn: Ints) -> Floats:
    """Return the columns (n, p) of some rows of splits, one after another; of very many, those that are filled most."""
    starts = np.cumsum([0, *(features[split].shape[0] for split in splits)])
    parts = [
        features[split][drawn[(drawn >= start) & (drawn < end)] - start]
        for split, start, end in zip(splits, starts[:-1], starts[1:], strict=True)
    ]
    width = parts[0].shape[1]
    if width > MAX_COLUMNS:
        filled = sum(np.asarray((part != 0).sum(axis=0)).ravel() for part in parts)
        kept = np.sort(np.argsort(filled, kind="stable")[-MAX_COLUMNS:])
        parts = [part[:, kept] for part in parts]
    return np.concatenate([densify(part) for part in parts])


class ReleaseMeans(NamedTuple):
    """What was sent about each row (N, d), NaN for rows about which nothing was.

    Attributes:
        mean: over all releases; the model changes between them.
        last: release.
        halves: means over every other one; NaN for rows of which there is one.
    """

    mean: Floats
    last: Floats
    halves: tuple[Floats, Floats]


def average(messages: Sequence[Message], sizes: Mapping[str, int], *, directions: bool = False) -> ReleaseMeans:
    """Return the means of messages of one width about the rows of splits of these ``sizes``, one after another.

    With ``directions``, each vector divided by its norm is appended to it.
    """
    starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]), strict=False))
    n, size = sum(sizes.values()), messages[0].payload["value"].shape[1]
    used = np.sort(np.random.default_rng(0).permutation(size)[:MAX_COORDINATES])
    width = len(used) * (2 if directions else 1)
    sums, counts, last = np.zeros((2, n, width)), np.zeros((2, n)), np.full((n, width), np.nan)
    for each in messages:
        values = each.payload["value"].detach().cpu().numpy()[:, used].astype(np.float64)
        if directions:
            norm = np.linalg.norm(values, axis=1, keepdims=True)
            values = np.concatenate([values, values / np.maximum(norm, 1e-30)], axis=1)
        assert each.rows is not None
        rows = each.rows.cpu().numpy() + starts[each.split]
        half = counts.sum(axis=0)[rows].astype(int) % 2
        np.add.at(sums, (half, rows), values)
        np.add.at(counts, (half, rows), 1)
        last[rows] = values
    with np.errstate(invalid="ignore", divide="ignore"):
        first, second = sums / counts[:, :, None]
        return ReleaseMeans(sums.sum(axis=0) / counts.sum(axis=0)[:, None], last, (first, second))


def check_fit(audit: SystemAudit, defenses: Sequence[frozenset[Kind]], file: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield what the checks of all that the audit reads have shown; nothing is attacked.

    ``defenses`` are the kinds of messages that each declared defense changes, and ``file`` has the ids as text in the
    order of the adversary's file.
    """
    subject, data = audit.subject, audit.data
    table = subject.embeddings if subject.function is None else None
    rows = Rows(data, file, () if table is None or subject.messages else [str(each) for each in table.index])
    noisy = any(Kind.EMBEDDING in kinds for kinds in defenses)
    embedded = [
        _judge_messages(_keep_last_phase(route), sender, rows, noisy=noisy)
        for sender, route in _group_by_sender(audit, Kind.EMBEDDING).items()
    ]
    if table is not None and not embedded:
        values = _read_rows(table, rows)
        single = ReleaseMeans(values, values, (np.full_like(values, np.nan), np.full_like(values, np.nan)))
        held = data.parties[subject.adversary].features
        embedded.append(_judge_embeddings(single, held, SPLITS, rows, subject.adversary, noisy=noisy))
    yield from embedded
    gradients = [
        each for route in _group_by_sender(audit, Kind.GRADIENT).values() for each in route if each.split == "train"
    ]
    if gradients and all(each.sender != "active" for each in gradients):
        yield Finding(
            "misfit", f"expected gradients from the active party, found them from "
            f"{_get_name(gradients[0].sender, data)} to it: record the active party as their sender",
        )  # fmt: skip
    elif gradients:
        yield _judge_gradients(_keep_last_phase(gradients), data, declared=bool(defenses), known=embedded)
    nodes = [each for route in _group_by_sender(audit, Kind.NODES).values() for each in route if each.split in SPLITS]
    if nodes and not embedded:
        yield _judge_nodes(nodes, rows, declared=bool(defenses))
    beside = np.zeros((len(rows.ids), 0)) if subject.embeddings is None else _read_rows(subject.embeddings, rows)
    if subject.predictions is not None:
        yield _judge_predictions(subject.predictions, rows, beside, declared=bool(defenses))
    if subject.embeddings is not None:
        drawn = _draw(beside, np.random.default_rng(0))
        yield _judge_labels(rows, drawn, beside[drawn])
    if subject.model is not None or subject.function is not None:
        yield from _judge_model(audit)


def _group_by_sender(audit: SystemAudit, kind: Kind) -> dict[str, list[Message]]:
    """Return the messages of a kind by sender, as far as the auditor has what they are about."""
    held = {(name, split) for name, party in audit.data.parties.items() for split in party.features}
    plain = [each for each in audit.messages if each.rows is not None and set(each.payload) == {"value"}]
    known = [each for each in plain if each.kind is kind and (each.sender, each.split) in held]
    return group(known, lambda each: each.sender)


def _keep_last_phase(messages: Sequence[Message]) -> list[Message]:
    """Return the messages of the last phase of training and after it, as wide as its last one."""
    training = [each for each in messages if each.phase not in ("predict", "validate")] or list(messages)
    last = training[-1]
    width = last.payload["value"].shape[1]
    kept = [each for each in messages if each.phase in (last.phase, "predict", "validate")]
    return [each for each in kept if each.payload["value"].shape[1] == width]


def _judge_messages(messages: Sequence[Message], sender: str, rows: Rows, *, noisy: bool) -> Finding:
    """Judge embeddings by the columns of their sender."""
    features = rows.data.parties[sender].features
    splits: tuple[str, ...] = SPLITS
    if not any(each.split in SPLITS for each in messages):  # pre-training on other rows
        splits, rows = (messages[-1].split,), Rows(rows.data)
    sizes = {split: features[split].shape[0] for split in splits}
    sent = average([each for each in messages if each.split in sizes], sizes)
    return _judge_embeddings(sent, features, splits, rows, sender, noisy=noisy)


def _judge_embeddings(
    sent: ReleaseMeans, features: Mapping[str, Matrix], splits: Sequence[str], rows: Rows, party: str, *, noisy: bool
) -> Finding:
    """Return whether embeddings belong to the columns of ``party``."""
    what, of = f"embeddings of {_get_name(party, rows.data)}", f"columns of {_get_name(party, rows.data)}"
    if (constant := _describe_constant(sent.mean)) is not None:
        return Finding("misfit", f"the {what} {constant}: hand in the trained model's")
    rng = np.random.default_rng(0)
    drawn = _draw(sent.mean, rng)
    regressions = ColumnRegression(_read_columns(features, splits, drawn), rng)
    others = {
        name: np.where((named[drawn] >= 0)[:, None], sent.mean[named[drawn]], np.nan)
        for name, named in rows.list_alignments().items()
    }
    fit = regressions.fit(
        sent.mean[drawn],
        {name: np.where(np.isnan(each), np.nanmean(sent.mean, axis=0), each) for name, each in others.items()},
    )
    numbers = f"held-out R2 {fit.r2:.2f}, p = {fit.p:.3f} against permuted rows, {count(len(drawn), 'row')}"
    if fit.better:
        name = max(fit.better, key=lambda each: fit.better[each])
        return Finding(
            "misfit", f"the {what} fit the {of} better with ids {name}: correlation {fit.better[name]:.2f}, and "
            f"{fit.correlation:.2f} as stated; use the ids of the training",
        )  # fmt: skip
    fits_well = fit.p <= MAX_P and fit.r2 >= MIN_R2_WITH_NOISE
    # A bad fit is that of noise or of other rows. Without noise, two releases of one row agree.
    quiet = not noisy and (fits_well or not _correlate_releases(sent, rng) < MIN_CORRELATION)
    repeated = 0.0 if noisy else _measure_repeats(sent.last[drawn], regressions.x)
    if repeated >= REPEATED_SHARE and fit.p <= MAX_P:
        return Finding(
            "unverified", f"the {what} are the same in {repeated:.0%} of the rows whose columns differ: check that "
            f"none of them stands for a missing one",
        )  # fmt: skip
    if fit.p <= MAX_P and regressions.is_copied(sent.mean[drawn]):
        return Finding(
            "unverified", f"the {what} are the {of} themselves: check that they are the outputs of the bottom model "
            f"and not its inputs",
        )  # fmt: skip
    if fit.p <= MAX_P:
        many = _draw(sent.mean, rng, MAX_COUNTED_ROWS)
        read, vectors = _read_columns(features, splits, many), [sent.mean[many], sent.last[many]]
        ends = np.cumsum([features[split].shape[0] for split in splits])
        parts = np.split(np.arange(len(many)), np.searchsorted(many, ends[:-1]))
        wrong = _find_others(ColumnRegression(read, rng), vectors, what, least=0.02, sure=0.1)
        partly = fit.r2 < MIN_R2_WITHOUT_NOISE and quiet and len(drawn) >= MIN_ROWS
        if (wrong or partly) and not all(_belong(read[at], [each[at] for each in vectors], rng) for at in parts):
            return wrong or Finding(
                "unverified", f"the {what} fit the {of} only in part ({numbers}): check that ids and files are of the "
                f"same rows and time",
            )  # fmt: skip
        return Finding("fits", f"fit check: the {what} fit the {of} ({numbers})")
    if len(drawn) < MIN_ROWS or not quiet:
        why = "too few rows" if len(drawn) < MIN_ROWS else "too much noise"
        return Finding("unverified", f"whether the {what} belong to the {of} cannot be verified, {why} ({numbers})")
    size = np.abs(sent.mean[drawn])
    wild = int((size > WILD_FACTOR * np.maximum(np.median(size, axis=0), 1e-12)).any(axis=1).sum())
    return Finding(
        "misfit",
        f"expected {what} that its columns predict, found none that they do ({numbers}"
        f"{f', {wild} of them with wild values' * bool(wild)}): use the ids and files of the training, or name the "
        f"defense that adds noise with --defense",
    )


def _find_others(
    read: ColumnRegression, releases: Sequence[Floats], what: str, least: float, sure: float
) -> Finding | None:
    """Return a finding if over ``least`` of rows have vectors of other rows in each of ``releases`` (n, d).

    It is a misfit from a share of ``sure``.
    """
    if any(len(np.unique(each, axis=0)) < read.n / 2 for each in releases):  # those of other rows may be the same
        return None
    mixtures = [read.mixture(each) for each in releases]
    share = min(each.others for each in mixtures)
    if max(each.r2 for each in mixtures) <= MIN_R2_OF_COUNTS or share <= least * (1 + 200 / read.n):
        return None
    text = f"at least an estimated {share:.0%} of the rows have {what} that belong to other rows: use their own ids"
    return Finding("misfit" if share >= sure else "unverified", text)


def _belong(columns: Floats, releases: Sequence[Floats], rng: np.random.Generator) -> bool:
    """Return whether the vectors of a split by itself belong to its rows; the model may have learned between splits."""
    if not len(columns):
        return True
    read = ColumnRegression(columns, rng)
    if read.n < MIN_ROWS or read.fit(releases[0]).r2 < MIN_R2_WITHOUT_NOISE:
        return False
    mixtures = [read.mixture(each) for each in releases]
    return any(each.r2 > MIN_R2_OF_COUNTS and each.others <= 0.02 * (1 + 200 / read.n) for each in mixtures)


def _draw(values: Floats, rng: np.random.Generator, most: int = MAX_COMPARED_ROWS) -> Ints:
    """Return the rows that have vectors, or some of them."""
    return np.sort(rng.permutation(np.flatnonzero(np.isfinite(values).all(axis=1)))[:most])


def _describe_constant(values: Floats) -> str | None:
    """Return what is wrong if nearly all rows have the same vector."""
    kept = values[np.isfinite(values).all(axis=1)]
    _, counts = np.unique(np.round(kept, 12), axis=0, return_counts=True)
    share = counts.max(initial=0) / max(len(kept), 1)
    return f"are the same in {share:.0%} of {len(kept)} rows" if share >= CONSTANT_SHARE else None


def _measure_repeats(values: Floats, columns: Floats) -> float:
    """Return the share of rows with the most frequent vector, without those that have the same columns as well."""
    _, which, counts = np.unique(np.round(values, 12), axis=0, return_inverse=True, return_counts=True)
    same = columns[which.ravel() == counts.argmax()]
    return float(len(same) - np.unique(same, axis=0, return_counts=True)[1].max()) / len(values)


def _correlate_releases(sent: ReleaseMeans, rng: np.random.Generator) -> float:
    """Return the largest correlation of a component of two releases of a row; 1 if there are too few."""
    first, second = sent.halves
    both = _draw(np.concatenate([first, second], axis=1), rng)
    return ColumnRegression(first[both], rng).fit(second[both]).largest if len(both) >= MIN_ROWS else 1.0


def check_share(
    tables: Mapping[str, pd.Index], subject: Subject, train: pd.Index | None, test: pd.Index | None
) -> Iterator[Finding]:
    """Yield a misfit if less than half of the ids of the material are in the ``tables`` of all parties, or vice versa.

    Fewer of the data may be used if the user names ids of ``train`` or ``test``.
    """
    known = functools.reduce(pd.Index.intersection, tables.values(), tables["active"])
    parts = [each.index for each in (subject.embeddings, subject.predictions) if each is not None]
    material = _join_ids([subject.train, subject.test, *parts])
    given = [material, *(_join_ids([ids] if ids is not None else []) for ids in (train, test))]
    for place, named in zip((subject.name, "--train-ids", "--test-ids"), given, strict=True):
        if 0 < (shared := len(named.intersection(known))) < len(named) / 2:
            yield Finding("misfit", f"expected the ids of the data in {place}, found {shared} of {len(named)} there")
    both = len(material.intersection(known))
    if both and train is None and test is None and both < len(known) / 2:
        yield Finding(
            "misfit", f"expected the rows of the data in {subject.name}, found {both} of {len(known)}: name them with "
            f"--train-ids and --test-ids if no others were used",
        )  # fmt: skip


def _join_ids(parts: Sequence[pd.Index]) -> pd.Index:
    ids: pd.Index = pd.Index(np.unique(np.concatenate([[], *(each.to_numpy(object) for each in parts)]).astype(str)))
    return ids


def _judge_gradients(
    messages: Sequence[Message], data: Partition, *, declared: bool, known: Sequence[Finding]
) -> Finding:
    """Judge gradients by the labels, of which each gradient tells that of its row unless a defense hides it."""
    sent = average(messages, {"train": len(data.ids["train"])}, directions=True)
    rng = np.random.default_rng(0)
    drawn = _draw(sent.mean, rng)
    seen, every = int(np.isfinite(sent.mean).all(axis=1).sum()), len(data.ids["train"])
    if seen < every / 2:
        return Finding(
            "unverified", f"expected gradients of all training rows, found those of {seen} of {every}: hand in the "
            f"whole transcript, or name the training rows with --train-ids",
        )  # fmt: skip
    labels = np.eye(len(data.classes))[data.labels["train"][drawn]]
    if (constant := _describe_constant(sent.mean)) is not None:
        return Finding(
            "unverified" if declared else "misfit", f"the gradients {constant}: record those of the training"
        )
    fit = ColumnRegression(sent.mean[drawn], rng).fit(labels)
    numbers = f"correlation {fit.correlation:.2f}, p = {fit.p:.3f} against permuted rows, {count(len(drawn), 'row')}"
    shared = 0.0 if declared else _correlate_releases(sent, rng)
    if fit.p <= MAX_P and not declared and fit.correlation < CLEAR_CORRELATION:
        return Finding(
            "unverified", f"the gradients fit the labels only in part ({numbers}): check their ids and task, or name "
            f"the defense with --defense",
        )  # fmt: skip
    if fit.p <= MAX_P:
        return Finding("fits", f"fit check: the gradients fit the labels ({numbers})")
    text = f"the gradients tell nothing of the labels ({numbers})"
    if declared:
        belong = any(each.outcome == "fits" for each in known)
        return Finding("fits" if belong else "unverified", f"fit check: {text}, as with a strong defense")
    if len(drawn) < MIN_ROWS or shared < MIN_CORRELATION:
        return Finding("unverified", f"{text}, as with a strong defense: name it with --defense")
    if not known:
        return Finding("misfit", f"{text}: use the ids of the training, or name its defense with --defense")
    if shared > CLEAR_CORRELATION:
        return Finding("misfit", f"{text} though they have little noise: one of them belongs to other rows")
    return Finding("unverified", f"{text} though they have little noise: check the ids of the labels")


def _judge_nodes(messages: Sequence[Message], rows: Rows, *, declared: bool) -> Finding:
    """Judge nodes of trees by the columns of all parties: the first two turns of each tree are to be predicted."""
    ids = {split: len(rows.data.ids[split]) for split in SPLITS}
    starts = {"train": 0, "test": ids["train"]}
    last = max(each.step + each.payload["value"].shape[1] for each in messages)
    turns = np.zeros((sum(ids.values()), 2 * last))
    for each in messages:
        assert each.rows is not None
        node = each.payload["value"].cpu().numpy().astype(np.int64)
        level = np.frexp(np.maximum(node, 1).astype(np.float64))[1] - 1
        at = (each.rows.cpu().numpy() + starts[each.split])[:, None]
        for turn in (0, 1):
            sign = np.where(level > turn, 2.0 * ((node >> np.maximum(level - turn - 1, 0)) & 1) - 1.0, 0.0)
            columns = 2 * (each.step + np.arange(node.shape[1]))[None, :] + turn
            turns[at, columns] = np.where(sign != 0, sign, turns[at, columns])
    turns[~turns.any(axis=1)] = np.nan
    if not np.isfinite(turns).any():
        return Finding("unverified", "whether the nodes of trees belong to the rows cannot be verified: none has split")
    return _judge_output(turns, rows, "nodes of trees", turns[:, :0], declared=declared)


def _read_rows(table: pd.DataFrame, rows: Rows) -> Floats:
    """Return the vectors (N, d) of rows, NaN where there is none."""
    return table.reindex(rows.ids.astype(object)).to_numpy(np.float64)


def _judge_labels(rows: Rows, drawn: Ints, embeddings: Floats) -> Finding:
    """Return how well labels follow from what a joint model reads; the user must judge whether that is enough."""
    data = rows.data
    labels = np.concatenate([data.labels[split] for split in SPLITS])[drawn]
    share = accuracy(np.concatenate([rows.columns(drawn, "active"), embeddings], axis=1), labels, len(data.classes))
    most = np.bincount(labels).max() / len(labels)
    return Finding(
        "fits", f"the labels follow from the embeddings and the columns of {_get_name('active', data)} in {share:.0%} "
        f"of held-out rows, where the most frequent label is right in {most:.0%}: check their ids if the joint model "
        f"is right more often",
    )  # fmt: skip


def _judge_predictions(table: pd.DataFrame, rows: Rows, embeddings: Floats, *, declared: bool) -> Finding:
    values = _read_rows(table, rows)
    if not np.isfinite(values).any():
        return Finding("misfit", "expected predictions of rows of the data, found none: use the same ids")
    if values.shape[1] not in (1, classes := len(rows.data.classes)):
        return Finding("misfit", f"expected predictions of 1 or {classes} numbers, one for each class, found "
                       f"{values.shape[1]}: hand in those of the joint model")  # fmt: skip
    if np.nanmin(values) >= 0 and np.nanmax(values) <= 1:
        kept = np.clip(values, 1e-6, 1 - 1e-6)
        values = np.log(kept / (1 - kept))
    return _judge_output(values, rows, "predictions", embeddings, declared=declared)


def _judge_output(values: Floats, rows: Rows, what: str, embeddings: Floats, *, declared: bool) -> Finding:
    """Judge what a joint model says of rows by the columns of all parties and by embeddings."""
    if (constant := _describe_constant(values)) is not None:
        return Finding("misfit", f"the {what} {constant}: hand in those of the trained model")
    rng = np.random.default_rng(0)
    sources: list[Callable[[Ints], Floats]] = [lambda drawn: rows.columns(drawn, *rows.data.parties)]
    if embeddings.shape[1]:
        sources.append(lambda drawn: np.concatenate([rows.columns(drawn, "active"), embeddings[drawn]], axis=1))
    both = np.concatenate([values, embeddings], axis=1)
    drawn, many = _draw(both, rng), _draw(both, rng, MAX_COUNTED_ROWS)
    fits = [ColumnRegression(read(drawn), rng).fit(values[drawn]) for read in sources]
    fit, read = max(zip(fits, sources, strict=True), key=lambda each: (each[0].p <= MAX_P, each[0].r2))
    numbers = f"held-out R2 {fit.r2:.2f}, p = {fit.p:.3f} against permuted rows, {count(len(drawn), 'row')}"
    if fit.p <= MAX_P and what == "predictions" and not declared:
        if wrong := _find_others(ColumnRegression(read(many), rng), [values[many]], what, least=0.04, sure=0.35):
            return wrong
        if fit.r2 < MIN_R2_WITH_NOISE:
            return Finding("unverified", f"the {what} fit the columns only in part ({numbers}): check their ids")
    if fit.p <= MAX_P:
        return Finding("fits", f"fit check: the {what} fit the columns of all parties ({numbers})")
    outcome: Literal["misfit", "unverified"] = "unverified" if len(drawn) < MIN_ROWS or declared else "misfit"
    return Finding(outcome, f"the {what} do not fit the columns of any party ({numbers}): use the ids of the training")


def _get_name(party: str, data: Partition) -> str:
    return clean(data.names.get(party, party))


def _judge_model(audit: SystemAudit) -> Iterator[Finding]:
    """Judge a model by repeating it and by the order of its columns.

    Raises:
        DataError: it gives something else each time, or depends on the other rows of a batch.
    """
    subject, data = audit.subject, audit.data
    n = min(len(data.ids["train"]), ROWS_OF_ORDERS)
    drawn = np.sort(np.random.default_rng(0).permutation(len(data.ids["train"]))[:n])
    (given, names), run = _read_inputs(audit, drawn), _make_runner(audit)
    stated = run(given)
    if not np.allclose(stated, run(given[::-1])[::-1], rtol=1e-3, atol=1e-4 * max(float(np.abs(stated).max()), 1e-6)):
        raise DataError(
            f"expected {subject.name} to give the same for the same row, found other embeddings in a second run with "
            f"the rows reversed: export it in evaluation mode, without dropout or random nodes (model.eval())"
        )
    if (constant := _describe_constant(stated)) is not None:
        yield Finding("misfit", f"the embeddings of {subject.name} {constant}: hand in the trained model")
        return
    if subject.embeddings is None:  # else they are judged on all rows
        yield _judge_labels(Rows(data), drawn, stated)
    yield from _judge_lost_columns(audit, run, given, names)
    yield _judge_order(run, given, stated, names, np.eye(len(data.classes))[data.labels["train"][drawn]], subject.name)


def _judge_lost_columns(
    audit: SystemAudit, run: Callable[[Floats], Floats], given: Floats, names: Sequence[str]
) -> Iterator[Finding]:
    """Yield a finding if a column that is constant changes the model like others, so that it varied in training.

    A layer keeps its first, small weights on columns that were always constant.
    """
    steps = np.array_split(np.arange(len(audit.data.ids["train"])), 1 + len(audit.data.ids["train"]) // 5000)
    ends = np.array([(x.min(axis=0), x.max(axis=0)) for x, _ in (_read_inputs(audit, step) for step in steps)])
    width, scale = ends[:, 1].max(axis=0) - ends[:, 0].min(axis=0), given.std(axis=0)
    if not (varies := scale > 0).any():
        return
    unit = float(np.median(scale[varies]))
    rng = np.random.default_rng(0)
    live = rng.permutation(np.flatnonzero(varies & (width > LOST_RANGE * unit)))[:N_ORDERS]
    rows = given[:N_RESPONSES]

    def response(column: int) -> float:
        moved = rows + unit * (np.arange(rows.shape[1]) == column)
        return float(np.square(run(moved) - run(rows)).sum())

    usual = float(np.median([response(column) for column in live]))
    for column in np.flatnonzero(width <= LOST_RANGE * unit).tolist():
        if response(column) > usual:
            yield Finding(
                "unverified", f"{audit.subject.name} reads {clean(names[column])} as much as other columns, but it is "
                f"the same in all rows: check that the files are those of the training",
            )  # fmt: skip
            return


def _read_inputs(audit: SystemAudit, drawn: Ints) -> tuple[Floats, list[str]]:
    """Return what a model reads of some training rows (n, p), and the names of these p columns."""
    subject, data = audit.subject, audit.data
    if subject.inputs is not None:
        table = subject.inputs.reindex(pd.Index(data.ids["train"][drawn].astype(str).astype(object)))
        return table.to_numpy(np.float32), [str(name) for name in table.columns]
    held = data.parties[subject.adversary]
    return densify(held.features["train"][drawn]), [c.name for c in held.layout.columns for _ in range(c.width)]


def _make_runner(audit: SystemAudit) -> Callable[[Floats], Floats]:
    if audit.subject.function is not None:
        function = audit.subject.function
        return lambda x: np.asarray(function(np.ascontiguousarray(x, dtype=np.float32)))
    model = audit.subject.model
    assert isinstance(model, nn.Module)

    def run(x: Floats) -> Floats:
        with torch.no_grad():
            return np.asarray(model(torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))).numpy())

    return run


def _judge_order(
    run: Callable[[Floats], Floats], given: Floats, stated: Floats, names: Sequence[str], labels: Floats, name: str
) -> Finding:
    """Compare the stated order of a model's columns with random ones and those of sorted names.

    A trained model tells more of labels, or varies more, on the columns that it was trained on than on others.
    """
    n, width = given.shape
    rng = np.random.default_rng(0)
    padded = [re.sub(r"\d+", lambda digits: digits[0].zfill(9), each) for each in names]
    by_name = {
        "sorted by name as text": sorted(range(width), key=names.__getitem__),
        "sorted by name with numbers in their order": sorted(range(width), key=padded.__getitem__),
        "reversed": list(range(width))[::-1],
    }
    tried = {key: order for key, order in by_name.items() if order != list(range(width))}
    orders = [*map(np.array, tried.values()), *(rng.permutation(width) for _ in range(N_ORDERS))]
    result = np.split(run(np.concatenate([given[:, order] for order in orders])), len(orders))
    scores: Floats = np.array([[correlate_labels(each, labels), spread(each)] for each in [stated, *result]])
    controls = scores[1 + len(tried) :]
    ranks = (1 + (controls >= scores[0]).sum(axis=0)) / (1 + N_ORDERS)
    p = min(1.0, 2 * float(ranks.min()))
    for k, key in enumerate(tried, start=1):
        gain, wider = scores[k] - scores[0]
        if gain > max(0.03, 1.5 / np.sqrt(n)) and wider > 0 and scores[k, 0] > controls[:, 0].max() + 0.03:
            return Finding(
                "misfit", f"{name} tells more of the labels with columns {key}: correlation {scores[k, 0]:.2f}, and "
                f"{scores[0, 0]:.2f} in the stated order; write the columns as in the training",
            )  # fmt: skip
    numbers = f"p = {p:.2f} against random orders, {count(n, 'row')}"
    if p <= 0.05:
        return Finding("fits", f"fit check: {name} fits the order of its columns ({numbers})")
    return Finding("unverified", f"whether {name} reads its columns in their order cannot be verified ({numbers})")


def check_utility(trained: Trained, facts: CellFacts) -> Finding:
    """Compare the utility of a checkpoint on these data with that of its training."""
    if facts.utility is None:
        return Finding("unverified", "whether the data are those of the training cannot be verified: it has no utility")
    federation = trained.federation
    answers = federation.active.labels["test"]
    now = measure(trained.predict("test"), answers, federation.metric, 0).headline
    numbers = f"{facts.utility.metric} {now:.3f}, and {facts.utility.headline:.3f} in the training"
    if abs(now - facts.utility.headline) > SAME_UTILITY:
        return Finding("misfit", f"the models do not fit the test rows: {numbers}; use the files of the training")
    return Finding("fits", f"fit check: the models fit the test rows ({numbers})")


def check_training(trained: Trained, facts: CellFacts, messages: Sequence[Message], *, noisy: bool) -> Finding:
    """Compare a recording with the training of a checkpoint: how much was sent, and what its models send at prediction.

    Where it is ``noisy``, a defense changes embeddings, so that models do not send the same again.
    """
    about = [m for m in messages if m.kind in (Kind.EMBEDDING, Kind.GRADIENT) and m.rows is not None]
    if not messages:
        return Finding("misfit", "expected messages of the adversary in the recording: record the training again")
    recorded: Counter[tuple[str, ...]] = Counter()
    for m in about:
        recorded[m.phase, m.sender, m.receiver, m.kind, m.split] += len(m.payload["value"])
    for count_of in facts.releases:
        route = (count_of.phase, count_of.sender, count_of.receiver, count_of.kind, count_of.split)
        if route in recorded and recorded[route] != count_of.total:
            return Finding(
                "misfit", f"expected {count_of.total} releases of {count_of.kind}s of {count_of.split} rows in "
                f"{count_of.phase}, found {recorded[route]}: use the whole recording of this training",
            )  # fmt: skip
    last = {(m.sender, m.receiver, m.split): m for m in about if m.phase == "predict" and m.kind is Kind.EMBEDDING}
    again = Transcript(frozenset(m.receiver for m in last.values()), frozenset({Kind.EMBEDDING}))
    if last and not noisy:
        trained.federation.channel.taps.append(again)
        trained.predict("test")
    sent = {(m.sender, m.receiver, m.split): m for m in again.messages}
    for pair in last.keys() & sent.keys():
        before, after = (each[pair].payload["value"].double() for each in (last, sent))
        if before.shape != after.shape or not torch.allclose(before, after, rtol=1e-3, atol=1e-3 * float(after.std())):
            return Finding(
                "misfit", f"the models of {pair[0]} do not send the embeddings that were recorded at prediction: use "
                f"the recording of this training",
            )  # fmt: skip
    return Finding(
        "fits", f"fit check: the recording has the messages of this training ({count(len(about), 'message')})"
    )
