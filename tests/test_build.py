"""Engines built ahead of time with TensorRT for RTX, without a GPU."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from checkpoints import write_tiny
from conftest import THREADS
from refusals import Change, cli, cut, flip, refused, refused_by_cli, remove

from outrider.engines.bundle import Bundle, EngineFile, sha256_of
from outrider.engines.tensorrt import BuildOptions, build_engine
from outrider.export import ExportOptions, export_bundle

trt = pytest.importorskip("tensorrt_rtx")

RTX = ("--engine", "tensorrt-rtx")


@pytest.fixture(scope="module")
def standard(workdir: Path, tiny: Path, tiny_draft: Path) -> Path:
    out = workdir / "rtx-bundle"
    options = ExportOptions(precision="fp16", lowering="standard", tiers=(2, 4), max_length=96)
    export_bundle(str(tiny), str(tiny_draft), out, options, threads=THREADS)
    return out


@pytest.fixture(scope="module")
def built(standard: Path) -> Path:
    """With the target's engine for sm89."""
    folder = Path(shutil.copytree(standard, standard.with_name("rtx-built")))
    build_engine(Bundle(folder), "target", BuildOptions("tensorrt-rtx", "sm89", (2, 4)))
    return folder


@pytest.fixture
def bundle(built: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(built, tmp_path / "bundle"))


def only_engine(folder: Path) -> EngineFile:
    (engine,) = Bundle(folder).manifest.engines
    return engine


def test_a_real_model_through_the_command(smollm2: Path, tmp_path: Path) -> None:
    """Every plan of SmolLM2; all caches updated in place, all attention fused; the second time it is there already."""
    folder = tmp_path / "bundle"
    options = ExportOptions(precision="fp16", lowering="standard", max_length=512)
    info = export_bundle(str(smollm2), None, folder, options, threads=THREADS).target
    result = cli("build", folder, *RTX, "--arch", "sm89", "--json")
    assert result.exit_code == 0, result.output
    (engine,) = json.loads(result.stdout)["engines"]
    assert engine["plans"] == [[2, 2], [3, 3], [5, 5], [9, 9], [256, 9]]
    layers = engine["layers"]
    assert layers["KV_CACHE_UPDATE"] == engine["aliases"] == 2 * info.num_layers
    assert layers["ATTENTION_INPUT"] == layers["ATTENTION_OUTPUT"] == info.num_layers
    # Normalizations in float32 take four casts a layer; the rest are of sizes and of constants.
    assert layers["CAST"] <= 12 * info.num_layers + 20
    assert engine["built_now"] and engine["bytes"] > (folder / info.weights).stat().st_size

    again = cli("build", folder, *RTX, "--arch", "sm89")
    assert again.stdout.startswith("found") and "60 caches updated in place" in again.stdout
    shown = cli("inspect", folder).stdout
    for words in ("plans of 2, 3, 5, 9, 256 rows", "30 fused attentions", "KV_CACHE_UPDATE 60", "exactness_here"):
        assert words in shown


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False, "kv_heads": 4},
        {"head_dim": 32, "layers": 1, "kv_heads": 1},
        {"biases": True, "attention_bias": True, "mlp_bias": True},
    ],
    ids=["untied", "one-kv-head", "biases"],
)
def test_every_shape_of_the_family(changes: dict[str, Any], tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "model", seed=3, **changes)
    options = ExportOptions(precision="fp16", lowering="standard", tiers=(3,), max_length=64)
    info = export_bundle(str(source), None, tmp_path / "bundle", options, threads=THREADS).target
    engine, _ = build_engine(Bundle(tmp_path / "bundle"), "target", BuildOptions("tensorrt-rtx", "any", (3,)))
    assert engine.layers["ATTENTION_INPUT"] == info.num_layers and engine.aliases == 2 * info.num_layers
    assert [rows for rows, _ in engine.plans] == [2, 4, 256]


def test_an_engine_for_each_model_and_architecture(bundle: Path) -> None:
    seen: list[float] = []
    opened = Bundle(bundle)
    for role, arch in (("target", "sm120"), ("draft", "sm89")):
        options = BuildOptions("tensorrt-rtx", arch, (2, 4))
        _, new = build_engine(opened, role, options, lambda stage, share: seen.append(share))
        assert new
    assert 0 <= min(seen) <= max(seen) <= 1 and len(set(seen)) > 3
    reopened = Bundle(bundle)
    assert reopened.manifest == opened.manifest
    made = {(engine.role, engine.arch) for engine in reopened.manifest.engines}
    assert made == {("target", "sm89"), ("target", "sm120"), ("draft", "sm89")}
    draft = next(engine for engine in reopened.manifest.engines if engine.role == "draft")
    assert draft.plans == ((1, 1), (2, 1), (256, 1))  # it verifies nothing
    for engine in reopened.manifest.engines:
        assert sha256_of(reopened.engine_path(engine)) == reopened.files[engine.file]["sha256"]


