"""``scripts/gpu_check.py`` without a GPU: on the CPU, and its checks over the stand-in for one."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import gpu_check
import gpu_pair
import gpu_provider
import gpu_speed
import numpy as np
import pytest
from residents import list_engines, standin_library
from standin import StandInDriver

from outrider.engines.bundle import Bundle
from outrider.engines.cuda import CudaMemory
from outrider.engines.engine import Engine, HeadInputs, noise_slots
from outrider.engines.errors import DeviceMemoryError, OutriderError
from outrider.engines.tensorrt import TensorrtEngine

SCRIPT = Path(gpu_check.__file__)
CHECKS = ["parity", "rows", "replay", "rounds"]


def run(out: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout, json.loads(out.read_text())


def test_on_the_cpu_every_part_runs_and_writes_its_figures(tmp_path: Path) -> None:
    code, printed, report = run(tmp_path / "out.json", "--cpu")
    parts = report["parts"]
    assert code == 0, printed
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(
        ("environment", "cpu", "speed"), "ok"
    )
    assert parts["environment"]["figures"]["packages"]["onnxruntime"]
    checks = parts["cpu"]["figures"]["checks"]
    assert list(checks) == CHECKS
    assert checks["parity"]["max_difference"] == 0 and checks["parity"]["same_argmax"] == 1
    assert checks["replay"]["plans"] == len(gpu_pair.shapes_of("target")) + len(gpu_pair.shapes_of("draft"))
    ways = {(arm["law"], arm["drafter"], arm["k"], arm["way"]) for arm in checks["rounds"]["arms"]}
    assert len(ways) == len(checks["rounds"]["arms"]) == 2 * 2 * (1 + 2 * len(gpu_pair.TIERS))
    lengths = [arm["mean_acceptance_length"] for arm in checks["rounds"]["arms"] if arm["drafter"] == "model"]
    assert min(lengths) > 1 and max(lengths) < 9  # refused and accepted drafts, both
    speed = parts["speed"]["figures"]
    assert speed["plain"]["ms_per_token"] > 0 and speed["passes"]["v"].keys() == {"2", "4", "8"}
    cells = {(cell["length"], cell["k"]) for cell in speed["sweep"]["cells"]}
    assert cells == {(length, k) for length in (1.5, 2, 3, 4) for k in (2, 4, 8) if length <= k + 1}
    # Goals of a size that is not run here are not measured; the others have a figure.
    assert [goal["met"] is None for goal in report["goals"]] == [goal["figure"] is None for goal in report["goals"]]
    assert report["goals"][0]["met"] and report["goals"][0]["figure"] == "cpu bitwise"
    assert all(name in printed for name in (*parts, *CHECKS, "goal"))


def test_a_part_that_fails_says_why_and_the_others_run(tmp_path: Path) -> None:
    code, printed, report = run(tmp_path / "out.json", "--cpu", "--checkpoint", str(tmp_path / "none.gguf"))
    assert code == 1
    assert (
        report["parts"]["cpu"]["status"] == "failed" and "none.gguf does not exist" in report["parts"]["cpu"]["reason"]
    )
    assert "none.gguf does not exist" in printed
    assert report["parts"]["environment"]["status"] == report["parts"]["speed"]["status"] == "ok"


def test_what_cannot_run_here_is_skipped_with_the_reason(tmp_path: Path) -> None:
    code, printed, report = run(tmp_path / "out.json", "--provider", "cuda", "--provider", "ort-tensorrt")
    if report["parts"]["cuda"]["status"] != "skipped":
        pytest.skip("there is a GPU")
    assert code == 1  # they were asked for
    for name, part in report["parts"].items():
        assert part["status"] == ("ok" if name == "environment" else "skipped")
        assert name == "environment" or part["reason"] in printed
    assert [goal["met"] for goal in report["goals"]] == [None] * 4


def test_parts_behind_the_budget_are_skipped(tmp_path: Path) -> None:
    code, _, report = run(tmp_path / "out.json", "--cpu", "--budget", "0")
    assert code == 2
    assert report["parts"]["environment"]["status"] == "ok"
    for name in ("cpu", "speed"):
        assert report["parts"][name]["status"] == "skipped" and report["parts"][name]["reason"]


def test_a_part_that_dies_or_hangs_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = gpu_check.Run(tmp_path, 60, None)
    for code, said in (
        ("import os; os.kill(os.getpid(), 9)", "ended with -9"),
        ("raise ValueError(3)", "ended with 1: ValueError: 3"),
    ):
        script = tmp_path / "part.py"
        script.write_text(code)
        monkeypatch.setattr(gpu_check, "__file__", str(script))
        found = run.part("environment", 20)
        assert found["status"] == "failed" and said in found["reason"] and found["figures"] == {}
    script.write_text(
        "import sys, time; from pathlib import Path\n"
        "result = Path(sys.argv[sys.argv.index('--result') + 1])\n"
        'result.write_text(\'{"status": "running", "figures": {"a": 1}}\'); time.sleep(60)'
    )
    found = run.part("environment", 1)
    assert found["status"] == "failed" and "not done" in found["reason"] and found["figures"] == {"a": 1}


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (gpu_pair.SkippedError("no driver"), "skipped", "no driver"),
        (DeviceMemoryError("the GPU is out of memory: 9 MB"), "failed", "the GPU is out of memory: 9 MB"),
        (OutriderError("refused"), "failed", "refused"),
        (ValueError("x\ny"), "failed", "ValueError: x"),
        (gpu_pair.FaultError("wrong", {"figure": 1}), "failed", "wrong"),
    ],
)
def test_verdicts(error: Exception, status: str, reason: str) -> None:
    found = gpu_pair.verdict(error)
    assert (found["status"], found["reason"]) == (status, reason)
    assert ("figure" in found) == isinstance(error, gpu_pair.FaultError)


@pytest.mark.parametrize(
    ("statuses", "asked", "code"),
    [
        ({"environment": "ok", "cuda": "ok", "speed": "ok"}, (), 0),
        ({"environment": "ok", "cuda": "ok", "tensorrt": "skipped", "speed": "skipped"}, (), 0),
        ({"environment": "ok", "cuda": "ok", "tensorrt": "skipped", "speed": "ok"}, ("tensorrt",), 1),
        ({"environment": "ok", "cuda": "failed", "speed": "ok"}, (), 1),
        ({"environment": "ok", "cuda": "skipped", "speed": "skipped"}, (), 2),
    ],
)
def test_success_means_that_something_ran(statuses: dict[str, str], asked: tuple[str, ...], code: int) -> None:
    assert gpu_check.exit_code({name: {"status": status} for name, status in statuses.items()}, asked) == code


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA error: Out of memory"), ValueError("odd")])
def test_only_the_large_pair_may_be_too_large(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*_: Any) -> None:
        raise error

    monkeypatch.setattr(gpu_speed, "check_speed", check)
    kind = ValueError if isinstance(error, ValueError) else gpu_pair.SkippedError
    with pytest.raises(kind):
        gpu_check._part("speed:cuda", Path(), None, 1.0, lambda figures: None)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [1, 1.25, 1.5, 2, 2.75, 3, 4, 9])
def test_the_imposed_rate_gives_the_length(length: float, k: int) -> None:
    """To the last bit: the next smaller float gives too little, in exact arithmetic up to rounding of the sum."""
    if length > k + 1:
        with pytest.raises(ValueError, match=f"not {length}"):
            gpu_speed.acceptance_rate(length, k)
        return
    rate = gpu_speed.acceptance_rate(length, k)
    below, above = (Fraction(math.nextafter(rate, end)) for end in (0.0, 2.0))
    slack = Fraction(1, 10**14)
    assert sum(below**power for power in range(1, k + 1)) - slack <= Fraction(length) - 1
    assert sum(above**power for power in range(1, k + 1)) + slack >= Fraction(length) - 1


def test_rates_that_are_known() -> None:
    assert gpu_speed.acceptance_rate(1.25, 1) == 0.25
    assert gpu_speed.acceptance_rate(3, 2) == 1
    assert gpu_speed.acceptance_rate(9, 8) == 1
    assert gpu_speed.acceptance_rate(2, 2) == pytest.approx((math.sqrt(5) - 1) / 2, abs=1e-15)
    assert gpu_speed.acceptance_rate(1.75, 2) == 0.5


@pytest.mark.parametrize("k", [2, 4, 8])
def test_drawn_counts_have_the_law_of_the_rate(k: int) -> None:
    rate = gpu_speed.acceptance_rate(2.5, k)
    counts = np.array(gpu_speed.accepted_counts(rate, k, 1000, seed=1))
    assert abs(counts.mean() + 1 - 2.5) < k / 1000
    for count in range(1, k + 1):
        assert abs((counts >= count).mean() - rate**count) <= 1 / 1000
    assert not np.array_equal(counts, np.sort(counts))
    assert gpu_speed.accepted_counts(1, k, 7, seed=2) == [k] * 7


def test_a_pair_that_does_not_fit_is_named_and_a_smaller_one_taken() -> None:
    shapes = {name: {"target": shape, "draft": gpu_provider.TINY} for name, shape in sizes().items()}
    sizes_of = [
        sum(gpu_speed.weight_bytes(model.spec, "fp32") for model in gpu_pair.random_pair(shapes[name]).values())
        for name in shapes
    ]
    room = gpu_speed.Room(disk=1.1 * sizes_of[1], device=1e12, host=1e12, seconds=100, seconds_a_byte=0)
    name, pair, refused = gpu_speed.choose_pair(shapes, "cpu", room)
    assert name == "small" and pair["target"].spec.hidden_size == 64
    assert len(refused) == 1 and refused[0].startswith("large needs more disk: ")
    slow = gpu_speed.Room(disk=1e12, device=1e12, host=1e12, seconds=1, seconds_a_byte=1)
    with pytest.raises(gpu_pair.SkippedError, match="no pair fits: large needs more time"):
        gpu_speed.choose_pair(shapes, "cpu", slow)


def sizes() -> dict[str, dict[str, int]]:
    return {"large": {**gpu_provider.TINY, "layers": 40}, "small": gpu_provider.TINY}


def test_the_shapes_are_those_of_llama() -> None:
    billions = {}
    for name, shapes in gpu_speed.PAIRS.items():
        specs = {role: model.spec for role, model in gpu_pair.random_pair(shapes).items()}
        billions[name] = {role: gpu_speed.weight_bytes(spec, "fp16") / 2e9 for role, spec in specs.items()}
    assert billions["8B + 1B"] == pytest.approx({"target": 8.030, "draft": 1.236}, abs=1e-3)
    assert billions["3B + 1B"] == pytest.approx({"target": 3.213, "draft": 1.236}, abs=1e-3)
    order = [sum(pair.values()) for pair in billions.values()]
    assert order == sorted(order, reverse=True)


class OverStandIn:
    """A provider over the stand-in for TensorRT; with ``break_graphs`` the first pair's CUDA graphs do nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drivers: list[StandInDriver] = []
        for module in (gpu_provider, gpu_speed):
            monkeypatch.setattr(module, "require", lambda provider: None)
            monkeypatch.setattr(module, "build_engines", lambda bundle, provider: 1.0)
            monkeypatch.setattr(module, "format_of", lambda provider: ("standard", "fp32"))
            monkeypatch.setattr(module, "open_pair", self.open)
        monkeypatch.setattr(gpu_provider, "SMALL", gpu_provider.TINY)
        monkeypatch.setattr(gpu_speed, "bandwidth", lambda engine: 1e9)
        monkeypatch.setattr(gpu_speed, "PAIRS", gpu_speed._TINY_PAIR)
        monkeypatch.setattr(gpu_speed, "_room", lambda *given: gpu_speed.Room(1e12, 1e12, 1e12, 1e9, 0))
        self.break_graphs = False

    def open(self, bundle: Bundle, provider: str) -> tuple[Engine, Engine]:
        driver = StandInDriver()
        self.drivers.append(driver)
        library, memory = standin_library(driver), CudaMemory(driver)
        if not bundle.manifest.engines:
            list_engines(bundle, library)
        if self.break_graphs and len(self.drivers) == 1:
            driver.launch = lambda graph, stream: None  # type: ignore[method-assign]
        heads = HeadInputs(memory, bundle.manifest.target.vocab_size, noise_slots(bundle.manifest.tiers))
        target, draft = (TensorrtEngine.load(bundle, role, library, memory, heads) for role in ("target", "draft"))
        return target, draft


