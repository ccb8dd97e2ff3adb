"""Checks of one provider for ``gpu_check.py``, over a small pair: logits, rows, replay of CUDA graphs, whole rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from gpu_pair import (
    TIERS,
    FaultError,
    Model,
    SkippedError,
    build_engines,
    checkpoint_pair,
    format_of,
    open_pair,
    random_pair,
    require,
    shapes_of,
    verdict,
    write_pair,
)
from numpy.typing import NDArray

from outrider.engines.bundle import Bundle
from outrider.engines.cuda import CudaBuffer
from outrider.engines.engine import Engine, PlanShape
from outrider.engines.memory import HostBuffer, HostMemory
from outrider.engines.ort import OrtEngine
from outrider.engines.plan import BoundPlan
from outrider.engines.probe import probe_rows
from outrider.runtime import Pipeline, SamplingOptions
from outrider.runtime.choose import Chooser
from outrider.runtime.sampling.noise import log_uniforms, stream_key
from outrider.runtime.stats import DecodeStats

SMALL = {
    "hidden": 512,
    "intermediate": 1408,
    "layers": 6,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 64,
    "vocab": 4096,
}
TINY = {"hidden": 64, "intermediate": 96, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 320}
LAWS: dict[str, dict[str, Any]] = {"greedy": {}, "temperature": {"temperature": 0.8, "seed": 7}}
_BLEND = 0.03  # some drafts are refused at every place, and in some rounds none
_MAX_LENGTH = 512
_CONTEXT = 24
_INPUTS, _SWEEPS = 8, 6
_PROMPTS = 3  # the first of them warms up
_LARGEST_DIFFERENCE = 0.05  # of the largest logit: far above rounding to float16, far below another model

Report = Callable[[dict[str, Any]], None]


@dataclass
class Subject:
    """A provider with its engines, and the CPU's of the same bundle where there is an ONNX Runtime."""

    bundle: Bundle
    provider: str
    target: Engine
    draft: Engine
    references: dict[str, Engine]
    tokens: int
    difference: float = 0.0  # the largest of a logit, once parity is known

    @property
    def engines(self) -> dict[str, Engine]:
        return {"target": self.target, "draft": self.draft}


def check_provider(provider: str, work: Path, source: str | None, report: Report) -> dict[str, Any]:
    """All checks of a provider, each reported when it is done; a failure of one does not end the others."""
    require(provider)
    bundle = small_bundle(provider, work, source)
    figures: dict[str, Any] = {"build_seconds": build_engines(bundle, provider), "checks": {}}
    references: dict[str, Engine] = {}
    if find_spec("onnxruntime") is not None:
        references |= {role: OrtEngine(bundle.path(info.graph), info) for role, info in bundle.manifest.models.items()}
    target, draft = open_pair(bundle, provider)
    subject = Subject(bundle, provider, target, draft, references, tokens=24 if provider == "cpu" else 48)
    figures["engine"] = {key: str(value) for key, value in target.describe().items()}
    for name, check in (("parity", parity), ("rows", rows), ("replay", replay), ("rounds", rounds)):
        figures["checks"][name] = _outcome(check, subject)
        report(figures)
    return figures


def small_bundle(provider: str, work: Path, source: str | None) -> Bundle:
    """The pair in the format of the provider, written once for all that share it."""
    lowering, precision = format_of(provider)
    folder = work / f"small-{lowering}-{precision}"
    if not folder.exists():
        shape = TINY if provider == "cpu" else SMALL
        pair: dict[str, Model] = (
            checkpoint_pair(source) if source else random_pair({"target": shape, "draft": shape}, _BLEND)
        )
        return write_pair(folder, pair, lowering, precision, _MAX_LENGTH)
    return Bundle(folder)


def _outcome(check: Callable[[Subject], dict[str, Any]], subject: Subject) -> dict[str, Any]:
    try:
        return {"status": "ok", **check(subject)}
    except Exception as error:  # libraries raise anything; the other checks still say something
        return verdict(error)


