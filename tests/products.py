"""What ONNX Runtime's quantized products do on this processor, seen from the operator alone."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper


@cache
def fewest_rows(precision: str, block_size: int = 32) -> int:
    """The fewest rows of a product that have the bits of many.

    Without AVX-512, one row of int4 has a kernel of its own for blocks of 32 and more.
    """
    if precision != "int4":
        return 1
    inputs, outputs = 64, 32
    rng = np.random.default_rng(0)
    weights = {
        "packed": rng.integers(0, 256, (outputs, inputs // block_size, block_size // 2), dtype=np.uint8),
        "scales": rng.random((outputs, inputs // block_size), dtype=np.float32),
    }
    attributes = {"K": inputs, "N": outputs, "bits": 4, "block_size": block_size, "accuracy_level": 4}
    node = helper.make_node("MatMulNBits", ["x", *weights], ["y"], domain="com.microsoft", **attributes)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", None]) for name in "xy")
    constants = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "product", [x], [y], constants)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rows = rng.standard_normal((8, inputs)).astype(np.float32)
    (many,) = session.run(None, {"x": rows})
    (one,) = session.run(None, {"x": rows[:1]})
    return 1 if np.array_equal(many[:1], one) else 2
