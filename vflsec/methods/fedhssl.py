"""FedHSSL and its ablations: self-supervised pre-training with any of the steps of algorithm 1, then fine-tuning."""

import copy
import math
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from itertools import chain, zip_longest
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from vflsec.base.checks import check_non_negative, check_positive
from vflsec.base.errors import UsageError
from vflsec.base.seeds import make_rng, seed_weights
from vflsec.core.federation import Federation
from vflsec.core.message import SERVER, Kind, Message
from vflsec.core.method import RATES, Progress
from vflsec.core.options import convert_options
from vflsec.core.party import Party
from vflsec.core.protocol import Averaging, Boundary
from vflsec.core.settings import ModelSpec, TrainSpec
from vflsec.inference.releases import flatten_parameters, get_parameters
from vflsec.methods.epochs import Epochs
from vflsec.methods.local import get_rows
from vflsec.methods.split_method import RECEIVES, SPLIT, PretrainedMethod
from vflsec.methods.ssl_steps import CrossPartySSL, LocalSSL
from vflsec.nn.augmentation import make_two_views
from vflsec.nn.encoders import build_encoder
from vflsec.nn.siamese import BYOL, MoCo, Siamese, SimSiam
from vflsec.nn.wrappers import PooledEncoder
from vflsec.protocols.model_average import ModelAverage
from vflsec.protocols.plain import PlainBoundary

MOMENTUM = 0.9
RATE, WEIGHT_DECAY = 0.8, 1e-3
"""By default."""

PAPER_RATE, PAPER_WEIGHT_DECAY = 0.05, 3e-5
"""In the authors' code."""

PLAIN = "model-average"
"""The protocol of step 3 that hides nothing from the server."""

SIAMESE: Mapping[str, type[Siamese]] = {"simsiam": SimSiam, "byol": BYOL, "moco": MoCo}

CROSS_DIFFERS = (
    "Step 1 visits the mini-batches once, all parties in each; Algorithm 1 prints the loop over parties outside.",
    "Step 1 exchanges what the projector makes of raw rows; Algorithm 1 writes f_c, in which the paper counts the "
    "projector. A party that takes several updates on one exchange (local_updates) projects its own rows anew.",
)
LOCAL_DIFFERS = (
    "Step 2, tables: view 1 is the row itself and view 2 a corruption of it, as in the authors' code; Algorithm 1 "
    "draws two random views.",
    "The corruption replaces 30 % of the columns: a number by a uniform draw from its range, a category by a "
    "mask. The paper does not name the distribution, and leaves the mask's embedding untrained; here it is "
    "trained. The number of columns is rounded; the authors' code cuts it off, and on click data takes the share of "
    "categories and of numbers apart.",
    "Step 2, images: crop to 30-100 % of the area, color jitter of 0.3, blur and flip, without grayscale, as in the "
    "authors' code; the paper follows SimSiam. Jitter is relative to each image's own mean and deviation, hue and "
    "saturation are changed in YIQ, and nothing is clipped.",
    "Step 2 clips the norm of the gradients of a party's local model at 5. The authors' code clips the norm over its "
    "local and cross-party models together; the paper does not mention clipping.",
)
GUIDED_DIFFERS = (
    "Step 2: the cross-party encoder guides in evaluation mode, so that its BatchNorm statistics stay; in the "
    "authors' code they drift, and the paper says nothing.",
    "gamma is the paper's 0.5; the authors' code has 0 by default.",
    "By default all rows are aligned (data.aligned=1), so that step 2 has no unaligned rows; the paper's tables have "
    "20 % and 40 % of them aligned, and some more up to all.",
)
BOTH_DIFFERS = (
    "Fine-tuning reads the mean of a party's local and cross-party encoder, as in the authors' code; the paper "
    "does not say how the two are joined (encoders, pool).",
)
LOCAL_ONLY_DIFFERS = (
    "With pma=true a server averages top encoders, projectors and predictors (MoCo has none), with BatchNorm's "
    "running statistics, and each party has the same weight; table V of the paper does not name projectors.",
)
CROSS_ONLY_DIFFERS = (
    "The learning rate is that of FedHSSL's step 1 at gamma 0.5.",
    "Fine-tuning reads the cross-party encoder alone, which is all that was trained.",
)
PMA_DIFFERS = (
    "Step 3 averages the top encoder, the projector and the predictor (MoCo has none), with BatchNorm's running "
    "statistics, and each party has the same weight; Algorithm 1 names the top encoder and the predictor, and the "
    "appendix counts the projector to the encoder.",
)
TARGET_DIFFERS = ("Averaging models leaves the target networks of BYOL and MoCo as they are.",)
PRETRAINING_DIFFERS = (
    "Pre-training has SGD with momentum 0.9, weight decay 1e-3 and the rate 0.8 B / 256 * 0.5 / (0.5 + gamma), B being "
    "the batch, on a cosine over global iterations, constant for the predictor (MoCo has none). The authors' code has "
    "3e-5, and 0.05 in the place of 0.8, at which a few hundred updates learn little. train.pretrain.paper=true takes "
    "both, and the paper's momentum of moving averages, however few updates there are. The paper names no optimizer.",
    "Click data: SGD pre-trains their encoders as well; the authors' code can use Adagrad.",
    "Pre-training takes 40 global iterations by default, whatever the data; the paper takes 10 for NUS-WIDE.",
    "A last batch of a single row joins the one before it.",
    "Encoders are those of model: by default two blocks of width 128 (tables) or three convolutions (images), of which "
    "the last one and what follows are shared. The authors' code has blocks of width 512; the paper gives no width, "
    "and has ResNet-18 for images, of which it shares the top three blocks.",
    "The models of the last pre-training iteration count, as in the paper. The authors' code also looks for the best "
    "loss, and then overwrites that model with the last one.",
    "Fine-tuning follows train: by default Adam at 0.001 with batches of 256 and no clipping, for 20 epochs or as many "
    "as 300 updates take if that is more, and the last epoch counts. The paper takes the best of the rates 0.005, 0.01 "
    "and 0.03 with batches of 512 (tables) or 128 (images). The authors' code takes 20 epochs of SGD with momentum "
    "0.9, weight decay 3e-5, a cosine schedule and clipping at 5, or of Adagrad for click data, and reports the best "
    "epoch on test rows.",
)


