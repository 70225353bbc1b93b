"""What every backend of the PHE-masked linear layer has in common: who says what to whom, and in which order."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vflsec.base.errors import UsageError
from vflsec.cipher.arithmetic.layout import CipherSpec
from vflsec.cipher.recording import RecordingWriter
from vflsec.cipher.roles.exchange import Exchange, Seat
from vflsec.core.message import Kind, Step
from vflsec.core.options import share_options
from vflsec.core.party import Party
from vflsec.core.protocol import LinearBoundary
from vflsec.core.settings import TrainSpec


class RolePair(NamedTuple):
    """The two roles of one run."""

    passive: Any
    active: Any


@share_options(CipherSpec)
class MaskedLinearBoundary(LinearBoundary):
    """A linear layer between a passive party's features and the active party's labels, whose weights are shared.

    The passive party (C in the paper) holds the key, the features mu (B, g) and a share e of the weights; the active
    party (p in the paper) holds the labels and the share W~ = W - e. Forward, the active party learns z = mu W and not
    mu; backward, the passive party learns delta^C = delta W^T and neither delta nor W by themselves. In each exchange:

        C -> p  [[mu]]                    p -> C  [[mu W~ + r1]]             C -> p  mu W + r1
        p -> C  [[mu^T delta + r2]]       C -> p  mu^T delta + r2 + n, [[e]]     p -> C  [[delta W^T]]

    Defenses on embeddings change mu before it is encrypted. Those on gradients change the delta from which delta^C is
    computed; the weights learn from the original one, which the mask r2 hides.

    The passive party draws a random part of W_0, so that the active party never knows it. With ``noise`` the active
    party adds Gaussian noise to every coordinate of delta^C; its deviation is relative to the largest row of delta.
    Noise on delta itself, as defenses on gradients add it, leaves all rows multiples of one vector. With
    ``score_noise`` the passive party adds Gaussian noise to every score.

    Source: PrADA (Kang et al. 2022), Algorithms 4 and 5, corrected: delta at time t from the weights at time t, masks
    subtracted, 1/B, every mask fresh.

    Args:
        passive: holds the key and the features.
        active: holds the labels.
        cipher: the fields of ``CipherSpec``.

    Raises:
        UsageError: the optimizer is not linear, a number leaves the agreed range, or the passive party is asked for a
            sample more often than ``max_passes``.
    """

    reference = "Kang et al. 2022 (PrADA), Algorithms 4 and 5, corrected"
    reveals = {  # noqa: RUF012  (declared ClassVar in the base class)
        "active": (
            "z = mu W of every row in clear, but for noise of the size of mu's rounding and score_noise, and its share "
            "of W; with as many outputs as features, z is the embedding up to one linear map",
            "over steps on the same rows with bottom models at rest, mu up to a rotation",
        ),
        "passive": (
            "delta^C = delta W^T of every row in clear: with one output all rows are multiples of one vector, and the "
            "two classes fall apart by their sign",
            "over two batches, W and delta themselves up to a common sign: the weights' update ties their scales",
        ),
    }

    def __init__(self, passive: Party, active: Party, **cipher: Any) -> None:
        super().__init__(passive, active)
        self.spec = CipherSpec(**cipher)
        self.shares = {passive.name: _WeightShare(), active.name: _WeightShare()}
        self.recorders: dict[str, RecordingWriter] = {}
        """By party, while a recording is made."""
        self._roles: RolePair | None = None
        self._steps = 0
        self._passes: dict[str, np.ndarray] = {}

    @abstractmethod
    def start(self, weight: np.ndarray, share: np.ndarray, train: TrainSpec) -> RolePair:
        """Return new roles; ``weight`` is the active party's part of W_0 (g, C), and ``share`` the passive party's."""

    @property
    def batch(self) -> int:
        """The largest number of rows that one exchange takes."""
        return self._batch

    def join(self, weight: Tensor, train: TrainSpec, *, batches: int = 100, epochs: int = 1) -> None:
        """Start from W_0 = ``weight`` (g, C).

        Raises:
            UsageError: ``train`` asks for another optimizer than linear SGD, or for more passes than ``max_passes``.
        """
        self.spec.allow(epochs)
        if train.select == "paper_best_on_test" or train.target:  # test rows are scored in each epoch, and at the end
            self.spec.allow(epochs + 1, "test samples")
        self._batch = train.batch + 1  # a row left over joins the batch before it
        self._width, self._outputs = weight.shape
        self._batches = batches
        share = split_weight(_to_numpy(weight), torch.randn(weight.shape, dtype=torch.float64).numpy())
        self._roles = self.start(_to_numpy(weight) - share, share, train)
        self._keep()

    @property
    def batches(self) -> int:
        """About how many exchanges a run takes."""
        return self._batches

    def modules(self) -> Mapping[str, nn.Module]:
        """Return each party's share of the weights, as it is stored with its models."""
        return self.shares

    def forward(self, h: Tensor, step: Step) -> Tensor:
        """Return z = h W (B, C), all that the active party learns of the embedding (B, g)."""
        self._count(step)
        mu = self.passive.defend(Kind.EMBEDDING, h, step, to=self.active.name)
        parts = []
        for rows in torch.split(torch.arange(len(mu)), self.batch):
            part = step._replace(rows=step.rows[rows.to(step.rows.device)])
            features = _to_numpy(mu[rows.to(mu.device)])
            self._begin(part)
            score_noise = None
            if self.spec.score_noise:
                score_noise = _draw(self.passive, len(features), self._outputs) * self.spec.score_noise
            parts.append(self._exchange(part).scores(features, score_noise, learns=step.learns))
        z = torch.as_tensor(np.concatenate(parts), dtype=h.dtype, device=h.device)
        return self.active.open(Kind.EMBEDDING, z, step, sender=self.passive.name)

    def backward(self, g: Tensor, step: Step) -> Tensor:
        """Return delta^C = g W^T (B, g), all that the passive party learns of the gradient (B, C) of the mean loss."""
        released = self.active.defend(Kind.GRADIENT, g, step, to=self.passive.name)
        noised = self._update_weights(g, step)
        delta = _to_numpy(released) * len(g)
        gradient = self._exchange(step).embedding_gradient(noised, delta, self._noise(delta))
        result = torch.as_tensor(gradient / len(g), dtype=g.dtype, device=g.device)
        return self.passive.open(Kind.GRADIENT, result, step, sender=self.active.name)

    def learn(self, g: Tensor, step: Step) -> None:
        """Update the weights alone: a passive party whose models are frozen could use delta^C only to infer labels."""
        self._update_weights(g, step)

    def _update_weights(self, g: Tensor, step: Step) -> Any:
        """Update both shares of the weights; return what delta^C is computed from."""
        recorder = self.recorders.get(self.active.name)
        if recorder and step.labels is not None:
            recorder.note("labels", step.labels.cpu().numpy())
        noised = self._exchange(step).weights(_to_numpy(g) * len(g), rate=step.rate)
        self._keep()
        return noised

    def _exchange(self, step: Step) -> Exchange:
        passive, active = self._get_current()
        line: list[Any] = []
        return Exchange(
            passive=Seat(passive, _Port(self.passive, self.active, step, line, self.recorders.get(self.passive.name))),
            active=Seat(active, _Port(self.active, self.passive, step, line, self.recorders.get(self.active.name))),
        )

    def _noise(self, delta: np.ndarray) -> np.ndarray | None:
        """Noise (B, g) on delta^C, or None."""
        if not self.spec.noise:
            return None
        return _draw(self.active, len(delta), self._width) * (
            self.spec.noise * float(np.linalg.norm(delta, axis=1).max())
        )

    def _count(self, step: Step) -> None:
        """Count a pass of the samples of ``step``; the passive party refuses one too many."""
        most = self.spec.max_passes
        if not most:
            return
        counts = self._passes.setdefault(step.split, np.zeros(len(self.passive.features[step.split]), np.int64))
        rows = step.rows.cpu().numpy()
        if (counts[rows] >= most).any():
            raise UsageError(
                f"expected at most max_passes = {most} passes of each sample, got one more of {step.split} samples: "
                f"{self.passive.name} does not answer; train for fewer epochs, or raise max_passes"
            )
        counts[rows] += 1

    def _begin(self, step: Step) -> None:
        """Begin a step of the recordings: each forward pass is one, whatever the training calls it."""
        names = list(self.passive.features)  # no two samples have one number: those of the splits before come first
        before = sum(len(self.passive.features[name]) for name in names[: names.index(step.split)])
        rows = step.rows.cpu().numpy() + before
        for recorder in self.recorders.values():
            recorder.begin(self._steps, rate=step.rate if step.learns else None)
            recorder.note("rows", rows)
        self._steps += 1

    def _get_current(self) -> RolePair:
        """Return the roles, with the shares of the parties' models: stored ones may have been loaded since."""
        assert self._roles is not None, "join comes before the first exchange"
        for role, share in zip(self._roles, self.shares.values(), strict=True):
            if share.loaded:
                role.load(share.arrays())
                share.loaded = False
        return self._roles

    def _keep(self) -> None:
        assert self._roles is not None
        for role, share in zip(self._roles, self.shares.values(), strict=True):
            share.keep(role.state())


