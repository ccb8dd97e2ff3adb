"""Streamed text is the decoded whole, cut anywhere but inside a character; chat templates render as in transformers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from checkpoints import CHAT_TEMPLATE
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from vocabularies import codec_of, fast, gguf_metadata, train_sentencepiece

from outrider.engines.errors import OutriderError
from outrider.export.checkpoint import TokenizerFiles, open_checkpoint
from outrider.export.gguf_tokenizer import tokenizer_from_metadata
from outrider.runtime.text import TextCodec, TextStream

LOST = "\ufffd"
EMOJI = "🦜"

CONVERSATIONS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
    [
        {"role": "user", "content": "Grüße 😀 \n two lines "},
        {"role": "assistant", "content": "日本語 <b>&amp;</b>"},
        {"role": "user", "content": "{{ bos_token }} 'quoted' \"twice\""},
    ],
]
# What templates of other models use: special tokens, dates, JSON, loop controls, marks for training, absent tools.
RICH_TEMPLATE = """{{ bos_token }}{%- if strftime_now is defined %}{{ strftime_now("%Y") }}{% endif %}
{%- if tools is not none %}tools{% endif %}
{%- for message in messages %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
    {{- message.role }}: {{ message | tojson }}
    {% if message.role == "assistant" %}{% generation %}{{ message.content | trim }}{% endgeneration %}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}{{ eos_token + "assistant" }}{% endif %}
