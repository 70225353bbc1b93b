"""FedCVT: semi-supervised split learning of two parties that estimate missing representations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vflsec.base.checks import check_fraction, check_non_negative, check_positive
from vflsec.base.errors import NotStackable, UsageError
from vflsec.base.seeds import make_rng, seed_weights
from vflsec.core import hooks
from vflsec.core.federation import Federation
from vflsec.core.message import Step
from vflsec.core.method import RATES, Progress
from vflsec.core.party import Party
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.methods.split_method import SplitMethod
from vflsec.methods.split_training import SplitTraining
from vflsec.nn.encoders import build_encoder
from vflsec.nn.stacked import draw_batches
from vflsec.nn.top import build_top
from vflsec.nn.wrappers import PooledEncoder

UNKNOWN = -100
"""Target of a row without a label; among probabilities it is a row of zeros. ``cross_entropy`` leaves such rows out."""


class _Rules(NamedTuple):
    """What FedCVT adds to split learning; see there."""

    threshold: float
    temperature: float
    shared: float
    orthogonal: float
    estimate: float


class FedCVT(SplitMethod):
    """Cross-view training of exactly two parties, on labeled, unlabeled and unaligned rows.

    Each party p has two encoders, whose outputs u (unique to it) and c (common to both), each (B, d), make up its
    representation r_p = [u_p; c_p] (B, 2d). Where a party lacks a row, its representation is estimated by scaled
    dot-product attention, softmax(q k^T / (sqrt(d) T)) v:

    - u_p from the other party's u, which attends to its u on aligned rows, and takes p's u on the same;
    - c_p from the other party's c, which attends to p's c on all rows at hand, and takes these.

    Three classifiers, f_A on r_A, f_B on r_B and f_AB on both, give a row without a label a pseudo-label, if all three
    agree and each is surer than a threshold. An update minimizes

        CE(f_AB) + CE(f_A) + CE(f_B) + shared · |c_A - c_B|^2 + orthogonal · (|u_A c_A^T| + |u_B c_B^T|)
        + estimate · (|r^_A - r_A|^2 + |r^_B - r_B|^2)

    where |.|^2 is the mean square over the aligned rows at hand, r^ the estimates of them (a row may attend to itself),
    and |u c^T| the root mean square of the products u_i · c_j within a party. f_AB learns from labels and
    pseudo-labels, f_A and f_B from labels alone, and f_B from no estimate. f_AB predicts.

    *Who computes what.* The active party, A, has the labels: it computes all three classifiers, the estimates, the
    pseudo-labels and the loss. In each update the passive party, B, sends r_B on the batch of labeled rows, on one of
    aligned rows without label and on one of its unaligned rows, and gets the gradient with respect to each. B minimizes
    its own orthogonality at home. So A sees representations of people whom it may not know, and B sees gradients of
    rows without a label; neither is so in FedSplitNN. A needs r_B in clear: the boundary is ``plain``.

    Where the paper and the authors' code differ, the code is followed. Default weights, temperature and threshold are
    those of most of its configurations; that for Avazu (``temperature=0.5, estimate=1``) makes representations of all
    people alike without the additional loss, left out here. With ``train.local_steps`` above one, the gradients of B
    and what A received are reused, as in FedBCD. Without unlabeled and unaligned rows the losses on labels and the
    penalties are left; ``threshold=1`` takes the pseudo-labels away.

    Source: FedCVT (Kang, Liu, Liang 2022, ACM TIST 13(4), arXiv 2008.10838), eq. 1 to 8; its code, yankang18/FedCVT.
    Semi-supervised baseline of FedHSSL (He et al. 2022, arXiv 2208.08934), table IV.

    Args:
        model: the shape of the networks; d is the width of one encoder.
        threshold: probability that each classifier must exceed for a pseudo-label.
        temperature: T of the attention.
        shared: weight of the distance between the common representations.
        orthogonal: weight of the likeness of a party's unique and common representations.
        estimate: weight of the distance between estimated and true representations.
    """

    name = "fedcvt"
    reference = "Kang, Liu, Liang 2022 (FedCVT), ACM TIST 13(4), arXiv 2008.10838, eq. 1 to 8; yankang18/FedCVT"
    differs = (
        "Not all of the active party's rows need have labels: its unaligned rows without one can get pseudo-labels "
        "too.",
        "Aligned rows without label are candidates for pseudo-labels; in the authors' code they are not.",
        "Both estimates attend to all aligned rows; in the authors' code the active party's attends to labeled "
        "ones alone.",
        "The authors' additional loss on labels that attention estimates is left out; the paper has none.",
        "An epoch is a pass over the labeled rows, and an update takes as many rows of every other sort.",
        "One threshold serves all three classifiers, whose probabilities are not sharpened; representations are "
        "not normalized, which in the authors' code those of images are.",
        "Where paper and authors' code differ otherwise, the code is followed: scaled attention with a "
        "temperature, root mean square of products as the orthogonality term, weights and threshold.",
        "Networks and training follow model and train.",
    )
    learns = {"train": hooks.SPLIT_LEARNING - {hooks.BATCH, hooks.UPDATE}}  # noqa: RUF012
    encoder = "auto"
    search = {**RATES, "threshold": (0.5, 0.95)}  # noqa: RUF012
    shares_head = False

    def __init__(
        self,
        train: TrainSpec,
        model: ModelSpec,
        *,
        threshold: float = 0.7,
        temperature: float = 0.1,
        shared: float = 0.1,
        orthogonal: float = 0.01,
        estimate: float = 0.1,
    ) -> None:
        super().__init__(train, model)
        check_fraction(threshold=threshold)
        check_positive(temperature=temperature)
        check_non_negative(shared=shared, orthogonal=orthogonal, estimate=estimate)
        if model.head == "none":
            raise UsageError(
                "fedcvt expects model.head=linear or mlp, got none: representations of two encoders are no logits"
            )
        self.rules = _Rules(threshold, temperature, shared, orthogonal, estimate)

    def build(self, federation: Federation) -> None:
        """Draw what split learning has, and the active party's two classifiers of a single view."""
        super().build(federation)
        for party in federation.parties.values():
            with seed_weights(federation.seed, "model", "top", party.name):
                classifier = build_top([self.width(party)], federation.n_classes, self.model_spec)
            federation.active.modules[f"top_{party.name}"] = classifier.to(federation.device)

    def build_party(self, party: Party, federation: Federation) -> None:
        """Draw the two encoders, unique and common."""
        encoders = [build_encoder(party.layout, self.model_spec, federation.n_classes) for _ in range(2)]
        party.modules["bottom"] = PooledEncoder(encoders, "concat")

    def check(self, federation: Federation) -> None:
        """Raise UsageError unless there are two parties, with encoders of one width, whose rows no defense mixes."""
        super().check(federation)
        for defense in federation.active.defenses.select(hooks.BATCH):
            raise UsageError(
                f"fedcvt expects no defense that mixes rows, got {defense.name}: of two rows mixed, one may have no "
                f"label; choose another defense, or another method"
            )
        if len(federation.parties) != 2:
            raise UsageError(
                f"fedcvt expects 2 parties, got {len(federation.parties)}: it has no estimate of a third one"
            )
        width, other_width = (self.width(party) // 2 for party in federation.parties.values())
        if width != other_width:
            raise UsageError(f"fedcvt expects encoders of one width, got {width} and {other_width}: set model.cut")

    def max_releases(self, phase: str, federation: Federation) -> int | None:
        """Return None: rows without a label cross as often as those with labels make room for."""
        return None

    def train(self, phase: str, federation: Federation, progress: Progress) -> list[float]:
        """Run the one phase, ``train``."""
        self.check(federation)
        return super().train(phase, federation, progress)

    def together(self, joined: Federation) -> FedCVT:
        """Refuse: how many rows of an update are sure of their class differs by run."""
        raise NotStackable("the rows of an update differ in number by run")

    def split(self, federation: Federation) -> SplitTraining:
        """Return the training across the cut layer, from the models as they are."""
        return _CrossViewTraining(super().split(federation), self.rules)


class _CrossViewTraining(SplitTraining):
    """Split learning whose updates also see rows without a label, and rows that one party lacks.

    Each party's rows in an update are three batches, the latter two possibly empty: aligned and labeled, aligned
    without label, and its own unaligned ones. The first two are the same people at both parties.

    Args:
        split: what is trained, and how.
        rules: the method's numbers.
    """

    def __init__(self, split: SplitTraining, rules: _Rules) -> None:
        super().__init__(split.federation, split.bottoms, split.top, split.boundaries, split.spec)
        self.rules = rules

    def fit(self, phase: str, progress: Progress) -> list[float]:
        """Train in place; return the mean loss of each pass over the aligned labeled rows."""
        federation = self.federation
        self._unlabeled = self._repeat_batches(federation.n_rows("unlabeled"), phase, "unlabeled")
        self._local = {
            name: self._repeat_batches(len(party.features["local"]), phase, "local", name)
            for name, party in federation.parties.items()
        }
        self.kept = {"unlabeled": self._unlabeled, **{f"local/{name}": rows for name, rows in self._local.items()}}
        active, rng = federation.active, federation.get_label_stream(phase, "local")
        labels = active.labels["local"]
        features = active.features["local"][: len(labels)]
        _, known = active.defenses.training_targets(labels, features, n_classes=federation.n_classes, rng=rng)
        self._local_targets = known if len(labels) else _fill(federation.n_rows("local"), known)
        return super().fit(phase, progress)

    def _repeat_batches(self, count: int, *stream: str) -> _EndlessBatches:
        """Return batches of ``count`` rows, no larger than there are labeled rows."""
        size = min(self.spec.batch, self.federation.n_rows("train"))
        order = make_rng(self.federation.seed, "batches", *stream)
        return _EndlessBatches(count, size, order, self.federation.device)

    def _update(self, step: Step, optimizers: list[torch.optim.Optimizer]) -> Tensor:
        """One exchange: representations of three batches up, loss, gradients down; every party updates its own models.

        Further local steps (FedBCD) repeat the update on what the same exchange brought.
        """
        active, (passive,) = self.federation.active, self.federation.passive
        bottom = self.bottoms[passive.name]
        columns, given, steps = self._draw(step)
        x = torch.cat([self._feed(passive, where) for where in steps])
        sent = bottom(x)  # (n, 2d), in one pass, so that BatchNorm sees one batch
        arrived = []
        for h, where in zip(sent.split([len(where.rows) for where in steps]), steps, strict=True):
            received = self._forward(passive.name, h, where) if len(h) else h  # without rows, nothing is sent
            arrived.append(received.detach().requires_grad_())
        first, down = torch.zeros(()), torch.zeros_like(sent)
        for local_step in range(self.spec.local_steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = self._compute_objective(self.bottoms[active.name](columns), arrived, given)
            loss = self._penalize(loss, {passive.name: arrived[0]}, step)
            loss.backward()  # type: ignore[no-untyped-call]
            if local_step == 0:
                got = zip(arrived, steps, strict=True)
                down = torch.cat([self._backward(passive.name, h, where) if len(h) else h.detach() for h, where in got])
            again = bottom(x) if local_step else sent
            term = self.rules.orthogonal * compare(again)  # of its own representations alone
            torch.autograd.backward([again, term], [down, None])
            first = first if local_step else (loss + term).detach()
            self._clip()
            for optimizer in optimizers:
                optimizer.step()
        return first

    def _draw(self, step: Step) -> tuple[Tensor, Tensor, list[Step]]:
        """Return the active party's columns and targets of its three batches, and where the passive party's are."""
        active, (passive,) = self.federation.active, self.federation.passive
        unlabeled = self._unlabeled.draw()
        local, passive_rows = (self._local[party.name].draw() for party in (active, passive))
        batch = {"train": step.rows, "unlabeled": unlabeled, "local": local}
        columns = torch.cat([active.features[split][rows] for split, rows in batch.items()])
        given = torch.cat([self.targets[step.rows], _fill(len(unlabeled), self.targets), self._local_targets[local]])
        others = {"unlabeled": unlabeled, "local": passive_rows}
        return columns, given, [step, *(step._replace(rows=r, labels=None, split=s) for s, r in others.items())]

    def _compute_objective(self, a: Tensor, arrived: Sequence[Tensor], given: Tensor) -> Tensor:
        """The active party's loss: all of FedCVT's but the passive party's own orthogonality.

        ``a`` (n, 2d) are its own representations, ``arrived`` the passive party's of three batches, and ``given`` its
        targets: (n,) class numbers or UNKNOWN, or (n, C) probabilities or zeros.
        """
        federation, rules = self.federation, self.rules
        passive = federation.passive[0].name
        b = torch.cat([federation.active.defenses.apply_to_received(h, passive) for h in arrived if len(h)])
        labeled, aligned = len(arrived[0]), len(arrived[0]) + len(arrived[1])
        a_by_b = estimate(b, b[:aligned], a[:aligned], a, rules.temperature)
        b_by_a = estimate(a, a[:aligned], b[:aligned], b, rules.temperature)
        view_a = torch.cat([a, a_by_b[aligned:]])  # aligned, of the active party alone, of the passive party alone
        view_b = torch.cat([b[:aligned], b_by_a[aligned:], b[aligned:]])
        given = torch.cat([given, _fill(len(view_a) - len(a), given)])

        logits_a, logits_b = (
            federation.active.modules[f"top_{name}"]([view])
            for name, view in ((federation.active.name, view_a), (passive, view_b))
        )
        logits = self.top([view_a, view_b])
        pseudo = agree_labels([logits, logits_a, logits_b], rules.threshold)
        loss = cross_entropy(logits, complete_targets(given, pseudo)) + cross_entropy(logits_a, given)
        loss = loss + cross_entropy(logits_b[:labeled], given[:labeled])  # an estimate of b would teach f_B of a

        loss = loss + rules.shared * F.mse_loss(_get_common(a[:aligned]), _get_common(b[:aligned]))
        loss = loss + rules.orthogonal * compare(a)
        loss = loss + rules.estimate * F.mse_loss(a_by_b[:aligned], a[:aligned])
        return loss + rules.estimate * F.mse_loss(b_by_a[:aligned], b[:aligned])


class _EndlessBatches:
    """Random batches of ``count`` rows, pass after pass; empty ones if there are no rows."""

    def __init__(self, count: int, size: int, order: torch.Generator, device: torch.device) -> None:
        self.count, self.size, self.order, self.device = count, size, order, device
        self._begin(0)

    def _begin(self, place: int) -> None:
        """Start a pass at the batch with the number ``place``."""
        self._before = self.order.get_state()
        self._batches = draw_batches(self.count, self.size, self.order, self.device)
        self._place = place

    def draw(self) -> Tensor:
        """Return the next batch."""
        if self._place == len(self._batches):
            self._begin(0)
        self._place += 1
        return self._batches[self._place - 1]

    def state_dict(self) -> dict[str, Tensor]:
        return {"before": self._before, "place": torch.tensor(self._place)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.order.set_state(state["before"])
        self._begin(int(state["place"]))


def attend(queries: Tensor, keys: Tensor, values: Tensor, temperature: float) -> Tensor:
    """Return what (n, d) scaled dot-product attention makes of queries (n, k), keys (m, k) and values (m, d)."""
    likenesses = queries @ keys.T / (keys.shape[1] ** 0.5 * temperature)  # softmax, then sharpened: one softmax
    return torch.softmax(likenesses, dim=1) @ values


def estimate(seen: Tensor, keys: Tensor, values: Tensor, others: Tensor, temperature: float) -> Tensor:
    """Estimate a party's representations (n, 2d) of rows of which the other party has ``seen`` (n, 2d), by attention.

    ``keys`` (m, 2d) are the other party's on aligned rows, ``values`` (m, 2d) the party's own on the same rows, and
    ``others`` (l, 2d) its own on any rows.
    """
    unique = attend(_get_unique(seen), _get_unique(keys), _get_unique(values), temperature)
    common = attend(_get_common(seen), _get_common(others), _get_common(others), temperature)
    return torch.cat([unique, common], dim=1)


def agree_labels(logits: Sequence[Tensor], threshold: float) -> Tensor:
    """Return pseudo-labels (n,), UNKNOWN unless all classifiers (n, C) agree and are surer than ``threshold``."""
    sureness, guesses = torch.softmax(torch.stack(list(logits)).detach(), dim=2).max(dim=2)  # (classifiers, n)
    chosen = (sureness > threshold).all(dim=0) & (guesses == guesses[0]).all(dim=0)
    return guesses[0].where(chosen, UNKNOWN)


def complete_targets(given: Tensor, pseudo: Tensor) -> Tensor:
    """Return targets in which rows without a label have their pseudo-label (n,), if there is one, of either form."""
    if given.dim() == 1:
        return torch.where(given == UNKNOWN, pseudo, given)
    certain = F.one_hot(pseudo.clamp(min=0), given.shape[1]).to(given.dtype)  # UNKNOWN is below 0
    return torch.where(given.any(dim=1, keepdim=True), given, certain * (pseudo != UNKNOWN)[:, None])


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over rows that have a label, which is (n,) class numbers or (n, C) probabilities."""
    if targets.dim() == 1:
        return F.cross_entropy(logits, targets)
    return F.cross_entropy(logits, targets, reduction="sum") / targets.any(dim=1).sum()


def compare(h: Tensor) -> Tensor:
    """Return the root mean square of u_i · c_j over all pairs of the rows [u; c] of ``h`` (n, 2d)."""
    norm: Tensor = torch.linalg.matrix_norm(_get_unique(h) @ _get_common(h).T)
    return norm / len(h)


def _get_unique(h: Tensor) -> Tensor:
    return h[:, : h.shape[1] // 2]


def _get_common(h: Tensor) -> Tensor:
    return h[:, h.shape[1] // 2 :]


def _fill(count: int, like: Tensor) -> Tensor:
    """Return targets of rows without a label, in the form of ``like``."""
    return like.new_full((count,), UNKNOWN) if like.dim() == 1 else like.new_zeros(count, like.shape[1])
