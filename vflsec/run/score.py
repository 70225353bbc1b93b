"""What is measured: a guess against the truth, the impact of sabotage, and the privacy that was spent.

This is the only place where a guess is compared with the truth.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vflsec.base.seeds import derive
from vflsec.core import hooks
from vflsec.core.attack import IntegrityAttack
from vflsec.core.defense import Defense, list_hooks
from vflsec.core.federation import Federation
from vflsec.core.message import AFTERWARDS, Kind, ReleaseCount
from vflsec.core.method import Trained
from vflsec.core.view import GroundTruth, Guess
from vflsec.results import metrics, statistics
from vflsec.results.metrics import calibrate, score_knowledge
from vflsec.results.records.schema import Block, Impact, Triggered
from vflsec.results.statistics import bound_over_rows

MIN_KNOWN = 5
"""Known rows of a class, of which fewer may be so large a share of it by chance."""

ROUNDING = 1e-6
"""Scores that differ by less, as a part of the largest, are the same."""


def score(
    guess: Guess,
    ground_truth: GroundTruth,
    *,
    headline: str,
    exclude: Tensor,
    seed: int,
    known: str = "train",
    names: Sequence[str] = (),
    groups: Mapping[str, NDArray[np.integer]] | None = None,
) -> dict[str, Block]:
    """Return, for each guessed split, all metrics, chance, the number of rows, and the row interval of the headline.

    ``halves`` is the headline on each of two random halves of these rows, which are the same for every guess with the
    same seed, truth and ``exclude``. It is None if the rows are too few to be split; otherwise a guess of classes also
    has the metrics of ``calibration.knowledge``, each half calibrated on the other, and of ``RARE`` as far as the rows
    resolve them.

    Args:
        guess: of an attack.
        ground_truth: the truth; rows whose answer is -1 have none.
        headline: the metric that the interval is for.
        exclude: positions of the auxiliary samples, which the adversary knows, in the split ``known``.
        seed: of the bootstrap and of the halves.
        known: the split of the auxiliary samples.
        names: of the metrics; by default those of a task with as many classes.
        groups: by split, the group of each row, for intervals over seeds; by default those of the rows' positions.
    """
    blocks = {}
    rows = sum(map(len, ground_truth.labels.values()))
    of_class = share_of_class(ground_truth.labels[known].cpu(), exclude.cpu()) if known in ground_truth.labels else 0.0
    for split, guessed in guess.scores.items():
        truth = ground_truth.labels[split].cpu()
        guessed_rows = guess.rows.get(split, torch.arange(len(truth)))
        keep = is_scored(truth, exclude if split == known else None)[guessed_rows]
        at = guessed_rows[keep]
        if _can_be_measured(truth[at], headline):
            scored, answers = guessed[keep], truth[at]
            s, y = scored.detach().cpu().numpy(), answers.numpy()
            first = draw_first_half(answers, derive(seed, "halves", split))
            halves = _score_halves(s, y, first, headline)
            row_groups = (groups or {}).get(split, statistics.draw_groups(len(truth)))[at.numpy()]
            block = measure(scored, answers, headline, seed, names, row_groups)
            sure = _score_knowledge(s, y, first) if halves and answers.dim() == 1 else {}
            if split in guess.prior:
                sure["gained"] = metrics.count_gained(s, y, guess.prior[split][keep].cpu().numpy())
            if split in guess.whole:
                sure["exact"] = metrics.exact(guess.whole[split][keep].cpu().numpy(), y)
            blocks[split] = msgspec.structs.replace(
                block, metrics=block.metrics | sure, halves=halves, known=len(exclude) / rows, known_of_class=of_class,
                constant=block.constant and split not in guess.prior,  # which may be the best guess, one for all rows
            )  # fmt: skip
    return blocks


def _can_be_measured(truth: Tensor, headline: str) -> bool:
    """Return whether the rows have two classes, or words that count."""
    if headline == metrics.TEXT[0]:
        return bool(len(truth) and metrics.find_words_that_count(truth.numpy()).any())
    return len(torch.unique(truth)) > 1


def score_facts(guess: Guess) -> dict[str, Block]:
    """Return the facts of a guess by what they are of; they do not vary over rows."""
    return {
        fact.of: Block(
            metrics={fact.metric: fact.value},
            ci95_rows=(fact.value, fact.value),
            chance=fact.chance,
            n=fact.n,
            halves=(fact.value, fact.value),
            without=(fact.value,) * statistics.GROUPS,
        )
        for fact in guess.facts
    }


def is_scored(truth: Tensor, exclude: Tensor | None) -> Tensor:
    """Return which rows (n,) have an answer, and one that the adversary does not know."""
    keep = torch.isfinite(truth).all(dim=1) if truth.dim() > 1 else truth >= 0
    if exclude is not None:
        keep[exclude.cpu()] = False
    return keep


def measure(
    scores: Tensor,
    labels: Tensor,
    headline: str,
    seed: int,
    names: Sequence[str] = (),
    groups: NDArray[np.integer] | None = None,
) -> Block:
    """Return all metrics of (n, C) scores against (n,) labels, or of values, and how the headline varies over rows.

    ``single_class`` is set if all rows are guessed to be of the same class: accuracy is then no measure of the leak.
    ``groups`` (n,) are those of the rows, by default of their positions.
    """
    s, y = scores.detach().cpu().numpy(), labels.cpu().numpy()
    ordered = dict.fromkeys((headline, *(names or metrics.list_metrics(s.shape[1]))))
    low, high = statistics.bound_over_rows(headline, s, y, np.random.default_rng(seed))
    chance = metrics.score_chance(headline, y)
    return Block(
        metrics={name: metrics.METRICS[name](s, y) for name in ordered},
        ci95_rows=(low, high),
        chance=chance,
        n=len(y),
        single_class=labels.dim() == 1 and len(np.unique(s.argmax(axis=1))) == 1,
        constant=is_constant(s) and not low > chance,  # rounding errors of a constant tell nothing, small scores may
        without=statistics.leave_out_groups(
            headline, s, y, statistics.draw_groups(len(y)) if groups is None else groups
        ),
    )


def draw_first_half(truth: Tensor, seed: int) -> NDArray[np.bool_]:
    """Return which rows (n,) are in the first of two random halves; each class is split evenly, to within one row."""
    order = np.random.default_rng(seed).permutation(len(truth))
    if truth.dim() == 1:
        order = order[np.argsort(truth.numpy()[order], kind="stable")]
    first = np.zeros(len(truth), dtype=bool)
    first[order[::2]] = True
    return first


def _score_halves(s: np.ndarray, y: np.ndarray, first: NDArray[np.bool_], headline: str) -> tuple[float, float] | None:
    """Return the headline on each half, or None if a half has a single answer."""
    if any(len(np.unique(y[half], axis=0)) < 2 for half in (first, ~first)):
        return None
    measured = metrics.METRICS[headline]
    return measured(s[first], y[first]), measured(s[~first], y[~first])


def _score_knowledge(s: np.ndarray, y: np.ndarray, first: NDArray[np.bool_]) -> dict[str, float]:
    """Return how much a guess of classes tells of a row: few rows known surely, and bits of a calibrated guess."""
    rates = {name: metrics.METRICS[name](s, y) for name in metrics.RARE}
    resolved = {name: rate for name, rate in rates.items() if not np.isnan(rate)}
    return resolved | score_knowledge(calibrate(s, y, first), y, first)


def share_of_class(truth: Tensor, known: Tensor) -> float:
    """Return the largest share of a class of ``truth`` (n,) that is at the positions ``known``; 0 for values.

    A class of which fewer than ``MIN_KNOWN`` rows are known counts only with all others: chance may have drawn these.
    """
    if truth.dim() > 1 or truth.is_floating_point() or not len(known):
        return 0.0
    classes = int(truth.max()) + 1
    every, disclosed = (np.bincount(rows[rows >= 0].numpy(), minlength=classes) for rows in (truth, truth[known]))
    many = disclosed >= MIN_KNOWN
    return float(max([disclosed.sum() / max(1, every.sum()), *(disclosed[many] / every[many])]))


def is_constant(scores: np.ndarray) -> bool:
    """Whether all rows of (n, C) scores are the same, but for rounding."""
    return bool(np.ptp(scores, axis=0).max() <= ROUNDING * np.abs(scores).max())


def measure_impact(trained: Trained, malicious: Mapping[str, IntegrityAttack], utility: Block) -> Impact:
    """Return the impact on a federation under attack, or on the honest one that it is compared with.

    The trigger of the ``malicious`` parties is tried; ``utility`` is that on test rows without it.
    """
    aim = next((attack.aim for attack in malicious.values()), None)  # colluding parties share one
    return Impact(utility=utility, success=None if aim is None else measure_success(trained, malicious, aim))


def measure_success(trained: Trained, malicious: Mapping[str, IntegrityAttack], aim: int) -> Triggered:
    """Return the share of test rows of other classes that are predicted as class ``aim`` with the trigger."""
    federation = trained.federation
    with federation.pause_recording(), add_trigger(federation, malicious, "test"):
        logits = trained.predict("test")
    others = (federation.active.labels["test"] != aim).cpu()
    z = logits.cpu()[others].numpy()
    aims = np.full(len(z), aim)
    rng = np.random.default_rng(derive(federation.seed, "bootstrap"))
    share = float((z.argmax(axis=1) == aims).mean())
    return Triggered(share=share, ci95_rows=bound_over_rows("accuracy", z, aims, rng), n=len(z))


@contextmanager
def add_trigger(federation: Federation, malicious: Mapping[str, IntegrityAttack], split: str) -> Iterator[None]:
    """Add the trigger to the columns of malicious parties in ``split``, or to their embeddings, for this context."""
    before = {name: federation.parties[name].features for name in malicious}
    acting, federation.malicious = federation.malicious, dict(malicious)
    for name, attack in malicious.items():
        attack.triggered = True
        with torch.no_grad():
            federation.parties[name].features = {**before[name], split: attack.trigger(before[name][split].clone())}
    try:
        yield
    finally:
        federation.malicious = acting
        for name, features in before.items():
            malicious[name].triggered = False
            federation.parties[name].features = features


def compute_spending(
    trained: Trained, releases: Sequence[ReleaseCount], adversary: str, trainings: int = 1
) -> list[dict[str, Any]]:
    """Return the privacy that each defense with a guarantee has spent against this adversary: the most of all senders.

    Args:
        trained: the federation whose parties carry the defenses.
        releases: from ``Channel.releases``.
        adversary: a party, or several joined by ``+`` that share all messages.
        trainings: on the same rows, with as many releases each, which add up where noise and answers are drawn anew.

    Returns:
        For each defense ``defense``, ``epsilon``, ``delta``. If releases are noised, also ``releases``, the largest
        number of releases of one row to the adversary, and ``epsilon_transcript``, over all releases of all rows: the
        bound if a row affects releases of others through the model. For a defense of updates, ``of`` is ``models`` and
        ``updates`` the number in which a row took part; its epsilon does not cover messages about the row itself.
    """
    method = trained.method
    method.prepare(trained.federation)
    adversaries = adversary.split("+")
    most: dict[str, dict[str, Any]] = {}
    for party in trained.federation.all_parties:
        for defense in party.defenses if party.name not in adversaries else ():
            if hooks.UPDATE in list_hooks(defense):
                updates = trainings * method.updates(trained.federation)
                spent = defense.privacy_spent(updates)
                account = {**spent, "of": "models", "updates": updates} if spent else None
            else:
                received = [r for r in releases if r.receiver in adversaries]
                account = compute_account(defense, party.name, received, trainings)
            if account and account["epsilon"] >= most.get(repr(defense), account)["epsilon"]:
                most[repr(defense)] = {"defense": repr(defense), **account}
    return list(most.values())


def compute_largest_spending(trained: Trained, releases: Sequence[ReleaseCount]) -> list[dict[str, Any]]:
    """Return the account of each defense against the ``adversary`` among the parties against whom it spent most."""
    most: dict[str, dict[str, Any]] = {}
    for name in trained.federation.parties:
        for account in compute_spending(trained, releases, name):
            if account["epsilon"] > most.get(account["defense"], {"epsilon": -1.0})["epsilon"]:
                most[account["defense"]] = {**account, "adversary": name}
    return list(most.values())


def compute_account(
    defense: Defense, sender: str, received: Sequence[ReleaseCount], trainings: int = 1
) -> dict[str, Any] | None:
    """Return the privacy that a defense of ``sender`` has spent by the releases that an adversary received, or None.

    They are those of one of the trainings.
    """
    if not defense.kinds:  # it changes labels, which only the active party has, or a text, once in each training
        drawn = sender == "active" or hooks.TEXT in list_hooks(defense)
        account = defense.privacy_spent(trainings) if drawn else None
        return {**account, "fixed": True} if account and defense.fixed else account
    defended = [r for r in received if r.sender == sender and defense.acts(Kind(r.kind), r.phase)]
    once = defense.privacy_spent(1)
    if not defended or once is None:
        return None
    count = trainings * count_most(defended)
    whole = defense.privacy_spent(trainings * sum(r.total for r in defended))
    assert whole is not None
    return {**(defense.privacy_spent(count) or once), "releases": count, "epsilon_transcript": whole["epsilon"]}


def count_most(releases: Sequence[ReleaseCount]) -> int:
    """Return the largest number of releases of one row; phases may know the same row by other positions."""
    training = [r for r in releases if r.phase not in AFTERWARDS]
    most: dict[tuple[str, str, str], int] = {}
    for r in training:
        route = (r.phase, r.receiver, r.kind)
        most[route] = max(most.get(route, 0), r.most)
    trained_on, splits = sum(most.values()), {r.split for r in training}
    later: dict[str, int] = {}
    for r in releases:
        if r.phase in AFTERWARDS:
            later[r.split] = later.get(r.split, trained_on if r.split in splits else 0) + r.most
    return max([trained_on, *later.values()])
