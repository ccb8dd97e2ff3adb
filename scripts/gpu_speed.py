"""Speed of a large random pair for ``gpu_check.py``: plain decoding, v(K), c, rounds, and rounds of imposed acceptance.

Random models agree on nothing, so acceptance is imposed: each round is run as it is, and then a drawn number of its
drafts counts as accepted. Lengths grow as they would, and so does the cost of attention.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from gpu_pair import TIERS, Model, SkippedError, build_engines, format_of, open_pair, random_pair, require, write_pair
from gpu_provider import TINY, Report

from outrider.engines.bundle import Bundle
from outrider.engines.cuda import CudaDriver, CudaMemory
from outrider.engines.engine import Engine
from outrider.engines.errors import DeviceMemoryError
from outrider.engines.round import DeviceRound
from outrider.engines.tensorrt import LIBRARIES
from outrider.export.spec import DecoderSpec
from outrider.runtime import Pipeline, SamplingOptions

LENGTHS = (1.5, 2.0, 3.0, 4.0)  # mean acceptance lengths, the target's own token included
_LLAMA = {"kv_heads": 8, "vocab": 128256}
_1B = {**_LLAMA, "hidden": 2048, "intermediate": 8192, "layers": 16, "heads": 32, "head_dim": 64}
_1B["tie_word_embeddings"] = True
_3B = {**_1B, "hidden": 3072, "layers": 28, "heads": 24, "head_dim": 128}
_8B = {**_3B, "hidden": 4096, "intermediate": 14336, "layers": 32, "heads": 32, "tie_word_embeddings": False}
PAIRS = {
    "8B + 1B": {"target": _8B, "draft": _1B},
    "3B + 1B": {"target": _3B, "draft": _1B},
    "1B + 2 layers": {"target": _1B, "draft": {**_1B, "layers": 2}},
    "0.3B + 2 layers": {"target": {**_1B, "layers": 1}, "draft": {**_1B, "layers": 1}},
}
_TINY_PAIR = {"tiny": {"target": TINY, "draft": {**TINY, "layers": 1}}}
_MAX_LENGTH = 1024
_CONTEXT = 128
_TOKENS = 96  # of a cell of the sweep
_SWEEPS = 5
_PASSES = 15
_READ_RATE = 1.5e9  # bytes a second that a disk, or what lies in memory already, comes to the device at
_BUILD_RATE = 0.15e9  # bytes of weights a second that an engine is built at


class Cell(NamedTuple):
    """Rounds of K drafts, of which ``rate`` is imposed for each; K = 0 is plain decoding."""

    length: float
    k: int
    rate: float


@dataclass
class Room:
    """What this machine has left: bytes of disk, device and host memory, and seconds; ``seconds_a_byte`` to export."""

    disk: float
    device: float
    host: float
    seconds: float
    seconds_a_byte: float


def check_speed(provider: str, work: Path, seconds: float, report: Report) -> dict[str, Any]:
    """All figures; ``seconds`` is what there is for them."""
    require(provider)
    deadline = perf_counter() + seconds
    room = _room(provider, work, seconds)
    name, pair, refused = choose_pair(_TINY_PAIR if provider == "cpu" else PAIRS, provider, room)
    figures: dict[str, Any] = {"provider": provider, "pair": name, "stepped_down": refused}
    lowering, precision = format_of(provider)
    folder = work / "-".join((*name.split(" + "), lowering, precision)).replace(" ", "-")
    bundle = Bundle(folder) if folder.exists() else write_pair(folder, pair, lowering, precision, _MAX_LENGTH)
    figures["build_seconds"] = build_engines(bundle, provider)
    target, draft = open_pair(bundle, provider)
    figures["ready_after_seconds"] = perf_counter() - (deadline - seconds)
    pipeline = Pipeline(bundle, target, draft)
    figures |= {"exactness": pipeline.exactness, "min_rows": pipeline.target.min_rows}
    report(figures)
    figures["bandwidth_gb_s"] = bandwidth(target) / 1e9
    figures["plain"] = plain_decoding(pipeline, pair["target"].spec, figures["bandwidth_gb_s"])
    report(figures)
    figures["passes"] = pass_costs(pipeline)
    report(figures)
    figures["sweep"] = sweep(pipeline, deadline)
    for cell in figures["sweep"]["cells"]:
        k = str(cell["k"])
        cost = cell["k"] * figures["passes"]["c_in_round"][k] + figures["passes"]["v"][k]
        cell["predicted_speed_up"] = cell["length"] / cost
    return figures


def choose_pair(
    pairs: Mapping[str, Mapping[str, Mapping[str, Any]]], provider: str, room: Room
) -> tuple[str, dict[str, Model], list[str]]:
    """The largest pair that fits, and why each larger one does not."""
    refused = []
    copies = 2 if provider in LIBRARIES else 1  # the graph's weights, and the engine's
    for name, shapes in pairs.items():
        pair = random_pair(shapes)
        size = sum(weight_bytes(model.spec, format_of(provider)[1]) for model in pair.values())
        seconds = size * (room.seconds_a_byte + (copies - 1) / _BUILD_RATE)
        needs = {
            "disk": (1.05 * copies * size, room.disk, 1e9, "GB"),
            "device memory": (1.15 * size + (0 if provider == "cpu" else 1.5e9), room.device, 1e9, "GB"),
            "host memory": (1.3 * copies * size, room.host, 1e9, "GB"),
            "time to write and load": (seconds, 0.75 * room.seconds, 1, "s"),
        }
        short = [
            f"{what}: {need / unit:.1f} of {there / unit:.1f} {mark}"
            for what, (need, there, unit, mark) in needs.items()
            if need > there
        ]
        if not short:
            return name, pair, refused
        refused.append(f"{name} needs more {', '.join(short)}")
    raise SkippedError(f"no pair fits: {'; '.join(refused)}")


def weight_bytes(spec: DecoderSpec, precision: str, *, read: bool = False) -> float:
    """Of all weights, or of those that a pass reads: of an embedding that is no head, it reads a row."""
    sizes = {name: float(np.prod(shape)) for name, shape in spec.expected_shapes()}
    if read and not spec.tied:
        del sizes[f"{spec.embedding}.weight"]
    return sum(sizes.values()) * (4 if precision == "fp32" else 2)


def _room(provider: str, work: Path, seconds: float) -> Room:
    host = float(_available_host())
    device = host
    if provider != "cpu":
        CudaDriver()
        from cuda.bindings import runtime

        device = float(runtime.cudaMemGetInfo()[1])
    return Room(float(shutil.disk_usage(work).free), device, host, seconds, _seconds_a_byte(provider, work))


def _available_host() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        if "MemAvailable" in fields:
            return int(fields["MemAvailable"].split()[0]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _seconds_a_byte(provider: str, work: Path) -> float:
    """To write a bundle here, hash it as often as it is, and load it."""
    block = np.random.default_rng(0).bytes((4 if provider == "cpu" else 64) << 20)
    start = perf_counter()
    hashlib.sha256(block).digest()
    hashed = perf_counter()
    path = work / "rate.bin"
    with path.open("wb") as file:
        file.write(block)
        file.flush()
        os.fsync(file.fileno())
    written = perf_counter()
    path.unlink()
    hashes = 4 if provider in LIBRARIES else 2
    return ((hashed - start) * hashes + written - hashed) / len(block) + 1 / _READ_RATE


def bandwidth(engine: Engine) -> float:
    """Bytes a second that a copy inside the memory reads and writes."""
    memory = engine.memory
    if not isinstance(memory, CudaMemory):
        source = np.ones(32 << 20, np.uint8)
        target = np.empty_like(source)
        return 2 * source.nbytes / _median_seconds(lambda: np.copyto(target, source), 5)
    driver, stream, size = memory.driver, memory.stream, 2 << 30
    while True:
        try:
            source_buffer, target_buffer = (memory.buffer((size,), "uint8") for _ in range(2))
            break
        except DeviceMemoryError:
            size //= 2
    event = driver.new_event()

    def copy() -> None:
        for _ in range(8):
            driver.copy(source_buffer.pointer, target_buffer.pointer, size, stream)
        driver.record(event, stream)
        driver.wait(event)

    return 8 * 2 * size / _median_seconds(copy, 5)


def _median_seconds(work: Callable[[], Any], repeats: int) -> float:
    """The first run warms up."""
    times = [perf_counter()]
    for _ in range(repeats + 1):
        work()
        times.append(perf_counter())
    return statistics.median(np.diff(times[1:]).tolist())


def plain_decoding(pipeline: Pipeline, spec: DecoderSpec, bandwidth_gb_s: float) -> dict[str, float]:
    """The product's own loop at K = 0: milliseconds a token, and the share of the bandwidth that its reads take."""
    info = pipeline.manifest.target
    ids = _context(pipeline)
    options = SamplingOptions(max_new_tokens=_TOKENS, ignore_eos=True)
    seconds, host = [], []
    for _ in range(4):
        pipeline.clear_caches()
        request = pipeline.new_request(ids, options)
        for _ in pipeline.decode(request, "none", 0):
            pass
        seconds.append(1 / request.stats.tokens_per_second)
        host.append(request.stats.host_microseconds_per_round)
    positions = info.capacity if info.lowering == "standard" else _CONTEXT + _TOKENS // 2
    element = 4 if info.precision == "fp32" else 2
    cache = 2 * info.num_layers * info.num_kv_heads * info.head_dim * positions * element
    read = weight_bytes(spec, info.precision, read=True) + cache
    best = statistics.median(seconds[1:])  # the first one makes plans and captures graphs
    return {
        "ms_per_token": 1e3 * best,
        "host_microseconds": statistics.median(host[1:]),
        "bytes_per_token": read,
        "bandwidth_share": read / best / (1e9 * bandwidth_gb_s),
    }


