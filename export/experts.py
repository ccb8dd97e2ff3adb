"""Mixture of experts (arXiv 1701.06538): a router picks a few of many MLPs for each token, and adds up what they say.

Two forms of the same sum. ``fused`` hands pairs of a token and an expert to ONNX Runtime's operators, which read the
weights of the chosen experts only. ``standard`` computes all experts for all tokens, as one wide MLP whose hidden units
are weighted by the router: TensorRT has no operator that reads some of the matrices only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import helper

from outrider.export.attention import Lowering
from outrider.export.checkpoint import Checkpoint, read_rows
from outrider.export.graph import CONTRIB, GraphBuilder
from outrider.export.matrices import FloatMatrix, Storage, store_matrix
from outrider.export.precision import BITS
from outrider.export.quantize import ACCURACY_INT8, BLOCK_SIZE, SYMMETRIC, quantize_blocks
from outrider.export.spec import DecoderSpec

_NEVER = -1e4  # a router logit whose softmax is zero, within float16


@dataclass(frozen=True)
class Experts:
    """The experts of one layer; ``name`` is that of its nodes."""

    graph: GraphBuilder
    spec: DecoderSpec
    checkpoint: Checkpoint
    lowering: Lowering
    precision: str
    layer: int
    name: str

    def mlp(self, x: str) -> str:
        """``[B, R, hidden_size]`` -> the same."""
        weights, ids = self._route(x)
        return self._chosen(x, weights, ids) if self.lowering.name == "fused" else self._all(x, weights, ids)

    def _route(self, x: str) -> tuple[str, str]:
        """float32 weights and int64 ids of the chosen experts, ``[B, R, k]``. The router itself is never quantized."""
        graph, spec, name = self.graph, self.spec, f"{self.name}.router"
        stem = spec.stem("router", self.layer)
        shape = spec.linear_shape("router")
        router = FloatMatrix(graph, f"{stem}.weight", shape, read_rows(self.checkpoint, f"{stem}.weight", shape[0]))
        logits = self._cast(router.matmul(x, name), np.float32, f"{name}.float32")
        probabilities = graph.node("Softmax", [logits], f"{name}.probabilities", axis=-1)
        count = graph.constant("experts.count", [spec.experts_per_token])
        weights, ids = f"{name}.top", f"{name}.ids"
        graph.nodes("TopK", [probabilities, count], [weights, ids], axis=-1)
        if spec.normalized_routing:
            total = graph.node("ReduceSum", [weights, graph.constant("experts.last_axis", [-1])], f"{name}.total")
            weights = graph.node("Div", [weights, total], f"{name}.normalized")
        return weights, ids

    def _chosen(self, x: str, weights: str, ids: str) -> str:
        """Each pair is a token of its own with one expert, so that no sum depends on what else is in the pass.

        The operators add a token's experts in an order that follows from all tokens, so the sum is ours. Float products
        have a one-row path, as those of int4 without AVX-512, and an expert's rows are those that chose it: all but
        int8 pairs come twice, so that there are always two.
        """
        graph, spec, name = self.graph, self.spec, self.name
        count, twice = spec.experts_per_token, self.precision != "int8"
        pairs = graph.node("Concat", [ids, ids], f"{name}.ids.twice", axis=-1) if twice else ids
        width = 2 * count if twice else count
        table = np.where(np.eye(spec.num_experts, dtype=bool), 0, _NEVER)
        routes = graph.node("Gather", [graph.constant("experts.routes", table, graph.float_dtype), pairs], f"{name}.to")
        routes = graph.node("Reshape", [routes, graph.constant("experts.flat", [-1, spec.num_experts])], f"{name}.flat")
        axis = graph.constant("experts.axis", [2])
        tokens = graph.node("Unsqueeze", [x, axis], f"{name}.token")
        tokens = graph.node("Expand", [tokens, graph.constant("experts.each", [1, 1, width, 1])], f"{name}.each")
        shape = graph.constant("experts.tokens", [0, -1, spec.hidden_size])
        outputs = self._operator(graph.node("Reshape", [tokens, shape], f"{name}.tokens"), routes)
        shape = graph.constant("experts.outputs", [0, -1, width, spec.hidden_size])
        outputs = graph.node("Reshape", [outputs, shape], f"{name}.outputs")
        if twice:
            cut = [graph.constant("experts.first", [0]), graph.constant("experts.count", [count]), axis]
            outputs = graph.node("Slice", [outputs, *cut], f"{name}.once")
        weights = self._cast(weights, graph.float_dtype, f"{name}.weights")
        row = graph.node("Unsqueeze", [weights, axis], f"{name}.row")
        return graph.node("Squeeze", [graph.node("MatMul", [row, outputs], f"{name}.sum"), axis], f"{name}.output")

    def _operator(self, tokens: str, routes: str) -> str:
        """Gate and up of a unit side by side, as the operators want them; alpha 1 and beta 0 make theirs SwiGLU."""
        spec, name = self.spec, self.name
        options: dict[str, Any] = {
            "k": 1,
            "activation_type": "swiglu",
            "swiglu_fusion": 1,
            "activation_alpha": 1.0,
            "activation_beta": 0.0,
        }
        gate_up = self._store("gate_up", (2 * spec.expert_size, spec.hidden_size), self._gate_up())
        down = self._store("down", (spec.hidden_size, spec.expert_size), self._each("expert_down"))
        if self.precision in BITS:
            # Raw blocks as MatMulNBits has them, with inputs rounded to int8 as there.
            blocks = {"expert_weight_bits": BITS[self.precision], "block_size": BLOCK_SIZE, "weights_prepacked": 0}
            options |= blocks | {"accuracy_level": ACCURACY_INT8}
        op = "QMoE" if self.precision in BITS else "MoE"
        inputs = [tokens, routes, *gate_up, "", *down]
        return self.graph.node(op, inputs, f"{name}.experts", domain=CONTRIB, **options)

    def _store(self, part: str, shape: tuple[int, int], slabs: Iterator[NDArray[np.float32]]) -> list[str]:
        """All experts' matrices as one tensor, ``[experts, *shape]``, and the scales of its blocks, if any."""
        graph, name, experts = self.graph, f"{self.name}.{part}", self.spec.num_experts
        if self.precision not in BITS:
            return [graph.weight(name, graph.float_dtype, (experts, *shape), slabs)]
        bits = BITS[self.precision]
        scales: list[NDArray[Any]] = []

        def packed() -> Iterator[NDArray[np.uint8]]:
            for slab in slabs:
                blocks = quantize_blocks(slab, bits)
                scales.append(blocks.scales)
                yield blocks.packed

        weight = graph.weight(name, np.uint8, (experts, shape[0], shape[1] * bits // 8), packed())
        blocks = (experts, shape[0], shape[1] // BLOCK_SIZE)
        return [weight, graph.weight(f"{name}.scales", graph.float_dtype, blocks, scales)]

    def _all(self, x: str, weights: str, ids: str) -> str:
        graph, spec, name = self.graph, self.spec, self.name
        units = spec.num_experts * spec.expert_size
        storage = Storage(self.lowering.name, self.precision, SYMMETRIC)
        slabs = (slab for role in ("expert_gate", "expert_up") for slab in self._each(role))
        shape = (2 * units, spec.hidden_size)
        gate_up = store_matrix(graph, f"{name}.gate_up.weight", shape, slabs, storage)
        halves = [f"{name}.gate", f"{name}.up"]
        graph.nodes("Split", [gate_up.matmul(x, f"{name}.gate_up")], halves, axis=-1, num_outputs=2)
        activated = self.lowering.activation(halves[0], spec.activation, f"{name}.activated")
        gated = graph.node("Mul", [activated, halves[1]], f"{name}.gated")
        shape = (spec.hidden_size, units)
        down = store_matrix(graph, f"{name}.down.weight", shape, self._side_by_side(), storage)
        return down.matmul(self._weighted(gated, weights, ids), f"{name}.output")

    def _weighted(self, gated: str, weights: str, ids: str) -> str:
        """Hidden units times the weight of their expert; zero, whatever they are, where it was not chosen."""
        graph, spec, name = self.graph, self.spec, self.name
        axis = graph.constant("experts.last_axis", [-1])
        mine = graph.node("Unsqueeze", [ids, axis], f"{name}.ids.each")
        mine = graph.node("Equal", [mine, graph.constant("experts.ids", np.arange(spec.num_experts))], f"{name}.mine")
        each = graph.node("Unsqueeze", [weights, axis], f"{name}.weights.each")
        each = graph.node("Where", [mine, each, graph.constant("experts.none", 0, np.float32)], f"{name}.weights.mine")
        of_expert = graph.node("ReduceSum", [each, graph.constant("experts.axis", [2])], f"{name}.weight", keepdims=0)
        of_expert = self._cast(of_expert, graph.float_dtype, f"{name}.weight.cast")
        of_expert = graph.node("Unsqueeze", [of_expert, axis], f"{name}.weight.units")
        zero = graph.constant("experts.zero", 0, graph.float_dtype)
        chosen = graph.node("Greater", [of_expert, zero], f"{name}.chosen")
        shape = graph.constant("experts.units", [0, 0, spec.num_experts, spec.expert_size])
        split = graph.node("Reshape", [gated, shape], f"{name}.gated.split")
        weighted = graph.node("Mul", [split, of_expert], f"{name}.weighted")
        kept = graph.node("Where", [chosen, weighted, zero], f"{name}.kept")
        flat = graph.constant("experts.units.flat", [0, 0, spec.num_experts * spec.expert_size])
        return graph.node("Reshape", [kept, flat], f"{name}.hidden")

    def _cast(self, x: str, dtype: Any, name: str) -> str:
        """From or to float32, where activations are something else."""
        if self.graph.float_dtype == np.float32:
            return x
        return self.graph.node("Cast", [x], name, to=int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype))))

    def _tensor(self, role: str, expert: int) -> str:
        return f"{self.spec.stem(role, self.layer, expert)}.weight"

    def _each(self, role: str) -> Iterator[NDArray[np.float32]]:
        """The matrices of one expert after the other."""
        rows = self.spec.linear_shape(role)[0]
        for expert in range(self.spec.num_experts):
            yield from read_rows(self.checkpoint, self._tensor(role, expert), rows)

    def _gate_up(self) -> Iterator[NDArray[np.float32]]:
        """Gate and up row by row in turn, expert by expert."""
        for gate, up in zip(self._each("expert_gate"), self._each("expert_up"), strict=True):
            yield np.stack([gate, up], axis=1).reshape(-1, gate.shape[1])

    def _side_by_side(self) -> Iterator[NDArray[np.float32]]:
        """Rows of all experts' down projections beside each other."""
        experts, rows = range(self.spec.num_experts), self.spec.hidden_size
        tensors = [self._tensor("expert_down", expert) for expert in experts]
        slabs = (read_rows(self.checkpoint, tensor, rows, beside=len(experts)) for tensor in tensors)
        for parts in zip(*slabs, strict=True):
            yield np.concatenate(parts, axis=1)
