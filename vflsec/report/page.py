"""A report as one HTML file: no script, no request, readable on a phone and on paper, and printed as PDF."""

import importlib
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import msgspec

from vflsec.base import files
from vflsec.base.checks import count, group
from vflsec.base.errors import UsageError
from vflsec.report import table
from vflsec.report.columns import STRONGEST, TEXTS, WORDS, compare_with_alone, write_advantage
from vflsec.report.comparison import list_settings, write_plain
from vflsec.report.formats import Cells, Column, as_html, escape, write_number
from vflsec.results.analysis.results import Point, Summary, name_defense
from vflsec.results.analysis.summary import name_with_victim
from vflsec.results.analysis.verdict import MEASURES, name_few
from vflsec.results.records.manifest import ACTS_UNASKED, COULD, INTEGRITY, TARGETS, UNASKED, Manifest, Provenance

STYLE = (resources.files("vflsec.report") / "page.css").read_text("utf-8")

OF_ROLE = re.compile(r"adversary$|attacks$|explicit$|sources\.attacks\b")
"""Settings that differ between adversaries."""

FRAGMENT_STYLE = (resources.files("vflsec.report") / "fragment.css").read_text("utf-8")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "msedge", "microsoft-edge")
SECONDS = 180
"""After which a browser has hung."""

ANNEX = tomllib.loads((resources.files("vflsec.report") / "annex.toml").read_text("utf-8"))["entries"]

OPTION = r"(?:--[a-z]|\b[a-z_]+\.[a-z_.]+=|\bvflsec [a-z]+\b)"
HINTS = (
    (r"--set aux\.n=(?=\d)", ""),
    (r"\bneeds model\.head=none, got \w+", "needs a joint model whose last layer is not trained"),
    (r", got an adversary on the (?:passive|active) side", ""),
    (r"; this adversary has only.*|: (?:choose|name it|record) .*|: set it\b.*|: (?:choose|name) it$", ""),
    (rf" \([^()]*{OPTION}[^()]*\)|, then {OPTION}[^\s,;.]*", ""),
    (rf"[:;] (?!expected )(?:(?![:;] |\. ).)*?{OPTION}.*?(?=; |\)|\.? ?$|\. )", ""),
)
"""What tells the user of a command line what to type, and what a page says in its place."""

NOUNS = TEXTS["targets"]
"""What attacks recover, by target."""

WIDEST = 1200
"""A screen of so many pixels scrolls no picture."""

MAX_NAMES = 40
"""So many columns of a party, or classes, are named."""

SENTENCES = ("alarms", "verdict", "notes", "failures")
KINDS = {"train": "training", "candidates": "candidate"}

NO_EVIDENCE = "No number{} is evidence: a NOTE at the top of this page says why these numbers may not be relied on."
PUBLIC = "These are figures of {title} ({license}). Nothing follows from them for other data."
ACTING = " What acts in training is run if it is asked for; what only enlarges its own updates is run with the others."
KNOWN, PREDICTION = "known_of_class@0.99", "prediction"


class Part(NamedTuple):
    """A report as a page shows it, with its pictures: the curve, and all attacks; one without a picture has none."""

    summary: Summary
    manifest: Manifest
    traffic: Sequence[tuple[str, str, str, str, int]] = ()
    svg: bytes = b""
    dots: bytes = b""


