#!/usr/bin/env python3
"""Outrider beside its peers on this machine: the same checkpoint, draft, prompt ids, number of threads.

    bench_peers.py CHECKPOINT --draft FOLDER --work DIR [--precision int4] [--max-new-tokens 64] [--rounds 2]
                   [--peers outrider,openvino,...] [--llama-cpp BINARIES --llama-draft GGUF] [--json FILE] [--plot FILE]

Each peer gets a virtual environment and its own export in DIR, made once and kept, and a worker process that stays: all
take turns prompt by prompt, so that the machine's moods meet all alike. Decoding is greedy, goes on behind an end of
sequence, and is timed without the prefill and its token. Speeds are medians over prompts, of the faster round each.
"same ids" is on how many prompts a setting gave the ids of its peer's plain decoding; Outrider's must be those of
``exact``, plain decoding with the bits of verify rows (``plain`` is at its fastest, whatever its bits). All round
the same float32 weights, each in its own way. A peer that cannot be had says why in its row.

No peer reads Outrider's draft as it is; they get it as a plain checkpoint with a head of all tokens (``work.py``).
"""

from __future__ import annotations

import json
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import click
from peers.report import Arm, Report, plot, table, turns
from peers.table import PEERS, Given
from peers.work import THREADS, Work
from peers.worker import SettingError, Worker, WorkerError

from outrider.engines.bundle import Bundle
from outrider.engines.errors import OutriderError
from outrider.runtime.bench import Prompt, read_prompts
from outrider.runtime.text import TextCodec

HERE = Path(__file__).parent
_WARM_UP = 32  # tokens


def start(names: list[str], given: Given) -> tuple[dict[str, Worker], list[Arm]]:
    """The workers that came up, and an arm for every setting; those of a peer that did not are one, with the reason."""
    workers, arms = {}, []
    for name in names:
        click.echo(f"{name} ...", err=True)
        try:
            python, config = PEERS[name].prepare(given)
            script = HERE / "peers" / PEERS[name].worker
            workers[name] = Worker(python, script, config, given.work.folder / f"{name}.log")
        except (OutriderError, WorkerError, OSError) as error:
            arms.append(Arm(name, "-", failure=str(error)))
            continue
        arms += [Arm(name, setting) for setting in PEERS[name].settings]
    return workers, arms


def decode(workers: dict[str, Worker], arm: Arm, ids: list[int], max_new_tokens: int) -> dict | None:
    """The reply, or None when the arm has failed, which it then says."""
    if arm.failure is not None:
        return None
    if arm.peer not in workers:
        arm.failure = "its worker is gone"
        return None
    try:
        return workers[arm.peer].decode(ids, max_new_tokens, PEERS[arm.peer].settings[arm.setting])
    except SettingError as error:
        arm.failure = str(error)
    except WorkerError as error:
        arm.failure = str(error)
        workers.pop(arm.peer).close()
    return None


def measure(
    workers: dict[str, Worker], arms: list[Arm], prompts: list[list[int]], max_new_tokens: int, rounds: int
) -> None:
    """Fill the arms."""
    for arm in arms:
        decode(workers, arm, prompts[0], min(_WARM_UP, max_new_tokens))
    steps = list(turns(arms, len(prompts), rounds))
    with click.progressbar(steps, label="decoding", file=sys.stderr) as bar:
        for prompt, arm in bar:
            reply = decode(workers, arm, prompts[prompt], max_new_tokens)
            if reply is not None:
                arm.add(prompt, reply)


def encode(bundle: Path, prompts: list[Prompt], max_new_tokens: int) -> list[list[int]]:
    """As chat messages where the bundle has a template.

    Raises:
        OutriderError: one leaves no room for the tokens.
    """
    opened = Bundle(bundle)
    codec, encoded = TextCodec(opened), []
    for prompt in prompts:
        ids = codec.encode(codec.turn(prompt.text))
        if len(ids) + max_new_tokens > opened.manifest.max_length:
            raise OutriderError(f"prompt {prompt.id}: its {len(ids)} tokens leave no room for {max_new_tokens} more")
        encoded.append(ids)
    return encoded


def parse_peers(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in PEERS]:
        raise OutriderError(f"unknown peer {unknown[0]!r}; choose from {', '.join(PEERS)}")
    return names


@click.command()
@click.argument("checkpoint")
@click.option("--draft", required=True, help="Folder of the draft.")
@click.option("--work", type=Path, required=True)
@click.option("--precision", type=click.Choice(["int4", "fp32"]), default="int4")
@click.option("--prompts", "path", type=Path, default=HERE / "prompts.jsonl")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=64)
@click.option("--rounds", type=click.IntRange(min=1), default=2)
@click.option("--peers", "names", help=f"Some of {','.join(PEERS)}; by default all that can be had.")
@click.option("--llama-cpp", type=Path, help="Folder with llama-server and llama-quantize.")
@click.option("--llama-draft", type=Path, help="The draft as a GGUF file, as llama.cpp converts it from DIR/draft.")
@click.option("--json", "json_path", type=Path, help="Write all figures there.")
@click.option("--plot", "plot_path", type=Path, help="Draw them there (needs the extra `bench`).")
def main(
    checkpoint: str,
    draft: str,
    work: Path,
    precision: str,
    path: Path,
    max_new_tokens: int,
    rounds: int,
    names: str | None,
    llama_cpp: Path | None,
    llama_draft: Path | None,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    try:
        prompts = read_prompts(path)
        chosen = parse_peers(names or ",".join(name for name in PEERS if name != "llama.cpp" or llama_cpp))
        if plot_path and find_spec("matplotlib") is None:
            raise OutriderError("--plot needs matplotlib; run `pip install 'outrider[bench]'`")
        if llama_cpp and not (llama_cpp / "llama-server").is_file():
            raise OutriderError(f"--llama-cpp {llama_cpp} holds no llama-server")
        for out in (json_path, plot_path):
            if out and not out.parent.is_dir():
                raise OutriderError(f"{out.parent} does not exist; {out.name} cannot be written there")
        given = Given(Work(work, checkpoint, draft), precision, Path(sys.executable), llama_cpp, llama_draft)
        encoded = encode(given.work.bundle(precision), prompts, max_new_tokens)
        workers, arms = start(chosen, given)
        versions = {name: worker.version for name, worker in workers.items()}
        try:
            measure(workers, arms, encoded, max_new_tokens, rounds)
        finally:
            for worker in workers.values():
                worker.close()
    except OutriderError as error:
        raise click.ClickException(str(error)) from None
    report = Report(arms, [prompt.category for prompt in prompts], {name: PEERS[name].reference for name in chosen})
    click.echo(f"{precision}, {THREADS} threads, {len(prompts)} prompts x {max_new_tokens} tokens, {rounds} rounds")
    click.echo("; ".join(versions.values()))
    click.echo(table(report))
    if json_path:
        setup = {"precision": precision, "prompts": len(prompts), "max_new_tokens": max_new_tokens, "rounds": rounds}
        json_path.write_text(json.dumps({**setup, "versions": versions, **report.as_dict()}, indent=2) + "\n")
    if plot_path:
        plot(report, plot_path)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers end then, too
    main()
