"""What an adversary has before it attacks: auxiliary labels, a View, and cross-validation on its auxiliary labels."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.model_selection import KFold, StratifiedKFold
from torch import Tensor, nn

from vflsec.base.checks import describe_unknown, expect_known
from vflsec.base.errors import UsageError
from vflsec.base.seeds import derive
from vflsec.core.attack import Attack, HijackingAttack
from vflsec.core.federation import Federation
from vflsec.core.message import SERVER, SOURCE, Message
from vflsec.core.method import Method, Trained
from vflsec.core.party import Party
from vflsec.core.view import View
from vflsec.nn.encoders import reinitialize
from vflsec.nn.wrappers import SideBySide
from vflsec.results.canaries import Canaries
from vflsec.results.metrics import METRICS, VALUES
from vflsec.run.spec import AuxSpec

SPLITS = ("train", "test")


def get_adversary(federation: Federation, name: str) -> tuple[Party, ...]:
    """Return the attacking party, or the colluding parties of ``passive_1+passive_2``."""
    names = name.split("+")
    for party in names:
        expect_known(federation.parties, adversary=party)
    parties = tuple(federation.parties[party] for party in names)
    if len(set(names)) < len(names):
        raise UsageError(f"expected different colluding parties, got {name}: name each once")
    if len(parties) > 1 and any(party.active for party in parties):
        raise UsageError(f"expected passive parties to collude, got {name}: the active party has the labels")
    return parties


def get_victim(attack: Attack, federation: Federation, parties: Sequence[Party]) -> Party:
    """Return the victim that ``attack`` names, or the first party that is not among ``parties``, the adversary's.

    For a passive adversary that is the active party, the only one whose messages it receives.
    """
    others = {party.name: party for party in federation.parties.values() if party not in parties}
    name = attack.victim or next(iter(others), "")
    if name not in others:
        raise UsageError(describe_unknown("victim", name, others))
    return others[name]


def get_side(method: Method, federation: Federation, name: str) -> str:
    """Return the side of an adversary: ``active`` (also for a source), ``passive`` or ``server``."""
    if name in method.observers():
        return "active" if name == SOURCE else name
    if name == SERVER:
        way = f"set method.{method.name}.pma=true" if SERVER in method.receives else "fedlocal-* with pma=true"
        raise UsageError(f"{method.name} has no server: use fedhssl-*, or {way}")
    if name == SOURCE:
        raise UsageError(
            f"expected an adversary that takes part in {method.name}, got {name}, which it has not: "
            f"choose another --adversary"
        )
    return "active" if get_adversary(federation, name)[0].active else "passive"


def observe(
    trained: Trained,
    parties: Sequence[Party],
    aux_rows: Tensor,
    messages: tuple[Message, ...] = (),
    splits: Sequence[str] = SPLITS,
) -> View:
    """Return the view of the attacking parties after training, with the labels of their auxiliary samples.

    Colluding parties concatenate their columns and embeddings. They share the aligned rows only.
    """
    federation, active = trained.federation, trained.federation.active
    is_active = parties[0].active
    splits_without_label = ["unlabeled"] if len(parties) > 1 else ["unlabeled", "local"]
    return View(
        party="+".join(party.name for party in parties),
        side="active" if is_active else "passive",
        n_classes=federation.n_classes,
        features={split: _join_columns(parties, split) for split in splits},
        model=_join_models(trained, parties),
        aux_rows=aux_rows.to(federation.device),
        aux_labels=active.labels["train"][aux_rows.to(federation.device)],
        messages=messages,
        defended=trained.method.embed_defended(federation, parties),
        labels={"train": active.labels["train"]} if is_active else {},
        top=active.modules["top"].eval() if is_active and "top" in active.modules else None,
        unlabeled=torch.cat([_join_columns(parties, split) for split in splits_without_label]),
        places=federation.places,
        models=trained.method.assemble_models(federation, [party.name for party in parties], messages),
        parties=tuple(federation.parties),
        agreed=trained.method.public_options(),
    )


def observe_source(trained: Trained, parties: Sequence[Party], aux_rows: Tensor, messages: tuple[Message, ...]) -> View:
    """Return the view of parties on the source's rows after the pre-training that was done on them.

    These rows are the ``train`` split, the only one. The source itself may be the adversary.
    """
    federation = trained.federation
    assert federation.source is not None
    labels = federation.source.labels["source"]
    return View(
        party="+".join(party.name for party in parties),
        side="active" if parties[0].active else "passive",
        n_classes=federation.n_classes,
        features={"train": _join_columns(parties, "source")},
        model=_join_models(trained, parties),
        aux_rows=aux_rows.to(federation.device),
        aux_labels=labels[aux_rows.to(federation.device)],
        messages=messages,
        labels={"train": labels} if parties[0].active else {},
        places={"source": torch.arange(len(labels), device=federation.device)},
        parties=(SOURCE, *(party.name for party in federation.passive)),
    )


def observe_before(federation: Federation, party: Party, aux: AuxSpec) -> View:
    """Return the view of a party before training: its columns, and the labels of its auxiliary samples."""
    labels = federation.active.labels["train"]
    rows = draw_auxiliary(labels, federation.n_classes, aux, federation.seed, federation.canaries)
    rows = rows.to(federation.device)
    return View(
        party=party.name,
        side="active" if party.active else "passive",
        n_classes=federation.n_classes,
        features={split: party.features[split] for split in SPLITS},
        model=None,
        aux_rows=rows,
        aux_labels=labels[rows],
    )


def observe_victim_before(federation: Federation, party: Party, aux: AuxSpec, attack: Attack) -> View:
    """Return the view of the active party before training: its labels, and the victim's columns of auxiliary samples.

    The same samples are left out of the score of ``attack`` after training.
    """
    victim = get_victim(attack, federation, [party])
    rows = draw_auxiliary_rows(federation.n_rows("train"), aux, federation.seed).to(federation.device)
    return replace(
        observe_before(federation, party, AuxSpec(n=0)),
        n_classes=victim.n_features,
        aux_rows=rows,
        aux_labels=victim.features["train"][rows],
        victim=victim.name,
        layout=victim.layout,
        labels={"train": party.labels["train"]},
    )


def _join_models(trained: Trained, parties: Sequence[Party]) -> nn.Module:
    models = [trained.method.representation(party).eval() for party in parties]
    return SideBySide(models, [party.n_features for party in parties]).eval() if len(parties) > 1 else models[0]


def _join_columns(parties: Sequence[Party], split: str) -> Tensor:
    return torch.cat([party.features[split] for party in parties], dim=1)


def isolate(view: View, seed: int) -> View:
    """Return the view that the same party has without the federation."""
    assert view.model is not None
    return view.drop_federation(reinitialize(view.model, derive(seed, "alone", view.party)))


def draw_auxiliary(
    labels: Tensor, n_classes: int, spec: AuxSpec, seed: int, canaries: Canaries | None = None
) -> Tensor:
    """Return the sorted positions (n,) of the auxiliary samples among the training rows, none of them a canary.

    Balanced: n/C of each class, the first classes taking the remainder.

    Raises:
        UsageError: fewer than two rows, or no row of some class, would be left to attack.
    """
    y = labels.cpu().numpy()
    rng = np.random.default_rng(derive(seed, "auxiliary"))
    order = rng.permutation(len(y))
    if canaries:  # which of them are known must not depend on their coins
        order = order[~np.isin(order, canaries.rows)]
    if spec.n > len(order) - 2:
        but = " that are no canaries" if canaries else ""
        raise UsageError(
            f"expected fewer auxiliary labels than the {len(order)} labeled training rows{but}, by two or more, got "
            f"aux.n={spec.n}: lower it with --set aux.n=..., or raise data.n_labeled"
        )
    if spec.balanced:
        share = [spec.n // n_classes + (c < spec.n % n_classes) for c in range(n_classes)]
        counts = np.bincount(y[order], minlength=n_classes)
        if (counts <= share).any():
            c = int(np.argmax(np.asarray(share) - counts))
            raise UsageError(
                f"expected over {share[c]} labeled training rows of each class for aux.n={spec.n}, got {counts[c]} of "
                f"class {c}: lower aux.n, raise data.n_labeled, or set aux.balanced=false"
            )
        order = np.concatenate([order[y[order] == c][: share[c]] for c in range(n_classes)])
    return torch.from_numpy(np.sort(order[: spec.n]))


def draw_auxiliary_rows(n_rows: int, spec: AuxSpec, seed: int) -> Tensor:
    """Return the sorted positions (n,) of auxiliary samples among the training rows, drawn from all alike."""
    return draw_auxiliary(torch.zeros(n_rows, dtype=torch.long), 1, AuxSpec(n=spec.n, balanced=False), seed)


TRIALS = {"paper": 1, "small": 4, "large": 16}

REPEATS = 3
"""Of the folds on which variants are compared: which rows share a fold is luck, too."""


def draw_variants(attack: Attack, n: int, rng: np.random.Generator) -> list[Attack]:
    """Return up to ``n - 1`` others of the kind of ``attack``, drawn from its ``search`` without repetition."""
    names, values = list(attack.search), list(product(*attack.search.values()))
    options = {name: getattr(attack, name) for name in inspect.signature(type(attack)).parameters}
    others = [combination for combination in values if combination != tuple(options[name] for name in names)]
    drawn = rng.permutation(len(others))[: n - 1]
    return [type(attack)(**{**options, **dict(zip(names, others[i], strict=True))}) for i in drawn]


def tune(attack: Attack, view: View, metric: str, aux: AuxSpec, seed: int) -> tuple[Attack, float | None, int]:
    """Return the best variant of ``attack`` on the adversary's folds, the score of tuning there, and the trials.

    The first trial is the attack as it is. The variant with the best mean score takes its place only if tuning itself
    is better than no tuning: each fold scores the variant that the other folds of its repeat choose, and the mean gain
    over the attack as it is must exceed its standard error. Otherwise the luckiest of many variants would often win. An
    attack that acts in training has done so already; its variants differ only in what they do afterwards.

    Sources: Cawley and Talbot 2010, "On over-fitting in model selection", section 5, for scoring the selection and not
    its winner; Breiman et al. 1984, "Classification and regression trees", section 3.4.3, for one standard error;
    Nadeau and Bengio 2003, "Inference for the generalization error", equation 8, for that of overlapping folds.

    Returns:
        The attack, the mean fold score of what was chosen on other folds, and the number of trials. The score is None
        if nothing reads it, as of attacks on classes without ``aux.pick``, or if folds cannot be made. An attack that
        has learned from every auxiliary row in training has none to be tested on.
    """
    if isinstance(attack, HijackingAttack):
        return attack, None, 1
    others = draw_variants(attack, TRIALS[aux.budget], np.random.default_rng(derive(seed, "variants")))
    is_compared = aux.pick or metric in VALUES  # the headline of columns may be the pick, which leaks more
    if not (others or is_compared):
        return attack, None, 1
    repeats = range(REPEATS if others else 1)
    trials = []
    for variant in (attack, *others):
        on_folds = [fold_scores(variant, view, metric, aux.folds, seed, repeat) for repeat in repeats]
        if on_folds[0] is None:
            return attack, None, 1
        trials.append(on_folds)
    scores = np.array(trials)  # (trials, repeats, folds)
    gain = compute_gain(scores)
    is_better = gain.mean() > estimate_error(gain)
    best = int(scores.mean(axis=(1, 2)).argmax()) if is_better else 0
    score = float(scores[0].mean() + gain.mean() * is_better)
    return (attack, *others)[best], score if is_compared else None, len(trials)


def compute_gain(scores: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return (repeats, folds) by how much the choice of the other folds beats the first of (trials, repeats, folds)."""
    others = scores.sum(axis=2, keepdims=True) - scores
    chosen = np.take_along_axis(scores, others.argmax(axis=0)[None], axis=0)[0]
    return np.asarray(chosen - scores[0])


