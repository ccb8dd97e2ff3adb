"""Heads behind the logits, so that a round stays on its device: which token each row chooses, and what follows of it.

``with_heads`` gives a second graph over the same weights. On top of the graph contract (``decoder.py``):

  inputs   noise         float32 [B, S, V]   Gumbel noise of the token at position p in slot p mod S; zeros for greedy
           temperature   float32 [B, 1, 1]   1 for greedy
           cutoff        float32 [B, 1, 1]   log(min_p): tokens further below the best are out; -3e38 for none
  outputs  choices       int64 [B, N]        the token that each wanted row chooses
           near          int32 [B, N]        1 where no rounding can have changed the choice (greedy: none can);
                                             -1 where logits are no finite numbers
           tail          int64 [B, 2]        the last two tokens of the sequence behind this pass
           next_lengths  int32 [B]           cache length behind this pass
           tail_lengths  int32 [B]           the same less one: where a draft model takes ``tail``

Rows whose choice is the token that follows them in the pass are accepted drafts; the first other one gives the
correction or bonus token. A pass that wants its last row only is a draft step: its token is accepted by nobody yet.
"""

from __future__ import annotations

import numpy as np
import onnx

from outrider.engines.engine import CHOICE_MARGIN
from outrider.export.graph import GraphBuilder
from outrider.export.weights import CountedWeights

_LOWEST = float(np.finfo(np.float32).min)
_FLOAT, _INT32, _INT64 = (
    int(kind) for kind in (onnx.TensorProto.FLOAT, onnx.TensorProto.INT32, onnx.TensorProto.INT64)
)


def with_heads(model: onnx.ModelProto, noise_slots: int) -> onnx.ModelProto:
    """``model`` with the heads behind its logits.

    Args:
        noise_slots: S.
    """
    vocab_size = next(output for output in model.graph.output if output.name == "logits").type.tensor_type.shape.dim[-1]
    heads = _Heads(vocab_size.dim_value, noise_slots)
    heads.choose()
    heads.advance()
    resident = onnx.ModelProto()
    resident.CopyFrom(model)
    added = heads.graph.model("heads", model.opset_import[0].version).graph
    for field in ("node", "input", "output", "initializer"):
        getattr(resident.graph, field).extend(getattr(added, field))
    return resident


