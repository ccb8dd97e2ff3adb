"""The row probe: does a row of logits depend on how many rows ran with it, or on what those rows hold?

Speculation verifies K+1 rows at once where plain decoding runs one. The text stays the same bit for bit only if a row's
logits do. This is tested on the engine that will run, for every number of rows that the loop uses, not assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.engines.bundle import ModelInfo
from outrider.engines.engine import PREFILL_CHUNK, Engine
from outrider.engines.errors import OutriderError
from outrider.engines.packed import PackedEngine, Segment

_POSITIONS = 12
# Lengths of texts whose last positions lie where kernels cut their work in other ways: around a power of two, and 64
# positions into the second piece of attention that is cut by 1 MiB of cache.
_CROSSING = (38, 70, 134, 198)
_CHUNK = 64  # rows of a prompt beside those of others


@dataclass(frozen=True)
class RowProbe:
    """What holds of passes of at least ``min_rows`` rows.

    ``exactness`` is ``bitwise`` when all of them agree; ``fixed-rows`` when those of ``min_rows`` agree, whatever a
    row's place and neighbours, so that all tokens must come from such passes; else ``tolerance``. With ``fixed-rows`` a
    prompt whose beginning is in the cache from another request may be given other bits than one that is prefilled.
    """

    exactness: str
    min_rows: int


def known_rows(info: ModelInfo, engine: Engine, tiers: Sequence[int]) -> RowProbe:
    """What is known of an engine: the export's probe holds for the machine it ran on; elsewhere it runs again."""
    if info.device == engine.device:
        return RowProbe(info.exactness, info.min_rows)
    return probe_rows(engine, tiers)


def probe_rows(engine: Engine, tiers: Sequence[int], seed: int = 0) -> RowProbe:
    """Compare logits of the same positions computed in passes of every width from 1 to K+1, and of a prefill chunk.

    Args:
        engine: batch 1; its cache is overwritten.
        tiers: the values of K.

    Raises:
        OutriderError: rows depend on what the other rows of the pass hold, so that no speculation can be lossless.
    """
    rng = np.random.default_rng(seed)
    widest = max(tiers) + 1
    longest = max(_POSITIONS + 1, min(PREFILL_CHUNK, engine.info.capacity - widest))
    text = rng.integers(0, engine.info.vocab_size, longest)
    parts = [text[:end] for end in _CROSSING if end < longest]
    # One-row passes may use other kernels; what matters is the fewest rows from which on all passes agree.
    exact = _exact_widths(engine, text, {1, 2, *range(1, widest + 1)}, rng)
    for part in parts:
        exact -= {1, 2, widest} - _exact_widths(engine, part, {1, 2, widest}, rng)
    for min_rows in (1, 2):
        if all(width in exact for width in range(min_rows, widest + 1)):
            return RowProbe("bitwise", min_rows)
    fixed = _are_fixed(engine, text, range(1, widest + 1), rng)
    if fixed and all(_are_fixed(engine, part, (1, widest), rng) for part in parts):
        return RowProbe("fixed-rows", widest)
    return RowProbe("tolerance", 1)


Reference = list[tuple[NDArray[np.int64], NDArray[np.float32]]]


def packed_reference(engine: Engine, min_rows: int, seed: int = 0) -> Reference:
    """Texts, and logits of the last positions of each, by an engine of one sequence: what ``probe_packed`` expects.

    Args:
        engine: batch 1; its cache is overwritten.
        min_rows: what the row probe found of it.
    """
    rng = np.random.default_rng(seed)
    longest = engine.info.capacity - PREFILL_CHUNK
    reference = []
    for length in _CROSSING:
        text = rng.integers(0, engine.info.vocab_size, max(_POSITIONS + 1, min(length, longest)))
        _prefill(engine, text)
        reference.append((text, _logits_by(engine, text, max(min_rows, _POSITIONS), rng, valid=_POSITIONS)))
    return reference


def probe_packed(packed: PackedEngine, reference: Reference, seed: int = 0) -> str:
    """Compare passes of several sequences, of rows at random, with passes of each alone.

    Args:
        packed: its caches are overwritten.
        reference: of the same model.

    Returns:
        ``bitwise`` when all rows are the same; else ``tolerance``.
    """
    rng = np.random.default_rng(seed)
    for start in range(0, len(reference), packed.sequences):
        texts, expected = zip(*reference[start : start + packed.sequences], strict=True)
        if not all(map(np.array_equal, _packed_logits(packed, texts, rng), expected)):
            return "tolerance"
    return "bitwise"


