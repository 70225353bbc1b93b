"""DP-SGD: each row's gradient of a party's own models is clipped, and the sum gets noise."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vflsec.base.errors import UsageError
from vflsec.defenses.gaussian_dp import GaussianDP

BATCH_NORM = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


@dataclass(kw_only=True, eq=False, repr=False)
class DPSGD(GaussianDP):
    """In each update of a party's own models, each row's gradient is clipped to L2 norm C, and the sum gets noise.

    The gradient of a row is that of its own loss with respect to all parameters of the party's models (its bottom
    model; the active party's bottom and top), with one norm. The optimizer gets (sum of clipped gradients + N(0, (sigma
    · 2 C)^2)) / B, for B rows in the batch. sigma is the strength, the standard deviation over the sensitivity 2 C,
    which is half of the literature's noise multiplier, which is over C. Momentum and weight decay are applied later,
    and spend nothing.

    Source: Abadi et al. 2016 (arXiv 1607.00133), algorithm 1; gradients by row and accounting: opacus.

    Accounting: an epoch visits every row once, in shuffled batches, not in Poisson-sampled ones. No amplification by
    sampling is claimed: its accounts are wrong for shuffled batches (Chua et al. 2024, arXiv 2403.17673), and the other
    parties know which rows a batch contains. Neighboring data sets differ by the replacement of one row, whose clipped
    gradient changes the sum by 2 C. A row takes part in E updates, the number of epochs times ``train.local_steps``: E
    Gaussian mechanisms of noise multiplier sigma, composed at sampling rate 1. epsilon counts all planned updates, also
    if training stops early.

    Guarantee: (epsilon, delta)-differential privacy of one training row (the party's columns of it; the active party's
    columns and the label) in all updates of this party's models, for any messages that the party received. It bounds
    what these models, and their outputs for other rows, reveal about the row. It does not bound

    * messages about the row itself: its embedding and its gradient are sent in clear. ``mc``, ``direction`` and
      inversion read those, and nothing here hides labels from them;
    * what another party learned about the row from these messages, and what gradients or embeddings of other rows then
      contain of it, if that party learns in clear.

    Two combinations give a bound on everything. If every party carries it, all trained models together spend the sum of
    their epsilons on a row, all columns and the label, against anyone who has the models and no message. With
    ``gaussian-dp`` on the messages of the same party, the sum of the two epsilons (and of the deltas) bounds all its
    messages in all of training, and replaces ``epsilon_transcript``. Neither holds beside a defense that mixes the rows
    of a batch (``iso`` scales noise by the largest row). Validation rows are not protected. A party can leave it out
    unnoticed; for such an adversary, let only the others carry it: ``by=active``. Noise comes from a seeded generator
    of floats: it measures a mechanism and protects no real data.

    | case | result |
    |---|---|
    | a row without a gradient | noise only |
    | a party that is malicious in training | does not carry it |

    Args:
        strength: sigma; or 1/epsilon.
        at: no point: it acts on no release.
        clip: C.
        unit: ``noise``: the strength is sigma. ``1/epsilon``: sigma is found before training, for its E updates.
        delta: at which epsilon is reported.
        accountant: as of ``gaussian-dp``.

    Raises:
        UsageError: models with BatchNorm, through which a row's gradient depends on other rows; a penalty on batches at
            the same party; a method other than plain split learning.
    """

    name = "dp-sgd"
    points = ()
    strengths = (0.2, 1.0, 5.0)
    reference = "Abadi et al. 2016, Deep Learning with Differential Privacy, CCS, algorithm 1; gradients by row: opacus"
    guarantee = (
        "(epsilon, delta)-differential privacy of one training row in the updates of the models of the party that "
        "carries it, given the messages it received: against anyone who reads these models, or their outputs for other "
        "rows. It does not cover messages about the row itself, embedding or gradient, nor what other parties learn in "
        "clear; labels in gradients are not hidden"
    )
    hides = "a training row in the models of the party that carries it, within epsilon"
    costs = (
        "time and memory for the gradient of each row and weight, several times those of plain training; utility, less "
        "with larger batches, fewer epochs and smaller models. Clipping costs most with a rare class, whose gradients "
        "are long"
    )
    fails = "against attacks that read messages about the row itself: mc, direction, inversion"

    clip: float = 5.0

    @contextmanager
    def training_hooks(self, modules: nn.Module, penalties: Sequence[str]) -> Iterator[None]:
        """Keep the gradient of each row, by opacus's hooks, while ``modules`` are trained.

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
        hooked = _hook_modules(modules)
        try:
            with warnings.catch_warnings():  # torch warns that columns need no gradients
                warnings.filterwarnings("ignore", message="Full backward hook is firing")
                yield
        finally:
            hooked.to_standard_module()
            for layer in modules.modules():  # opacus does not remove these
                vars(layer).pop("activations", None)
                vars(layer).pop("max_batch_len", None)

    def on_update(self, modules: nn.Module, rows: int, rng: torch.Generator) -> None:
        """Put the noised mean of the clipped gradients in place of the gradients of ``modules``."""
        learned = [p for p in modules.parameters() if p.grad is not None]
        by_row = [_get_row_gradients(p).flatten(1) for p in learned]  # (B, entries) each
        norms = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, dim=1) for g in by_row]), dim=0)
        weights = self.clip / norms.clamp(min=self.clip)  # (B,)
        for p, g in zip(learned, by_row, strict=True):
            total = (weights @ g).reshape(p.shape)
            p.grad = self.draw(total, rng).mul_(self.scale * 2 * self.clip).add_(total).div_(rows)
            p.grad_sample = None  # type: ignore[attr-defined]


def _hook_modules(modules: nn.Module) -> Any:
    """Opacus's hooks on ``modules``; ``to_standard_module`` removes them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of opacus's own imports
        from opacus.grad_sample import GradSampleModule  # lazily: it takes seconds
    try:
        return GradSampleModule(modules, loss_reduction="mean")
    except NotImplementedError as error:
        raise UsageError(f"expected layers without running statistics for dp-sgd, got {error}") from None


def _get_row_gradients(parameter: nn.Parameter) -> Tensor:
    """The gradient of each row's own loss (B, ...), from opacus's hooks."""
    gradients = getattr(parameter, "grad_sample", None)
    if not isinstance(gradients, Tensor):
        raise UsageError(
            "expected models that dp-sgd can follow row by row, got a parameter outside of torch's layers, or one that "
            "is used twice: take --set model.encoder=mlp and the plain boundary"
        )
    return gradients