class _Heads:
    def __init__(self, vocab_size: int, noise_slots: int) -> None:
        self.graph = GraphBuilder(CountedWeights(), np.dtype(np.float32))
        self.vocab_size = vocab_size
        self.noise_slots = noise_slots
        self.graph.constant("heads.one", [1], np.int64)

    def choose(self) -> None:
        """Gumbel-max over (logits - best) / temperature, of equally good tokens the smallest id: ``Chooser.choose``."""
        graph, node = self.graph, self.graph.node
        graph.input("noise", np.float32, ["batch", self.noise_slots, self.vocab_size])
        graph.input("temperature", np.float32, ["batch", 1, 1])
        graph.input("cutoff", np.float32, ["batch", 1, 1])
        best = node("ReduceMax", ["logits", graph.constant("heads.last_axis", [-1])], "heads.best")
        shifted = node("Div", [node("Sub", ["logits", best], "heads.below_best"), "temperature"], "heads.shifted")
        score = node("Add", [shifted, self._noise()], "heads.score")
        allowed = node("GreaterOrEqual", [shifted, "cutoff"], "heads.allowed")
        lowest = graph.constant("heads.lowest", _LOWEST, np.float32)
        masked = node("Where", [allowed, score, lowest], "heads.masked")
        top = node("ReduceMax", [masked, "heads.last_axis"], "heads.top")
        # Not ArgMax: engines differ in what it gives for equal values, which fp16 products have often.
        ids = graph.constant("heads.ids", np.arange(self.vocab_size), np.int32)
        last = graph.constant("heads.last_id", self.vocab_size - 1, np.int32)
        winners = node("Where", [node("Equal", [masked, top], "heads.wins"), ids, last], "heads.winners")
        first = node("ReduceMin", [winners, "heads.last_axis"], "heads.winner", keepdims=0)
        node("Cast", [first], "choices", to=_INT64)
        graph.output("choices", np.int64, ["batch", "logit_rows"])
        self._count_near(score, shifted, top)

    def _noise(self) -> str:
        """float32 [B, N, V]: of the position behind each wanted row."""
        graph, node = self.graph, self.graph.node
        lengths = node("Cast", ["cache_lengths"], "heads.lengths", to=_INT64)
        start = node("Unsqueeze", [lengths, "heads.one"], "heads.start")
        position = node(
            "Add", [node("Add", [start, "logit_rows"], "heads.last_position"), "heads.one"], "heads.position"
        )
        slot = node("Mod", [position, graph.constant("heads.noise_slots", [self.noise_slots])], "heads.slot")
        index = node("Unsqueeze", [slot, "heads.last_axis"], "heads.slot.index")
        return node("GatherND", ["noise", index], "heads.noise", batch_dims=1)

    def _count_near(self, score: str, shifted: str, top: str) -> None:
        """1 where the winner leads by more than the margin and is above the cutoff by more than it, or the best.

        -1 where a logit is no finite number: compared with anything, it is not the larger.
        """
        graph, node = self.graph, self.graph.node
        margin = graph.constant("heads.margin", CHOICE_MARGIN, np.float32)
        close = node("GreaterOrEqual", [score, node("Sub", [top, margin], "heads.near_top")], "heads.close")
        counts = []
        for kind, op in (("maybe", "Sub"), ("surely", "Add")):
            bound = node(op, ["cutoff", margin], f"heads.{kind}.bound")
            bound = node("Min", [bound, graph.constant("heads.best_is", 0, np.float32)], f"heads.{kind}.cutoff")
            inside = node("GreaterOrEqual", [shifted, bound], f"heads.{kind}.allowed")
            both = node("And", [close, inside], f"heads.{kind}.near")
            number = node("Cast", [both], f"heads.{kind}.number", to=_FLOAT)
            counts.append(node("ReduceSum", [number, "heads.last_axis"], f"heads.{kind}.count", keepdims=0))
        twice = node("Add", [counts[0], counts[0]], "heads.maybe.twice")
        number = node("Cast", [node("Sub", [twice, counts[1]], "heads.near")], "heads.near.int32", to=_INT32)
        finite = node("GreaterOrEqual", [shifted, "heads.lowest"], "heads.finite")
        finite = node("Cast", [finite], "heads.finite.number", to=_FLOAT)
        finite = node("ReduceSum", [finite, "heads.last_axis"], "heads.finite.count", keepdims=0)
        size = graph.constant("heads.vocab_size", self.vocab_size, np.float32)
        found = node("Equal", [finite, size], "heads.found")
        node("Where", [found, number, graph.constant("heads.nothing", -1, np.int32)], "near")
        graph.output("near", np.int32, ["batch", "logit_rows"])

    def advance(self) -> None:
        """From the choices to the state behind the pass. No shapes are read: on a GPU those would live on the host."""
        graph, node = self.graph, self.graph.node
        axis = graph.constant("heads.rows_axis", [1])
        last = node("Equal", ["logit_rows", node("ReduceMax", ["logit_rows", axis], "heads.last_row")], "heads.is_last")
        next_row = node("Add", ["logit_rows", "heads.one"], "heads.next_row")
        next_row = node("Where", [last, "logit_rows", next_row], "heads.next_row.inside")
        following = node("GatherElements", ["input_ids", next_row], "heads.next_id", axis=1)
        following = node("Where", [last, graph.constant("heads.no_id", [-1]), following], "heads.following")
        equal = node("Equal", ["choices", following], "heads.accepted")
        # The last wanted row has nothing behind it, so there always is a first one that is not accepted.
        behind = graph.constant("heads.behind", [2**30])
        stop = node("ReduceMin", [node("Where", [equal, behind, "logit_rows"], "heads.refused"), axis], "heads.stop")
        first = node("ReduceMin", ["logit_rows", axis], "heads.first_row")
        own = node("GatherElements", ["choices", node("Sub", [stop, first], "heads.stop.index")], "heads.own", axis=1)
        before = node("GatherElements", ["input_ids", stop], "heads.before", axis=1)
        node("Concat", [before, own], "tail", axis=1)
        graph.output("tail", np.int64, ["batch", 2])
        committed = node("Cast", [node("Squeeze", [stop, axis], "heads.stop.row")], "heads.committed", to=_INT32)
        node("Add", ["cache_lengths", committed], "tail_lengths")
        node("Add", ["tail_lengths", graph.constant("heads.one.int32", [1], np.int32)], "next_lengths")
        for name in ("tail_lengths", "next_lengths"):
            graph.output(name, np.int32, ["batch"])
