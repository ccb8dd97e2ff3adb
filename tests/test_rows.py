"""Row exactness: the probe finds what it should, and a ragged batch equals single runs bit for bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from checkpoints import write_tiny
from numpy.typing import NDArray
from onnx import TensorProto, helper
from products import fewest_rows

from outrider.engines.bundle import Bundle, ModelInfo
from outrider.engines.engine import PlanShape, padded_rows, plan_table
from outrider.engines.errors import OutriderError
from outrider.engines.ort import OrtEngine
from outrider.engines.probe import RowProbe, probe_rows
from outrider.export import ExportOptions, attention, export_bundle
from outrider.runtime import Pipeline, SamplingOptions
from outrider.runtime.decode import decode
from outrider.runtime.drafters.ngram import NgramDrafter
from outrider.runtime.sequence import CachedModel

VOCAB = 50


def hand_made_engine(path: Path, mixing: float, one_row_extra: float = 0.0) -> OrtEngine:
    """logits = one-hot(id) + mixing * mean over the rows' ids + one_row_extra where the pass has one row."""
    shape = ["batch", 1, 128, 16]
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["ids.float"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["ids.float"], ["mean"], keepdims=1),
        helper.make_node("Mul", ["mean", "mixing"], ["mixed"]),
        helper.make_node("Shape", ["input_ids"], ["rows"], start=1, end=2),
        helper.make_node("Equal", ["rows", "one"], ["is_one"]),
        helper.make_node("Cast", ["is_one"], ["is_one.float"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["is_one.float", "extra"], ["offset"]),
        helper.make_node("Add", ["mixed", "offset"], ["added"]),
        helper.make_node("OneHot", ["input_ids", "depth", "values"], ["hot"]),
        helper.make_node("Add", ["hot", "added"], ["all"]),
        helper.make_node("Unsqueeze", ["logit_rows", "last"], ["index"]),
        helper.make_node("GatherND", ["all", "index"], ["logits"], batch_dims=1),
        helper.make_node("Identity", ["past_key.0"], ["present_key.0"]),
        helper.make_node("Identity", ["past_value.0"], ["present_value.0"]),
    ]
    constants = [
        helper.make_tensor("mixing", TensorProto.FLOAT, [], [mixing]),
        helper.make_tensor("extra", TensorProto.FLOAT, [], [one_row_extra]),
        helper.make_tensor("one", TensorProto.INT64, [1], [1]),
        helper.make_tensor("last", TensorProto.INT64, [1], [-1]),
        helper.make_tensor("depth", TensorProto.INT64, [], [VOCAB]),
        helper.make_tensor("values", TensorProto.FLOAT, [2], [0.0, 1.0]),
    ]
    value = helper.make_tensor_value_info
    caches = ("past_key.0", "past_value.0")
    inputs = [
        value("input_ids", TensorProto.INT64, ["batch", "rows_in"]),
        value("cache_lengths", TensorProto.INT32, ["batch"]),
        value("logit_rows", TensorProto.INT64, ["batch", "wanted"]),
        *(value(name, TensorProto.FLOAT, shape) for name in caches),
    ]
    outputs = [
        value("logits", TensorProto.FLOAT, ["batch", "wanted", VOCAB]),
        *(value(name.replace("past", "present"), TensorProto.FLOAT, shape) for name in caches),
    ]
    graph = helper.make_graph(nodes, "hand-made", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, path)
    info = ModelInfo("", "hand-made", "fused", "fp32", "fp32", 1, 1, 16, VOCAB, 128, "float32", 1, "tolerance", "", {})
    return OrtEngine(path, info, threads=1)


def test_independent_rows_are_bitwise(tmp_path: Path) -> None:
    probe = probe_rows(hand_made_engine(tmp_path / "m.onnx", mixing=0.0), [2, 4, 8])
    assert (probe.exactness, probe.min_rows) == ("bitwise", 1)


def test_a_one_row_kernel_of_its_own_is_found(tmp_path: Path) -> None:
    probe = probe_rows(hand_made_engine(tmp_path / "m.onnx", mixing=0.0, one_row_extra=1e-3), [2, 4, 8])
    assert (probe.exactness, probe.min_rows) == ("bitwise", 2)


@pytest.mark.parametrize("tiers", [[1], [2], [5], [1, 3], [2, 4, 8]])
def test_rows_that_depend_on_each_other_are_refused(tmp_path: Path, tiers: list[int]) -> None:
    """What per-tensor dynamic quantization does: another row changes this row's logits."""
    with pytest.raises(OutriderError, match="other rows of the pass change"):
        probe_rows(hand_made_engine(tmp_path / "m.onnx", mixing=1e-4), tiers)


