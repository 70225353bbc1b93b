"""Opens whatever was trained: by what a file or folder holds, not by what its name promises.

A transcript, embeddings in a table (CSV or Parquet), a PyTorch model as safetensors with the user's own function that
builds it, or an ONNX model, which onnxruntime runs as data, in a process of its own with limits on memory and time.
"""

import hashlib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from vflsec.audit.subject import Subject, from_transcript, join_names
from vflsec.audit.transcript import HEADER
from vflsec.audit.transcript_lines import MAX_VALUES, import_arrow
from vflsec.base.checks import count
from vflsec.base.errors import DataError, UsageError, VflsecError, clean
from vflsec.run.spec import load_class

MAX_BYTES = 1 << 33  # bytes of a file
LARGEST_ONNX = 1 << 31  # bytes that ONNX allows in one file
MEMORY = 6 << 30  # bytes of address space of the process that runs an ONNX model
SECONDS = 300  # the longest that an ONNX model may run
OPTIMIZER = ("exp_avg", "momentum", "optimizer", "optim.", "state_step", "max_exp_avg")
"""Parts of the names of an optimizer's state."""

WORKER = """
import resource, sys
import numpy as np
resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))
resource.setrlimit(resource.RLIMIT_CPU, ({seconds}, {seconds}))
import onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
options.log_severity_level = 4
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
try:
    session = onnxruntime.InferenceSession("model.onnx", options, providers=["CPUExecutionProvider"])
    given, out = session.get_inputs(), session.get_outputs()
    if len(given) != 1 or given[0].type not in ("tensor(float)", "tensor(double)"):
        sys.exit(f"expected one input of numbers, found {{', '.join(f'{{one.name}} ({{one.type}})' for one in given)}}")
    rows = np.load("inputs.npy").astype(np.float64 if given[0].type == "tensor(double)" else np.float32)
    shape = given[0].shape
    if len(shape) != 2 or isinstance(shape[1], int) and shape[1] != rows.shape[1]:
        sys.exit(f"expected an input of shape (rows, {{rows.shape[1]}}), as wide as the columns, found {{shape}}")
    size = shape[0] if isinstance(shape[0], int) else 4096
    if size < 1:
        sys.exit(f"expected an input of at least one row, found {{shape}}")
    outputs = []
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        full = batch if len(batch) == size or not isinstance(shape[0], int) else np.resize(batch, (size, rows.shape[1]))
        outputs.append(np.asarray(session.run([out[0].name], {{given[0].name: full}})[0])[: len(batch)])
    np.save("outputs.npy", np.concatenate(outputs).astype(np.float32), allow_pickle=False)
    print(", ".join(each.name for each in out))
except Exception as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}"[:400])
"""


def open_subject(
    path: Path, party: str | None = None, model: str | None = None, given: Mapping[str, str] | None = None
) -> Subject:
    """Return what is at ``path``: a transcript, weights, an ONNX model, or a table of embeddings.

    Args:
        path: a folder with ``transcript.toml``, or a file: ``.safetensors``, ``.onnx``, ``.csv`` or ``.parquet``.
        party: the adversary; by default the observer of a transcript, or else ``passive_1``.
        model: for weights, ``FILE.py:FUNCTION`` that builds the bottom model.
        given: what the data call ``active``, ``passive_1``, ...

    Raises:
        UsageError: something else is at ``path``, or what reads it is missing.
        DataError: it is damaged.
    """
    if path.joinpath(HEADER).is_file():
        return from_transcript(path, party, given)
    party = {name: standard for standard, name in (given or {}).items()}.get(party or "", party) or "passive_1"
    readers: dict[str, Callable[[Path, str], Subject]] = {
        ".safetensors": partial(_open_weights, factory=model),
        ".onnx": _open_onnx,
        ".csv": from_table,
        ".parquet": from_table,
    }
    if path.suffix in readers:
        return readers[path.suffix](path, party)
    if path.is_file():
        read_file(path)  # a pickle is refused with the way to convert it
    there = "a folder without it" if path.is_dir() else "another file" if path.exists() else "nothing"
    raise UsageError(
        f"expected a transcript (a folder with {HEADER}), a recording, or a file {', '.join(readers)} at {path}, "
        f"found {there}"
    )


