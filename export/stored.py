"""A checkpoint as its exported weights say it: the model that an exact engine would be."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from outrider.export.checkpoint import Checkpoint, TokenizerFiles
from outrider.export.precision import BITS, embeds_apart
from outrider.export.quantize import dequantize_blocks, quantize_blocks, quantize_fp8
from outrider.export.spec import DecoderSpec
from outrider.export.takeover import taken_over

_APART = "apart:"  # before the name of the embedding, where the reference shall read it as ``embeds_apart`` says


class StoredCheckpoint:
    """A checkpoint as it comes back from its storage: what is rounded is rounded, all else as it was.

    What is taken over from a quantized file is not rounded.

    Args:
        others: the precision of tensors that have one of their own, by stem.
    """

    def __init__(
        self, checkpoint: Checkpoint, lowering: str, precision: str, others: dict[str, str] | None = None
    ) -> None:
        self.path = checkpoint.path
        self.config = checkpoint.config
        self._checkpoint = checkpoint
        self._lowering = lowering
        self._precision = precision
        self._others = others or {}

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
            values, scales = quantize_fp8(rows)
            return values.astype(np.float32) * scales[:, None].astype(np.float32)
        if taken_over(self._checkpoint, name, self._lowering, precision):
            return rows
        bits = BITS[precision]
        blocks = quantize_blocks(rows, bits, zero_points=self._lowering == "fused" and bits == 4)
        return dequantize_blocks(blocks, bits, rows.shape[1])


def as_stored(
    spec: DecoderSpec,
    checkpoint: Checkpoint,
    lowering: str,
    precision: str,
    head_precision: str,
    tensor_precisions: dict[str, str],
) -> tuple[DecoderSpec, Checkpoint]:
    """The model that an exact engine would be, for ``reference_logits``: the very arguments where little is rounded.

    Args:
        tensor_precisions: of projections that have one of their own, by stem.
    """
    if {precision, head_precision, *tensor_precisions.values()} <= {"fp32", "fp16"}:
        return spec, checkpoint
    others = tensor_precisions | dict.fromkeys((spec.embedding, spec.head), head_precision)
    if spec.position_table:  # added in the dtype of the activations
        others[spec.position_table] = "bf16" if precision == "bf16" else "fp32"
    if embeds_apart(lowering, head_precision):
        spec = replace(spec, embedding=_APART + spec.embedding)
    return spec, StoredCheckpoint(checkpoint, lowering, precision, others)
