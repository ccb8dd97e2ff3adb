"""The check that ends an export: the engine that was written passes, one of a slightly other model does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.engines.bundle import Bundle
from outrider.engines.errors import OutriderError
from outrider.engines.ort import OrtEngine
from outrider.export import ExportOptions, export_bundle
from outrider.export.architectures import decoder_spec
from outrider.export.check import check_engine
from outrider.export.checkpoint import open_checkpoint
from outrider.export.precision import BITS, PRECISIONS_OF
from outrider.export.quantize import dequantize_blocks, quantize_blocks
from outrider.export.reference import reference_logits
from outrider.export.spec import DecoderSpec
from outrider.export.stored import StoredCheckpoint

FAULTS = {
    "other positions": lambda spec: replace(spec, inv_freq=spec.inv_freq * 1.5),
    "gate and up swapped": lambda spec: replace(
        spec, layer_names={**spec.layer_names, "gate": spec.layer_names["up"], "up": spec.layer_names["gate"]}
    ),
    "keys for values": lambda spec: replace(
        spec, layer_names={**spec.layer_names, "k": spec.layer_names["v"], "v": spec.layer_names["k"]}
    ),
    "a layer less": lambda spec: replace(spec, num_layers=spec.num_layers - 1),
}


def checked(path: Path, workdir: Path, precision: str, spec: DecoderSpec) -> dict[str, float]:
    out = workdir / f"check-{precision}"
    if not out.exists():
        export_bundle(str(path), None, out, ExportOptions(precision, tiers=(2,), max_length=64), threads=2)
    bundle = Bundle(out)
    engine = OrtEngine(bundle.path("target/model.onnx"), bundle.manifest.target, threads=2)
    checkpoint = open_checkpoint(str(path))
    ids: NDArray[np.int64] = np.random.default_rng(0).integers(0, 320, 24)
    expected = stored = reference_logits(spec, checkpoint, ids)
    if precision in BITS:
        stored = reference_logits(spec, StoredCheckpoint(checkpoint, "fused", precision), ids)
    return check_engine(engine, ids.tolist(), expected, stored, [precision], path)


@pytest.mark.parametrize("precision", PRECISIONS_OF["fused"])
def test_the_engine_that_was_written_passes(tiny: Path, workdir: Path, precision: str) -> None:
    check = checked(tiny, workdir, precision, decoder_spec(open_checkpoint(str(tiny))))
    assert check["kl_stored"] < 0.02
    if precision == "int4":  # the loss of the precision is reported, and is not the engine's fault
        assert check["kl"] > 2 * check["kl_stored"]


@pytest.mark.parametrize("precision", PRECISIONS_OF["fused"])
@pytest.mark.parametrize("fault", FAULTS)
def test_another_model_does_not(tiny: Path, workdir: Path, precision: str, fault: str) -> None:
    spec = FAULTS[fault](decoder_spec(open_checkpoint(str(tiny))))
    with pytest.raises(OutriderError, match=f"the {precision} engine is not the model in"):
        checked(tiny, workdir, precision, spec)


@pytest.mark.parametrize(("bits", "zero_points"), [(4, False), (4, True), (8, False)])
def test_blocks_come_back_within_half_a_step(bits: int, zero_points: bool) -> None:
    rows = np.random.default_rng(1).standard_normal((7, 80), np.float32)
    blocks = quantize_blocks(rows, bits, zero_points=zero_points)
    back = dequantize_blocks(blocks, bits, 80)
    steps = np.abs(blocks.scales).repeat(32, axis=1)[:, :80]
    # The largest value of a block may lie beyond the last step of the other sign.
    assert (np.abs(back - rows) <= steps * 1.01).all()
    assert np.mean(np.abs(back - rows) <= steps * 0.501) > 0.95
