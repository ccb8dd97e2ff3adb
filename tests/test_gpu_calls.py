"""Order and lifetime of the calls to a GPU, over stand-ins for its driver and TensorRT (``standin.py``).

That rounds give the right tokens here says that nothing is read too early, written too soon, freed in use or bound
twice. It says nothing of what a GPU computes.
"""

from __future__ import annotations

import gc
import shutil
import sys
from collections import Counter
from enum import Enum
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoints import write_tiny
from conftest import THREADS
from refusals import refused
from residents import list_engines, on_standin, standin_library
from standin import StandInDriver
from test_resident import LAWS

from outrider.engines.bundle import Bundle
from outrider.engines.cuda import CudaDriver, CudaMemory
from outrider.engines.engine import HeadInputs, noise_slots
from outrider.engines.errors import DeviceMemoryError
from outrider.engines.tensorrt import TensorrtEngine
from outrider.engines.tensorrt.engine import find_engine
from outrider.export import ExportOptions, export_bundle
from outrider.runtime import Pipeline


@pytest.fixture(scope="module")
def standard_bundle(workdir: Path, tiny: Path) -> Path:
    draft, out = write_tiny(workdir / "standard-draft", seed=1, layers=1), workdir / "standard-bundle"
    options = ExportOptions(precision="fp32", lowering="standard", tiers=(2, 4), max_length=160)
    export_bundle(str(tiny), str(draft), out, options, threads=THREADS)
    return out


@pytest.fixture(scope="module")
def host(standard_bundle: Path) -> Pipeline:
    return Pipeline.load(standard_bundle, threads=THREADS)


@pytest.fixture(scope="module")
def device(standard_bundle: Path) -> tuple[Pipeline, StandInDriver]:
    return on_standin(standard_bundle)


@pytest.mark.parametrize("law", LAWS)
def test_the_host_loops_tokens(host: Pipeline, device: tuple[Pipeline, StandInDriver], law: str) -> None:
    pipeline, _ = device
    for prompt, k, drafter in product(("one two three one two three", "d"), (0, 2, 4), ("model", "ngram")):
        options: dict[str, Any] = {"k": k, "drafter": drafter, "max_new_tokens": 50, "ignore_eos": True, **LAWS[law]}
        assert pipeline.generate(prompt, **options).token_ids == host.generate(prompt, **options).token_ids


@pytest.mark.parametrize("drafter", ["model", "ngram", "none"])
@pytest.mark.parametrize("law", ["greedy", "temperature"])
def test_a_round_is_one_launch_and_one_synchronizing_copy(
    device: tuple[Pipeline, StandInDriver], drafter: str, law: str
) -> None:
    """After the first rounds, which record the graphs: the prefills and each round read once, nothing is allocated."""
    pipeline, driver = device
    options: dict[str, Any] = {"k": 4, "drafter": drafter, "max_new_tokens": 60, "ignore_eos": True, **LAWS[law]}
    pipeline.generate("one two three one two three", **options)
    pipeline.clear_caches()
    driver.calls.clear()
    driver.reads = driver.blocked = 0
    stats = pipeline.generate("one two three one two three", **options).stats
    counts = Counter(driver.calls)
    passes = stats.num_spec_steps + 1 + (drafter == "model")  # the draft has a prefill too
    assert driver.reads == driver.blocked == counts["read"] == counts["launch"] == passes
    assert not {"allocate", "clear", "enqueue", "begin_capture"} & counts.keys()
    if drafter == "model" and law == "greedy":  # ids and lengths of the prefills, and the state of the first round
        assert counts["copy"] <= 2 * 3 + 3 + 2


def test_each_shape_is_recorded_once_and_after_it_ran(standard_bundle: Path) -> None:
    pipeline, driver = on_standin(standard_bundle)
    for _ in range(2):
        pipeline.generate("one two three", k=4, drafter="model", max_new_tokens=40, ignore_eos=True)
        pipeline.clear_caches()
    names = [call for call in driver.calls if call in ("enqueue", "begin_capture", "end_capture", "launch")]
    captures = names.count("begin_capture")
    assert captures == names.count("end_capture") > 0
    # What is recorded was enqueued once before, for real; recording enqueues it again, and it never is after that.
    first = names.index("begin_capture")
    assert names[:first] == ["enqueue"] * first
    engines = [pipeline.target_engine, pipeline.draft_engine]
    contexts = [context for engine in engines for context in engine._engine.contexts]  # type: ignore[union-attr]
    assert all(context.ran for context in contexts)
    for _ in range(3):
        driver.calls.clear()
        pipeline.generate("one two three", k=4, drafter="model", max_new_tokens=40, ignore_eos=True)
        pipeline.clear_caches()
    assert "enqueue" not in driver.calls
    assert contexts == [context for engine in engines for context in engine._engine.contexts]  # type: ignore[union-attr]


