"""SecureBoost: gradient-boosted trees between parties, who exchange histograms."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.base.checks import check_fraction, check_non_negative, check_positive, check_positive_or_none, expect_known
from vflsec.base.errors import Diverged, UsageError
from vflsec.base.seeds import make_rng, seed_weights
from vflsec.cipher.arithmetic.histograms import check_size
from vflsec.core import hooks
from vflsec.core.federation import Federation
from vflsec.core.hooks import Hook
from vflsec.core.message import Kind, Step
from vflsec.core.method import Method, Progress
from vflsec.core.party import Party
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.methods.checkpoint import Stateful
from vflsec.methods.epochs import Epochs
from vflsec.methods.tree_growing import TreeGrowing, count_drawn_columns
from vflsec.protocols.histograms_masked import MaskedHistograms
from vflsec.protocols.histograms_paillier import PaillierHistograms
from vflsec.protocols.histograms_plain import PlainHistograms
from vflsec.trees.bins import Bins
from vflsec.trees.ensemble import Shape, Splits
from vflsec.trees.histograms import FRACTION_BITS, HistogramExchange, Rule

EXCHANGES: dict[str, type[HistogramExchange]] = {
    "plain": PlainHistograms,
    "masked": MaskedHistograms,
    "paillier": PaillierHistograms,
}
DEEPEST = 14
"""Levels of a tree whose nodes have numbers of 16 bits."""

MAX_NODES = 2**22

UNIT = 2.0**FRACTION_BITS


class SecureBoost(Method):
    """Gradient-boosted trees on the columns of all parties, grown level by level from histograms.

    In each round the active party sends first and second derivatives of the loss by row, encrypted. A passive party
    adds them up over the rows of each node and bin of its columns. The active party decrypts the sums and takes the
    best split of all parties. The owner of the column keeps the threshold and says which rows go where. To build the
    histograms of the next level, every passive party is told in which node each row is. Prediction asks the owner of
    each split.

    Trees and splits are those that one party with all columns would choose, up to bins. A number of C > 2 classes takes
    C trees in each round.

    Source: Cheng et al. 2021 (SecureBoost), arXiv 1901.08755, algorithms 1 to 3; Chen et al. 2021 (SecureBoost+), arXiv
    2110.10927, for subtraction of histograms, trees in turn and layers.

    Args:
        train: not read: trees have settings of their own.
        model: not read.
        exchange: of histograms: ``masked`` (sealed numbers, the messages of an encrypted run), ``paillier``, or
            ``plain``, in which passive parties see the derivatives.
        rounds: of boosting, at most.
        depth: levels of splits of a tree, at most 14.
        learning_rate: shrinkage of each tree.
        bins: of a number; a category has one for each value.
        l2: penalty on the values of leaves.
        leaf_rows: at least, in each leaf.
        leaf_hessian: sum of second derivatives, at least, in each leaf.
        least_gain: that a split must exceed.
        rows: share of the training rows that each round draws.
        columns: share of its columns that each party draws for each tree.
        patience: rounds without a better log loss on validation rows after which no tree is added; None for all rounds.
        alone: first rounds whose trees the active party grows by itself.
        order: whose columns a tree may use: ``together`` those of all parties, ``turns`` those of one party, each round
            another, ``layers`` those of passive parties in the first ``passive_levels`` levels and then the active
            party's.
        passive_levels: levels of ``layers``.
        graft: whether leaves get values by the true labels where a defense has changed the labels that trees are grown
            by (Grafting-LDP).
        key_bits: of ``paillier``.
    """

    name = "secureboost"
    reference = "Cheng et al. 2021 (SecureBoost), arXiv 1901.08755"
    differs: ClassVar[tuple[str, ...]] = (
        "Only the smaller child of two gets a histogram; the other is the difference, as in SecureBoost+.",
        "A category is split one value against all others.",
        "Bins are the same in all trees; the paper names no binning.",
        "Numbers of rows in bins are in clear, as in FATE, so that leaves have a least number of rows.",
    )
    messages: ClassVar[Mapping[str, frozenset[Kind]]] = {
        "train": frozenset({Kind.GRADIENT, Kind.NODES, Kind.HISTOGRAM, Kind.CIPHERTEXT, Kind.CONTROL})
    }
    receives: ClassVar[Mapping[str, frozenset[Kind]]] = {
        "passive": frozenset({Kind.GRADIENT, Kind.NODES}),
        "active": frozenset({Kind.NODES, Kind.HISTOGRAM, Kind.CONTROL}),
    }
    learns: ClassVar[Mapping[str, frozenset[Hook]]] = {"train": hooks.ON_LABELS | {hooks.GRADIENT}}
    embeds = False
    search = {"rounds": (10, 50), "depth": (2, 6), "learning_rate": (0.1, 0.5)}  # noqa: RUF012
    alone: int = 0
    order: Literal["together", "turns", "layers"] = "together"

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Show the defaults of a member of the family."""
        super().__init_subclass__(**arguments)
        cls.leave_out((), alone=cls.alone, order=cls.order)

    def __init__(
        self,
        train: TrainSpec,
        model: ModelSpec,
        *,
        exchange: Literal["plain", "masked", "paillier"] = "masked",
        rounds: int = 20,
        depth: int = 4,
        learning_rate: float = 0.3,
        bins: int = 32,
        l2: float = 1.0,
        leaf_rows: int = 20,
        leaf_hessian: float = 0.001,
        least_gain: float = 0.0,
        rows: float = 1.0,
        columns: float = 1.0,
        patience: int | None = None,
        alone: int | None = None,
        order: Literal["together", "turns", "layers"] | None = None,
        passive_levels: int = 2,
        graft: bool = False,
        key_bits: int = 2048,
    ) -> None:
        super().__init__(train, model)
        self.alone = self.alone if alone is None else alone
        self.order = self.order if order is None else order
        expect_known(EXCHANGES, exchange=exchange)
        expect_known(("together", "turns", "layers"), order=self.order)
        check_positive(rounds=rounds, depth=depth, leaf_rows=leaf_rows, passive_levels=passive_levels)
        check_fraction(learning_rate=learning_rate, rows=rows, columns=columns)
        check_positive_or_none(patience=patience)
        check_non_negative(l2=l2, leaf_hessian=leaf_hessian, least_gain=least_gain, alone=self.alone)
        if self.alone > rounds:
            raise UsageError(f"expected alone of at most rounds={rounds}, got {self.alone}")
        if self.order == "layers" and passive_levels > depth:
            raise UsageError(f"expected passive_levels of at most depth={depth}, got {passive_levels}")
        if depth > DEEPEST:
            raise UsageError(f"expected depth of at most {DEEPEST}, got {depth}: grow more rounds instead")
        if not 2 <= bins <= 2**15:
            raise UsageError(f"expected 2 <= bins <= {2**15}, got {bins}")
        check_size(key_bits=key_bits)
        self.exchange, self.key_bits, self.graft = exchange, key_bits, graft
        self.rounds, self.depth, self.bins, self.learning_rate = rounds, depth, bins, learning_rate
        self.rule = Rule(l2, leaf_rows, leaf_hessian, least_gain)
        self.rows, self.columns, self.patience, self.passive_levels = rows, columns, patience, passive_levels
        self._bins: dict[str, Bins] = {}
        self._exchanges: dict[str, HistogramExchange] = {}

    @classmethod
    def messages_in(cls, phase: str, options: Mapping[str, Any]) -> frozenset[Kind]:  # noqa: ARG003  (one phase)
        """Return the kinds of messages: derivatives are in clear in the exchange ``plain`` alone."""
        plain = options.get("exchange", "masked") == "plain"
        return cls.messages["train"] - {Kind.CIPHERTEXT if plain else Kind.GRADIENT}

    def build(self, federation: Federation) -> None:
        """Choose bins, and make room for the trees."""
        outputs = federation.n_classes if federation.n_classes > 2 else 1
        trees = self.rounds * outputs
        if trees * 2**self.depth > MAX_NODES:
            raise UsageError(
                f"expected at most {MAX_NODES:,} nodes in all trees, got room for {trees * 2**self.depth:,}: lower "
                f"rounds or depth"
            )
        for party in federation.parties.values():
            if not torch.isfinite(party.features["train"]).all():
                raise Diverged(f"{self.name} expects finite columns, got nan or infinity at {party.name}")
            self._bins[party.name] = Bins(party.layout, party.features["train"], self.bins)
            party.modules["splits"] = Splits(trees, self.depth, party.n_features)
        federation.active.modules["shape"] = Shape(trees, self.depth, outputs, len(federation.parties))
        for number, defense in enumerate(federation.active.defenses):
            with seed_weights(federation.seed, "model", "defense", number):
                rng = make_rng(federation.seed, "defense", number, device=federation.device)
                defense.prepare({}, n_classes=federation.n_classes, rng=rng)
        options = {"bits": self.key_bits} if self.exchange == "paillier" else {}
        for party in federation.passive:
            self._exchanges[party.name] = EXCHANGES[self.exchange](party, federation.active, **options)
        for party in federation.parties.values():
            party.modules.to(federation.device)

    def check(self, federation: Federation) -> None:
        """Raise UsageError if early stopping has no validation rows."""
        if self.patience is not None and not federation.n_rows("val"):
            raise UsageError("patience needs validation rows, got none: use a larger --set data.validation=0.1")

    def cryptography(self, federation: Federation) -> float:
        """Return an estimate of the CPU seconds of cryptography, if no node is withheld or too small to be split."""
        outputs, rows = self.shape(federation).outputs, self._count_drawn(federation)
        heard, names = self._list_receivers(federation), list(federation.parties)
        total = 0.0
        for name, exchange in self._exchanges.items():
            rounds = [round_ for round_, receivers in enumerate(heard) if name in receivers]
            number, trees = names.index(name), [round_ * outputs for round_ in rounds]
            asked = ([number in self.candidates(t, k, outputs, len(names)) for k in range(self.depth)] for t in trees)
            levels = max(map(sum, asked), default=0)
            passes = 1 + 0.5 * (levels - 1)  # of two children, the smaller one is added up
            columns = len(self._bins[name].start)
            drawn = count_drawn_columns(columns, self.columns)
            n_bins = round(len(self._bins[name]) * drawn / max(1, columns))
            total += exchange.seconds(len(rounds), outputs, rows, drawn, n_bins, passes)
        return total

    def public_options(self) -> dict[str, float]:
        """Return what splits and the values of leaves depend on beside derivatives and columns."""
        rule = self.rule
        return {"learning_rate": self.learning_rate, "l2": rule.l2, "bins": self.bins, "leaf_rows": rule.least_rows}

    def remedy(self, federation: Federation) -> str:
        """Return which option lets trees have splits, if they have none."""
        if (self.shape(federation).owner >= 0).any():
            return ""
        drawn, needed = self._count_drawn(federation), 2 * self.rule.least_rows
        if drawn < needed:
            return (
                f"no tree has a split, which needs {needed} rows in a round with leaf_rows={self.rule.least_rows}, and "
                f"there are {drawn}: lower leaf_rows"
            )
        return "no tree has a split: lower leaf_rows, leaf_hessian or least_gain"

    def max_releases(self, phase: str, federation: Federation) -> int | None:
        """Return the rounds in which a passive party hears a row's derivatives, once in each; the most of all."""
        heard = Counter(name for receivers in self._list_receivers(federation) for name in receivers)
        return max(heard.values(), default=0)

    def shape(self, federation: Federation) -> Shape:
        """Return the active party's part of the trees."""
        return federation.active.module("shape", Shape)

    def train(self, phase: str, federation: Federation, progress: Progress) -> list[float]:
        """Grow the trees and return the mean log loss of the training rows by round."""
        shape = self.shape(federation)
        boosting = _Boosting(self, federation, phase)
        parts, shares = (federation, self._bins, self._exchanges, shape), (self.candidates, self.columns)
        growing = TreeGrowing(*parts, phase, self.rule, self.depth, *shares)
        growing.announce()  # before a phase that was interrupted goes back to its traffic
        models = {f"models/{party.name}": party.modules for party in federation.parties.values()}
        kept: dict[str, Stateful] = {**models, "scores": boosting}
        epochs = Epochs(
            federation, phase, progress, self.rounds, kept=kept, optimizers=[], done=lambda: boosting.is_stopped
        )
        for round_ in epochs:
            first = round_ * shape.outputs
            rows = self._draw_rows(federation, round_)
            derivatives = boosting.release(rows, first, self._find_receivers(federation, round_), self._exchanges)
            grown = [growing.grow(first + k, k, rows, derivatives, boosting.labels) for k in range(shape.outputs)]
            boosting.add(first, torch.stack(grown, dim=1), rows)
            shape.grown.fill_(first + shape.outputs)
            epochs.end(boosting.loss())
            if self.patience is not None:
                boosting.validate(self.leaves(federation, "val", first, shape.outputs, "validate"), first)
        if self.patience is not None:
            shape.grown.fill_(boosting.best * shape.outputs)
        return epochs.losses

    def candidates(self, tree: int, level: int, outputs: int, parties: int) -> list[int]:
        """Return the numbers of the parties whose columns may split a level of a tree, the active party being 0."""
        round_ = tree // outputs
        if round_ < self.alone:
            return [0]
        if self.order == "turns":
            return [round_ % parties]
        if self.order == "layers":
            return list(range(1, parties)) if level < self.passive_levels else [0]
        return list(range(parties))

    def _list_receivers(self, federation: Federation) -> list[list[str]]:
        return [self._find_receivers(federation, round_) for round_ in range(self.rounds)]

    def _find_receivers(self, federation: Federation, round_: int) -> list[str]:
        """Return the names of the passive parties whose columns are candidates in some level of a round."""
        names, outputs = list(federation.parties), self.shape(federation).outputs
        tree, count = round_ * outputs, len(names)
        asked = {number for level in range(self.depth) for number in self.candidates(tree, level, outputs, count)}
        return [names[number] for number in sorted(asked - {0})]

    def _draw_rows(self, federation: Federation, round_: int) -> Tensor:
        """Return the training rows of one round, sorted."""
        n = federation.n_rows("train")
        if self.rows == 1:
            return torch.arange(n, device=federation.device)
        order = torch.randperm(n, generator=make_rng(federation.seed, "rows", round_))
        return order[: self._count_drawn(federation)].sort().values.to(federation.device)

    def _count_drawn(self, federation: Federation) -> int:
        """Return the number of training rows of one round."""
        return max(1, round(self.rows * federation.n_rows("train")))

    @torch.no_grad()
    def predict(self, federation: Federation, split: str) -> Tensor:
        """Return logits (n, C); of two classes the first has zeros."""
        shape = self.shape(federation)
        leaves = self.leaves(federation, split, 0, int(shape.grown), "predict")
        return self.decode_scores(federation.active, shape.start + shape.logits(leaves), grafted=self.graft).float()

    def decode_scores(self, active: Party, scores: Tensor, *, grafted: bool) -> Tensor:
        """Return logits (n, C) of scores (n, C'): grafted leaves, of the true labels, are in no code."""
        logits = torch.cat([torch.zeros_like(scores), scores], dim=1) if scores.shape[1] == 1 else scores
        return logits if grafted else active.defenses.decode_logits(logits.float())

    def leaves(self, federation: Federation, split: str, first: int, trees: int, phase: str) -> Tensor:
        """Return the leaf (n, trees) of each row, in trees from number ``first`` on; owners of splits are asked."""
        active, owner = federation.active, self.shape(federation).owner
        n = federation.n_rows(split)
        rows = torch.arange(n, device=federation.device)
        numbers = torch.arange(first, first + trees, device=federation.device)
        nodes = torch.ones(n, trees, dtype=torch.long, device=federation.device)
        for _ in range(self.depth):
            inner = nodes < owner.shape[1]
            owners = torch.where(inner, owner[numbers, nodes.clamp(max=owner.shape[1] - 1)].long(), -1)
            for number, party in enumerate(federation.parties.values()):
                asked = torch.where(owners == number, nodes, 0)
                if not asked.any():
                    continue
                children = self._ask_owner(party, active, asked, rows, split, first, phase)
                nodes = torch.where(children > 0, children, nodes)
        return nodes

    def _ask_owner(
        self, party: Party, active: Party, nodes: Tensor, rows: Tensor, split: str, first: int, phase: str
    ) -> Tensor:
        """Return the child (n, T) of each node that ``party`` splits, or 0."""
        splits = party.module("splits", Splits)
        if party is active:
            return splits.send_down(party.features[split], first, nodes)
        place: dict[str, Any] = {"step": first, "phase": phase, "rows": rows, "split": split}
        question = active.send(Kind.NODES, {"value": nodes.short()}, to=party.name, **place)
        answer = splits.send_down(party.features[split], first, question.payload["value"].long())
        value = party.send(Kind.NODES, {"value": answer.short()}, to=active.name, **place).payload["value"]
        children: Tensor = value.long()
        return children

    def representation(self, party: Party) -> nn.Module:
        """Return on which side of each of its own splits a row is."""
        return party.modules["splits"]


