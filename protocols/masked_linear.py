"""What every backend of the PHE-masked linear layer has in common: who says what to whom, and in which order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from vflsec.core.errors import UsageError
from vflsec.core.message import Kind, Step
from vflsec.core.options import shares_options
from vflsec.core.party import Party
from vflsec.core.protocol import LinearBoundary
from vflsec.core.settings import TrainSpec
from vflsec.secure.arithmetic.layout import CipherSpec
from vflsec.secure.transcripts.recording import Recorder

Said = TypeVar("Said")


class RolePair(NamedTuple):
    """The two roles of one run: the passive party holds the key, the active party the labels."""

    key_holder: Any
    label_holder: Any


@shares_options(CipherSpec)
class MaskedLinearBoundary(LinearBoundary):
    """A linear layer between a passive party's features and the active party's labels, whose weights are shared.

    The passive party C holds the key, the features mu (B, g) and a share e of the weights; the active party p holds the
    labels and the share W~ = W - e. Forward, p learns z = mu W and not mu; backward, C learns delta^C = delta W^T and
    neither delta nor W by themselves. In each exchange:

        C -> p  [[mu]]                    p -> C  [[mu W~ + r1]]             C -> p  mu W + r1
        p -> C  [[mu^T delta + r2]]       C -> p  mu^T delta + r2 + n, [[e]]     p -> C  [[delta W^T]]

    Defenses act on what a party is left with: those on embeddings change mu before it is encrypted, those on gradients
    change the delta from which delta^C is made (the weights learn from the true one, which the mask r2 hides).

    The passive party holds a random part of W_0, so that the active party never knows it. With ``noise`` the active
    party adds Gaussian noise to every coordinate of delta^C, of this deviation relative to the largest row of delta:
    noise on delta itself, as defenses on gradients make it, leaves all rows multiples of one vector. With
    ``score_noise`` the passive party adds Gaussian noise to every score before the active party sees it.

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
        self.shares = {passive.name: _Share(), active.name: _Share()}
        self.recorders: dict[str, Recorder] = {}
        """By party, while a recording is made."""
        self._roles: RolePair | None = None
        self._steps = 0
        self._passes: dict[str, np.ndarray] = {}

    @abstractmethod
    def start(self, weight: np.ndarray, own: np.ndarray, train: TrainSpec) -> RolePair:
        """Return fresh roles that start from W_0 = ``weight`` + ``own`` (g, C): p's part and C's."""

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
        own = own_part(_numbers(weight), torch.randn(weight.shape, dtype=torch.float64).numpy())
        self._roles = self.start(_numbers(weight) - own, own, train)
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
        holder, labels = self._current()
        self._count(step)
        mu = self.passive.defend(Kind.EMBEDDING, h, step, to=self.active.name)
        parts = []
        for rows in torch.split(torch.arange(len(mu)), self.batch):
            part = step._replace(rows=step.rows[rows.to(step.rows.device)])
            own = _numbers(mu[rows.to(mu.device)])
            self._begin(part)
            self._note(self.passive, mu=own)
            features = self._from_passive(holder.features(own, learns=step.learns), part)
            masked = self._from_active(labels.masked_scores(features), part)
            scores = holder.scores(masked, self._score_noise(len(own)))
            parts.append(labels.scores(self._from_passive(scores, part)))
            self._note(self.active, scores=parts[-1])
        z = torch.as_tensor(np.concatenate(parts), dtype=h.dtype, device=h.device)
        return self.active.open(Kind.EMBEDDING, z, step, sender=self.passive.name)

    def backward(self, g: Tensor, step: Step) -> Tensor:
        """Return delta^C = g W^T (B, g), all that the passive party learns of the gradient (B, C) of the mean loss."""
        holder, labels = self._current()
        released = self.active.defend(Kind.GRADIENT, g, step, to=self.passive.name)
        noised = self._weights_learn(g, step)  # first, as order=paper needs it; else the weights before it are used
        delta = _numbers(released) * len(g)
        sent = self._from_active(labels.embedding_gradient(delta, noised, self._noise(delta)), step)
        gradient = holder.embedding_gradient(sent)
        self._note(self.passive, embedding_gradient=gradient)
        found = torch.as_tensor(gradient / len(g), dtype=g.dtype, device=g.device)
        return self.passive.open(Kind.GRADIENT, found, step, sender=self.active.name)

    def learn(self, g: Tensor, step: Step) -> None:
        """Leave delta^C unsent: a passive party whose models stay has no use for it, other than to read labels."""
        self._weights_learn(g, step)

    def _weights_learn(self, g: Tensor, step: Step) -> Any:
        """Move both shares of the weights; return what p makes delta^C from."""
        holder, labels = self._current()
        delta = _numbers(g) * len(g)
        self._note(self.active, delta=delta, **({} if step.labels is None else {"labels": step.labels.cpu().numpy()}))
        masked = self._from_active(labels.masked_gradient(delta), step)
        noised = self._from_passive(holder.gradient(masked, step.rate), step)
        labels.update(noised, step.rate)
        self._keep()
        return noised

    def _noise(self, delta: np.ndarray) -> np.ndarray | None:
        """Noise (B, g) on delta^C, or None."""
        if not self.spec.noise:
            return None
        return _normal(self.active, len(delta), self._width) * (
            self.spec.noise * float(np.linalg.norm(delta, axis=1).max())
        )

    def _score_noise(self, rows: int) -> np.ndarray | None:
        """Noise (B, C) on the scores, or None."""
        return _normal(self.passive, rows, self._outputs) * self.spec.score_noise if self.spec.score_noise else None

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

    def _from_passive(self, said: Said, step: Step) -> Said:
        return self._say(self.passive, self.active, said, step)

    def _from_active(self, said: Said, step: Step) -> Said:
        return self._say(self.active, self.passive, said, step)

    def _say(self, sender: Party, receiver: Party, said: Said, step: Step) -> Said:
        message = sender.send(
            Kind.CIPHERTEXT,
            {"value": said},
            to=receiver.name,
            step=step.number,
            phase=step.phase,
            rows=step.rows,
            split=step.split,
        )
        heard: Said = message.payload["value"]
        if self.recorders:
            self.recorders[sender.name].message("sent", heard)
            self.recorders[receiver.name].message("received", heard)
        return heard

    def _begin(self, step: Step) -> None:
        """Begin a step of the recordings: each forward pass is one, whatever the training calls it."""
        rows = step.rows.cpu().numpy() + self._first_row(step.split)
        for role, recorder in zip(self._current(), self.recorders.values(), strict=False):
            recorder.begin(self._steps, rate=step.rate if step.learns else None)
            recorder.note("rows", rows)
            recorder.note("share", role.share)
        self._steps += 1

    def _note(self, party: Party, **arrays: np.ndarray) -> None:
        """Record what ``party`` has computed by right."""
        if recorder := self.recorders.get(party.name):
            for name, array in arrays.items():
                recorder.note(name, array)

    def _first_row(self, split: str) -> int:
        """The number of rows in the splits before ``split``, so that no two samples have one number."""
        names = list(self.passive.features)
        return sum(len(self.passive.features[name]) for name in names[: names.index(split)])

    def _current(self) -> RolePair:
        """The roles, at the shares that the parties' models hold: stored ones may have been loaded since."""
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


def own_part(weight: np.ndarray, normal: np.ndarray) -> np.ndarray:
    """Return C's part e_0 of W_0 (g, C), so that p does not know W_0: as if each had drawn a normal part by itself.

    Args:
        weight: W_0, which a run in clear would start from too; p holds the rest of it.
        normal: (g, C) standard normal numbers, of C's own.
    """
    part: np.ndarray = (weight + np.sqrt(np.mean(weight**2)) * normal) / 2
    return part


class _Share(nn.Module):
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
    assert isinstance(module, _Share)
    module.loaded = True


def _normal(party: Party, *size: int) -> np.ndarray:
    """Return standard normal numbers from the noise stream of ``party``."""
    return _numbers(torch.randn(size, generator=party.rng, device=party.rng.device, dtype=torch.float64))


def _numbers(value: Tensor) -> np.ndarray:
    """Return exact float64 (B, d) in the host's memory."""
    return value.detach().double().cpu().numpy()
