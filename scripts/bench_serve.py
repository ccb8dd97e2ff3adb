#!/usr/bin/env python3
"""``outrider serve`` measured from outside, over loopback: throughput by concurrency with and without speculation,
overhead over ``Pipeline.stream``, first token of a cached prefix, memory, and thousands of requests in a row.

    scripts/bench_serve.py BUNDLE [--only load,peers,overhead,prefix,memory,soak]
                           [--llama-server PATH --llama-model GGUF] [--openvino WORK]

WORK is the folder in which ``bench_peers.py`` has made OpenVINO's environment and exports. Server and clients are
processes of their own; the server has ``--threads``. Arms of a comparison come in turn, in both orders, and ratios are
medians over the repeats.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from peers.worker import Worker
from serving.load import Load, Timed, median_ratio, run_load
from serving.servers import Server, llama_command, outrider_command
from serving.soak import soak

from outrider.engines.bundle import Bundle
from outrider.runtime import Pipeline, SamplingOptions
from outrider.runtime.bench import Prompt, read_prompts

PARTS = ("load", "peers", "overhead", "prefix", "memory", "soak")
PROMPTS = Path(__file__).with_name("prompts.jsonl")
_PREFIX_TOKENS = 1000
Runner = Callable[[list[Any], int], Load]  # of requests, and the number of clients
ARMS: dict[str, dict[str, Any]] = {"plain": {"num_draft_tokens": 0}, "auto": {}}


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.option("--only", default=",".join(PARTS), show_default=True, help="Parts to run.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--concurrency", default="1,2,4,8", show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--requests", type=click.IntRange(min=1), default=16, show_default=True, help="Of each arm and repeat.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=64, show_default=True)
@click.option("--soak-requests", type=click.IntRange(min=100), default=10_000, show_default=True)
@click.option("--llama-server", type=click.Path(path_type=Path, exists=True), help="llama.cpp's server.")
@click.option("--llama-model", type=click.Path(path_type=Path, exists=True), help="Its GGUF of the same checkpoint.")
@click.option("--openvino", type=click.Path(path_type=Path, exists=True), help="OpenVINO's environment and exports.")
def main(bundle: Path, only: str, threads: int, concurrency: str, **options: Any) -> None:
    parts = [part for part in PARTS if part in only.split(",")]
    counts = [int(part) for part in concurrency.split(",")]
    prompts = read_prompts(PROMPTS)
    with tempfile.TemporaryDirectory() as logs:
        server = Server("outrider", outrider_command(bundle, threads, max(counts)), Path(logs) / "outrider.log")
        try:
            if "memory" in parts:
                memory(server, bundle)
            if "load" in parts:
                load(server, prompts, counts, **options)
            if options["llama_server"] and "peers" in parts:
                llama_cpp(server, prompts, counts, threads, Path(logs), **options)
            pipeline = Pipeline.load(bundle, threads=threads)
            if options["openvino"] and "peers" in parts:
                openvino(server, pipeline, prompts, counts, threads, Path(logs), **options)
            if "overhead" in parts:
                overhead(server, pipeline, prompts, options["max_new_tokens"])
            if "prefix" in parts:
                prefix(server, pipeline)
            if "soak" in parts:
                run_soak(server, pipeline, prompts, options["soak_requests"], max(counts))
        finally:
            server.close()


def bodies(prompts: list[Prompt], count: int, max_new_tokens: int, start: int, more: dict[str, Any]) -> list[Any]:
    """Greedy chat requests, from the prompt number ``start`` on."""
    chosen = [prompts[(start + number) % len(prompts)] for number in range(count)]
    body = {"max_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True, **more}
    return [{"messages": [{"role": "user", "content": prompt.text}], **body} for prompt in chosen]


def in_turn(
    arms: dict[str, Runner],
    prompts: list[Prompt],
    counts: list[int],
    repeats: int,
    requests: int,
    max_new_tokens: int,
    **_: Any,
) -> dict[tuple[str, int], list[Load]]:
    """The runs of each arm by number of clients, orders alternating; all have the same prompts in a repeat."""
    found: dict[tuple[str, int], list[Load]] = {(arm, count): [] for arm in arms for count in counts}
    for repeat in range(repeats):
        for count in counts:
            asked = bodies(prompts, max(requests, 4 * count), max_new_tokens, repeat * requests, {})
            for arm in list(arms) if repeat % 2 == 0 else list(arms)[::-1]:
                found[arm, count].append(arms[arm](asked, count))
    return found


def load(server: Server, prompts: list[Prompt], counts: list[int], **options: Any) -> None:
    def run(more: dict[str, Any], asked: list[Any], clients: int) -> Load:
        return run_load(server.url, [body | more for body in asked], clients)

    found = in_turn({arm: partial(run, more) for arm, more in ARMS.items()}, prompts, counts, **options)
    click.echo("clients  arm    tokens/s  over 1 client  over plain  first token  per token  p99 / median")
    for count in counts:
        for arm in ARMS:
            runs = found[arm, count]
            speeds = [run.tokens_per_second for run in runs]
            plain = [run.tokens_per_second for run in found["plain", count]]
            alone = [run.tokens_per_second for run in found["plain", counts[0]]]
            answers = [answer for run in runs for answer in run.answers]
            whole = Load(0.0, 1.0, answers)
            first = statistics.median(answer.first for answer in answers)
            spread = whole.per_token(0.99) / whole.per_token(0.5)
            click.echo(
                f"{count:7d}  {arm:5s} {statistics.median(speeds):9.1f} {median_ratio(speeds, alone):13.2f}x "
                f"{median_ratio(speeds, plain):10.2f}x {1e3 * first:9.1f} ms {1e3 * whole.per_token(0.5):7.2f} ms "
                f"{spread:12.2f}x"
            )


def llama_cpp(
    server: Server, prompts: list[Prompt], counts: list[int], threads: int, logs: Path, **options: Any
) -> None:
    """llama.cpp's server beside ours, in turn."""
    command = llama_command(options["llama_server"], options["llama_model"], threads, max(counts))
    other = Server("llama.cpp", command, logs / "llama.log")
    try:
        beside(server, {"llama.cpp": partial(run_load, other.url)}, prompts, counts, **options)
    finally:
        other.close()


