"""What a bundle's passes cost on this device, and how often its drafts stand: measured, kept beside it, read again.

``outrider tune`` measures in full and writes ``tuning/<fingerprint>.json`` into the bundle's folder, the fingerprint
being that of the device. Without a file that fits, a short version is measured when K is first to be chosen.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from outrider.engines.bundle import ENGINES, Bundle
from outrider.engines.engine import PREFILL_CHUNK, Engine
from outrider.engines.errors import OutriderError
from outrider.runtime.controller import DEFAULT_PRIORS, EDGES, Controller, Priors
from outrider.runtime.costs import Costs
from outrider.runtime.sampling.options import SamplingOptions
from outrider.runtime.stats import DecodeStats
from outrider.runtime.trace import TracedRequest, count_priors, read_costs, record

if TYPE_CHECKING:
    from outrider.runtime.generate import Pipeline

FORMAT = "outrider-tuning"
VERSION = 1
FOLDER = "tuning"
Progress = Callable[[str, float], None]

_LENGTHS = (64, 512, 2048, 8192)
_SHORT_LENGTH = 128
_DRAFT_ROWS = (1, 2, 4, 16, 64, PREFILL_CHUNK)
_REPEATS = 11
_STEP = "draft step"
_SECONDS = {"full": 30.0, "short": 0.6}  # of passes, but each is run once at least
_TOKENS = {"full": 48, "short": 8}  # decoded for the host's part
# Of several kinds, so that drafts of every source stand and fall.
_PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Correct the spelling and return the full text: The wether was nice yesterday, so we whent to the park and had a "
    "picnic. In the evning it started to rain, so we whent home.",
    "Extract the names and ages as JSON: Anna is 31 years old, Boris is 27 years old, and Carla is 45 years old.",
    "A train leaves at 9:40 and arrives at 12:15. How long does the journey take? Think step by step.",
    "Translate into French: The library opens at nine and closes at six.",
)


@dataclass(frozen=True)
class Tuning:
    """``origin`` says in a line where the figures come from; ``samples`` are seconds, by what was timed and length."""

    costs: Costs
    priors: Priors
    origin: str
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @property
    def draft_cost(self) -> float | None:
        """c: a draft step / a plain round, host's parts included; None without a draft model."""
        length = self.costs.lengths[0]
        return self.costs.step(length) / self.costs.rounds(length)[0] if self.costs.draft else None

    @property
    def verify_cost(self) -> list[float]:
        """v(K) for K = 0, 1, ..: a round with K drafts to verify / a plain round, at the least length."""
        rounds = self.costs.rounds(self.costs.lengths[0])
        return [seconds / rounds[0] for seconds in rounds]


def tune(
    pipeline: Pipeline,
    *,
    short: bool = False,
    reason: str = "",
    progress: Progress = lambda stage, share: None,
) -> Tuning:
    """Measure. What the pipeline's caches held is forgotten.

    Args:
        short: a second or two of it, at one context length; how often drafts stand is then taken from elsewhere.
        reason: for measuring now, to be said.
        progress: told what is being measured, and the share of the whole that is.
    """
    kind = "short" if short else "full"
    pipeline.clear_caches()  # first: passes overwrite what was there, and may be interrupted
    samples = _time_passes(pipeline, short, _SECONDS[kind], progress)
    costs = _costs(pipeline, samples)
    priors = DEFAULT_PRIORS
    try:
        recorded, costs = _try_drafts(pipeline, costs, _PROMPTS[:1] if short else _PROMPTS, _TOKENS[kind], progress)
    except OutriderError as error:  # a draft model that gives no numbers must not stop those who do not ask it
        reason = "; ".join(part for part in (reason, f"without drafts: {error}") if part)
    else:
        priors = priors if short else _pooled(count_priors(recorded))
    pipeline.clear_caches()
    origin = "measured in short" if short else f"tuned {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
    origin = f"{origin} ({reason})" if reason else origin
    return Tuning(costs, priors, origin, samples)


