"""What a draft brings, by the real loop on this machine: greedy, against plain decoding of the same bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from outrider.export import ExportOptions, export_bundle
from outrider.runtime import Pipeline, SamplingOptions
from outrider.runtime.bench import Prompt, encode_prompt, measure_costs
from outrider.runtime.stats import DecodeStats

LARGEST_K = 8
_CATEGORY_K = 4


@dataclass(frozen=True)
class ByK:
    """``verify_cost`` is v(K), ``predicted`` speed-up mean acceptance length / (K c + v(K)) (Leviathan et al. 2023)."""

    k: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    verify_cost: float
    predicted: float
    measured: float


@dataclass(frozen=True)
class Measured:
    """``alpha`` is by position: how often a draft stands where all before it do. ``categories`` are mean acceptance
    length and speed-up at K = 4. ``one_row_ms`` is a target pass in milliseconds and ``draft_cost`` c.
    """

    one_row_ms: float
    draft_cost: float
    alpha: list[float]
    by_k: list[ByK]
    categories: dict[str, tuple[float, float]]


def measure_draft(
    target: str, draft: Path, prompts: Sequence[Prompt], max_new_tokens: int, max_length: int, threads: int
) -> Measured:
    """Export the pair in int4 beside the draft, for a while, and decode each prompt with every K.

    Args:
        max_length: of the pair: a prompt and an answer.

    Raises:
        OutriderError: the pair does not export.
    """
    tiers = tuple(range(1, LARGEST_K + 1))
    with TemporaryDirectory(dir=draft.parent) as folder:
        pair = Path(folder) / "pair"
        options = ExportOptions("int4", tiers=tiers, max_length=max_length)
        export_bundle(target, str(draft), pair, options, threads=threads)
        return _measure(Pipeline.load(pair, threads=threads), tiers, prompts, max_new_tokens)


def _measure(pipeline: Pipeline, tiers: Sequence[int], prompts: Sequence[Prompt], max_new_tokens: int) -> Measured:
    verify, draft_cost, one_row = measure_costs(pipeline, tiers)
    assert draft_cost is not None
    totals = {k: DecodeStats() for k in (0, *tiers)}
    categories: dict[str, tuple[DecodeStats, DecodeStats]] = {}
    for number, prompt in enumerate(prompts):
        stats = _decode(pipeline, prompt, tiers, max_new_tokens, backwards=number % 2 == 1)
        for k, one in stats.items():
            totals[k].add(one)
        plain, drafted = categories.setdefault(prompt.category, (DecodeStats(), DecodeStats()))
        plain.add(stats[0])
        drafted.add(stats[_CATEGORY_K])
    plain_speed = totals[0].tokens_per_second
    rows = [
        ByK(
            k,
            totals[k].mean_acceptance_length,
            totals[k].draft_acceptance_rate,
            verify[k],
            totals[k].mean_acceptance_length / (k * draft_cost + verify[k]),
            totals[k].tokens_per_second / plain_speed,
        )
        for k in tiers
    ]
    return Measured(
        one_row * 1e3,
        draft_cost,
        alpha_by_position(totals[LARGEST_K].acceptance_histogram),
        rows,
        {
            name: (drafted.mean_acceptance_length, drafted.tokens_per_second / plain.tokens_per_second)
            for name, (plain, drafted) in sorted(categories.items())
            if plain.num_round_tokens
        },
    )


def alpha_by_position(histogram: Sequence[int]) -> list[float]:
    """From how many rounds had a drafts accepted: the rate of position i among the rounds that reached it.

    Rounds near the end of an answer draft fewer tokens, and count as refused behind them.
    """
    reached = [sum(histogram[accepted:]) for accepted in range(len(histogram))]
    return [later / earlier for earlier, later in pairwise(reached) if earlier]


def _decode(
    pipeline: Pipeline, prompt: Prompt, tiers: Sequence[int], max_new_tokens: int, backwards: bool
) -> dict[int, DecodeStats]:
    ids = encode_prompt(pipeline, prompt)
    found = {}
    arms = (0, *tiers)
    for k in reversed(arms) if backwards else arms:
        pipeline.clear_caches()
        request = pipeline.new_request(ids, SamplingOptions(max_new_tokens=max_new_tokens))
        for _ in pipeline.decode(request, "model" if k else "none", k, exact=k > 0):
            pass
        found[k] = request.stats
    return found