def openvino(
    server: Server,
    pipeline: Pipeline,
    prompts: list[Prompt],
    counts: list[int],
    threads: int,
    logs: Path,
    **options: Any,
) -> None:
    """OpenVINO GenAI's continuous batching beside our server: plain, and with the draft; no server before it."""
    work, codec = options["openvino"], pipeline.codec
    script = Path(__file__).with_name("peers") / "openvino_batch_worker.py"
    models = {role: str(work / "openvino-int4" / role) for role in ("target", "draft")}
    config = {"target": models["target"], "threads": threads, "lanes": max(counts), "generation": {}}
    with_draft = config | {"draft": models["draft"], "generation": {"num_assistant_tokens": 2}}
    workers = {
        name: Worker(work / "venv-openvino/bin/python", script, given, logs / f"{name}.log")
        for name, given in {"OpenVINO, plain": config, "OpenVINO, draft": with_draft}.items()
    }

    def run(worker: Worker, bodies: list[Any], clients: int) -> Load:
        texts = [body["messages"][0]["content"] for body in bodies]
        request = {"prompts": [codec.encode(codec.turn(text)) for text in texts], "clients": clients}
        reply = worker.ask(request | {"max_new_tokens": bodies[0]["max_tokens"]})
        return Load(0.0, reply["end"], [Timed(*answer) for answer in reply["answers"]])

    try:
        beside(server, {name: partial(run, worker) for name, worker in workers.items()}, prompts, counts, **options)
    finally:
        for worker in workers.values():
            worker.close()


