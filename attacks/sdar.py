"""SDAR and PCAT: a simulator of the victim's bottom model, and a decoder of the simulator's embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.attacks.imputation import Imputation
from vflsec.base.checks import check_non_negative, check_positive
from vflsec.core.attack import Attack
from vflsec.core.message import Kind
from vflsec.core.scaling import Bounds, clip_softly
from vflsec.core.view import Guess, Need, View
from vflsec.inference.hijacking import build_network, descend
from vflsec.inference.joint_model import JointModel
from vflsec.inference.regression import project_categories, standardize
from vflsec.inference.releases import read_last_values

CALIBRATED = (
    "Each column of the guess is scaled and shifted to fit the auxiliary rows: what nothing determines can be far off."
)


@dataclass(kw_only=True, eq=False, repr=False)
class FromSimulator(Attack):
    """Recovery of the victim's columns by a decoder of the embeddings of a model that imitates the victim's.

    The simulator e maps columns x' (B, d) of auxiliary rows to embeddings (B, k), from which the joint model's top is
    to predict their labels y. The decoder g maps these embeddings to x'. The guess is g(h), from the last embedding h
    of each row. That some h are those of auxiliary rows gives no more than the scale of each column;
    ``inversion-blackbox`` fits the decoder to them.
    """

    side = "active"
    target = "features"
    needs = frozenset({Need.FEATURES, Need.MODEL, Need.EMBEDDINGS, Need.AUX_LABELS, Need.TOP})
    likeness = 0.0
    realism = 0.0
    with_columns = False

    victim: str | None = None
    steps: int = 400
    batch: int = 128
    layers: int = 1
    hidden: int = 64
    lr: float = 2e-2
    decay: float = 160.0

    def __post_init__(self) -> None:
        check_positive(steps=self.steps, batch=self.batch, hidden=self.hidden, lr=self.lr)
        check_non_negative(layers=self.layers, decay=self.decay)

    def alone(self) -> Imputation:
        """Return imputation: without the federation there is no embedding."""
        return Imputation(victim=self.victim)

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return the columns (n, d) of every split with received embeddings."""
        split, known, y = view.aux_split, view.aux_labels.float(), view.labels[view.aux_split]
        received = read_last_values(view, Kind.EMBEDDING, sender=view.victim)
        bounds = Bounds.from_columns(received[split])
        middle, scale = bounds.middle.float(), bounds.scale.where(bounds.scale.isfinite(), 1.0).float()
        embeddings = {s: clip_softly((h.float() - middle) / scale) for s, h in received.items()}
        context = {s: standardize(view.features[s], view.features[split]).float() for s in embeddings}
        context = context if self.with_columns else {s: x[:, :0] for s, x in context.items()}
        joint, h, columns = JointModel(view), embeddings[split], context[split]
        facts = torch.cat([columns, F.one_hot(y).float()], dim=1)  # of each row, for the critics
        d, k, hidden = known.shape[1], h.shape[1], (self.hidden,) * 2
        simulator = build_network(d, *(self.hidden,) * self.layers, k).to(h.device)
        decoder = build_network(k + columns.shape[1], *hidden, d).to(h.device)
        critics = [build_network(width + facts.shape[1], *hidden, 1).to(h.device) for width in (k, d)]
        networks = (simulator, decoder, *critics)
        optimizers = [
            torch.optim.AdamW(n.parameters(), self.lr, weight_decay=self.decay / len(known)) for n in networks
        ]
        of_simulator, of_decoder, *of_critics = optimizers
        for step in range(self.steps):
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = self.lr * (1 - step / self.steps)
            drawn = torch.randint(len(known), (self.batch,), generator=rng).to(h.device)
            others = torch.randint(len(h), (self.batch,), generator=rng).to(h.device)
            x, rows = known[drawn], view.aux_rows[drawn]
            z = simulator(x)
            loss = F.cross_entropy(joint.predict(split, rows, middle + scale * z), y[rows])
            if self.likeness:
                loss = loss + self.likeness * compute_loss(critics[0], z, facts[rows], real=True)
            descend(of_simulator, loss)
            z = z.detach()
            loss = F.mse_loss(decoder(torch.cat([z, columns[rows]], dim=1)), x)
            decoded = decoder(torch.cat([h[others], columns[others]], dim=1))
            if self.realism:
                loss = loss + self.realism * compute_loss(critics[1], decoded, facts[others], real=True)
            descend(of_decoder, loss)
            if self.likeness:
                loss = compute_loss(critics[0], h[others], facts[others], real=True)
                descend(of_critics[0], loss + compute_loss(critics[0], z, facts[rows], real=False))
            if self.realism:
                loss = compute_loss(critics[1], x, facts[rows], real=True)
                descend(of_critics[1], loss + compute_loss(critics[1], decoded.detach(), facts[others], real=False))
        with torch.no_grad():
            guesses = {s: decoder(torch.cat([z, context[s]], dim=1)) for s, z in embeddings.items()}
        guesses = {s: self.refine_columns(x, embeddings[s], simulator) for s, x in guesses.items()}
        slope, shift = fit_line(guesses[split][view.aux_rows], known)
        return Guess({s: project_categories(slope * x + shift, view.layout) for s, x in guesses.items()})

    def refine_columns(self, x: Tensor, h: Tensor, simulator: nn.Module) -> Tensor:
        """Return columns near ``x`` (n, d) that fit ``h`` (n, k) better."""
        return x