def write_page(parts: Sequence[Part]) -> str:
    """Return a whole HTML document about one adversary, or several with a section for each, to be signed once."""
    plain = [{field: list(map(drop_hints, getattr(part.summary, field))) for field in SENTENCES} for part in parts]
    summaries = [msgspec.structs.replace(part.summary, **said) for part, said in zip(parts, plain, strict=True)]
    parts = [part._replace(summary=summary) for part, summary in zip(parts, summaries, strict=True)]
    tables = [cells for part in parts for cells in _list_tables(part)]
    if len(parts) == 1:
        (summary,) = summaries
        title = f"{summary.audited or summary.dataset}: what {summary.adversary} infers{_name_runs(parts[0].manifest)}"
        others = [] if summary.audited else _list_others(summary, parts[0].manifest)
        line, body = table.write_heading(summary), [_write_verdict(parts[0], others), *_write_part(parts[0])]
    else:
        data = " and ".join(dict.fromkeys(summary.audited or summary.dataset for summary in summaries))
        title = f"{data}: what {len(parts)} adversaries infer"
        roles = table.show_roles(summaries).tables
        tables += roles
        line = table.WORST_FIRST
        named = list(enumerate(zip(map(escape, table.name_roles(summaries)), parts, strict=True), start=1))
        body = [
            *(f'<h2><a href="#part-{k}">{name}</a></h2>{_write_verdict(part)}' for k, (name, part) in named),
            *map(as_html, roles),
            _write_differences(parts),
            *(_write_article(k, name, part) for k, (name, part) in named),
        ]
    ends = [_write_annex(parts), _write_sign_off(parts)]
    words = _explain_words(tables, " ".join(filter(None, [*body, *ends])))
    cards = _write_cards(part.manifest for part in parts)
    body += [cards, _write_meanings("What the columns and words mean", words), *ends]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<header><h1>{escape(title)}</h1><p class=quiet>{escape(line)}</p></header><main>\n"
        + "\n".join(filter(None, body))
        + "\n</main></body></html>\n"
    )


def drop_hints(text: str) -> str:
    """Return a sentence without hints for a command line."""
    for hint, words in HINTS:
        text = re.sub(hint, words, text)
    return text


def _write_article(k: int, name: str, part: Part) -> str:
    """Return the section of one of several adversaries, whose headings are a level lower."""
    inner = "\n".join(filter(None, _write_part(part))).replace("h2>", "h3>")
    heading = escape(table.write_heading(part.summary))
    return f'<article id="part-{k}"><h2>{name}</h2><p class=quiet>{heading}</p>\n{inner}</article>'


def _write_differences(parts: Sequence[Part]) -> str:
    """Return the settings, versions and data in which the evaluations differ, besides adversary and attacks."""
    settings = [dict(list_settings(part.manifest)) for part in parts]
    names = [name for name in dict.fromkeys(name for each in settings for name in each) if not OF_ROLE.match(name)]
    rows = [[name, *(each.get(name, "–") for each in settings)] for name in names]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    columns = [Column("", title=name, kind="prose") for name in table.name_roles([part.summary for part in parts])]
    title = "Settings in which these evaluations differ"
    if not rows:
        return f"<section><h2>{title}</h2><p>None: same data, methods, settings and versions.</p></section>"
    return as_html(Cells(title, [Column("", title="setting", kind="name"), *columns], rows))


def _list_tables(part: Part) -> list[Cells]:
    shown = table.show(part.summary, details=True)
    headlines = [] if part.summary.audited else table.list_headlines(part.summary)
    return [*headlines, *map(drop_repeated, (*shown.tables, *shown.details))]


def drop_repeated(cells: Cells) -> Cells:
    """Return a table without the row of an attack that only repeats the headline above it."""
    rows = [[f"worst: {text}" if title == "attack" else text for title, text in zip(cells.header, row, strict=True)]
            for row in cells.rows]  # fmt: skip
    above = [[], *map(list, cells.rows)]
    return cells._replace(rows=[row for k, row in enumerate(cells.rows) if above[k] != rows[k]])


def _write_part(part: Part) -> list[str]:
    summary, manifest, traffic, svg, dots = part
    headlines = [] if summary.audited else table.list_headlines(summary)
    tables = [as_html(cells.narrow(0)) for cells in _list_tables(part)]
    return [
        _write_threat(summary, manifest),
        _write_meanings("Parties and data", _describe_data(summary, manifest)),
        f"<p class=quiet>{escape(STRONGEST.help)}</p>" if headlines else "",
        *tables[: len(headlines)],
        _list_untested(summary, manifest),
        _write_figure(svg.decode(), "Privacy-utility curve"),
        _write_figure(dots.decode(), "Leak of each attack, beside alone, under each defense"),
        f"<div class=attacks>{''.join(tables[len(headlines) :])}</div>",
        _write_notes(summary),
        _write_traffic(traffic),
        _write_origin(manifest),
    ]


