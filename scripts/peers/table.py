"""The peers, how each is made ready, and the settings it is measured with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.work import THREADS, Work, run

from outrider.engines.errors import OutriderError

Settings = dict[str, dict[str, Any]]  # by name, what the worker gets
Ready = tuple[Path, dict[str, Any]]  # the worker's interpreter and configuration

_TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Given:
    work: Work
    precision: str
    python: Path  # Outrider's own
    llama_cpp: Path | None = None
    llama_draft: Path | None = None


@dataclass(frozen=True)
class Peer:
    """``prepare`` raises OutriderError where the peer cannot be had; others owe the ids of ``reference``."""

    worker: str
    prepare: Callable[[Given], Ready]
    settings: Settings
    reference: str = "plain"


def _outrider(given: Given) -> Ready:
    return given.python, {"bundle": str(given.work.bundle(given.precision)), "threads": THREADS}


def _genai(given: Given) -> Ready:
    """Its own builder's export, in the block size and accuracy level that are Outrider's too; the draft in int8."""
    packages = ("onnxruntime-genai==0.18.0", "onnx", "onnx-ir", "transformers>=5", "sentencepiece")
    python = given.work.python("genai", _TORCH, *packages)
    models = {"target": (given.work.plain_target(), given.precision), "draft": (given.work.plain_draft(), "int8")}

    def make(folder: Path) -> None:
        configs = {}
        for role, (source, precision) in models.items():
            builder = (python, "-m", "onnxruntime_genai.models.builder", "-e", "cpu", "-p", precision)
            options = ("int4_block_size=32", "int4_accuracy_level=4", "hf_token=false")
            run(*builder, "-i", source, "-o", folder / role, "--extra_options", *options)
            path = folder / role / "genai_config.json"
            config = configs[role] = json.loads(path.read_text())
            config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = THREADS
            # It cannot pass over an end of sequence: the last token, which is never chosen, has to be the end.
            config["model"]["eos_token_id"] = config["model"]["vocab_size"] - 1
            path.write_text(json.dumps(config))
        pair = configs["target"]
        pair["model"] |= {"type": "speculative", "draft": configs["draft"]["model"]["decoder"]}
        for part, role in (("decoder", "target"), ("draft", "draft")):
            pair["model"][part]["filename"] = f"{role}/model.onnx"
            # Without it the threads of the idle model spin on the busy one's cores: 1.7 times as slow on two.
            pair["model"][part]["session_options"]["session.force_spinning_stop"] = "1"
        (folder / "genai_config.json").write_text(json.dumps(pair))

    folder = given.work.once(f"genai-{given.precision}", make)
    return python, {"target": str(folder / "target"), "pair": str(folder)}


def _openvino(given: Given) -> Ready:
    """Exported by optimum-intel; its int4 has groups of 32 with zero points, the embedding in int8 (its defaults)."""
    # torchvision comes with optimum-intel, must be of torch's very build, and is not needed for text.
    packages = ("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0")
    python = given.work.python("openvino", _TORCH, *packages, without="torchvision")
    fp32 = given.precision == "fp32"
    formats = {
        "target": (given.work.plain_target(), ["fp32"] if fp32 else ["int4", "--group-size", "32", "--ratio", "1.0"]),
        "draft": (given.work.plain_draft(), ["int8"]),
    }

    def make(folder: Path) -> None:
        for role, (source, weights) in formats.items():
            export = (python, "-m", "optimum.commands.optimum_cli", "export", "openvino", "-m", source)
            run(*export, "--task", "text-generation-with-past", "--weight-format", *weights, folder / role)

    folder = given.work.once(f"openvino-{given.precision}", make)
    # By itself it computes in bfloat16 where the processor does, over a cache in int8.
    properties = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"} if fp32 else {}
    paths = {role: str(folder / role) for role in formats}
    return python, {**paths, "threads": THREADS, "properties": properties}


def _transformers(given: Given) -> Ready:
    if given.precision != "fp32":
        raise OutriderError(f"no {given.precision} on the CPU; compare with --precision fp32")
    python = given.work.python("transformers", _TORCH, "transformers>=5")
    paths = {"target": str(given.work.plain_target()), "draft": str(given.work.plain_draft())}
    return python, {**paths, "threads": THREADS}


def _llama_cpp(given: Given) -> Ready:
    """Q4_0 is its fastest 4-bit type on a CPU (blocks of 32)."""
    if given.llama_cpp is None or given.llama_draft is None:
        raise OutriderError("give --llama-cpp and --llama-draft")
    if not given.work.checkpoint.endswith(".gguf"):
        raise OutriderError("the checkpoint is no GGUF file")
    kind = "F32" if given.precision == "fp32" else "Q4_0"
    quantize = (given.llama_cpp / "llama-quantize", "--allow-requantize", "--pure", given.work.checkpoint)
    target = given.work.once(f"llama-{kind}.gguf", lambda path: run(*quantize, path, kind))
    models = {"target": str(target), "draft": str(given.llama_draft.resolve())}
    # By itself its cache is in float16.
    arguments = ["-ctk", "f32", "-ctv", "f32"] if given.precision == "fp32" else []
    server = str(given.llama_cpp / "llama-server")
    return given.python, {**models, "server": server, "arguments": arguments, "threads": THREADS}


def _of_outrider() -> Settings:
    settings: Settings = {"plain": {"drafter": "none", "k": 0, "exact": False}, "exact": {"drafter": "none", "k": 0}}
    for drafter, tiers in {"ngram": (2, 4), "model": (1, 2), "cascade": (1, 2, 4)}.items():
        settings |= {f"{drafter}, K={k}": {"drafter": drafter, "k": k} for k in tiers}
    return settings | {"auto": {"drafter": "cascade", "k": None}}


def _of_genai() -> Settings:
    settings: Settings = {"plain": {}}
    for name, drafter in {"ngram": {"ngram_size": 3}, "draft": {"draft": True}}.items():
        settings |= {f"{name}, K={k}": drafter | {"max_draft_tokens": k} for k in (2, 4)}
        settings[f"{name}, adaptive"] = drafter | {"min_adaptive_k": 2}
    return settings


def _of_openvino() -> Settings:
    settings: Settings = {"plain": {"mode": "plain"}}
    lookup = {"mode": "lookup", "max_ngram_size": 3}
    settings |= {f"lookup, K={k}": lookup | {"num_assistant_tokens": k} for k in (2, 4)}
    settings |= {f"draft, K={k}": {"mode": "draft", "num_assistant_tokens": k} for k in (2, 4)}
    settings["draft, dynamic"] = {"mode": "draft", "assistant_confidence_threshold": 0.4}
    return settings


def _of_transformers() -> Settings:
    fixed = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    settings: Settings = {"plain": {"mode": "plain"}}
    settings |= {f"lookup, K={k}": {"mode": "lookup", "num_assistant_tokens": k} for k in (2, 4)}
    settings |= {f"draft, K={k}": {"mode": "draft", "num_assistant_tokens": k} | fixed for k in (2, 4)}
    settings["draft, dynamic"] = {"mode": "draft"}
    return settings


def _of_llama_cpp() -> Settings:
    settings: Settings = {"plain": {"arguments": []}}
    for n, k in ((2, 2), (3, 4)):  # it drafts no fewer tokens than the n that it looks up
        sizes = ["--spec-ngram-simple-size-n", str(n), "--spec-ngram-simple-size-m", str(k)]
        settings[f"ngram, K={k}"] = {"arguments": ["--spec-type", "ngram-simple", *sizes]}
    drafting = ["--spec-type", "draft-simple", "--spec-draft-n-max"]
    settings |= {f"draft, K={k}": {"draft": True, "arguments": [*drafting, str(k)]} for k in (2, 4)}
    return settings


PEERS = {
    "outrider": Peer("outrider_worker.py", _outrider, _of_outrider(), reference="exact"),
    "onnxruntime-genai": Peer("genai_worker.py", _genai, _of_genai()),
    "openvino": Peer("openvino_worker.py", _openvino, _of_openvino()),
    "transformers": Peer("transformers_worker.py", _transformers, _of_transformers()),
    "llama.cpp": Peer("llama_cpp_worker.py", _llama_cpp, _of_llama_cpp()),
}
