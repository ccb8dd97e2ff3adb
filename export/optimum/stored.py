"""A traced graph over the weights as they come back from blocks: what an exact engine of them would be."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from outrider.export.optimum.matrix import Matrix
from outrider.export.optimum.trace import Trace
from outrider.export.quantize import dequantize_blocks, quantize_blocks, rounded_layout

_DATA = "stored.bin"


def write_stored(trace: Trace, matrices: Iterable[Matrix], bits: int) -> Path:
    """The trace as Optimum wrote it, with these matrices rounded; returns its path beside the original's."""
    by_name = {str(matrix.value.name): matrix for matrix in matrices}
    proto = onnx.load(trace.path, load_external_data=False)
    offset, path = 0, trace.path.with_name(_DATA)
    with path.open("wb"):
        pass
    points = rounded_layout(bits).zero_points
    for tensor in proto.graph.initializer:
        if tensor.name not in by_name:
            continue
        matrix = by_name[tensor.name]
        outputs, inputs = matrix.shape
        shape = (inputs, outputs) if matrix.turned else (outputs, inputs)
        length = 4 * outputs * inputs
        with path.open("r+b") as file:
            file.truncate(offset + length)
        array = np.memmap(path, np.float32, "r+", offset, shape)
        rows, start = array.T if matrix.turned else array, 0
        for slab in matrix.slabs():
            blocks = quantize_blocks(slab, bits, zero_points=points)
            rows[start : start + len(slab)] = dequantize_blocks(blocks, bits, inputs)
            start += len(slab)
        array.flush()
        _refer(tensor, offset, length)
        offset += length
    graph = trace.path.with_name("stored.onnx")
    graph.write_bytes(proto.SerializeToString())
    return graph


def _refer(tensor: TensorProto, offset: int, length: int) -> None:
    tensor.ClearField("raw_data")
    tensor.ClearField("external_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", _DATA), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
