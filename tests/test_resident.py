"""Rounds that stay on the device give the host loop's tokens: the graphs with heads, on ONNX Runtime's CPU provider."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_tiny
from conftest import THREADS
from refusals import refused_by_cli
from residents import on_cpu

from outrider.engines.errors import OutriderError
from outrider.engines.plan import BoundPlan
from outrider.engines.round import DeviceRound
from outrider.export import ExportOptions, export_bundle
from outrider.runtime import GenerationResult, Pipeline, SamplingOptions
from outrider.runtime.bench import encode_prompt, read_prompts

PROMPTS = Path(__file__).parents[1] / "scripts" / "prompts.jsonl"
LAWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0, "seed": 3},
    "min-p": {"temperature": 0.7, "seed": 5, "min_p": 0.05},
    "top-p": {"temperature": 1.2, "seed": 9, "top_p": 0.9},  # decided on the host
    "log-probabilities": {"logprobs": 2},  # so are they
    "penalty": {"repetition_penalty": 1.3},
}


@pytest.fixture(scope="module")
def kin_bundle(workdir: Path, tiny: Path) -> Path:
    """A tiny pair whose draft, the target's first layer, is sometimes right; K = 1, 2, 4, 8."""
    draft, out = write_tiny(workdir / "kin-draft", seed=1, layers=1), workdir / "kin-bundle"
    options = ExportOptions(precision="fp32", tiers=(1, 2, 4, 8), max_length=160)
    export_bundle(str(tiny), str(draft), out, options, threads=THREADS)
    return out


@pytest.fixture(scope="module")
def both(kin_bundle: Path) -> tuple[Pipeline, Pipeline]:
    return Pipeline.load(kin_bundle, threads=THREADS), on_cpu(kin_bundle)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("prompt", ["the quick brown fox", "one two three one two three one", "d"])
def test_the_same_tokens_for_every_k_and_drafter(both: tuple[Pipeline, Pipeline], prompt: str, law: str) -> None:
    """Token ids, log-probabilities and origins; the same drafts stand."""
    host, resident = both
    plain = host.generate(prompt, k=0, max_new_tokens=70, ignore_eos=True, **LAWS[law])
    for k, drafter in [*product((0, 1, 3, 4, 8), ("model", "ngram")), (4, "cascade"), (None, "cascade")]:
        options = {"k": k, "drafter": drafter, "max_new_tokens": 70, "ignore_eos": True, **LAWS[law]}
        found, expected = resident.generate(prompt, **options), host.generate(prompt, **options)
        assert found.token_ids == expected.token_ids == plain.token_ids
        assert found.logprobs == expected.logprobs
        if k is not None:  # it is chosen by other costs, and without having seen the drafts
            assert found.origins == expected.origins


def counters(result: GenerationResult) -> dict[str, Any]:
    return {name: value for name, value in result.stats.as_dict().items() if "second" not in name}


def test_counters_are_those_of_the_host_loop(both: tuple[Pipeline, Pipeline]) -> None:
    """But for draft steps: a round on the device always takes all K."""
    host, resident = (pipeline.generate("one two three", k=4, max_new_tokens=90, ignore_eos=True) for pipeline in both)
    ours, theirs = counters(resident), counters(host)
    steps = ours.pop("draft_steps"), theirs.pop("draft_steps")
    assert ours == theirs and steps[0] >= steps[1] > 0
    assert ours["num_accepted_draft_tokens"] > 0


@pytest.mark.parametrize("position", [1, 3, 6])
def test_an_end_inside_a_round(both: tuple[Pipeline, Pipeline], position: int) -> None:
    """Where the text ends, and what is counted, whether the end was drafted or not."""
    host, resident = both
    free = host.generate("one two three", k=0, max_new_tokens=20, ignore_eos=True).token_ids
    for end in (free[position], 311):
        options = {"k": 8, "drafter": "model", "max_new_tokens": 20, "eos_token_id": end}
        found, expected = (pipeline.generate("one two three", **options) for pipeline in (resident, host))
        assert (found.token_ids, found.finish_reason) == (expected.token_ids, expected.finish_reason)
        ours, theirs = counters(found), counters(expected)
        assert ours.pop("draft_steps") >= theirs.pop("draft_steps")
        assert ours == theirs