@pytest.mark.parametrize("precision", ["int4", "int8", "fp32"])
def test_wide_heads_around_64_positions(tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime adds up a head of more than 128 dimensions in other pieces as soon as there are 65 positions."""
    source = write_tiny(tmp_path / "wide", heads=2, kv_heads=1, head_dim=256)
    options = ExportOptions(precision=precision, tiers=(2, 4), max_length=96)
    info = export_bundle(str(source), None, tmp_path / "bundle", options, threads=2).target
    assert info.exactness == "bitwise"
    engine = OrtEngine(tmp_path / "bundle" / info.graph, info, threads=2)
    ids = np.random.default_rng(0).integers(0, 320, (1, 72))

    def by(width: int) -> NDArray[np.float32]:
        plan = engine.plan(width, width)
        passes = [plan.run(ids[:, n : n + width], np.full(1, n, np.int32))[0].copy() for n in range(0, 72, width)]
        return np.concatenate(passes)

    widths = [width for width in (1, 2, 3, 4, 6, 8, 9, 36, 72) if width >= info.min_rows]
    first, *others = map(by, widths)
    assert all(np.array_equal(first, other) for other in others)
    monkeypatch.setattr(attention, "SUMMED_AT_ONCE", 256)  # the graph without its spare rows, which the probe finds
    without = export_bundle(str(source), None, tmp_path / "without", options, threads=2).target
    assert without.exactness != "bitwise"


def test_wide_heads_in_long_texts(tmp_path: Path) -> None:
    """ONNX Runtime would cut positions into pieces, as many as fit into the L2 cache, and add up short ones otherwise.

    For 256 dimensions a piece is 128 positions with 1 MiB, 256 with 2 MiB: bits would change at 192, 320, 448.
    """
    source = write_tiny(tmp_path / "wide", heads=2, kv_heads=1, head_dim=256)
    options = ExportOptions(precision="int8", tiers=(2, 4), max_length=480)
    info = export_bundle(str(source), None, tmp_path / "bundle", options, threads=2).target
    engine = OrtEngine(tmp_path / "bundle" / info.graph, info, threads=2)
    ids = np.random.default_rng(0).integers(0, 320, (1, 460))
    together = engine.plan(460, 460).run(ids, np.zeros(1, np.int32))[0].copy()
    for width in (1, 5):
        plan = engine.plan(width, width)
        for start in range(0, 460, width):
            logits = plan.run(ids[:, start : start + width], np.full(1, start, np.int32))[0]
            assert np.array_equal(logits, together[start : start + width]), (width, start)


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_the_spare_row_makes_one_row_passes_exact(tiny: Path, tmp_path: Path, precision: str) -> None:
    """With it, one row gives the bits of many where products do; without it, the same graph does not."""
    options = ExportOptions(precision=precision, tiers=(2, 4, 8), max_length=96)
    info = export_bundle(str(tiny), None, tmp_path / "bundle", options, threads=2).target
    assert (info.exactness, info.min_rows) == ("bitwise", fewest_rows(precision))
    engine = OrtEngine(tmp_path / "bundle" / info.graph, info, threads=2)
    ids = np.random.default_rng(0).integers(0, 320, (1, 40))

    def one_by_one(exact: bool) -> NDArray[np.float32]:
        steps = [
            engine.plan(1, 1, exact).run(ids[:, n : n + 1], np.full(1, n, np.int32))[0, 0].copy() for n in range(40)
        ]
        return np.stack(steps)

    together = engine.plan(40, 40).run(ids, np.zeros(1, np.int32))[0].copy()
    assert np.array_equal(one_by_one(True), together) == (info.min_rows == 1)
    assert not np.array_equal(one_by_one(False), together)


def test_all_row_counts_up_to_a_prefill_chunk_agree(smollm2_pair: Pipeline) -> None:
    """A real model, int4: the last row's logits after 200 tokens, reached in passes of every width."""
    engine = smollm2_pair.target_engine
    ids = np.random.default_rng(3).integers(0, engine.info.vocab_size, 200)
    results = []
    for width in (1, 2, 3, 5, 9, 16, 67, 200)[fewest_rows("int4") - 1 :]:
        for start in range(0, 200, width):
            part = ids[None, start : start + width]
            logits = engine.plan(part.shape[1], fewest_rows("int4")).run(part, np.full(1, start, np.int32))
        results.append(logits[0, -1].copy())
    assert all(np.array_equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("length", [127, 128, 129, 130, 257])
def test_a_last_tile_of_one_row(smollm2_pair: Pipeline, length: int) -> None:
    """Products are cut into tiles of 128 rows: the last row of 129 was the only one of its tile."""
    target = smollm2_pair.target
    tokens = np.random.default_rng(4).integers(0, 49000, length).tolist()
    found = []
    for first in (0, 70):
        target.rollback(0)
        if first:
            target.extend(tokens[:first], 1)
        found.append(target.extend(tokens[first:], 1)[0].copy())
    assert np.array_equal(*found)


def test_passes_are_padded_to_whole_tiles() -> None:
    for fewest in (1, 2, 9):
        for rows in range(1, 400):
            padded = padded_rows(rows, fewest)
            tails = [wide for wide in range(rows, padded + 1) if (wide - 1) % 128 + 1 >= fewest]
            assert tails == [padded]


@pytest.mark.parametrize("precision", ["int4", "fp32"])
@pytest.mark.parametrize("lowering", ["fused", "standard"])
def test_a_ragged_batch_equals_single_runs(tiny: Path, tmp_path: Path, precision: str, lowering: str) -> None:
    """Two sequences of other lengths in one pass: batch is a dimension of the graph, and neighbours do not matter."""
    options = ExportOptions(precision=precision, lowering=lowering, tiers=(4,), max_length=96)
    export_bundle(str(tiny), None, tmp_path / "bundle", options, threads=2)
    bundle = Bundle(tmp_path / "bundle")
    info, graph = bundle.manifest.target, bundle.path("target/model.onnx")
    pair, single = OrtEngine(graph, info, threads=2, batch=2), OrtEngine(graph, info, threads=2)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 320, 40), rng.integers(0, 320, 29)]
    lengths = np.zeros(2, np.int32)
    expected: list[list[NDArray[np.float32]]] = [[], []]
    for width in (7, 5, 2, 5):
        rows = np.stack([text[start : start + width] for text, start in zip(texts, lengths, strict=True)])
        found = pair.plan(width, width).run(rows, lengths).copy()
        for which in range(2):
            alone = single.plan(width, width)
            _replay(single, texts[which], int(lengths[which]))
            expected[which].append(alone.run(rows[which][None], lengths[which : which + 1])[0].copy())
            assert np.array_equal(found[which], expected[which][-1])
        lengths += np.array([width, width - 2], np.int32)  # the second sequence rolls back two rows each time