def estimate_error(values: NDArray[np.floating]) -> float:
    """Return the standard error of the mean of (repeats, folds) values, whose training rows overlap."""
    folds = values.shape[1]
    return float(np.sqrt(1 / values.size + 1 / (folds - 1)) * values.std(ddof=1))


def fold_scores(
    attack: Attack, view: View, metric: str, folds: int, seed: int, repeat: int = 0
) -> NDArray[np.floating] | None:
    """Return the ``metric`` of ``attack`` on each fold of the auxiliary samples: all that an adversary can test.

    For classes the folds are stratified, and a class with a single sample is never held out. For recovered columns the
    scores are shares of R2, with the variance of all folds, since that of a few rows is a poor yardstick. The folds are
    the same for every attack, and others in each ``repeat``.

    Returns:
        None if fewer than two classes or folds are left, or if the attack does not guess the auxiliary samples' split.
    """
    y = view.aux_labels.cpu().numpy()
    is_class = y.ndim == 1
    if is_class:
        counts = np.bincount(y) if len(y) else np.zeros(1, dtype=int)
        if (counts > 1).sum() < 2:
            return None
        tested, folds = np.flatnonzero(counts[y] > 1), min(folds, int(counts[counts > 1].min()))
    else:
        tested, folds = np.arange(len(y)), min(folds, len(y))
    if folds < 2:
        return None
    state = derive(seed, "folds", *([repeat] if repeat else [])) % 2**32
    if is_class:
        split = StratifiedKFold(folds, shuffle=True, random_state=state).split(tested, y[tested])
    else:  # the rows were drawn at random
        split = KFold(folds, shuffle=repeat > 0, random_state=state if repeat else None).split(y)
    held_out = [tested[of_tested] for _, of_tested in split]
    known = [torch.from_numpy(np.setdiff1d(np.arange(len(y)), out)) for out in held_out]
    if attack.baseline:  # it reads own columns alone, and those of other splits would be guessed in vain
        view = replace(view, features={view.aux_split: view.features[view.aux_split]})
    if attack.by_row:
        auxiliary = view.features[view.aux_split][view.aux_rows]
        places = torch.arange(len(auxiliary), device=view.aux_rows.device)
        view = replace(view, features={view.aux_split: auxiliary}, aux_rows=places)
    scores = []
    for out, guess in zip(held_out, attack.on_each([view.restrict(k) for k in known], seed=seed), strict=True):
        if view.aux_split not in guess.scores or view.aux_split in guess.rows:
            return None
        rows = view.aux_rows[torch.from_numpy(out).to(view.aux_rows.device)].cpu()
        guessed = guess.scores[view.aux_split][rows].numpy()
        if is_class or metric == "tokens":
            scores.append(METRICS[metric](guessed, y[out]))
        else:
            scores.append(1 - folds * ((guessed - y[out]) ** 2).sum() / ((y - y.mean(axis=0)) ** 2).sum())
    return np.array(scores)
