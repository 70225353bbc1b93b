"""The records of a results folder: the result of one attack with or without a trained federation.

``Result`` and ``BaselineResult`` are the lines of ``records.jsonl``. Each line has the version of the schema and a
checksum, so that damage is detected.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from vflsec.base.errors import CONTROL, clean
from vflsec.results.metrics import is_possible

SCHEMA = 1
"""Raised whenever a field changes its meaning."""

Status = Literal["ok", "unmeasured", "unseen", "unconverged", "collapsed", "diverged", "error"]
"""``unseen``: under this defense the adversary does not see what the attack reads, so that there is nothing to attack.
``unmeasured``: the material leaves open whether more leaks, so that no limit holds; a number is a lower bound."""

FAILED = ("error", "diverged")
"""The status of results without a number, which may be computed again."""

Number = int | float
Maybe = float | None
"""None stands for NaN, which JSON does not have."""


def _to_ends(ends: tuple[Maybe, Maybe]) -> tuple[float, float]:
    low, high = (math.nan if end is None else end for end in ends)
    return low, high


class Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The metrics of one guess on the rows of one split.

    Attributes:
        metrics: by name, the headline first.
        ci95_rows: 95 % interval of the headline over rows.
        chance: the headline of a guess without any information.
        n: number of rows.
        halves: the headline on each of two random halves of the rows; None if they are too few to be split.
        single_class: whether all rows are guessed to be of the same class.
        overfit: how much more the chosen attack leaks on the rows that chose it than on others; 0 without a choice.
        without: the headline without each group of rows, see ``vflsec.results.statistics.draw_groups``; None if
            the rows are too few.
        known: the share of all rows that are auxiliary samples, which another seed draws anew.
        constant: whether all rows have the same scores.
        known_of_class: the largest share of a class's training rows whose labels the adversary knows; 0 for values.
    """

    metrics: dict[str, float]
    ci95_rows: tuple[Maybe, Maybe]
    chance: float
    n: int
    halves: tuple[float, float] | None = None
    single_class: bool = msgspec.field(default=False, name="one_class")
    overfit: float = 0.0
    without: tuple[float, ...] | None = None
    known: float = 0.0
    constant: bool = False
    known_of_class: float = 0.0

    @property
    def metric(self) -> str:
        """The name of the headline."""
        return next(iter(self.metrics))

    @property
    def headline(self) -> float:
        """The first metric, which is the dataset's headline."""
        return self.metrics[self.metric]

    @property
    def row_interval(self) -> tuple[float, float]:
        """``ci95_rows`` with NaN for None."""
        return _to_ends(self.ci95_rows)


