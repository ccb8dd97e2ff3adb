"""What ONNX Runtime is told on each provider. Run this file to write the golden file anew."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engines import providers
from outrider.engines.bundle import ModelInfo
from outrider.engines.engine import PlanShape, plan_table
from outrider.engines.errors import OutriderError
from outrider.engines.providers import PROVIDERS, ProviderSetup, provider_setup, run_config
from outrider.export import ExportOptions, export_bundle

GOLDEN = Path(__file__).with_name("golden") / "providers.json"
GRAPH = Path("target/model.onnx")
TABLE = plan_table((0, 2, 4, 8))
LOWERING = {"cpu": "fused", "cuda": "fused", "ort-tensorrt": "standard", "ort-tensorrt-rtx": "standard"}
TENSORRT = [provider for provider in PROVIDERS if provider.startswith("ort-")]
INFO = ModelInfo(
    graph="target/model.onnx",
    architecture="LlamaForCausalLM",
    lowering="standard",
    precision="fp16",
    head_precision="fp16",
    num_layers=2,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=64,
    capacity=128,
    cache_dtype="float16",
    min_rows=1,
    exactness="bitwise",
    device="a device",
    check={"error": 0.5},
)


def setup(provider: str, **options: Any) -> ProviderSetup:
    table = options.pop("table", TABLE)
    return provider_setup(provider, replace(INFO, lowering=LOWERING[provider]), GRAPH, table, **options)


def golden(provider: str) -> dict[str, Any]:
    made = asdict(setup(provider, batch=2, stream=4096, cache=Path("cache/0123456789abcdef")))
    runs = [run_config(provider, index + 1, index) for index in range(len(TABLE))]
    return {**made, "model": made["model"].as_posix(), "runs": runs}


def profiles(options: dict[str, str]) -> list[tuple[PlanShape, PlanShape, PlanShape]]:
    """Least, best and greatest shape of each profile, read as the providers do (``ParseProfileShapes``)."""
    bounds = []
    for bound in ("min", "opt", "max"):
        (text,) = [value for name, value in options.items() if name.endswith(f"_profile_{bound}_shapes")]
        lists: dict[str, list[int]] = {}
        for entry in text.split(","):
            name, shape = entry.split(":")
            lists.setdefault(name, []).append(int(shape.split("x")[1]))
        assert lists.keys() == {"input_ids", "logit_rows"}
        bounds.append([PlanShape(*sizes) for sizes in zip(lists["input_ids"], lists["logit_rows"], strict=True)])
    return list(zip(*bounds, strict=True))


def holds(profile: tuple[PlanShape, PlanShape, PlanShape], shape: PlanShape) -> bool:
    low, _, high = profile
    return all(least <= size <= most for least, size, most in zip(low, shape, high, strict=True))


def refusal(*args: Any) -> str:
    with pytest.raises(OutriderError) as caught:
        providers.check_provider(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_options_are_the_golden_ones(provider: str) -> None:
    """Every option of every provider, word for word: a change of one must be meant."""
    wanted = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert golden(provider) == wanted[provider], "if this is meant, run `.venv/bin/python tests/test_providers.py`"


@given(tiers=st.sets(st.integers(1, 32), min_size=1, max_size=6), batch=st.integers(1, 8))
def test_every_plan_runs_in_a_profile(tiers: set[int], batch: int) -> None:
    """TensorRT runs its first profile only, TensorRT RTX the one that a plan's run options name."""
    table = plan_table(sorted(tiers))
    (one,) = profiles(setup("ort-tensorrt", table=table, batch=batch).options)
    many = profiles(setup("ort-tensorrt-rtx", table=table, batch=batch).options)
    for profile in (one, *many):
        assert holds(profile, profile[1])
    for index, shape in enumerate(table):
        assert holds(one, shape)
        assert many[int(run_config("ort-tensorrt-rtx", index + 1, index)["nv_profile_index"])] == (shape, shape, shape)
    assert len(many) == len(table)
    assert one[1].rows == max(tiers | {1}) + 1  # the best shape is a pass of generation, not of prefill


