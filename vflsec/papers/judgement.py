"""Verdicts on published claims: the measurements of a study, a table for the terminal, and the page of all studies."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from vflsec.base.checks import count
from vflsec.papers.measurements import DIGITS, Measurements
from vflsec.papers.study import MAX_PRIMARY, TOPICS
from vflsec.papers.verdicts import DECISIONS, ClaimComparison, MeasuredStudy, Verdict, judge
from vflsec.report import formats
from vflsec.report.formats import Cells
from vflsec.results.statistics import LEVEL, MIN_SEEDS, POWER

HEAD = """\
# Published claims, judged

Made by `vflsec judge --page RESULTS.md` from the measurements in `results`; no number on this page is typed
by hand. [docs/claims.md](docs/claims.md) explains how to read it and how to add a claim.

Each claim was written down in `vflsec/papers/claims` before it was measured: what is compared, on which data, and the
*margin*, the smallest difference that matters. A note says where a trial run, or an earlier measurement of the same
arms, came first. Both arms of a comparison have the same seeds, and so the same rows, labels and auxiliary samples. A
difference is positive if it favors the claim: a smaller leak, where that is claimed. Of bytes it is the share saved.

* **holds**: the mean difference surely exceeds zero, and is at least the margin.
* **equivalent**: the mean difference is surely smaller than the margin in either direction.
* **does not hold here**: the mean difference is surely below the margin, and not surely equivalent, though it may be.
* **undecided**: neither, or a seed was lost, or there are fewer than {fewest} seeds. *Seen from* is the smallest true
  difference that would have been told from zero with {power} power.

A margin such as "> −x" is of a claim that nothing is lost: it holds if the arm is surely not worse by x, and *seen
from* is then counted from −x.

A claim of several comparisons holds if all of them hold, and does not hold if one does not. "Surely" is by one-sided
paired t tests over seeds at {alpha}. Among the claims of one topic of a study, the expected share of errors in each
kind of decision is at most {alpha} (Benjamini and Hochberg). Claims marked *primary*, at most {primary} of a paper, are
corrected by Holm among themselves: with a probability of at least {level} none of a kind is decided wrongly. A study
with several looks may add seeds while claims are undecided, up to the number that its section names; its p values are
multiplied by the number of looks, whether it has taken all or not. *By itself* is how a claim reads without correction
for other claims. Intervals are {level} t intervals of one comparison. Seeds share rows, so they are somewhat too
short. Seeds beyond the last complete look are not used. Studies without looks, but for `prada-cost` and `text`, were
measured under Holm's correction over the whole page; the rule above was chosen after their results were known.

A leak is an AUC on two classes, accuracy on more, and R² of columns. *Leak of worst* is that of the strongest of all
attacks that were run and of what the adversary infers alone, chosen on one half of the rows and scored on the other.
*Minutes* add up the times of all trainings and attacks, of which several run side by side and studies share some.

