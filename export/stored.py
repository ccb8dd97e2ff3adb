"""A checkpoint as its exported weights say it: the model that an exact engine would be."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from outrider.export.checkpoint import Checkpoint, TokenizerFiles, read_all
from outrider.export.precision import BITS, Formats, embeds_apart
from outrider.export.quantize import dequantize_blocks, quantize_blocks, quantize_fp8, rounded_layout
from outrider.export.spec import DecoderSpec
from outrider.export.takeover import taken_over

_APART = "apart:"  # before the name of the embedding, where the reference shall read it as ``embeds_apart`` says


class StoredCheckpoint:
    """A checkpoint as it comes back from its storage: what is rounded is rounded, all else as it was.

    What is taken over from a quantized file is not rounded.

    Args:
        others: the precision of tensors that have one of their own, by stem.
        beside: the stems of the tensors that are stored as one matrix, their rows beside each other, by each stem.
        experts: the tensors of experts, which are never taken over.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        lowering: str,
        precision: str,
        others: dict[str, str] | None = None,
        beside: dict[str, tuple[str, ...]] | None = None,
        experts: frozenset[str] = frozenset(),
    ) -> None:
        self.path = checkpoint.path
        self.config = checkpoint.config
        self._checkpoint = checkpoint
        self._lowering = lowering
        self._precision = precision
        self._others = others or {}
        self._beside = beside or {}
        self._experts = experts
        self._peaks: tuple[tuple[str, ...], NDArray[np.float32]] | None = None

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._checkpoint.shape(name)

    def unread(self, names: set[str]) -> list[str]:
        return self._checkpoint.unread(names)

    def quantized(self, name: str) -> None:
        return None

    def tokenizer(self) -> TokenizerFiles:
        return self._checkpoint.tokenizer()

    def read(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        rows = self._checkpoint.read(name.removeprefix(_APART), start, stop)
        precision = self._others.get(name.removesuffix(".weight"), self._precision)
        if precision == "bf16":
            return rows.astype(ml_dtypes.bfloat16).astype(np.float32)
        if rows.ndim == 1 or name.startswith(_APART) or precision in ("fp32", "fp16"):
            return rows
        if precision == "fp8":
            return self._through_fp8(rows, self._beside.get(name.removesuffix(".weight")), start, stop)
        bits = BITS[precision]
        if name in self._experts:  # whose operator takes symmetric blocks
            return dequantize_blocks(quantize_blocks(rows, bits), bits, rows.shape[1])
        if taken_over(self._checkpoint, name, self._lowering, precision):
            return rows
        blocks = quantize_blocks(rows, bits, zero_points=self._lowering == "fused" and rounded_layout(bits).zero_points)
        return dequantize_blocks(blocks, bits, rows.shape[1])

    def _through_fp8(
        self, rows: NDArray[np.float32], beside: tuple[str, ...] | None, start: int, stop: int
    ) -> NDArray[np.float32]:
        """With the scale that a whole row of the stored matrix has."""
        if beside is None:
            whole = rows
        else:
            if self._peaks is None or self._peaks[0] != beside:  # of one layer at a time
                parts = (np.abs(read_all(self._checkpoint, f"{stem}.weight")).max(axis=1) for stem in beside)
                self._peaks = beside, reduce(np.maximum, parts)
            whole = np.column_stack([rows, self._peaks[1][start:stop]])
        values, scales = quantize_fp8(whole)
        return values[:, : rows.shape[1]].astype(np.float32) * scales[:, None].astype(np.float32)


def as_stored(spec: DecoderSpec, checkpoint: Checkpoint, formats: Formats) -> tuple[DecoderSpec, Checkpoint]:
    """The model that an exact engine would be, for ``reference_logits``: the very arguments where little is rounded."""
    if set(formats.precisions) <= {"fp32", "fp16"}:
        return spec, checkpoint
    lowering, precision = formats.lowering, formats.precision
    others = {**formats.tensors, **dict.fromkeys((spec.embedding, spec.head), formats.head)}
    if spec.position_table:  # added in the dtype of the activations
        others[spec.position_table] = "bf16" if precision == "bf16" else "fp32"
    beside: dict[str, tuple[str, ...]] = {}
    for layer in filter(spec.routed, range(spec.num_layers)):
        others[spec.stem("router", layer)] = precision if precision == "bf16" else "fp32"
        if lowering == "standard":
            stems = tuple(spec.stem("expert_down", layer, expert) for expert in range(spec.num_experts))
            beside |= dict.fromkeys(stems, stems)
    if embeds_apart(lowering, formats.head):
        spec = replace(spec, embedding=_APART + spec.embedding)
    experts = frozenset(spec.expert_tensors())
    return spec, StoredCheckpoint(checkpoint, lowering, precision, others, beside, experts)