@pytest.mark.parametrize("provider", TENSORRT)
@pytest.mark.parametrize("batch", [1, 3])
def test_shapes_begin_with_the_batch(provider: str, batch: int) -> None:
    shapes = [value for name, value in setup(provider, batch=batch).options.items() if name.endswith("_shapes")]
    assert len(shapes) == 3
    for entry in ",".join(shapes).split(","):
        assert re.fullmatch(rf"\w+:{batch}x\d+", entry)


def test_profiles_name_what_varies_in_a_graph(tiny: Path, tmp_path: Path) -> None:
    """With the batch fixed, a real graph has no other inputs of open shape: the providers want all in the profile."""
    options = ExportOptions(precision="fp16", lowering="standard", tiers=(2, 4), max_length=64)
    info = export_bundle(str(tiny), None, tmp_path / "bundle", options, threads=2).target
    made = provider_setup("ort-tensorrt", info, tmp_path / "bundle" / info.graph, plan_table((2, 4)), batch=2)
    session_options = ort.SessionOptions()
    for name, size in made.free_dimensions.items():
        session_options.add_free_dimension_override_by_name(name, size)
    session = ort.InferenceSession(str(made.model), session_options, providers=["CPUExecutionProvider"])
    shapes = {entry.name: entry.shape for entry in session.get_inputs()}
    assert {name for name, shape in shapes.items() if any(isinstance(size, str) for size in shape)} == {
        "input_ids",
        "logit_rows",
    }
    assert shapes["past_key.0"][0] == shapes["input_ids"][0] == 2


@pytest.mark.parametrize("provider", TENSORRT)
def test_a_compiled_graph_is_opened_and_not_written_again(provider: str, tmp_path: Path) -> None:
    first = setup(provider, cache=tmp_path)
    written = {**first.options, **first.session_config}
    (context,) = [Path(value) for name, value in written.items() if name.endswith("context_file_path")]
    assert first.model == GRAPH and context.parent == tmp_path
    context.touch()
    second = setup(provider, cache=tmp_path)
    assert second.model == context
    assert not [name for name in {**second.options, **second.session_config} if "context" in name]
    assert profiles(second.options) == profiles(first.options)


def test_tensorrt_engines_lie_in_the_cache(tmp_path: Path) -> None:
    """Both sessions must mean the same folder: relative to the context when that is written, else to nothing."""
    first = setup("ort-tensorrt", cache=tmp_path).options
    context = Path(first["trt_ep_context_file_path"])
    context.touch()
    second = setup("ort-tensorrt", cache=tmp_path).options
    assert not Path(first["trt_engine_cache_path"]).is_absolute()
    assert context.parent / first["trt_engine_cache_path"] == Path(second["trt_engine_cache_path"])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_option_is_said_once(provider: str) -> None:
    """Not under two names, and not both to the provider and to the session (then the provider's wins unseen)."""
    made = setup(provider, stream=1, cache=Path("cache/key"))
    names = [re.sub(r"^(trt_dump_|trt_|nv_|session\.)", "", name) for name in (*made.options, *made.session_config)]
    names = [
        name.replace("ep_context_model", "ep.context_enable").replace("ep_context", "ep.context") for name in names
    ]
    assert len(names) == len(set(names))
    assert all(isinstance(value, str) for value in (*made.options.values(), *made.session_config.values()))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_nothing_of_a_stream_or_a_cache_without_one(provider: str) -> None:
    made = setup(provider)
    assert not re.search("stream|cache|context", json.dumps([made.options, made.session_config]))
    with_stream = setup(provider, stream=7).options.items() - made.options.items()
    given_stream = {("has_user_compute_stream", "1"), ("user_compute_stream", "7")}
    assert with_stream == (set() if provider == "cpu" else given_stream)


