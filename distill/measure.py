"""What a draft brings, by the real loop on this machine: greedy, against plain decoding of the same bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from outrider.export import ExportOptions, export_bundle
from outrider.runtime import Pipeline, SamplingOptions
from outrider.runtime.bench import BenchReport, Prompt, run_bench

LARGEST_K = 8
_CATEGORY_K = 4


@dataclass(frozen=True)
class ByK:
    """``verify_cost`` is v(K), ``predicted`` speed-up mean acceptance length / (K c + v(K)) (Leviathan et al. 2023).

    The host's part of a round is in all of them.
    """

    k: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    verify_cost: float
    predicted: float
    measured: float


@dataclass(frozen=True)
class Measured:
    """``alpha`` is by position: how often a draft stands where all before it do. ``categories`` are mean acceptance
    length and speed-up at K = 4. ``plain_ms`` is a plain round in milliseconds and ``draft_cost`` c.
    """

    plain_ms: float
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
        OutriderError: the pair does not export, or there is nothing to compare (``run_bench``).
    """
    tiers = tuple(range(1, LARGEST_K + 1))
    with TemporaryDirectory(dir=draft.parent) as folder:
        pair = Path(folder) / "pair"
        options = ExportOptions("int4", tiers=tiers, max_length=max_length)
        export_bundle(target, str(draft), pair, options, threads=threads)
        report = run_bench(
            Pipeline.load(pair, threads=threads),
            prompts,
            options=SamplingOptions(max_new_tokens=max_new_tokens),
            tiers=tiers,
            drafters=("model",),
        )
    return _measured(report)


def _measured(report: BenchReport) -> Measured:
    plain, drafted = report.arms[0], {arm.k: arm for arm in report.arms if arm.drafter == "model" and arm.k}
    tuning = report.tuning
    draft_cost, verify_cost = tuning.draft_cost, tuning.verify_cost
    assert draft_cost is not None
    rows = [
        ByK(
            k,
            arm.stats.mean_acceptance_length,
            arm.stats.draft_acceptance_rate,
            verify_cost[k],
            arm.stats.mean_acceptance_length / (k * draft_cost + verify_cost[k]),
            arm.stats.tokens_per_second / plain.stats.tokens_per_second,
        )
        for k, arm in drafted.items()
    ]
    categories = {
        name: (stats.mean_acceptance_length, stats.tokens_per_second / plain.stats_by_category[name].tokens_per_second)
        for name, stats in sorted(drafted[_CATEGORY_K].stats_by_category.items())
        if plain.stats_by_category[name].num_round_tokens
    }
    alpha = alpha_by_position(drafted[LARGEST_K].stats.acceptance_histogram)
    return Measured(1e3 * tuning.costs.rounds(0)[0], draft_cost, alpha, rows, categories)


def alpha_by_position(histogram: Sequence[int]) -> list[float]:
    """From how many rounds had a drafts accepted: the rate of position i among the rounds that reached it.

    Rounds near the end of an answer draft fewer tokens, and count as refused behind them.
    """
    reached = [sum(histogram[accepted:]) for accepted in range(len(histogram))]
    return [later / earlier for earlier, later in pairwise(reached) if earlier]
