"""Pipelines whose graphs choose: on the CPU's real engine, and on the stand-in for a GPU."""

from __future__ import annotations

from pathlib import Path

from standin import StandInDriver, engine_bytes, standin_module

from outrider.engines.bundle import Bundle, EngineFile
from outrider.engines.cuda import CudaMemory
from outrider.engines.engine import DRAFT_TABLE, HeadInputs, noise_slots, plan_table
from outrider.engines.memory import HostMemory
from outrider.engines.ort import OrtEngine
from outrider.engines.tensorrt import BuildOptions, TensorrtEngine
from outrider.engines.tensorrt.build import engine_key
from outrider.engines.tensorrt.library import Library, Log
from outrider.runtime import Pipeline


def on_cpu(folder: Path, threads: int = 2) -> Pipeline:
    """The graphs with heads on ONNX Runtime's CPU provider."""
    bundle = Bundle(folder)
    manifest, memory = bundle.manifest, HostMemory()
    models, slots = manifest.models, noise_slots(manifest.tiers)
    heads = {info.tokenizer: HeadInputs(memory, info.vocab_size, slots) for info in models.values()}
    engines = {
        role: OrtEngine(
            bundle.path(info.resident_graph), info, memory=memory, threads=threads, heads=heads[info.tokenizer]
        )
        for role, info in manifest.models.items()
    }
    return Pipeline(bundle, engines["target"], engines.get("draft"))


def standin_library(driver: StandInDriver, version: str = "1.0") -> Library:
    module = standin_module(driver)
    return Library("tensorrt-rtx", module, version, Log(module))


def list_engines(bundle: Bundle, library: Library, arch: str = "sm89", tiers: tuple[int, ...] = ()) -> None:
    """Engine files of the stand-in, as a build leaves them."""
    tiers = tiers or bundle.manifest.tiers
    for role, info in bundle.manifest.models.items():
        table = plan_table(tiers) if role == "target" else DRAFT_TABLE
        key = engine_key(bundle, role, library, BuildOptions(library.name, arch, tiers), table)
        plans = tuple((shape.rows, shape.logit_rows) for shape in table)
        built = bundle.folder / "built"
        built.write_bytes(engine_bytes(bundle.path(info.resident_graph), list(plans)))
        file = f"engines/{role}.{library.version}.{arch}.engine"
        record = EngineFile(file, role, library.name, library.version, arch, key, plans, {}, 4, False, 0.0)
        bundle.add_engine(record, built)


def on_standin(folder: Path, tiers: tuple[int, ...] = ()) -> tuple[Pipeline, StandInDriver]:
    """TensorRT's engines over the stand-in; the bundle gets their files."""
    driver = StandInDriver()
    bundle, library, memory = Bundle(folder), standin_library(driver), CudaMemory(driver)
    list_engines(bundle, library, tiers=tiers)
    bundle = Bundle(folder)
    heads = HeadInputs(memory, bundle.manifest.target.vocab_size, noise_slots(bundle.manifest.tiers))
    engines = {role: TensorrtEngine.load(bundle, role, library, memory, heads) for role in bundle.manifest.models}
    return Pipeline(bundle, engines["target"], engines.get("draft")), driver
