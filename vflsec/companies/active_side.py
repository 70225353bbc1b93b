"""The active party: the labels, its own columns and the linear top model."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import torch
from scipy.special import expit, log_softmax
from torch import Tensor, nn

from vflsec.base.errors import Diverged, PeerRefused, UsageError
from vflsec.base.seeds import seed_weights
from vflsec.cipher.arithmetic.keys import PublicKey
from vflsec.cipher.arithmetic.layout import CipherLayout
from vflsec.cipher.recording import Header
from vflsec.cipher.roles.active import ActiveRole, ScoresTooLarge
from vflsec.cipher.roles.exchange import Exchange, Port, Seat
from vflsec.companies.job import JobFile
from vflsec.companies.messages import Committed, Hello, get_limits
from vflsec.companies.party_rows import PartyRows
from vflsec.companies.side import Batch, Commit, Limits, PaillierSide, draw_first_share, draw_normal, step
from vflsec.methods.checkpoint import State, copy_state, load_model_state, prefix_entries, select_entries
from vflsec.results.metrics import METRICS, list_metrics


class ActiveSide(PaillierSide):
    """The active party's side: computes on encrypted embeddings, and learns their part of each score alone.

    See ``Side`` for the arguments.

    Raises:
        UsageError: the job's outputs do not fit the classes.
    """

    role = "active"

    def __init__(self, data: PartyRows, job: JobFile, **options: Any) -> None:
        super().__init__(data, job, **options)
        self.y = get_labels(data, job, (1, 2))
        self._public: PublicKey | None = None
        self.scores = np.zeros((len(data.ids["test"]), job.model.outputs))
        self.loss = float("nan")

    def meet(self, theirs: Hello) -> Limits:
        """Make the top model for the width and the key of the passive party."""
        width = theirs.layout.get("width")
        if theirs.key is None or type(width) is not int or not 0 < width <= 1 << 20:
            raise PeerRefused("expected the key and the width of the embedding from the passive party, got none")
        if self.job.model.width not in (None, width):
            raise PeerRefused(f"expected an embedding of width {self.job.model.width}, got {width} from the peer")
        layout = self.layout(width)
        for name, value in msgspec.to_builtins(layout).items():
            if theirs.layout.get(name) != value:
                raise PeerRefused(
                    f"expected one layout on both sides, got {name} = {value} here and {theirs.layout.get(name)} "
                    "there: give both parties one vflsec"
                )
        theirs.key.check(layout.bits, layout.mode)
        if theirs.key != self._public:
            self._make(layout, theirs.key)
        self.agreed = layout
        return get_limits(layout)

    def make_header(self, run: str) -> Header:
        """Return the header of a recording of this role."""
        assert self._public is not None, "the parties have met"
        return self._make_header(self._public)

    def _make(self, layout: CipherLayout, public: PublicKey) -> None:
        """Draw the linear layer over own columns and embedding, and give the part of the embedding to the role."""
        self.close()
        columns = self.data.layout.width
        with seed_weights(self._seed, "model", "top"):
            joint = nn.Linear(columns + layout.width, layout.outputs).double()  # drawn as if all columns were its own
        self.top = nn.Linear(columns, layout.outputs, dtype=torch.float64)
        with torch.no_grad():
            self.top.weight.copy_(joint.weight[:, :columns])
            self.top.bias.copy_(joint.bias)
        self.holder = ActiveRole(
            public,
            layout,
            draw_first_share(self._randbits, layout.width, layout.outputs, joint.in_features),
            optimizer=self._make_linear_sgd(),
            batches=self._batches,
            workers=self._workers,
            randbits=self._randbits,
        )
        self.optimizer = self._make_sgd(self.top)
        self._public = public

    def learn(self, port: Port, batch: Batch, commit: Commit) -> None:
        """Compute the scores and the loss, update both models, and send delta^C once the batch is kept."""
        y = self.y["train"][batch.rows.numpy()]
        port.note("labels", y)
        shared, local = self._score(port, "train", batch.rows)
        delta, self.loss = compute_residual(shared + local.detach().numpy(), y)
        if not np.isfinite(self.loss):
            raise Diverged(f"the loss is {self.loss}: lower train.lr")
        port.note("loss", np.array([self.loss]))
        exchange = self._exchange(port)
        noised = exchange.weights(delta, rate=batch.rate)
        step(self.optimizer, local, torch.from_numpy(delta / len(batch.rows)), batch.rate)
        if self.gradients:
            exchange.embedding_gradient(noised, delta, self._noise(delta), before_sending=lambda: commit(noised))
        else:
            commit(noised)
            port.send(Committed())

    def _noise(self, delta: np.ndarray) -> np.ndarray | None:
        """Return noise (B, g) on delta^C, or None; new noise for a batch that is done again."""
        deviation = self.job.paillier.noise
        if not deviation:
            return None
        drawn = draw_normal(self._randbits, (len(delta), self.holder.layout.width))
        return deviation * float(np.linalg.norm(delta, axis=1).max()) * drawn

    @torch.no_grad()
    def infer(self, port: Port, split: str, rows: Tensor) -> None:
        """Compute the scores of test rows."""
        shared, local = self._score(port, split, rows)
        self.scores[rows.numpy()] = shared + local.numpy()

    def _exchange(self, port: Port) -> Exchange:
        return Exchange(active=Seat(self.holder, port))

    def _score(self, port: Port, split: str, rows: Tensor) -> tuple[np.ndarray, Tensor]:
        """Return the passive party's part of the scores (B, C), and the active party's own."""
        try:
            shared: np.ndarray = self._exchange(port).scores()
        except ScoresTooLarge as error:  # the weights may be spoiled: going back to an earlier state may help
            raise Diverged(str(error)) from None
        local = self.top(self.x[split][rows].double())
        if shared.shape != local.shape:
            raise PeerRefused(f"expected scores of shape {tuple(local.shape)}, got {shared.shape}")
        return shared, local

    def logits(self) -> np.ndarray:
        """Return the logits (n, classes) of the test rows."""
        z = self.scores
        return np.hstack([np.zeros_like(z), z]) if z.shape[1] == 1 else z

    def state(self) -> State:
        """Return the top model over the own columns, its optimizer, and the share of the weights over the embedding."""
        return {
            **prefix_entries("top", copy_state(self.top, self.optimizer)),
            **prefix_entries("holder", self.holder.state()),
        }

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore ``state``."""
        load_model_state(select_entries("top", state), self.top, self.optimizer)
        self.holder.load(select_entries("holder", state))

    def models(self) -> State:
        """Return the top model over the own columns, and the share of the rest, which is noise by itself."""
        top = {f"top.{key}": value.numpy() for key, value in self.top.state_dict().items()}
        return {**top, **prefix_entries("share", self.holder.state())}

    def close(self) -> None:
        """End the processes that prepare randomizers."""
        if self._public is not None:
            self.holder.close()