def pass_costs(pipeline: Pipeline) -> dict[str, Any]:
    """Milliseconds of a step, verify passes, a draft step and rounds, interleaved medians, each waited for."""
    target, draft = pipeline.target_engine, pipeline.draft_engine
    assert draft is not None
    jobs: dict[str, Callable[[], Any]] = {"step": _pass(target, 1), "draft": _pass(draft, 1)}
    for k in TIERS:
        jobs[f"verify {k}"] = _pass(target, k + 1)
        jobs[f"round {k}"] = _round(pipeline.device_round(k))
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(_PASSES + 3):
        for name in list(jobs)[:: 1 if turn % 2 else -1]:
            start = perf_counter()
            jobs[name]()
            if turn >= 3:  # before that, plans are loaded and captured
                seconds[name].append(perf_counter() - start)
    pipeline.clear_caches()  # what was there is overwritten
    ms = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    return {
        "step_ms": ms["step"],
        "draft_step_ms": ms["draft"],
        "c": ms["draft"] / ms["step"],
        "v": {str(k): ms[f"verify {k}"] / ms["step"] for k in TIERS},
        "round_ms": {str(k): ms[f"round {k}"] for k in TIERS},
        # The same of the steps inside a round, where nothing waits for them.
        "c_in_round": {str(k): (ms[f"round {k}"] - ms[f"verify {k}"]) / k / ms["step"] for k in TIERS},
    }