def _time_passes(
    pipeline: Pipeline, short: bool, limit: float, progress: Progress
) -> dict[str, dict[str, list[float]]]:
    """Seconds of passes by what they are and context length, all kinds in turn, so that drift meets all alike."""
    target, draft, longest = pipeline.target, pipeline.draft, pipeline.manifest.max_length
    tiers = (0, 1, *pipeline.tiers) if short else range(max(pipeline.tiers) + 1)
    lengths = [min(_SHORT_LENGTH, longest)] if short else sorted({min(length, longest) for length in _LENGTHS})
    widths = {max(k + 1, target.min_rows): k for k in tiers}  # of equal passes one
    verify = [_Pass(f"verify {k}", pipeline.target_engine, rows, rows) for rows, k in widths.items()]
    jobs = [(one, one) for one in verify]
    if draft is not None:
        drafting = [_Pass(f"draft {rows}", draft.engine, rows, 1) for rows in _DRAFT_ROWS[:: 2 if short else 1]]
        jobs += [(verify[0], one) for one in drafting]
        jobs.append((drafting[0], drafting[0]._replace(name=_STEP)))
    for engine in {id(one.engine): one.engine for _, one in jobs}.values():
        _fill(engine, lengths[-1])
    samples: dict[str, dict[str, list[float]]] = {one.name: {} for _, one in jobs}
    start = perf_counter()
    rounds = [(repeat, length) for repeat in range(_REPEATS + 1) for length in lengths]
    for number, (repeat, length) in enumerate(rounds):
        if repeat > 1 and perf_counter() - start > limit:
            break
        for before, one in jobs:
            if length + max(before.rows, one.rows) > one.engine.info.capacity:
                continue
            before.time(length)
            seconds = one.time(length)
            if repeat:  # the first finds nothing prepared
                samples[one.name].setdefault(str(length), []).append(seconds)
        progress("passes", 0.6 * (number + 1) / len(rounds))
    return samples


class _Pass(NamedTuple):
    """A pass that is timed behind another: what was in the processor's caches before decides how long it takes."""

    name: str
    engine: Engine
    rows: int
    logit_rows: int

    def time(self, length: int) -> float:
        return _time_pass(self.engine, self.rows, self.logit_rows, length)


def _fill(engine: Engine, length: int) -> None:
    """Write the cache once: memory that never was written to is read faster than any other."""
    for start in range(0, length, PREFILL_CHUNK):
        rows = min(PREFILL_CHUNK, engine.info.capacity - start)
        if rows > 0:
            _time_pass(engine, rows, 1, start)


def _time_pass(engine: Engine, rows: int, logit_rows: int, length: int) -> float:
    plan, ids, lengths = engine.plan(rows, logit_rows), np.ones((1, rows), np.int64), np.full(1, length, np.int32)
    start = perf_counter()
    if engine.heads is None:
        plan.run(ids, lengths)
    else:
        plan.submit(ids, lengths)
        plan.choices()
    return perf_counter() - start


