"""ONNX models run as data: hostile graphs end in one line, within limits on memory and time."""

from pathlib import Path

import numpy as np
import pytest

from vflsec.audit import opening
from vflsec.base.errors import DataError

pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")
helper, numpy_helper, FLOAT = onnx.helper, onnx.numpy_helper, onnx.TensorProto.FLOAT
X = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)


def model(nodes, weights=(), *, output="y", inputs=None):
    """Return the bytes of a graph that reads x of six columns."""
    inputs = inputs or [helper.make_tensor_value_info("x", FLOAT, [None, 6])]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info(output, FLOAT, None)], list(weights))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()


def constant(name, value):
    return numpy_helper.from_array(np.array(value), name)


def external(location):
    weight = onnx.TensorProto(name="w", data_type=FLOAT, dims=[6, 2], data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", "48")):
        weight.external_data.add(key=key, value=value)
    return model([helper.make_node("MatMul", ["x", "w"], ["y"])], [weight])


def run(content):
    return opening.run_onnx(Path("bottom.onnx"), content, X)


def test_the_first_output_is_the_embedding():
    weight = np.random.default_rng(1).normal(size=(6, 2)).astype(np.float32)
    found = run(model([helper.make_node("MatMul", ["x", "w"], ["y"])], [numpy_helper.from_array(weight, "w")]))
    assert np.allclose(found, X @ weight, atol=1e-5)


@pytest.mark.parametrize("location", ["/etc/passwd", "../../../../../etc/passwd", "weights.bin"])
def test_files_outside_of_the_model_are_not_read(location):
    with pytest.raises(DataError, match="External data path"):
        run(external(location))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (model([helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Add", ["a", "x"], ["b"])], output="b"),
         "acyclic"),
        (model([helper.make_node("Tile", ["x", "s"], ["y"])], [constant("s", [1, 1 << 24])]), "Tile|alloc|memory"),
        (model([helper.make_node("Evil", ["x"], ["y"], domain="evil")]), "Evil"),
        (model([helper.make_node("Log", ["x"], ["y"])]), "finite embeddings"),
        (model([helper.make_node("Identity", ["x"], ["y"])], inputs=[
            helper.make_tensor_value_info("x", FLOAT, [None, 7])]), "as wide as the columns"),
        (model([helper.make_node("Add", ["x", "z"], ["y"])], inputs=[
            helper.make_tensor_value_info(name, FLOAT, [None, 6]) for name in "xz"]), "one input"),
        (b"", "ONNXRuntimeError"),
        (b"ONNX" * 100, "ONNXRuntimeError"),
    ],
)  # fmt: skip
def test_a_hostile_graph_is_one_line(content, message):
    with pytest.raises(DataError, match=message) as found:
        run(content)
    assert "\n" not in str(found.value)


@pytest.mark.long
def test_a_model_that_never_ends_is_stopped(monkeypatch):
    monkeypatch.setattr(opening, "SECONDS", 2)
    scalar = [helper.make_tensor_value_info("i", onnx.TensorProto.INT64, [])]
    scalar += [helper.make_tensor_value_info("go", onnx.TensorProto.BOOL, [])]
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Mul", ["v", "v"], ["w"])],
        "body",
        [*scalar, helper.make_tensor_value_info("v", FLOAT, None)],
        [
            helper.make_tensor_value_info("on", onnx.TensorProto.BOOL, []),
            helper.make_tensor_value_info("w", FLOAT, None),
        ],
    )
    loop = helper.make_node("Loop", ["n", "t", "x"], ["y"], body=body)
    with pytest.raises(DataError, match="within 2 s|ended with"):
        run(model([loop], [constant("n", 1 << 62), constant("t", True)]))
