"""Large checkpoints: room planned before the start, interruptions gone on from, checks that fit into memory."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_tiny
from refusals import cli, cut, refused, refused_by_cli, remove, write
from safetensors.numpy import load_file, save_file

from outrider.engines.bundle import Bundle
from outrider.export import ExportOptions, export, export_bundle, weights
from outrider.export import model as model_export
from outrider.export.huggingface import HuggingFaceCheckpoint
from outrider.export.precision import PRECISIONS_OF

SMALL: dict[str, Any] = {"tiers": (2, 4), "max_length": 96}
STEPS = [1, 4, 6, 7]  # of 14: the embedding, layers, the head, the check of the target
FORMATS = [(lowering, precision) for lowering, names in PRECISIONS_OF.items() for precision in names]


@pytest.fixture(scope="module")
def source(workdir: Path) -> Path:
    return write_tiny(workdir / "big", seed=6, layers=4, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def whole(source: Path, workdir: Path) -> dict[str, bytes]:
    out = workdir / "big-whole"
    export_bundle(str(source), "layers:1-2", out, ExportOptions(**SMALL), threads=2)
    return contents(out)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stop_at(step: int) -> Any:
    def progress(stage: str, done: int, total: int) -> None:
        if done == step:
            raise KeyboardInterrupt

    return progress


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals are for large models; here each part is worth one."""
    monkeypatch.setattr(weights, "_MARK_BYTES", 1)


@pytest.mark.parametrize(("lowering", "precision"), FORMATS)
def test_the_plan_is_what_is_written(source: Path, tmp_path: Path, lowering: str, precision: str) -> None:
    options = ExportOptions(precision, lowering, **SMALL)
    jobs, _ = export._plan(str(source), "layers:0", options)
    export_bundle(str(source), None, tmp_path / "out", options, threads=2)
    assert jobs["target"].planned_bytes() == (tmp_path / "out" / "target" / "weights.bin").stat().st_size