def parity(subject: Subject) -> dict[str, Any]:
    """Logits of a prefill, verify passes and steps against the CPU's on the same bundle."""
    if not subject.references:
        raise SkippedError("onnxruntime absent: there is nothing to compare with")
    rng = np.random.default_rng(1)
    passes: dict[str, Any] = {}
    for role, engine in subject.engines.items():
        reference, vocab = subject.references[role], engine.info.vocab_size
        ids = rng.integers(0, vocab, (1, _CONTEXT))
        wanted = max(TIERS) + 1 if role == "target" else 1
        passes[f"{role} prefill"] = _difference(engine, reference, ids, 0, wanted)
        for width, logit_rows in shapes_of(role):
            ids = rng.integers(0, vocab, (1, width))
            passes[f"{role} {width} rows"] = _difference(engine, reference, ids, _CONTEXT, logit_rows)
    share = float(np.mean([entry["same_argmax"] for entry in passes.values()]))
    subject.difference = max(entry["max_difference"] for entry in passes.values())
    figures = {"max_difference": subject.difference, "same_argmax": share, "passes": passes}
    wrong = [name for name, entry in passes.items() if not entry["max_difference"] <= entry["limit"]]
    if wrong:
        raise FaultError(f"logits are not the CPU's: {', '.join(wrong)}", figures)
    return figures


def _difference(engine: Engine, reference: Engine, ids: NDArray[np.int64], length: int, wanted: int) -> dict[str, Any]:
    lengths = np.full(1, length, np.int32)
    found, expected = (one.plan(ids.shape[1], wanted).run(ids, lengths)[0].copy() for one in (engine, reference))
    return {
        "max_difference": float(np.abs(found - expected).max()),
        "same_argmax": float((found.argmax(-1) == expected.argmax(-1)).mean()),
        "limit": _LARGEST_DIFFERENCE * float(np.abs(expected).max()),
    }


def rows(subject: Subject) -> dict[str, Any]:
    probe = probe_rows(subject.target, TIERS)
    return {"exactness": probe.exactness, "min_rows": probe.min_rows}


def replay(subject: Subject) -> dict[str, Any]:
    """One plan run again and again, its inputs changing, against first runs of plans of a fresh engine.

    What a captured graph can get wrong (onnxruntime issues 29782, 20050, 26609): inputs of the run it was captured in,
    the first result for all inputs, a copy that comes too early. And runs made for warming up move caches (32243).
    """
    fresh = open_pair(subject.bundle, subject.provider)
    wrong, plans = [], 0
    for role, other in zip(subject.engines, fresh, strict=True):
        engine = subject.engines[role]
        for width, logit_rows in shapes_of(role):
            shape = PlanShape(width, logit_rows)
            inputs = _inputs(engine, width)
            for one in (engine, other):
                _fill(one)
            expected = [_observed(BoundPlan(other, shape, width == 1), *pair) for pair in inputs]  # type: ignore[arg-type]
            faults = _replayed(engine.plan(*shape), inputs, expected)
            faults += [f"{name} differs" for name in _other_caches(engine, other, _CONTEXT + _INPUTS * width)]
            wrong += [f"{role}, {width} rows: {fault}" for fault in faults]
            plans += 1
    figures = {"plans": plans, "different": len(wrong), "first": wrong[:5]}
    if wrong:
        raise FaultError(f"{len(wrong)} results are not those of first runs, as {wrong[0]}", figures)
    return figures


def _inputs(engine: Engine, width: int) -> list[tuple[NDArray[np.int64], NDArray[np.int32]]]:
    """Pieces of one text: begun again at any of them, each finds the same cache before it."""
    ids = np.random.default_rng(width).integers(0, engine.info.vocab_size, (_INPUTS, 1, width))
    return [(ids[index], np.full(1, _CONTEXT + index * width, np.int32)) for index in range(_INPUTS)]


def _fill(engine: Engine) -> None:
    ids = np.random.default_rng(2).integers(0, engine.info.vocab_size, (1, _CONTEXT))
    engine.plan(_CONTEXT, 1).run(ids, np.zeros(1, np.int32))