def read_ids(path: Path) -> pd.Index:
    """Return the ids in a text file, one a line; a first line ``id`` is a heading.

    Raises:
        DataError: it cannot be read, is empty, or has an id twice.
    """
    try:
        lines = read_file(path).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise DataError(f"{path}: expected ids as text, one a line, found other bytes") from None
    names = [line.strip() for line in lines if line.strip()]
    ids = pd.Index(names[names[:1] == ["id"] :], dtype=object)
    if ids.empty:
        raise DataError(f"{path}: expected ids, one a line, found none")
    if ids.has_duplicates:
        raise DataError(f"{path}: expected each id once, found {clean(ids[ids.duplicated()][0])!r} again")
    return ids


def read_file(path: Path, largest: int = MAX_BYTES) -> bytes:
    """Return the content of a file.

    Raises:
        DataError: it cannot be read, is too large, or is a pickle.
    """
    try:
        if not path.is_file():
            raise DataError(f"{path}: expected a file, found {'something else' if path.exists() else 'nothing'}")
        if path.stat().st_size > largest:
            raise DataError(f"{path}: expected at most {largest >> 20} MiB, found {path.stat().st_size >> 20} MiB")
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    # the length of a safetensors header may begin as a pickle does
    bare = content[:1] == b"\x80" and content[1:2] in b"\x02\x03\x04\x05" and content[2:8] != bytes(6)
    if bare or (content[:2] == b"PK" and b"data.pkl" in content[:4096]):
        raise DataError(
            f"{path}: expected data, found a pickle, which may run code when it is read. Convert it where it was "
            f"written: safetensors.torch.save_file(model.state_dict(), 'bottom.safetensors')"
        )
    return content


def _make_subject(path: Path, party: str, content: bytes, notes: Sequence[str], **material: Any) -> Subject:
    side, fingerprint = "active" if party == "active" else "passive", hashlib.sha256(content).hexdigest()
    return Subject(name=path.name, adversary=party, side=side, fingerprint=fingerprint, notes=notes, **material)


def from_table(path: Path, party: str) -> Subject:
    """Return the system whose bottom model of ``party`` has given the embeddings in a table.

    The table has a column ``id`` and columns ``e_0``, ``e_1``, ...; others are not read, but named. Without a column
    ``id``, the only other column has the ids.

    Raises:
        DataError: another form, an id twice, or a number that is not finite.
    """
    content = read_file(path)
    values, others = _read_vectors(path, content, "e")
    if values.nunique().max() < 2:
        raise DataError(f"{path}: expected embeddings that differ, found the same in all {len(values)} rows")
    notes = [f"{path.name} holds {count(len(values), 'embedding')} of {values.shape[1]} numbers"]
    if others:
        notes.append(
            f"{path.name} also holds {join_names(others)}, which a file of embeddings should not hold; not read"
        )
    return _make_subject(path, party, content, notes, embeddings=values)


def add_predictions(subject: Subject, path: Path) -> Subject:
    """Return ``subject`` with the predictions that the adversary received: a table ``id``, ``p_0``, ``p_1``, ...

    Raises:
        DataError: as for embeddings.
    """
    content = read_file(path)
    values, _ = _read_vectors(path, content, "p")
    return replace(
        subject,
        predictions=values,
        fingerprint=hashlib.sha256(subject.fingerprint.encode() + content).hexdigest(),
        notes=(*subject.notes, f"{path.name} holds {count(len(values), 'prediction')} of {values.shape[1]} numbers"),
    )


