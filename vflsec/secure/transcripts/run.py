"""All audits of one recording, and what is said of them together."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from vflsec.base.checks import one_of
from vflsec.base.errors import UsageError
from vflsec.cipher.recording import Recording
from vflsec.results.analysis.results import Gate
from vflsec.secure.transcripts.audit import Audit, Finding, Truth
from vflsec.secure.transcripts.chosen_weights import ChosenWeights
from vflsec.secure.transcripts.common_divisor import CommonDivisor
from vflsec.secure.transcripts.delta_chain import DeltaChain
from vflsec.secure.transcripts.forward_passes import ForwardPasses
from vflsec.secure.transcripts.low_bits import LowBits
from vflsec.secure.transcripts.score_decoding import ScoreDecoding
from vflsec.secure.transcripts.score_drift import ScoreDrift
from vflsec.secure.transcripts.score_gram import ScoreGram
from vflsec.secure.transcripts.score_regression import ScoreRegression
from vflsec.secure.transcripts.shifted_scores import ShiftedScores
from vflsec.secure.transcripts.small_masks import SmallMasks
from vflsec.secure.transcripts.wire import Wire

AUDITS: tuple[type[Audit], ...] = (
    DeltaChain,
    CommonDivisor,
    LowBits,
    SmallMasks,
    ScoreGram,
    ScoreRegression,
    ScoreDecoding,
    ChosenWeights,
    ForwardPasses,
    ShiftedScores,
    ScoreDrift,
    Wire,
)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in a recording; its JSON is what ``--format json`` prints.

    Attributes:
        role: whose recording it is.
        steps: how many it has.
        scored: whether the other role's recording said how much is true.
        findings: in the order of ``AUDITS``.
        gates: limits and whether they hold.
    """

    schema: int = 1
    role: str
    steps: int
    scored: bool
    findings: tuple[Finding, ...]
    gates: tuple[Gate, ...]

    @property
    def exit_code(self) -> int:
        """1 if a gate failed, 3 if one is undecided, else 0."""
        holds = [gate.holds for gate in self.gates]
        return 1 if False in holds else 3 if None in holds else 0


def suitable(recording: Recording, names: Collection[str] = ()) -> list[Audit]:
    """Return the audits of the recording's role, or those called ``names``.

    Raises:
        UsageError: a name that none of them has, or that of an audit for the other role.
    """
    known = {audit.name: audit() for audit in AUDITS}
    for name in names:
        one_of(known, audit=name)
        if not known[name].fits(recording):
            raise UsageError(
                f"audit {name} reads a recording of role {known[name].role}, and {recording.path.name} is of role "
                f"{recording.header.role}: give it the other one"
            )
    return [audit for name, audit in known.items() if name in names or (not names and audit.fits(recording))]


def judge(
    recording: Recording, found: Collection[Finding], truth: Truth | None, max_leak: Mapping[str, float]
) -> Verdict:
    """Return the verdict, with a gate for each limit."""
    by_name = {finding.audit: finding for finding in found}
    return Verdict(
        role=recording.header.role,
        steps=sum(1 for _ in recording.steps()),
        scored=truth is not None,
        findings=tuple(found),
        gates=tuple(_gate(by_name[name], limit) for name, limit in max_leak.items()),
    )


def _gate(finding: Finding, limit: float) -> Gate:
    """Compare a limit with the far end of the interval; what only fits by itself, or was not measured, never holds."""
    ends = [figure.ci95[1] if figure.ci95 else figure.value for figure in finding.figures]
    worst = max(ends, default=None)
    certain = all(figure.metric != "consistency" for figure in finding.figures) and not finding.unmeasured
    failed = worst is not None and worst > limit
    holds = False if failed else True if ends and certain else None
    return Gate(gate=f"max-leak {finding.audit}", limit=limit, worst=worst, at=finding.audit, holds=holds)