def test_a_newer_request_leaves_an_older_one_alone(both: tuple[Pipeline, Pipeline]) -> None:
    """What the device chooses by changes when the newer one takes its first token, not when it is made."""
    host, resident = both
    older = resident.stream("one two", max_new_tokens=12, k=2, **LAWS["temperature"])
    tokens = [next(older._tokens).token_id for _ in range(3)]
    newer = resident.stream("one two", max_new_tokens=12, k=2)
    tokens += [token.token_id for token in older]
    assert tokens == host.generate("one two", max_new_tokens=12, k=0, **LAWS["temperature"]).token_ids
    assert newer.result().token_ids == host.generate("one two", max_new_tokens=12, k=0).token_ids


def test_requests_take_turns(both: tuple[Pipeline, Pipeline]) -> None:
    """Host and device rounds share the caches, in any order, and a prompt's prefix is kept over all of them."""
    host, resident = both
    rng = np.random.default_rng(0)
    text = "one two three"
    for _ in range(12):
        law = LAWS[str(rng.choice(list(LAWS)))]
        options = {"k": int(rng.choice([0, 2, 8])), "drafter": str(rng.choice(["model", "ngram"])), **law}
        options["max_new_tokens"] = int(rng.integers(1, 12))
        found, expected = resident.generate(text, **options), host.generate(text, **options)
        assert found.token_ids == expected.token_ids
        assert found.stats.num_cached_tokens == expected.stats.num_cached_tokens
        text += found.text[:6]


def test_up_to_the_end_of_the_context(both: tuple[Pipeline, Pipeline]) -> None:
    """The last rounds write behind the longest sequence, where there is room for it."""
    host, resident = both
    options = {"max_new_tokens": 1000, "ignore_eos": True, "k": 8, "drafter": "model"}
    found, expected = (pipeline.generate("d", **options) for pipeline in (resident, host))
    assert found.token_ids == expected.token_ids and len(found.token_ids) == 159


def test_a_draft_of_a_shorter_context(workdir: Path, tiny: Path) -> None:
    """Behind its context, rounds are plain."""
    draft = write_tiny(workdir / "short-draft", seed=1, layers=1, max_position_embeddings=64)
    out = workdir / "short-bundle"
    options = ExportOptions(precision="fp32", tiers=(4,), max_length=160)
    export_bundle(str(tiny), str(draft), out, options, threads=THREADS)
    host, resident = Pipeline.load(out, threads=THREADS), on_cpu(out)
    decoding = {"max_new_tokens": 140, "ignore_eos": True, "k": 4, "drafter": "model"}
    found, expected = (pipeline.generate("the dog", **decoding) for pipeline in (resident, host))
    assert found.token_ids == expected.token_ids
    assert 0 < found.stats.num_draft_tokens < 4 * found.stats.num_spec_steps


