"""A bfloat16 graph read as float32, to be run and checked where no kernel knows bfloat16 (ONNX Runtime on CPU)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from outrider.engines.bundle import ModelInfo
from outrider.engines.ort import OrtEngine
from outrider.export.graph import save_model


def widen(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same nodes over the same weights file in float32: each weight is cast, which changes no value."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    graph = wide.graph
    weights = {tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.BFLOAT16}
    for node in graph.node:
        node.input[:] = [f"{name}.wide" if name in weights else name for name in node.input]
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i == TensorProto.BFLOAT16:
                attribute.i = TensorProto.FLOAT
    nodes = list(graph.node)
    del graph.node[:]
    graph.node.extend(
        helper.make_node("Cast", [name], [f"{name}.wide"], name=f"{name}.wide/Cast", to=TensorProto.FLOAT)
        for name in sorted(weights)
    )
    graph.node.extend(nodes)
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    return wide


def widened_engine(graph: Path, info: ModelInfo, threads: int | None) -> OrtEngine:
    """ONNX Runtime on ``widen`` of a graph file; nothing is left beside it."""
    path = graph.with_name("widened.onnx")
    save_model(widen(onnx.load(graph, load_external_data=False)), path)
    wide = replace(info, precision="fp32", head_precision="fp32", tensor_precision={}, cache_dtype="float32")
    try:
        return OrtEngine(path, wide, threads=threads)
    finally:
        path.unlink()
