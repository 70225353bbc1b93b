"""A bottom model as ONNX, run by onnxruntime as data, in a process of its own with limits on memory and time."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from vflsec.audit.subject import Subject
from vflsec.audit.tables import read_file
from vflsec.base.errors import DataError, UsageError, plain

LARGEST = 1 << 31
"""Bytes of a model, the most that ONNX allows in one file."""

MEMORY = 6 << 30
"""Bytes of address space of the process that runs a model."""

SECONDS = 300
"""The longest that a model may run."""

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
    found = []
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        full = batch if len(batch) == size or not isinstance(shape[0], int) else np.resize(batch, (size, rows.shape[1]))
        found.append(np.asarray(session.run([out[0].name], {{given[0].name: full}})[0])[: len(batch)])
    np.save("outputs.npy", np.concatenate(found).astype(np.float32), allow_pickle=False)
    print(", ".join(one.name for one in out))
except Exception as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}"[:400])
"""


def from_onnx(path: Path, party: str) -> Subject:
    """Return the system whose bottom model of ``party`` is an ONNX file.

    Raises:
        DataError: it cannot be read.
        UsageError: onnxruntime is not installed.
    """
    if find_spec("onnxruntime") is None:
        raise UsageError("expected onnxruntime to run an ONNX model, found none: pip install 'vflsec[audit]'")
    content = read_file(path, LARGEST)
    return Subject(
        name=path.name,
        adversary=party,
        side="active" if party == "active" else "passive",
        fingerprint=hashlib.sha256(content).hexdigest(),
        function=lambda inputs: run(path, content, inputs),
        notes=[f"{path.name} holds a model of {len(content) / 1e6:.2f} MB, run by onnxruntime"],
    )


def run(path: Path, content: bytes, inputs: np.ndarray) -> np.ndarray:
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
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        if done.returncode:
            cause = plain(" ".join(lines[-1].split())) if lines else f"its process ended with {done.returncode}"
            raise DataError(f"{path}: {cause}: export the bottom model again")
        found: np.ndarray = np.load(place / "outputs.npy", allow_pickle=False)
    if found.ndim < 2 or len(found) != len(inputs):
        raise DataError(f"{path}: expected an output of shape ({len(inputs)}, d), found {found.shape}")
    found = found.reshape(len(found), -1)
    if not np.isfinite(found).all():
        raise DataError(f"{path}: expected finite embeddings, found others")
    return found
