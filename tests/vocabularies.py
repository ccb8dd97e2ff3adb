"""Codecs without a model behind them, and small SentencePiece vocabularies as a GGUF file would carry them."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from outrider.engines.bundle import TOKENIZER, Bundle
from outrider.export.checkpoint import TokenizerFiles
from outrider.runtime.text import TextCodec

CORPUS = [
    "the quick brown fox jumps over the lazy dog and the dog does not mind at all",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n        return a - b\n",
    "one two three four five six seven eight nine ten eleven twelve, 1969 and 2024!",
    "wörter mit ümlauten über straßen; l'été à la plage",
    "日本語のテキスト",
] * 2


def codec_of(files: TokenizerFiles, folder: Path) -> TextCodec:
    """A codec of these files, as if they came out of a bundle in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TOKENIZER).write_text(files.json, encoding="utf-8")
    manifest = SimpleNamespace(special_tokens=files.special_tokens)
    bundle = SimpleNamespace(path=folder.joinpath, chat_template=files.chat_template, manifest=manifest)
    return TextCodec(cast(Bundle, bundle))


def train_sentencepiece(*, space_prefix: bool, corpus: Iterable[str] = CORPUS, **options: Any) -> bytes:
    """A BPE ModelProto with byte fallback and no normalization, as the Llama family has it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=model,
        model_type="bpe",
        vocab_size=450,
        hard_vocab_limit=False,
        byte_fallback=True,
        add_dummy_prefix=space_prefix,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        character_coverage=1.0,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def gguf_metadata(model: bytes, **more: Any) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for a ModelProto; in user-defined tokens it writes spaces as such."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    user_defined = proto.SentencePiece.USER_DEFINED
    pieces = [
        piece.piece.replace("\u2581", " ") if piece.type == user_defined else piece.piece for piece in proto.pieces
    ]
    keys = {
        "model": "llama",
        "tokens": pieces,
        "scores": [piece.score for piece in proto.pieces],
        "token_type": [int(piece.type) for piece in proto.pieces],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_space_prefix": proto.normalizer_spec.add_dummy_prefix,
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def fast(files: TokenizerFiles) -> PreTrainedTokenizerFast:
    """The same tokenizer, opened by transformers."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(files.json), chat_template=files.chat_template, **files.special_tokens
    )


def read_metadata(file: BinaryIO) -> dict[str, Any]:
    """The keys and values at the start of a GGUF file, much sooner than ``gguf`` has them."""
    scalars = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

    def unpack(form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))

    def value(kind: int) -> Any:
        if kind == 8:
            return file.read(*unpack("Q")).decode()
        if kind != 9:
            return unpack(scalars[kind])[0]
        inner, count = unpack("IQ")
        return list(unpack(f"{count}{scalars[inner]}")) if inner in scalars else [value(inner) for _ in range(count)]

    _magic, _version, _tensors, count = unpack("4sIQQ")
    return {value(8): value(*unpack("I")) for _ in range(count)}
