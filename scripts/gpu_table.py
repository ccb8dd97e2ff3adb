"""Lines of the table that ``gpu_check.py`` prints: figures of a part, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Line = tuple[str, str, str]  # what, status, text


def rows_of(name: str, figures: dict[str, Any]) -> Iterator[Line]:
    if not figures:
        return
    if name == "environment":
        yield from _environment(figures)
    elif name == "speed":
        yield from _speed(figures)
    else:
        if figures.get("build_seconds"):
            yield "build", "", f"{figures['build_seconds']:.0f} s"
        for check, outcome in figures.get("checks", {}).items():
            text = _CHECKS[check](outcome) if set(outcome) - {"status", "reason"} else ""
            yield check, outcome["status"], "; ".join(filter(None, (outcome.get("reason"), text)))


def _environment(figures: dict[str, Any]) -> Iterator[Line]:
    gpu = figures["gpu"]
    if gpu is None:
        yield "gpu", "", f"none: {figures['no_gpu']}"
    else:
        memory = f"{gpu['free_bytes'] / 1e9:.0f} of {gpu['memory_bytes'] / 1e9:.0f} GB free"
        cuda = f"CUDA {gpu['cuda_of_driver']} of the driver, {gpu['cuda_runtime']} of the runtime"
        yield "gpu", "", f"{gpu['name']}, {gpu['arch']}, {memory}, {cuda}"
    yield "driver", "", str(figures["driver"] or f"none: {figures['no_driver']}")
    yield "packages", "", ", ".join(f"{name} {version}" for name, version in figures["packages"].items())
    yield "providers", "", ", ".join(figures["providers"] or [f"none: {figures['no_providers']}"])
    for module in ("tensorrt", "tensorrt_rtx"):
        yield module, "", str(figures[module] or f"none: {figures[f'no_{module}']}")


def _parity(outcome: dict[str, Any]) -> str:
    return f"logits differ by up to {outcome['max_difference']:.3g}, same argmax {100 * outcome['same_argmax']:.1f} %"


def _rows(outcome: dict[str, Any]) -> str:
    return f"{outcome['exactness']}, at least {outcome['min_rows']} row(s) a pass"


def _replay(outcome: dict[str, Any]) -> str:
    return f"{outcome['plans']} plans, {outcome['different']} results unlike first runs"


def _rounds(outcome: dict[str, Any]) -> str:
    ways = len(outcome["arms"])
    text = f"{ways - len(outcome['differing'])} of {ways} ways give plain ids, {outcome['exactness']}"
    text += f"; {outcome['cpu_same']} of {len(outcome['cpu'])} texts are the CPU's"
    gaps = [entry["gap"] for entry in outcome["cpu"] if entry["gap"] is not None]
    text += f" (largest gap at a difference {max(gaps):.3g})" if gaps else ""
    figures = f"host {outcome['host_microseconds']:.0f} us, {outcome['reads_a_round']:.2f} reads"
    return f"{text}; a round of the draft model at most {outcome['round_ms']:.2f} ms, {figures}"


_CHECKS = {"parity": _parity, "rows": _rows, "replay": _replay, "rounds": _rounds}


def _speed(figures: dict[str, Any]) -> Iterator[Line]:
    for reason in figures["stepped_down"]:
        yield "not run", "", reason
    ready = f"ready after {figures['ready_after_seconds']:.0f} s, " if "ready_after_seconds" in figures else ""
    yield "pair", "", f"{figures['pair']}, {figures['provider']}, {ready}{figures.get('exactness', '')}"
    if "plain" in figures:
        plain = figures["plain"]
        yield (
            "plain",
            "",
            f"{plain['ms_per_token']:.3f} ms a token, {plain['bytes_per_token'] / 1e9:.3f} GB of reads: "
            f"{100 * plain['bandwidth_share']:.0f} % of {figures['bandwidth_gb_s']:.0f} GB/s; "
            f"host {plain['host_microseconds']:.0f} us",
        )
    if "passes" in figures:
        passes = figures["passes"]
        yield (
            "passes",
            "",
            f"step {passes['step_ms']:.3f} ms, c {passes['c']:.3f}, "
            + ", ".join(f"v({k}) {value:.2f}" for k, value in passes["v"].items())
            + ", round "
            + ", ".join(f"K={k} {value:.2f} ms" for k, value in passes["round_ms"].items()),
        )
    sweep = figures.get("sweep", {"cells": []})
    for length in dict.fromkeys(cell["length"] for cell in sweep["cells"]):
        cells = [cell for cell in sweep["cells"] if cell["length"] == length]
        text = ", ".join(f"K={cell['k']} {cell['speed_up']:.2f}x" for cell in cells)
        yield f"length {length:g}", "", f"{text} (imposed; {sweep['sweeps']} sweeps)"
