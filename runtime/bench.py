"""Speculation measured side by side with plain decoding: same prompts, same process, orders alternating."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from outrider.engines.engine import Engine
from outrider.engines.errors import OutriderError
from outrider.runtime.commit import Output
from outrider.runtime.generate import Pipeline
from outrider.runtime.sampling.options import SamplingOptions
from outrider.runtime.stats import DecodeStats

_CONTEXT = 128
_REPEATS = 9


@dataclass(frozen=True)
class Prompt:
    id: str
    category: str
    text: str


@dataclass
class Arm:
    """One way to decode: its totals over all prompts and by category, and seconds a token by category and prompt."""

    name: str
    drafter: str
    k: int
    stats: DecodeStats = field(default_factory=DecodeStats)
    stats_by_category: dict[str, DecodeStats] = field(default_factory=dict)
    seconds_per_token: dict[str, list[float]] = field(default_factory=dict)
    identical: int = 0

    def add(self, category: str, stats: DecodeStats, same: bool, timed: bool) -> None:
        self.identical += same
        self.stats.add(stats)
        self.stats_by_category.setdefault(category, DecodeStats()).add(stats)
        if timed:
            self.seconds_per_token.setdefault(category, []).append(1 / stats.tokens_per_second)


@dataclass(frozen=True)
class BenchReport:
    """The first arm is plain decoding at its fastest: one row a pass, whatever its bits. The second is plain decoding
    with the bits that all others must reproduce. ``verify_cost`` is v(K) by K, ``draft_cost`` c (``measure_costs``).
    """

    arms: list[Arm]
    options: SamplingOptions
    acceptance: str
    num_prompts: int
    one_row_ms: float
    verify_cost: dict[int, float]
    draft_cost: float | None

    def speed_up(self, arm: Arm, category: str | None = None) -> float:
        """Median over prompts of plain seconds a token / the arm's."""
        plain = self.arms[0]
        names = plain.seconds_per_token if category is None else [category]
        ratios = [
            ours / theirs
            for name in names
            for ours, theirs in zip(plain.seconds_per_token[name], arm.seconds_per_token[name], strict=True)
        ]
        return statistics.median(ratios)

    def as_dict(self) -> dict[str, Any]:
        rows = []
        for arm in self.arms:
            stats = arm.stats
            rows.append(
                {
                    "name": arm.name,
                    "drafter": arm.drafter,
                    "k": arm.k,
                    "ms_per_token": 1e3 / stats.tokens_per_second,
                    "tokens_per_second": stats.tokens_per_second,
                    "speed_up": self.speed_up(arm),
                    "speed_up_by_category": {name: self.speed_up(arm, name) for name in arm.seconds_per_token},
                    "mean_acceptance_length": stats.mean_acceptance_length,
                    "mean_acceptance_length_by_category": {
                        name: part.mean_acceptance_length for name, part in arm.stats_by_category.items()
                    },
                    "draft_acceptance_rate": stats.draft_acceptance_rate,
                    "host_microseconds_per_round": stats.host_microseconds_per_round,
                    "choose_microseconds_per_round": stats.choose_microseconds_per_round,
                    "choose_share": stats.choose_seconds / stats.decode_seconds,
                    "verify_cost": self.verify_cost.get(arm.k),
                    "draft_cost": self.draft_cost if arm.drafter in ("model", "cascade") else None,
                    "identical": arm.identical,
                }
            )
        return {
            "num_prompts": self.num_prompts,
            "options": {name: str(value) if name == "processors" else value for name, value in self.changed.items()},
            "acceptance": self.acceptance,
            "one_row_ms": self.one_row_ms,
            "arms": rows,
        }

    @property
    def changed(self) -> dict[str, Any]:
        """The options that are not as they are by default, and the budget."""
        default = vars(SamplingOptions())
        given = vars(self.options)
        return {name: given[name] for name in given if name == "max_new_tokens" or given[name] != default[name]}


def read_prompts(path: str | Path) -> list[Prompt]:
    """Prompts from JSON lines with ``prompt`` and, if wanted, ``id`` and ``category``.

    Raises:
        OutriderError: no such file, a line that is not such an object (with its number), or no prompt at all.
    """
    path = Path(path)
    if not path.is_file():
        raise OutriderError(f"{path} does not exist; pass a file of JSON lines with a prompt each")
    prompts = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            text = entry["prompt"]
            if not isinstance(text, str) or not text:
                raise ValueError(f"prompt is {text!r}")
        except (ValueError, KeyError, TypeError) as error:
            raise OutriderError(f'{path}, line {number}: expected {{"prompt": "..."}} ({error})') from None
        prompts.append(Prompt(str(entry.get("id", number)), str(entry.get("category", "other")), text))
    if not prompts:
        raise OutriderError(f"{path} holds no prompt; give one JSON object a line")
    return prompts