def beside(
    server: Server,
    others: dict[str, Runner],
    prompts: list[Prompt],
    counts: list[int],
    **options: Any,
) -> None:
    """Tokens a second of our server and of others, in turn."""
    arms = {"outrider": partial(run_load, server.url), **others}
    found = in_turn(arms, prompts, counts, **options)
    speeds = {key: [run.tokens_per_second for run in runs] for key, runs in found.items()}
    click.echo("\nclients  " + "".join(f"{name:>18s}" for name in arms) + "   (tokens/s, and ours over it)")
    for count in counts:
        ours = speeds["outrider", count]
        columns = [f"{statistics.median(ours):18.1f}"]
        for name in others:
            theirs = speeds[name, count]
            columns.append(f"{statistics.median(theirs):11.1f} {median_ratio(ours, theirs):5.2f}x")
        click.echo(f"{count:7d}  " + "".join(columns))


def overhead(server: Server, pipeline: Pipeline, prompts: list[Prompt], max_new_tokens: int) -> None:
    """Seconds a token behind the first, of one client, over those of the library in a process of its own."""
    options = SamplingOptions(max_new_tokens=max_new_tokens, ignore_eos=True)
    ratios: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number, prompt in enumerate(prompts):
        for arm, more in ARMS.items():

            def by_server(more: dict[str, Any] = more, number: int = number) -> float:
                return run_load(server.url, bodies(prompts, 1, max_new_tokens, number, more), 1).answers[0].per_token

            def by_library(more: dict[str, Any] = more, prompt: Prompt = prompt) -> float:
                times = []
                k = more.get("num_draft_tokens")
                for _ in pipeline.stream(pipeline.codec.turn(prompt.text), options, k=k):
                    times.append(time.perf_counter())
                return (times[-1] - times[0]) / (len(times) - 1)

            runs = [by_server, by_library] if number % 2 == 0 else [by_library, by_server]
            seconds = {run: run() for run in runs}
            ratios[arm].append(seconds[by_server] / seconds[by_library])
    for arm, found in ratios.items():
        share = 100 * (statistics.median(found) - 1)
        click.echo(f"\none client, {arm}: {share:+.1f}% seconds a token over Pipeline.stream")


def prefix(server: Server, pipeline: Pipeline) -> None:
    """First token behind 1,000 tokens that nobody has seen, and behind 1,000 that a request had before."""
    cold, warm = [], []
    for number in range(5):
        text = f"Text number {number}. " + " ".join(f"word{number * 7919 + place}" for place in range(400))
        ids = pipeline.codec.encode(text)[:_PREFIX_TOKENS]
        given = pipeline.codec.decode(ids)
        for times, question in ((cold, "What is the first word?"), (warm, "What is the last word?")):
            body = {
                "messages": [{"role": "user", "content": f"{given}\n{question}"}],
                "max_tokens": 2,
                "temperature": 0,
            }
            times.append(run_load(server.url, [body], 1).answers[0].first)
    ratio, times = median_ratio(cold, warm), [1e3 * statistics.median(found) for found in (cold, warm)]
    click.echo(
        f"\nfirst token behind {_PREFIX_TOKENS} tokens: cold {times[0]:.0f} ms, cached {times[1]:.0f} ms, "
        f"{ratio:.1f}x sooner"
    )


def memory(server: Server, bundle: Path) -> None:
    files = Bundle(bundle).files
    size = sum(entry["bytes"] for entry in files.values())
    resident = server.resident_bytes()
    click.echo(f"idle: {resident / 1e6:.0f} MB resident, bundle {size / 1e6:.0f} MB: {(resident - size) / 1e6:+.0f} MB")


def run_soak(server: Server, pipeline: Pipeline, prompts: list[Prompt], requests: int, lanes: int) -> None:
    found = soak(server, pipeline, [prompt.text for prompt in prompts], requests)
    time.sleep(2.0)
    left = server.metric("num_requests_running") + server.metric("num_requests_waiting")
    burst = run_load(server.url, bodies(prompts, lanes, 8, 0, {}), lanes)
    first, last = found.held
    click.echo(
        f"\n{found.requests} requests, {found.left} left by the client: memory {100 * (last / first - 1):+.1f}% "
        f"({first / 1e6:.0f} to {last / 1e6:.0f} MB, at most {max(found.memory) / 1e6:.0f}), {left:.0f} still there, "
        f"{found.wrong} of {found.checked} not as alone; {len(burst.answers)} of {lanes} lanes answer"
    )


if __name__ == "__main__":
    main()
