"""Generative regression network (GRN): columns that, with one's own, lead to the predictions that were seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.attacks.imputation import Imputation
from vflsec.core.attack import Attack
from vflsec.core.checks import non_negative, positive
from vflsec.core.errors import InsufficientView
from vflsec.core.layout import Layout
from vflsec.core.message import Kind
from vflsec.core.view import Guess, Need, View
from vflsec.inference.convergence import still_falling
from vflsec.inference.releases import latest


class GenerativeRegressionNetwork(Attack):
    """Recovery of the victim's columns from the joint model's predictions, by a network that explains them.

    A generator G makes the victim's columns (B, d) of own columns (B, p) and noise r ~ N(0, 1) (B, d); the known bottom
    model f of the victim and the top model turn them into a prediction, which is to be the one that was seen:

        loss = ||softmax(top(own embedding, f(G(x, r)))) - v||^2 + penalty · mean_j max(0, var_j(G(x, r)) - 1)

    The second term is the source's constraint on the variance of what is generated: encoded numbers have variance one.
    Numbers are free, categories a softmax. The guess is the mean over ``draws`` of r. v (B, C) comes from what the
    active party received, of training rows in the last epoch, of test rows at prediction: one release of each row, for
    a prediction is that of the last model, and no earlier release is averaged with it. So the attack reads less than
    ``inversion-whitebox``, and shows what predictions alone say. No auxiliary row is needed; where there are some, G
    starts at their means.

    Costs ``steps`` updates of a network of (128, 64), about a second. Fails where predictions say little of single
    columns: of C classes there are C - 1 equations for d unknowns, and the rest is G's invention, which may be worse
    than guessing the mean (R2 below 0). So G's last layer starts at zero, and invents only what explains something.

    Source: Luo et al., ICDE 2021, "Feature inference attack on model predictions in vertical federated learning"
    (arXiv 2010.10152), section V. Written from memory: the sizes of G and the penalty are ours, and the source
    minimizes over many epochs.

    Args:
        victim: whose columns; None for the first passive party.
        steps: updates.
        batch: rows in an update.
        lr: of Adam.
        penalty: weight of the constraint on variance.
        draws: of r per row, whose mean is guessed.
    """

    name = "grn"
    side = "active"
    target = "features"
    needs = frozenset({Need.OWN_FEATURES, Need.OWN_MODEL, Need.EMBEDDINGS, Need.VICTIM_MODEL})
    reference = "Luo et al., ICDE 2021, arXiv 2010.10152, section V"
    verified = "unverified"
    differs = (
        "Written from memory of the source: the generator's size, the weight of the penalty and the number of "
        "updates are ours.",
        "The generator's last layer starts at zero, or at the auxiliary means; the guess is the mean over several "
        "draws of noise.",
    )

    def __init__(
        self,
        *,
        victim: str | None = None,
        steps: int = 300,
        batch: int = 256,
        lr: float = 1e-3,
        penalty: float = 1.0,
        draws: int = 4,
    ) -> None:
        positive(steps=steps, batch=batch, lr=lr, draws=draws)
        non_negative(penalty=penalty)
        self.victim = victim
        self.steps = steps
        self.batch = batch
        self.lr = lr
        self.penalty = penalty
        self.draws = draws

    def alone(self) -> Attack | None:
        """Return imputation: without the federation there is no prediction."""
        return Imputation(victim=self.victim)

    @property
    def search(self) -> Mapping[str, Sequence[Any]]:
        """Vary how long the generator is fitted, and how fast."""
        return {"steps": (self.steps, 3 * self.steps), "lr": (self.lr / 3, self.lr, self.lr * 3)}

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return the columns (n, d) of every row of which a prediction was seen."""
        federation = _Federation(view)
        own = {split: view.features[split].float() for split in federation.splits}
        d, where = view.n_classes, next(iter(own.values())).device
        p = next(iter(own.values())).shape[1]
        last = nn.Linear(64, d)
        nn.init.zeros_(last.weight)  # the first guess is the mean: nothing is invented but what explains something
        with torch.no_grad():
            last.bias.copy_(_start(view))
        generator = nn.Sequential(
            *(nn.Linear(p + d, 128), nn.LayerNorm(128), nn.ReLU()),
            *(nn.Linear(128, 64), nn.LayerNorm(64), nn.ReLU()),
            last,
        ).to(where)
        optimizer = torch.optim.Adam(generator.parameters(), self.lr, fused=True)

        def generated(x: Tensor) -> Tensor:
            r = torch.randn(len(x), d, generator=rng).to(where)
            return within(generator(torch.cat([x, r], dim=1)), view.layout)

        rows = [(split, i) for split, x in own.items() for i in torch.split(torch.arange(len(x)), 100_000)]
        sizes = torch.tensor([float(len(i)) for _, i in rows])
        losses = []
        for _ in range(self.steps):
            split, among = rows[int(torch.multinomial(sizes, 1, generator=rng))]
            chosen = among[torch.randint(len(among), (self.batch,), generator=rng)].to(where)
            guessed = generated(own[split][chosen])
            wrong = F.mse_loss(federation.predicted(split, chosen, guessed), federation.seen[split][chosen])
            loss = wrong + self.penalty * (guessed.var(dim=0) - 1).clamp_min(0).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()))
        with torch.no_grad():
            found = {
                split: torch.stack([generated(x) for _ in range(self.draws)]).mean(dim=0) for split, x in own.items()
            }
        return Guess(found, converged=not still_falling(losses), budget={"updates": self.steps})


