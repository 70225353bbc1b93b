"""The passive party: the key, the features and the bottom model."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from phe import PaillierPrivateKey, PaillierPublicKey
from torch import Tensor, nn

from vflsec.base.errors import ProtocolError, UsageError
from vflsec.base.seeds import seed_weights
from vflsec.cipher.arithmetic.codec import encode
from vflsec.cipher.arithmetic.keys import Keys
from vflsec.cipher.arithmetic.layout import Mode
from vflsec.cipher.recording import Header
from vflsec.cipher.roles.exchange import Exchange, Port, Seat
from vflsec.cipher.roles.passive import PassiveRole
from vflsec.companies.job import JobFile
from vflsec.companies.messages import Committed, Hello, get_limits
from vflsec.companies.party_rows import PARTY, PartyRows
from vflsec.companies.side import Batch, Commit, Limits, PaillierSide, draw_first_share, draw_normal, step
from vflsec.companies.snapshots import Snapshots
from vflsec.data.encode import densify
from vflsec.methods.checkpoint import State, copy_state, load_model_state, prefix_entries, select_entries
from vflsec.nn.encoders import build_encoder

CHUNK = 8192
"""Rows that are embedded at once where all are checked."""


class PassiveSide(PaillierSide):
    """The passive party's side: encrypts its embedding, decrypts masked numbers, and trains its bottom model.

    It learns nothing but its own gradient delta^C = delta W^T, which reveals the labels (``reveals`` of the protocol);
    with the columns themselves as embedding it gets none. See ``Side`` for the other arguments.

    Args:
        data: its columns of the common rows.
        job: the agreement.
        keys: of this run.

    Raises:
        UsageError: without an encoder, a number beyond 2^feature_bits; the message names its column and the setting.
    """

    role = "passive"

    def __init__(self, data: PartyRows, job: JobFile, keys: Keys, **options: Any) -> None:
        super().__init__(data, job, **options)
        self.bottom: nn.Module = nn.Identity()
        if self.gradients:
            with seed_weights(self._seed, "model", PARTY["passive"]):
                self.bottom = build_encoder(data.layout, job.model.spec, job.model.outputs)
        else:
            for x in data.features.values():  # these are encrypted as they are: all are checked before any is sent
                bits = job.paillier.feature_precision, job.paillier.feature_bits
                encode(densify(x), *bits, "features", data.layout.names)
        width = job.model.width or data.layout.width
        self.keys = keys
        self.public = keys.public
        self.agreed = self.layout(width)
        self.holder = PassiveRole(
            keys,
            self.agreed,
            optimizer=self._make_linear_sgd(),
            share0=draw_first_share(self._randbits, width, job.model.outputs) if job.model.share else None,
            batches=self._batches,
            workers=self._workers,
            randbits=self._randbits,
        )
        self.optimizer = self._make_sgd(self.bottom) if self.gradients else None

    def introduce(self) -> dict[str, Any]:
        """Return the layout that this side has made, and its key."""
        return {"layout": msgspec.to_builtins(self.agreed), "key": self.public}

    def save_keys(self, snapshots: Snapshots) -> None:
        """Keep the private key."""
        snapshots.save_key(pack_keys(self.keys))

    def meet(self, theirs: Hello) -> Limits:
        """Return the limits of the layout that this side has made."""
        return get_limits(self.agreed)

    def make_header(self, run: str) -> Header:
        """Return the header of a recording of this role."""
        return self._make_header(self.public)

    def learn(self, port: Port, batch: Batch, commit: Commit) -> None:
        """Send features, scores and the noised gradient of the weights; then train the bottom model on delta^C."""
        self.bottom.train()
        mu = self.bottom(self.x["train"][batch.rows])  # (B, g)
        exchange = self._exchange(port)
        exchange.scores(_to_double(mu), self._score_noise(len(batch.rows)))
        noised = exchange.weights(rate=batch.rate)
        if self.optimizer is None:
            port.receive(Committed)
        else:
            gradient = exchange.embedding_gradient(noised)  # (B, g)
            if not gradient.any():
                raise ProtocolError(
                    f"expected a gradient of batch {batch.number}, got zero for every row: the other party deviates "
                    "from the protocol, or the model already fits every row; then agree on fewer epochs"
                )
            step(self.optimizer, mu, torch.from_numpy(gradient / len(batch.rows)).to(mu), batch.rate)
            self._check_moved(batch.number + 1)
        commit(noised)

    @torch.no_grad()
    def _check_moved(self, number: int) -> None:
        """Check the embedding of the rows of batch ``number``, or of all rows between epochs, before saving the state.

        Otherwise a wrong gradient would be noticed only after the state before it has been deleted.

        Raises:
            UsageError: a number is not finite, or larger than the layout admits.
        """
        between = number % self.schedule.per_epoch == 0
        parts = [*self.x.values()] if between else [self.x["train"][self.schedule[number].rows]]
        self.bottom.eval()
        for x in (chunk for part in parts for chunk in torch.split(part, CHUNK)):
            try:
                encode(_to_double(self.bottom(x)), self.agreed.feature_precision, self.agreed.feature_bits, "features")
            except UsageError as error:
                raise UsageError(
                    f"after batch {number - 1}, which does not count, and unless the other party's gradient was wrong: "
                    f"{error}"
                ) from None

    @torch.no_grad()
    def infer(self, port: Port, split: str, rows: Tensor) -> None:
        """Send features and scores of test rows."""
        self.bottom.eval()
        mu = self.bottom(self.x[split][rows])
        self._exchange(port).scores(_to_double(mu), self._score_noise(len(rows)), learns=False)

    def _exchange(self, port: Port) -> Exchange:
        return Exchange(passive=Seat(self.holder, port))

    def _score_noise(self, rows: int) -> np.ndarray | None:
        """Return noise (B, C) on the scores, or None; new noise if they are requested again."""
        deviation, outputs = self.job.paillier.score_noise, self.job.model.outputs
        return deviation * draw_normal(self._randbits, (rows, outputs)) if deviation else None

    def state(self) -> State:
        """Return the bottom model, its optimizer and the share of the weights."""
        bottom = copy_state(self.bottom, self.optimizer) if self.optimizer else {}
        return {**prefix_entries("bottom", bottom), **prefix_entries("holder", self.holder.state())}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore ``state``, which belongs to the same key."""
        if self.optimizer:
            load_model_state(select_entries("bottom", state), self.bottom, self.optimizer)
        self.holder.load(select_entries("holder", state))

    def models(self) -> State:
        """Return the bottom model, and the share of the top model's weights, without which nobody can predict."""
        bottom = {f"bottom.{key}": value.numpy() for key, value in self.bottom.state_dict().items()}
        return {**bottom, **prefix_entries("share", self.holder.state())}

    def close(self) -> None:
        """End the processes that prepare randomizers."""
        self.holder.close()


def pack_keys(keys: Keys) -> dict[str, bytes]:
    """Return the factors of ``keys``, and the orders of subgroup mode, little-endian."""
    numbers = {"p": keys.private.p, "q": keys.private.q}
    if keys.mode == "subgroup":
        numbers |= {"order_p": int(keys.halves[0].order), "order_q": int(keys.halves[1].order)}
    return {name: value.to_bytes(-(-value.bit_length() // 8), "little") for name, value in numbers.items()}


def restore_keys(numbers: Mapping[str, bytes], mode: Mode) -> Keys:
    """Return the keys of ``pack_keys``."""
    values = {name: int.from_bytes(content, "little") for name, content in numbers.items()}
    p, q = values["p"], values["q"]
    orders = (values["order_p"], values["order_q"]) if mode == "subgroup" else None
    return Keys(PaillierPrivateKey(PaillierPublicKey(p * q), p, q), mode, orders)


def _to_double(mu: Tensor) -> np.ndarray:
    return mu.detach().double().numpy()
