"""Where an answer ends: stop strings, stop tokens, ends of sequence, and the reason that is given for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny_tokenizer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from vocabularies import codec_of, gguf_metadata, train_sentencepiece

from outrider.export import ExportOptions, export_bundle
from outrider.export.gguf_tokenizer import tokenizer_from_metadata
from outrider.runtime import GenerationResult, Pipeline
from outrider.runtime.text import StoppingStream, TextCodec, TextStream

PROMPT = "the quick brown fox"
TOKENS = 32
EMOJI = "🦜"
KINDS = ["byte-level", "byte-fallback", "byte-fallback-no-prefix"]
ARMS = [(0, "none"), (4, "ngram"), (8, "ngram"), (4, "model"), (8, "model")]


@pytest.fixture(scope="module")
def codecs(workdir: Path) -> dict[str, TextCodec]:
    """A byte-level vocabulary, and two of SentencePiece, whose decoder judges bytes together with their neighbours."""
    files = {KINDS[0]: tiny_tokenizer()}
    for kind, space_prefix in zip(KINDS[1:], [True, False], strict=True):
        metadata = gguf_metadata(train_sentencepiece(space_prefix=space_prefix))
        files[kind] = tokenizer_from_metadata(metadata.get, Path("m.gguf"))
    return {kind: codec_of(files[kind], workdir / f"stop-{kind}") for kind in KINDS}


@pytest.fixture(scope="module", params=KINDS)
def codec(request: pytest.FixtureRequest, codecs: dict[str, TextCodec]) -> TextCodec:
    return codecs[request.param]


@pytest.fixture(scope="module")
def twins(tiny: Path, workdir: Path) -> Pipeline:
    """A pair whose draft is the target: every draft stands, so that answers end inside of blocks."""
    out = workdir / "stop-twins"
    export_bundle(str(tiny), str(tiny), out, ExportOptions(tiers=(1, 2, 4, 8), max_length=96), threads=2)
    return Pipeline.load(out, threads=2)


def ids_of(codec: TextCodec, text: str) -> list[int]:
    return list(codec.tokenizer.encode(text, add_special_tokens=False).ids)


def certain(codec: TextCodec, tokens: Sequence[int]) -> list[str]:
    """What each token makes certain, and the rest that the end of the tokens does."""
    stream = TextStream(codec)
    return [*(stream.push(token) for token in tokens), stream.rest()]


def watched_from(codec: TextCodec, tokens: Sequence[int], unwatched: int) -> int:
    """Where the text of the tokens behind the first ones begins: what those settle alone is not looked at."""
    text, settled = codec.decode(tokens), codec.decode(tokens[:unwatched])
    pairs = enumerate(zip(text, settled, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(text), len(settled)))


def expected(pieces: Sequence[str], stops: Sequence[str], begin: int = 0) -> tuple[list[str], bool]:
    """The definition, by searching the whole text again after each piece: what is shown with it, and whether it ended.

    The text ends before the stop string that is complete first; of those complete at the same piece, before the one
    that starts first. Shown is what no stop string can begin with any more. Stop strings start at ``begin`` or behind.
    """
    text, shown, seen = "", 0, []
    for number, piece in enumerate(pieces):
        text += piece
        found = [text.index(stop, begin) for stop in stops if stop in text[begin:]]
        end = min(found) if found else len(text)
        if not found and number < len(pieces) - 1:
            tails = [at for at in range(begin, len(text)) if any(stop.startswith(text[at:]) for stop in stops)]
            end = min(tails, default=len(text))
        seen.append(text[shown:end])
        shown = end
        if found:
            return seen, True
    return seen, False


def streamed(
    codec: TextCodec, tokens: Sequence[int], stops: Sequence[str], unwatched: int = 0
) -> tuple[list[str], bool]:
    stream = StoppingStream(codec, stops)
    pieces = []
    for number, token in enumerate(tokens):
        pieces.append(stream.push(token, watch=number >= unwatched))
        if stream.stopped:
            assert stream.finish() == ""
            return pieces, True
    pieces.append(stream.finish())
    return pieces, stream.stopped


# One token a character. What is shown with each token and at the end; a text that stopped has no end.
BY_CHARACTER: list[tuple[str, list[str], list[str]]] = [
    ("abcd", [], ["a", "b", "c", "d", ""]),
    ("abcd", ["x"], ["a", "b", "c", "d", ""]),
    ("abcd", ["c"], ["a", "b", ""]),
    ("abcd", ["a"], [""]),
    ("xabcy", ["abc"], ["x", "", "", ""]),
    ("xabdy", ["abc"], ["x", "", "", "abd", "y", ""]),
    ("xab", ["abc"], ["x", "", "", "ab"]),
    ("aaab", ["aab"], ["", "", "a", ""]),
    ("aaaab", ["aab"], ["", "", "a", "a", ""]),
    ("abababc", ["ababc"], ["", "", "", "", "ab", "", ""]),
    ("abx", ["abc", "b"], ["", "a"]),
    ("abcd", ["abcd", "bc"], ["", "", "a"]),
    ("abcd", ["bcd", "abc"], ["", "", ""]),
    ("abcd", ["ab", "abcd"], ["", ""]),
    ("abcd", ["abcd", "ab"], ["", ""]),
    ("abxd", ["abcd", "bx"], ["", "", "a"]),
    ("a\n\nb", ["\n\n"], ["a", "", ""]),
    ("a\nb", ["\n\n"], ["a", "", "\nb", ""]),
]


@pytest.mark.parametrize(("text", "stops", "pieces"), BY_CHARACTER)
def test_character_by_character(codecs: dict[str, TextCodec], text: str, stops: list[str], pieces: list[str]) -> None:
    codec = codecs["byte-level"]
    tokens = [token for character in text for token in ids_of(codec, character)]
    assert len(tokens) == len(text)
    stopped = len(pieces) <= len(text)
    assert streamed(codec, tokens, stops) == (pieces, stopped)
    assert expected(certain(codec, tokens), stops) == (pieces, stopped)


def test_the_stop_string_that_starts_first_wins(codecs: dict[str, TextCodec]) -> None:
    """Both are complete with the same token: the order in which they are given does not matter."""
    codec = codecs["byte-level"]
    tokens = [*ids_of(codec, "a"), *ids_of(codec, " the")]
    assert len(tokens) == 2
    for stops in (["a t", "the"], ["the", "a t"], ["he", "a t", "e"]):
        assert streamed(codec, tokens, stops) == (["", ""], True)


@pytest.mark.parametrize("stop", [EMOJI, f"{EMOJI}{EMOJI}", f"o{EMOJI}", f"{EMOJI} d", "龘", f"龘{EMOJI}", "ü日"])
def test_characters_of_many_tokens(codec: TextCodec, stop: str) -> None:
    text = f"fo{stop} dog"
    tokens = ids_of(codec, text)
    assert codec.decode(tokens) == text
    pieces, stopped = streamed(codec, tokens, [stop])
    assert (stopped, "".join(pieces)) == (True, text[: text.index(stop)])
    # A stop string whose last character is another stays in the text, whole.
    pieces, stopped = streamed(codec, tokens, [f"{stop}{EMOJI}x"])
    assert (stopped, "".join(pieces)) == (False, text)


def test_half_a_character_at_the_end(codec: TextCodec) -> None:
    """What never became a character is shown as lost behind what was held back, and may itself be a stop string."""
    tokens = [*ids_of(codec, "dog"), *ids_of(codec, f"dog{EMOJI}")[len(ids_of(codec, "dog")) : -1]]
    text = codec.decode(tokens)
    assert text.startswith("dog\ufffd")
    assert streamed(codec, tokens, ["gx"])[0][-1] == text[2:]
    assert "".join(streamed(codec, tokens, ["gx"])[0]) == text
    pieces, stopped = streamed(codec, tokens, ["g\ufffd"])
    assert ("".join(pieces), stopped) == ("do", True)


def test_special_tokens_do_not_part_a_stop_string(codec: TextCodec) -> None:
    words = ids_of(codec, "the quick brown")
    tokens = [token for word in words for token in (word, 1, 2)]
    pieces, stopped = streamed(codec, tokens, ["quick b"])
    assert ("".join(pieces), stopped) == ("the ", True)


@pytest.fixture(scope="module")
def letters(codec: TextCodec) -> list[int]:
    """Tokens whose text overlaps with itself and its neighbours in many ways."""
    texts = ["a", "b", "aa", "ab", " a", "\n", " ", "ba"]
    return sorted({token for text in texts for token in ids_of(codec, text)})


@st.composite
def stop_strings(draw: st.DrawFn, text: str) -> list[str]:
    """Parts of the text, such parts with a wrong end, and others."""
    stops = draw(st.lists(st.text("ab \n", min_size=1, max_size=4), max_size=2))
    for _ in range(draw(st.integers(0, 3)) if text else 0):
        start = draw(st.integers(0, len(text) - 1))
        stop = text[start : start + draw(st.integers(1, 8))]
        stops.append(stop + draw(st.sampled_from(["", "", "a", "\ufffd", EMOJI])))
    return draw(st.permutations(stops))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_tokens_and_stop_strings(codec: TextCodec, letters: list[int], data: st.DataObject) -> None:
    any_token = st.integers(0, codec.tokenizer.get_vocab_size() - 1)
    token = data.draw(st.sampled_from([st.sampled_from(letters), any_token]))
    tokens = data.draw(st.lists(token, max_size=20))
    stops = data.draw(stop_strings(codec.decode(tokens)))
    unwatched = data.draw(st.one_of(st.just(0), st.integers(0, len(tokens))))
    begin = watched_from(codec, tokens, unwatched)
    assert streamed(codec, tokens, stops, unwatched) == expected(certain(codec, tokens), stops, begin)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_text_is_cut_before_its_first_stop_string(codec: TextCodec, data: st.DataObject) -> None:
    """However the text falls into tokens, with one stop string the text is cut where it first occurs."""
    text = data.draw(st.text(st.sampled_from(["a", "b", " ", "\n", EMOJI, "ü", "龘"]), min_size=1, max_size=16))
    tokens = ids_of(codec, text)
    text = codec.decode(tokens)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[start : start + data.draw(st.integers(1, 6))] or "a"
    pieces, stopped = streamed(codec, tokens, [stop])
    assert ("".join(pieces), stopped) == ((text.partition(stop)[0]), stop in text)
    for count in range(len(pieces)):
        assert stop not in "".join(pieces[:count]), "part of a stop string was shown and could not be taken back"


def test_without_watch_nothing_stops(codec: TextCodec) -> None:
    """The first tokens neither hold a stop string nor begin one that later tokens complete."""
    tokens, unwatched = ids_of(codec, "the dog the dog"), len(ids_of(codec, "the dog"))
    for stop, text in (("the", "the dog "), ("the dog", "the dog "), ("dog", "the dog the "), ("g the", None)):
        pieces, stopped = streamed(codec, tokens, [stop], unwatched)
        assert ("".join(pieces), stopped) == (text or "the dog the dog", text is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_break_without_watch(codecs: dict[str, TextCodec], kind: str) -> None:
    """It ends nothing, also where it is a byte that becomes text only with the token behind it, or with the end."""
    codec = codecs[kind]
    line_break = codec.tokenizer.token_to_id("<0x0A>" if kind != KINDS[0] else "\u010a")
    dog = ids_of(codec, "dog")
    tokens = [*dog, line_break, *ids_of(codec, "a")]
    unwatched = len(dog) + 1
    text = codec.decode(tokens)
    assert "\n" in text
    pieces, stopped = streamed(codec, tokens, ["\n"], unwatched)
    assert ("".join(pieces), stopped) == (text, False)
    pieces, stopped = streamed(codec, tokens[:unwatched], ["\n"], unwatched)
    assert ("".join(pieces), stopped) == (codec.decode(tokens[:unwatched]), False)


# Requests. The oracle is the text without any end, cut by the definition above.


def answer(pipeline: Pipeline, prompt: Any, k: int, drafter: str, **options: Any) -> GenerationResult:
    """The result, whose streamed pieces are checked to be its text."""
    running = pipeline.stream(prompt, k=k, drafter=drafter, **{"max_new_tokens": TOKENS, **options})
    tokens = list(running)
    result = running.result()
    assert [token.token_id for token in tokens] == result.token_ids
    assert "".join(token.text for token in tokens) == result.text
    assert len(result.origins) == result.stats.num_output_tokens == len(result.token_ids)
    return result


@pytest.fixture(scope="module")
def endless(twins: Pipeline) -> list[int]:
    """The tokens that nothing ends."""
    return answer(twins, PROMPT, 0, "none", ignore_eos=True).token_ids


def stopped_at(
    codec: TextCodec, tokens: Sequence[int], stops: Sequence[str], unwatched: int = 0
) -> tuple[int, str, bool]:
    """How many tokens there are of an answer that stop strings end, its text, and whether one did."""
    begin = watched_from(codec, tokens, unwatched)
    for count in range(1, len(tokens) + 1):
        seen, stopped = expected([*certain(codec, tokens[:count])[:-1], ""], stops, begin)
        if stopped:
            return count, "".join(seen), True
    seen, stopped = expected(certain(codec, tokens), stops, begin)
    return len(tokens), "".join(seen), stopped


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), arm=st.sampled_from(ARMS), minimum=st.sampled_from([0, 0, 3, 9]))
def test_any_stop_strings_for_any_drafts(
    twins: Pipeline, endless: list[int], data: st.DataObject, arm: tuple[int, str], minimum: int
) -> None:
    stops = data.draw(stop_strings(twins.codec.decode(endless)))
    count, text, stopped = stopped_at(twins.codec, endless, stops, minimum)
    found = answer(twins, PROMPT, *arm, ignore_eos=True, stop_strings=stops, min_new_tokens=minimum)
    assert (found.token_ids, found.text) == (endless[:count], text)
    assert found.finish_reason == ("stop" if stopped else "length")


FORCED = [f"foo{EMOJI} bar", "aaab", "ab\n\n\ncd", "龘ü日本", "one two three four", f"{EMOJI}{EMOJI}x{EMOJI}"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), arm=st.sampled_from(ARMS), text=st.sampled_from(FORCED), seed=st.integers(0, 3))
@example(data=None, arm=(8, "model"), text="aaab", seed=0)
def test_stop_strings_in_a_known_text(
    twins: Pipeline, data: st.DataObject | None, arm: tuple[int, str], text: str, seed: int
) -> None:
    """The grammar leaves one text, in any tokens: characters of many bytes, repetitions, line breaks."""
    stop = "aab"
    if data is not None:
        start = data.draw(st.integers(0, len(text) - 1))
        stop = text[start : start + data.draw(st.integers(1, 5))]
    found = answer(twins, PROMPT, *arm, regex=re.escape(text), stop_strings=[stop, "zz"], temperature=1.0, seed=seed)
    assert (found.text, found.finish_reason) == (text.partition(stop)[0], "stop")
    assert stop in twins.codec.decode(found.token_ids)
    assert stop not in twins.codec.decode(found.token_ids[:-1])
    missed = answer(twins, PROMPT, *arm, regex=re.escape(text), stop_strings=[f"{stop}q"], temperature=1.0, seed=seed)
    assert (missed.text, missed.finish_reason) == (text, "grammar")


def test_a_beginning_that_the_budget_cuts_off_is_shown(twins: Pipeline) -> None:
    stop = "two three"
    found = answer(twins, PROMPT, 4, "model", regex="one two three four", stop_strings=[stop], max_new_tokens=64)
    count = len(found.token_ids)
    assert (found.text, found.finish_reason) == ("one ", "stop")
    cut = answer(twins, PROMPT, 4, "model", regex="one two three four", stop_strings=[stop], max_new_tokens=count - 1)
    assert cut.finish_reason == "length"
    assert cut.text == twins.codec.decode(found.token_ids[:-1])
    assert cut.text.startswith("one t")


CHAT = [{"role": "user", "content": "Count from one to ten in words, separated by commas."}]


@pytest.mark.parametrize(("k", "drafter"), ARMS[:3])
def test_stop_strings_of_a_real_model(smollm2_pair: Pipeline, k: int, drafter: str) -> None:
    """The text ends before the stop string; the tokens end with the one that completed it."""
    free = answer(smollm2_pair, CHAT, 0, "none")
    words = free.text.split(" ")
    assert len(words) > 8
    for stop in (f" {words[3]} {words[4]} {words[5]}", f"{words[6]} "):
        found = answer(smollm2_pair, CHAT, k, drafter, stop_strings=["\x00", stop])
        assert (found.text, found.finish_reason) == (free.text.partition(stop)[0], "stop")
        assert found.token_ids == free.token_ids[: len(found.token_ids)]
        assert stop in smollm2_pair.codec.decode(found.token_ids)
        assert stop not in smollm2_pair.codec.decode(found.token_ids[:-1])


@pytest.mark.parametrize(("k", "drafter"), ARMS)
@pytest.mark.parametrize("position", [0, 1, 4, 5, 11])
def test_stop_tokens(twins: Pipeline, endless: list[int], k: int, drafter: str, position: int) -> None:
    """The token is among the tokens, and its text is not shown; text held back before it is."""
    stop = endless[position]
    count = endless.index(stop) + 1
    before = twins.codec.decode(endless[: count - 1])
    never = [token for token in range(320) if token not in endless][:2]
    options: dict[str, Any] = {"stop_token_ids": [*never, stop], "stop_strings": [f"{before[-1:]}\x00"]}
    found = answer(twins, PROMPT, k, drafter, ignore_eos=True, **options)
    assert (found.token_ids, found.text, found.finish_reason) == (endless[:count], before, "stop")


@pytest.mark.parametrize(("k", "drafter"), ARMS)
def test_ends_of_sequence(twins: Pipeline, endless: list[int], k: int, drafter: str) -> None:
    """The first of several, in place of the bundle's own; one that is a stop token too is an end of sequence."""
    first, second = endless[9], endless[5]
    count = min(endless.index(first), endless.index(second)) + 1
    for ends in ([first, second], (second, first), {first, second}):
        found = answer(twins, PROMPT, k, drafter, eos_token_id=ends, stop_token_ids=[first, second])
        assert (found.token_ids, found.finish_reason) == (endless[:count], "eos")
        assert found.text == twins.codec.decode(endless[: count - 1])
    single = answer(twins, PROMPT, k, drafter, eos_token_id=first)
    assert single.token_ids == endless[: endless.index(first) + 1]
    ignored = answer(twins, PROMPT, k, drafter, eos_token_id=first, ignore_eos=True)
    assert (ignored.token_ids, ignored.finish_reason) == (endless, "length")


