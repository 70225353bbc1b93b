"""FSHA and URVFL: an active party that trains the victim's bottom model to imitate one that it can invert."""

from abc import abstractmethod
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
    hijacking = attack._hijacking if isinstance(attack, FromPilot) else None
    return hijacking.decoder if hijacking else None


DECODER = Knowledge(
    "a decoder from its own training",
    "evaluate the job with vflsec eval, which trains the federation under attack",
    read=read_decoder,
    sides=("active",),
    at_end=True,
)


AUXILIARY = (
    "Auxiliary rows are rows of the victim; the source has other rows of the same distribution, and more of them."
)


@dataclass(kw_only=True, eq=False, repr=False)
class FromPilot(HijackingAttack):
    """Recovery of the victim's columns from embeddings of a bottom model that was trained to give them away.

    The adversary trains a pilot f' and a decoder g on the auxiliary rows, and a discriminator D that distinguishes
    embeddings of the pilot from those f(x) (B, d) that it receives. In place of the gradient of the task's loss it
    sends the gradient that makes D take f(x) for embeddings of the pilot. The guess is what g makes of the last
    embedding of each row. The active party's own models still learn the task from what arrives, so that the utility
    shows what the attack costs the joint model.
    """

    needs = frozenset({Need.EMBEDDINGS, Need.AUX_LABELS, SENT, DECODER})
    wants = frozenset({EXPECTED})
    warm = 0
    decodes_columns = False

    victim: str | None = None
    steps: int = 3
    layers: int = 1
    hidden: int = 64
    with_columns: bool = True
    lr: float = 5e-3

    def __post_init__(self) -> None:
        check_positive(steps=self.steps, hidden=self.hidden, lr=self.lr)
        check_non_negative(layers=self.layers)
        self._hijacking: _Hijacking | None = None

    def alone(self) -> Imputation:
        """Return imputation: without the federation there is no embedding."""
        return Imputation(victim=self.victim)

    def prepare(self, view: View) -> None:
        """Keep own columns and labels, and the victim's columns of the auxiliary rows."""
        self._context, self._labels = self._select_columns(view, "train"), view.labels["train"]
        self._hijacked, self._hijacking = view.victim, None
        self._known = view.aux_labels.float(), self._context[view.aux_rows], self._labels[view.aux_rows]

    def replace_gradient(self, victim: str, h: Tensor, g: Tensor, step: Step) -> Tensor:
        """Return the gradient of the adversarial loss for training rows of the victim, and ``g`` for all others."""
        if victim != self._hijacked or step.split != "train":
            return g
        if self._hijacking is None:
            outputs = self.count_outputs(1 + int(self._labels.max()))
            self._hijacking = _Hijacking(self, *self._known, h.shape[1], outputs)
        context, y = self._context[step.rows], self._labels[step.rows]
        self._hijacking.learn(h, context, y)
        return self._hijacking.mislead(h, context, y)

    def run(self, view: View, *, rng: torch.Generator) -> Guess:
        """Return the columns (n, d) of every split with received embeddings."""
        decoder, guesses = view.further[DECODER.name].eval(), {}
        with torch.no_grad():
            for split, h in read_last_values(view, Kind.EMBEDDING, sender=view.victim).items():
                x = decoder(self.join_columns(h.float(), self._select_columns(view, split)))
                guesses[split] = project_categories(x, view.layout)
        return Guess(guesses, budget=describe_alarm(view, view.victim))

    def join_columns(self, h: Tensor, context: Tensor) -> Tensor:
        """Return what the decoder reads of embeddings ``h`` (B, d) and own columns (B, q)."""
        return torch.cat([h, context], dim=1) if self.decodes_columns else h

    def count_outputs(self, n_classes: int) -> int:
        """Return how many numbers D returns for a row."""
        return 1

    @abstractmethod
    def distinguish(
        self, critic: nn.Module, z: Tensor, of_z: Tensor, h: Tensor, y: Tensor, rng: torch.Generator
    ) -> Tensor:
        """Return the loss of D on embeddings of the pilot, with labels ``of_z``, and received ones, with labels ``y``.

        Both come with own columns of their rows.
        """

    @abstractmethod
    def deceive(self, critic: nn.Module, h: Tensor, y: Tensor) -> Tensor:
        """Return the loss of the victim."""

    def _select_columns(self, view: View, split: str) -> Tensor:
        columns = view.features[split].float()
        return columns if self.with_columns else columns[:, :0]