def _observed(plan: Any, ids: NDArray[np.int64], lengths: NDArray[np.int32]) -> tuple[bytes, ...]:
    logits = plan.run(ids, lengths).tobytes()
    return (logits, *(part.tobytes() for part in plan.choices()))


def _replayed(plan: Any, inputs: Sequence[Any], expected: Sequence[tuple[bytes, ...]]) -> list[str]:
    faults = []
    rng = np.random.default_rng(5)
    for sweep in range(_SWEEPS):
        # Always on to the end: a pass may leave junk behind its rows, which the next one overwrites.
        for index in range(0 if sweep == 0 else rng.integers(_INPUTS), _INPUTS):
            if _observed(plan, *inputs[index]) != expected[index]:
                faults.append(f"input {index} in sweep {sweep}")
    # Without a wait in between, as the loop submits: nothing may be overwritten before it was used.
    for ids, lengths in inputs:
        plan.submit(ids, lengths)
    found = plan.choices()
    if tuple(part.tobytes() for part in found) != expected[-1][1:]:
        faults.append("the last of runs that were submitted at once")
    return faults


def _other_caches(engine: Any, other: Any, length: int) -> list[str]:
    caches = ((name, cache, other.state.caches[name]) for name, cache in engine.state.caches.items())
    return [
        name for name, mine, its in caches if not np.array_equal(mine.read()[:, :, :length], its.read()[:, :, :length])
    ]


def rounds(subject: Subject) -> dict[str, Any]:
    """Ids of every way to decode against plain decoding on this device, and those against the CPU's."""
    pipeline = Pipeline(subject.bundle, subject.target, subject.draft)
    rng = np.random.default_rng(3)
    vocab = subject.target.info.vocab_size
    prompts = [rng.integers(1, vocab, _CONTEXT).tolist() for _ in range(_PROMPTS)]
    prompts = [ids[:8] * 3 if number == 1 else ids for number, ids in enumerate(prompts)]  # one that repeats itself
    arms: list[dict[str, Any]] = []
    near: list[dict[str, Any]] = []
    for law, changes in LAWS.items():
        options = SamplingOptions(max_new_tokens=subject.tokens, ignore_eos=True, **changes)
        plain = [_run(pipeline, ids, options, "none", 0)[0] for ids in prompts]
        arms += _arms(pipeline, prompts, plain, law, options)
        pairs = zip(prompts, plain, strict=True) if subject.references else ()
        chooser = pipeline.new_request(prompts[0], options).chooser
        near += [_against_cpu(subject, *pair, law, chooser) for pair in pairs]
    differing = [f"{arm['law']}, {arm['name']}" for arm in arms if not arm["same_ids"]]
    figures = {
        "exactness": pipeline.exactness,
        "arms": arms,
        "differing": differing,
        "cpu": near,
        "cpu_same": sum(entry["first_difference"] is None for entry in near),
        "host_microseconds": _of_rounds(arms, "host_microseconds"),
        "reads_a_round": _of_rounds(arms, "reads_a_round"),
        "round_ms": _of_rounds(arms, "round_ms"),
    }
    far = [entry for entry in near if not entry["near_tie"]]
    if differing and pipeline.exactness != "tolerance":
        raise FaultError(f"ids are not those of plain decoding: {'; '.join(differing)}", figures)
    if far:
        raise FaultError(f"ids differ from the CPU's where no tie is near: {far[0]}", figures)
    return figures


def _of_rounds(arms: Sequence[dict[str, Any]], name: str) -> float:
    """The largest among rounds of the draft model on the device."""
    return float(max(arm[name] for arm in arms if arm["drafter"] == "model" and arm["way"] == "resident"))