def _try_drafts(
    pipeline: Pipeline, costs: Costs, prompts: Sequence[str], tokens: int, progress: Progress
) -> tuple[list[TracedRequest], Costs]:
    """What would have stood of all drafts for these prompts, and the host's part of rounds and draft steps."""
    longest = pipeline.manifest.max_length
    requests, plain, recorded, adaptive = [], DecodeStats(), DecodeStats(), DecodeStats()
    options = SamplingOptions(max_new_tokens=tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        ids = _encode(pipeline, prompt)[: longest // 2]
        traced, stats = record(pipeline, str(number), "", ids, options)
        requests.append(traced)
        recorded.add(stats)
        if number == 0:
            pipeline.clear_caches()
            # Each twice: what runs for the first time takes longer.
            for total, k in ((DecodeStats(), 0), (plain, 0), (DecodeStats(), None), (adaptive, None)):
                request = pipeline.new_request(ids, options)
                for _ in pipeline.decode(request, pipeline.default_drafter, k, controller=Controller(costs)):
                    pass
                total.add(request.stats)
        progress("drafts", 0.6 + 0.4 * (number + 1) / len(prompts))
    extra = recorded.num_spec_steps * (recorded.host_microseconds_per_round - plain.host_microseconds_per_round)
    step = max(0.0, extra / recorded.draft_steps) if recorded.draft_steps else 0.0
    steps = adaptive.draft_steps / max(1, adaptive.num_spec_steps)
    round_host = max(plain.host_microseconds_per_round, adaptive.host_microseconds_per_round - steps * step)
    return requests, replace(costs, round_host=1e-6 * round_host, draft_host=1e-6 * step)


def _encode(pipeline: Pipeline, prompt: str) -> list[int]:
    """As a chat message where the template takes it, else as it is."""
    with suppress(OutriderError):
        return pipeline.codec.encode(pipeline.codec.turn(prompt))
    return pipeline.codec.encode(prompt)


def _pooled(counted: Priors) -> Priors:
    """With what other bundles show, for classes that were seldom seen."""
    return {
        source: [(a + b, n + m) for (a, n), (b, m) in zip(classes, DEFAULT_PRIORS[source], strict=True)]
        for source, classes in counted.items()
    }


def _costs(pipeline: Pipeline, samples: Mapping[str, Mapping[str, Sequence[float]]]) -> Costs:
    """Medians; a K that was not timed costs what the pass that it runs in costs, or lies between its neighbours."""
    lengths = sorted({int(length) for times in samples.values() for length in times})
    medians = {
        name: [statistics.median(times[str(length)]) for length in lengths if str(length) in times]
        for name, times in samples.items()
    }
    timed = [int(name.split()[1]) for name in medians if name.startswith("verify")]
    table, min_rows = pipeline.target_engine.table, pipeline.target.min_rows
    verify = []
    for k in range(max(pipeline.tiers) + 1):
        if table or k + 1 < min_rows:
            wider = min(other for other in timed if other >= k)
            verify.append(tuple(medians[f"verify {wider}"]))
        else:
            columns = zip(*(medians[f"verify {other}"] for other in sorted(timed)), strict=True)
            verify.append(tuple(float(np.interp(k, sorted(timed), column)) for column in columns))
    # A draft may have fewer positions than the target: behind them it is not asked.
    drafting = {
        name: (*times, *[times[-1]] * (len(lengths) - len(times)))
        for name, times in medians.items()
        if times and not name.startswith("verify")
    }
    step = drafting.pop(_STEP, ())
    rows = sorted(int(name.split()[1]) for name in drafting)
    return Costs(tuple(lengths), tuple(verify), tuple(rows), tuple(drafting[f"draft {count}"] for count in rows), step)


def devices(pipeline: Pipeline) -> str:
    """What decides how long passes take."""
    draft = pipeline.draft_engine
    return pipeline.target_engine.device + (f"; draft: {draft.device}" if draft else "")


def tuning_path(bundle: Bundle, device: str) -> Path:
    return bundle.folder / FOLDER / f"{hashlib.sha256(device.encode()).hexdigest()[:12]}.json"


def write_tuning(pipeline: Pipeline, tuning: Tuning) -> Path:
    """Raises OSError: the folder cannot be written to."""
    device = devices(pipeline)
    path = tuning_path(pipeline.bundle, device)
    record = {
        "format": FORMAT,
        "version": VERSION,
        "origin": tuning.origin,
        "device": device,
        "bundle": _bundle_key(pipeline.bundle),
        "costs": asdict(tuning.costs),
        "priors": tuning.priors,
        "samples": tuning.samples,
    }
    path.parent.mkdir(exist_ok=True)
    work = path.with_suffix(".new")
    work.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    work.replace(path)
    return path


def read_tuning(pipeline: Pipeline) -> Tuning | str:
    """What ``outrider tune`` wrote for this device, or why there is nothing to use."""
    device = devices(pipeline)
    path = tuning_path(pipeline.bundle, device)
    again = f"run `outrider tune {pipeline.bundle.folder}` again"
    if not path.is_file():
        others = sorted(path.parent.glob("*.json"))
        if others:
            return f"{path.parent} holds no figures of this device ({device}), only of others; {again}"
        return f"not tuned: run `outrider tune {pipeline.bundle.folder}`"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        found = record["format"], record["version"]
        if found != (FORMAT, VERSION):
            return f"{path} is {found[0]} version {found[1]}; {again}"
        if record["device"] != device:
            return f"{path} is of another device ({record['device']}); {again}"
        if record["bundle"] != _bundle_key(pipeline.bundle):
            return f"{path} is of another bundle; {again}"
        tuning = Tuning(read_costs(record["costs"]), _read_priors(record["priors"]), str(record["origin"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path} is damaged ({type(error).__name__}: {error}); {again}"
    if tuning.costs.largest_k != max(pipeline.tiers) or bool(tuning.costs.draft) != (pipeline.draft is not None):
        return f"{path} is of other tiers; {again}"
    return tuning


def tuned_priors(bundle: Bundle) -> Priors | None:
    """How often the bundle's drafts stand, by its last tuning on whatever device; None where there is none to use."""
    paths = sorted((bundle.folder / FOLDER).glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in paths:
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            record = json.loads(path.read_text(encoding="utf-8"))
            if (record["format"], record["version"], record["bundle"]) == (FORMAT, VERSION, _bundle_key(bundle)):
                return _read_priors(record["priors"])
    return None


def _read_priors(record: Any) -> Priors:
    priors = {source: [(float(stood), float(judged)) for stood, judged in record[source]] for source in EDGES}
    for source, classes in priors.items():
        if len(classes) != len(EDGES[source]) + 1 or any(not 0 <= stood <= judged for stood, judged in classes):
            raise ValueError(f"priors.{source}")
    return priors


def _bundle_key(bundle: Bundle) -> str:
    """Of everything that was exported."""
    listed = sorted((name, entry["sha256"]) for name, entry in bundle.files.items() if not name.startswith(ENGINES))
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]