class FedHSSL(PretrainedMethod):
    """Self-supervised pre-training, then split learning from the pre-trained encoders.

    Pre-training repeats up to three steps:

    1. Cross-party: on aligned rows, each party pulls the projection of its columns towards those of the other parties.
    2. Local: each party learns from two views of all its own rows, guided by its cross-party encoder where step 1 is
       taken as well.
    3. Partial model aggregation (pma): a server averages local top encoders, projectors and predictors.

    ``fedhssl-*`` takes all three, ``fedgssl-*`` steps 1 and 2, ``fedcssl-*`` step 1 and ``fedlocal-*`` step 2; the
    suffix names the self-supervised method.

    Optimizers are those of the authors' code: SGD, momentum 0.9, on a cosine over global iterations, constant for a
    predictor; the learning rate, 0.8 · B / 256 · 0.5 / (0.5 + gamma), is 16 times theirs, and weight decay 1e-3 where
    they have 3e-5, unless ``train.pretrain.paper``. Fine-tuning follows ``train``, as in every method that it is
    compared with.

    Source: FedHSSL (He et al. 2022, arXiv 2208.08934), algorithm 1; section V for its ablations.

    Class attributes:
        ssl: the self-supervised method, a name in ``SIAMESE``.
        cross: whether aligned rows train cross-party encoders (step 1).
        local: whether each party's own rows train a local encoder (step 2).
        pma: default of the option ``pma`` (step 3); None without such an option.

    Args:
        train: how models are fitted; ``pretrain`` defaults to 40 global iterations with batches of 512.
        boundary: the protocol at the cut layer in fine-tuning.
        pma: whether a server averages local top encoders, projectors and predictors.
        gamma: weight of the cross-party guidance. With 0 the local encoders are exactly those of FedLocalSSL: of
            ``fedlocal-*`` where no models are averaged (``fedgssl-*``), else of ``fedlocal-*`` with ``pma=true``.
        local_updates: updates of each party on one exchange of step 1, e in the paper.
        interleave: alternate between steps 1 and 2 batch by batch; neither in the paper nor in its code.
        encoders: which encoders make the embedding in fine-tuning, ``both`` or ``local``; ``local`` in ``fedgssl-*`` is
            FedGSSL* of table V.
        pool: how both are joined, ``mean`` or ``concat``.
        projector: width of the projector.
        predictor: width of the predictor's hidden layer; not used without a predictor (MoCo).
        ssl_options: options of the self-supervised method: ``momentum``, ``temperature``, ``queue``...
        average: the protocol of step 3, ``model-average``, ``secure-average`` or ``file.py:Class``, an ``Averaging``.
    """

    reference = "He et al. 2022 (FedHSSL), arXiv 2208.08934, algorithm 1"
    stored_modules = frozenset({"encoders", "shared"})
    learns = {"pretrain": frozenset()}  # noqa: RUF012  (declared ClassVar in the base)
    last_phase_options = frozenset({"boundary", "encoders", "pool"})
    joint = frozenset({"pma", "average"})
    encoder = "auto"
    search = {**RATES, "train.pretrain.lr": (0.1, 3.0)}  # noqa: RUF012
    ssl: ClassVar[str] = "simsiam"
    cross: ClassVar[bool] = True
    local: ClassVar[bool] = True
    pma: bool | None = True

    def __init_subclass__(cls) -> None:
        """Set what follows from the steps that are taken."""
        super().__init_subclass__()
        crossing = frozenset({Kind.EMBEDDING} if cls.cross else ())
        averaged = frozenset({Kind.PARAMETERS} if cls.pma is not None else ())
        cls.derive(
            version=3 if cls.pma is None else 4,
            prior=f"fedlocal-{cls.ssl}",
            differs=tuple(sentence for is_taken, _, differs in cls._parts() if is_taken for sentence in differs),
            messages={"pretrain": crossing | averaged, "finetune": SPLIT},
            receives={
                "passive": RECEIVES["passive"] | crossing | averaged,
                "active": RECEIVES["active"] | averaged,
                **({SERVER: averaged} if averaged else {}),
            },
        )
        cls.leave_out(
            {option for is_taken, options, _ in cls._parts() if not is_taken for option in options}, pma=cls.pma
        )

    @classmethod
    def _parts(cls) -> list[tuple[bool, tuple[str, ...], tuple[str, ...]]]:
        """Return of each part of the method whether it is taken, which options it alone reads, and how it differs."""
        both, averages, ssl = cls.cross and cls.local, cls.pma is not None, SIAMESE[cls.ssl]
        return [
            (cls.cross, ("local_updates",), CROSS_DIFFERS),
            (cls.local, ("average",), LOCAL_DIFFERS),
            (both, ("gamma", "interleave", "encoders", "pool"), GUIDED_DIFFERS),
            (averages, ("pma",), PMA_DIFFERS if both else ()),
            (both, (), BOTH_DIFFERS),
            (True, (), PRETRAINING_DIFFERS),
            (not cls.cross, (), LOCAL_ONLY_DIFFERS),
            (not cls.local, (), CROSS_ONLY_DIFFERS),
            (averages and cls.ssl in ("byol", "moco"), (), TARGET_DIFFERS),
            (cls.cross, (), ssl.cross_differs),
            (cls.local, (), ssl.local_differs),
        ]

    def __init__(
        self,
        train: TrainSpec,
        model: ModelSpec,
        *,
        boundary: type[Boundary] = PlainBoundary,
        pma: bool | None = None,
        gamma: float = 0.5,
        local_updates: int = 1,
        interleave: bool = False,
        encoders: Literal["both", "local"] = "both",
        pool: Literal["mean", "concat"] = "mean",
        projector: int = 512,
        predictor: int = 128,
        ssl_options: Mapping[str, Any] | None = None,
        average: type[Averaging] = ModelAverage,
    ) -> None:
        super().__init__(train, model, boundary=boundary)
        self.pma = bool(self.pma if pma is None else pma)
        if average is not ModelAverage and not self.pma:
            raise UsageError(f"expected average={PLAIN} in {self.name}, which averages no models, got {average.name}")
        check_non_negative(gamma=gamma)
        check_positive(local_updates=local_updates, projector=projector, predictor=predictor)
        self.gamma = gamma if self.cross else 0.0  # nothing guides a local encoder alone
        self.local_updates = local_updates
        self.interleave = interleave
        self.encoders = encoders
        self.pool = pool
        self.average = average
        wanted = {"projector": projector, "predictor": predictor, **(ssl_options or {})}
        self.tower_options = convert_options(f"{self.name}: ssl_options", SIAMESE[self.ssl], wanted)
        batch, is_paper = train.pretrain.batch or 512, train.pretrain.paper
        rate, weight_decay = (PAPER_RATE, PAPER_WEIGHT_DECAY) if is_paper else (RATE, WEIGHT_DECAY)
        lr = rate * batch / 256 * 0.5 / (0.5 + self.gamma)
        self.plan_pretraining(epochs=40, batch=batch, lr=lr, weight_decay=weight_decay)
        self._fits_momentum = not is_paper and "momentum" not in (ssl_options or {})
        self._towers: dict[str, dict[str, Siamese]] = {"cross": {}, "local": {}}

    @classmethod
    def option_tables(cls) -> Mapping[str, type]:
        """Return the self-supervised method, to which ``ssl_options`` go."""
        return {"ssl_options": SIAMESE[cls.ssl]}

    def build_party(self, party: Party, federation: Federation) -> None:
        """Draw encoders, each from a stream of its own: a step left out changes nothing in the other."""
        encoders = {}
        for role in ("local", "cross"):
            if not getattr(self, role):
                continue
            with seed_weights(federation.seed, "model", party.name, role):
                encoder = build_encoder(party.layout, self.model_spec, federation.n_classes)
                tower = SIAMESE[self.ssl](encoder, encoder.width, **self.tower_options)
            encoders[role] = tower.encoder
            self._towers[role][party.name] = tower.to(federation.device)
        party.modules["encoders"] = nn.ModuleDict(encoders)
        if self.pma:
            party.modules["shared"] = Snapshot(self._towers["local"][party.name].list_averaged())

    @classmethod
    def messages_in(cls, phase: str, options: Mapping[str, Any]) -> frozenset[Kind]:
        """Return the kinds of messages; a protocol that masks models also sends keys and masked words."""
        kinds = super().messages_in(phase, options)
        if phase != "pretrain":
            return kinds
        if not options.get("pma", cls.pma):
            return kinds - {Kind.PARAMETERS}
        return kinds if options.get("average", PLAIN) == PLAIN else kinds | {Kind.CIPHERTEXT, Kind.CONTROL}

    def observers(self) -> tuple[str, ...]:
        """Return the server, if models are averaged."""
        return (SERVER,) if self.pma else ()

    def local_parameters(self, federation: Federation) -> Mapping[str, Tensor]:
        """Return the learned parameters (P,) that each party brought to the last average, before its defenses."""
        return {
            name: party.modules["shared"].get_buffer("values") for name, party in federation.parties.items() if self.pma
        }

    def check(self, federation: Federation) -> None:
        """Raise UsageError if the parties' top encoders cannot be averaged, or rows for a step are lacking."""
        super().check(federation)
        if self.pma:
            self._average(federation)
        if self.cross and federation.n_rows("aligned") < 2:
            raise UsageError(
                f"{self.name} expects two aligned rows, got {federation.n_rows('aligned')}: raise data.aligned"
            )

    def representation(self, party: Party) -> nn.Module:
        """Return the pooled outputs of the party's encoders."""
        encoders = party.module("encoders", nn.ModuleDict)
        chosen = [encoders["local"]] if self.encoders == "local" and "local" in encoders else list(encoders.values())
        return PooledEncoder(chosen, self.pool)

    def assemble_models(
        self, federation: Federation, names: Collection[str], messages: Iterable[Message]
    ) -> Mapping[str, nn.Module]:
        """Return, of two parties with averaged models, the other's top encoder behind the own bottom encoder.

        The mean of two models is known to both parties: twice the mean less what the party sent is what the other one
        sent, in the last global iteration.
        """
        if not self.pma or len(federation.parties) != 2 or len(names) != 1:
            return {}
        (party,) = names
        (other,) = set(federation.parties) - {party}
        messages = list(messages)
        mean, sent = get_parameters(messages, sender=SERVER, receiver=party), get_parameters(messages, sender=party)
        if not mean:
            return {}
        encoder = copy.deepcopy(federation.parties[party].module("encoders", nn.ModuleDict)["local"])
        state = encoder.state_dict()
        received = {name: 2 * mean[name] - sent[name] for name in state if name.startswith("top.") and name in mean}
        for name, value in received.items():
            if name.endswith("running_var"):
                value.clamp_(min=0)  # the other party's defenses may have pushed it below
        encoder.load_state_dict({**state, **received})
        return {f"own bottom, {other}'s top encoder": encoder.eval()}

    def pretrain(self, phase: str, federation: Federation, progress: Progress) -> list[float]:
        """Run algorithm 1; return the mean loss of each global iteration."""
        cross, local, optimizers = self._steps(federation)
        average = self._average(federation) if self.pma else None
        modules: dict[str, nn.Module] = {
            f"{role}/{name}": tower for role, towers in self._towers.items() for name, tower in towers.items()
        }
        modules |= {f"shared/{name}": party.modules["shared"] for name, party in federation.parties.items() if average}
        epochs = Epochs(federation, phase, progress, self.until, kept=modules, optimizers=optimizers)
        for iteration in epochs:
            federation.begin(phase, iteration)
            for optimizer in optimizers:  # the second group, a predictor's, keeps its rate
                optimizer.param_groups[0]["lr"] = self.lr * 0.5 * (1 + math.cos(math.pi * iteration / self.iterations))
            passes = [step.steps(phase, iteration) for step in cross]
            passes += [step.steps(federation.seed, phase, name, iteration) for name, step in local.items()]
            order = chain.from_iterable(zip_longest(*passes) if self.interleave else passes)
            losses = [float(loss) for loss in order if loss is not None]  # a pass that is over has none
            if average:
                for name, shared in self._collect_shared().items():
                    federation.parties[name].modules["shared"].get_buffer("values").copy_(collect_parameters(shared))
                average.run(self._collect_shared(), step=iteration, phase=phase)
            epochs.end(sum(losses) / len(losses))
        return epochs.losses

    def _steps(self, federation: Federation) -> tuple[list[CrossPartySSL], dict[str, LocalSSL], list[Optimizer]]:
        """Steps 1 and 2, and the optimizers of all towers."""
        optimizers = {
            role: {name: self._make_optimizer(tower) for name, tower in by_party.items()}
            for role, by_party in self._towers.items()
        }
        towers, cross = self._towers, []
        if self.cross:
            cross.append(
                CrossPartySSL(federation, towers["cross"], optimizers["cross"], self.batch, self.local_updates)
            )
        local = {}
        for name, tower in towers["local"].items():
            party, guide = federation.parties[name], towers["cross"].get(name)
            rows, optimizer = get_rows(party), optimizers["local"][name]
            if self._fits_momentum:
                tower.fit_momentum(self.count_updates(len(rows)))
            views = make_two_views(party.layout, rows)
            local[name] = LocalSSL(rows, tower, views, guide, self.gamma, optimizer, self.batch)
        return cross, local, [optimizer for by_party in optimizers.values() for optimizer in by_party.values()]

    def _make_optimizer(self, tower: Siamese) -> Optimizer:
        scheduled, fixed = tower.list_online()
        groups = [{"params": scheduled}, *([{"params": fixed}] if fixed else [])]
        return SGD(groups, self.lr, MOMENTUM, weight_decay=self.weight_decay, fused=True)

    def _collect_shared(self) -> dict[str, dict[str, nn.Module]]:
        """What step 3 averages: local top encoder, projector and predictor of each party."""
        return {name: tower.list_averaged() for name, tower in self._towers["local"].items()}

    def _average(self, federation: Federation) -> Any:
        noise = partial(make_rng, federation.seed, "noise", SERVER, device=federation.device)
        server = Party(SERVER, {}, federation.channel, noise=noise)
        average = self.average(list(federation.parties.values()), server)
        average.check(self._collect_shared())
        return average


class Snapshot(nn.Module):
    """The parameters that a party brought to the last average, (P,); not learned, and stored with its models."""

    def __init__(self, shared: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.register_buffer("values", collect_parameters(shared))


def collect_parameters(modules: Mapping[str, nn.Module]) -> Tensor:
    """Return all learned parameters of the modules (P,), in order."""
    named = {f"{role}.{key}": p.detach() for role, module in modules.items() for key, p in module.named_parameters()}
    return flatten_parameters(named)