"""
KINDS = ["byte-level", "byte-fallback", "byte-fallback-no-prefix"]


@pytest.fixture(scope="module")
def smollm2_files(smollm2: Path) -> TokenizerFiles:
    return open_checkpoint(str(smollm2)).tokenizer()


@pytest.fixture(scope="module")
def codecs(smollm2_files: TokenizerFiles, workdir: Path) -> dict[str, TextCodec]:
    """SmolLM2's, and SentencePiece's, whose decoder may drop a first space and judges a run of bytes as one."""
    files = {KINDS[0]: smollm2_files}
    for kind, space_prefix in zip(KINDS[1:], [True, False], strict=True):
        metadata = gguf_metadata(train_sentencepiece(space_prefix=space_prefix, user_defined_symbols=["<u>"]))
        files[kind] = tokenizer_from_metadata(metadata.get, Path("m.gguf"))
    return {kind: codec_of(files[kind], workdir / f"{kind}-codec") for kind in KINDS}


@pytest.fixture(scope="module", params=KINDS)
def codec(request: pytest.FixtureRequest, codecs: dict[str, TextCodec]) -> TextCodec:
    return codecs[request.param]


def ids_of(codec: TextCodec, text: str) -> list[int]:
    return list(codec.tokenizer.encode(text, add_special_tokens=False).ids)


def assert_streams(codec: TextCodec, ids: list[int]) -> list[str]:
    """Check every piece of a stream of ``ids``; returns them, the rest last."""
    stream = TextStream(codec)
    pieces = []
    for count, token in enumerate(ids, start=1):
        pieces.append(stream.push(token))
        assert codec.decode(ids).startswith("".join(pieces)), "text was shown that later became another"
        assert codec.decode(ids[:count]).startswith("".join(pieces)), "text was shown before its token"
    pieces.append(stream.rest())
    assert "".join(pieces) == codec.decode(ids)
    return pieces


def interesting(tokenizer: Tokenizer) -> list[int]:
    """Tokens that alone are no text: bytes of longer characters, special tokens; and such with a space in front."""
    texts = {index: tokenizer.decode([index]) for index in range(tokenizer.get_vocab_size())}
    by_name = {index for index in texts if (tokenizer.id_to_token(index) or "").startswith(("<", "\u2581\u2581"))}
    return sorted(by_name | {index for index, text in texts.items() if not text.strip() or LOST in text})


@pytest.fixture(scope="module")
def odd(codec: TextCodec) -> list[int]:
    return interesting(codec.tokenizer)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_tokens(codec: TextCodec, odd: list[int], data: st.DataObject) -> None:
    token = st.one_of(st.sampled_from(odd), st.integers(0, codec.tokenizer.get_vocab_size() - 1))
    assert_streams(codec, data.draw(st.lists(token, max_size=24)))


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text(codec: TextCodec, text: str) -> None:
    """Whole characters come out whole, however many tokens each takes."""
    ids = ids_of(codec, text)
    assume(codec.decode(ids) == text)  # SmolLM2 has no tokens for some bytes, and drops them
    pieces = assert_streams(codec, ids)
    assert sum(piece.count(LOST) for piece in pieces) == text.count(LOST)


@pytest.mark.parametrize("text", [EMOJI, f"{EMOJI} dog", f"the\n{EMOJI}", f"\n{EMOJI}\n{EMOJI}{EMOJI}", "龘龘 龘"])
def test_characters_of_many_bytes_appear_once_and_whole(codec: TextCodec, text: str) -> None:
    pieces = assert_streams(codec, ids_of(codec, text))
    assert "" in pieces[:-1]  # there are tokens inside a character
    assert "".join(pieces) == text
    for character in set(text) & {EMOJI, "龘"}:
        assert sum(piece.count(character) for piece in pieces) == text.count(character)


def test_a_byte_level_character_appears_with_its_last_byte(codecs: dict[str, TextCodec]) -> None:
    ids = ids_of(codecs["byte-level"], EMOJI)
    assert assert_streams(codecs["byte-level"], ids) == [*[""] * (len(ids) - 1), EMOJI, ""]


def test_text_appears_with_its_token(codec: TextCodec) -> None:
    ids = ids_of(codec, "the quick brown fox")
    pieces = assert_streams(codec, ids)
    assert all(pieces[1:-1])
    assert not pieces[-1]


def test_half_a_character(codec: TextCodec) -> None:
    """At the end it is shown as lost; in the middle it is, once the next token proves it."""
    half, dog = ids_of(codec, f"dog{EMOJI}")[:-1], ids_of(codec, "dog")
    *pieces, rest = assert_streams(codec, half)
    assert LOST not in "".join(pieces)
    assert LOST in rest
    *pieces, rest = assert_streams(codec, half + dog)
    assert LOST in "".join(pieces)
    assert not rest


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_line_break_before_half_a_character(codecs: dict[str, TextCodec], kind: str) -> None:
    """SentencePiece decoders take the line break back when the bytes behind it are no character."""
    codec = codecs[kind]
    line_break, first = (codec.tokenizer.token_to_id(f"<0x{byte}>") for byte in ("0A", "F0"))
    dog = ids_of(codec, "dog")
    assert "\n" in codec.decode([*dog, line_break, *dog])
    assert "\n" not in codec.decode([*dog, line_break, first, *dog])
    assert_streams(codec, [*dog, line_break, first, *dog])
    assert_streams(codec, [*dog, line_break, 1, first, *dog])  # a special token does not part them


def test_special_tokens_leave_no_trace(codec: TextCodec) -> None:
    """Not between words, not inside a character, and a space behind them stays."""
    text = f"the dog{EMOJI} the"
    mixed = [token for word in ids_of(codec, text) for token in (1, word, 2, 2)]
    assert "".join(assert_streams(codec, mixed)) == text


def test_late_tokens_cost_what_early_ones_did(codec: TextCodec) -> None:
    ids = ids_of(codec, "The quick brown fox jumps over the lazy dog. " * 1000)[:8000]
    stream, seconds = TextStream(codec), []
    for start in range(0, len(ids), 500):
        began = time.perf_counter()
        for token in ids[start : start + 500]:
            stream.push(token)
        seconds.append(time.perf_counter() - began)
    # Decoding the whole for each token would make the last pieces many times as dear as the first.
    assert min(seconds[-4:]) < 4 * min(seconds[:4])


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("template", ["smollm2", "tiny", "rich"])
def test_chat_template(
    smollm2_files: TokenizerFiles, tmp_path: Path, template: str, messages: list[dict[str, str]]
) -> None:
    template = {"smollm2": str(smollm2_files.chat_template), "tiny": CHAT_TEMPLATE, "rich": RICH_TEMPLATE}[template]
    given = TokenizerFiles(smollm2_files.json, template, smollm2_files.special_tokens, smollm2_files.eos_token_ids)
    codec = codec_of(given, tmp_path)
    rendered = codec.render(messages)
    assert rendered == fast(given).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = fast(given).apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert codec.encode(messages) == ids


def test_a_template_that_refuses(smollm2_files: TokenizerFiles, tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    codec = codec_of(TokenizerFiles(smollm2_files.json, template, {}, ()), tmp_path)
    with pytest.raises(OutriderError, match="refuses these messages: roles must alternate"):
        codec.render(CONVERSATIONS[0])