@dataclass(kw_only=True, eq=False, repr=False)
class FeatureSpaceHijacking(FromPilot):
    """Recovery of the victim's columns by a pilot whose embeddings a critic D cannot tell from the victim's.

    The losses are those of the released code; D also reads own columns of the row:

        pilot and decoder: mean (g(f'(x')) - x')^2
        D: mean D(f'(x')) - mean D(f(x)) + penalty · mean (||dD/dz|| - 1)^2, z at random between f'(x') and f(x)
        victim: mean D(f(x))

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
    reference = "Pasquini, Ateniese and Bernaschi, CCS 2021, arXiv 2012.02670; released code"
    verified = "gradients and exact inversion where the victim is the pilot; figures of the source: unverified"
    differs = (
        "Columns in place of images: networks with two hidden layers; the source has convolutions.",
        "D also reads own columns of the row, which a split by columns gives the adversary (with_columns).",
        "Several updates for each batch that arrives (steps); the source has one, over many more batches.",
        AUXILIARY,
        "The victim keeps its optimizer and learning rate; in the released code the attacker sets both.",
    )
    costs = "a training run of its own for each cell, with steps updates of three small networks in each of its batches"
    fails = (
        "with few auxiliary rows or batches, and where columns could be exchanged without a change to their joint "
        "distribution with own columns: D compares distributions, and not rows"
    )

    penalty: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_non_negative(penalty=self.penalty)

    def distinguish(
        self, critic: nn.Module, z: Tensor, of_z: Tensor, h: Tensor, y: Tensor, rng: torch.Generator
    ) -> Tensor:
        """Return a Wasserstein distance with the gradient penalty."""
        gap: Tensor = critic(z).mean() - critic(h).mean()
        share = torch.rand(len(h), 1, generator=rng, device=h.device)
        between = (share * z + (1 - share) * h).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        return gap + self.penalty * ((slope.square().sum(dim=1) + 1e-12).sqrt() - 1).square().mean()

    def deceive(self, critic: nn.Module, h: Tensor, y: Tensor) -> Tensor:
        """Return the mean of D."""
        verdicts: Tensor = critic(h)
        return verdicts.mean()


@dataclass(kw_only=True, eq=False, repr=False)
class ClassAwareHijacking(FromPilot):
    """Recovery of the victim's columns by a pilot whose embeddings the victim's imitate class by class.

    D classifies embeddings by label and origin at once: of C classes, 2y stands for received embeddings with label y,
    and 2y + 1 for the pilot's. With the cross entropy CE and own columns c, the losses of the released code are:

        pilot and decoder, before training: mean (g(f'(x'), c') - x')^2
        D: CE(D(f(x)), 2y) + CE(D(f'(x')), 2y' + 1)
        victim: CE(D(f(x)), 2y + 1)

    It knows all training labels, as an active party does. The source says that no gradient then looks other than an
    honest one to detectors that know labels (SplitGuard, gradient scrutiny); *budget* says what a victim without labels
    sees.

    Source: Yao et al., NDSS 2025, "URVFL: undetectable data reconstruction attack on vertical federated learning"
    (arXiv 2404.19582); released code, ``attack_module.py``.

    Args:
        victim: whose columns; None for the first passive party.
        warm: updates of pilot and decoder before training, after which they stay; 0 to train them along, ``steps``
            updates for each batch that arrives (the source's *sync*).
        steps: updates of D for each batch that arrives.
        layers: hidden layers of the pilot; 0 for a linear one. It does best with the shape of the victim's model.
        hidden: width of each hidden layer.
        with_columns: whether D and decoder read own columns.
        lr: learning rate of Adam.
    """

    name = "urvfl"
    reference = "Yao et al., NDSS 2025, arXiv 2404.19582; released code"
    verified = "gradients, and the one of two mirrored models that labels determine; figures of the source: unverified"
    differs = (
        "Columns in place of images: networks with two hidden layers; the source has convolutions.",
        "D also reads own columns of the row; the source's reads embeddings and labels alone.",
        "Several updates of D for each batch that arrives (steps); the source has one.",
        "Fewer updates of pilot and decoder (warm), at a higher rate: few auxiliary rows are soon overfitted.",
        AUXILIARY,
        "The victim keeps its optimizer and learning rate; in the released code all share one.",
    )
    costs = "a training run of its own for each cell, with steps updates of a small network in each of its batches"
    fails = (
        "with few auxiliary rows or batches, and where columns could be exchanged without a change to their "
        "distribution in each class: D compares distributions, and not rows"
    )
    decodes_columns = True

    warm: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        check_non_negative(warm=self.warm)

    def count_outputs(self, n_classes: int) -> int:
        """Return two for each class."""
        return 2 * n_classes

    def distinguish(
        self, critic: nn.Module, z: Tensor, of_z: Tensor, h: Tensor, y: Tensor, rng: torch.Generator
    ) -> Tensor:
        """Return the cross entropies of label and origin."""
        return F.cross_entropy(critic(h), 2 * y) + F.cross_entropy(critic(z), 2 * of_z + 1)

    def deceive(self, critic: nn.Module, h: Tensor, y: Tensor) -> Tensor:
        """Return the cross entropy of the right label and the wrong origin."""
        return F.cross_entropy(critic(h), 2 * y + 1)


class _Hijacking:
    """The adversary's networks in training.

    Args:
        attack: whose options and losses they have.
        known: (m, p) the victim's columns of the auxiliary rows.
        context: (m, q) what D reads of these rows.
        labels: (m,) of these rows.
        width: d, of the victim's embedding.
        outputs: of D.
    """

    def __init__(
        self, attack: FromPilot, known: Tensor, context: Tensor, labels: Tensor, width: int, outputs: int
    ) -> None:
        self.attack, self.known, self.context, self.labels = attack, known, context, labels
        columns, joined, hidden = known.shape[1], width + context.shape[1], (attack.hidden,) * 2
        decoded = joined if attack.decodes_columns else width
        with seed_weights(attack._seed, attack.name, "networks"):
            self.pilot = build_network(columns, *(attack.hidden,) * attack.layers, width).to(known.device)
            self.decoder = build_network(decoded, *hidden, columns).to(known.device)
            self.critic = build_network(joined, *hidden, outputs).to(known.device)
        self.rng = make_rng(attack._seed, attack.name, "batches", device=known.device)
        self._of_coder = torch.optim.Adam([*self.pilot.parameters(), *self.decoder.parameters()], attack.lr)
        self._of_critic = torch.optim.Adam(self.critic.parameters(), attack.lr, betas=(0.5, 0.9))
        for _ in range(attack.warm):
            self._embed(torch.arange(len(known), device=known.device), fits=True)

    def learn(self, h: Tensor, context: Tensor, y: Tensor) -> None:
        """Update the networks on received embeddings ``h`` (B, d) of rows with ``context`` (B, q) and labels ``y``."""
        received = torch.cat([h, context], dim=1)
        for _ in range(self.attack.steps):
            rows = torch.randint(len(self.known), (len(h),), generator=self.rng, device=h.device)
            z = torch.cat([self._embed(rows, fits=not self.attack.warm), self.context[rows]], dim=1)
            descend(self._of_critic, self.attack.distinguish(self.critic, z, self.labels[rows], received, y, self.rng))

    def mislead(self, h: Tensor, context: Tensor, y: Tensor) -> Tensor:
        """Return the gradient (B, d) by which the victim's embeddings ``h`` come to look like the pilot's."""
        z = h.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.attack.deceive(self.critic, torch.cat([z, context], dim=1), y), z)
        return gradient

    def _embed(self, rows: Tensor, *, fits: bool) -> Tensor:
        """Return the pilot's embeddings of auxiliary rows, on which pilot and decoder may be updated."""
        z = self.pilot(self.known[rows])
        if fits:
            decoded = self.decoder(self.attack.join_columns(z, self.context[rows]))
            descend(self._of_coder, F.mse_loss(decoded, self.known[rows]))
        embeddings: Tensor = z.detach()
        return embeddings
