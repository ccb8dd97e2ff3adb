"""Speculation measured side by side with plain decoding: same prompts, same process, orders alternating."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from outrider.engines.errors import OutriderError
from outrider.runtime.commit import Output
from outrider.runtime.generate import Pipeline
from outrider.runtime.sampling.options import SamplingOptions
from outrider.runtime.stats import DecodeStats
from outrider.runtime.trace import Trace, record
from outrider.runtime.tuning import Tuning

PLAIN, EXACT, AUTO = "plain", "plain, exact", "auto"


@dataclass(frozen=True)
class Prompt:
    id: str
    category: str
    text: str


class EncodedPrompt(NamedTuple):
    id: str
    category: str
    ids: list[int]


@dataclass
class Arm:
    """One way to decode: its totals over all runs and by category, and seconds a token by category and run.

    ``k`` is None where it is chosen in each round.
    """

    name: str
    drafter: str
    k: int | None
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
    with the bits that all others must reproduce. ``num_runs`` is prompts times repeats.
    """

    arms: list[Arm]
    options: SamplingOptions
    acceptance: str
    num_runs: int
    tuning: Tuning

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def speed_up(self, arm: Arm, category: str | None = None) -> float:
        """Median over runs of plain seconds a token / the arm's."""
        return statistics.median(self._ratios(arm, category))

    def quartiles(self, arm: Arm, category: str | None = None) -> tuple[float, float]:
        """Between which the middle half of the runs' speed-ups lies."""
        ratios = self._ratios(arm, category)
        if len(ratios) == 1:
            return ratios[0], ratios[0]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return low, high

    def best_fixed(self, category: str | None = None) -> Arm:
        """The fastest of the arms with a fixed K, plain decoding among them."""
        fixed = [arm for arm in self.arms[1:] if arm.k is not None]
        return max(fixed, key=lambda arm: self.speed_up(arm, category))

    def _ratios(self, arm: Arm, category: str | None) -> list[float]:
        plain = self.arms[0]
        return [
            ours / theirs
            for name in (plain.seconds_per_token if category is None else [category])
            for ours, theirs in zip(plain.seconds_per_token[name], arm.seconds_per_token[name], strict=True)
        ]

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
                    "speed_up_quartiles": self.quartiles(arm),
                    "speed_up_by_category": {name: self.speed_up(arm, name) for name in arm.seconds_per_token},
                    "mean_acceptance_length": stats.mean_acceptance_length,
                    "mean_acceptance_length_by_category": {
                        name: part.mean_acceptance_length for name, part in arm.stats_by_category.items()
                    },
                    "draft_acceptance_rate": stats.draft_acceptance_rate,
                    "host_microseconds_per_round": stats.host_microseconds_per_round,
                    "choose_microseconds_per_round": stats.choose_microseconds_per_round,
                    "choose_share": stats.choose_seconds / stats.decode_seconds,
                    "verify_cost": self.tuning.verify_cost[arm.k] if arm.k else None,
                    "draft_cost": self.tuning.draft_cost if arm.drafter in ("model", "cascade") else None,
                    "identical": arm.identical,
                    "sources": {name: asdict(source) for name, source in stats.sources.items()},
                }
            )
        return {
            "num_runs": self.num_runs,
            "options": {name: str(value) if name == "processors" else value for name, value in self.changed.items()},
            "acceptance": self.acceptance,
            "tuning": {"origin": self.tuning.origin, "costs": asdict(self.tuning.costs)},
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
    contexts: Sequence[int] = (),
    repeats: int = 1,
    progress: Callable[[], None] = lambda: None,
) -> BenchReport:
    """Decode every prompt plainly, with K chosen in each round, and with each drafter and K.

    Sampling without a seed takes seed 0, so that all decode the same text.

    Args:
        drafters: by default all that the bundle has.
        contexts: lengths in tokens; each is one more category, of a prompt of that length made of all the others.
        repeats: runs of each prompt with each arm, in alternating order.
        progress: called once for each run.

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
    tuning = pipeline.tuning
    encoded = encode_all(pipeline, prompts, contexts, options.max_new_tokens)
    for number, prompt in enumerate(encoded * repeats):
        results: dict[str, tuple[Output, DecodeStats]] = {}
        for arm in arms if (number + number // len(encoded)) % 2 == 0 else reversed(arms):
            results[arm.name] = _decode_once(pipeline, arm, prompt.ids, options, acceptance)
            progress()
        reference = results[EXACT][0].tokens
        pipeline.clear_caches()
        # A prompt that ends with the prefill's token has no speed.
        timed = all(stats.num_spec_steps for _, stats in results.values())
        for arm in arms:
            output, stats = results[arm.name]
            arm.add(prompt.category, stats, output.tokens == reference, timed)
    if not arms[0].seconds_per_token:
        raise OutriderError("every answer ended with its first token, which is the prefill's; give other prompts")
    return BenchReport(arms, options, acceptance, len(encoded) * repeats, tuning)


def record_trace(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    *,
    options: SamplingOptions,
    progress: Callable[[], None] = lambda: None,
) -> Trace:
    """What every source of drafts would propose at every position of the answers, and what the exact rule would make of
    it; ``progress`` is called once for each.

    Raises:
        OutriderError: a prompt that the bundle does not take.
    """
    trace = Trace(pipeline.target_engine.device, pipeline.tuning.costs, [])
    for prompt in encode_all(pipeline, prompts, (), options.max_new_tokens):
        pipeline.clear_caches()
        trace.requests.append(record(pipeline, *prompt, options)[0])
        progress()
    pipeline.clear_caches()
    return trace


def encode_all(
    pipeline: Pipeline, prompts: Sequence[Prompt], contexts: Sequence[int], max_new_tokens: int
) -> list[EncodedPrompt]:
    """The prompts, and one of each context length, cut out of all of them joined again and again."""
    encoded = [EncodedPrompt(prompt.id, prompt.category, encode_prompt(pipeline, prompt)) for prompt in prompts]
    longest = pipeline.manifest.max_length - max_new_tokens
    for length in contexts:
        if not 1 <= length <= longest:
            raise OutriderError(
                f"a context of {length} tokens and {max_new_tokens} new ones are outside what this bundle takes "
                f"({pipeline.manifest.max_length}); export with a larger --max-length"
            )
        ids: list[int] = []
        for prompt in cycle(prompts):
            if len(ids) >= length:
                break
            ids += pipeline.codec.encode(f"{prompt.text}\n\n")
        encoded.append(EncodedPrompt(f"context-{length}", f"{length} tokens", ids[:length]))
    return encoded


def plan_arms(pipeline: Pipeline, tiers: Sequence[int], drafters: Sequence[str] = ()) -> list[Arm]:
    """Plain decoding at its fastest and exact, ``auto``, and every drafter with every K."""
    auto = drafters[0] if len(drafters) == 1 else pipeline.default_drafter
    arms = [Arm(PLAIN, "none", 0), Arm(EXACT, "none", 0), Arm(AUTO, auto, None)]
    for drafter in drafters or (("ngram", "model", "cascade") if pipeline.draft else ("ngram",)):
        arms += [Arm(f"{drafter}, K={k}", drafter, k) for k in tiers]
    return arms


def encode_prompt(pipeline: Pipeline, prompt: Prompt) -> list[int]:
    """As a chat message where the bundle has a template, else as it is."""
    try:
        return pipeline.encode(pipeline.codec.turn(prompt.text))
    except OutriderError as error:
        raise OutriderError(f"prompt {prompt.id}: {error}") from None


def _decode_once(
    pipeline: Pipeline, arm: Arm, ids: list[int], options: SamplingOptions, acceptance: str
) -> tuple[Output, DecodeStats]:
    pipeline.clear_caches()  # every arm pays its own prefills
    request = pipeline.new_request(ids, options, acceptance)
    for _ in pipeline.decode(request, arm.drafter, arm.k, exact=arm.name != PLAIN):
        pass
    return request.output, request.stats