def _pass(engine: Engine, rows: int) -> Callable[[], Any]:
    plan = engine.plan(rows, rows, exact=False)
    ids, lengths = np.ones((1, rows), np.int64), np.full(1, _CONTEXT, np.int32)

    def run() -> None:
        plan.submit(ids, lengths)
        plan.choices()

    return run


def _round(rounds: DeviceRound) -> Callable[[], Any]:
    def run() -> None:
        rounds.set_state((1, 2), _CONTEXT)
        rounds.launch()
        rounds.read()

    return run


def sweep(pipeline: Pipeline, deadline: float) -> dict[str, Any]:
    """Speed-up over plain decoding by K and imposed mean acceptance length, orders alternating, medians of pairs."""
    rounds = {k: pipeline.device_round(k) for k in TIERS}
    step = pipeline.target_engine.plan(pipeline.target.min_rows, pipeline.target.min_rows)
    cells = [Cell(length, k, acceptance_rate(length, k)) for length in LENGTHS for k in TIERS if length <= k + 1]
    plain = Cell(1.0, 0, 0.0)
    pipeline.target_engine.plan(_CONTEXT, 1).run(np.array([_context(pipeline)]), np.zeros(1, np.int32))
    seconds: dict[Cell, list[float]] = {cell: [] for cell in (plain, *cells)}
    done = 0
    while done <= _SWEEPS and (done < 2 or perf_counter() < deadline):
        for cell in list(seconds)[:: 1 if done % 2 else -1]:
            spent = _plain_cell(step) if cell.k == 0 else _imposed_cell(rounds[cell.k], cell, seed=done)
            if done:  # the first sweep captures graphs
                seconds[cell].append(spent)
        done += 1
    pipeline.clear_caches()
    found = []
    for cell in cells:
        ratios = [base / own for base, own in zip(seconds[plain], seconds[cell], strict=True)]
        entry = {"length": cell.length, "k": cell.k, "acceptance_rate": cell.rate}
        times = {"ms_per_token": 1e3 * statistics.median(seconds[cell]), "speed_up": statistics.median(ratios)}
        found.append({**entry, **times, "lowest": min(ratios), "highest": max(ratios)})
    return {"plain_ms_per_token": 1e3 * statistics.median(seconds[plain]), "sweeps": done - 1, "cells": found}


