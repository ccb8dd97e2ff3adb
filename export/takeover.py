"""Matrices that a quantized checkpoint holds as the engine would: taken over as they are, not rounded a second time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from outrider.export.checkpoint import Checkpoint, Quantized, finite, read_rows, slab_bounds
from outrider.export.precision import BITS, Formats, embeds_apart
from outrider.export.quantize import SYMMETRIC, BlockLayout, Integers, rounded_layout
from outrider.export.spec import DecoderSpec

Slab = NDArray[np.float32] | Integers


def taken_over(checkpoint: Checkpoint, name: str, lowering: str, precision: str) -> Quantized | None:
    """The matrix as the file holds it where it goes into the engine like that, else None.

    Its integers must fit. Offsets cost a product more: they are worth it where the other way is to round to as many
    bits as the file has, not where there are bits to spare. TensorRT takes scales of 32 inputs, and nothing more.
    """
    matrix = checkpoint.quantized(name) if precision in BITS else None
    if matrix is None or not 0 < matrix.type.bits <= BITS[precision]:
        return None
    layout = matrix.type.layout
    if lowering == "standard":
        return matrix if layout == SYMMETRIC else None
    return matrix if not layout.offsets or matrix.type.bits == BITS[precision] else None


def common_order(parts: Iterable[Quantized | None]) -> tuple[bool, NDArray[np.int64] | None]:
    """Whether all parts have their inputs in the same order, as in one matrix they must; and which (None: as it is)."""
    orders = [None if part is None else part.input_order for part in parts]
    return len({None if order is None else order.tobytes() for order in orders}) == 1, orders[0]


def common_layout(parts: Iterable[Quantized | None], precision: str) -> BlockLayout:
    """What holds all parts of one matrix: those that are taken over, and those that are rounded (None)."""
    rounded = rounded_layout(BITS[precision]) if precision in BITS else SYMMETRIC
    layouts = [rounded if part is None else part.type.layout for part in parts]
    return BlockLayout(
        min(layout.block_size for layout in layouts),
        any(layout.zero_points for layout in layouts),
        any(layout.offsets for layout in layouts),
    )


def matrix_slabs(
    checkpoint: Checkpoint, name: str, rows: int, order: NDArray[np.int64] | None, own: Quantized | None
) -> Iterator[Slab]:
    """The first ``rows`` rows slab by slab, or all at once where they have another ``order``; integers of ``own``."""
    if own is None:
        slabs = read_rows(checkpoint, name, rows)
        yield from slabs if order is None else [np.concatenate(list(slabs))[order]]
    elif order is not None:
        yield _finite(checkpoint, name, own.integers(0, rows)).rows(order)
    else:
        for start, stop in slab_bounds(checkpoint, name, rows):
            yield _finite(checkpoint, name, own.integers(start, stop))


def _finite(checkpoint: Checkpoint, name: str, rows: Integers) -> Integers:
    for part in (rows.scales, rows.offsets):
        if part is not None:
            finite(checkpoint, name, part)
    return rows


def floats(slabs: Iterable[Slab]) -> Iterator[NDArray[np.float32]]:
    """Slabs of a matrix of which nothing is taken over."""
    for slab in slabs:
        assert not isinstance(slab, Integers)
        yield slab


def provenance(spec: DecoderSpec, checkpoint: Checkpoint, formats: Formats) -> dict[str, dict[str, int]]:
    """How many matrices of each type are the file's own, and how many were rounded anew.

    Empty for checkpoints that are not quantized, and of matrices that are stored in float.
    """
    counts: dict[str, Counter[str]] = {"taken_over": Counter(), "rounded_anew": Counter()}
    experts, any_quantized = set(spec.expert_tensors()), False
    routers = {spec.stem("router", layer) for layer in filter(spec.routed, range(spec.num_layers))}
    for name, shape in spec.expected_shapes():
        stem = name.removesuffix(".weight")
        ends = stem in (spec.embedding, spec.head)
        apart = stem == spec.embedding and not spec.tied and embeds_apart(formats.lowering, formats.head)
        stored = formats.head if ends else formats.of(stem)
        if len(shape) < 2 or apart or stem in (spec.position_table, *routers) or stored not in (*BITS, "fp8"):
            continue
        matrix = checkpoint.quantized(name)
        any_quantized |= matrix is not None
        own = None if name in experts else taken_over(checkpoint, name, formats.lowering, stored)
        how = "rounded_anew" if own is None else "taken_over"
        counts[how]["float" if matrix is None else matrix.type.name] += 1
    return {how: dict(sorted(count.items())) if any_quantized else {} for how, count in counts.items()}