class Triggered(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The share of test rows of other classes that a trigger turns into the attack's class."""

    share: float
    ci95_rows: tuple[Maybe, Maybe]
    n: int

    @property
    def row_interval(self) -> tuple[float, float]:
        """``ci95_rows`` with NaN for None."""
        return _to_ends(self.ci95_rows)


class Impact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The impact of an attack on integrity on a federation, or on the honest one that it is compared with.

    Attributes:
        utility: on test rows.
        success: of the trigger; None for an attack without one.
    """

    utility: Block
    success: Triggered | None


class Guessed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The guesses of tossed labels that an attack was sure of.

    Attributes:
        right: how many of them are.
        made: how many were made.
        tossed: of how many labels, besides those by which it was decided what is sure.
    """

    right: int
    made: int
    tossed: int


class AttackRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An attack as it was run: ``repr`` shows all its options, ``after`` is the phase after which it attacked."""

    name: str
    options: dict[str, Any]
    repr: str
    after: str | None = None


class Tuning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The best settings of several trials, which all have their utility on validation rows, None if one failed.

    Attributes:
        settings: by path or name of an option; empty if those that were given are best.
        seconds: of the CPU, for all trials.
    """

    settings: dict[str, Number]
    scores: list[Maybe]
    seconds: float


class BaselineResult(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="prior", forbid_unknown_fields=True
):
    """The result of one attack without the federation, for one seed; ``kind`` is ``prior`` on disk.

    Attributes:
        leak: by split; empty if the attack needs the federation, or failed.
        guessed: of tossed labels, where there are any.
        fold: the headline on folds of the auxiliary rows.
        tuned: the options that the adversary chose by folds.
        sureness: the confidence in the sign of the guess, if auxiliary labels fix only the sign.
    """

    key: str
    method: str
    seed: int
    adversary: str
    attack: AttackRun
    status: Status = "ok"
    error: str | None = None
    leak: dict[str, Block] = {}
    guessed: Guessed | None = None
    fold: Maybe = None
    budget: dict[str, Number] = {}
    sureness: Maybe = None
    tuned: str | None = None
    seconds: dict[str, float] = {}


class Result(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="result", forbid_unknown_fields=True):
    """One attack on one trained cell, or the utility of a cell that has no adversary.

    Attributes:
        cell: the key of the training.
        defenses: ``name:strength`` of each.
        utility: on test rows; None if the status has none.
        leak: by split.
        guessed: of tossed labels, where there are any.
        damage: of an attack on integrity; of the honest training if ``control`` is set.
        mountable: the attacks that this adversary can mount.
        nbytes: sent in training, validation included.
        traffic: phase, sender, receiver, kind, bytes.
        spread: of the embeddings of test rows, by phase and party.
        spent: by each defense with differential privacy, see ``vflsec.run.score``.
        active_alone: the utility of a quick model of the active party's columns; None under defenses.
        quick_joint: the same of all columns, of seed 0.
        tuning: what chose settings; None without trials.
    """

    key: str
    cell: str
    method: str
    defenses: list[str]
    seed: int
    adversary: str
    attack: AttackRun | None
    status: Status
    error: str | None = None
    utility: Block | None = None
    leak: dict[str, Block] = {}
    guessed: Guessed | None = None
    damage: Impact | None = None
    control: bool = False
    fold: Maybe = None
    budget: dict[str, Number] = {}
    mountable: list[str] = []
    device: str = "cpu"
    nbytes: int = 0
    traffic: list[tuple[str, str, str, str, int]] = []
    reached: dict[str, Number] = {}
    spread: Mapping[str, Mapping[str, Maybe]] = {}
    notes: list[str] = []
    spent: list[dict[str, Any]] = []
    active_alone: Maybe = None
    quick_joint: Maybe = None
    sureness: Maybe = None
    tuned: str | None = None
    tuning: Tuning | None = None
    seconds: dict[str, float] = {}

    @property
    def usable_utility(self) -> Block:
        """The utility of a result whose status has one.

        Raises:
            ValueError: it is missing, so that the record is damaged.
        """
        if self.utility is None:
            raise ValueError(f"the record {self.key} is {self.status} and has no utility")
        return self.utility


Record = Result | BaselineResult

MAX_TEXT = 4096
"""The largest number of characters of a text in a record or a manifest."""


class _Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: int
    check: str
    record: msgspec.Raw


class _Version(msgspec.Struct, frozen=True):
    schema: int


class OtherSchema(ValueError):
    """A file of another version of vflsec; the argument is its schema."""


def encode(record: Record) -> bytes:
    """Return one line of ``records.jsonl``."""
    return seal(record)


def decode(line: bytes) -> Record:
    """Return the record of one line."""
    record: Record = unseal(line, Record)
    for fault in _list_faults(record):
        raise ValueError(fault)
    return record


def seal(value: msgspec.Struct) -> bytes:
    """Return ``value`` as a line of JSON with the version of the schema and a checksum.

    Texts that ``unseal`` would refuse are made readable.
    """
    body = msgspec.json.encode(value)
    if not all(map(is_readable, list_texts(content := msgspec.json.decode(body)))):
        body = msgspec.json.encode(_make_readable(content))
    return msgspec.json.encode({"schema": SCHEMA, "check": _digest(body), "record": msgspec.Raw(body)}) + b"\n"


def unseal(line: bytes, kind: Any) -> Any:
    """Return the value that ``seal`` has written, as a ``kind``.

    Raises:
        OtherSchema: it has another schema.
        ValueError: it is damaged; the message states how.
    """
    try:
        schema = msgspec.json.decode(line, type=_Version).schema
        if schema != SCHEMA:
            raise OtherSchema(schema)
        sealed = msgspec.json.decode(line, type=_Sealed)
        if sealed.check != _digest(bytes(sealed.record)):
            raise ValueError("its checksum does not match")
        if not all(map(is_readable, list_texts(msgspec.json.decode(sealed.record)))):
            raise ValueError(f"it has a text with control characters, or longer than {MAX_TEXT}")
        return msgspec.json.decode(sealed.record, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it cannot be read ({error})") from None


def is_readable(text: str) -> bool:
    """Whether a record or a manifest may hold the text."""
    return len(text) <= MAX_TEXT and not CONTROL.search(text)


def list_texts(value: Any) -> Iterator[str]:
    """Yield all texts in ``value``, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, content in value.items():
            yield key
            yield from list_texts(content)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from list_texts(item)


def _make_readable(value: Any) -> Any:
    """Return plain data with question marks for control characters, and no text that is longer than ``MAX_TEXT``."""
    if isinstance(value, str):
        return clean(value)[:MAX_TEXT]
    if isinstance(value, dict):
        return {_make_readable(key): _make_readable(content) for key, content in value.items()}
    return list(map(_make_readable, value)) if isinstance(value, list) else value


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]


def _list_faults(record: Record) -> Iterator[str]:
    blocks = dict(record.leak)
    coins = record.guessed
    if coins and not 0 <= coins.right <= coins.made <= coins.tossed:
        yield f"of {coins.tossed} tossed labels it guesses {coins.made}, and {coins.right} right"
    if not all(math.isfinite(value) for value in map(_to_finite, record.budget.values())):
        yield "its budget is not finite"
    if isinstance(record, Result):
        yield from _check_result(record)
        blocks |= {"utility": record.utility} if record.utility else {}
        blocks |= {"utility under attack": record.damage.utility} if record.damage else {}
    for name, block in blocks.items():
        if not block.metrics or block.n < 1:
            yield f"{name} has no metric, or no rows"
        parts = (*(block.halves or ()), *(block.without or ()), *(end for end in block.ci95_rows if end is not None))
        values = [*block.metrics.items(), *((block.metric, value) for value in parts)]
        yield from (f"{name} has {metric} = {value:g}" for metric, value in values if not is_possible(metric, value))


def _check_result(record: Result) -> Iterator[str]:
    for spent in record.spent:
        numbers = [spent.get(name) for name in ("epsilon", "delta")]
        if not isinstance(spent.get("defense"), str) or not all(isinstance(number, int | float) for number in numbers):
            yield "the privacy that it spent has no defense, epsilon or delta"
        if not isinstance(spent.get("of", ""), str):
            yield "it does not say in a text of what its epsilon is"


def _to_finite(value: Number) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