def test_an_uncertain_row_is_chosen_on_the_host(
    both: tuple[Pipeline, Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the heads say of it: here they are always unsure, and their choices are wrong."""
    host, resident = both
    honest = BoundPlan.choices
    asked = 0

    def unsure(plan: BoundPlan) -> Any:
        nonlocal asked
        choices, near = honest(plan)
        asked += near.size
        return choices * 0 + 7, near * 0

    monkeypatch.setattr(BoundPlan, "choices", unsure)
    round_read = DeviceRound.read
    monkeypatch.setattr(
        DeviceRound, "read", lambda self: round_read(self)._replace(choices=[7] * (self.k + 1), near=[0] * (self.k + 1))
    )
    for drafter in ("model", "ngram"):
        options = {"k": 4, "drafter": drafter, "max_new_tokens": 40, "ignore_eos": True, **LAWS["temperature"]}
        found, expected = resident.generate("the fox", **options), host.generate("the fox", **options)
        assert found.token_ids == expected.token_ids
    assert asked


def test_a_round_needs_both_models_on_one_device(kin_bundle: Path) -> None:
    one, other = on_cpu(kin_bundle), on_cpu(kin_bundle)
    with pytest.raises(OutriderError, match="on one device"):
        DeviceRound(one.target_engine, other.draft_engine, 4, 5)  # type: ignore[arg-type]


def test_a_draft_on_another_device(kin_bundle: Path) -> None:
    """Its logits come to the host, the target's choices too: the same tokens."""
    host, resident = Pipeline.load(kin_bundle, threads=THREADS), on_cpu(kin_bundle)
    mixed = Pipeline(resident.bundle, resident.target_engine, host.draft_engine)
    for law in LAWS.values():
        options = {"k": 4, "drafter": "model", "max_new_tokens": 40, "ignore_eos": True, **law}
        assert mixed.generate("one two", **options).token_ids == host.generate("one two", **options).token_ids


def test_a_real_model_over_the_prompts(smollm2_pair: Pipeline) -> None:
    """SmolLM2 in int4 with its first layers for a draft, over all benchmark prompts."""
    resident = on_cpu(smollm2_pair.bundle.folder)
    for number, prompt in enumerate(read_prompts(PROMPTS)):
        ids = encode_prompt(smollm2_pair, prompt)
        law = list(LAWS.values())[number % 3]
        outputs = []
        for pipeline, drafter, k in ((smollm2_pair, "none", 0), (resident, ("model", "ngram")[number % 2], 4)):
            request = pipeline.new_request(ids, SamplingOptions(max_new_tokens=8, **law))
            for _ in pipeline.decode(request, drafter, k):
                pass
            outputs.append(request.output.tokens)
        assert outputs[0] == outputs[1], prompt.id


def test_a_draft_of_another_lowering_and_precision(workdir: Path, tiny: Path, tiny_draft: Path) -> None:
    """As for a target on the GPU and a draft on the CPU."""
    out = workdir / "two-lowerings"
    options = ExportOptions("fp16", "standard", (4,), 96, draft_precision="int4", draft_lowering="fused")
    manifest = export_bundle(str(tiny), str(tiny_draft), out, options, threads=THREADS)
    assert manifest.draft is not None
    assert (manifest.target.precision, manifest.target.lowering) == ("fp16", "standard")
    assert (manifest.draft.precision, manifest.draft.lowering) == ("int4", "fused")
    host, resident = Pipeline.load(out, threads=THREADS), on_cpu(out)
    mixed = Pipeline(resident.bundle, resident.target_engine, host.draft_engine)
    plain = host.generate("one two three", k=0, max_new_tokens=40)
    assert mixed.generate("one two three", k=4, max_new_tokens=40).token_ids == plain.token_ids


def test_passes_at_their_fastest_share_the_cache(both: tuple[Pipeline, Pipeline]) -> None:
    """What they leave in it is known to the next request."""
    for pipeline in both:
        expected = pipeline.generate("the quick brown fox", k=0, max_new_tokens=9).token_ids
        request = pipeline.new_request(pipeline.encode("one two three"), SamplingOptions(max_new_tokens=9))
        for _ in pipeline.decode(request, "none", 0, exact=False):
            pass
        assert pipeline.generate("the quick brown fox", k=0, max_new_tokens=9).token_ids == expected


def test_a_provider_for_a_draft_that_is_not_there(workdir: Path, tiny: Path) -> None:
    folder = workdir / "no-draft"
    export_bundle(str(tiny), None, folder, ExportOptions(tiers=(2,), max_length=96), threads=THREADS)
    message = refused_by_cli("generate", folder, "-p", "x", "--draft-provider", "cpu")
    assert "no draft model" in message and "--draft-provider" in message
