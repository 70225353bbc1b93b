"""Backdoor: gradient replacement makes the joint model associate a trigger with a class."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vflsec.base.checks import check_fraction, check_non_negative, check_positive
from vflsec.base.errors import UsageError
from vflsec.core.attack import IntegrityAttack
from vflsec.core.message import Step
from vflsec.core.view import Need, View
from vflsec.inference.auxiliary import list_known, make_mask


@dataclass(kw_only=True, eq=False, repr=False)
class Backdoor(IntegrityAttack):
    """A trigger on the party's own columns that makes the joint model predict ``aim``, without changing a label.

    The party knows some rows of the target class, and poisons some others, which carry the trigger in training. A known
    row is sent with the columns of a poisoned one, so that the top model sees the trigger together with the target
    class. The gradient of that row points from the trigger to the target. Multiplied by ``gamma``, it replaces the
    gradient of every poisoned row, so that the party ignores their true class. For a poisoned row the party sends
    another row's embedding; otherwise the top model would learn that the trigger stands for all classes.

    With ``replay`` the party trains honestly, and its trigger is the columns of a known row of the target class: it
    sends what it would send for that row. This needs no gradient. A defense helps only as far as the joint model then
    weighs this party's columns less.

    The trigger alone may change predictions, so the table shows its effect on the honest model beside the success.

    Source: Liu et al. 2020 (arXiv 2007.03608) and 2021 (arXiv 2112.05409), gradient replacement, gamma 10; released
    code of VFLAIR (Zou et al. 2024, arXiv 2310.09827). Replay: ``ReplayAttack`` of SecretFlow.

    Args:
        aim: the class that the trigger stands for.
        gamma: factor of the replaced gradient.
        poisoned: share of the training rows that carry the trigger.
        columns: how many of the party's last columns, encoded, the trigger sets.
        value: of the trigger; None for the largest and the smallest value of the columns alternately, a rare
            combination of values within the range.
        replay: whether to replay rows of the target class in place of poisoning; the options but ``aim`` are unused.
    """

    name = "backdoor"
    needs = frozenset({Need.FEATURES, Need.AUX_LABELS, Need.GRADIENTS})
    reference = "Liu et al. 2020, arXiv 2007.03608; Zou et al. 2024 (VFLAIR), arXiv 2310.09827, released code"
    verified = "known answers of each hook; success on planted data"
    differs = (
        "A poisoned row is sent as another row's embedding; the source sends a random vector.",
        "Known rows of the target class carry the trigger in training, as in VFLAIR's code; in the source they do not.",
        "A replayed row is embedded anew; SecretFlow's attack sends its embedding of the last epoch.",
        "The trigger sets the last columns of a table to extreme values; the source has a pattern of pixels.",
    )
    costs = "nothing beyond training"
    fails = "without gradients, or under noise that is larger than they are; replay, where own columns decide little"

    aim: int = 1
    gamma: float = 10.0
    poisoned: float = 0.01
    columns: int = 2
    value: float | None = None
    replay: bool = False

    def __post_init__(self) -> None:
        check_non_negative(aim=self.aim, gamma=self.gamma)
        check_fraction(poisoned=self.poisoned)
        check_positive(columns=self.columns)
        self._replacement: Tensor | None = None  # (d,) mean of the last gradients of known rows

    def prepare(self, view: View) -> None:
        """Choose the values of the trigger and the poisoned rows, none of which is known to belong to the target class.

        Raises:
            UsageError: no such class, no known row of it, or fewer columns than the trigger sets.
        """
        x = view.features["train"]
        known = list_known(self.name, view, self.aim)
        if self.columns > x.shape[1]:
            raise UsageError(f"backdoor: expected columns <= {x.shape[1]} of {view.party}, got {self.columns}")
        last = x[:, -self.columns :]
        high = torch.arange(self.columns, device=x.device) % 2 == 0
        ends = torch.where(high, last.amax(dim=0), last.amin(dim=0))
        self._values = ends if self.value is None else torch.full_like(ends, self.value)
        self._known, self._rows = make_mask(known, len(x)), x[known]
        others = (~self._known).nonzero()[:, 0]
        order = torch.randperm(len(others), generator=torch.Generator().manual_seed(self._seed)).to(x.device)
        chosen = others[order[: max(1, round(self.poisoned * len(x)))]]
        self._poisoned = make_mask(chosen, len(x))
        self._bait = self.trigger(x[chosen])

    def trigger(self, x: Tensor) -> Tensor:
        """Return the columns ``x`` (B, p) with the last ones set, or those of known rows of the class in turn."""
        if self.replay:
            return self._rows[torch.arange(len(x), device=x.device) % len(self._rows)]
        return torch.cat([x[:, : -self.columns], self._values.expand(len(x), -1)], dim=1)

    def on_features(self, x: Tensor, step: Step) -> Tensor:
        """Put the trigger on poisoned rows, and replace each known row by one of these."""
        if not self._acts(step):
            return x
        drawn = torch.randint(len(self._bait), (len(x),), generator=self.joint_noise(step, x.device), device=x.device)
        x = torch.where(self._poisoned[step.rows, None], self.trigger(x), x)
        return torch.where(self._known[step.rows, None], self._bait[drawn], x)

    def on_embedding(self, h: Tensor, step: Step) -> Tensor:
        """Send the embedding of another row for each poisoned row."""
        if not self._acts(step) or self._poisoned[step.rows].all():
            return h
        poisoned = self._poisoned[step.rows]
        others = h[~poisoned]
        drawn = torch.randint(len(others), (len(h),), generator=self.joint_noise(step, h.device), device=h.device)
        return torch.where(poisoned[:, None], others[drawn], h)

    def on_gradient(self, g: Tensor, step: Step) -> Tensor:
        """Replace the gradients of poisoned rows, by zero before the first gradient of a known row."""
        if not self._acts(step):
            return g
        known = self._known[step.rows]
        if known.any():
            self._replacement = g[known].mean(dim=0)
        replacement = torch.zeros_like(g[0]) if self._replacement is None else self._replacement
        return torch.where(self._poisoned[step.rows, None], self.gamma * replacement, g)

    def _acts(self, step: Step) -> bool:
        """Whether poisoned or known rows can be among those of ``step``, and are treated otherwise."""
        return step.learns and step.split == "train" and not self.replay
