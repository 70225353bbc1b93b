"""Base class of audits: one role's recording in, what it recovers out; the other role's says how much of it is true.

Truth and knowledge travel apart here as everywhere: ``run`` gets the recording of the role that attacks and nothing
else, and only ``score`` sees the truth, which is both recordings of the run together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from vflsec.base.errors import InsufficientView, UsageError
from vflsec.cipher.recording import Recording

Floats = NDArray[np.float64]
Integers = NDArray[np.object_]
Notes = Mapping[str, NDArray[Any]]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """How much of one thing was recovered.

    Attributes:
        of: what: ``labels``, ``weights``, ``scores``, ``features``, ``loss gradients`` or ``messages``.
        metric: ``accuracy``, ``auc``, ``r2``, ``correlation``, ``share``; or ``consistency``, which needs no truth: how
            well what was recovered agrees with all that was seen.
        value: between chance and 1.
        chance: what a guess without the recording reaches.
        ci95: its 95 % interval over rows, or over draws of the rows that are known; None where it is a single fact.
        n: how many values it is of.
    """

    of: str
    metric: str
    value: float
    chance: float
    n: int
    ci95: tuple[float, float] | None = None

    @property
    def leaks(self) -> bool:
        """Whether it lies above chance, by more than rows can explain; a count, whether it is complete."""
        if self.metric == "determined":
            return self.value >= 1
        return (self.ci95[0] if self.ci95 else self.value) > self.chance + 1e-9


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one audit.

    Attributes:
        audit: its name.
        reads: what it reads of the recording.
        verdict: ``leaks`` if any figure lies above chance; ``counted`` where the figure counts equations and is
            no attack; ``unmeasured``, printed as not measured, where the recording has no material for it or only the
            truth could say: a limit on it never holds; else ``holds``.
        figures: the headline first.
        found: what was recovered and how, or why not, in a sentence.
        mitigation: what stops it.
        unmeasured: what it could not test, each with the reason; the verdict is on the rest.
    """

    audit: str
    reads: str
    verdict: Literal["leaks", "counted", "holds", "unmeasured"]
    found: str
    mitigation: str
    figures: tuple[Figure, ...] = ()
    unmeasured: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recovered:
    """What an audit read out of a recording.

    Attributes:
        found: the sentence on it.
        steps: by step number, arrays named as the notes that they should equal, or ``weights`` (g, C).
        own: figures that need no truth.
        unmeasured: what could not be tested, each with the reason.
    """

    found: str
    steps: Mapping[int, Notes] = field(default_factory=dict)
    own: tuple[Figure, ...] = ()
    unmeasured: tuple[str, ...] = ()


class Truth:
    """Both recordings of one run, read by step.

    Raises:
        UsageError: they are of the same role, or of other runs.
    """

    def __init__(self, one: Recording, other: Recording) -> None:
        a, b = one.header, other.header
        if a.role == b.role:
            raise UsageError(f"expected the recording of the other role as truth, got two of role {a.role}")
        if (a.layout, a.n) != (b.layout, b.n):
            raise UsageError(f"expected two recordings of one run, got {one.path} and {other.path} of different keys")
        self.recordings = (one, other)
        self.header = one.header

    def at(self, numbers: Collection[int]) -> dict[int, dict[str, NDArray[Any]]]:
        """Return the notes of both roles at these steps.

        Their shares of W are called ``passive share`` and ``active share``. Where both are there, ``sum`` is their sum
        in the same units, and ``weights`` the same as floats; all (g, C).
        """
        found: dict[int, dict[str, NDArray[Any]]] = {number: {} for number in numbers}
        for recording in self.recordings:
            for step in recording.steps(last=max(numbers, default=-1)):
                if step.number in found:
                    own = dict(step.notes)
                    if "share" in own:
                        own[f"{recording.header.role} share"] = own.pop("share")
                    found[step.number] |= own
        for notes in found.values():
            if "passive share" in notes and "active share" in notes:
                notes["sum"] = notes["passive share"] + notes["active share"]
                notes["weights"] = np.ldexp(notes["sum"].astype(np.float64), -64)
        return found


class Audit(ABC):
    """One way to read a recording.

    Class attributes:
        name: short.
        role: who can mount it, ``passive``, ``active`` or ``either``.
        reads: what it uses.
        mitigation: what stops it.
        reference: where the attack is from.
    """

    name: ClassVar[str]
    role: ClassVar[Literal["passive", "active", "either"]]
    reads: ClassVar[str]
    mitigation: ClassVar[str]
    reference: ClassVar[str]

    @abstractmethod
    def run(self, recording: Recording) -> Recovered:
        """Return what the role recovers.

        Raises:
            InsufficientView: the recording lacks what is needed; the text says what.
        """

    def score(self, recovered: Recovered, truth: Truth) -> tuple[Figure, ...]:
        """Return how much of it is true."""
        return ()

    @final
    def __call__(self, recording: Recording, truth: Truth | None = None) -> Finding:
        """Run and score; without ``truth`` there are only the figures that need none."""
        if not self.fits(recording):
            role = recording.header.role
            raise InsufficientView(f"audit {self.name!r} is for role {self.role}, got a recording of role {role}")
        try:
            recovered = self.run(recording)
        except InsufficientView as error:
            return self._finding(Recovered(str(error)), ())
        figures = self.score(recovered, truth) if truth else ()
        return self._finding(recovered, figures or recovered.own)

    def fits(self, recording: Recording) -> bool:
        """Return whether the recording is of the role that can mount this."""
        return self.role in (recording.header.role, "either")

    def _finding(self, recovered: Recovered, figures: tuple[Figure, ...]) -> Finding:
        verdict: Literal["leaks", "counted", "holds", "unmeasured"] = "unmeasured"
        if any(figure.leaks for figure in figures):
            verdict = "leaks"
        elif any(figure.metric == "determined" and figure.value > 0 for figure in figures):
            verdict = "counted"
        elif figures and all(figure.metric != "consistency" for figure in figures):
            verdict = "holds"
        return Finding(
            audit=self.name,
            reads=self.reads,
            verdict=verdict,
            found=recovered.found,
            mitigation=self.mitigation,
            figures=figures,
            unmeasured=recovered.unmeasured,
        )
