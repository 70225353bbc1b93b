"""Jacobians of each row's output with respect to the parameters of a model, in blocks that fit in memory."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from vflsec.base.errors import Diverged, UsageError

BATCH_NORM = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d

BLOCK = 2**22
"""Entries of the Jacobians that are held at a time: larger blocks leave the caches of a processor."""


def check_rows_apart(model: nn.Module, purpose: str) -> None:
    """Raise UsageError if a row's output depends on other rows of the batch."""
    for name, layer in model.named_modules():
        if isinstance(layer, BATCH_NORM):
            raise UsageError(
                f"expected models without BatchNorm for {purpose}, got it in {name}: a row's gradient would depend on "
                f"the other rows; take model.encoder=mlp"
            )


def get_learned(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that learn, detached, by name."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def count_learned(model: nn.Module) -> int:
    """Return the number P of parameters that learn."""
    return sum(p.numel() for p in get_learned(model).values())


def compute_jacobians(
    model: nn.Module, *inputs: Tensor, learned: Mapping[str, Tensor] | None = None, head: Tensor | None = None
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield the Jacobians of consecutive rows of the model's output (B, m), in blocks.

    Args:
        model: from ``inputs`` to (B, m); a row's output may depend on that row alone.
        inputs: (B, ...) each.
        learned: the parameters that it is taken at; by default its own.
        head: (h, m), a linear map of the output; then the Jacobians are those of the h numbers that it gives.

    Yields:
        (b, m, P) with respect to all learned parameters in order, and (b, m, d) for each input but the first.
    """
    learned = dict(learned or get_learned(model))

    def compute(parameters: Mapping[str, Tensor], *row: Tensor) -> Tensor:
        output: Tensor = functional_call(model, dict(parameters), tuple(x[None] for x in row))
        return output[0] if head is None else head @ output[0]

    wanted = (0, *range(2, 1 + len(inputs)))
    derive = vmap(jacrev(compute, argnums=wanted), in_dims=(None, *(0 for _ in inputs)))
    with torch.no_grad():
        width = compute(learned, *(x[0] for x in inputs)).numel()
    size = max(1, BLOCK // (width * sum(p.numel() for p in learned.values())))
    for block in zip(*(torch.split(x.detach(), size) for x in inputs), strict=True):
        of_parameters, *of_inputs = derive(learned, *block)
        yield torch.cat([j.flatten(2) for j in of_parameters.values()], dim=2).detach(), [j.detach() for j in of_inputs]


def scale_to_unit(jacobians: Tensor) -> Tensor:
    """Return the matrices (b, m, P), each divided by its largest singular value; zeros stay zeros.

    Raises:
        Diverged: an entry is not finite.
    """
    highest = torch.linalg.vector_norm(jacobians, ord=torch.inf, dim=(1, 2), keepdim=True)
    jacobians = jacobians / highest.clamp(min=1e-30)  # squares do not overflow
    single = jacobians.shape[1] == 1
    squares = (
        torch.linalg.vector_norm(jacobians, dim=(1, 2), dtype=torch.double) if single else jacobians @ jacobians.mT
    )
    if not squares.isfinite().all():  # then an entry is not
        raise Diverged("the gradient of a row is not finite: lower the lr of sealed, or look for wild values")
    largest = squares if single else torch.linalg.eigvalsh(squares)[:, -1].clamp(min=0).sqrt()
    scaled: Tensor = jacobians / largest.clamp(min=1e-12).to(jacobians)[:, None, None]
    return scaled
