"""Batches: whoever joins, leaves or is cut off, every request is what it would be alone."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refused

from outrider.engines.bundle import Bundle
from outrider.engines.errors import OutriderError
from outrider.engines.packed import Segment
from outrider.export import ExportOptions, export_bundle
from outrider.runtime import GenerationResult, Pipeline, SamplingOptions
from outrider.runtime.batch import PREFILL_ROWS, Batch, Job
from outrider.runtime.tuning import tune, tuned_priors, write_tuning

LANES = 3
SCHEDULES = 2000


@dataclass(frozen=True)
class Wanted:
    """A request, and what it is alone."""

    prompt: list[int]
    options: SamplingOptions
    alone: GenerationResult


@pytest.fixture(scope="module")
def batch(tiny_bundle: Path) -> Batch:
    return Batch.load(tiny_bundle, lanes=LANES, threads=2)


@pytest.fixture(scope="module")
def wanted(tiny_pipeline: Pipeline) -> list[Wanted]:
    """Prompts that begin alike and unlike, short and longer than a chunk; greedy, sampled, with every kind of end."""
    rng = random.Random(5)
    base = [rng.randrange(320) for _ in range(80)]
    found = []
    for number in range(40):
        prompt = base[: rng.randrange(81)] + [rng.randrange(320) for _ in range(rng.randrange(1, 6))]
        options: dict[str, Any] = {"max_new_tokens": rng.randrange(13), "ignore_eos": number % 3 > 0}
        if number % 2:
            options |= {"temperature": rng.choice([0.7, 1.0]), "seed": number, "top_p": rng.choice([1.0, 0.9])}
        if number % 5 == 0:
            options |= {"logprobs": 2, "repetition_penalty": 1.3}
        if number % 7 == 0:
            options |= {"stop_strings": ["a"]}
        parsed = SamplingOptions(**options)
        found.append(Wanted(prompt, parsed, tiny_pipeline.generate(prompt, parsed, k=0)))
    return found


def run(batch: Batch, jobs: list[Job]) -> None:
    while batch.busy:
        batch.step()
    assert all(job.done for job in jobs)


def assert_as_alone(batch: Batch, job: Job, alone: GenerationResult) -> None:
    found = batch.result(job)
    for name in ("token_ids", "text", "finish_reason", "logprobs", "seed"):
        assert getattr(found, name) == getattr(alone, name), name


SPECULATION: list[dict[str, Any]] = [
    {"k": k, "drafter": name} for k in (1, 3, 8) for name in ("ngram", "cascade", "model")
]
SPECULATION += [{"k": 0}, {"k": None}]


def test_random_schedules(batch: Batch, wanted: list[Wanted]) -> None:
    """Requests come at any time and are cut off at any time; lanes are what the last ones left in them."""
    rng = random.Random(11)
    for _ in range(SCHEDULES):
        chosen = [(rng.randrange(12), rng.choice(wanted), rng.choice(SPECULATION)) for _ in range(rng.randrange(1, 8))]
        cut_at = {number: rng.randrange(16) for number in range(len(chosen)) if rng.random() < 0.15}
        jobs: dict[int, Job] = {}
        step = 0
        while batch.busy or len(jobs) < len(chosen):
            for number, (start, one, speculation) in enumerate(chosen):
                if start == step:
                    jobs[number] = batch.submit(one.prompt, one.options, **speculation)
                if number in jobs and cut_at.get(number) == step:
                    jobs[number].cancelled = True
            for job in batch.step():
                job.new_tokens()
            step += 1
        for number, (_, one, _) in enumerate(chosen):
            job = jobs[number]
            assert job.done and job.lane not in [other for other in batch.lanes if other.pending]
            if batch.result(job).finish_reason == "cancelled":
                found = batch.result(job)
                assert number in cut_at and found.token_ids == one.alone.token_ids[: len(found.token_ids)]
            else:
                assert_as_alone(batch, job, one.alone)
        assert batch.running == 0 and not batch.queue


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_other_precisions(workdir: Path, tiny: Path, tiny_draft: Path, precision: str) -> None:
    out = workdir / f"batch-{precision}"
    export_bundle(str(tiny), str(tiny_draft), out, ExportOptions(precision, tiers=(2, 4), max_length=96), threads=2)
    alone, batch = Pipeline.load(out, threads=2), Batch.load(out, lanes=LANES, threads=2)
    rng = random.Random(2)
    jobs = []
    for number in range(24):
        prompt = [rng.randrange(320) for _ in range(rng.randrange(1, 70))]
        options = SamplingOptions(max_new_tokens=12, **({"temperature": 0.9, "seed": number} if number % 2 else {}))
        job = batch.submit(prompt, options, k=number % 4)
        jobs.append((job, alone.generate(prompt, options, k=0)))
    run(batch, [job for job, _ in jobs])
    for job, expected in jobs:
        assert_as_alone(batch, job, expected)


def test_a_perfect_and_a_bad_draft_side_by_side(batch: Batch, tiny_pipeline: Pipeline) -> None:
    """Rows of one batch go on by different lengths in every round."""
    period = tiny_pipeline.codec.encode("one two three " * 6)[:60]
    rng = random.Random(1)
    noise = [rng.randrange(320) for _ in range(60)]
    options = SamplingOptions(max_new_tokens=24, ignore_eos=True, logit_bias=dict.fromkeys(set(period), 30.0))
    jobs = [batch.submit(prompt, options, k=8, drafter="ngram") for prompt in (period, noise, period[:30])]
    run(batch, jobs)
    for job, prompt in zip(jobs, (period, noise, period[:30]), strict=True):
        assert_as_alone(batch, job, tiny_pipeline.generate(prompt, options, k=0))
    lengths = {job.request.stats.mean_acceptance_length for job in jobs}
    assert len(lengths) > 1 and max(lengths) > 2


def test_seeds_are_each_requests_own(batch: Batch, tiny_pipeline: Pipeline) -> None:
    options = [SamplingOptions(max_new_tokens=12, temperature=1.0, seed=seed, ignore_eos=True) for seed in (1, 2, 1)]
    jobs = [batch.submit("hello", one) for one in options]
    run(batch, jobs)
    first, second, again = (batch.result(job).token_ids for job in jobs)
    assert first == again != second == tiny_pipeline.generate("hello", options[1], k=0).token_ids


def test_what_a_lane_holds_is_not_computed_again(batch: Batch, tiny_pipeline: Pipeline) -> None:
    """The next turn, the same beginning in another lane while the first still runs; drafts as good as before."""
    rng = random.Random(8)
    prompt = [rng.randrange(320) for _ in range(50)]
    options = SamplingOptions(max_new_tokens=10, ignore_eos=True)
    first = batch.submit(prompt, options, k=4, drafter="model")
    run(batch, [first])
    turn = [*prompt, *batch.result(first).token_ids, 5, 6, 7]
    second = batch.submit(turn, options, k=4, drafter="model")
    batch.step()
    third = batch.submit(turn, options, k=4, drafter="model")
    run(batch, [second, third])
    assert second.request.stats.num_cached_tokens == len(turn) - 4  # the last token of the answer was never fed
    assert third.request.stats.num_cached_tokens == len(turn) - 1
    for job in (second, third):
        assert_as_alone(batch, job, tiny_pipeline.generate(turn, options, k=0))
    assert second.request.stats.num_accepted_draft_tokens == third.request.stats.num_accepted_draft_tokens


def test_texts_that_lost_their_lane_are_kept_within_bounds(tiny_bundle: Path, tiny_pipeline: Pipeline) -> None:
    """Conversations in turn over one lane: each finds its caches again, but for the longest unused."""
    rng = random.Random(13)
    texts = [[rng.randrange(320) for _ in range(40)] for _ in range(3)]
    options = SamplingOptions(max_new_tokens=6, ignore_eos=True)
    batch = Batch.load(tiny_bundle, lanes=1, threads=2)
    size = 57 * sum(engine.token_bytes for engine in batch.engines.values())
    batch = Batch.load(tiny_bundle, lanes=1, threads=2, prefix_bytes=2 * size)
    cached = []
    for turn in range(3):
        for number, text in enumerate(texts[: 3 if turn < 2 else 2]):
            job = batch.submit(text, options, k=4, drafter="model")
            run(batch, [job])
            assert_as_alone(batch, job, tiny_pipeline.generate(text, options, k=0))
            texts[number] = [*text, *batch.result(job).token_ids]
            cached.append(job.request.stats.num_cached_tokens)
            assert batch.prefixes.size <= 2 * size
    assert cached == [0, 0, 0, 45, 45, 45, 51, 51]  # two of three in the store, one in the lane
    none = Batch.load(tiny_bundle, lanes=1, threads=2, prefix_bytes=0)
    for text in (*texts, *texts):
        job = none.submit(text, options)
        run(none, [job])
        assert job.request.stats.num_cached_tokens == 0 and none.prefixes.size == 0


def test_nobody_waits_for_more_than_a_chunk(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a long prompt is fed, those that run get a token in every step; a short prompt goes in between."""
    rng = random.Random(3)
    long_prompt = [rng.randrange(320) for _ in range(90)]
    running = batch.submit([1, 2], SamplingOptions(max_new_tokens=20, ignore_eos=True), k=0)
    batch.step()
    chunks = []
    original = batch.engines["target"].run

    def watched(segments: list[Segment]) -> Any:
        chunks.append(sorted(len(segment.tokens) for segment in segments))
        return original(segments)

    monkeypatch.setattr(batch.engines["target"], "run", watched)
    batch.submit(long_prompt, SamplingOptions(max_new_tokens=4), k=0)
    short = batch.submit([7, 8, 9], SamplingOptions(max_new_tokens=4, ignore_eos=True), k=0)
    for step in range(4):
        before = len(running.request.output.tokens)
        batch.step()
        assert len(running.request.output.tokens) == before + 1
        if step == 1:
            assert len(short.request.output.tokens) >= 1
    assert max(map(max, chunks)) == PREFILL_ROWS
    monkeypatch.undo()
    run(batch, [running, short])


