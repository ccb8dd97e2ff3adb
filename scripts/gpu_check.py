#!/usr/bin/env python3
"""Does Outrider run on this GPU, are its results right there, and how fast is it?

    gpu_check.py [--out FILE] [--budget SECONDS] [--provider NAME ...] [--speed-provider NAME]
                 [--checkpoint PATH] [--work FOLDER] [--cpu]

Runs from the source tree, installed or not, without a network: models are random, made on the spot. It says which GPU
and libraries there are; checks each provider that is there on a small pair (logits, row probe, replay of CUDA graphs,
whole rounds); then measures the fastest of them on a pair of the shape of Llama 8B + 1B, or the largest that fits.
Each part is a process of its own: what one breaks, the others do not see. With --cpu the same on the CPU, with tiny
shapes, to check this script. A part that cannot run here is skipped, saying why. Exits 1 when a part failed, or one
that was asked for by name was skipped, and 2 when no provider ran.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
GPU_PROVIDERS = ("cuda", "tensorrt", "tensorrt-rtx", "ort-tensorrt", "ort-tensorrt-rtx")
PROVIDER_SHARE = 0.6  # of the budget; the rest is for the speed
PROVIDER_SECONDS = 150
LEAST_SECONDS = 8  # that a part begins with
SPARE_SECONDS = 6  # of the speed part's time, for what its own clock does not see
PACKAGES = ("onnxruntime", "tensorrt", "cuda-bindings", "numpy", "onnx", "tokenizers")
SPEED_UP_GOAL, SPEED_UP_LENGTH, HOST_GOAL, BANDWIDTH_GOAL = 2.0, 3.0, 100, 0.7

Part = dict[str, Any]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--out", type=Path, help="Write all figures there, as JSON.")
@click.option("--work", type=Path, help="Keep models and engines there; by default a temporary folder.")
@click.option("--budget", default=330.0, help="Seconds for everything; parts that come too late are skipped.")
@click.option("--checkpoint", help="Check providers with this model and its own first layers, not with random ones.")
@click.option("--provider", "providers", multiple=True, type=click.Choice(GPU_PROVIDERS), help="Only these.")
@click.option("--speed-provider", type=click.Choice(GPU_PROVIDERS), help="Measure this one, not the fastest.")
@click.option("--cpu", is_flag=True, help="On the CPU, with tiny shapes.")
@click.option("--part", hidden=True)
@click.option("--result", type=Path, hidden=True)
@click.option("--seconds", type=float, hidden=True)
def main(
    out: Path | None,
    work: Path | None,
    budget: float,
    checkpoint: str | None,
    providers: tuple[str, ...],
    speed_provider: str | None,
    cpu: bool,
    part: str | None,
    result: Path | None,
    seconds: float | None,
) -> None:
    if part is not None:
        assert work is not None and result is not None
        _be_part(part, work, result, checkpoint, seconds or 0.0)
        return
    with tempfile.TemporaryDirectory() as folder:
        if work is not None:
            work.mkdir(parents=True, exist_ok=True)
        run = Run(work or Path(folder), budget, checkpoint, speed_provider)
        parts = run.all(("cpu",) if cpu else providers or GPU_PROVIDERS)
    report = {"seconds": perf_counter() - run.start, "parts": parts, "goals": goals(parts)}
    print(table(report))
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    sys.exit(exit_code(parts, providers))


def exit_code(parts: dict[str, Part], asked: tuple[str, ...]) -> int:
    if any(part["status"] == "failed" for part in parts.values()):
        return 1
    if any(parts[name]["status"] == "skipped" for name in asked):
        return 1
    return 0 if any(part["status"] == "ok" for name, part in parts.items() if name != "environment") else 2


@dataclass
class Run:
    """Parts one after another, as long as the budget lasts."""

    work: Path
    budget: float
    checkpoint: str | None
    speed_provider: str | None = None
    start: float = field(default_factory=perf_counter)

    def all(self, providers: tuple[str, ...]) -> dict[str, Part]:
        parts = {"environment": self.part("environment", 60.0)}
        for name in providers:
            left = min(PROVIDER_SECONDS, PROVIDER_SHARE * self.budget - self._spent())
            parts[name] = self.part(name, left) if left >= LEAST_SECONDS else _out_of_time(left)
        best, left = self.speed_provider or fastest(parts), self.budget - self._spent()
        if best is None:
            parts["speed"] = {"status": "skipped", "reason": "no provider ran", "seconds": 0.0, "figures": {}}
        elif left < LEAST_SECONDS + SPARE_SECONDS:
            parts["speed"] = _out_of_time(left)
        else:
            parts["speed"] = self.part(f"speed:{best}", left)
        return parts

    def part(self, name: str, seconds: float) -> Part:
        """Run a part in a process of its own and take what it reported, also where it came to a bad end."""
        start, result = perf_counter(), self.work / "result.json"
        result.unlink(missing_ok=True)
        command = [sys.executable, str(Path(__file__).resolve()), "--part", name, "--result", str(result)]
        command += ["--work", str(self.work), "--seconds", str(seconds - SPARE_SECONDS)]
        command += ["--checkpoint", self.checkpoint] if self.checkpoint else []
        print(f"{name} ...", file=sys.stderr, flush=True)
        end = None
        try:
            # What ONNX Runtime compiles goes to the work folder too, not to the user's cache.
            done = subprocess.run(
                command,
                timeout=seconds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, "XDG_CACHE_HOME": str(self.work / "cache")},
            )
            if done.returncode:
                last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
                end = f"the process ended with {done.returncode}: {''.join(last) or 'it said nothing'}"
        except subprocess.TimeoutExpired:
            end = f"not done after {seconds:.0f} s"
        found: Part = {"status": "failed", "figures": {}}
        if result.is_file():
            found = json.loads(result.read_text(encoding="utf-8"))
        if end is not None:
            found |= {"status": "failed", "reason": end}
        return {**found, "seconds": perf_counter() - start}

    def _spent(self) -> float:
        return perf_counter() - self.start


def _out_of_time(left: float) -> Part:
    reason = f"the budget leaves {max(0.0, left):.0f} s for it"
    return {"status": "skipped", "reason": reason, "seconds": 0.0, "figures": {}}


def fastest(parts: dict[str, Part]) -> str | None:
    """The provider whose rounds took least time, of those without a fault where there is one; else one that failed."""
    rounds = {
        name: part["figures"]["checks"]["rounds"]["round_ms"]
        for name, part in parts.items()
        if "round_ms" in part["figures"].get("checks", {}).get("rounds", {})
    }
    sound = {name: ms for name, ms in rounds.items() if parts[name]["status"] == "ok"}
    candidates = sound or rounds
    tried = [name for name, part in parts.items() if part["status"] == "failed" and name != "environment"]
    return min(candidates, key=candidates.__getitem__) if candidates else next(iter(tried), None)


def _be_part(name: str, work: Path, result: Path, checkpoint: str | None, seconds: float) -> None:
    """Run a part in this process; what it has is written each time it reports."""
    found: Part = {"status": "running", "figures": {}}

    def report(figures: dict[str, Any]) -> None:
        found["figures"] = figures
        written = result.with_suffix(".new")
        written.write_text(json.dumps(found), encoding="utf-8")
        written.replace(result)

    try:
        _use_source_tree()
        figures = _part(name, work, checkpoint, seconds, report)
        failed = [check for check, outcome in figures.get("checks", {}).items() if outcome["status"] == "failed"]
        found |= {"status": "failed", "reason": f"failed: {', '.join(failed)}"} if failed else {"status": "ok"}
    except Exception as error:  # a part may fail in any way, and the others shall still run
        figures = found["figures"]
        found |= _verdict(error)
    report(figures)


def _part(
    name: str, work: Path, checkpoint: str | None, seconds: float, report: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    if name == "environment":
        return environment()
    kind, _, provider = name.partition(":")
    if kind == "speed":
        from gpu_pair import SkippedError
        from gpu_speed import check_speed

        try:
            return check_speed(provider, work, seconds, report)
        except Exception as error:
            if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
                raise SkippedError(f"out of memory: {error}") from None
            raise
    from gpu_provider import check_provider

    return check_provider(name, work, checkpoint, report)


def _verdict(error: Exception) -> dict[str, str]:
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith(("gpu_", "outrider")):
        return {"status": "skipped", "reason": f"{error.name} is not installed"}
    from gpu_pair import verdict

    return verdict(error)


def _use_source_tree() -> None:
    """Import Outrider from beside this script, where it is not installed."""
    try:
        import_module("outrider.engines")
    except ModuleNotFoundError:
        package = ModuleType("outrider")
        package.__path__ = [str(ROOT)]
        sys.modules["outrider"] = package


def environment() -> dict[str, Any]:
    versions = {
        name: found.version
        for found in distributions()
        if (name := str(found.metadata["Name"]).lower().replace("_", "-")).startswith(PACKAGES)
    }
    figures: dict[str, Any] = {"python": platform.python_version(), "packages": dict(sorted(versions.items()))}
    figures |= {"machine": platform.machine(), "system": platform.platform()}
    for name, look in (("gpu", _gpu), ("providers", _providers), ("driver", _driver)):
        try:
            figures[name] = look()
        except Exception as error:  # not installed, or no driver: libraries raise anything
            figures[name] = None
            figures[f"no_{name}"] = str(error)
    for module in ("tensorrt", "tensorrt_rtx"):
        try:
            figures[module] = str(import_module(module).__version__)
        except Exception as error:
            figures[module], figures[f"no_{module}"] = None, str(error)
    return figures


def _gpu() -> dict[str, Any]:
    from cuda.bindings import runtime

    from outrider.engines.cuda import CudaDriver

    driver = CudaDriver()
    free, total = runtime.cudaMemGetInfo()[1:]
    return {
        "name": driver.name,
        "arch": driver.arch,
        "memory_bytes": int(total),
        "free_bytes": int(free),
        "cuda_of_driver": runtime.cudaDriverGetVersion()[1],
        "cuda_runtime": runtime.cudaRuntimeGetVersion()[1],
    }


def _providers() -> list[str]:
    import onnxruntime as ort

    return [f"onnxruntime {ort.__version__}", *ort.get_available_providers()]


def _driver() -> str:
    query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit"
    if shutil.which("nvidia-smi") is None:
        raise FileNotFoundError("there is no nvidia-smi")
    return subprocess.check_output(["nvidia-smi", query, "--format=csv,noheader"], text=True).strip()


def goals(parts: dict[str, Part]) -> list[dict[str, Any]]:
    """What is aimed at beside what was measured; ``met`` is None where it was not."""
    speed, provider = parts["speed"]["figures"], parts["speed"]["figures"].get("provider")
    at_length = [cell for cell in speed.get("sweep", {}).get("cells", []) if cell["length"] == SPEED_UP_LENGTH]
    speed_up = max((cell["speed_up"] for cell in at_length), default=None)
    rounds = parts.get(provider or "", {}).get("figures", {}).get("checks", {}).get("rounds", {})
    host = rounds.get("host_microseconds")
    share = speed.get("plain", {}).get("bandwidth_share")
    large = str(speed.get("pair", "")).startswith("8B")
    exactness = {
        name: part["figures"]["checks"]["rows"]["exactness"]
        for name, part in parts.items()
        if "exactness" in part["figures"].get("checks", {}).get("rows", {})
    }
    return [
        {
            "goal": "the same text for every K: bitwise or fixed-rows",
            "figure": ", ".join(f"{name} {found}" for name, found in exactness.items()) or None,
            "of": "row probe",
            "met": "tolerance" not in exactness.values() if exactness else None,
        },
        {
            "goal": f"speed-up at mean acceptance length {SPEED_UP_LENGTH:g}, 8B shape: at least {SPEED_UP_GOAL:g}",
            "figure": speed_up if large else None,
            "of": speed.get("pair"),
            "met": None if speed_up is None or not large else speed_up >= SPEED_UP_GOAL,
        },
        {
            "goal": f"host time a round, us: under {HOST_GOAL}",
            "figure": host,
            "of": provider,
            "met": None if host is None else host < HOST_GOAL,
        },
        {
            "goal": f"plain decoding, 8B shape, share of the memory's bandwidth: at least {BANDWIDTH_GOAL:g}",
            "figure": share if large else None,
            "of": speed.get("pair"),
            "met": None if share is None or not large else share >= BANDWIDTH_GOAL,
        },
    ]


def table(report: dict[str, Any]) -> str:
    from gpu_table import rows_of

    lines = [("part", "status", "s", "")]
    for name, part in report["parts"].items():
        said = part.get("reason", "")
        lines.append((name, part["status"], f"{part['seconds']:.0f}", said))
        lines += [(f"  {check}", status, "", text) for check, status, text in rows_of(name, part["figures"])]
    for entry in report["goals"]:
        met = {None: "not measured", True: "met", False: "missed"}[entry["met"]]
        figure = entry["figure"]
        if figure is not None:
            figure = f"{figure if isinstance(figure, str) else format(figure, '.3g')} ({entry['of']})"
        lines.append(("goal", met, "", f"{entry['goal']}: {figure or ''}".rstrip(": ")))
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    rows = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3]]) for line in lines
    ]
    return "\n".join(row.rstrip() for row in rows)


if __name__ == "__main__":
    main()