SecureBoost.leave_out((), alone=SecureBoost.alone, order=SecureBoost.order)


class _Boosting:
    """The scores of the training rows, and the derivatives by them.

    Trees are grown by the labels that the active party's defenses leave. With ``graft``, leaves are fitted to the true
    labels by scores of their own; nothing that leaves the active party depends on these.
    """

    def __init__(self, method: SecureBoost, federation: Federation, phase: str) -> None:
        self.method, self.federation, self.phase = method, federation, phase
        self.shape = method.shape(federation)
        active, classes = federation.active, federation.n_classes
        rng = federation.get_label_stream(phase)
        true = active.labels["train"]
        self.labels, targets = active.defenses.training_targets(
            true, active.features["train"], n_classes=classes, rng=rng
        )
        self.targets = {"grown": self._encode_classes(targets)}
        if method.graft:
            self.targets["grafted"] = self._encode_classes(true)
        start = self._start(self.targets["grafted" if method.graft else "grown"])
        self.shape.start.copy_(start)
        self.scores = {name: self._start(target).expand(len(true), -1).clone() for name, target in self.targets.items()}
        val = active.labels.get("val", true[:0])
        self.val, self.val_scores = val, self._start(self.targets["grown"]).expand(len(val), -1).clone()
        self.fitted = {name: torch.zeros_like(self.shape.value) for name in self.targets}
        self.fitted[list(self.targets)[-1]] = self.shape.value
        self.round, self.best, self.best_loss = 0, 0, float("inf")

    @property
    def is_stopped(self) -> bool:
        """Whether validation rows gain no more."""
        patience = self.method.patience
        return patience is not None and self.round >= self.best + patience

    def _encode_classes(self, targets: Tensor) -> Tensor:
        """Return targets (n, C') in double precision, one output for two classes."""
        classes = self.federation.n_classes
        soft = targets if targets.is_floating_point() else F.one_hot(targets, classes)
        return soft[:, 1:].double() if classes == 2 else soft.double()

    def _start(self, targets: Tensor) -> Tensor:
        """Return the logits (C') of the shares of classes."""
        share = targets.mean(dim=0).clamp(1e-6, 1 - 1e-6)
        return share.logit() if self.shape.outputs == 1 else share.log()

    def _derive_loss(self, name: str) -> tuple[Tensor, Tensor]:
        """Return first and second derivatives (n, C') of the log loss by the scores."""
        scores = self.scores[name]
        p = scores.sigmoid() if self.shape.outputs == 1 else scores.softmax(dim=1)
        return p - self.targets[name], p * (1 - p)

    def release(
        self, rows: Tensor, step: int, receivers: Sequence[str], exchanges: Mapping[str, HistogramExchange]
    ) -> NDArray[np.int64]:
        """Send the derivatives of ``rows``, after the active party's defenses; return what was sent (B, 2 C').

        All receivers get the same release, so that they cannot average noise away together.
        """
        active = self.federation.active
        value = torch.cat(self._derive_loss("grown"), dim=1)[rows]
        if receivers:
            place = Step(step, self.phase, rows, self.labels[rows])
            mean = active.defend(Kind.GRADIENT, value / len(rows), place, to=receivers[0])  # of the mean loss, as ever
            value = mean * len(rows)
        if not torch.isfinite(value).all():
            raise Diverged(f"the derivatives are not finite in round {self.round}: lower learning_rate")
        units = (value * UNIT).round().cpu()
        largest = 2.0**53 / len(rows)
        if units.abs().max() >= largest:
            raise Diverged(
                f"expected derivatives below {largest / UNIT:g} for exact sums over {len(rows)} rows, got "
                f"{float(units.abs().max()) / UNIT:g}: lower the noise"
            )
        sent: NDArray[np.int64] = units.long().numpy()
        for name in receivers:
            exchanges[name].share(sent, rows, step=step, phase=self.phase)
            if self.method.exchange != "plain":  # it sees the nodes that follow from them
                active.count_release(Kind.GRADIENT, rows, to=name, phase=self.phase)
        derivatives = torch.from_numpy(sent / UNIT)
        active.note(Kind.GRADIENT, {"value": derivatives}, sender=active.name, step=step, phase=self.phase, rows=rows)
        return sent

    def add(self, first: int, leaves: Tensor, rows: Tensor) -> None:
        """Fit the values of a round's trees to the derivatives of the drawn ``rows``; ``leaves`` (n, C') are of all."""
        for name in self.targets:
            gradients, hessians = self._derive_loss(name)
            for k in range(self.shape.outputs):
                values = self._values(gradients[:, k], hessians[:, k], leaves[:, k], rows)
                self.scores[name][:, k] += values[leaves[:, k]]
                self.fitted[name][first + k] = values
        self.round += 1

    def _values(self, first: Tensor, second: Tensor, leaves: Tensor, rows: Tensor) -> Tensor:
        """Return -learning_rate G / (H + l2) of every node, of inner ones by the rows that pass through it."""
        method, n_nodes = self.method, self.shape.value.shape[1]
        sums = torch.zeros(n_nodes, 2, dtype=torch.float64, device=leaves.device)
        sums.index_add_(0, leaves[rows], torch.stack([first[rows], second[rows]], dim=1))
        for node in range(n_nodes // 2 - 1, 0, -1):
            sums[node] += sums[2 * node] + sums[2 * node + 1]
        return -method.learning_rate * sums[:, 0] / (sums[:, 1] + method.rule.l2).clamp_min(1e-12)

    def loss(self) -> float:
        """Return the mean log loss of the training rows."""
        name = list(self.targets)[-1]
        log_loss = F.binary_cross_entropy_with_logits if self.shape.outputs == 1 else F.cross_entropy
        return float(log_loss(self.scores[name], self.targets[name]))

    def validate(self, leaves: Tensor, first: int) -> None:
        """Add a round's trees to the scores of validation rows, and keep the number of rounds of the best loss.

        Values are those of ``grown``: passive parties see when training stops.
        """
        self.val_scores += self.shape.logits(leaves, first, self.fitted["grown"])
        logits = self.method.decode_scores(self.federation.active, self.val_scores, grafted=False)
        loss = float(F.cross_entropy(logits, self.val))
        if loss < self.best_loss:
            self.best, self.best_loss = self.round, loss

    def state_dict(self) -> dict[str, Tensor]:
        """Return the scores and the best round."""
        counts = torch.tensor([self.round, self.best, self.best_loss], dtype=torch.float64)
        return {"counts": counts, "val": self.val_scores, **{f"of/{name}": x for name, x in self.scores.items()}}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go back to a state that ``state_dict`` returned."""
        self.round, self.best = (int(count) for count in state["counts"][:2])
        self.best_loss = float(state["counts"][2])
        self.val_scores = state["val"].to(self.val_scores)
        self.scores = {name: state[f"of/{name}"].to(scores) for name, scores in self.scores.items()}
