"""DP-SGD: what a party's own models learn from one row is clipped, and noised."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vflsec.core.errors import UsageError
from vflsec.defenses.gaussian_dp import Accountant, GaussianDP

BATCH_NORM = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


class DPSGD(GaussianDP):
    """In each update of a party's own models, each row's gradient is clipped to L2 norm C, and the sum gets noise.

    The gradient of a row is that of its own loss with respect to all parameters of the party's models (its bottom
    model; the active party's bottom and top), of one norm. What its optimizer reads is
    (sum of clipped gradients + N(0, (sigma · 2 C)^2)) / B, for B rows in the batch; sigma is the strength, the
    deviation over the sensitivity 2 C, that is half of the literature's noise multiplier, which is over C.
    The optimizer, its momentum and its weight decay come after that, and spend nothing.

    Source: Abadi et al. 2016 (arXiv 1607.00133), algorithm 1; gradients by row and accounting: opacus.

    Accounting: an epoch visits every row once, in shuffled batches, not in batches drawn by coins (Poisson). So no
    amplification by sampling is claimed, whose accounts are wrong for shuffled batches (Chua et al. 2024, arXiv
    2403.17673), and which the other parties, who know what rows a batch has, would undo. Neighbors differ by the
    replacement of one row, whose clipped gradient moves the sum by 2 C. A row takes part in E updates, the number of
    epochs times ``train.local_steps``: E Gaussian mechanisms of noise multiplier sigma, composed at sampling rate 1.
    Early stopping makes fewer; epsilon is told for all that were planned.

    Guarantee: (epsilon, delta)-differential privacy of one training row (the party's columns of it; the active party's
    columns and the label) in all updates of this party's models, whatever messages the party received. So it bounds
    what can be told of the row by whoever reads these models, or what they make of other rows. It does not bound

    * what is said about the row itself: its embedding goes up, and its gradient comes down, in clear. ``mc``,
      ``direction`` and inversion read those, and nothing here hides labels from them;
    * what another party learned of the row from those, and what comes back of it in the gradients or embeddings of
      other rows, where that party learns in clear.

    Both ends meet in two cases. Where every party carries it, all trained models together spend the sum of their
    epsilons on a row, all columns and the label, against whoever has the models and no message. And with
    ``gaussian-dp`` on what the same party sends, the sum of the two epsilons (and of the deltas) bounds all that it
    says of anything in all of training: it takes the place of ``epsilon_transcript``. Neither holds beside a defense
    that mixes the rows of a batch (``iso`` scales noise by the largest row). Validation rows are not protected. A party
    that is to carry it and does not want to hurt its own model can leave it out and nobody sees: for such an adversary
    let only the others carry it, ``by=active``. Noise comes from a seeded generator of floats: it measures a mechanism,
    and does not guard anybody's data.

    Costs time and memory, for every row's gradient of every weight is written out: three times the time of a step of
    the default model, and fifteen times with two hidden layers of 128, in batches of 256. And utility: larger batches,
    fewer epochs and smaller models lose less. Clipping costs too, where one class is rare: its rows have the longest
    gradients, and a model of clipped ones forgets it (credit-default, one seed, hardly any noise: an AUC of .68 at
    C = 1 and .73 at 5, from .774; with sigma .2 it is .755 at C = 5).

    | case | result |
    |---|---|
    | strength 0 | training without it, bit for bit |
    | a row without a gradient | noise alone |
    | a party that is malicious in training | does not carry it |

    Args:
        strength: sigma; or 1/epsilon.
        at: no point: it acts on no release.
        clip: C.
        unit: ``noise``: the strength is sigma. ``1/epsilon``: sigma is found, before training, for its E updates.
        delta: at which epsilon is told.
        accountant: as of ``gaussian-dp``.

    Raises:
        UsageError: models with BatchNorm, through which a row's gradient depends on other rows; a penalty on batches at
            the same party; a method that learns otherwise than by split learning alone.
    """

    name = "dp-sgd"
    points = ()
    strengths = (0.2, 1.0, 5.0)
    reference = "Abadi et al. 2016, Deep Learning with Differential Privacy, CCS, algorithm 1; gradients by row: opacus"
    guarantee = (
        "(epsilon, delta)-differential privacy of one training row in the updates of the models of the party that "
        "carries it, given the messages it received: against whoever reads these models, or what they make of other "
        "rows. Not of what is said about the row itself, embedding or gradient, nor of what other parties learn in "
        "clear; labels in gradients are not hidden"
    )

    def __init__(
        self,
        strength: float,
        *,
        at: Iterable[str] | None = None,
        clip: float = 5.0,
        unit: Literal["noise", "1/epsilon"] = "noise",
        delta: float = 1e-5,
        accountant: Accountant = "rdp",
    ) -> None:
        super().__init__(strength, at=at, clip=clip, unit=unit, delta=delta, accountant=accountant)

    @contextmanager
    def training_hooks(self, modules: nn.Module, penalties: Sequence[str]) -> Iterator[None]:
        """Have the gradient of each row kept, by opacus's hooks, while ``modules`` are trained.

        Raises:
            UsageError: a layer or a penalty that mixes rows.
        """
        mixing = [name for name, layer in modules.named_modules() if isinstance(layer, BATCH_NORM)]
        if mixing:
            raise UsageError(
                f"expected models without BatchNorm for {self.name}, got it in {mixing[0]}: a row's gradient would "
                f"depend on the other rows; take model.encoder=mlp"
            )
        if penalties:
            raise UsageError(
                f"expected a loss that is a mean over rows for {self.name}, got the penalty of {penalties[0]} on "
                f"batches: drop one, or let {self.name} be carried by=passive"
            )
        watcher = _watcher(modules)
        try:
            with warnings.catch_warnings():  # torch has hooks warn that columns need no gradients
                warnings.filterwarnings("ignore", message="Full backward hook is firing")
                yield
        finally:
            watcher.to_standard_module()
            for layer in modules.modules():  # which it leaves
                vars(layer).pop("activations", None)
                vars(layer).pop("max_batch_len", None)

    def on_update(self, modules: nn.Module, rows: int, rng: torch.Generator) -> None:
        """Put the noised mean of the clipped gradients in place of the gradients of ``modules``."""
        learned = [p for p in modules.parameters() if p.grad is not None]
        by_row = [_by_row(p).flatten(1) for p in learned]  # (B, entries) each
        norms = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, dim=1) for g in by_row]), dim=0)
        weights = self.clip / norms.clamp(min=self.clip)  # (B,)
        for p, g in zip(learned, by_row, strict=True):
            total = (weights @ g).reshape(p.shape)
            p.grad = self.draw(total, rng).mul_(self.scale * 2 * self.clip).add_(total).div_(rows)
            p.grad_sample = None  # type: ignore[attr-defined]


def _watcher(modules: nn.Module) -> Any:
    """Opacus's hooks on ``modules``; they go with ``to_standard_module``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of opacus's own imports
        from opacus.grad_sample import GradSampleModule  # lazily: it takes seconds
    try:
        return GradSampleModule(modules, loss_reduction="mean")
    except NotImplementedError as error:
        raise UsageError(f"expected layers without running statistics for dp-sgd, got {error}") from None


def _by_row(parameter: nn.Parameter) -> Tensor:
    """The gradient of each row's own loss (B, ...), as opacus's hooks left it."""
    found = getattr(parameter, "grad_sample", None)
    if not isinstance(found, Tensor):
        raise UsageError(
            "expected models that dp-sgd can follow row by row, got a gradient that did not come through a layer of "
            "torch, or came twice: take --set model.encoder=mlp and the plain boundary"
        )
    return found
