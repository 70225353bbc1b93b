"""Both sides of sealed training: a passive party learns from noised sums over a batch, and from no row's gradient."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from vflsec.base.errors import PeerRefused, ProtocolError, StoreError, UsageError
from vflsec.base.seeds import make_rng, seed_weights
from vflsec.base.sparse_rows import to_tensor
from vflsec.cipher.lattice import MODULUS, LatticeKeys, LatticePublic, SumsLayout, draw_mask
from vflsec.cipher.noise import compute_epsilon, draw_rounded_normal
from vflsec.cipher.recording import SealedHeader
from vflsec.cipher.roles.exchange import Port
from vflsec.companies.active_side import get_labels
from vflsec.companies.job import JobFile
from vflsec.companies.messages import (
    FIRST,
    Committed,
    Hello,
    LatticeKey,
    MaskedSums,
    NoisedSums,
    Numbers,
    SealedResiduals,
)
from vflsec.companies.party_rows import PARTY, PartyRows
from vflsec.companies.side import Batch, Commit, Limits, Side, StatePort
from vflsec.core.settings import ModelSpec
from vflsec.data.encode import densify
from vflsec.methods.checkpoint import State, copy_state, load_model_state, prefix_entries, select_entries
from vflsec.methods.sealed_training import (
    PrivateModel,
    assign_gradient,
    bound_change,
    fit_private,
    round_residuals,
    round_weights,
    sum_rows,
)
from vflsec.methods.split_training import PREDICTION_BATCH
from vflsec.nn.encoders import build_encoder
from vflsec.nn.jacobians import compute_jacobians, count_learned
from vflsec.nn.wide import create_optimizer

FIT = "fit"
"""What stands for the split in the epochs of the active party's private fit."""

DEVIATIONS = 9
"""Noise of more deviations is not drawn in the age of the universe."""