@dataclass(kw_only=True, eq=False, repr=False)
class SimulatorDecoding(FromSimulator):
    """Recovery of the victim's columns by a simulator whose embeddings a critic takes for the victim's.

    The simulator e maps columns x' (B, d) of auxiliary rows to embeddings (B, k), from which the joint model's top is
    to predict their labels y. A critic E compares e(x') with received embeddings h, each beside label and own columns
    of its row. The decoder g maps embeddings and own columns to columns. A critic G compares g(h) with columns of
    auxiliary rows. With the cross entropy CE, and b, its binary form:

        simulator: CE(top(own embedding, e(x')), y) + likeness · b(E(e(x')), real)
        decoder: mean (g(e(x')) - x')^2 + realism · b(G(g(h)), real)

    The guess is g(h), from the last embedding of each row. That some h are those of auxiliary rows gives no more than
    the scale of each column; ``inversion-blackbox`` fits the decoder to them.

    Source: Zhu et al., NDSS 2025, "Passive inference attacks on split learning via adversarial regularization" (arXiv
    2310.10483), vanilla split learning; released code.

    Args:
        victim: whose columns; None for the first passive party.
        steps: updates of each network.
        batch: rows in an update.
        layers: hidden layers of the simulator; 0 for a linear one. It does best with the shape of the victim's model.
        hidden: width of each hidden layer.
        lr: learning rate of AdamW, from which it falls to zero.
        decay: weight decay times the number of auxiliary rows.
        likeness: weight of E's verdict.
        realism: weight of G's verdict.
        with_columns: whether critics and decoder read own columns.
    """

    name = "sdar"
    reference = "Zhu et al., NDSS 2025, arXiv 2310.10483; released code"
    verified = "recovery of a linear bottom model that the distribution of embeddings determines"
    differs = (
        "Runs after training, with the final top model; the source trains along, with the top model of each batch.",
        "Columns in place of images: networks with one or two hidden layers; the source has convolutions.",
        "Critics and decoder also read own columns, which a split by columns gives the adversary; the decoder reads no "
        "label, since test rows have none (with_columns).",
        "Fewer updates, with weight decay, at a higher learning rate that falls to zero; critics weigh more.",
        CALIBRATED,
        "Auxiliary rows are rows of the victim; the source has other rows of the same distribution, and as many.",
    )
    costs = "steps updates of four small networks"
    fails = (
        "with few auxiliary rows, and where another bottom model has embeddings of the same distribution: a critic "
        "compares distributions, and not rows"
    )

    likeness: float = 1.0
    realism: float = 0.02
    with_columns: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_non_negative(likeness=self.likeness, realism=self.realism)


@dataclass(kw_only=True, eq=False, repr=False)
class PseudoClient(FromSimulator):
    """Recovery of the victim's columns by a pseudo client with which the joint model's top predicts as well.

    The pseudo client e maps columns x' (B, d) of auxiliary rows to embeddings (B, k), from which the joint model's top
    is to predict their labels. A decoder g, fitted to pairs of e(x') and x', maps the last embedding h of each row to
    columns. Gradient descent then moves these to where e(x) is closer to h. That some h are those of auxiliary rows
    gives no more than the scale of each column; ``inversion-blackbox`` fits the decoder to them.

    Source: Gao and Zhang, USENIX Security 2023, "PCAT: Functionality and data stealing from split learning by
    pseudo-client attack", algorithm 1 and section 4.2.

    Args:
        victim: whose columns; None for the first passive party.
        steps: updates of each network.
        batch: rows in an update.
        layers: hidden layers of the pseudo client; 0 for a linear one.
        hidden: width of each hidden layer.
        lr: learning rate of AdamW, from which it falls to zero.
        decay: weight decay times the number of auxiliary rows.
        refinements: updates of the guess itself; 0 for that of the decoder.
    """

    name = "pcat"
    reference = "Gao and Zhang, USENIX Security 2023, algorithm 1 and section 4.2"
    verified = "recovery of a linear bottom model that labels determine, and of no more than they determine"
    differs = (
        "Runs after training, with the final top model (algorithm 1); its stronger form (algorithm 2) trains along, "
        "with the top model of each batch.",
        "Columns in place of images: networks with one or two hidden layers; the source has convolutions.",
        "The learning rate falls to zero, and there is weight decay.",
        "The pseudo client's embeddings start at the mean and scale of received ones.",
        CALIBRATED,
    )
    costs = "steps updates of two small networks"
    fails = (
        "with few classes: labels determine embeddings only in the C - 1 directions that the top model reads; and with "
        "few auxiliary rows"
    )

    refinements: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_non_negative(refinements=self.refinements)

    def refine_columns(self, x: Tensor, h: Tensor, simulator: nn.Module) -> Tensor:
        """Return columns near ``x`` (n, d) that the pseudo client maps closer to ``h`` (n, k)."""
        x = x.clone().requires_grad_()
        optimizer = torch.optim.Adam([x], self.lr)
        for _ in range(self.refinements):
            descend(optimizer, (simulator(x) - h).square().sum())
        return x.detach()


def fit_line(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slope (d,), at least 0, and the shift (d,) of the line on which ``y`` (n, d) lies best over ``x``."""
    centered = x - x.mean(dim=0)
    slope = (centered * y).sum(dim=0).clamp_min(0) / centered.square().sum(dim=0).clamp_min(1e-12)
    return slope, y.mean(dim=0) - slope * x.mean(dim=0)


def compute_loss(critic: nn.Module, values: Tensor, facts: Tensor, *, real: bool) -> Tensor:
    """Return the binary cross entropy of a critic of ``values`` (B, d) that are real, or not, with ``facts`` (B, q)."""
    verdict = critic(torch.cat([values, facts], dim=1))
    return F.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, float(real)))