class _Federation:
    """What the active party knows of the joint model: all but the victim's columns.

    Attributes:
        splits: of which every party's embedding was received.
        seen: the joint model's probabilities (n, C) by split.
    """

    def __init__(self, view: View) -> None:
        if view.top is None or view.model is None:
            raise InsufficientView("attack 'grn' needs the joint model's top; this method's active party has none")
        self._top, self._victim, self._f = view.top.eval(), view.victim or "", view.victim_model
        senders = dict.fromkeys(
            m.sender for m in view.messages if m.kind is Kind.EMBEDDING and m.receiver == view.party
        )
        received = {sender: latest(view, Kind.EMBEDDING, sender=sender) for sender in senders}
        self.splits = [split for split in view.features if all(split in found for found in received.values())]
        for module in (self._top, self._f, view.model):
            assert module is not None
            module.eval().requires_grad_(False)
        with torch.no_grad():
            self._known: dict[str, dict[str, Tensor]] = {
                split: {view.party: view.model(view.features[split]), **{s: received[s][split] for s in senders}}
                for split in self.splits
            }
            self.seen = {s: F.softmax(self._top(list(known.values())), dim=1) for s, known in self._known.items()}

    def predicted(self, split: str, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the probabilities (B, C) that these columns (B, d) of the victim would lead to."""
        assert self._f is not None
        known = {name: h[rows] for name, h in self._known[split].items()} | {self._victim: self._f(columns)}
        return F.softmax(self._top(list(known.values())), dim=1)


def _start(view: View) -> Tensor:
    """Return the output (d,) of G before it has learned anything: the means of auxiliary rows, or of the encoding."""
    if len(view.aux_rows) == 0:
        return torch.zeros(view.n_classes, device=view.aux_labels.device)
    mean = view.aux_labels.float().mean(dim=0)
    for _, kind, start, width in view.layout.columns if view.layout else ():
        if kind == "categorical":
            mean[start : start + width] = mean[start : start + width].clamp_min(0.5 / len(view.aux_rows)).log()
    return mean


def within(values: Tensor, layout: Layout | None) -> Tensor:
    """Return values (B, d) with a softmax over each one-hot block; numbers as they are."""
    if layout is None:
        return values
    parts = [
        values[:, start : start + width].softmax(dim=1) if kind == "categorical" else values[:, start : start + width]
        for _, kind, start, width in layout.columns
    ]
    return torch.cat(parts, dim=1)
