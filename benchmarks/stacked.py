"""Training several small models at once: stacked tensors against ``torch.func`` and against one after the other.

    python benchmarks/stacked.py

Prints times relative to one after the other, the least of four, and whether parameters have the same bits as there.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F

from vflsec.nn.stacked import split_runs, stack, stack_modules

CASES = ((3, 256, 12, 64, 2), (5, 256, 12, 64, 2), (10, 64, 30, 64, 2), (5, 256, 100, 128, 10), (20, 80, 64, 32, 2))
"""Runs, batch, columns, hidden width, classes."""

STEPS, ROWS = 60, 5000


def measure(n_runs: int, batch: int, columns: int, width: int, classes: int) -> dict[str, tuple[float, bool]]:
    """Return the relative time and the equality of bits of each way to train."""
    x, y = torch.randn(n_runs, ROWS, columns), torch.randint(classes, (n_runs, ROWS))
    order, each = torch.randint(ROWS, (STEPS, n_runs, batch)), torch.arange(n_runs)[:, None]

    def models() -> list[nn.Module]:
        torch.manual_seed(0)
        layers = [(nn.Linear(columns, width), nn.ReLU(), nn.Linear(width, classes)) for _ in range(n_runs)]
        return [nn.Sequential(*parts) for parts in layers]

    def sequential() -> list[Tensor]:
        made = models()
        for run, model in enumerate(made):
            optimizer = torch.optim.Adam(model.parameters(), fused=True)
            for rows in order[:, run]:
                optimizer.zero_grad()
                F.cross_entropy(model(x[run][rows]), y[run][rows]).backward()
                optimizer.step()
        return [torch.stack(parts) for parts in zip(*(model.parameters() for model in made), strict=True)]

    def stacked() -> list[Tensor]:
        made = models()
        joint = copy.deepcopy(made[0])
        stack_modules(made, joint)
        inputs, targets = stack(list(x)), stack(list(y))
        optimizer = torch.optim.Adam(joint.parameters(), fused=True)
        for rows in order:
            at = stack(list(rows))
            optimizer.zero_grad()
            F.cross_entropy(joint(inputs[at]), targets[at]).backward()
            optimizer.step()
        return [torch.stack(split_runs(parameter)) for parameter in joint.parameters()]

    def func(*, gradients: bool) -> list[Tensor]:
        made = models()
        skeleton, (parameters, _) = copy.deepcopy(made[0]).to("meta"), stack_module_state(made)

        def loss(own: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(skeleton, own, (inputs,)), targets)

        of_all = vmap(grad(loss) if gradients else loss)
        optimizer = torch.optim.Adam(list(parameters.values()), fused=True)
        for rows in order:
            optimizer.zero_grad()
            result = of_all(parameters, x[each, rows], y[each, rows])
            if gradients:
                for name, parameter in parameters.items():
                    parameter.grad = result[name]
            else:
                result.sum().backward()
            optimizer.step()
        return list(parameters.values())

    ways: dict[str, Callable[[], list[Tensor]]] = {
        "one after the other": sequential,
        "stacked": stacked,
        "vmap": lambda: func(gradients=False),
        "vmap of grad": lambda: func(gradients=True),
    }
    times: dict[str, float] = {}
    for _ in range(4):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name] = min(times.get(name, float("inf")), time.perf_counter() - start)
    expected = sequential()
    same = {name: all(map(torch.equal, way(), expected)) for name, way in ways.items()}
    return {name: (times[name] / times["one after the other"], same[name]) for name in ways}


def main() -> None:
    """Print all cases."""
    torch.set_num_threads(1)
    for case in CASES:
        results = measure(*case)
        print(
            case, *(f"{name} {ratio:.2f}{'' if same else ' (other bits)'}" for name, (ratio, same) in results.items())
        )


if __name__ == "__main__":
    main()
