"""A decoder as Optimum's exporter traced it: an ONNX graph whose cache grows by concatenation.

inputs   input_ids [B, R], attention_mask [B, P + R], position_ids [B, R] (not in every family), P tokens in the cache
         past_key_values.i.key, past_key_values.i.value   [B, H_kv, P, D]
outputs  logits [B, R, V]
         present.i.key, present.i.value                   [B, H_kv, P + R, D]
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import NDArray
from onnx import TensorProto, version_converter
from onnx_ir.passes import common

from outrider.engines.errors import OutriderError

OPSET = 24  # the first with TensorScatter
_PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")
_NODE = re.compile(r"Name:'([^']*)'")  # in ONNX Runtime's errors
_OWN_INPUTS = ("input_ids", "attention_mask", "position_ids")
_SMALL_BYTES = 1024
# Its passes name every constant that they touch, and ONNX Runtime's quantizer turns such messages on for all libraries.
logging.getLogger("onnx_ir").setLevel(logging.WARNING)


class Pass(NamedTuple):
    """``past`` tokens in the cache and ``rows`` behind them, the last at a position of its own, the others at 0."""

    past: int
    rows: int
    last_position: int = 0


class Trace:
    """Args: ``path`` is the file that Optimum wrote, its weights beside it or inside.

    Raises:
        OutriderError: it has another state than a cache of keys and values, or none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            proto = onnx.load(path, load_external_data=False)
        except DecodeError as error:
            raise OutriderError(f"what Optimum wrote is not ONNX ({error})") from None
        _check_state(proto.graph)
        self._proto = proto
        self.num_kv_heads, self.head_dim = _cache_shape(proto.graph)
        self.num_layers = sum(1 for value in proto.graph.input if _PAST.fullmatch(value.name)) // 2
        self.vocab_size = proto.graph.output[0].type.tensor_type.shape.dim[-1].dim_value

    def model(self) -> ir.Model:
        """A new copy in our opset, with what is computed twice computed once; nodes and values keep their names."""
        model = ir.from_proto(version_converter.convert_version(self._proto, OPSET))
        ir.external_data.set_base_dir(model.graph, self.path.parent)
        ir.passes.Sequential(
            common.RemoveInitializersFromInputsPass(),
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            common.DeduplicateInitializersPass(size_limit=_SMALL_BYTES),
            common.IdentityEliminationPass(),
            common.CommonSubexpressionEliminationPass(size_limit=_SMALL_BYTES),
            common.RemoveUnusedNodesPass(),
            common.TopologicalSortPass(),
            common.ShapeInferencePass(strict_mode=False),
        )(model)
        return model

    def logits(self, ids: Sequence[int], threads: int | None, path: Path | None = None) -> NDArray[np.float32]:
        """Logits ``[len(ids), vocab_size]`` of one sequence by the graph as Optimum wrote it, under ONNX Runtime.

        Args:
            path: of the same graph over other weights.
        """
        run = _Run(path or self.path, ["logits"], threads)
        return np.asarray(run(self, np.array([ids], np.int64), 0, np.arange(len(ids)))["logits"][0])

    def values(self, names: Sequence[str], passes: Sequence[Pass]) -> list[dict[str, NDArray[Any]]]:
        """What these values inside the graph are in some passes over empty caches."""
        probe = self.path.with_name("probe.onnx")
        proto = onnx.load(self.path, load_external_data=False)
        del proto.graph.output[:]
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        probe.write_bytes(proto.SerializeToString())
        run = _Run(probe, names)
        found = []
        for past, rows, last_position in passes:
            positions = np.zeros(rows, np.int64)
            positions[-1] = last_position
            found.append(run(self, np.zeros((1, rows), np.int64), past, positions))
        return found


class _Run:
    """A session over a traced graph."""

    def __init__(self, path: Path, outputs: Sequence[str], threads: int | None = None) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads or 0
        # As it was traced: what an optimizer makes of it may be at fault too, and has other names in errors.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")  # a copy of all weights, for a pass or few
        options.log_severity_level = 4  # what it says is in the error as well
        try:
            self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime raises many types, none of them its own
            raise OutriderError(f"ONNX Runtime does not load what Optimum exported ({_one_line(error)})") from None
        self._outputs = list(outputs)

    def __call__(self, trace: Trace, ids: NDArray[np.int64], past: int, positions: NDArray[np.int64]) -> dict[str, Any]:
        rows = ids.shape[1]
        cache = np.zeros((1, trace.num_kv_heads, past, trace.head_dim), np.float32)
        feeds: dict[str, Any] = {entry.name: cache for entry in self._session.get_inputs()}
        own = (ids, np.ones((1, past + rows), np.int64), positions[None])
        feeds.update((name, value) for name, value in zip(_OWN_INPUTS, own, strict=True) if name in feeds)
        try:
            found = self._session.run(self._outputs, feeds)
        except Exception as error:  # as above
            node = _NODE.search(str(error))
            where = f"node {node[1]} of what" if node else "what"
            raise OutriderError(
                f"{where} Optimum exported does not run over {past} cached tokens and {rows} rows ({_one_line(error)})"
            ) from None
        return dict(zip(self._outputs, found, strict=True))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _check_state(graph: onnx.GraphProto) -> None:
    """Raises OutriderError for a state that is no cache of keys and values, naming its input or output."""
    pasts = {value.name for value in graph.input if _PAST.fullmatch(value.name)}
    for value in graph.input:
        if value.name not in pasts and value.name not in _OWN_INPUTS:
            raise OutriderError(
                f"input {value.name} is no cache of keys and values; other states cannot be rolled back"
            )
    if not pasts or graph.output[0].name != "logits":
        raise OutriderError("what Optimum exported has no cache of keys and values, or no logits")
    expected = {"present" + name.removeprefix("past_key_values") for name in pasts}
    for name in {value.name for value in graph.output[1:]} ^ expected:
        raise OutriderError(f"output {name} has no input past_key_values that it follows, or the other way round")


def _cache_shape(graph: onnx.GraphProto) -> tuple[int, int]:
    """Heads and their size, the same in all layers."""
    shapes = {}
    for value in graph.input:
        if _PAST.fullmatch(value.name):
            dims = value.type.tensor_type.shape.dim
            known = len(dims) == 4 and value.type.tensor_type.elem_type == TensorProto.FLOAT
            heads, size = (dims[1].dim_value, dims[3].dim_value) if known else (0, 0)
            if not heads or not size:
                shape = [dim.dim_param or dim.dim_value for dim in dims]
                raise OutriderError(f"cache {value.name} is {shape}, not float32 [batch, heads, positions, head_dim]")
            shapes[heads, size] = value.name
    if len(shapes) > 1:
        raise OutriderError(f"caches {' and '.join(shapes.values())} have not the same heads")
    return next(iter(shapes))


def caches(graph: ir.Graph) -> list[tuple[ir.Value, ir.Value, str]]:
    """Each cache: the input, the output that takes its place, and the graph contract's name (``key.0``)."""
    outputs = {value.name: value for value in graph.outputs}
    found = []
    for value in graph.inputs:
        if match := _PAST.fullmatch(str(value.name)):
            layer, kind = match.groups()
            found.append((value, outputs[f"present.{layer}.{kind}"], f"{kind}.{layer}"))
    return found
