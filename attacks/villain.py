"""VILLAIN: a trigger in the party's embeddings, on rows whose class it infers by swapping embeddings."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from vflsec.base.checks import check_fraction, check_non_negative, check_positive, share
from vflsec.core.attack import IntegrityAttack
from vflsec.core.message import Step
from vflsec.core.view import Need, View
from vflsec.inference.auxiliary import list_known, make_mask

SHIFT = 0.6, 1.2
"""The range of the factor by which the trigger of each row is multiplied in training, as in the paper."""


class Villain(IntegrityAttack):
    """A trigger on the party's own embeddings that makes the joint model predict ``target``, without changing a label.

    1. *Rows of the class.* After ``warm`` epochs the party sends the embedding of a known row of the class, the one
       with the shortest gradient, in place of those of some rows, for ``probed`` epochs. Where the gradient gets
       shorter than in the epoch before, the row is of the class.
    2. *Trigger.* In the share ``entries`` of the embedding that vary most, it adds ``beta`` times their mean standard
       deviation, with the signs +, +, -, - in turn.
    3. *Poisoning.* From then on, known and inferred rows are sent with the trigger. Entries are dropped at random and
       the rest is multiplied by a random factor, so that the joint model learns the whole trigger.

    The party learns at ``rate`` times the rate of the others, so that the joint model relies on its embeddings.

    Source: Bai et al. 2023, USENIX Security, VILLAIN.

    Args:
        target: the class that the trigger stands for.
        poisoned: share of the training rows that carry the trigger.
        beta: size of the trigger, in standard deviations of embeddings.
        entries: share of the entries of an embedding that the trigger sets.
        dropped: probability of leaving out an entry in training.
        swapped: share of the rows that are swapped in an epoch.
        warm: epochs before rows are swapped.
        probed: epochs in which they are.
        rate: factor of the party's learning rate.
    """

    name = "villain"
    needs = frozenset({Need.FEATURES, Need.AUX_LABELS, Need.GRADIENTS})
    reference = "Bai et al. 2023, USENIX Security, VILLAIN: Backdoor Attacks Against Vertical Split Learning"
    verified = "known answers of each hook; inferred rows and success on planted data"
    differs = (
        "Rows to swap are drawn at random; the source chooses likely ones with a classifier of its own.",
        "The rows whose gradients shrink most are taken, as many as are wanted; the source has fixed thresholds.",
        "The trigger follows the standard deviations of the embeddings of a batch; the source computes it once.",
        "The party's rate is higher throughout; the source lowers it when it poisons.",
    )
    costs = "nothing beyond training"
    fails = "without gradients, with small triggers, and where the joint model weighs the party's embeddings little"

    def __init__(
        self,
        *,
        target: int = 1,
        poisoned: float = 0.01,
        beta: float = 4.0,
        entries: float = 0.75,
        dropped: float = 0.25,
        swapped: float = 0.2,
        warm: int = 5,
        probed: int = 2,
        rate: float = 5.0,
    ) -> None:
        check_non_negative(target=target, beta=beta, warm=warm, probed=probed)
        check_fraction(poisoned=poisoned, entries=entries)
        check_positive(rate=rate)
        share(dropped=dropped, swapped=swapped)
        self.aim: int = target
        self.poisoned, self.beta, self.entries, self.dropped = poisoned, beta, entries, dropped
        self.swapped, self.warm, self.probed, self.rate = swapped, warm, probed, rate

    def optimizer(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """Return Adam at a higher rate."""
        return torch.optim.Adam(parameters, lr * self.rate)

    def prepare(self, view: View) -> None:
        """Start with the known rows.

        Raises:
            UsageError: no such class, or no known row of it.
        """
        self._known, n = list_known(self.name, view, self.aim), len(view.features["train"])
        self._target = make_mask(self._known, n)  # the rows with the trigger
        self._open = ~make_mask(view.aux_rows, n)  # rows that are neither known nor swapped
        self._epoch = torch.zeros(n, dtype=torch.long, device=self._known.device)
        self._sent = torch.empty(0)  # (n, d) the last embedding of each row
        self._length, self._ratio = (torch.full((n,), torch.inf, device=self._known.device) for _ in range(2))
        self._swaps = torch.empty(0)  # (B,) of the last batch

    def on_embedding(self, h: Tensor, step: Step) -> Tensor:
        """Return what is sent: in training swapped embeddings, and then triggers; at prediction the trigger if on."""
        if not step.learns:
            return h + self._make_trigger(h) if self.triggered else h
        if step.split != "train":
            return h
        rows, epoch = step.rows, int(self._epoch[step.rows].max())
        self._epoch[rows] += 1
        if not len(self._sent):
            self._sent = torch.zeros(len(self._epoch), h.shape[1], dtype=h.dtype, device=h.device)
        self._sent[rows] = h
        rng, poisons = self.noise(step, h.device), epoch >= self.warm + self.probed
        drawn = torch.rand(len(h), generator=rng, device=h.device) < self.swapped
        self._swaps = drawn & self._open[rows] & (not poisons and epoch >= self.warm)
        if poisons and len(self._ratio):
            self._infer()
        trigger = self._make_trigger(h) * (torch.rand(h.shape, generator=rng, device=h.device) >= self.dropped)
        low, high = SHIFT
        trigger = trigger * (low + (high - low) * torch.rand(len(h), 1, generator=rng, device=h.device))
        sent = torch.where((self._target[rows] & poisons)[:, None], h + trigger, h)
        clearest = self._known[self._length[self._known].argmin()]
        return torch.where(self._swaps[:, None], self._sent[clearest], sent)

    def on_gradient(self, g: Tensor, step: Step) -> Tensor:
        """Compare the gradients of swapped rows with those before, and learn nothing from them."""
        if not step.learns or not len(self._swaps):
            return g
        rows, swaps, length = step.rows, self._swaps, g.norm(dim=1)
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
        signs = 1 - 2 * (torch.arange(len(places), device=h.device) // 2 % 2)
        return torch.zeros_like(deviation).index_copy(0, places, self.beta * deviation[places].mean() * signs)