def _read_vectors(path: Path, content: bytes, letter: str) -> tuple[pd.DataFrame, list[str]]:
    """Return the columns ``e_0``, ``e_1``, ... indexed by id, for the letter e, and the names of other columns."""
    pattern = re.compile(rf"{letter}_?(0|[1-9][0-9]{{0,6}})")
    table = _read_csv(path, content, pattern) if path.suffix == ".csv" else _read_parquet(path, content)
    table.columns = [str(name) for name in table.columns]
    table = table.rename(columns={_find_id_column(list(table.columns), pattern): "id"})
    numbers = {name: int(match[1]) for name in table.columns if (match := pattern.fullmatch(name))}
    columns = sorted(numbers, key=lambda name: numbers[name])
    if "id" not in table.columns or [numbers[name] for name in columns] != list(range(len(columns))) or not columns:
        raise DataError(
            f"{path}: expected columns id, {letter}_0, {letter}_1, ..., found {join_names(map(clean, table.columns))}: "
            f"rename them"
        )
    if table["id"].isna().any():
        raise DataError(f"{path}, row {int(table['id'].isna().to_numpy().argmax()) + 1}: expected an id, found nothing")
    ids = pd.Index(table["id"].astype(str).astype(object))
    if ids.has_duplicates:
        at = int(ids.duplicated().argmax())
        raise DataError(f"{path}, row {at + 1}: expected each id once, found {clean(ids[at])!r} again")
    values = table[columns].set_axis(ids).apply(pd.to_numeric, errors="coerce").astype(np.float32)
    bad = ~np.isfinite(values.to_numpy()).all(axis=1)
    if bad.any():
        row = int(bad.argmax()) + 1
        raise DataError(f"{path}, row {row}: expected finite numbers in {letter}_0, {letter}_1, ..., found none")
    return values, [clean(name) for name in table.columns if name not in (*columns, "id")]


def _find_id_column(names: Sequence[str], pattern: re.Pattern[str]) -> str:
    """Return the column with the ids: ``id``, or the only one whose name does not fit ``pattern``."""
    others = [name for name in names if not pattern.fullmatch(name)]
    return others[0] if "id" not in others and len(others) == 1 else "id"