def test_only_what_changed_is_built_again(bundle: Path) -> None:
    before = only_engine(bundle)
    options = BuildOptions("tensorrt-rtx", "sm89", (2, 4))
    assert build_engine(Bundle(bundle), "target", options) == (before, False)
    for changed in (
        BuildOptions("tensorrt-rtx", "sm89", (4,)),
        BuildOptions("tensorrt-rtx", "sm89", (0, 4)),
        BuildOptions("tensorrt-rtx", "sm89", (4,), weight_streaming=True),
    ):
        engine, new = build_engine(Bundle(bundle), "target", changed)
        assert new and engine.key != before.key and only_engine(bundle) == engine
        assert [path.name for path in (bundle / "engines").iterdir()] == [Path(engine.file).name]
        before = engine


@pytest.mark.parametrize(
    "damage",
    [
        lambda name: cut(name, lambda size: size // 2),
        lambda name: flip(name, 5000),
        remove,
    ],
    ids=["cut", "one bit", "missing"],
)
def test_a_damaged_engine(damage: Callable[[str], Change], bundle: Path) -> None:
    """The bundle still serves other providers; the engine is refused with the command, which builds it again."""
    damage(only_engine(bundle).file)(bundle)
    opened = Bundle(bundle)
    message = refused(lambda: opened.engine_path(only_engine(bundle)))
    assert f"outrider build {bundle} --engine tensorrt-rtx --arch sm89" in message
    assert cli("generate", bundle, "-p", "the dog", "--max-new-tokens", "3").exit_code == 0
    assert f"DAMAGED: {message}" in cli("inspect", bundle).stdout
    engine, new = build_engine(opened, "target", BuildOptions("tensorrt-rtx", "sm89", (2, 4)))
    assert new and Bundle(bundle).engine_path(engine).is_file()


def test_engines_listed_at_the_same_time(bundle: Path) -> None:
    """None takes another's out of the manifest."""
    before = only_engine(bundle)

    def add(number: int) -> None:
        opened, built = Bundle(bundle), bundle / f"built-{number}"
        built.write_bytes(bytes([number]))
        opened.add_engine(replace(before, file=f"engines/{number}.engine", arch=f"sm{number}"), built)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(24)))
    reopened = Bundle(bundle)
    assert len(reopened.manifest.engines) == 25
    assert all(reopened.engine_path(engine).is_file() for engine in reopened.manifest.engines)


def test_builds_from_one_state(bundle: Path) -> None:
    """Each was opened before the other had built."""
    one, other = Bundle(bundle), Bundle(bundle)
    build_engine(one, "draft", BuildOptions("tensorrt-rtx", "sm89", (2,)))
    build_engine(other, "target", BuildOptions("tensorrt-rtx", "sm120", (2,)))
    assert len(Bundle(bundle).manifest.engines) == 3


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_an_interrupt_leaves_the_bundle_as_it_was(standard: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(standard, tmp_path / "bundle"))
    before = names(folder), (folder / "manifest.json").read_bytes()
    stages: list[str] = []
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it

    def interrupt(stage: str, share: float) -> None:
        stages.append(stage)
        if len(stages) == 5:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        build_engine(Bundle(folder), "target", BuildOptions("tensorrt-rtx", "sm89", (2,)), interrupt)
    assert (names(folder), (folder / "manifest.json").read_bytes()) == before
    assert signal.signal(signal.SIGINT, outside) is signal.default_int_handler
    complete: list[str] = []
    build_engine(
        Bundle(folder), "target", BuildOptions("tensorrt-rtx", "sm89", (2,)), lambda *at: complete.append(at[0])
    )
    assert len(stages) < len(complete) / 2  # it stopped soon


def test_the_command_stops_at_an_interrupt(standard: Path, tmp_path: Path) -> None:
    """Wherever it comes: TensorRT's callbacks into Python pass no exception on."""
    folder = Path(shutil.copytree(standard, tmp_path / "bundle"))
    code = (
        "import os, signal, sys, threading\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from outrider.cli import main; import outrider.engines.tensorrt.build as b\n"
        "begin = b._Network.__init__\n"
        "def later(*args):\n"
        "    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start(); begin(*args)\n"
        "b._Network.__init__ = later; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "build", str(folder), *RTX, "--arch", "sm80,sm86,sm89,sm120,sm121,any"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "Aborted" in done.stderr
    assert len(Bundle(folder).manifest.engines) < 6 and not list(folder.glob("engines/.engine*"))


def test_a_full_disk_leaves_the_bundle_as_it_was(
    standard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(standard, tmp_path / "bundle"))
    manifest = (folder / "manifest.json").read_bytes()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Bundle, "add_engine", full)
    options = BuildOptions("tensorrt-rtx", "sm89", (2,))
    message = refused(lambda: build_engine(Bundle(folder), "target", options))
    assert "No space left on device" in message and str(folder) in message
    assert (folder / "manifest.json").read_bytes() == manifest and not list((folder / "engines").iterdir())


