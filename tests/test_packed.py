"""Packed passes: rows of many sequences in one, each with the bits of a pass of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_tiny
from numpy.typing import NDArray
from refusals import refused

from outrider.engines.bundle import Bundle
from outrider.engines.open import open_packed
from outrider.engines.ort import OrtEngine
from outrider.engines.packed import PackedEngine, Segment
from outrider.engines.probe import packed_reference, probe_packed
from outrider.export import ExportOptions, export_bundle

SEQUENCES, LONGEST = 4, 90


@pytest.fixture(scope="module", params=["int4", "int8", "fp32"])
def bundle(request: pytest.FixtureRequest, workdir: Path, tiny: Path) -> Bundle:
    out = workdir / f"packed-{request.param}"
    export_bundle(str(tiny), None, out, ExportOptions(request.param, tiers=(2, 8), max_length=96), threads=2)
    return Bundle(out)


def packed_engine(bundle: Bundle, sequences: int = SEQUENCES, most_rows: int = 64) -> PackedEngine:
    engine, exactness = open_packed(bundle, "target", sequences=sequences, most_rows=most_rows, threads=2)
    assert exactness == "bitwise"
    return engine


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 320, LONGEST).tolist() for _ in range(SEQUENCES)]


@pytest.fixture(scope="module")
def alone(bundle: Bundle, texts: list[list[int]]) -> list[NDArray[np.float32]]:
    """Logits of each text, by the engine of one sequence, step by step."""
    info = bundle.manifest.target
    engine = OrtEngine(bundle.path(info.graph), info, threads=2)
    rows = info.min_rows
    found = []
    for text in texts:
        steps = []
        for place in range(0, LONGEST, rows):
            plan = engine.plan(rows, rows)
            steps.append(plan.run(np.array([text[place : place + rows]]), np.full(1, place, np.int32))[0].copy())
        found.append(np.concatenate(steps))
    return found


def passes(seed: int) -> Iterator[list[tuple[int, int]]]:
    """(sequence, rows) of each pass, until all are through: any order, any rows, some sequences idle."""
    rng = np.random.default_rng(seed)
    left = [LONGEST] * SEQUENCES
    while any(left):
        chosen = [
            (int(sequence), int(min(left[sequence], rng.integers(1, 17))))
            for sequence in rng.permutation(SEQUENCES)
            if left[sequence] and rng.random() < 0.7
        ]
        for sequence, rows in chosen:
            left[sequence] -= rows
        if chosen:
            yield chosen


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_those_of_single_passes(
    bundle: Bundle, texts: list[list[int]], alone: list[NDArray[np.float32]], seed: int
) -> None:
    engine = packed_engine(bundle)
    places = [0] * SEQUENCES
    for chosen in passes(seed):
        segments = []
        for sequence, rows in chosen:
            place = places[sequence]
            segments.append(Segment(sequence, place, texts[sequence][place : place + rows], 1 + rows // 2))
            places[sequence] += rows
        for segment, logits in zip(segments, engine.run(segments), strict=True):
            end = segment.length + len(segment.tokens)
            assert np.array_equal(logits, alone[segment.sequence][end - segment.wanted : end])


@pytest.mark.parametrize("rows", [128, 129, 130])
def test_a_last_tile_of_one_row(
    bundle: Bundle, texts: list[list[int]], alone: list[NDArray[np.float32]], rows: int
) -> None:
    """Products are cut into tiles of 128 rows."""
    segments = [Segment(0, 0, texts[0][: rows - 40], 1), Segment(1, 0, texts[1][:40], 1)]
    first, second = packed_engine(bundle, most_rows=rows).run(segments)
    assert np.array_equal(first[0], alone[0][rows - 41])
    assert np.array_equal(second[0], alone[1][39])


def test_a_rollback_and_a_copy(bundle: Bundle, texts: list[list[int]], alone: list[NDArray[np.float32]]) -> None:
    """What was overwritten leaves no trace, and a copied beginning is as good as a computed one."""
    engine = packed_engine(bundle)
    engine.run([Segment(2, 0, texts[1][:50], 1), Segment(3, 0, texts[3][:7], 1)])
    engine.copy(2, 0, 0, 30)
    engine.copy(2, 0, 30, 41)
    got = engine.run([Segment(0, 41, texts[1][41:50], 9), Segment(2, 20, texts[1][20:28], 8)])
    assert np.array_equal(got[0], alone[1][41:50])
    assert np.array_equal(got[1], alone[1][20:28])


def test_the_end_of_the_cache(bundle: Bundle) -> None:
    engine = packed_engine(bundle)
    length = bundle.manifest.target.capacity - 3
    engine.run([Segment(1, length, [1, 2, 3], 1)])
    message = refused(lambda: engine.run([Segment(0, 5, [1], 1), Segment(1, length, [1, 2, 3, 4], 1)]))
    assert f"{length} cached tokens and 4 rows exceed" in message and "--max-length" in message


def test_the_probe_finds_rows_that_differ(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the spare row beside it, a row alone takes another kernel."""
    info = bundle.manifest.target
    reference = packed_reference(OrtEngine(bundle.path(info.graph), info, threads=2), info.min_rows)
    engine = packed_engine(bundle, sequences=3)
    assert probe_packed(engine, reference) == "bitwise"
    monkeypatch.setattr(engine, "_spare_rows", lambda length, rows: 0)
    assert probe_packed(engine, reference) == "tolerance"


def test_another_device_is_probed_again(bundle: Bundle) -> None:
    """The export's word holds where it was given: with one thread this is another device."""
    _, exactness = open_packed(bundle, "target", sequences=2, most_rows=64, threads=1)
    assert exactness == "bitwise"


def test_wide_heads_in_a_short_context(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 256 need positions beside them until there are enough; each sequence of a batch its own."""
    folder = write_tiny(workdir / "packed-wide", heads=2, kv_heads=1, head_dim=256)
    out = workdir / "packed-wide-int8"
    export_bundle(str(folder), None, out, ExportOptions("int8", tiers=(2, 8), max_length=160), threads=2)
    bundle = Bundle(out)
    info = bundle.manifest.target
    assert info.packed_exactness == "bitwise"
    reference = packed_reference(OrtEngine(bundle.path(info.graph), info, threads=2), info.min_rows)
    engine = packed_engine(bundle, sequences=3, most_rows=96)
    monkeypatch.setattr(engine, "_short", 0)
    assert probe_packed(engine, reference) == "tolerance"


def test_a_bundle_without_a_packed_graph(workdir: Path, tiny: Path) -> None:
    out = workdir / "packed-none"
    export_bundle(str(tiny), None, out, ExportOptions("fp32", "standard", (2,), 96), threads=2)
    assert Bundle(out).manifest.target.packed_exactness == "absent"
    message = refused(lambda: open_packed(Bundle(out), "target", sequences=2, most_rows=64))
    assert str(out) in message and "--lowering fused" in message