def write_fragment(summary: Summary) -> str:
    """Return what a notebook shows: verdict, tables, and what was not run."""
    said = [*(f"NOTE {alarm}" for alarm in summary.alarms), *summary.verdict]
    verdict = "".join(f"<p><b>{escape(sentence)}</b></p>" for sentence in said)
    shown = table.show(summary)
    parts = [
        f"<style>{FRAGMENT_STYLE}</style>",
        f"<p>{escape(shown.above[0])}</p>",
        verdict,
        *(f"<p>{escape(line)}</p>" for line in shown.above[1:]),
        *map(as_html, shown.tables),
        *(f"<p>{escape(line)}</p>" for line in shown.below if not line.startswith("VERDICT")),
    ]
    return f"<div class=vflsec>{''.join(parts).replace('h2>', 'h4>')}</div>"


def _write_verdict(part: Part, others: Sequence[str] = ()) -> str:
    summary, card = part.summary, part.manifest.card
    lines = [f"<p class=failed>NOTE {escape(alarm)}</p>" for alarm in summary.alarms]
    further = table.write_epsilon(summary) or table.write_simulated(summary)
    reasons = [why for _, left in _sort_attacks(summary, part.manifest).values() for why in left.values()]
    unasked = count(reasons.count(ACTS_UNASKED), "attack")
    public = [f"Not run: {unasked} on training itself, though this adversary could."] * (ACTS_UNASKED in reasons)
    public += [f"Not measured here: what {' and '.join(others)} may infer."] * bool(others)
    public += (
        [PUBLIC.format_map({"title": summary.dataset} | card)] if card.get("license") and not summary.audited else []
    )
    lines += [f"<p>{escape(sentence)}</p>" for sentence in (*summary.verdict, *public, *further)]
    lines += [
        f"<p{'' if gate.holds or gate.replaced else ' class=failed'}>{escape(table.write_gate(gate))}</p>"
        for gate in summary.gates
    ]
    return f"<section class=verdict>{''.join(lines) or '<p>No attack gave a number.</p>'}</section>"


def _write_figure(svg: str, title: str) -> str:
    if not svg:
        return ""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    width = re.search(r'width="([\d.]+)pt"', svg)
    size = float(width[1]) if width else 600.0  # a narrow screen scrolls rather than shrinks words
    svg = svg.replace("<svg", f'<svg style="min-width: {min(size, WIDEST):.0f}px; max-width: {2 * size:.0f}px"', 1)
    return f'<figure role="img" aria-label="{title}" tabindex=0>{svg}</figure>'


def _list_others(summary: Summary, manifest: Manifest) -> list[str]:
    """Return the parties that are not the adversary, as the data call them."""
    names = [manifest.names.get(name, name) for name in manifest.columns]
    return [name for name in names if name not in summary.adversary.split("+")]


def _list_untested(summary: Summary, manifest: Manifest) -> str:
    """Return what was not tested by what it would recover."""
    rows = {}
    for title, left in _sort_attacks(summary, manifest).values():
        if left:
            reasons = group(left, left.__getitem__)
            rows[title] = "\n".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
    said = " ".join(rows.values())
    if summary.mountable:
        every = f"{summary.adversary} can mount {count(summary.mountable, 'attack')} that infer something"
        rows["What is counted"] = (
            f"{every}. An attack on a party counts once for each party.{ACTING * (ACTS_UNASKED in said)}"
        )
    if not summary.audited:
        named = ", ".join(_list_others(summary, manifest))
        rows["What other parties infer"] = f"This needs a report on each of them{f': {named}' * bool(named)}."
        rows["Matching of records"] = "What it tells each party about whose rows the others have."
        rows["Other defenses, strengths and data"] = "Nothing follows for them from these numbers."
    return _write_meanings("What was not tested, and why", rows)