def test_an_interrupt_while_recording(standard_bundle: Path) -> None:
    """The stream goes on, and the next round records again."""
    memory = CudaMemory(StandInDriver())
    buffer = memory.buffer((4,), "int64")
    other = memory.buffer((4,), "int64")
    fail = False

    def work() -> None:
        memory.copy(buffer, 0, other, 1)
        if fail:
            raise KeyboardInterrupt
        memory.copy(buffer, 3, other, 2)

    launch = memory.recorded(work)
    buffer.write([1, 2, 3, 4])
    launch()
    fail = True
    with pytest.raises(KeyboardInterrupt):
        launch()
    fail = False
    buffer.write([5, 6, 7, 8])
    launch()
    assert other.read().tolist() == [0, 5, 8, 0]


def test_writes_do_not_overtake_copies_on_their_way() -> None:
    """A second write waits until the first has left the page-locked memory that both go through."""
    memory = CudaMemory(StandInDriver())
    source, target = memory.buffer((2,), "int32"), memory.buffer((2,), "int32")
    source.write([1, 2])
    memory.copy(source, 0, target, 0)
    source.write([3, 4])
    memory.copy(source, 0, target, 1)
    assert target.read().tolist() == [1, 3]
    part = source.section(4, (1,), "int32")
    part.write(9)
    assert source.read().tolist() == [3, 9]


def test_memory_is_given_back(standard_bundle: Path) -> None:
    """With the pipeline, and not before: sections keep what they are part of."""
    memory = CudaMemory(driver := StandInDriver())
    section = memory.buffer((512,), "uint8").section(256, (4,), "int32")
    gc.collect()
    section.write(7)
    assert section.read().tolist() == [7] * 4
    del section
    pipeline, device_driver = on_standin(standard_bundle)
    pipeline.generate("one two", k=4, drafter="model", max_new_tokens=20)
    logits = pipeline.target_engine.plan(5, 5).run(np.array([[1, 2, 3, 4, 5]]), np.zeros(1, np.int32))
    before = logits.copy()
    del pipeline, memory
    gc.collect()
    assert np.array_equal(logits, before)  # what was read stays as long as it is looked at
    del logits
    gc.collect()
    assert not driver._alive and not device_driver._alive
    assert driver.handles == device_driver.handles == 0