def test_the_checks_hold_over_the_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    OverStandIn(monkeypatch)
    reported: list[int] = []
    figures = gpu_provider.check_provider("tensorrt-rtx", tmp_path, None, lambda part: reported.append(len(part)))
    assert {name: check["status"] for name, check in figures["checks"].items()} == dict.fromkeys(CHECKS, "ok")
    assert len(reported) == len(CHECKS)
    arms = figures["checks"]["rounds"]["arms"]
    for arm in arms:  # one copy a round; the draft's prefill, and the first rounds, have their own
        if arm["way"] == "resident":
            assert 1 <= arm["reads_a_round"] <= 1.5, arm
        elif arm["drafter"] == "model":
            assert arm["reads_a_round"] > 1.5, arm


def test_a_graph_that_gives_the_first_result_again_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = OverStandIn(monkeypatch)
    over.break_graphs = True
    figures = gpu_provider.check_provider("tensorrt-rtx", tmp_path, None, lambda part: None)
    replay = figures["checks"]["replay"]
    assert replay["status"] == "failed" and replay["different"] > 0 and "not those of first runs" in replay["reason"]
    assert list(figures["checks"]) == CHECKS


def test_logits_of_another_model_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = gpu_provider._difference

    def other(engine: Engine, reference: Engine, *given: Any) -> dict[str, Any]:
        return {**real(engine, reference, *given), "max_difference": math.nan}

    monkeypatch.setattr(gpu_provider, "_difference", other)
    parity = gpu_provider.check_provider("cpu", tmp_path, None, lambda part: None)["checks"]["parity"]
    assert parity["status"] == "failed" and parity["reason"].startswith("logits are not the CPU's: target prefill")
    assert parity["passes"]


def test_the_speed_part_over_the_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    OverStandIn(monkeypatch)
    monkeypatch.setattr(gpu_speed, "_TOKENS", 12)
    figures = gpu_speed.check_speed("tensorrt-rtx", tmp_path, 0, lambda part: None)
    assert figures["sweep"]["sweeps"] == 1  # out of time from the start, and still one to tell from
    assert all(cell["speed_up"] > 0 and cell["predicted_speed_up"] > 0 for cell in figures["sweep"]["cells"])