def _sort_attacks(summary: Summary, manifest: Manifest) -> dict[str, tuple[str, dict[str, str]]]:
    """Return for each target how many attacks gave a number and how many did not, and why, by their names.

    An attack counts once for each party that it is on, as it does in the verdict.
    """
    entries = {attack.label: attack for attack in manifest.attacks}
    targets = {attack.label: attack.target.partition(" ")[0] for attack in manifest.attacks if not attack.baseline}
    run = {point.attack: point.target.partition(" ")[0] for point in summary.points if point.leak.mean is not None}
    run |= {damage.attack: INTEGRITY for damage in summary.integrity if damage.under_attack.mean is not None}
    unable = "could not be run on this material" if summary.audited else "impossible for this adversary"
    given = manifest.exclusions | summary.left_out
    given = {name: text.removeprefix(f"attack {name.partition(':')[0]!r} ") for name, text in given.items()}
    why = {name: drop_hints(text if text.startswith(COULD) else f"{unable}: {text}") for name, text in given.items()}
    why |= {name: UNASKED for name in summary.not_run if not why.get(name, "").startswith(COULD)}
    why |= dict.fromkeys(targets, "gave no number")
    known = {name.partition(":")[0] for name in (*why, *(attack.name for attack in manifest.attacks))}
    others = {name: target for name, target in manifest.questions.items() if name not in known}
    unknown = unable if summary.mountable else UNASKED
    why |= {name: ACTS_UNASKED if target == INTEGRITY else unknown for name, target in others.items()}
    names = why.keys() - ({baseline.label for baseline in manifest.baselines} - targets.keys()) - run.keys()
    names -= {attack.name for attack in manifest.attacks if attack.label in run}
    left = group(sorted(names), lambda name: targets.get(name) or manifest.questions.get(name.partition(":")[0], ""))
    number = Counter(
        dict((name_with_victim(entries[name]), run[name]) for name in run.keys() & targets.keys()).values()
    )
    tested = {}
    for target in (*TARGETS, ""):
        reasons = {name: why[name] for name in left.get(target, [])}
        impossible = sum(reason.startswith(unable) for reason in reasons.values())
        number_run = count(number[target], "attack")
        counts = f"{number_run} of vflsec run, {len(reasons) - impossible} more possible, {impossible} not"
        tested[target] = (f"{NOUNS[target]}: {counts}", reasons)
    return tested


def _write_sign_off(parts: Sequence[Part]) -> str:
    """Return the box to be signed, with the versions and commands of what is signed, and whether to rely on it."""
    systems = dict.fromkeys(_name_system(part) for part in parts)
    defenses = dict.fromkeys(name_defense(p, part.summary.undefended) for part in parts for p in part.summary.points)
    choices = (defenses, ("accepted", "accepted under conditions", "rejected"))
    boxes = ["&emsp; ".join(f"☐&nbsp;{escape(name)}" for name in names) for names in choices]
    fields = {
        "System, data and adversary": escape("; ".join(systems)),
        **dict(zip(("Defense and strength", "Decision"), boxes, strict=True)),
        **dict.fromkeys(("Conditions", "Valid until", "Name and role", "Date and signature"), ""),
    }
    rows = "".join(f"<tr><th class=text>{field}</th><td>{text}</td></tr>" for field, text in fields.items())
    origins = [part.manifest.provenance for part in parts]
    signed = "".join(f"<p>{_write_version(origin)}: <code>{_write_command(origin)}</code></p>" for origin in origins)
    if any(part.summary.alarms for part in parts):
        signed += "<p class=failed>A NOTE at the top of this page says why these numbers may not be relied on.</p>"
    return f"<section class=sign><h2>Sign-off</h2>{signed}<table>{rows}</table></section>"


def _name_system(part: Part) -> str:
    """Return what is signed: the audited system, or the evaluated methods, with data and adversary."""
    summary = part.summary
    methods = summary.audited or ", ".join(dict.fromkeys(point.method for point in summary.points))
    return f"{methods} on {summary.dataset}, {summary.adversary}"


def _name_runs(manifest: Manifest) -> str:
    """Return what tells the title of a page from another: the defenses and the time."""
    defenses = dict.fromkeys(row.defense for row in manifest.rows if row.strength)
    return f"{' under ' * bool(defenses)}{', '.join(defenses)} ({manifest.provenance.time[:16].replace('T', ' ')})"


def _write_version(origin: Provenance) -> str:
    commit = f"commit {origin.commit[:12]}" if origin.commit else "an installed package"
    return escape(f"vflsec {origin.versions.get('vflsec', 'of unknown version')}, {commit}, {origin.time}")


def _write_command(origin: Provenance) -> str:
    return escape(" ".join(origin.command) or "from Python")