@pytest.mark.parametrize(("k", "drafter"), ARMS)
def test_the_end_of_sequence_of_the_bundle(twins: Pipeline, k: int, drafter: str) -> None:
    """Made likely by a bias: it ends the answer, unless it is ignored or another is named."""
    [end] = twins.manifest.eos_token_ids
    options: dict[str, Any] = {"logit_bias": {end: 1e4}, "max_new_tokens": 5}
    assert (
        answer(twins, PROMPT, k, drafter, **options).as_dict().items()
        >= {
            "token_ids": [end],
            "text": "",
            "finish_reason": "eos",
        }.items()
    )
    for other in ({"ignore_eos": True}, {"eos_token_id": end + 1}, {"eos_token_id": []}):
        found = answer(twins, PROMPT, k, drafter, **options, **other)
        assert (found.token_ids, found.text, found.finish_reason) == ([end] * 5, "", "length")


@pytest.mark.parametrize(("k", "drafter"), ARMS)
@pytest.mark.parametrize("minimum", [1, 2, 5, 6, 12])
def test_nothing_ends_an_answer_before_its_least_length(
    twins: Pipeline, endless: list[int], k: int, drafter: str, minimum: int
) -> None:
    """Tokens that would end it cannot be chosen before, and come as soon as they can; texts are not looked for."""
    options: dict[str, Any] = {"min_new_tokens": minimum, "max_new_tokens": minimum + 4}
    for ends in ({"eos_token_id": [5, 6]}, {"stop_token_ids": [5, 6]}, {"eos_token_id": 6, "stop_token_ids": [5]}):
        found = answer(twins, PROMPT, k, drafter, logit_bias={5: 1e4}, **{"eos_token_id": [], **ends}, **options)
        assert len(found.token_ids) == minimum + 1
        assert found.token_ids[-1] == 5
        assert not {5, 6} & set(found.token_ids[:-1])
        assert found.finish_reason == ("eos" if ends.get("eos_token_id") == [5, 6] else "stop")
    found = answer(twins, PROMPT, k, drafter, ignore_eos=True, stop_strings=list("abcdefghij \ufffd"), **options)
    count, text, _ = stopped_at(twins.codec, endless[: minimum + 4], list("abcdefghij \ufffd"), minimum)
    assert count > minimum
    assert (found.token_ids, found.text) == (endless[:count], text)