def _arms(
    pipeline: Pipeline, prompts: Sequence[list[int]], plain: Sequence[list[int]], law: str, options: SamplingOptions
) -> list[dict[str, Any]]:
    found = []
    for way, asked in (("resident", options), ("host", options.replace({"logprobs": 0}))):
        for drafter, k in [("none", 0), *((drafter, k) for drafter in ("model", "ngram") for k in TIERS)]:
            total, reads, same = DecodeStats(), 0, True
            for number, (ids, expected) in enumerate(zip(prompts, plain, strict=True)):
                tokens, stats, read = _run(pipeline, ids, asked, drafter, k)
                same = same and tokens == expected
                if number:  # the first one makes plans and captures graphs
                    total.add(stats)
                    reads += read
            arm = {"name": f"{drafter} K={k} {way}", "law": law, "drafter": drafter, "k": k, "way": way}
            found.append({**arm, "same_ids": same, **_arm_figures(total, reads)})
    return found


def _arm_figures(total: DecodeStats, reads: int) -> dict[str, float]:
    return {
        "mean_acceptance_length": total.mean_acceptance_length,
        "draft_acceptance_rate": total.draft_acceptance_rate,
        "host_microseconds": total.host_microseconds_per_round,
        "reads_a_round": reads / total.num_spec_steps,
        "round_ms": 1e3 * total.decode_seconds / total.num_spec_steps,
        "ms_per_token": 1e3 * total.decode_seconds / total.num_round_tokens,
    }


def _run(
    pipeline: Pipeline, ids: list[int], options: SamplingOptions, drafter: str, k: int
) -> tuple[list[int], DecodeStats, int]:
    """Ids, stats, and the number of copies to the host behind the prefill."""
    pipeline.clear_caches()
    request = pipeline.new_request(ids, options)
    with counted_reads() as counter:
        tokens = pipeline.decode(request, drafter, k)
        next(tokens)
        counter[0] = 0
        for _ in tokens:
            pass
    return request.output.tokens, request.stats, counter[0]


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Copies to the host, those of logits included, in the one entry of the list."""
    counter = [0]
    originals: dict[Any, Any] = {kind: kind.read for kind in (CudaBuffer, HostBuffer)}
    copy = HostMemory.copy

    def counting(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def read(buffer: Any) -> Any:
            counter[0] += 1
            return original(buffer)

        return read

    def copy_uncounted(memory: HostMemory, source: Any, start: int, target: Any, at: int) -> None:
        target.array.reshape(-1)[at] = source.array.reshape(-1)[start]

    for kind, original in originals.items():
        kind.read = counting(original)
    HostMemory.copy = copy_uncounted  # type: ignore[method-assign]
    try:
        yield counter
    finally:
        HostMemory.copy = copy  # type: ignore[method-assign]
        for kind, original in originals.items():
            kind.read = original


def _against_cpu(subject: Subject, ids: list[int], tokens: list[int], law: str, chooser: Chooser) -> dict[str, Any]:
    """Where the CPU first chooses another token behind the same text, and how far apart its two best scores are there.

    One pass over the whole text stands for decoding it: up to the first difference both have the same tokens.
    """
    engine, text = subject.references["target"], np.array([[*ids, *tokens[:-1]]])
    rows = engine.plan(text.shape[1], len(tokens)).run(text, np.zeros(1, np.int32))[0]
    for index, token in enumerate(tokens):
        scores = _scores(rows[index].astype(np.float64), len(ids) + index, chooser)
        if scores.argmax() != token:
            best = np.sort(scores)[-2:]
            gap = float(best[1] - best[0])
            return {"law": law, "first_difference": index, "gap": gap, "near_tie": gap <= 4 * subject.difference}
    return {"law": law, "first_difference": None, "gap": None, "near_tie": True}


def _scores(logits: NDArray[np.float64], position: int, chooser: Chooser) -> NDArray[np.float64]:
    """Logits, with the noise of their law in the same unit: the best is chosen."""
    temperature = chooser.options.temperature
    if chooser.options.greedy or temperature is None:
        return logits
    noise = log_uniforms(stream_key(chooser.seed, position), np.arange(len(logits)))
    scores: NDArray[np.float64] = logits - temperature * np.log(-noise)
    return scores
