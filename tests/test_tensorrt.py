"""The standard fp16 graph parses and builds with TensorRT-RTX, ahead of time and without a GPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from outrider.export import ExportOptions, export_bundle

trt = pytest.importorskip("tensorrt_rtx")

LAYERS, ROWS = 30, 5


def test_standard_fp16_builds_ahead_of_time(smollm2: Path, tmp_path: Path) -> None:
    """Every cache write becomes TensorRT's in-place update, and one static-K profile builds an engine."""
    options = ExportOptions(precision="fp16", lowering="standard", tiers=(4,), max_length=512)
    info = export_bundle(str(smollm2), None, tmp_path / "bundle", options, threads=2).target
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse_from_file(str(tmp_path / "bundle" / info.graph))
    assert parsed, [parser.get_error(index).desc() for index in range(parser.num_errors)]

    kinds = Counter(network.get_layer(index).type for index in range(network.num_layers))
    assert kinds[trt.LayerType.KV_CACHE_UPDATE] == 2 * LAYERS
    assert kinds[trt.LayerType.ATTENTION_INPUT] == LAYERS

    profile = builder.create_optimization_profile()
    cache = (1, info.num_kv_heads, info.capacity, info.head_dim)
    for index in range(network.num_inputs):
        name = network.get_input(index).name
        shape = {"input_ids": (1, ROWS), "cache_lengths": (1,), "logit_rows": (1, ROWS)}.get(name, cache)
        profile.set_shape(name, shape, shape, shape)
    config = builder.create_builder_config()
    config.add_optimization_profile(profile)
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    engine = builder.build_serialized_network(network, config)
    assert engine is not None and engine.nbytes > 250e6