def split_weight(weight: np.ndarray, normal: np.ndarray) -> np.ndarray:
    """Return the passive party's part e_0 of W_0 (g, C), as if each party had drawn a normal part by itself.

    The active party holds the rest and does not know W_0, from which a run without encryption would start too.
    ``normal`` (g, C) are standard normal numbers of the passive party.
    """
    return np.asarray((weight + np.sqrt(np.mean(weight**2)) * normal) / 2)


class _Port:
    """A party's port: messages go through ``Party.send``, and into the recording if there is one."""

    def __init__(
        self, party: Party, peer: Party, step: Step, line: list[Any], recorder: RecordingWriter | None
    ) -> None:
        self._party, self._peer, self._step, self._line, self._recorder = party, peer, step, line, recorder

    def send(self, message: Any) -> None:
        sent = self._party.send(Kind.CIPHERTEXT, {"value": message}, to=self._peer.name, **self._step.place)
        self._line.append(sent.payload["value"])
        if self._recorder:
            self._recorder.message("sent", message)

    def receive(self, expected: type[Any]) -> Any:
        message = self._line.pop()
        if self._recorder:
            self._recorder.message("received", message)
        return message

    def note(self, name: str, values: Any) -> None:
        if self._recorder:
            self._recorder.note(name, values)


class _WeightShare(nn.Module):
    """One party's share of the weights, as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = False
        self.register_load_state_dict_post_hook(_mark)  # type: ignore[no-untyped-call]

    def keep(self, state: Mapping[str, np.ndarray]) -> None:
        for name, value in state.items():
            self.register_buffer(name, torch.from_numpy(value.copy()))

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: value.cpu().numpy() for name, value in self.named_buffers()}


def _mark(module: nn.Module, _: Any) -> None:
    assert isinstance(module, _WeightShare)
    module.loaded = True


def _draw(party: Party, *size: int) -> np.ndarray:
    """Return standard normal numbers from the noise stream of ``party``."""
    return _to_numpy(torch.randn(size, generator=party.rng, device=party.rng.device, dtype=torch.float64))


def _to_numpy(value: Tensor) -> np.ndarray:
    """Return exact float64 (B, d) in the host's memory."""
    return value.detach().double().cpu().numpy()
