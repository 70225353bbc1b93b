"""What an adversary has before it attacks: its draw of auxiliary labels, its View, and its own test of an attack."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from sklearn.model_selection import KFold, StratifiedKFold
from torch import Tensor

from vflsec.core.attack import Attack
from vflsec.core.checks import unknown
from vflsec.core.errors import UsageError
from vflsec.core.federation import Federation
from vflsec.core.message import SERVER, SOURCE, Message
from vflsec.core.method import Method, Trained
from vflsec.core.metrics import METRICS
from vflsec.core.party import Party
from vflsec.core.seeds import derive
from vflsec.core.view import GroundTruth, View
from vflsec.experiment.spec import AuxSpec
from vflsec.nn.bottoms import untrained
from vflsec.nn.side_by_side import SideBySide

SPLITS = ("train", "test")


def adversary(federation: Federation, name: str) -> tuple[Party, ...]:
    """Return the attacking party, or the colluding parties of ``passive_1+passive_2``.

    Raises:
        UsageError: no such party, the same one twice, or the active party among several: it has the labels.
    """
    names = name.split("+")
    for one in names:
        if one not in federation.parties:
            raise UsageError(unknown("adversary", one, federation.parties))
    parties = tuple(federation.parties[one] for one in names)
    if len(set(names)) < len(names):
        raise UsageError(f"expected different colluding parties, got {name}: name each once")
    if len(parties) > 1 and any(party.active for party in parties):
        raise UsageError(f"expected passive parties to collude, got {name}: the active party has the labels")
    return parties


def side_of(method: Method, federation: Federation, name: str) -> str:
    """Return on which side an adversary is: ``active``, as a source is too, ``passive``, or ``server``.

    Raises:
        UsageError: nobody of that name takes part.
    """
    if name in method.observers():
        return "active" if name == SOURCE else name
    if name == SERVER:
        way = f"set method.{method.name}.pma=true" if SERVER in method.visible_to else "fedlocal-* with pma=true"
        raise UsageError(f"{method.name} has no server: use fedhssl-*, or {way}")
    if name == SOURCE:
        raise UsageError(f"expected an adversary that takes part in {method.name}, got {name}: it has none")
    return "active" if adversary(federation, name)[0].active else "passive"


def ground_truth_of(federation: Federation) -> GroundTruth:
    """Return the truth, for the scorer."""
    return GroundTruth({split: federation.active.labels[split].cpu() for split in SPLITS})


def view_of(
    trained: Trained,
    parties: Sequence[Party],
    aux_rows: Tensor,
    messages: tuple[Message, ...] = (),
    splits: Sequence[str] = SPLITS,
) -> View:
    """Return what the attacking parties legitimately have after training, and the labels of their auxiliary samples.

    Colluding parties put their columns and their bottom models side by side, and have in common the aligned rows alone.
    """
    federation, first = trained.federation, parties[0]
    models = [trained.method.representation(party).eval() for party in parties]
    together = SideBySide(models, [party.n_features for party in parties]) if len(parties) > 1 else models[0]
    rows = ["unlabeled"] if len(parties) > 1 else ["unlabeled", "local"]
    return View(
        party="+".join(party.name for party in parties),
        side="active" if first.active else "passive",
        n_classes=federation.n_classes,
        features={split: _columns(parties, split) for split in splits},
        model=together.eval(),
        aux_rows=aux_rows.to(federation.device),
        aux_labels=federation.active.labels["train"][aux_rows.to(federation.device)],
        messages=messages,
        labels={"train": first.labels["train"]} if first.active else {},
        top=federation.active.modules["top"].eval() if first.active and "top" in federation.active.modules else None,
        unlabeled=torch.cat([_columns(parties, split) for split in rows]),
        places=federation.places,
        models=trained.method.assembled(federation, [party.name for party in parties], messages),
        parties=tuple(federation.parties),
    )


def view_of_source(trained: Trained, parties: Sequence[Party], aux_rows: Tensor, messages: tuple[Message, ...]) -> View:
    """Return what parties have of the source's people after pre-training with it, whose rows were trained on there.

    They are the view's ``train`` rows, and there are no others. The source itself may be the adversary.
    """
    federation = trained.federation
    assert federation.source is not None
    labels = federation.source.labels["source"]
    models = [trained.method.representation(party).eval() for party in parties]
    several = len(parties) > 1
    return View(
        party="+".join(party.name for party in parties),
        side="active" if parties[0].active else "passive",
        n_classes=federation.n_classes,
        features={"train": _columns(parties, "source")},
        model=SideBySide(models, [party.n_features for party in parties]).eval() if several else models[0],
        aux_rows=aux_rows.to(federation.device),
        aux_labels=labels[aux_rows.to(federation.device)],
        messages=messages,
        labels={"train": labels} if parties[0].active else {},
        places={"source": torch.arange(len(labels), device=federation.device)},
        parties=(SOURCE, *(party.name for party in federation.passive)),
    )


def view_before(federation: Federation, party: Party, aux: AuxSpec) -> View:
    """Return what a passive party has before training: its columns, and the labels of its auxiliary samples."""
    rows = draw_auxiliary(federation.active.labels["train"], federation.n_classes, aux, federation.seed).to(
        federation.device
    )
    return View(
        party=party.name,
        side="active" if party.active else "passive",
        n_classes=federation.n_classes,
        features={split: party.features[split] for split in SPLITS},
        model=None,
        aux_rows=rows,
        aux_labels=federation.active.labels["train"][rows],
    )


def _columns(parties: Sequence[Party], split: str) -> Tensor:
    return torch.cat([party.features[split] for party in parties], dim=1)


def alone(view: View, seed: int) -> View:
    """Return the view of the same party had it never joined."""
    assert view.model is not None
    return view.without_federation(untrained(view.model, derive(seed, "alone", view.party)))


def draw_auxiliary(labels: Tensor, n_classes: int, spec: AuxSpec, seed: int) -> Tensor:
    """Return the sorted positions (n,) of the auxiliary samples among the training rows.

    Balanced: n/C of each class, the first classes taking the remainder.

    Raises:
        UsageError: no row, or no row of some class, would be left to attack.
    """
    y = labels.cpu().numpy()
    if spec.n >= len(y):
        raise UsageError(
            f"expected fewer auxiliary labels than the {len(y)} labeled training rows, got aux.n={spec.n}: "
            f"lower it with --set aux.n=..., or raise data.n_labeled"
        )
    rng = np.random.default_rng(derive(seed, "auxiliary"))
    order = rng.permutation(len(y))
    if spec.balanced:
        share = [spec.n // n_classes + (c < spec.n % n_classes) for c in range(n_classes)]
        counts = np.bincount(y, minlength=n_classes)
        if (counts <= share).any():
            c = int(np.argmax(np.asarray(share) - counts))
            raise UsageError(
                f"expected over {share[c]} labeled training rows of each class for aux.n={spec.n}, got {counts[c]} of "
                f"class {c}: lower aux.n, raise data.n_labeled, or set aux.balanced=false"
            )
        order = np.concatenate([order[y[order] == c][: share[c]] for c in range(n_classes)])
    return torch.from_numpy(np.sort(order[: spec.n]))


TRIALS = {"paper": 1, "small": 4, "large": 16}


def tuned(attack: Attack, view: View, metric: str, aux: AuxSpec, seed: int) -> tuple[Attack, float | None, int]:
    """Return the variant of ``attack`` that does best on the adversary's folds, its score there, and how many it tried.

    The first is the attack as it is, and stays the choice where no other is better, or folds cannot tell. An attack
    that acts in training has done so already, and only what it does afterwards is varied.
    """
    best, best_score, trials = attack, fold_score(attack, view, metric, aux.folds, seed), 1
    if best_score is None:
        return attack, None, trials
    for variant in attack.variants(TRIALS[aux.budget], np.random.default_rng(derive(seed, "variants"))):
        score = fold_score(variant, view, metric, aux.folds, seed)
        trials += 1
        if score is not None and score > best_score:
            best, best_score = variant, score
    return best, best_score, trials


def fold_score(attack: Attack, view: View, metric: str, folds: int, seed: int) -> float | None:
    """Return how well ``attack`` does on auxiliary samples it was not given: all that the adversary itself can test.

    The mean of ``metric`` over folds, stratified where there are classes. Of recovered columns that of all held-out
    rows together, for the variance of a few rows is no yardstick, on folds that are the same for every attack. A class
    with a single sample is never held out. None where fewer than two classes are left, no folds are wanted, or the
    attack does not guess the rows among which the samples are.
    """
    y = view.aux_labels.cpu().numpy()
    classes = y.ndim == 1
    counts = np.bincount(y) if classes and len(y) else np.zeros(1, dtype=int)
    tested = np.flatnonzero(counts[y] > 1) if classes and len(y) else np.arange(len(y))
    folds = min(folds, int(counts[counts > 1].min(initial=folds)) if classes else len(y))
    if folds < 2 or (classes and (counts > 1).sum() < 2):
        return None
    shuffled = StratifiedKFold(folds, shuffle=True, random_state=derive(seed, "folds") % 2**32)
    split = shuffled.split(tested, y[tested]) if classes else KFold(folds).split(y)  # drawn at random already
    guessed, held = [], []
    for _, of_tested in split:
        held_out = tested[of_tested]
        known = np.setdiff1d(np.arange(len(y)), held_out)
        scores = attack(view.knowing(torch.from_numpy(known)), seed=seed).scores.get(view.aux_split)
        if scores is None:
            return None
        rows = view.aux_rows[torch.from_numpy(held_out).to(view.aux_rows.device)].cpu()
        guessed.append(scores[rows].numpy())
        held.append(y[held_out])
    if not classes:
        return METRICS[metric](np.concatenate(guessed), np.concatenate(held))
    return float(np.mean([METRICS[metric](s, truth) for s, truth in zip(guessed, held, strict=True)]))