def test_too_little_memory(standard_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names the engine, and the caches or the plan that asked for it."""

    def allocate(size: int) -> int:
        if size > limit:
            raise DeviceMemoryError(f"the GPU is out of memory: {size} bytes are needed")
        return honest(size)

    for limit, words in ((10_000, "its caches"), (100_000, "the plan of 256 rows")):  # noqa: B007
        bundle, driver = Bundle(standard_bundle), StandInDriver()
        honest, memory = driver.allocate, CudaMemory(driver)
        library = standin_library(driver)
        list_engines(bundle, library)
        heads = HeadInputs(memory, bundle.manifest.target.vocab_size, noise_slots(bundle.manifest.tiers))
        monkeypatch.setattr(driver, "allocate", allocate)
        monkeypatch.setattr("standin._Engine.get_device_memory_size_for_profile_v2", lambda self, index: 10**6 * index)
        message = refused(lambda: TensorrtEngine.load(bundle, "target", library, memory, heads))  # noqa: B023
        assert words in message and "bytes are needed" in message and "target" in message


def test_an_engine_must_fit_device_and_version(standard_bundle: Path, tmp_path: Path) -> None:
    bundle, driver = Bundle(standard_bundle), StandInDriver()
    library = standin_library(driver)
    list_engines(bundle, library)
    assert find_engine(bundle, "target", library, "sm89").arch == "sm89"
    message = refused(lambda: find_engine(bundle, "draft", library, "sm120"))
    assert "sm89" in message and "sm120" in message
    assert f"outrider build {bundle.folder} --engine tensorrt-rtx --arch sm120" in message
    message = refused(lambda: find_engine(bundle, "target", standin_library(driver, "2.0"), "sm89"))
    assert "1.0" in message and "2.0" in message
    list_engines(bundle, library, "any")
    assert find_engine(bundle, "target", library, "sm120").arch == "any"
    assert find_engine(bundle, "target", library, "sm89").arch == "sm89"


def test_a_pass_wider_than_any_plan(device: tuple[Pipeline, StandInDriver]) -> None:
    engine = device[0].target_engine
    assert "257 rows" in refused(lambda: engine.plan(257, 1))
    assert "--k" in refused(lambda: engine.plan(6, 6))


def test_a_tier_that_was_not_built(standard_bundle: Path, tmp_path: Path, host: Pipeline) -> None:
    """It is refused before anything runs; the others serve."""
    pipeline, _ = on_standin(Path(shutil.copytree(standard_bundle, tmp_path / "bundle")), tiers=(2,))
    assert pipeline.tiers == (2,)
    message = refused(lambda: pipeline.generate("one two", k=4))
    assert "0 to 2" in message and "build with --k 4" in message
    found = pipeline.generate("one two", max_new_tokens=9)
    expected = host.generate("one two", k=0, max_new_tokens=9).token_ids
    assert found.k is None and found.token_ids == expected
    wide, _ = on_standin(Path(shutil.copytree(standard_bundle, tmp_path / "wide")), tiers=(4,))
    assert wide.tiers == (4,)
    for k in (None, 1, 2, 3, 4):
        for drafter in ("model", "ngram"):
            assert wide.generate("one two", k=k, drafter=drafter, max_new_tokens=9).token_ids == expected


def test_replays_take_changed_inputs(device: tuple[Pipeline, StandInDriver], host: Pipeline) -> None:
    """Ids and lengths are read anew by every replay (onnxruntime issue 29782)."""
    pipeline, _ = device
    rng = np.random.default_rng(0)
    text = rng.integers(0, 320, (1, 20))
    for start in (0, 5, 3, 10, 1):
        passes = [
            engine.plan(5, 5).run(text[:, start : start + 5], np.array([start], np.int32)).copy()
            for engine in (pipeline.target_engine, host.target_engine)
        ]
        assert np.abs(passes[0] - passes[1]).max() < 1e-4
    for model in (pipeline, host):
        model.clear_caches()


def test_compiled_kernels_are_kept(standard_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the next process; what is damaged, or cannot be written, is as if it was not there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def kernels() -> list[Path]:
        pipeline, _ = on_standin(standard_bundle)
        pipeline.generate("one two", k=4, drafter="model", max_new_tokens=5)
        del pipeline
        gc.collect()
        return sorted((tmp_path / "outrider" / "kernels").iterdir())

    first = kernels()
    contents = [path.read_bytes() for path in first]
    assert len(first) == 2 and all(content.count(b"kernel") > 2 for content in contents)
    assert kernels() == first
    assert all(len(path.read_bytes()) > len(content) for path, content in zip(first, contents, strict=True))
    for path in first:
        path.write_bytes(b"cut")
    assert kernels() == first
    assert [path.read_bytes() for path in first] == contents
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # where no folder can be made
    pipeline, _ = on_standin(standard_bundle)
    assert pipeline.generate("one two", k=4, max_new_tokens=5).token_ids


class _Status(Enum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorIllegalAddress = 700


def runtime(status: _Status, count: int = 1, **calls: Any) -> SimpleNamespace:
    """As much of cuda-bindings' runtime as opening a device takes."""
    done = _Status.cudaSuccess
    properties = SimpleNamespace(name=b"GPU\0", major=8, minor=9)
    return SimpleNamespace(
        cudaError_t=_Status,
        cudaGetDeviceCount=lambda: (status, count),
        cudaRuntimeGetVersion=lambda: (done, 13050),
        cudaSetDevice=lambda device: (done,),
        cudaGetDeviceProperties=lambda device: (done, properties),
        cudaGetErrorString=lambda code: (done, b"something"),
        **calls,
    )


def test_what_the_driver_refuses_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(module: Any) -> CudaDriver:
        package = ModuleType("cuda.bindings")
        package.runtime = module  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cuda.bindings", package if module else None)  # type: ignore[arg-type]
        return CudaDriver()

    message = refused(lambda: opened(None))
    assert "pip install cuda-bindings" in message
    message = refused(lambda: opened(runtime(_Status.cudaErrorInsufficientDriver)))
    assert "NVIDIA driver" in message and "CUDA 13" in message
    for status, count in ((_Status.cudaErrorNoDevice, 0), (_Status.cudaSuccess, 0)):
        message = refused(lambda: opened(runtime(status, count)))  # noqa: B023
        assert "no GPU" in message and status.name in message
    out_of_memory = runtime(
        _Status.cudaSuccess,
        cudaMalloc=lambda size: (_Status.cudaErrorMemoryAllocation, 0),
        cudaMemGetInfo=lambda: (_Status.cudaSuccess, 5_000_000, 8_000_000),
        cudaStreamNonBlocking=1,
        cudaStreamCreateWithFlags=lambda flags: (_Status.cudaErrorIllegalAddress, None),
    )
    driver = opened(out_of_memory)
    assert (driver.name, driver.arch) == ("GPU", "sm89")
    message = refused(lambda: driver.allocate(10**7))
    assert "10 MB are needed, 5 of 8 MB are free" in message and "--max-length" in message
    assert "something (cudaErrorIllegalAddress)" in refused(driver.new_stream)