def test_runs_end_with_the_device_unless_the_caller_waits() -> None:
    name = "disable_synchronize_execution_providers"
    assert [name in run_config(provider, 1, 0) for provider in PROVIDERS] == [False] * 4
    assert [name in run_config(provider, 1, 0, own_stream=True) for provider in PROVIDERS] == [False, True, True, True]


def test_cache_key_changes_with_each_part() -> None:
    options = {"a": "1", "b": "2"}
    parts: list[Any] = [INFO, "ab", "1.32.0, 10.15", "a device", options]
    key = providers.cache_key(*parts)
    assert re.fullmatch("[0-9a-f]{16}", key)
    others: list[list[Any]] = [
        [INFO, "ac", *parts[2:]],
        [*parts[:2], "1.32.1, 10.15", *parts[3:]],
        [*parts[:3], "another device", options],
        [*parts[:4], {"a": "1", "b": "3"}],
        [*parts[:4], {"a": "1"}],
        [INFO, "a", "b1.32.0, 10.15", *parts[3:]],  # the same characters, cut elsewhere
    ]
    for name, value in asdict(INFO).items():
        added: Any = {"another": 1} if isinstance(value, dict) else 1 if isinstance(value, int) else "x"
        changed = value | added if isinstance(value, dict) else value + added
        others.append([replace(INFO, **{name: changed}), *parts[1:]])
    keys = [providers.cache_key(*other) for other in others]
    assert len({key, *keys}) == len(keys) + 1
    assert providers.cache_key(*parts[:4], {"b": "2", "a": "1"}) == key


def test_what_each_provider_runs() -> None:
    """Every other precision and lowering is refused in a line that names one that is accepted."""
    accepted = {
        ("cpu", "fused"): {"fp32", "fp16", "int8", "int4", "fp8"},
        ("cpu", "standard"): {"fp32", "fp16", "int8", "int4", "fp8"},
        ("cuda", "fused"): {"fp16"},
        ("ort-tensorrt", "standard"): {"fp32", "fp16", "bf16", "int4", "fp8"},
        ("ort-tensorrt-rtx", "standard"): {"fp32", "fp16", "bf16", "int4", "fp8"},
    }
    precisions = ("fp32", "fp16", "bf16", "int8", "int4", "fp8")
    for provider, lowering, precision in product(PROVIDERS, ("fused", "standard"), precisions):
        info = replace(INFO, lowering=lowering, precision=precision, head_precision=precision)
        if precision in accepted.get((provider, lowering), set()):
            providers.check_provider(provider, info, GRAPH)
            continue
        message = refusal(provider, info, GRAPH)
        assert message.startswith(f"{GRAPH} is {precision}, {lowering}; the {provider} provider runs --precision ")
        wanted = re.search(r"--precision (\w+).*?(?:--lowering (\w+))?$", message)
        assert wanted and wanted[1] in accepted[provider, wanted[2] or lowering]
        with pytest.raises(OutriderError, match="provider runs"):
            provider_setup(provider, info, GRAPH, TABLE)


@pytest.mark.parametrize("apart", [{"head_precision": "int8"}, {"tensor_precision": {"*.down_proj": "int8"}}])
def test_matrices_of_another_precision_count_too(apart: dict[str, Any]) -> None:
    info = replace(INFO, lowering="fused", **apart)
    providers.check_provider("cpu", info, GRAPH)
    assert refusal("cuda", info, GRAPH).startswith(f"{GRAPH} is fp16 and int8, fused; the cuda provider runs ")


def test_unknown_provider_is_refused_with_the_choices() -> None:
    message = refusal("rocm", INFO, GRAPH)
    assert message == "unknown provider 'rocm'; choose one of cpu, cuda, ort-tensorrt, ort-tensorrt-rtx"
    with pytest.raises(OutriderError, match=message):
        run_config("rocm", 1, 0)


def test_imports_without_onnxruntime() -> None:
    code = "import sys; sys.modules['onnxruntime'] = None; import outrider.engines.providers"
    subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
    written = {provider: golden(provider) for provider in PROVIDERS}
    GOLDEN.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