def _write_notes(summary: Summary) -> str:
    front = table.get_front(summary) if summary.ranks else []
    lines = [*summary.notes, *summary.failures, *table.list_cap_notes(summary), *front]
    notes = "".join(f"<p>{escape(note)}</p>" for note in lines)
    return f"<section><h2>Notes</h2>{notes}</section>" if notes else ""


def _explain_words(tables: Sequence[Cells], said: str) -> dict[str, str]:
    """Return what the columns mean, and words that are said."""
    columns = {c.title.rstrip(" ↑↓"): c.help for cells in tables for c in cells.columns if c.help}
    used = (word for word in WORDS if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", said, re.IGNORECASE))
    return columns | {word: WORDS[word] for word in used}


def _write_threat(summary: Summary, manifest: Manifest) -> str:
    aux = manifest.settings.get("aux")
    known = aux.get("n", 0) if isinstance(aux, dict) else 0
    adaptive = aux.get("adaptive", True) if isinstance(aux, dict) else True
    trainings = manifest.settings.get("trainings", 1)
    rows = " and ".join(count(n, f"{KINDS.get(split, split)} row") for split, n in summary.rows.items())
    guessed = f", of {rows} each: so many people, if each has a row" if rows else ""
    sentences = [
        "The parties hold different columns about the same people. The active party also holds the labels, which the "
        "joint model is to predict.",
        f"The adversary is {summary.adversary}. What it reaches by its own columns, without joining, is called alone.",
        f"It has its own columns, and what {summary.audited} shows."
        if summary.audited
        else "It has its own columns, its own model, and every message that it sent or received.",
        f"It knows the label, or what else it is after, of {known} training rows, which are never scored."
        if known
        else "It knows the label of no row.",
        "It combines all releases of a row." if adaptive else "It uses the first release of each row only.",
        f"Numbers are over {count(summary.seeds, 'draw' if summary.audited else 'seed')}{guessed}.",
        "It follows the protocol, except in attacks that act in training or enlarge the updates of its own model. "
        f"It has seen {count(trainings, 'training')} on these rows; more of them leak more."
        if not summary.audited
        else "",
        "The utility without joining was not measured." if all(p.gain is None for p in summary.points) else "",
    ]
    return f"<section><h2>Threat model</h2><p>{escape(' '.join(filter(None, sentences)))}</p></section>"


def _describe_data(summary: Summary, manifest: Manifest) -> dict[str, str]:
    """Return who holds which columns, what the labels are, and where the data come from."""
    rows, data = {}, manifest.settings.get("data")
    first = " in the first seed" * (isinstance(data, dict) and data.get("columns") not in ("given", "even"))
    for party, columns in manifest.columns.items():
        name = manifest.names.get(party, party)
        roles = ["holds the labels"] * (party == "active") + ["the adversary"] * (name in summary.adversary.split("+"))
        more = f" and {len(columns) - MAX_NAMES} more" if len(columns) > MAX_NAMES else ""
        rows[", ".join([name, *roles])] = (
            f"{count(len(columns), 'column')}{first}: {', '.join(columns[:MAX_NAMES])}{more}"
        )
    card = manifest.card
    rows["label"] = ": ".join(filter(None, [card.get("label", ""), " or ".join(manifest.classes[:MAX_NAMES])]))
    rows["data"] = "\n".join(filter(None, map(card.get, ("title", "source", "license")))) or summary.dataset
    return {name: text for name, text in rows.items() if text}


def _write_traffic(traffic: Sequence[tuple[str, str, str, str, int]]) -> str:
    """Return a table of what each defense sends; defenses that send the same share their rows."""
    alike: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for place, routes in group(traffic, lambda route: route[0]).items():
        sent = [(*route[1:4], f"{route[4] / 1e6:.2f}") for route in routes]
        total = ("all", "all", "total", f"{sum(route[4] for route in routes) / 1e6:.2f}")
        alike.setdefault((*sent, total), []).append(place)
    names = [Column("", title=title, kind="name") for title in ("from", "to", "what")]
    every = "each tested setting" if sum(map(len, alike.values())) > len(alike) == 1 else ""
    rows = [[every or ", ".join(places), *route] for routes, places in alike.items() for route in routes]
    title = "What crosses between parties in a training, the mean under each defense"
    columns = [Column("", title="defense", kind="prose"), *names, Column("", title="MB")]
    return as_html(Cells(title, columns, rows)) if rows else ""


def _write_cards(manifests: Iterable[Manifest]) -> str:
    meanings: dict[str, str] = {}
    for kind, cards in (item for manifest in manifests for item in manifest.provenance.cards.items()):
        for name, text in cards.items():
            known = meanings.setdefault(f"{name} ({kind[:-1]})", text)
            if text not in known:  # a file of the same name, which is another
                meanings[f"{name} ({kind[:-1]})"] = f"{known} {text}"
    return _write_meanings("Methods, defenses and attacks", meanings)


def _write_meanings(title: str, meanings: Mapping[str, str]) -> str:
    """Return a list of words and their meanings, each line of them for itself."""
    texts = {name: "".join(f"<dd>{escape(line)}</dd>" for line in text.split("\n")) for name, text in meanings.items()}
    items = "".join(f"<dt>{escape(name)}</dt>{text}" for name, text in texts.items())
    return f"<section><h2>{title}</h2><dl>{items}</dl></section>" if items else ""


def _write_origin(manifest: Manifest) -> str:
    origin = manifest.provenance
    facts = {
        "commit of vflsec": origin.commit or "an installed package",
        "versions": ", ".join(f"{name} {version}" for name, version in origin.versions.items()),
        **{
            f"{kind}, by name or hash, and version": "; ".join(map(write_plain, named.values()))
            for kind, named in origin.sources.items()
        },
    }
    items = f"<dt>command</dt><dd><code>{_write_command(origin)}</code></dd>"
    items += "".join(f"<dt>{escape(k)}</dt><dd><code>{escape(v)}</code></dd>" for k, v in facts.items())
    settings = f"<details><summary>All settings</summary><pre>{escape(files.dump(manifest.settings))}</pre></details>"
    return f"<section class=origin><h2>Where the numbers come from</h2><dl>{items}</dl>{settings}</section>"


def _write_annex(parts: Sequence[Part]) -> str:
    """Return what laws and standards ask for, and what these runs have of it."""
    names = table.name_roles([part.summary for part in parts]) if len(parts) > 1 else [""]
    evidence = [
        (f" ({name})" * bool(name), _list_evidence(part.summary, part.manifest))
        for name, part in zip(names, parts, strict=True)
        if not part.summary.alarms
    ]
    doubtful = [f" of {name}" * bool(name) for name, part in zip(names, parts, strict=True) if part.summary.alarms]
    kinds = dict.fromkeys(kind for entry in ANNEX for kind in entry["evidence"] if kind in NOUNS)
    measured = [f"{facts[kind]}{name}" for name, facts in evidence for kind in kinds]
    rows = {"What was measured": "\n".join(measured)} if measured else {}
    for entry in ANNEX:
        lines, run = [], set()
        for name, facts in evidence:
            used = [k for k in entry["evidence"] if not facts[k].startswith(f"{NOUNS.get(k)}: 0 attacks")]
            said = "; ".join(NOUNS[k].lower() if k in kinds else facts[k] for k in used)
            lines.append(f"Evidence: {said or 'none'}{name}")
            run.update(used)
        missing = [NOUNS[k].lower() for k in entry["evidence"] if lines and k not in run]
        without = f"{', '.join(missing)}, on which no attack was run; " * bool(missing)
        rows[entry["asked"]] = "\n".join([*lines, f"Not covered: {without}{entry['not_covered']}"])
    intro = "".join(f"<p class=failed>{escape(NO_EVIDENCE.format(name))}</p>" for name in doubtful)
    intro += "<p>This report is evidence. It is no certificate, and no legal advice.</p>" if evidence else ""
    return _write_meanings("Annex: where this evidence belongs", rows).replace("<dl>", f"{intro}<dl>", 1)


def _list_evidence(summary: Summary, manifest: Manifest) -> dict[str, str]:
    """Return what the runs have of each kind of evidence, or that it was not run."""
    points = [table.show_most(point) for point in summary.points if point.leak.mean is not None]
    facts, tested = {}, _sort_attacks(summary, manifest)
    for target, (numbers, _) in tested.items():
        worst = [p for p in summary.worst if p.target.partition(" ")[0] == target and p.leak.mean is not None]
        facts[target] = numbers + (f", {_state_most(worst, summary)}" if worst else "")
    read = any(point.attack.partition(":")[0] == PREDICTION for point in points)
    why = tested["labels"][1].get(PREDICTION, "")
    facts[PREDICTION] = (
        f"Predictions that are handed out: {'attack run' if read else ', '.join(filter(None, ('no attack run', why)))}"
    )
    defenses = dict.fromkeys(name_defense(point, "") for point in points if point.strength)
    facts["defenses"] = f"leak and cost of {', '.join(defenses)}" if defenses else "no defense was tested"
    facts["gates"] = "; ".join(map(table.write_gate, summary.gates)) or "no gate was set"
    known = [p for p in points if p.target == "labels" and KNOWN in p.leak.others]
    shares = [(p.leak.others[KNOWN], f"{p.attack} under {name_defense(p, summary.undefended)}") for p in known]
    share = f"highest measured {write_number(max(shares)[0])} by {max(shares)[1]}" if known else "not measured"
    facts["known"] = f"share of the labels of a class that are known with more than 99 %: {share}"
    seen = [p.leak for p in summary.worst if p.leak.detectable is not None]
    most = {
        leak.metric: write_number(leak.detectable) for leak in sorted(seen, key=lambda leak: leak.detectable or 0.0)
    }
    blind = (f"none, with {name_few(point.leak)}" for point in summary.worst if point.leak.is_blind)
    least = next(blind, ", ".join(f"{MEASURES.get(name, name)} {size}" for name, size in most.items()) or "–")
    facts["detectable"] = f"smallest advantage that would have been seen in each setting: {least}"
    rows = [count(n, f"{KINDS.get(split, split)} row") for split, n in summary.rows.items()]
    facts["rows"] = f"{' and '.join(rows) or 'no rows'} in each of {count(summary.seeds, 'seed')}"
    return facts


def _state_most(points: Sequence[Point], summary: Summary) -> str:
    """Return the highest leak measured and where, what is known without joining, and how surely they differ."""
    most = max(points, key=lambda point: max(point.leak.mean or 0.0, point.highest or 0.0))
    leak, answer = most.leak, compare_with_alone(most)
    surely = f"advantage {write_advantage(most)}, {'shown' if answer == 'yes' else answer}"
    alone = "" if leak.alone is None else f" ({write_number(leak.alone)} without joining; {surely})"
    measure = MEASURES.get(leak.metric, leak.metric)
    under, text = f"under {name_defense(most, summary.undefended)}", f"highest measured {measure}"
    if not most.is_exceeded:
        return f"{text} {write_number(leak.mean)} {under}{alone}"
    by = f"by {most.highest_attack} on the rows that chose it; {write_number(leak.mean)} if other rows choose"
    return f"{text} {write_number(most.highest)} {under} {by}{alone}"


def expect_printer() -> str:
    """Return the path of the first browser, or empty for WeasyPrint; raise UsageError if there is neither."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), "")
    if not browser and find_spec("weasyprint") is None:
        raise UsageError("expected Chromium, Chrome, Edge or WeasyPrint for --pdf, found none: pip install weasyprint")
    return browser


def print_page(html: str) -> bytes:
    """Return the PDF of a page, or raise UsageError if nothing prints it."""
    browser = expect_printer()
    if not browser:
        content: bytes = importlib.import_module("weasyprint").HTML(string=html).write_pdf()
        return content
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:  # a browser may still write into its profile
        page, paper = Path(name, "page.html"), Path(name, "page.pdf")
        page.write_text(html, "utf-8")
        words = [browser, "--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        words += ["--host-resolver-rules=MAP * ~NOTFOUND", "--no-pdf-header-footer", f"--user-data-dir={name}/profile"]
        words += ["--no-sandbox"] * (os.geteuid() == 0)  # root has none; the page runs no script
        words += [f"--print-to-pdf={paper}", page.as_uri()]
        try:
            done = subprocess.run(words, capture_output=True, timeout=SECONDS, check=False)  # noqa: S603
            reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            reason = f"it took more than {SECONDS} s"
        except OSError as error:
            reason = str(error)
        if paper.is_file():
            return paper.read_bytes()
    raise UsageError(f"expected a PDF from {browser}, found none ({reason}): print the page of --html in a browser")