@pytest.mark.parametrize(("k", "drafter"), [ARMS[0], ARMS[2]])
def test_a_real_end_of_sequence(smollm2_pair: Pipeline, k: int, drafter: str) -> None:
    """It comes on its own, is put off, or is ignored; its text is never shown."""
    question = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    [end] = smollm2_pair.manifest.eos_token_ids
    free = answer(smollm2_pair, question, k, drafter)
    assert (free.token_ids[-1], free.finish_reason) == (end, "eos")
    assert free.text == smollm2_pair.codec.decode(free.token_ids)
    count = len(free.token_ids)
    later = answer(smollm2_pair, question, k, drafter, min_new_tokens=count)
    assert later.token_ids[: count - 1] == free.token_ids[:-1]
    assert len(later.token_ids) > count and end not in later.token_ids[:count]
    ignored = answer(smollm2_pair, question, k, drafter, ignore_eos=True, max_new_tokens=count + 3)
    assert (ignored.token_ids[:count], ignored.finish_reason) == (free.token_ids, "length")
    assert len(ignored.token_ids) == count + 3
    assert ignored.text.startswith(free.text) and "<|im_end|>" not in ignored.text


REASONS: dict[str, dict[str, Any]] = {
    "eos": {"eos_token_id": [5], "logit_bias": {5: 1e4}},
    "stop": {"stop_token_ids": [5], "logit_bias": {5: 1e4}},
    "grammar": {"regex": "ab"},
    "length": {"ignore_eos": True},
}