def test_a_graph_that_the_parser_refuses(bundle: Path) -> None:
    """The line names the node and its operator."""
    opened = Bundle(bundle)
    graph = opened.path("target/model.resident.onnx")
    model = onnx.load(graph, load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "Sigmoid")
    node.op_type, node.name = "BlackmanWindow", "odd one"
    graph.write_bytes(model.SerializeToString())
    record = json.loads((bundle / "manifest.json").read_text())
    record["files"]["target/model.resident.onnx"] = {"bytes": graph.stat().st_size, "sha256": sha256_of(graph)}
    (bundle / "manifest.json").write_text(json.dumps(record))
    message = refused_by_cli("build", bundle, *RTX, "--arch", "sm89")
    assert "'odd one'" in message and "BlackmanWindow" in message and str(graph) in message


def test_what_cannot_be_built(tiny_bundle: Path, standard: Path) -> None:
    message = refused_by_cli("build", tiny_bundle, *RTX, "--arch", "sm89")
    assert "int4, fused" in message and "--lowering standard" in message
    message = refused_by_cli("build", standard, *RTX, "--arch", "sm77")
    assert "'sm77'" in message and "sm89, sm120" in message and "any" in message
    assert "tiers" in refused_by_cli("build", standard, *RTX, "--arch", "sm89", "--k", "3")
    assert "K above 0" in refused_by_cli("build", standard, *RTX, "--arch", "sm89", "--k", "0")
    assert "sm999" in refused_by_cli("build", standard, *RTX, "--arch", "sm89,sm999")  # before the first is built
    assert "names no architecture" in refused_by_cli("build", standard, *RTX, "--arch", ",")
    assert "is not a folder" in refused_by_cli("build", standard / "nowhere", *RTX, "--arch", "sm89")
    message = refused_by_cli("build", standard, "--engine", "tensorrt", "--arch", "sm89")
    assert "tensorrt cannot be imported" in message
    assert not (standard / "engines").exists()


def test_an_architecture_without_the_weights_type(tiny: Path, tmp_path: Path) -> None:
    options = ExportOptions(precision="fp8", lowering="standard", tiers=(2,), max_length=64)
    export_bundle(str(tiny), None, tmp_path / "bundle", options, threads=THREADS)
    message = refused_by_cli("build", tmp_path / "bundle", *RTX, "--arch", "sm86")
    assert "fp8 needs sm89 or newer, not sm86" in message and "--precision" in message
    assert build_engine(Bundle(tmp_path / "bundle"), "target", BuildOptions("tensorrt-rtx", "sm89", (2,)))[1]


def test_a_library_that_is_not_installed(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorrt_rtx", None)
    for command in (("build", built, *RTX, "--arch", "sm89"), ("generate", built, "-p", "x", "--provider", RTX[1])):
        message = refused_by_cli(*command)
        assert "tensorrt_rtx cannot be imported" in message and "pip install 'outrider[tensorrt]'" in message


def test_an_engine_is_missed_before_a_gpu(standard: Path) -> None:
    message = refused_by_cli("generate", standard, "-p", "x", "--provider", "tensorrt-rtx")
    assert "no tensorrt-rtx engine for its target" in message
    assert f"outrider build {standard} --engine tensorrt-rtx --arch ARCH" in message


def test_architectures_by_other_names(bundle: Path) -> None:
    for name in ("89", "SM89", "sm_89"):
        assert cli("build", bundle, *RTX, "--arch", name, "--k", "2,4").stdout.splitlines()[0].startswith("found")


def test_no_driver(built: Path) -> None:
    """Decoding names what is missing; inspecting shows all that can be shown without it."""
    try:
        from outrider.engines.cuda import CudaDriver

        CudaDriver()
    except Exception:
        message = refused_by_cli("generate", built, "-p", "x", "--provider", "tensorrt-rtx")
        assert "driver" in message or "GPU" in message
        shown = cli("inspect", built, "--provider", "tensorrt-rtx")
        assert (
            shown.exit_code == 0
            and f"not_here: {message}" in shown.stdout
            and "plans of 2, 3, 5, 256 rows" in shown.stdout
        )
    else:
        pytest.skip("there is a GPU here")
