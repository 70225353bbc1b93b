"""CoAE: training uses a code of each label that is close to uniform, and only the active party can decode it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.base.errors import Diverged
from vflsec.core.defense import Defense

STEPS = 500
RATE = 1e-3
MAX_HIDDEN = 4096  # units of the hidden layer
SURE = 0.6


class ConfusionalAutoencoder(Defense):
    """Soft labels of high entropy replace the labels in training; only the active party can decode predictions.

    Before training, the active party fits an encoder e and a decoder d, C -> (6C)^2 -> C with ReLU and softmax (at most
    4096 hidden units), to the C one-hot labels y, by 500 steps of Adam on

        CE(d(e(y)), y) - lambda · H(e(y)),

    averaged over classes; H is the entropy in nats, at most log C. No row's label is used. Class c has the code e(c)
    (C,), and a prediction z is decoded as d(softmax(z)). A label that is soft already has the mean of its classes'
    codes. With a larger lambda, codes are closer to uniform, and to each other.

    Source: Zou et al. 2022 (CoAE), as in FATE's code, which adds -lambda_1 · CE(e(y), y). That term has no minimum, and
    with two classes it swaps them. Renaming classes hides nothing from an attacker who knows one row of each, but makes
    ``direct`` appear to fail. Here the term is left out, and the entries of codes are ordered so that classes have as
    much weight in their own codes as possible: the attacker is assumed to know or guess the names.

    Only the active party decodes predictions. Others who see the top model's output, as with ``model.head=none``, see
    codes. Training diverges if lambda is so large that a code is decoded as its class with a probability below .6.

    Args:
        strength: lambda.
    """

    name = "coae"
    strength_name = "lambda"
    strengths = (0.5, 1.0, 2.0)
    points = ()
    reference = (
        "Zou et al. 2022, Defending Batch-Level Label Inference and Replacement Attacks in Vertical Federated "
        "Learning, IEEE Transactions on Big Data"
    )
    guarantee = "none, empirical only; each class has one code, which an attacker with some labels learns"
    softens = True
    hides = (
        "from the passive party: the label in length and sign of early gradients, while the difference of two codes is "
        "small compared with the model's error"
    )
    costs = (
        "an autoencoder, and utility with few epochs or rows, because codes that are closer to each other are learned "
        "from smaller differences"
    )
    fails = (
        "against attackers with some labels or many epochs: each class has one code, which the model learns to "
        "distinguish, and so do mc and direction; soft codes can even improve the bottom model that mc reads"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._code = nn.ModuleDict()

    def prepare(self, widths: Mapping[str, int], *, n_classes: int, rng: torch.Generator) -> None:
        """Draw the autoencoder; the first call of ``on_labels`` fits it, unless a trained one was loaded."""
        self._code["book"] = _Codebook(n_classes)

    def on_labels(self, y: Tensor, *, features: Tensor, n_classes: int, rng: torch.Generator) -> Tensor:
        """Return the codes (N, C) of labels, (N,) class numbers or (N, C) probabilities."""
        if not self.strength:
            return y
        book = self._book
        if not book.fitted:
            book.fit(self.strength)
        return book.codes[y] if y.dim() == 1 else y @ book.codes

    def on_predictions(self, logits: Tensor) -> Tensor:
        """Return the log probabilities (B, C) of classes, from logits of codes."""
        return F.log_softmax(self._book.decode_logits(torch.softmax(logits, dim=1)), dim=1)

    @property
    def _book(self) -> _Codebook:
        book = self._code["book"]
        assert isinstance(book, _Codebook)
        return book


class _Codebook(nn.Module):
    """The code of each class, and its decoder.

    Args:
        n_classes: C.

    Attributes:
        codes: (C, C), a row for each class.
        fitted: whether the codes have been fitted.
    """

    codes: Tensor
    fitted: Tensor

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        hidden = min((6 * n_classes) ** 2, MAX_HIDDEN)
        self.encoder = nn.Sequential(nn.Linear(n_classes, hidden), nn.ReLU(), nn.Linear(hidden, n_classes))
        self.read = nn.Linear(n_classes, hidden)
        self.decide = nn.Linear(hidden, n_classes)
        self.register_buffer("codes", torch.eye(n_classes))
        self.register_buffer("fitted", torch.tensor(False))
        self.requires_grad_(False)  # the federation does not train it

    def decode_logits(self, codes: Tensor) -> Tensor:
        """Return the logits (B, C) of the classes of codes (B, C)."""
        logits: Tensor = self.decide(F.relu(self.read(codes)))
        return logits

    def fit(self, strength: float) -> None:
        """Fit both parts in place, and order the entries of the codes.

        Raises:
            Diverged: the decoder cannot distinguish the codes.
        """
        y = torch.arange(len(self.codes), device=self.codes.device)
        classes = torch.eye(len(y), device=y.device)
        self.requires_grad_(True)
        optimizer = torch.optim.Adam(self.parameters(), RATE, fused=True)
        for _ in range(STEPS):
            logs = F.log_softmax(self.encoder(classes), dim=1)
            codes = logs.exp()
            entropy = -(codes * logs).sum(dim=1).mean()
            loss = F.cross_entropy(self.decode_logits(codes), y) - strength * entropy
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        self.requires_grad_(False)
        codes = torch.softmax(self.encoder(classes), dim=1)
        if float(torch.softmax(self.decode_logits(codes), dim=1).diagonal().min()) < SURE:
            raise Diverged(f"coae's codes of {len(y)} classes cannot be told apart with lambda={strength:g}: lower it")
        order = torch.from_numpy(linear_sum_assignment(-codes.cpu().numpy())[1]).to(y.device)  # the entry of each class
        self.codes.copy_(codes[:, order])
        self.read.weight.copy_(self.read.weight[:, order].clone())
        self.fitted.fill_(True)
