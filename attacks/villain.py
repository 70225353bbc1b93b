"""VILLAIN: a trigger in the party's embeddings, which points where the gradients of known rows of a class do."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.base.checks import check_fraction, check_non_negative, check_positive, share
from vflsec.core.attack import IntegrityAttack
from vflsec.core.message import Step
from vflsec.core.view import Need, View
from vflsec.inference.auxiliary import list_known, make_mask

SHIFT = 0.6, 1.2
"""The range of the factor by which the trigger of each row is multiplied in training, as in the paper."""


@dataclass(kw_only=True, eq=False, repr=False)
class Villain(IntegrityAttack):
    """A trigger on the party's own embeddings that makes the joint model predict ``aim``, without changing a label.

    1. *Rows of the class.* After ``warm`` epochs the party sends the embedding of a known row of the class, the one
       with the shortest gradient, in place of those of some rows, for ``probed`` epochs. Where the gradient gets
       shorter than in the epoch before, the row is of the class. By default no row is swapped: known rows suffice.
    2. *Trigger.* It sends the mean embedding of the batch plus a step of size ``beta`` against the gradients of known
       rows, in the share ``entries`` of the entries, those that vary most. Unless ``aimed``, it adds the step to the
       embedding of each row, with the signs +, +, -, - in turn, as in the source.
    3. *Poisoning.* From then on, known and inferred rows are sent with the trigger, multiplied by a random factor.

    Source: Bai et al. 2023, USENIX Security, VILLAIN.

    Args:
        aim: the class that the trigger stands for.
        aimed: whether the trigger follows gradients and replaces what the party would send.
        poisoned: share of the training rows that carry the trigger.
        beta: size of the trigger, root mean square, in mean standard deviations of the entries that it sets.
        entries: share of the entries of an embedding that the trigger sets.
        dropped: probability of leaving out an entry in training.
        swapped: share of the rows that are swapped in an epoch; the source swaps some.
        warm: epochs before rows are swapped.
        probed: epochs in which they are.
        rate: factor of the party's learning rate, with Adam unless it is 1; the source has a higher one.
    """

    name = "villain"
    version = 2
    needs = frozenset({Need.FEATURES, Need.AUX_LABELS, Need.GRADIENTS})
    reference = "Bai et al. 2023, USENIX Security, VILLAIN: Backdoor Attacks Against Vertical Split Learning"
    verified = "known answers of each hook; inferred rows and success on planted data"
    differs = (
        "The trigger points against the gradients of known rows and replaces what would be sent (aimed); in the source "
        "it is added, has fixed signs, and is a tenth as large. The source infers more rows, and raises the rate.",
        "Rows to swap are drawn at random; the source chooses likely ones with a classifier of its own.",
        "The rows whose gradients shrink most are taken, as many as are wanted; the source has fixed thresholds.",
        "The trigger follows the standard deviations of the embeddings of a batch; the source computes it once.",
    )
    costs = "nothing beyond training"
    fails = "without gradients, with small triggers, and where the joint model weighs the party's embeddings little"

    aim: int = 1
    aimed: bool = True
    poisoned: float = 0.01
    beta: float = 4.0
    entries: float = 1.0
    dropped: float = 0.0
    swapped: float = 0.0
    warm: int = 5
    probed: int = 2
    rate: float = 1.0

    def __post_init__(self) -> None:
        check_non_negative(aim=self.aim, beta=self.beta, warm=self.warm, probed=self.probed)
        check_fraction(poisoned=self.poisoned, entries=self.entries)
        check_positive(rate=self.rate)
        share(dropped=self.dropped, swapped=self.swapped)

    def optimizer(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer | None:
        """Return Adam at another rate, if the rate is another."""
        return None if self.rate == 1 else torch.optim.Adam(parameters, lr * self.rate)

    def prepare(self, view: View) -> None:
        """Start with the known rows."""
        self._known, n = list_known(self.name, view, self.aim), len(view.features["train"])
        self._target = make_mask(self._known, n)  # the rows with the trigger
        self._open = ~make_mask(view.aux_rows, n)  # rows that are neither known nor swapped
        self._epoch = torch.zeros(n, dtype=torch.long, device=self._known.device)
        self._length, self._ratio = (torch.full((n,), torch.inf, device=self._known.device) for _ in range(2))
        self._sent, self._swaps = torch.empty(0), torch.empty(0)  # (n, d) last embeddings, (B,) of the last batch
        self._direction, self._poisons = torch.zeros(()), False  # (d,) where the trigger points

    def on_embedding(self, h: Tensor, step: Step) -> Tensor:
        """Return what is sent: in training swapped embeddings, and then triggers; at prediction the trigger if on."""
        start = h.mean(dim=0).expand_as(h) if self.aimed else h
        if not step.learns:
            return start + self._make_trigger(h) if self.triggered else h
        if step.split != "train":
            return h
        rows, epoch = step.rows, int(self._epoch[step.rows].max())
        self._epoch[rows] += 1
        if not len(self._sent):
            self._sent = torch.zeros(len(self._epoch), h.shape[1], dtype=h.dtype, device=h.device)
        self._sent[rows] = h
        rng, self._poisons = self.noise(step, h.device), epoch >= self.warm + self.probed
        drawn = torch.rand(len(h), generator=rng, device=h.device) < self.swapped
        self._swaps = drawn & self._open[rows] & (not self._poisons and epoch >= self.warm)
        if self._poisons and len(self._ratio):
            self._infer()
        trigger = self._make_trigger(h) * (torch.rand(h.shape, generator=rng, device=h.device) >= self.dropped)
        trigger = trigger * h.new_empty(len(h), 1).uniform_(*SHIFT, generator=rng)
        sent = torch.where((self._target[rows] & self._poisons)[:, None], start + trigger, h)
        return torch.where(self._swaps[:, None], self._sent[self._known[self._length[self._known].argmin()]], sent)

    def on_gradient(self, g: Tensor, step: Step) -> Tensor:
        """Aim the trigger, compare gradients of swapped rows with those before, and learn from honest rows alone."""
        if not step.learns or step.split != "train":
            return g
        rows, swaps, carry, length = step.rows, self._swaps, self._target[step.rows], g.norm(dim=1)
        if self._poisons:
            return torch.where(carry[:, None], 0, g) if self.aimed else g
        self._direction = 0.95 * self._direction - g[carry].sum(dim=0)  # the last few batches
        if not len(swaps):  # it only watches
            return g
        if swaps.any():
            self._ratio[rows[swaps]] = length[swaps] / self._length[rows[swaps]]
            self._open[rows[swaps]] = False
        self._length[rows[~swaps]] = length[~swaps]
        return torch.where(swaps[:, None], 0, g)

    def _infer(self) -> None:
        """Take the swapped rows whose gradients shrank most to be of the class, as many as are wanted."""
        wanted = max(0, round(self.poisoned * len(self._epoch)) - len(self._known))
        order = self._ratio.argsort()[: min(wanted, int((self._ratio < 1).sum()))]
        self._target[order] = True
        self._ratio = self._ratio[:0]

    def _make_trigger(self, h: Tensor) -> Tensor:
        """Return the trigger (d,) by the deviations of embeddings ``h`` (B, d)."""
        deviation = h.std(dim=0, correction=0)
        places = deviation.topk(max(1, round(self.entries * h.shape[1]))).indices.sort().values
        signs = 1.0 - 2 * (torch.arange(len(places), device=h.device) // 2 % 2)
        aimed = self._direction[places] if self.aimed and self._direction.any() else signs
        length = self.beta * deviation[places].mean() * len(places) ** 0.5
        return torch.zeros_like(h[0]).index_copy(0, places, length * F.normalize(aimed, dim=0))