def _read_csv(path: Path, content: bytes, pattern: re.Pattern[str]) -> pd.DataFrame:
    if b"\0" in content:  # at which pandas 3.0 ends the field
        raise DataError(f"{path}: expected text in UTF-8, found a null character: write it again")
    try:
        names = [str(name) for name in pd.read_csv(io.BytesIO(content), nrows=0).columns]
        return pd.read_csv(io.BytesIO(content), dtype={_find_id_column(names, pattern): str}, low_memory=False)
    except (ValueError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise DataError(f"{path}: cannot be read as CSV: {clean(' '.join(str(error).split())[:200])}") from None


def _read_parquet(path: Path, content: bytes) -> pd.DataFrame:
    pa, parquet = import_arrow()
    limits = {"thrift_string_size_limit": 1 << 20, "thrift_container_size_limit": 1 << 20}
    try:
        opened = parquet.ParquetFile(pa.BufferReader(content), **limits)
        names = opened.schema_arrow.names
        if len(names) > MAX_VALUES or opened.metadata.num_rows * max(1, len(names)) * 4 > MAX_BYTES:
            raise DataError(f"{path}: expected at most {MAX_BYTES >> 20} MiB of numbers, found more")
        return pd.DataFrame(opened.read(use_threads=False).to_pydict())
    except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {clean(' '.join(str(error).split())[:200])}") from None


def _open_weights(path: Path, party: str, factory: str | None) -> Subject:
    """Return the system with the bottom model of ``party``, which the user's ``factory`` builds and a file fills."""
    content = read_file(path)
    if factory is None:
        raise UsageError(f"{path} holds weights alone: add --model FILE.py:FUNCTION, which returns the bottom model")
    try:
        tensors = load(content)
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise DataError(f"{path}: cannot be read as safetensors: {clean(str(error))[:200]}") from None
    model = _build(factory)
    expected = dict(model.state_dict())
    _check_weights(path, expected, tensors, factory)
    model.load_state_dict({name: tensors[name].to(initial.dtype) for name, initial in expected.items()})
    weights = sum(tensors[name].numel() for name in expected)
    notes = [f"{path.name} holds {count(len(expected), 'tensor')} of the bottom model, {weights:,} numbers"]
    notes += _note_surplus(path.name, {name: tensor for name, tensor in tensors.items() if name not in expected})
    code = Path(factory.rpartition(":")[0]).read_bytes()
    return _make_subject(path, party, content + code, notes, model=model.eval())


@contextmanager
def block_exit() -> Iterator[None]:
    """Let ``os._exit`` raise SystemExit, so that the user's code cannot end the process as if a gate held."""

    def leave(status: int) -> NoReturn:
        raise SystemExit(f"os._exit({status})")

    original = os._exit
    os._exit = leave
    try:
        yield
    finally:
        os._exit = original


def _build(factory: str) -> nn.Module:
    if ".py:" not in factory:
        raise UsageError(f"expected --model FILE.py:FUNCTION, got {factory!r}")
    try:
        with redirect_stdout(sys.stderr), block_exit():  # results alone go to stdout
            model: Any = load_class("models", factory)()
    except (VflsecError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  (the user's own code, which may also exit)
        raise UsageError(f"{factory} failed: {type(error).__name__}: {clean(str(error))[:200]}") from None
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected {factory} to return a torch.nn.Module, got {type(model).__name__}")
    return model


def _check_weights(path: Path, expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], factory: str) -> None:
    """Raise DataError unless ``tensors`` are finite, trained weights of the ``expected`` names and shapes."""
    if lacking := [name for name in expected if name not in tensors]:
        raise DataError(
            f"{path}: expected the tensors of {factory}, found no {join_names(lacking)}; it holds "
            f"{join_names(map(clean, tensors))}"
        )
    for name, initial in expected.items():
        shape = tuple(tensors[name].shape)
        if initial.shape != shape:
            raise DataError(f"{path}: expected {name} of shape {tuple(initial.shape)} as in {factory}, found {shape}")
        if not torch.isfinite(tensors[name].float()).all():
            raise DataError(f"{path}: expected finite weights, found others in {name}")
    floats = [name for name, initial in expected.items() if initial.is_floating_point()]
    if others := [name for name in floats if not tensors[name].is_floating_point()]:
        other = f"{clean(others[0])} of type {str(tensors[others[0]].dtype).removeprefix('torch.')}"
        raise DataError(f"{path}: expected weights as floating point numbers, found {other}: save the trained model")
    if floats and not any(bool(tensors[name].any()) for name in floats):
        raise DataError(f"{path}: expected trained weights, found zeros only: save the trained model")


def _note_surplus(name: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return notes on tensors that a file of the bottom model should not hold."""
    states = [key for key in tensors if any(part in key.lower() for part in OPTIMIZER)]
    others = [f"{key} {tuple(tensor.shape)}" for key, tensor in tensors.items() if key not in states]
    notes = []
    if states:
        notes.append(
            f"{name} also holds the state of an optimizer, {join_names(map(clean, states))}: it reveals the last "
            f"gradients; not read"
        )
    if others:
        notes.append(
            f"{name} also holds tensors that are not of the bottom model, {join_names(map(clean, others))}: a head, or "
            f"a model of another party, should not be in it; not read"
        )
    return notes


def _open_onnx(path: Path, party: str) -> Subject:
    """Return the system whose bottom model of ``party`` is an ONNX file."""
    if find_spec("onnxruntime") is None:
        raise UsageError("expected onnxruntime to run an ONNX model, found none: pip install 'vflsec[audit]'")
    content = read_file(path, LARGEST_ONNX)
    notes = [f"{path.name} holds a model of {len(content) / 1e6:.2f} MB, run by onnxruntime"]
    return _make_subject(path, party, content, notes, function=partial(run_onnx, path, content))


def run_onnx(path: Path, content: bytes, inputs: np.ndarray) -> np.ndarray:
    """Return the first output (n, d) of a model for its inputs (n, columns).

    Raises:
        DataError: it is damaged, has other inputs, needs more memory or time than allowed, or gives no finite numbers.
    """
    with tempfile.TemporaryDirectory() as folder:  # empty, so that data outside of the model is not found
        place = Path(folder)
        place.joinpath("model.onnx").write_bytes(content)
        np.save(place / "inputs.npy", inputs, allow_pickle=False)
        worker = WORKER.format(memory=MEMORY, seconds=SECONDS)
        try:
            done = subprocess.run(  # noqa: S603  (our own program, with the model as data)
                [sys.executable, "-I", "-c", worker], cwd=place, capture_output=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise DataError(f"{path}: expected a model that runs within {SECONDS} s, it takes longer") from None
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            cause = clean(" ".join(lines[-1].split())) if lines else f"its process ended with {done.returncode}"
            raise DataError(f"{path}: {cause}: export the bottom model again")
        outputs: np.ndarray = np.load(place / "outputs.npy", allow_pickle=False)
    if outputs.ndim < 2 or len(outputs) != len(inputs):
        raise DataError(f"{path}: expected an output of shape ({len(inputs)}, d), found {outputs.shape}")
    if not np.isfinite(outputs).all():
        raise DataError(f"{path}: expected finite embeddings, found others")
    return outputs.reshape(len(outputs), -1)