def _replay(engine: OrtEngine, text: NDArray[np.int64], length: int) -> None:
    if length:
        engine.plan(length, 1).run(text[None, :length], np.zeros(1, np.int32))


def test_the_probe_runs_again_on_another_machine(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle proved elsewhere is proved again here, where kernels may differ."""
    import outrider.engines.ort as ort_engine
    import outrider.engines.probe as probe

    calls: list[Sequence[int]] = []

    def counted(engine: OrtEngine, tiers: Sequence[int]) -> RowProbe:
        calls.append(tiers)
        return probe_rows(engine, tiers)

    monkeypatch.setattr(probe, "probe_rows", counted)
    assert Pipeline.load(tiny_bundle, threads=2).exactness == "bitwise"
    assert calls == []
    monkeypatch.setattr(ort_engine, "_device", lambda provider, threads: "another machine")
    assert Pipeline.load(tiny_bundle, threads=2).exactness == "bitwise"
    assert calls == [(1, 2, 4, 8)]


def test_one_session_serves_every_width(tiny_pipeline: Pipeline) -> None:
    """Plans are made once and share the caches and the session."""
    engine = tiny_pipeline.target_engine
    assert engine.plan(5, 5) is engine.plan(5, 5)
    assert engine.plan(5, 5) is not engine.plan(5, 1)


def test_fixed_row_tiers_round_up(tiny_bundle: Path) -> None:
    """Where each width is a captured graph, a pass takes the next wider plan, and its padding changes nothing."""
    bundle = Bundle(tiny_bundle)
    info, graph = bundle.manifest.target, bundle.path("target/model.onnx")
    exact, tiered = (
        OrtEngine(graph, info, threads=2),
        OrtEngine(graph, info, threads=2, table=[PlanShape(rows, rows) for rows in (2, 5, 9)]),
    )
    assert tiered.plan(3, 3) is tiered.plan(5, 5)
    ids = np.random.default_rng(1).integers(0, 320, (1, 14))
    start = 0
    for width in (7, 3, 1, 2, 1):
        part, lengths = ids[:, start : start + width], np.full(1, start, np.int32)
        rows = max(width, info.min_rows)
        alone = exact.plan(rows, rows).run(part, lengths)
        assert np.array_equal(alone, tiered.plan(width, width).run(part, lengths))
        start += width


def test_a_whole_request_in_fixed_row_tiers(tiny_bundle: Path, tiny_pipeline: Pipeline) -> None:
    """As with captured graphs: prefill chunk, verify and plain steps all padded, up to the last position."""
    bundle = Bundle(tiny_bundle)
    info = bundle.manifest.target
    engine = OrtEngine(bundle.path("target/model.onnx"), info, threads=2, table=plan_table(bundle.manifest.tiers))
    ids = tiny_pipeline.codec.encode("one two three " * 40)[:60]
    outputs = []
    for model, k in ((tiny_pipeline.target, 0), (CachedModel(engine, 1), 0), (CachedModel(engine, 1), 3)):
        request = tiny_pipeline.new_request(ids, SamplingOptions(max_new_tokens=1000))
        for _ in decode(model, NgramDrafter(), k, request):
            pass
        outputs.append(request.output.tokens)
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(outputs[0]) == bundle.manifest.max_length - 60


def test_forked_processes_do_not_share_caches(tiny_bundle: Path) -> None:
    """A server that loads once and forks: each child decodes on its own memory."""
    code = (
        "import os, sys\n"
        "from outrider.runtime import Pipeline\n"
        "p = Pipeline.load(sys.argv[1], threads=1)\n"
        "expected = p.generate('the quick brown fox', k=0, max_new_tokens=60).token_ids\n"
        "child = os.fork()\n"
        "prompt = 'def add(a, b):' if child == 0 else 'the quick brown fox'\n"
        "found = [p.generate(prompt, k=0, max_new_tokens=60).token_ids for _ in range(20)]\n"
        "if child == 0: os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "assert all(ids == expected for ids in found)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny_bundle)], check=True)


def test_a_pass_beyond_the_cache_is_refused(tiny_pipeline: Pipeline) -> None:
    engine = tiny_pipeline.target_engine
    with pytest.raises(OutriderError, match="exceed the cache"):
        engine.plan(2, 2).run(np.zeros((1, 2), np.int64), np.full(1, engine.info.capacity - 1, np.int32))
    engine.plan(2, 2).run(np.zeros((1, 2), np.int64), np.full(1, engine.info.capacity - 2, np.int32))
    with pytest.raises(OutriderError, match="exceed the cache"):  # the spare row needs a place too
        engine.plan(1, 1).run(np.zeros((1, 1), np.int64), np.full(1, engine.info.capacity - 1, np.int32))


class _Skewed:
    """An engine whose bits depend on the plan, as where each number of rows has a kernel of its own."""

    def __init__(self, engine: OrtEngine) -> None:
        self._engine = engine
        self.info = engine.info

    def plan(self, rows: int, logit_rows: int, exact: bool = True) -> Any:
        plan = self._engine.plan(rows, logit_rows, exact)

        def run(ids: NDArray[np.int64], lengths: NDArray[np.int32]) -> NDArray[np.float32]:
            return plan.run(ids, lengths) * np.float32(1 + 1e-6 * plan.rows)

        return SimpleNamespace(run=run)


def test_rows_that_are_equal_in_one_plan_only(tiny_bundle: Path) -> None:
    """All tokens come from passes of that many rows then, and are the same for every K."""
    bundle = Bundle(tiny_bundle)
    info, graph = bundle.manifest.target, bundle.path("target/model.onnx")
    engine = OrtEngine(graph, info, threads=2, table=plan_table((2, 4)))
    assert probe_rows(engine, (2, 4)).exactness == "bitwise"
    assert probe_rows(_Skewed(engine), (2, 4)) == RowProbe("fixed-rows", 5)  # type: ignore[arg-type]
    for min_rows in (1, 5):
        model = CachedModel(_Skewed(engine), min_rows)  # type: ignore[arg-type]
        widths = set()
        for count in (1, 3, 5):
            model.rollback(0)
            model.extend([1, 2, 3], 1)
            row = np.asarray(model.extend([5] * count, count)[0])
            widths.add(row.tobytes())
        assert len(widths) == (3 if min_rows == 1 else 1)
