"""Partial model aggregation: a server averages those parts of the parties' models that they agreed to share."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vflsec.base.errors import UsageError
from vflsec.core.message import Kind
from vflsec.core.protocol import Averaging


class ModelAverage(Averaging):
    """Each party sends the same named modules to a server, which returns their mean, weighing parties equally.

    Learned parameters and running statistics (BatchNorm's mean and variance) are averaged; counters are not, for
    nothing depends on them. What a party sends passes its defenses; what it keeps until the mean arrives does not.

    Source: FedHSSL (He et al. 2022, arXiv 2208.08934), algorithm 1, step 3, and section IV-B-3.

    Args:
        parties: all K parties.
        server: the party that averages; it has no data.
    """

    name = "model-average"
    reference = "He et al. 2022 (FedHSSL), arXiv 2208.08934, algorithm 1, step 3"
    reveals = {  # noqa: RUF012  (declared ClassVar in the base class)
        "server": ("the shared modules of every party after its defenses, in every global iteration",),
        "party": (
            "the mean over all parties of their shared modules",
            "with two parties, therefore, those of the other party exactly: twice the mean less its own",
        ),
    }

    def check(self, shared: Mapping[str, Mapping[str, nn.Module]]) -> None:
        """Raise UsageError unless all parties share modules of the same names and shapes."""
        shapes = {
            name: {key: tuple(v.shape) for key, v in _get_weights(modules).items()} for name, modules in shared.items()
        }
        first, expected = next(iter(shapes.items()))
        for name, shape in shapes.items():
            if shape != expected:
                raise UsageError(
                    f"expected {name} to have a top encoder of the shape of {first}'s, for their mean, got another: "
                    f"give all parties one kind of encoder, for example --set model.encoder=tabular"
                )

    def run(self, shared: Mapping[str, Mapping[str, nn.Module]], *, step: int, phase: str) -> None:
        """Average in place."""
        for read, buffers in ((_get_weights, False), (_get_statistics, True)):
            tensors = {party.name: read(shared[party.name]) for party in self.parties}
            if not any(tensors.values()):  # a model without BatchNorm has no statistics
                continue
            mean = self._average(tensors, step=step, phase=phase, buffers=buffers)
            for party in self.parties:
                message = self.server.send(
                    Kind.PARAMETERS, mean, to=party.name, step=step, phase=phase, buffers=buffers
                )
                for key, value in tensors[party.name].items():
                    value.data.copy_(message.payload[key])

    def _average(
        self, sent: Mapping[str, Mapping[str, Tensor]], *, step: int, phase: str, buffers: bool
    ) -> dict[str, Tensor]:
        """Return what the server makes of what the parties send it of ``sent``, by name."""
        heard = [
            party.send(Kind.PARAMETERS, sent[party.name], to=self.server.name, step=step, phase=phase, buffers=buffers)
            for party in self.parties
        ]
        return {key: torch.stack([m.payload[key] for m in heard]).mean(dim=0) for key in heard[0].payload}


def _get_weights(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {f"{role}.{key}": p for role, module in modules.items() for key, p in module.named_parameters()}


def _get_statistics(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    named = {f"{role}.{key}": b for role, module in modules.items() for key, b in module.named_buffers()}
    return {key: buffer for key, buffer in named.items() if buffer.is_floating_point()}
