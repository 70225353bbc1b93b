"""Generative regression network (GRN): columns that, with own columns, lead to the observed predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.attacks.imputation import Imputation
from vflsec.base.checks import check_non_negative, check_positive
from vflsec.base.layout import Layout
from vflsec.core.attack import Attack
from vflsec.core.view import Guess, Need, View
from vflsec.inference.joint_model import JointModel
from vflsec.inference.regression import is_still_falling


@dataclass(kw_only=True, eq=False, repr=False)
class GenerativeRegressionNetwork(Attack):
    """Recovery of the victim's columns from the joint model's predictions, by a network that explains them.

    A generator G maps own columns x (B, p) and noise r ~ N(0, 1) (B, d) to the victim's columns (B, d). The victim's
    bottom model f, which the adversary knows, and the top model turn these into a prediction. G is trained so that it
    equals the observed prediction v (B, C):

        loss = ||softmax(top(own embedding, f(G(x, r)))) - v||^2 + penalty · mean_j max(0, var_j(G(x, r)) - 1)

    The second term is the source's bound on the variance of generated columns; encoded numbers have variance one.
    Numbers are unbounded, categories are a softmax. The guess is the mean over ``draws`` of r.

    v comes from one release of each row: of training rows in the last epoch, of test rows at prediction. A prediction
    is that of the final model, so earlier releases are not averaged. The attack therefore uses less information than
    ``inversion-whitebox``, and measures what predictions reveal. It needs no auxiliary row; G starts at the mean of the
    auxiliary rows if there are any. G's last layer starts at zero, so that columns which do not affect the prediction
    stay at the mean.

    Source: Luo et al., ICDE 2021, "Feature inference attack on model predictions in vertical federated learning"
    (arXiv 2010.10152), section V.

    Args:
        victim: whose columns; None for the first passive party.
        steps: number of updates.
        batch: rows in an update.
        lr: learning rate of Adam.
        penalty: weight of the bound on the variance.
        draws: number of draws of r for each row, whose mean is the guess.
    """

    name = "grn"
    version = 2
    side = "active"
    target = "features"
    needs = frozenset({Need.FEATURES, Need.MODEL, Need.EMBEDDINGS, Need.VICTIM_MODEL, Need.TOP})
    reference = "Luo et al., ICDE 2021, arXiv 2010.10152, section V"
    verified = "unverified"
    differs = (
        "Written from memory of the source: the generator's size, the weight of the penalty and the number of "
        "updates are ours; the source minimizes over many epochs.",
        "The generator's last layer starts at zero, or at the auxiliary means; the guess is the mean over several "
        "draws of noise.",
    )
    costs = "steps updates of a small network"
    fails = (
        "if predictions depend little on single columns: C classes give C - 1 equations for d unknowns, and the other "
        "directions of the guess can be worse than the mean (R2 below 0)"
    )

    victim: str | None = None
    steps: int = 300
    batch: int = 256
    lr: float = 1e-3
    penalty: float = 1.0
    draws: int = 4

    def __post_init__(self) -> None:
        check_positive(steps=self.steps, batch=self.batch, lr=self.lr, draws=self.draws)
        check_non_negative(penalty=self.penalty)

    def alone(self) -> Attack:
        """Return imputation: without the federation there is no prediction."""
        return Imputation(victim=self.victim)

    @property
    def search(self) -> Mapping[str, Sequence[Any]]:
        """Vary the number of updates and the learning rate."""
        return {"steps": (self.steps, 3 * self.steps), "lr": (self.lr / 3, self.lr, self.lr * 3)}

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return the columns (n, d) of every split with observed predictions."""
        joint, f = JointModel(view), view.victim_model
        assert f is not None
        f.eval().requires_grad_(False)
        columns = {split: view.features[split].float() for split in joint.splits}
        observed = {split: F.softmax(joint.predict(split), dim=1) for split in columns}
        first = next(iter(columns.values()))
        d, p, where = view.n_classes, first.shape[1], first.device
        last = nn.Linear(64, d)
        nn.init.zeros_(last.weight)  # the first guess is the mean
        with torch.no_grad():
            last.bias.copy_(_start(view))
        generator = nn.Sequential(
            *(nn.Linear(p + d, 128), nn.LayerNorm(128), nn.ReLU()),
            *(nn.Linear(128, 64), nn.LayerNorm(64), nn.ReLU()),
            last,
        ).to(where)
        optimizer = torch.optim.Adam(generator.parameters(), self.lr, fused=True)

        def generate(x: Tensor) -> Tensor:
            r = torch.randn(len(x), d, generator=rng).to(where)
            return constrain_values(generator(torch.cat([x, r], dim=1)), view.layout)

        rows = [(split, i) for split, x in columns.items() for i in torch.split(torch.arange(len(x)), 100_000)]
        sizes = torch.tensor([float(len(i)) for _, i in rows])
        losses = []
        for _ in range(self.steps):
            split, among = rows[int(torch.multinomial(sizes, 1, generator=rng))]
            chosen = among[torch.randint(len(among), (self.batch,), generator=rng)].to(where)
            guessed = generate(columns[split][chosen])
            predicted = F.softmax(joint.predict(split, chosen, f(guessed)), dim=1)
            misfit = F.mse_loss(predicted, observed[split][chosen])
            loss = misfit + self.penalty * (guessed.var(dim=0) - 1).clamp_min(0).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()))
        with torch.no_grad():
            guesses = {s: torch.stack([generate(x) for _ in range(self.draws)]).mean(dim=0) for s, x in columns.items()}
        return Guess(guesses, converged=not is_still_falling(losses), budget={"updates": self.steps})


def _start(view: View) -> Tensor:
    """Return the first output (d,) of G: the mean of the auxiliary rows; zero without any."""
    if len(view.aux_rows) == 0:
        return torch.zeros(view.n_classes, device=view.aux_labels.device)
    mean = view.aux_labels.float().mean(dim=0)
    for _, kind, start, width in view.layout.columns if view.layout else ():
        if kind == "categorical":
            mean[start : start + width] = mean[start : start + width].clamp_min(0.5 / len(view.aux_rows)).log()
    return mean


def constrain_values(values: Tensor, layout: Layout | None) -> Tensor:
    """Return values (B, d) with a softmax over each one-hot block; numbers stay as they are."""
    if layout is None:
        return values
    parts = [
        values[:, start : start + width].softmax(dim=1) if kind == "categorical" else values[:, start : start + width]
        for _, kind, start, width in layout.columns
    ]
    return torch.cat(parts, dim=1)