class SealedSide(Side):
    """A side of sealed training with additive scores: each party's model gives m numbers of a row, the score their sum.

    In each batch the passive party sends its numbers, and the active party the sealed residuals. The passive party
    weighs them with the Jacobians of its model and returns masked sums. The active party adds noise and returns them.
    Both update their models, the active party by sums with the same noise. After training the passive party sends its
    numbers of all rows, to which the active party fits its private model. See ``Side`` for the arguments.

    Attributes:
        bottom: the model of its columns.
        parameters: P, of the passive party's model.

    Raises:
        UsageError: sums that could be too large.
    """

    repeats = 0
    resends = True
    cost = "; every further answer to a batch raises epsilon"

    def __init__(self, data: PartyRows, job: JobFile, **options: Any) -> None:
        super().__init__(data, job, **options)
        assert job.sealed is not None, "the job has sealed training"
        self.settings, self.plan, self.outputs = job.sealed, job.sealed.plan, job.model.outputs
        self.unit, self.x = 2.0**self.plan.bits, {split: to_tensor(densify(x)) for split, x in data.features.items()}
        if self.schedule.largest * self.outputs * self.unit**2 > MODULUS / 4:
            raise UsageError(f"expected sums below 2^48, got batches of {self.schedule.largest}: lower sealed.batch")
        spec = ModelSpec(encoder="mlp", bottom=job.model.hidden, cut=self.outputs)
        with seed_weights(self._seed, "model", PARTY[self.role]):
            self.bottom = build_encoder(data.layout, spec, self.outputs)
        self.optimizer = create_optimizer(self.bottom.parameters(), job.get_training(len(data.ids["train"])))
        self.parameters = 0

    @property
    def later(self) -> list[tuple[str, Tensor]]:
        """All rows, in blocks, and then the epochs of the private fit."""
        rows = {split: torch.arange(len(self.data.ids[split])) for split in ("train", "test")}
        blocks = [(split, block) for split, all_of in rows.items() for block in torch.split(all_of, PREDICTION_BATCH)]
        epochs = self.job.train.spec.count_epochs(len(rows["train"]))
        return [*blocks, *((FIT, torch.zeros(0, dtype=torch.long)) for _ in range(epochs))]

    @property
    def scale(self) -> float:
        """The deviation of the noise on each sum."""
        return self.plan.scale(bound_change(self.outputs, [(self.outputs, self.parameters, 0.0)], self.unit))

    def layout(self, rows: int) -> SumsLayout:
        """Return how ``rows`` rows and their sums lie in ciphertexts."""
        return SumsLayout(rows * self.outputs, self.parameters)

    def meet(self, theirs: Hello) -> Limits:
        """Read the number of parameters, and return how large messages may be."""
        self._set_parameters(theirs)
        fields, layouts = 512, [self.layout(rows) for rows in self.schedule.sizes]
        return {
            **FIRST,
            LatticeKey: 1 << 20,
            Numbers: fields + 4 * self.outputs * max(self.schedule.largest, PREDICTION_BATCH),
            SealedResiduals: fields + max(layout.size_of_values for layout in layouts),
            MaskedSums: fields + max(layout.size_of_sums for layout in layouts),
            NoisedSums: fields + 8 * self.parameters,
        }

    @abstractmethod
    def _set_parameters(self, theirs: Hello) -> None:
        """Read the number of parameters of the passive party's model from the greeting."""

    def make_header(self, run: str) -> SealedHeader:
        """Return the header of this party's recording."""
        return SealedHeader(
            role=self.role,
            run=run,
            classes=max(2, self.outputs),
            outputs=self.outputs,
            columns=self.data.layout.width,
            hidden=self.job.model.hidden,
            parameters=self.parameters,
            noise=self.scale,
            epsilon=self.settings.epsilon,
            delta=self.settings.delta,
        )

    def _note_columns(self, port: Port, split: str, rows: Tensor) -> None:
        port.note("columns", self.x[split][rows].numpy())

    def _update(self, gradient: Tensor) -> None:
        assign_gradient(self.bottom, gradient)
        self.optimizer.step()

    def state(self) -> State:
        """Return the model and its optimizer."""
        return prefix_entries("bottom", copy_state(self.bottom, self.optimizer))

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore ``state``."""
        load_model_state(select_entries("bottom", state), self.bottom, self.optimizer)

    def models(self) -> State:
        """Return the trained model."""
        return {f"bottom.{key}": value.numpy() for key, value in self.bottom.state_dict().items()}


class SealedPassiveSide(SealedSide):
    """The passive party's side: weighs sealed residuals, and learns noised sums of its own gradients.

    Raises:
        UsageError: more parameters than the job admits.
    """

    role = "passive"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parameters, most = count_learned(self.bottom), self.settings.parameters
        if self.parameters > most:
            raise UsageError(
                f"expected a model of at most sealed.parameters = {most}, got {self.parameters}: agree on fewer "
                "model.hidden, or on more parameters"
            )
        self.mask = np.zeros(0, dtype=np.int64)

    def introduce(self) -> dict[str, Any]:
        """Return the number of parameters."""
        return {"layout": {"parameters": self.parameters}}

    def _set_parameters(self, theirs: Hello) -> None:
        """Leave it: it is known."""

    def exchange_keys(self, port: Port) -> None:
        """Receive the active party's key."""
        self.public = LatticePublic(port.receive(LatticeKey).public)

    def learn(self, port: StatePort, batch: Batch, commit: Commit) -> None:
        """Send numbers and masked sums, and learn from noised sums; the mask is kept before it is used."""
        x = self.x["train"][batch.rows]
        self._send(port, x)
        sealed = port.receive(SealedResiduals).ciphertexts
        self.mask = draw_mask(self.parameters)
        port.keep()
        sums = self.public.weigh(sealed, self._compute_weights(x), self.mask, self.layout(len(x)))
        port.send(MaskedSums(sums))
        self.resend(port, batch, commit)

    def _compute_weights(self, x: Tensor) -> Iterator[np.ndarray]:
        """Yield the integer weights (b m, P) of consecutive rows."""
        for block in round_weights((of_block for of_block, _ in compute_jacobians(self.bottom, x)), self.unit):
            yield block.flatten(0, 1).numpy()

    def resend(self, port: Port, batch: Batch, commit: Commit) -> None:
        """Receive the noised sums of the sums that were sent, and learn from them.

        Raises:
            ProtocolError: sums that no batch has.
            StoreError: the mask is not that of the batch.
        """
        if len(self.mask) != self.parameters:
            raise StoreError(f"expected the mask of batch {batch.number} in the state, got none: restore a copy")
        answer = port.receive(NoisedSums)
        check_size(answer.values, 8 * self.parameters, "noised sums")
        masked = np.frombuffer(answer.values, "<u8")
        if (masked >= MODULUS).any():
            raise ProtocolError(f"expected noised sums below {MODULUS}, got a larger one")
        sums = (masked.astype(np.int64) - self.mask + MODULUS // 2) % MODULUS - MODULUS // 2
        noised = torch.from_numpy(sums * self.unit**-2)
        most = len(batch.rows) * math.sqrt(2) * 1.01 + DEVIATIONS * self.scale
        if (largest := float(noised.abs().max())) > most:
            raise ProtocolError(
                f"expected noised sums of batch {batch.number} up to {most:.0f}, got {largest:.3g}: the other party "
                "deviates from the protocol"
            )
        self._note_parameters(port)
        port.note("sum", noised.numpy())
        self._update(noised / len(batch.rows))
        self.mask = np.zeros(0, dtype=np.int64)
        commit(answer)

    def infer(self, port: Port, split: str, rows: Tensor) -> None:
        """Send the numbers of the rows, or wait for an epoch of the private fit."""
        if split == FIT:
            port.receive(Committed)
            return
        self._note_columns(port, split, rows)
        self._note_parameters(port)
        self._send(port, self.x[split][rows])

    def _note_parameters(self, port: Port) -> None:
        port.note("parameters", parameters_to_vector(self.bottom.parameters()).detach().numpy())

    @torch.no_grad()
    def _send(self, port: Port, x: Tensor) -> None:
        port.send(Numbers(self.bottom(x).numpy().astype("<f4").tobytes()))

    def state(self) -> State:
        """Return the model, its optimizer and the mask of the sums that were sent last."""
        return {**super().state(), "mask": self.mask}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore ``state``."""
        super().load(state)
        self.mask = state["mask"]


class SealedActiveSide(SealedSide):
    """The active party's side: seals residuals, adds noise to sums, and fits a private model that nobody sees.

    It answers each batch once: the answer is part of the state that is kept before it is sent, and where the connection
    breaks the same bytes are sent again. Any further answer is counted in epsilon.

    Raises:
        UsageError: the job's outputs do not fit the classes.
    """

    role = "active"

    def __init__(self, data: PartyRows, job: JobFile, **options: Any) -> None:
        super().__init__(data, job, **options)
        self.y = get_labels(data, job, (1,))
        self.keys = LatticeKeys()
        self.answer = NoisedSums(b"")
        self.received = {split: torch.zeros(len(ids), self.outputs) for split, ids in data.ids.items()}
        self._epochs: Iterator[int] = iter(())

    def _set_parameters(self, theirs: Hello) -> None:
        """Read the number of parameters.

        Raises:
            PeerRefused: none, or more than the job admits.
        """
        parameters, most = theirs.layout.get("parameters"), self.settings.parameters
        if type(parameters) is not int or not 0 < parameters <= most:
            raise PeerRefused(f"expected 1 to sealed.parameters = {most} parameters from the peer, got {parameters!r}")
        self.parameters = parameters

    def exchange_keys(self, port: Port) -> None:
        """Send the key."""
        port.send(LatticeKey(self.keys.public))

    def learn(self, port: StatePort, batch: Batch, commit: Commit) -> None:
        """Seal the residuals, learn from noised sums of the own gradients, and send those of the passive party."""
        y = self.y["train"][batch.rows.numpy()]
        port.note("labels", y)
        x, layout = self.x["train"][batch.rows], self.layout(len(batch.rows))
        received = self._receive(port, len(x))
        with torch.no_grad():
            scores = self.bottom(x) + received
        residuals = round_residuals(scores, torch.from_numpy(y), self.unit)  # (B, m)
        port.send(SealedResiduals(self.keys.seal(residuals.numpy(), layout)))
        total, _ = sum_rows(self.bottom, residuals, self.unit, x, dtype=torch.float64)
        rounded = np.rint(total.numpy() * self.unit**2).astype(np.int64)  # which noise on integers hides
        noised = torch.from_numpy((rounded + self._draw(len(rounded))) * self.unit**-2)
        sums = self.keys.open(port.receive(MaskedSums).ciphertexts, layout)
        self.answer = NoisedSums(((sums + self._draw(self.parameters)) % MODULUS).astype("<u8").tobytes())
        self._update(noised / len(x))
        commit(self.answer)
        self.resend(port, batch, commit)

    def _draw(self, size: int) -> np.ndarray:
        """Return noise on sums of integers."""
        return draw_rounded_normal(self.scale * self.unit**2, size, self._randbits)

    def resend(self, port: Port, batch: Batch, commit: Commit) -> None:
        """Send the answer that is kept."""
        port.send(self.answer)

    def _receive(self, port: Port, rows: int) -> Tensor:
        """Return the passive party's numbers (B, m).

        Raises:
            ProtocolError: another size, or numbers that are not finite.
        """
        values = port.receive(Numbers).values
        check_size(values, 4 * rows * self.outputs, "numbers")
        numbers = np.frombuffer(values, "<f4").reshape(rows, self.outputs)
        if not np.isfinite(numbers).all():
            raise ProtocolError("expected finite numbers, got others: the other party's model has diverged")
        port.note("numbers", numbers)
        return torch.from_numpy(numbers.copy())

    def infer(self, port: Port, split: str, rows: Tensor) -> None:
        """Receive the numbers of the rows, or take part of the private fit and say so."""
        if split == FIT:
            next(self._epochs)
            port.send(Committed())
            return
        port.note("labels", self.y[split][rows.numpy()])
        self._note_columns(port, split, rows)
        self.received[split][rows] = self._receive(port, len(rows))
        self._epochs = self._fit()

    def _fit(self) -> Iterator[int]:
        """Fit the private model to all columns and numbers of training rows; yield the number of each epoch."""
        inputs, y = self._join("train"), torch.tensor(self.y["train"])
        with seed_weights(self._seed, "model", "private"):
            self.private = PrivateModel(inputs.shape[1], len(self.data.classes))
        yield from fit_private(self.private, inputs, y, self.job.train.spec, make_rng(self._seed, "private", "train"))

    def _join(self, split: str) -> Tensor:
        return torch.cat([self.x[split], self.received[split]], dim=1)

    @torch.no_grad()
    def logits(self) -> np.ndarray:
        """Return the logits (n, classes) of the test rows, by the private model."""
        logits: np.ndarray = self.private(self._join("test")).numpy()
        return logits

    def measure_epsilon(self, times: Callable[[int], int]) -> float:
        """Return the epsilon of every label where batch k was answered ``times(k)`` times."""
        answers = np.zeros(len(self.data.ids["train"]))
        for step in range(len(self.schedule)):
            answers[self.schedule[step].rows.numpy()] += times(step)
        return compute_epsilon(self.plan.mu * math.sqrt(answers.max() / self.plan.epochs), self.settings.delta)

    def state(self) -> State:
        """Return the model, its optimizer and the last answer."""
        return {**super().state(), "answer": np.frombuffer(self.answer.values, np.uint8)}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore ``state``."""
        super().load(state)
        self.answer = NoisedSums(state["answer"].tobytes())

    def models(self) -> State:
        """Return both models."""
        return {**super().models(), **{f"private.{k}": value.numpy() for k, value in self.private.state_dict().items()}}


def check_size(data: bytes, size: int, what: str) -> None:
    """Raise ProtocolError unless ``data`` has ``size`` bytes."""
    if len(data) != size:
        raise ProtocolError(f"expected {size} bytes of {what}, got {len(data)}: give both parties one vflsec")