def test_a_disk_that_is_too_small(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    message = refused(lambda: export_bundle(str(source), None, tmp_path / "out", ExportOptions(**SMALL)))
    assert str(tmp_path / "out") in message and "0.0 GB free" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.usefixtures("marks")
def test_an_interrupted_export_goes_on(
    step: int, source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written is not read again before the check, and the bundle is the same bytes."""
    out, options = tmp_path / "out", ExportOptions(**SMALL)
    with pytest.raises(KeyboardInterrupt):
        export_bundle(str(source), "layers:1-2", out, options, threads=2, progress=stop_at(step))
    (left,) = tmp_path.iterdir()
    message = refused(lambda: export_bundle(str(source), "layers:1-2", out, options, threads=2))
    assert str(left) in message and "--resume" in message
    read: list[str] = []
    original = HuggingFaceCheckpoint.read

    def reading(self: HuggingFaceCheckpoint, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        read.append(name)
        return original(self, name, start, stop)

    monkeypatch.setattr(HuggingFaceCheckpoint, "read", reading)
    with pytest.raises(KeyboardInterrupt):  # before the check, which reads all
        export_bundle(str(source), "layers:1-2", out, options, threads=2, resume=True, progress=stop_at(6))
    layers_written = max(0, min(step, 5) - 1)
    again = {name.split(".")[2] for name in read if name.endswith("q_proj.weight")}
    assert again == {str(layer) for layer in range(layers_written, 4)}
    export_bundle(str(source), "layers:1-2", out, options, threads=2, resume=True)
    assert contents(out) == whole
    assert list(tmp_path.iterdir()) == [out]


def test_killed_in_the_middle(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    script = (
        "import os, sys; from outrider.export import ExportOptions, export_bundle, weights; weights._MARK_BYTES = 1;"
        "export_bundle(sys.argv[1], 'layers:1-2', sys.argv[2], ExportOptions(tiers=(2, 4), max_length=96), threads=2,"
        "progress=lambda stage, done, total: done == 3 and os._exit(9))"
    )
    done = subprocess.run([sys.executable, "-c", script, source, tmp_path / "out"], timeout=300)
    assert done.returncode == 9
    export_bundle(str(source), "layers:1-2", tmp_path / "out", ExportOptions(**SMALL), threads=2, resume=True)
    assert contents(tmp_path / "out") == whole


@pytest.mark.usefixtures("marks")
def test_another_order_does_not_go_on(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        export_bundle(str(source), None, out, ExportOptions(**SMALL), threads=2, progress=stop_at(3))
    before = contents(tmp_path)
    for options in (ExportOptions("int8", **SMALL), ExportOptions(tiers=(2,), max_length=96)):
        message = refused(lambda options=options: export_bundle(str(source), None, out, options, resume=True))
        assert "other options" in message and "remove it" in message
    os.utime(source / "config.json")
    message = refused(lambda: export_bundle(str(source), None, out, ExportOptions(**SMALL), resume=True))
    assert "another checkpoint" in message
    assert contents(tmp_path) == before


@pytest.mark.usefixtures("marks")
def test_damaged_notes_of_an_interrupted_export(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """They are refused with what to do, and nothing of the export is touched; a note half written is no harm."""

    def run(progress: Any = lambda *_: None) -> None:
        options = ExportOptions(**SMALL)
        export_bundle(str(source), "layers:1-2", tmp_path / "out", options, threads=2, resume=True, progress=progress)

    with pytest.raises(KeyboardInterrupt):
        run(stop_at(3))
    (left,) = tmp_path.iterdir()
    order, journal, stored = ".order.json", "target/.journal.json", "target/weights.bin"
    damages = [cut(order, lambda size: size // 2), remove(order), cut(journal, lambda size: size - 9)]
    damages += [write(journal, "[]"), write(journal, b"\xff"), write(journal, "{}"), cut(stored, lambda size: 0)]
    for damage in damages:
        kept = contents(left)
        damage(left)
        before = contents(tmp_path)
        message = refused(run)
        assert message.startswith(f"{left} is an interrupted export that cannot go on (") and "remove it" in message
        assert contents(tmp_path) == before
        for name, content in kept.items():
            (left / name).write_bytes(content)
    (left / "target" / ".journal.json.new").write_text('{"end')
    run()
    assert contents(tmp_path / "out") == whole


@pytest.mark.usefixtures("marks")
def test_two_exports_at_once(source: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        export_bundle(str(source), None, tmp_path / "out", ExportOptions(**SMALL), threads=2, progress=stop_at(3))
    (left,) = tmp_path.iterdir()
    handle = os.open(left, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    options = ExportOptions(**SMALL)
    message = refused(lambda: export_bundle(str(source), None, tmp_path / "out", options, resume=True))
    assert "another process is writing" in message
    os.close(handle)
    export_bundle(str(source), None, tmp_path / "out", options, threads=2, resume=True)


@pytest.mark.usefixtures("marks")
def test_the_command_says_how_to_go_on(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["export", "--target", source, "--draft", "none", "--out", tmp_path / "out", "--max-length", 96]
    mark, calls = weights.WeightFile.mark, []
    stops = {3: KeyboardInterrupt(), 5: OSError(errno.ENOSPC, "No space left on device")}

    def stopped(self: weights.WeightFile) -> None:
        mark(self)
        calls.append(self)
        if len(calls) in stops:
            raise stops[len(calls)]

    monkeypatch.setattr(weights.WeightFile, "mark", stopped)
    message = refused_by_cli(*command)
    assert message.startswith("interrupted; ") and "--resume" in message
    (left,) = tmp_path.iterdir()
    message = refused_by_cli(*command, "--resume")
    assert message.startswith(f"could not write {tmp_path / 'out'}: No space left on device; {left} keeps ")
    assert "--resume" in message and list(tmp_path.iterdir()) == [left]
    assert cli(*command, "--resume").exit_code == 0
    assert Bundle(tmp_path / "out").manifest.target.num_layers == 4


def test_a_model_larger_than_memory_is_checked_in_part(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_export, "memory_bytes", lambda: 100_000)
    export_bundle(str(source), "layers:1-2", tmp_path / "out", ExportOptions(**SMALL), threads=2)
    found = contents(tmp_path / "out")
    manifest = Bundle(tmp_path / "out").manifest
    assert manifest.target.check["layers"] == 2 and manifest.target.exactness == "bitwise"
    assert {name for name in found if found[name] != whole[name]} == {"manifest.json"}
    # What is compared are the very bytes of the bundle: of another layer they are another model.
    other = Path(shutil.copytree(source, tmp_path / "other"))
    file = other / "model-00001.safetensors"
    tensors = load_file(file)
    name = "model.layers.3.mlp.down_proj.weight"
    save_file(tensors | {name: -tensors[name]}, file)
    jobs, _ = export._plan(str(other), None, ExportOptions(**SMALL))
    job = jobs["target"]
    assert "is not the model in" in refused(
        lambda: job.check(tmp_path / "out", manifest.target, list(range(32)), 2, lambda part: None)
    )


def test_values_that_float16_does_not_hold(source: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(source, tmp_path / "other"))
    file = other / "model-00001.safetensors"
    tensors = load_file(file)
    name = "model.layers.3.mlp.down_proj.weight"
    tensors[name][5, 7] = -7e4
    save_file(tensors, file)
    message = refused(lambda: export_bundle(str(other), None, tmp_path / "out", ExportOptions("fp16", **SMALL)))
    assert "layer.3.mlp" in message and "7e+04" in message and "65504" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("lowering", "precision"), [("fused", "fp16"), ("standard", "int4")])
def test_activations_that_float16_does_not_hold(source: Path, tmp_path: Path, lowering: str, precision: str) -> None:
    """As Gemma's: the weights fit, what is computed of them does not."""
    other = Path(shutil.copytree(source, tmp_path / "other"))
    file = other / "model-00001.safetensors"
    tensors = load_file(file)
    for part in ("up", "down"):
        tensors[f"model.layers.3.mlp.{part}_proj.weight"] *= 5e3
    save_file(tensors, file)
    options = ExportOptions(precision, lowering, **SMALL)
    message = refused(lambda: export_bundle(str(other), None, tmp_path / "out", options, threads=2))
    assert message.startswith(f"the {precision} engine of {other} gives no numbers: activations leave float16's range")
    assert "--precision fp32 or int8" in message and not (tmp_path / "out").exists()
