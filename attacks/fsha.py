"""Feature-space hijacking (FSHA): an active party that trains the victim's bottom model to be inverted."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflsec.attacks.imputation import Imputation
from vflsec.base.checks import check_non_negative, check_positive
from vflsec.base.seeds import make_rng, seed_weights
from vflsec.core.attack import HijackingAttack
from vflsec.core.knowledge import Knowledge
from vflsec.core.message import Kind, Step
from vflsec.core.method import Trained
from vflsec.core.view import Guess, Need, View
from vflsec.inference.hijacking import EXPECTED, SENT, build_network, descend, describe_alarm
from vflsec.inference.regression import project_categories
from vflsec.inference.releases import read_last_values


def read_decoder(trained: Trained, names: Sequence[str]) -> nn.Module | None:
    """Return the decoder that the adversary trained while it hijacked the victim's training, or None."""
    attack = trained.federation.malicious.get(names[0])
    hijacking = attack._hijacking if isinstance(attack, FeatureSpaceHijacking) else None
    return hijacking.decoder if hijacking else None


DECODER = Knowledge(
    "a decoder from its own training",
    "evaluate the job with vflsec eval, which trains the federation under attack",
    read=read_decoder,
    sides=("active",),
    at_end=True,
)


@dataclass(kw_only=True, eq=False, repr=False)
class FeatureSpaceHijacking(HijackingAttack):
    """Recovery of the victim's columns from embeddings of a bottom model that was trained to give them away.

    The adversary trains a pilot f' and a decoder g on the auxiliary rows, and a discriminator D that distinguishes
    embeddings of the pilot from those f(x) (B, d) that it receives, each beside own columns of the row. In place of the
    gradient of the task's loss it sends the gradient that makes D take f(x) for embeddings of the pilot. Its losses are
    those of the released code:

        pilot and decoder: mean (g(f'(x')) - x')^2
        D: mean D(f'(x')) - mean D(f(x)) + penalty · mean (||dD/dz|| - 1)^2, z at random between f'(x') and f(x)
        victim: mean D(f(x))

    The guess is g(f(x)), from the last embedding of each row. The active party's own models still learn the task from
    what arrives, so that the utility shows what the attack costs the joint model.

    Source: Pasquini, Ateniese and Bernaschi, CCS 2021, "Unleashing the tiger: inference attacks on split learning"
    (arXiv 2012.02670), feature-space hijacking attack, its setup and inference phase; released code, ``FSHA.py``.

    Args:
        victim: whose columns; None for the first passive party.
        steps: updates of pilot, decoder and discriminator for each batch that arrives.
        penalty: weight of the gradient penalty.
        layers: hidden layers of the pilot; 0 for a linear one. It does best with the shape of the victim's model.
        hidden: width of each hidden layer.
        with_columns: whether D reads own columns too.
        lr: learning rate of Adam.
    """

    name = "fsha"
    needs = frozenset({Need.EMBEDDINGS, Need.AUX_LABELS, SENT, DECODER})
    wants = frozenset({EXPECTED})
    reference = "Pasquini, Ateniese and Bernaschi, CCS 2021, arXiv 2012.02670; released code"
    verified = "gradients and exact inversion where the victim is the pilot; figures of the source: unverified"
    differs = (
        "Columns in place of images: networks with two hidden layers; the source has convolutions.",
        "D also reads own columns of the row, which a split by columns gives the adversary (with_columns).",
        "Several updates for each batch that arrives (steps); the source has one, over many more batches.",
        "Auxiliary rows are rows of the victim; the source has other rows of the same distribution, and more of them.",
        "The victim keeps its optimizer and learning rate; in the released code the attacker sets both.",
    )
    costs = "a training run of its own for each cell, with steps updates of three small networks in each of its batches"
    fails = (
        "with few auxiliary rows or batches, and where columns could be exchanged without a change to their joint "
        "distribution with own columns: D compares distributions, and not rows"
    )

    victim: str | None = None
    steps: int = 3
    penalty: float = 10.0
    layers: int = 1
    hidden: int = 64
    with_columns: bool = True
    lr: float = 5e-3

    def __post_init__(self) -> None:
        check_positive(steps=self.steps, hidden=self.hidden, lr=self.lr)
        check_non_negative(penalty=self.penalty, layers=self.layers)
        self._hijacking: _Hijacking | None = None

    def alone(self) -> Imputation:
        """Return imputation: without the federation there is no embedding."""
        return Imputation(victim=self.victim)

    def prepare(self, view: View) -> None:
        """Keep own columns, and the victim's of the auxiliary rows."""
        context = view.features["train"].float()
        self._context = context if self.with_columns else context[:, :0]
        self._hijacked, self._hijacking = view.victim, None
        self._known = view.aux_labels.float(), self._context[view.aux_rows]

    def replace_gradient(self, victim: str, h: Tensor, g: Tensor, step: Step) -> Tensor:
        """Return the gradient of the adversarial loss for training rows of the victim, and ``g`` for all others."""
        if victim != self._hijacked or step.split != "train":
            return g
        if self._hijacking is None:
            self._hijacking = _Hijacking(self, *self._known, h.shape[1])
        context = self._context[step.rows]
        self._hijacking.learn(h, context, self.steps)
        return self._hijacking.mislead(h, context)

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return the columns (n, d) of every split with received embeddings."""
        decoder = view.further[DECODER.name].eval()
        with torch.no_grad():
            received = read_last_values(view, Kind.EMBEDDING, sender=view.victim)
            columns = {s: project_categories(decoder(h.float()), view.layout) for s, h in received.items()}
        return Guess(columns, budget=describe_alarm(view, view.victim))


class _Hijacking:
    """The adversary's networks in training.

    Args:
        attack: whose options they have.
        known: (m, p) the victim's columns of the auxiliary rows.
        context: (m, q) what D reads of these rows.
        width: d, of the victim's embedding.
    """

    def __init__(self, attack: FeatureSpaceHijacking, known: Tensor, context: Tensor, width: int) -> None:
        self.known, self.context, self.penalty = known, context, attack.penalty
        columns, hidden = known.shape[1], (attack.hidden,) * 2
        with seed_weights(attack._seed, attack.name, "networks"):
            self.pilot = build_network(columns, *(attack.hidden,) * attack.layers, width).to(known.device)
            self.decoder = build_network(width, *hidden, columns).to(known.device)
            self.critic = build_network(width + context.shape[1], *hidden, 1).to(known.device)
        self.rng = make_rng(attack._seed, attack.name, "batches", device=known.device)
        self._coder = [*self.pilot.parameters(), *self.decoder.parameters()]
        self._of_coder = torch.optim.Adam(self._coder, attack.lr)
        self._of_critic = torch.optim.Adam(self.critic.parameters(), attack.lr, betas=(0.5, 0.9))

    def learn(self, h: Tensor, context: Tensor, steps: int) -> None:
        """Update all networks ``steps`` times on received embeddings ``h`` (B, d) of rows with ``context`` (B, q)."""
        received = torch.cat([h, context], dim=1)
        for _ in range(steps):
            rows = torch.randint(len(self.known), (len(h),), generator=self.rng, device=h.device)
            x = self.known[rows]
            z = self.pilot(x)
            descend(self._of_coder, F.mse_loss(self.decoder(z), x))
            z = torch.cat([z.detach(), self.context[rows]], dim=1)
            gap = self.critic(z).mean() - self.critic(received).mean()
            descend(self._of_critic, gap + self._penalize(z, received))

    def mislead(self, h: Tensor, context: Tensor) -> Tensor:
        """Return the gradient (B, d) by which the victim's embeddings ``h`` come to look like the pilot's."""
        z = h.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.critic(torch.cat([z, context], dim=1)).mean(), z)
        return gradient

    def _penalize(self, z: Tensor, h: Tensor) -> Tensor:
        share = torch.rand(len(h), 1, generator=self.rng, device=h.device)
        between = (share * z + (1 - share) * h).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        return self.penalty * ((slope.square().sum(dim=1) + 1e-12).sqrt() - 1).square().mean()
