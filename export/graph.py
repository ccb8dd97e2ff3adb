"""Building an ONNX graph whose weights go straight to a file: nodes stay in memory, tensors do not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from outrider.engines.bundle import WEIGHTS
from outrider.export.weights import Place, Weights

CONTRIB = "com.microsoft"


class GraphBuilder:
    """Collects nodes and puts large initializers into ``weights`` as they come.

    Args:
        weights: becomes, or is, ``weights.bin`` beside the graph.
        float_dtype: the dtype of activations and caches.
    """

    def __init__(self, weights: Weights, float_dtype: np.dtype[Any]) -> None:
        self.float_dtype = float_dtype
        self._weights = weights
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, dtype: Any, shape: Sequence[int | str]) -> str:
        self._inputs.append(_value_info(name, dtype, shape))
        return name

    def output(self, name: str, dtype: Any, shape: Sequence[int | str]) -> str:
        self._outputs.append(_value_info(name, dtype, shape))
        return name

    def node(self, op: str, inputs: Sequence[str], name: str, *, domain: str = "", **attributes: Any) -> str:
        """Add a node with one output, called ``name``."""
        self.nodes(op, inputs, [name], domain=domain, **attributes)
        return name

    def nodes(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], *, domain: str = "", **attributes: Any
    ) -> None:
        """Add a node with any outputs; "" leaves an optional one out."""
        name = next(output for output in outputs if output)
        self._nodes.append(helper.make_node(op, inputs, outputs, name=f"{name}/{op}", domain=domain, **attributes))

    def add(self, node: onnx.NodeProto) -> None:
        """Add a node that was made elsewhere."""
        self._nodes.append(node)

    def constant(self, name: str, value: Any, dtype: Any = np.int64) -> str:
        """A small constant, kept in the graph itself. Asking again for the same name returns it."""
        if name not in self._initializers:
            self._initializers[name] = numpy_helper.from_array(np.asarray(value, dtype), name)
        return name

    def weight(self, name: str, dtype: Any, shape: Sequence[int], slabs: Iterable[NDArray[Any]]) -> str:
        """A large constant in the weights file, given slab by slab along the first axis; int4 comes packed."""
        place = self._weights.put(name, dtype, shape, slabs)
        self._initializers[name] = _external_tensor(name, dtype, shape, place)
        return name

    def alias(self, name: str, weight: str, shape: Sequence[int]) -> str:
        """The same bytes of the weights file under another shape: tied tensors are stored once."""
        tensor = TensorProto()
        tensor.CopyFrom(self._initializers[weight])
        tensor.name = name
        tensor.dims[:] = shape
        self._initializers[name] = tensor
        return name

    def model(self, name: str, opset: int) -> onnx.ModelProto:
        graph = helper.make_graph(
            self._nodes, name, self._inputs, self._outputs, initializer=list(self._initializers.values())
        )
        opsets = [helper.make_opsetid("", opset)]
        if any(node.domain == CONTRIB for node in self._nodes):
            opsets.append(helper.make_opsetid(CONTRIB, 1))
        return helper.make_model(graph, opset_imports=opsets, ir_version=11, producer_name="outrider")


def save_model(model: onnx.ModelProto, path: Path) -> None:
    path.write_bytes(model.SerializeToString())


def _value_info(name: str, dtype: Any, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)


def _external_tensor(name: str, dtype: Any, shape: Sequence[int], place: Place) -> TensorProto:
    tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), dims=shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", WEIGHTS), ("offset", str(place.offset)), ("length", str(place.length))):
        tensor.external_data.add(key=key, value=value)
    return tensor