def run_bench(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    *,
    options: SamplingOptions,
    tiers: Sequence[int],
    acceptance: str = "exact",
    drafters: Sequence[str] = (),
    progress: Callable[[], None] = lambda: None,
) -> BenchReport:
    """Decode every prompt plainly and with each drafter and K; ``progress`` is called once for each.

    ``drafters`` are by default all that the bundle has. Sampling without a seed takes seed 0, so that all decode the
    same text.

    Raises:
        OutriderError: nothing to compare, a K that the bundle does not serve, or a prompt that it does not take.
    """
    if options.max_new_tokens < 2:
        raise OutriderError(
            f"max_new_tokens {options.max_new_tokens} leaves nothing to measure behind the prefill; use 2 or more"
        )
    if not options.greedy and options.seed is None:
        options = options.replace({"seed": 0})
    if not tiers or min(tiers) < 1:
        raise OutriderError(
            f"K values {list(tiers)} must be whole numbers from 1 up; plain decoding is always compared"
        )
    pipeline.check_k(max(tiers))
    arms = plan_arms(pipeline, tiers, drafters)
    for arm in arms:
        pipeline.check_acceptance(arm.drafter, acceptance)
    verify_cost, draft_cost, one_row = measure_costs(pipeline, tiers)
    for number, prompt in enumerate(prompts):
        ids = encode_prompt(pipeline, prompt)
        results: dict[str, tuple[Output, DecodeStats]] = {}
        for arm in arms if number % 2 == 0 else reversed(arms):
            results[arm.name] = _decode_once(pipeline, arm, ids, options, acceptance)
            progress()
        reference = results["plain, exact"][0].tokens
        pipeline.clear_caches()
        # A prompt that ends with the prefill's token has no speed.
        timed = all(stats.num_spec_steps for _, stats in results.values())
        for arm in arms:
            output, stats = results[arm.name]
            arm.add(prompt.category, stats, output.tokens == reference, timed)
    if not arms[0].seconds_per_token:
        raise OutriderError("every answer ended with its first token, which is the prefill's; give other prompts")
    return BenchReport(arms, options, acceptance, len(prompts), one_row * 1e3, verify_cost, draft_cost)


def plan_arms(pipeline: Pipeline, tiers: Sequence[int], drafters: Sequence[str] = ()) -> list[Arm]:
    arms = [Arm("plain", "none", 0), Arm("plain, exact", "none", 0)]
    for drafter in drafters or (("ngram", "model", "cascade") if pipeline.draft else ("ngram",)):
        arms += [Arm(f"{drafter}, K={k}", drafter, k) for k in tiers]
    return arms


def encode_prompt(pipeline: Pipeline, prompt: Prompt) -> list[int]:
    """As a chat message where the bundle has a template, else as it is."""
    chat = pipeline.bundle.chat_template is not None
    try:
        return pipeline.encode([{"role": "user", "content": prompt.text}] if chat else prompt.text)
    except OutriderError as error:
        raise OutriderError(f"prompt {prompt.id}: {error}") from None


def measure_costs(pipeline: Pipeline, tiers: Sequence[int]) -> tuple[dict[int, float], float | None, float]:
    """v(K) by K, c (None without a draft model), and the seconds of a one-row target pass, interleaved medians.

    Draft steps are timed as a round has them, some in a row: the first finds its weights out of the cache.
    """
    widths = [1, *(k + 1 for k in tiers)]
    jobs: list[tuple[Engine, int, int]] = [(pipeline.target_engine, rows, 1) for rows in widths]
    if pipeline.draft is not None:
        jobs.append((pipeline.draft.engine, pipeline.draft.min_rows, tiers[len(tiers) // 2]))
    seconds: list[list[float]] = [[] for _ in jobs]
    lengths = np.full(1, _CONTEXT, np.int32)
    for _ in range(_REPEATS):
        for job, (engine, rows, steps) in enumerate(jobs):
            plan, ids = engine.plan(rows, rows, exact=False), np.ones((1, rows), np.int64)
            start = perf_counter()
            for _ in range(steps):
                if engine.heads is None:
                    plan.run(ids, lengths)
                else:
                    plan.submit(ids, lengths)
                    plan.choices()
            seconds[job].append((perf_counter() - start) / steps)
    pipeline.clear_caches()  # what was there is overwritten
    medians = [statistics.median(times) for times in seconds]
    verify = {k: medians[1 + index] / medians[0] for index, k in enumerate(tiers)}
    return verify, medians[-1] / medians[0] if pipeline.draft is not None else None, medians[0]


def _decode_once(
    pipeline: Pipeline, arm: Arm, ids: list[int], options: SamplingOptions, acceptance: str
) -> tuple[Output, DecodeStats]:
    pipeline.clear_caches()  # every arm pays its own prefills
    request = pipeline.new_request(ids, options, acceptance)
    for _ in pipeline.decode(request, arm.drafter, arm.k, exact=arm.name != "plain"):
        pass
    return request.output, request.stats