def get_labels(data: PartyRows, job: JobFile, of_two: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return the class of each row by split, if the job's outputs fit the classes; two may have ``of_two`` outputs.

    Raises:
        UsageError: they do not.
    """
    assert data.labels is not None, "the active party has labels"
    classes, outputs = len(data.classes), job.model.outputs
    fitting = of_two if classes == 2 else (classes,)
    if outputs not in fitting:
        expected = " or ".join(map(str, fitting))
        raise UsageError(f"expected model.outputs = {expected} for {classes} classes, got {outputs}")
    return data.labels


def tabulate_predictions(data: PartyRows, logits: np.ndarray) -> bytes:
    """Return ids, labels and scores of the test rows as CSV."""
    assert data.labels is not None, "the active party has labels"
    columns = {"id": data.ids["test"], "label": np.array(data.classes)[data.labels["test"]]}
    scores = {f"score_{name}": z for name, z in zip(data.classes, logits.T, strict=True)}
    return pd.DataFrame({**columns, **scores}).to_csv(index=False).encode()


def measure_utility(data: PartyRows, logits: np.ndarray) -> dict[str, float]:
    """Return every metric of the test rows, the headline first."""
    assert data.labels is not None, "the active party has labels"
    return {name: METRICS[name](logits, data.labels["test"]) for name in list_metrics(len(data.classes))}


def compute_residual(z: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the gradient (B, C) of each row's loss with respect to its scores, and the mean loss.

    One output is a logistic regression, s(z) - y; more are a softmax, softmax(z) - onehot(y).
    """
    if z.shape[1] == 1:
        target = y[:, None].astype(np.float64)
        return expit(z) - target, float(np.logaddexp(0, z).mean() - (z * target).mean())
    log_share = log_softmax(z, axis=1)
    target = np.eye(z.shape[1])[y]
    return np.exp(log_share) - target, float(-(log_share * target).sum(axis=1).mean())
