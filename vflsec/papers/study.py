"""A study: claims of a paper, written down before they are tested.

A study is a TOML file in the folder ``claims``, or one that the user names: ``settings`` of all arms, ``[[data]]`` and
``[[arms]]`` with settings of their own, of which the later win, and ``[[claims]]`` about the arms. Each claim gets one
verdict on each of the data.
"""

import hashlib
import math
import re
from collections.abc import Iterator
from datetime import date
from typing import Any, Literal

import msgspec

from vflsec.base.checks import describe_unknown
from vflsec.results.metrics import METRICS

Table = dict[str, Any]

MAX_PRIMARY = 5
"""The most claims of a paper that may be named primary."""

ALONE = "alone"
"""In place of an arm: the adversary without the federation."""

MAX_SEEDS = 1000

Kind = Literal["utility", "leak", "advantage", "cap", "calibrated", "bytes", "bytes to target"]
ATTACKED = ("leak", "advantage", "cap", "calibrated")
"""The measures that need an attack."""

TOPICS = ("utility", "privacy", "cost")


class StudyPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the data, or an arm: its name and its settings."""

    name: str
    settings: Table = {}


class ArmMeasure(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured of an arm: its name is unique within a study."""

    kind: Kind
    attack: str = ""
    strength: float = 0.0
    metric: str = ""

    @property
    def name(self) -> str:
        """A name such as ``leak of worst`` or ``CAP against mc``."""
        at = f" at {self.strength:g}" if self.strength else ""
        if self.kind in ("leak", "advantage"):
            return f"leak of {self.attack}{at}"
        if self.kind in ("cap", "calibrated"):
            return f"{'CAP' if self.kind == 'cap' else 'calibrated CAP'} against {self.attack}"
        return f"{self.kind} ({self.metric}){at}" if self.metric else f"{self.kind}{at}"


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One claim: an order of arms by a measure.

    Attributes:
        text: in our words.
        source: table, figure or section of the paper.
        measure: ``utility``; ``leak`` of ``attack``; its ``advantage`` over the adversary alone; ``cap`` or
            ``calibrated`` CAP against it; ``bytes`` sent in training, or until ``train.target`` was met.
        metric: of the utility; empty for the headline metric of the data.
        order: arms, the best first, each of which must be better than the next.
        better: or else one arm, which must be better than each of ``than``.
        than: arms, or ``alone``: the adversary without the federation.
        wants: ``more`` or ``less`` of the measure; empty for more utility and CAP, less of all others.
        margin: the smallest difference that matters; of bytes, the smallest share that is saved.
        no_worse: the claim is that ``better`` is not worse by ``margin`` or more.
        at_equal_utility: if set, ``better`` must not lose so much utility or more either.
        data: on which it is tested; None for all.
        primary: whether it is one of the few that the paper stands for, which are corrected by Holm among themselves.
    """

    text: str
    source: str
    topic: Literal["utility", "privacy", "cost"]
    measure: Kind
    margin: float
    primary: bool = False
    attack: str = ""
    strength: float = 0.0
    metric: str = ""
    order: list[str] = []
    better: str = ""
    than: list[str] = []
    wants: Literal["", "more", "less"] = ""
    no_worse: bool = False
    at_equal_utility: float | None = None
    data: list[str] | None = None

    def __post_init__(self) -> None:
        """Check the form of the claim."""
        compares_two = bool(self.better) and bool(self.than)
        if compares_two == bool(self.order) or len(self.order) == 1 or bool(self.better) != bool(self.than):
            raise ValueError(f"claim {self.text!r}: expected either better and than, or an order of two or more arms")
        most = math.inf if self.metric in ("mse", "psnr") else 1.0  # all others are within a range of 1
        if not 0 < self.margin < most:
            raise ValueError(f"claim {self.text!r}: expected 0 < margin < {most:g}, got {self.margin:g}")
        if self.at_equal_utility is not None and not 0 < self.at_equal_utility < 1:
            raise ValueError(f"claim {self.text!r}: expected 0 < at_equal_utility < 1, got {self.at_equal_utility:g}")
        for names in (self.order or [self.better, *self.than], self.data if self.data is not None else [""]):
            if not names or len(set(names)) < len(names):
                raise ValueError(f"claim {self.text!r}: expected different names, got {', '.join(names) or 'none'}")
        if self.metric and self.measure != "utility":
            raise ValueError(f"claim {self.text!r}: expected metric with measure utility only, got {self.measure}")
        if self.strength and self.measure in ("cap", "calibrated"):
            raise ValueError(f"claim {self.text!r}: expected no strength with CAP, which is over all of them")
        if bool(self.attack) != (self.measure in ATTACKED):
            raise ValueError(f"claim {self.text!r}: expected attack with {' or '.join(ATTACKED)}, and only with them")
        if self.metric not in ("", *METRICS):
            raise ValueError(f"claim {self.text!r}: {describe_unknown('metric', self.metric, METRICS)}")
        if ALONE in self.than and self.measure != "leak":
            raise ValueError(f"claim {self.text!r}: expected measure leak with than = ['alone'], got {self.measure}")
        if ALONE in self.order or self.better == ALONE:
            raise ValueError(f"claim {self.text!r}: expected alone in than only")

    @property
    def links(self) -> list[tuple[str, str]]:
        """The pairs of arms that are compared, the better one first."""
        if self.order:
            return list(zip(self.order, self.order[1:], strict=False))
        return [(self.better, other) for other in self.than]

    @property
    def more(self) -> bool:
        """Whether more of the measure is better."""
        return self.wants == "more" if self.wants else self.measure in ("utility", "cap", "calibrated")

    @property
    def arm_measure(self) -> ArmMeasure:
        """What is compared."""
        return ArmMeasure(kind=self.measure, attack=self.attack, strength=self.strength, metric=self.metric)

    @property
    def utility(self) -> ArmMeasure:
        """The utility that ``at_equal_utility`` compares."""
        return ArmMeasure(kind="utility", strength=self.strength)

    def measures(self) -> Iterator[tuple[str, ArmMeasure]]:
        """Yield each arm with what is to be measured of it."""
        for arm in dict.fromkeys(arm for link in self.links for arm in link if arm != ALONE):
            yield arm, self.arm_measure
            if self.at_equal_utility is not None:
                yield arm, self.utility


class Study(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Claims of one source, and the experiment that tests them.

    Attributes:
        title: what is tested.
        source: the paper, with its arXiv number.
        registered: the date on which claims, margins and settings were fixed, as text in the form 2026-01-31.
        seeds: the number of seeds at the first look.
        looks: the numbers of seeds at which verdicts are looked at again, while claims are undecided.
        minutes: of CPU time, of trainings and attacks together, above which no further look is begun.
        notes: what differs from the paper.
    """

    title: str
    source: str
    registered: str
    data: list[StudyPart]
    arms: list[StudyPart]
    claims: list[Claim]
    settings: Table = {}
    seeds: int = 5
    looks: list[int] = []
    minutes: float = 120.0
    notes: list[str] = []

    def __post_init__(self) -> None:
        """Check that claims name arms and data that exist."""
        if not _is_date(self.registered):
            raise ValueError(f"expected registered as a date in the form 2026-01-31, got {self.registered!r:.40}")
        if not 1 <= self.seeds <= MAX_SEEDS:
            raise ValueError(f"expected seeds from 1 to {MAX_SEEDS}, got {self.seeds}")
        if self.schedule != sorted(set(self.schedule)) or self.schedule[-1] > MAX_SEEDS:
            raise ValueError(f"expected looks that rise from seeds to at most {MAX_SEEDS}, got {self.looks}")
        if sum(claim.primary for claim in self.claims) > MAX_PRIMARY:
            raise ValueError(f"expected at most {MAX_PRIMARY} primary claims, got more: name the few that matter most")
        arms, data = [arm.name for arm in self.arms], [part.name for part in self.data]
        for kind, names in (("data", data), ("arms", arms)):
            if not names or len(set(names)) < len(names) or ALONE in names:
                raise ValueError(f"expected different names of {kind}, none of them alone, got {', '.join(names)}")
        settings = [part.settings for part in self.data]
        if any(table in settings[:k] for k, table in enumerate(settings)):
            raise ValueError("expected different settings of data, got two that are equal: their verdicts would be one")
        if not self.claims:
            raise ValueError("expected a claim, got none")
        for claim in self.claims:
            for arm, _ in claim.measures():
                if arm not in arms:
                    raise ValueError(f"claim {claim.text!r}: {describe_unknown('arm', arm, arms)}")
            for name in claim.data or ():
                if name not in data:
                    raise ValueError(f"claim {claim.text!r}: {describe_unknown('data', name, data)}")
        for part in (self.settings, *(part.settings for part in (*self.data, *self.arms))):
            if "seeds" in part:
                raise ValueError("expected seeds beside settings, got them in settings: move them")

    @property
    def schedule(self) -> list[int]:
        """The numbers of seeds at which verdicts are looked at."""
        return [self.seeds, *self.looks]

    def list_data(self, claim: Claim) -> list[str]:
        """Return the names of the data on which a claim is tested."""
        return [part.name for part in self.data] if claim.data is None else list(claim.data)

    def measures(self, data: str, arm: str) -> list[ArmMeasure]:
        """Return what the claims need of one arm on one of the data."""
        claims = [claim for claim in self.claims if data in self.list_data(claim)]
        return list(dict.fromkeys(measure for claim in claims for name, measure in claim.measures() if name == arm))

    @property
    def experiment(self) -> str:
        """A hash of everything that can change a number."""
        return _digest([self.settings, self.data, self.arms])

    @property
    def registration(self) -> str:
        """A hash of the claims with their margins, without their texts."""
        bare = [msgspec.to_builtins(msgspec.structs.replace(claim, text="", source="")) for claim in self.claims]
        primary = [k for k, table in enumerate(bare) if table.pop("primary")]
        return _digest([self.registered, self.seeds, bare, *([self.looks, primary] if self.looks or primary else [])])


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text) is not None


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:16]
