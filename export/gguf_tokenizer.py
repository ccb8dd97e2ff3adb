"""``tokenizer.json`` from the metadata of a GGUF file.

Two kinds of vocabulary occur: ``gpt2`` (byte-level BPE, with a named pre-tokenizer) and ``llama`` (SentencePiece BPE,
where the merges follow from the scores). The ``tokenizers`` library builds and serializes both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from outrider.engines.errors import OutriderError
from outrider.export.checkpoint import TokenizerFiles

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "\u2581"
_TEMPLATE_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# What stands between words: punctuation, lines, spaces. In some it takes slashes behind it, too.
_BETWEEN = r" ?[^\s\p{L}\p{N}]+[\r\n%s]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Contractions, words with one leading non-letter, numbers of so many digits.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}|" + _BETWEEN % ""
# Words that begin anew with each capital letter, single digits.
_CAPITALS, _SMALL = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED_WORDS = "|".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?{word}" for word in (f"[{_CAPITALS}]*[{_SMALL}]+", f"[{_CAPITALS}]+[{_SMALL}]*")
)
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_SPLITS = {
    **dict.fromkeys((*_LLAMA3, "dbrx"), _WORDS % 3),
    "qwen2": _WORDS % 1,
    "tekken": rf"{_CASED_WORDS}|\p{{N}}|{_BETWEEN % '/'}",
}
_WHOLE = (*_LLAMA3, "tekken")  # take whole tokens without looking at merges, and begin with one for the beginning
_EACH_DIGIT = ("smollm", "starcoder", "refact", "command-r")  # digits first, then as GPT-2 splits
_GPT2 = ("gpt-2", "gpt2")
_COMPOSED = ("qwen2", "command-r")  # whose text is in Unicode's composed form (NFC)

Metadata = Callable[[str], Any]


def tokenizer_from_metadata(metadata: Metadata, path: Path) -> TokenizerFiles:
    """Raises OutriderError for a file without vocabulary, or a vocabulary or pre-tokenizer that is not implemented."""
    kind = metadata("tokenizer.ggml.model")
    tokens = metadata("tokenizer.ggml.tokens")
    if kind is None or tokens is None:
        raise OutriderError(f"{path} has no tokenizer; convert the checkpoint again with its vocabulary")
    if kind == "gpt2":
        tokenizer, bos_by_default = _byte_level_bpe(metadata, tokens, path)
    elif kind == "llama":
        tokenizer, bos_by_default = _sentencepiece_bpe(metadata, tokens, path), True
    else:
        raise OutriderError(f"{path}: tokenizer model {kind!r} is not implemented; implemented are gpt2 and llama")
    _add_special_tokens(tokenizer, metadata("tokenizer.ggml.token_type") or [], tokens)
    add_bos = metadata("tokenizer.ggml.add_bos_token")
    if bos_by_default if add_bos is None else add_bos:
        bos = _required(metadata, "tokenizer.ggml.bos_token_id", path)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]}:0 $A:0", pair=f"{tokens[bos]}:0 $A:0 $B:1", special_tokens=[(tokens[bos], bos)]
        )
    ids = {name: metadata(f"tokenizer.ggml.{key}_token_id") for name, key in _TEMPLATE_NAMES.items()}
    ends = [metadata("tokenizer.ggml.eos_token_id"), metadata("tokenizer.ggml.eot_token_id")]
    return TokenizerFiles(
        json=tokenizer.to_str(),
        chat_template=metadata("tokenizer.chat_template"),
        special_tokens={name: tokens[index] for name, index in ids.items() if index is not None},
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
    )


def _required(metadata: Metadata, key: str, path: Path) -> Any:
    value = metadata(key)
    if value is None:
        raise OutriderError(f"{path} has no {key}, which its tokenizer needs; convert the checkpoint again")
    return value


def _byte_level_bpe(metadata: Metadata, tokens: list[str], path: Path) -> tuple[Tokenizer, bool]:
    name = metadata("tokenizer.ggml.pre")
    if name in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[name]), behavior="isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    elif name in _EACH_DIGIT:
        digits = pre_tokenizers.Digits(individual_digits=True)
        steps = [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif name in _GPT2:
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        known = ", ".join((*_GPT2, *_EACH_DIGIT, *_SPLITS))
        raise OutriderError(
            f"{path}: pre-tokenizer {name!r} is not implemented; implemented are {known}. "
            "Export from the Hugging Face folder instead"
        )
    merges = [tuple(merge.split(" ")) for merge in _required(metadata, "tokenizer.ggml.merges", path)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in _WHOLE))
    if name in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, name in _WHOLE


def _sentencepiece_bpe(metadata: Metadata, tokens: list[str], path: Path) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = metadata("tokenizer.ggml.unknown_token_id")
    model = models.BPE(
        vocabulary,
        _merges_from_scores(vocabulary, _required(metadata, "tokenizer.ggml.scores", path)),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = metadata("tokenizer.ggml.add_space_prefix")
    prefix = True if prefix is None else prefix
    steps = [normalizers.Replace(" ", _SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *steps] if prefix else steps)
    undo = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefix else undo)
    return tokenizer


def _merges_from_scores(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores highest: every split of a token is a merge, best first."""
    merges = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[index], index, vocabulary[left], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _add_special_tokens(tokenizer: Tokenizer, kinds: list[int], tokens: list[str]) -> None:
    """In two calls: each one rebuilds the tokenizer's search for added tokens."""
    typed = list(zip(kinds, tokens, strict=False))
    special = [token for kind, token in typed if kind in (_UNKNOWN, _CONTROL)]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    user_defined = [token for kind, token in typed if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in user_defined])