@pytest.mark.parametrize(("k", "drafter"), ARMS)
@pytest.mark.parametrize("reason", REASONS)
def test_reasons(twins: Pipeline, reason: str, k: int, drafter: str) -> None:
    assert answer(twins, PROMPT, k, drafter, max_new_tokens=6, **REASONS[reason]).finish_reason == reason


@pytest.mark.parametrize(("k", "drafter"), ARMS)
def test_two_reasons_at_once(twins: Pipeline, endless: list[int], k: int, drafter: str) -> None:
    """The last token of the budget may end the answer for a better reason than that."""
    count = endless.index(endless[6]) + 1
    for options, reason in (({"eos_token_id": [endless[6]]}, "eos"), ({"stop_token_ids": [endless[6]]}, "stop")):
        found = answer(twins, PROMPT, k, drafter, **{"eos_token_id": [], "max_new_tokens": count, **options})
        assert (found.token_ids, found.finish_reason) == (endless[:count], reason)
    both = answer(twins, PROMPT, k, drafter, regex="ab", stop_strings=["b"])
    assert (both.text, both.finish_reason) == ("a", "stop")
    whole = answer(twins, PROMPT, k, drafter, regex="ab", max_new_tokens=2)
    assert (whole.text, whole.finish_reason) == ("ab", "grammar")


@pytest.mark.parametrize(("k", "drafter"), ARMS)
def test_a_cancelled_answer_has_a_reason(twins: Pipeline, endless: list[int], k: int, drafter: str) -> None:
    running = twins.stream(PROMPT, k=k, drafter=drafter, ignore_eos=True, stop_strings=["\x00"])
    tokens = [next(iter(running)) for _ in range(3)]
    running.cancel()
    result = running.result()
    assert (result.token_ids, result.finish_reason) == (endless[:3], "cancelled")
    assert result.text == "".join(token.text for token in tokens)