def _packed_logits(
    packed: PackedEngine, texts: Sequence[NDArray[np.int64]], rng: np.random.Generator
) -> list[NDArray[np.float32]]:
    """Logits of the last positions of each text, from passes of every kind that a batch has.

    Chunks as long as a pass; a row of each; a row of one alone; a chunk of one beside a row of each other; any rows.
    """
    places = [0] * len(texts)
    found: list[list[NDArray[np.float32]]] = [[] for _ in texts]

    def run(rows: Sequence[int]) -> None:
        segments = []
        for sequence, (text, asked) in enumerate(zip(texts, rows, strict=True)):
            count = min(asked, len(text) - places[sequence])
            if count:
                start, end = places[sequence], places[sequence] + count
                wanted = min(count, max(1, end - (len(text) - _POSITIONS)))
                segments.append(Segment(sequence, start, text[start:end].tolist(), wanted))
                places[sequence] = end
        for segment, logits in zip(segments, packed.run(segments) if segments else (), strict=True):
            if places[segment.sequence] > len(texts[segment.sequence]) - _POSITIONS:
                found[segment.sequence].append(logits.copy())

    def only(sequence: int, rows: int, others: int = 0) -> list[int]:
        return [rows if number == sequence else others for number in range(len(texts))]

    last = len(texts) - 1
    for sequence, text in enumerate(texts):
        end = len(text) - _POSITIONS - (_CHUNK if sequence == last else 0)
        while places[sequence] < end:
            run(only(sequence, min(packed.most_rows, end - places[sequence])))
    chunk = min(_CHUNK, packed.most_rows - last)
    run(only(last, min(chunk, len(texts[last]) - _POSITIONS - places[last]), others=1))
    while places[last] < len(texts[last]) - _POSITIONS:
        run(only(last, min(packed.most_rows, len(texts[last]) - _POSITIONS - places[last])))
    run([1] * len(texts))
    for sequence in range(len(texts)):
        run(only(sequence, 1))
    widest = packed.most_rows // packed.sequences
    while any(place < len(text) for place, text in zip(places, texts, strict=True)):
        run([int(rng.integers(0, widest + 1)) for _ in texts])
    return [np.concatenate(parts) for parts in found]


def _exact_widths(engine: Engine, text: NDArray[np.int64], widths: set[int], rng: np.random.Generator) -> set[int]:
    """The widths that give the bits of the widest; none where a prefill of all of the text gives others.

    Raises:
        OutriderError: rows depend on what the other rows of the pass hold.
    """
    _prefill(engine, text)
    widest = max(widths)
    by_width = {width: _logits_by(engine, text, width, rng) for width in widths}
    # With other junk behind the text: at least one row of each pass is junk.
    first, second = (_logits_by(engine, text, widest, rng, valid=widest - 1) for _ in range(2))
    if not np.array_equal(first, second):
        difference = float(np.abs(first - second).max())
        raise OutriderError(
            f"logits of a row change by up to {difference:.3g} when the other rows of the pass change, so no "
            "speculation over this graph can be lossless; export with another --precision"
        )
    # The last of them only, as many as a pass of fixed shape gives.
    last = min(_POSITIONS, widest)
    prefilled = engine.plan(len(text), last).run(text[None], np.zeros(1, np.int32))[0, -last:]
    if not np.array_equal(prefilled, first[-last:]):
        return set()
    return {width for width, logits in by_width.items() if np.array_equal(logits, first)}


def _are_fixed(engine: Engine, text: NDArray[np.int64], valid: Sequence[int], rng: np.random.Generator) -> bool:
    """Whether passes of the most of ``valid`` rows give a row the same bits wherever it is among them."""
    _prefill(engine, text)
    widest = max(valid)
    first, *others = (_logits_by(engine, text, widest, rng, valid=count) for count in valid)
    return all(np.array_equal(logits, first) for logits in others)


def _prefill(engine: Engine, text: NDArray[np.int64]) -> None:
    """All but the last positions, which are written anew."""
    context = len(text) - _POSITIONS
    engine.plan(context, 1).run(text[None, :context], np.zeros(1, np.int32))


def _logits_by(
    engine: Engine, text: NDArray[np.int64], width: int, rng: np.random.Generator, valid: int | None = None
) -> NDArray[np.float32]:
    """Logits of the last positions of ``text``, from passes of ``width`` rows, of which at most ``valid`` are text."""
    valid = width if valid is None else valid
    plan = engine.plan(width, width)
    rows = []
    for start in range(len(text) - _POSITIONS, len(text), valid):
        ids = rng.integers(0, engine.info.vocab_size, (1, width))
        real = text[start : start + valid]
        ids[0, : len(real)] = real
        rows.append(plan.run(ids, np.full(1, start, np.int32))[0, : len(real)].copy())
    return np.concatenate(rows)