The data are small public ones, and so are the networks: a claim that does not hold here may hold on the paper's data.
"""

PAPERS = """\
The verdicts on the *primary* claims of each paper, or on all where none is primary, each with the mean difference and
interval of its least favorable comparison, and the difference in utility where this must be equal; then the number of
verdicts on its other claims. Claims of ours are those that the paper does not make, also those on attacks that it does
not have. *Two views* are synthetic, and drawn such that FedHSSL and SS-VFL must win in utility.
"""
MAP = """\
A row is a claim, by its study and its number in the sections below; a star marks primary ones. A number is the mean
difference in the claim's measure, of the comparison that is least favorable to it. Where utility must be equal, a color
may be due to utility, which the number leaves out.
"""


class Judgement:
    """The verdicts on the claims of several studies.

    Args:
        measured: each study with its measurements.
    """

    def __init__(self, measured: Sequence[MeasuredStudy]) -> None:
        self.measured = list(measured)
        self.verdicts = judge(self.measured)

    def select_study(self, measured: MeasuredStudy) -> list[Verdict]:
        """Return the verdicts of one study."""
        return [verdict for verdict in self.verdicts if verdict.study == measured.name]

    @property
    def failures(self) -> list[str]:
        """The seeds that gave no number."""
        return sorted({f"{v.study}, {v.data}: {lost}" for v in self.verdicts for link in v.links for lost in link.lost})

    def counts(self) -> Cells:
        """Return how many verdicts of each topic there are of each kind, and on primary claims and claims of ours."""
        groups = {topic: [v for v in self.verdicts if v.topic == topic] for topic in TOPICS} | {
            "all": self.verdicts,
            "of these, primary": [v for v in self.verdicts if v.primary],
            "of these, made by the papers": [v for v in self.verdicts if not v.source.startswith("ours")],
            "of these, ours": [v for v in self.verdicts if v.source.startswith("ours")],
        }
        rows = [
            [name, *(str(sum(v.decision == decision for v in group)) for decision in DECISIONS), str(len(group))]
            for name, group in groups.items()
        ]
        return Cells.from_texts("Verdicts by topic", ["topic", *DECISIONS, "all"], rows)

    def studies(self) -> Cells:
        """Return the counts of each study, and what it cost."""
        rows = []
        for measured in self.measured:
            counts = Counter(verdict.decision for verdict in self.select_study(measured))
            seeds = sorted({verdict.seeds for verdict in self.select_study(measured)})
            cost = [" to ".join(map(str, seeds[:1] + seeds[1:][-1:])), f"{measured.measurements.seconds / 60:.1f}"]
            rows.append([measured.name, *(str(counts[decision]) for decision in DECISIONS), *cost])
        return Cells.from_texts("Studies", ["study", *DECISIONS, "seeds", "minutes"], rows)

    def details(self, measured: MeasuredStudy, *, short: bool = False) -> Cells:
        """Return a row for each comparison of a study; its claims are numbered."""
        rows = []
        for verdict in self.select_study(measured):
            claim = measured.study.claims[verdict.number - 1]
            for k, link in enumerate(verdict.links):
                of = "" if link.measure == claim.arm_measure.name else f", {link.measure}"
                first = [str(verdict.number), verdict.data, _show_verdict(verdict, short=short)] if k == 0 else [""] * 3
                rows.append([*first, f"{link.text}{of}", *_write_numbers(link)])
        header = ["claim", "data", "verdict", "comparison", "difference", "margin", "seen from", "seeds"]
        hidden = ("margin", "seen from") if short else ()
        return Cells.from_texts(measured.study.title, header, rows).only(lambda column: column.title not in hidden)

    def claims(self, measured: MeasuredStudy) -> list[str]:
        """Return the claims of a study, numbered, with what is compared."""
        return [
            f"{k}. {claim.text} ({claim.source}; {'primary, ' * claim.primary}{claim.topic}: {claim.arm_measure.name}"
            + (", the advantage over the adversary alone)" if claim.measure == "advantage" else ")")
            for k, claim in enumerate(measured.study.claims, start=1)
        ]

    def table(self, width: int = 140) -> str:
        """Return the tables as text of at most ``width`` columns."""
        return formats.as_text(self.rich(width), width)

    def rich(self, width: int) -> RenderableType:
        """Return the tables for a terminal of ``width`` columns."""
        parts: list[RenderableType] = []
        for measured in self.measured:
            narrow = width < formats.NARROW
            cells = self.details(measured, short=narrow)
            plain = [[cell.replace("**", "") for cell in row] for row in cells.rows]
            shown = formats.as_rich(cells._replace(rows=plain), width if narrow else None)
            parts += [shown, *map(Text, self.claims(measured)), Text()]
        counts = formats.as_rich(self.counts(), width if width < formats.NARROW else None)
        return Group(*parts, counts, *map(Text, self.remarks()))

    def remarks(self) -> list[str]:
        """Return what limits the verdicts."""
        edited = [name for name, study, made in self.measured if made.registration != study.registration]
        return [
            *(f"LOST {lost}" for lost in self.failures),
            *(f"EDITED the claims of {name} were changed after they were measured" for name in edited),
        ]

    def to_markdown(self) -> str:
        """Return the tables as Markdown."""
        sections = [self._write_section(measured) for measured in self.measured]
        return "\n\n".join([*sections, formats.as_markdown(self.counts()), *self.remarks()]) + "\n"

    def to_json(self) -> str:
        """Return one JSON object."""
        content: dict[str, Any] = {
            "verdicts": msgspec.to_builtins(self.verdicts),
            "studies": {name: msgspec.to_builtins(made, str_keys=True) for name, _, made in self.measured},
            "remarks": self.remarks(),
        }
        return msgspec.json.encode(content).decode()

    def page(self, unmeasured: Sequence[str] = (), picture: str = "") -> str:
        """Return the page of all studies.

        Args:
            unmeasured: the names of those without measurements.
            picture: the path of the map of verdicts, from the page.
        """
        head = HEAD.format(
            fewest=MIN_SEEDS,
            power=_to_percent(POWER),
            primary=MAX_PRIMARY,
            alpha=_to_percent(1 - LEVEL),
            level=_to_percent(LEVEL),
        )
        remarks = [f"* {line}" for line in self.remarks()]
        remarks += [f"* Registered, not measured yet: {', '.join(unmeasured)}"] if unmeasured else []
        parts = [head, "## Summary", formats.as_markdown(self.counts()), formats.as_markdown(self._list_titles())]
        parts += ["\n".join(remarks)] if remarks else []
        parts += [f"![The verdict on each claim and its data]({picture})", MAP] if picture else []
        parts += ["## Papers", PAPERS, *self.write_papers()]
        parts += [self._write_section(measured) for measured in self.measured]
        return "\n\n".join(part.strip("\n") for part in parts) + "\n"

    def write_papers(self) -> list[str]:
        """Return a paragraph on each paper: how many verdicts on its claims are which, and those on its main claims."""
        paragraphs = []
        for source in dict.fromkeys(study.source for _, study, _ in self.measured):
            of_paper = [measured for measured in self.measured if measured.study.source == source]
            verdicts = [verdict for measured in of_paper for verdict in self.select_study(measured)]
            ours = [verdict for verdict in verdicts if verdict.source.startswith("ours")]
            theirs = [verdict for verdict in verdicts if verdict not in ours]
            parts = ("on claims of this source", theirs), ("on claims of ours", ours)
            counts = "; ".join(f"{name}: {_count_decisions(part)}" for name, part in parts if part)
            main = [verdict for verdict in verdicts if verdict.primary] or verdicts
            claims: dict[str, list[Verdict]] = defaultdict(list)
            for verdict in sorted(verdicts, key=lambda verdict: verdict not in main):
                claims[f"{verdict.claim} ({verdict.source})"].append(verdict)
            texts = [
                f"{claim}: {'; '.join(map(_write_decision, part)) if part[0] in main else _count_decisions(part)}."
                for claim, part in claims.items()
            ]
            paragraphs.append(f"**{source}**. Verdicts {counts}. " + " ".join(texts))
        return paragraphs

    def _list_titles(self) -> Cells:
        cells = self.studies()
        titles = {measured.name: measured.study.title for measured in self.measured}
        rows = [[f"{titles[row[0]]} ({row[0]})", *row[1:]] for row in cells.rows]
        return cells._replace(rows=rows)

    def _write_section(self, measured: MeasuredStudy) -> str:
        name, study, made = measured
        versions = ", ".join(f"{name} {made.versions[name]}" for name in ("vflsec", "torch") if name in made.versions)
        commit = f", commit {made.commit[:10]}" if made.commit else ""
        most = f" of at most {study.looks[-1]}" if study.looks else ""
        facts = (
            f"{study.source}. Registered {study.registered} as `{name}`; {count(made.seeds, 'seed')}{most}, "
            f"{made.seconds / 60:.1f} minutes; {versions}{commit}. {_write_rounding(made)}"
        )
        notes = [f"* {note}" for note in study.notes]
        open_attacks = sorted(
            {f"{link.measure} ({v.data})" for v in self.select_study(measured) for link in v.links if link.unconverged}
        )
        notes += [f"* Not converged with some seeds: {', '.join(open_attacks)}."] if open_attacks else []
        details = formats.as_markdown(self.details(measured))
        parts = [f"## {study.title}", facts, "\n".join(self.claims(measured)), details]
        return "\n\n".join([*parts, "\n".join(notes)]).rstrip("\n")


def compare_values(measurements: Measurements, other: Measurements) -> dict[str, float]:
    """Return by measure the largest difference between the values of two runs with equal seeds."""
    theirs = {(values.data, values.arm, values.measure): values.by_seed for values in other.values}
    largest: dict[str, float] = {}
    for values in measurements.values:
        same = theirs.get((values.data, values.arm, values.measure), {})
        apart = [abs(values.by_seed[seed] - same[seed]) for seed in values.by_seed.keys() & same.keys()]
        if apart and not values.measure.startswith("bytes"):
            largest[values.measure] = round(max(largest.get(values.measure, 0.0), *apart), DIGITS)
    return largest


def _write_rounding(measurements: Measurements) -> str:
    if not measurements.rounding:
        return "Sensitivity to the machine's rounding was not measured."
    changed = ", ".join(f"{name} {value:.4f}" for name, value in measurements.rounding.items())
    return f"Largest change of a value of the first seed under the rounding of another processor: {changed}."


def _count_decisions(verdicts: Sequence[Verdict]) -> str:
    numbers = Counter(verdict.decision for verdict in verdicts)
    return ", ".join(f"{numbers[decision]} {decision}" for decision in DECISIONS if numbers[decision])


def _write_decision(verdict: Verdict) -> str:
    """Return a decision with its least favorable difference, and that of utility where it must be equal."""
    utility = [f"; utility {_format_signed(link.mean)}" for link in verdict.links if link.measure != verdict.measure]
    least = min(verdict.comparisons, key=lambda link: link.mean)
    return f"{verdict.decision} on {verdict.data} ({_write_numbers(least)[0]}{''.join(utility)})"


def _show_verdict(verdict: Verdict, *, short: bool) -> str:
    bold = verdict.decision if short else f"**{verdict.decision}**"
    return bold if verdict.decision == verdict.single else f"{bold} (by itself: {verdict.single})"


def _write_numbers(link: ClaimComparison) -> list[str]:
    n = len(link.differences)
    lost = f" of {link.pairs}" * (link.pairs > n) + f" ({len(link.lost)} lost)" * bool(link.lost)
    if n == 0:
        return ["–", _write_limit(link), "–", f"{n}{lost}"]
    ends = "" if math.isnan(link.low) else f" [{_format_signed(link.low)}, {_format_signed(link.high)}]"
    seen = f"{link.detectable:.3f}" if math.isfinite(link.detectable) else "–"
    return [f"{_format_signed(link.mean)}{ends}", _write_limit(link), seen, f"{n}{lost}"]


def _write_limit(link: ClaimComparison) -> str:
    return f"{link.margin:g}" if link.margin >= 0 else f"> −{-link.margin:g}"


def _format_signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def _to_percent(value: float) -> str:
    return f"{100 * value:.0f} %"