def _plain_cell(plan: Any) -> float:
    """Seconds a token."""
    ids, lengths = np.ones((1, plan.rows), np.int64), np.zeros(1, np.int32)
    start = perf_counter()
    for length in range(_CONTEXT, _CONTEXT + _TOKENS):
        lengths[0] = length
        plan.submit(ids, lengths)
        ids[0, 0] = plan.choices()[0][0, 0]
    return (perf_counter() - start) / _TOKENS


def _imposed_cell(rounds: DeviceRound, cell: Cell, seed: int) -> float:
    """Seconds a token, of rounds after which a drawn number of drafts counts as accepted."""
    counts = accepted_counts(cell.rate, cell.k, round(_TOKENS / cell.length), seed)
    length, tail = _CONTEXT + 1, [1, 2]
    start = perf_counter()
    for count in counts:
        rounds.set_state(tail, length)
        rounds.launch()
        result = rounds.read()
        tail = [*tail[-1:], *result.drafts[:count], result.choices[count]][-2:]
        length += count + 1
    return (perf_counter() - start) / (length - _CONTEXT - 1)


def acceptance_rate(length: float, k: int) -> float:
    """p of ``p + p^2 + ... + p^K = L - 1``: each draft stands with probability p if those before it do.

    Raises:
        ValueError: no p in [0, 1] gives this length.
    """
    if not 1 <= length <= k + 1:
        raise ValueError(f"K = {k} gives mean acceptance lengths from 1 to {k + 1}, not {length}")
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if sum(middle**power for power in range(1, k + 1)) < length - 1:
            low = middle
        else:
            high = middle
    return high


def accepted_counts(rate: float, k: int, rounds: int, seed: int) -> list[int]:
    """How many of K drafts stand in each round, drawn evenly over the law, so that few rounds have its mean."""
    rng = np.random.default_rng(seed)
    draws = (rng.permutation(rounds) + rng.random()) / rounds
    return [sum(draw < rate**power for power in range(1, k + 1)) for draw in draws]


def _context(pipeline: Pipeline) -> list[int]:
    found: list[int] = np.random.default_rng(4).integers(1, pipeline.manifest.target.vocab_size, _CONTEXT).tolist()
    return found