def test_a_pass_that_fails(batch: Batch, monkeypatch: pytest.MonkeyPatch, tiny_pipeline: Pipeline) -> None:
    """Ends the requests that were in it, and no others; their lanes are good for the next."""
    options = SamplingOptions(max_new_tokens=6, ignore_eos=True)
    first = batch.submit("hello", options, k=0)
    batch.step()
    with monkeypatch.context() as patch:
        patch.setattr(batch.engines["target"], "run", lambda segments: (_ for _ in ()).throw(OutriderError("no power")))
        batch.step()
    assert first.done and refused(lambda: batch.result(first)) == "no power"
    second = batch.submit("hello", options, k=2)
    run(batch, [second])
    assert_as_alone(batch, second, tiny_pipeline.generate("hello", options, k=0))


def test_a_request_that_cannot_go_on(batch: Batch, tiny_pipeline: Pipeline) -> None:
    """What stands before the failure is streamed; the others hear nothing of it."""

    def forbid(tokens: Any, logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return logits if len(tokens) < 8 else np.full_like(logits, -np.inf)

    bad = batch.submit([1, 2, 3], SamplingOptions(max_new_tokens=9, ignore_eos=True, processors=[forbid]), k=2)
    good = batch.submit([1, 2, 3], SamplingOptions(max_new_tokens=9, ignore_eos=True), k=2)
    run(batch, [bad, good])
    assert "no token is allowed at position 8" in refused(lambda: batch.result(bad))
    expected = tiny_pipeline.generate([1, 2, 3], max_new_tokens=9, ignore_eos=True, k=0)
    assert [token.token_id for token in bad.new_tokens()] == expected.token_ids[:5]
    assert_as_alone(batch, good, expected)


def test_what_is_refused_is_refused_before_it_waits(batch: Batch) -> None:
    for call, words in (
        (lambda: batch.submit([1] * 96, SamplingOptions()), "at most 95"),
        (lambda: batch.submit("hello", SamplingOptions(), k=9), "K = 9"),
        (lambda: batch.submit("hello", SamplingOptions(logit_bias={320: 1.0})), "320"),
        (lambda: batch.submit("", SamplingOptions()), "empty"),
    ):
        assert words in refused(call)
    assert not batch.busy


def test_a_burst_with_one_beginning_reads_it_once(batch: Batch, tiny_pipeline: Pipeline) -> None:
    """As ``n`` answers to one prompt, or many questions behind one system prompt; others go by meanwhile."""
    rng = random.Random(21)
    prompt = [rng.randrange(320) for _ in range(90)]
    options = SamplingOptions(max_new_tokens=4, ignore_eos=True)
    jobs = [batch.submit(prompt, options) for _ in range(LANES)]
    other = batch.submit([4, 5], options)
    run(batch, [*jobs, other])
    cached = [job.request.stats.num_cached_tokens for job in jobs]
    assert cached[0] == 0 and min(cached[1:]) >= PREFILL_ROWS
    expected = tiny_pipeline.generate(prompt, options, k=0)
    for job in jobs:
        assert_as_alone(batch, job, expected)


def test_the_draft_reads_along(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a long prompt the first round drafts, and no round goes by without a token."""
    rng = random.Random(22)
    job = batch.submit(
        [rng.randrange(320) for _ in range(80)],
        SamplingOptions(max_new_tokens=9, ignore_eos=True),
        k=2,
        drafter="model",
    )
    while not job.request.output.tokens:
        batch.step()
    while not job.done:
        before = len(job.request.output.tokens)
        batch.step()
        assert len(job.request.output.tokens) > before
    assert job.request.stats.num_drafts > 0


class Panic(BaseException):
    """As libraries in other languages raise it."""


def test_what_is_no_exception_ends_one_request_only(batch: Batch, tiny_pipeline: Pipeline) -> None:
    def panic(tokens: Any, logits: Any) -> Any:
        raise Panic("lost my head")

    options = SamplingOptions(max_new_tokens=5, ignore_eos=True)
    bad = batch.submit([1, 2, 3], options.replace({"processors": [panic]}), k=0)
    good = batch.submit([1, 2, 3], options, k=0)
    run(batch, [bad, good])
    with pytest.raises(Panic):
        batch.result(bad)
    assert_as_alone(batch, good, tiny_pipeline.generate([1, 2, 3], options, k=0))


def test_an_interrupt_leaves_no_lane_behind(batch: Batch) -> None:
    def interrupt(tokens: Any, logits: Any) -> Any:
        raise KeyboardInterrupt

    job = batch.submit([1, 2], SamplingOptions(processors=[interrupt]), k=0)
    with pytest.raises(KeyboardInterrupt):
        run(batch, [job])
    run(batch, [job])
    assert batch.running == 0


@pytest.mark.parametrize(("tiers", "lanes"), [((100,), 2), ((8,), 40)])
def test_large_k_and_many_lanes(workdir: Path, tiny: Path, tiers: tuple[int, ...], lanes: int) -> None:
    out = workdir / f"batch-k{tiers[0]}"
    export_bundle(str(tiny), None, out, ExportOptions("int4", tiers=tiers, max_length=160), threads=2)
    alone, batch = Pipeline.load(out, threads=2), Batch.load(out, lanes=lanes, threads=2)
    options = SamplingOptions(max_new_tokens=110, ignore_eos=True)
    prompts = [[7, 8, 9] * 4, [1, 2] * 9]
    jobs = [batch.submit(prompt, options, k=tiers[0], drafter="ngram") for prompt in prompts]
    run(batch, jobs)
    for job, prompt in zip(jobs, prompts, strict=True):
        assert_as_alone(batch, job, alone.generate(prompt, options, k=0))


def test_figures_of_a_tuning_are_used(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, folder)
    bundle = Bundle(folder)
    assert tuned_priors(bundle) is None
    pipeline = Pipeline.load(folder, threads=2)
    tuning = tune(pipeline, short=True)
    priors = {source: [(1.0, 7.0)] * len(classes) for source, classes in tuning.priors.items()}
    write_tuning(pipeline, replace(tuning, priors=priors))
    assert tuned_priors(bundle) == priors
    (folder / "tuning" / "broken.json").write_text("{")
    assert tuned_priors(bundle) == priors


def test_one_at_a_time_where_rows_are_not_packed(workdir: Path, tiny: Path, tiny_draft: Path) -> None:
    """Standard operators, as on a GPU: one lane, the same texts; more lanes are refused."""
    out = workdir / "batch-standard"
    export_bundle(str(tiny), str(tiny_draft), out, ExportOptions("fp32", "standard", (2, 4), 96), threads=2)
    alone, batch = Pipeline.load(out, threads=2), Batch.load(out, lanes=1, threads=2)
    assert batch.exactness == alone.exactness
    options = SamplingOptions(max_new_tokens=12, temperature=0.8, seed=4)
    prompts = [[1, 2, 3, 1, 2, 3], [1, 2, 3, 1, 2, 3, 7], [9] * 70]
    jobs = [batch.submit(prompt, options, k=k) for prompt, k in zip(prompts, (4, None, 0), strict=True)]
    run(batch, jobs)
    for job, prompt in zip(jobs, prompts, strict=True):
        assert_as_alone(batch, job, alone.generate(prompt, options, k=0))
    assert "--max-batch 1" in refused(lambda: Batch.load(out, lanes=2))
    assert "--max-batch 1" in refused(lambda: Batch.load(out, lanes=2, provider="tensorrt-rtx"))


def test_the_real_model(smollm2_pair: Pipeline) -> None:
    """SmolLM2 in int4: four at once, each the text of its single run."""
    batch = Batch.load(smollm2_pair.bundle.folder, lanes=4, threads=2)
    assert batch.exactness == "bitwise"
    options = SamplingOptions(max_new_tokens=16)
    prompts = ["def fibonacci(n):", "The capital of France is", "one two three one two three", "Dear Sir or Madam,"]
    jobs = [batch.submit(prompt, options, k=k) for prompt, k in zip(prompts, (None, 0, 4, 2), strict=True)]
    run(batch, jobs)
    for job, prompt in zip(jobs, prompts, strict=True):
        assert_as_alone(batch, job, smollm2_pair.generate(prompt, options, k=0))
