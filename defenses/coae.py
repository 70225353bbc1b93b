"""CoAE: training sees a confusing code of each label, which only the active party can read back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.core.defense import Defense
from vflsec.core.errors import Diverged

STEPS = 500
RATE = 1e-3
WIDEST = 4096
SURE = 0.6


class ConfusionalAutoencoder(Defense):
    """A code of soft labels, of high entropy: the federation is trained on codes, and what it predicts is decoded.

    Before training the active party fits an encoder e and a decoder d, C -> (6C)^2 -> C with ReLU and softmax (4096
    hidden units at most), to the C one-hot labels y, by 500 steps of Adam on

        CE(d(e(y)), y) - lambda · H(e(y)),

    the means over classes; H is the entropy in nats, log C at most. No label of anybody is read. Class c is then coded
    as e(c) (C,), and a prediction z as d(softmax(z)). A label that is soft already is coded as the mean of its classes'
    codes. The more lambda, the nearer all codes are to even, and to each other.

    Source: Zou et al. 2022 (CoAE), as in FATE's code, which adds -lambda_1 · CE(e(y), y): this has no minimum, and of
    two classes makes one the other. A class under another name is hidden from nobody who knows one row of it, and makes
    ``direct`` look blind; here the term is left out, and the entries of codes are named after the classes so that
    classes have as much weight in their own codes as can be. An attacker who knows some labels finds the names; one who
    knows none is here taken to have guessed them.

    From the passive party it hides the label in the length and the sign of early gradients, as long as what tells two
    codes apart is small beside the model's error. Costs an autoencoder, and training: codes that lie closer are learned
    from smaller differences, so that utility falls where epochs or rows are few. Fails against everybody who knows some
    labels or watches for long: each class has one code, the model learns to tell codes apart, and so does ``mc``, whose
    head takes any scale, or ``direction``. On digits, three seeds, lambda .5 takes ``direction`` from 1.00 to .61, and
    ``mc`` up from .79 to .87: soft codes make a better bottom model, on which a head of all labels reaches .91, from
    .87. On credit-default lambda .5 to 20 leave ``direction`` at 1.00 and ``mc`` where it was. The predictions that are
    decoded are the active party's alone; where others see what the top model gives, as with ``model.head=none``, they
    see codes.

    Guarantee: none, empirical only.

    | case | result |
    |---|---|
    | strength 0 | the labels themselves, and the predictions |
    | lambda so large (100, say) that a code reads as its class with a probability below .6 | refused as diverged |

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
    guarantee = "none, empirical only; a class has one code, which whoever knows some labels learns to read"
    softens = True

    def __init__(self, strength: float, *, at: Iterable[str] | None = None) -> None:
        super().__init__(strength, at=at)
        self._code = nn.ModuleDict()

    def prepare(self, widths: Mapping[str, int], *, n_classes: int, rng: torch.Generator) -> None:
        """Draw the autoencoder; it is fitted when labels are first asked for, and not where a trained one is read."""
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
    """The code of each class, and what reads it back.

    Args:
        n_classes: C.

    Attributes:
        codes: (C, C), a row for each class.
        fitted: whether these are codes yet.
    """

    codes: Tensor
    fitted: Tensor

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        hidden = min((6 * n_classes) ** 2, WIDEST)
        self.encoder = nn.Sequential(nn.Linear(n_classes, hidden), nn.ReLU(), nn.Linear(hidden, n_classes))
        self.read = nn.Linear(n_classes, hidden)
        self.decide = nn.Linear(hidden, n_classes)
        self.register_buffer("codes", torch.eye(n_classes))
        self.register_buffer("fitted", torch.tensor(False))
        self.requires_grad_(False)  # nothing of it is trained with the federation

    def decode_logits(self, codes: Tensor) -> Tensor:
        """Return the logits (B, C) of classes that codes (B, C) stand for."""
        logits: Tensor = self.decide(F.relu(self.read(codes)))
        return logits

    def fit(self, strength: float) -> None:
        """Fit both parts in place, and name the codes.

        Raises:
            Diverged: codes that the decoder cannot tell apart.
        """
        y = torch.arange(len(self.codes), device=self.codes.device)
        one_hot = torch.eye(len(y), device=y.device)
        self.requires_grad_(True)
        optimizer = torch.optim.Adam(self.parameters(), RATE, fused=True)
        for _ in range(STEPS):
            logs = F.log_softmax(self.encoder(one_hot), dim=1)
            codes = logs.exp()
            entropy = -(codes * logs).sum(dim=1).mean()
            loss = F.cross_entropy(self.decode_logits(codes), y) - strength * entropy
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        self.requires_grad_(False)
        codes = torch.softmax(self.encoder(one_hot), dim=1)
        if float(torch.softmax(self.decode_logits(codes), dim=1).diagonal().min()) < SURE:
            raise Diverged(f"coae's codes of {len(y)} classes cannot be told apart with lambda={strength:g}: lower it")
        order = torch.from_numpy(linear_sum_assignment(-codes.cpu().numpy())[1]).to(y.device)  # its entry, by class
        self.codes.copy_(codes[:, order])
        self.read.weight.copy_(self.read.weight[:, order].clone())
        self.fitted.fill_(True)
