"""Text between two vocabularies: it comes through whole, in any steps, and what comes back can stand behind what is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
from checkpoints import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from vocabularies import CORPUS, codec_of, gguf_metadata, train_sentencepiece

from outrider.export.checkpoint import TokenizerFiles, open_checkpoint
from outrider.export.gguf_tokenizer import tokenizer_from_metadata
from outrider.runtime import translate
from outrider.runtime.text import TextCodec
from outrider.runtime.translate import Translation

LOST = "\ufffd"
LOSSLESS = ["byte-level", "smollm2", "sentencepiece", "sentencepiece-no-prefix"]
KINDS = [*LOSSLESS, "lower-case"]

WORDS = st.sampled_from(
    [" the", " dog", " fox", "jumps", " add(a, b)", "\n", "\n    return", "1969", ", ", "日本", "🦜"]
)
PIECES = st.sampled_from([" ", "  ", "\t", "ü", "e\u0301", "<|end|>", "</s>", "\u2581", "龘", "👩‍👩‍👧"])
BMP = st.text(st.characters(max_codepoint=0xFFFF, codec="utf-8"), max_size=3)  # SmolLM2 lacks bytes of what is beyond
TEXTS = st.lists(WORDS | PIECES | st.text("abc dth.", max_size=6) | BMP, max_size=12).map("".join)
CUTS = st.lists(st.integers(1, 5), max_size=12)


def lower_case() -> TokenizerFiles:
    """No way back: upper case and accents are gone, characters outside of the corpus are unknown."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"]))
    return TokenizerFiles(tokenizer.to_str(), None, {}, (1,))


@pytest.fixture(scope="module")
def pair(smollm2: Path, workdir: Path) -> Callable[[str, str], tuple[TextCodec, TextCodec, Translation]]:
    """Codecs of a target and a draft of two kinds, and what is between them, new for each request."""

    def sentencepiece(space_prefix: bool) -> TokenizerFiles:
        return tokenizer_from_metadata(
            gguf_metadata(train_sentencepiece(space_prefix=space_prefix)).get, Path("m.gguf")
        )

    files = {
        "byte-level": tiny_tokenizer,
        "smollm2": open_checkpoint(str(smollm2)).tokenizer,
        "sentencepiece": partial(sentencepiece, True),
        "sentencepiece-no-prefix": partial(sentencepiece, False),
        "lower-case": lower_case,
    }
    made = {kind: make() for kind, make in files.items()}

    @cache
    def of(target: str, draft: str) -> tuple[TextCodec, TextCodec, Translation]:
        codecs = [codec_of(made[kind], workdir / f"translate-{kind}") for kind in (target, draft)]
        return codecs[0], codecs[1], Translation(*codecs)

    return of


Pair = Callable[[str, str], tuple[TextCodec, TextCodec, Translation]]
BOTH = [(target, draft) for target in LOSSLESS for draft in LOSSLESS if target != draft]


def ids_of(codec: TextCodec, text: str) -> list[int]:
    return list(codec.tokenizer.encode(text, add_special_tokens=False).ids)


def inside(codec: TextCodec, text: str) -> list[int]:
    """Ids of a text that others go before."""
    return ids_of(codec, f"\ue000{text}")[len(ids_of(codec, "\ue000")) :]


def round_trip(codec: TextCodec, text: str) -> str:
    return codec.decode(ids_of(codec, text))


def in_steps(count: int, cuts: list[int]) -> list[int]:
    """Rising lengths up to ``count``."""
    lengths = [0]
    for step in cuts:
        lengths.append(min(count, lengths[-1] + step))
    return [*lengths[1:], count]


@pytest.mark.parametrize(("target", "draft"), BOTH)
@settings(max_examples=40, deadline=None)
@given(text=TEXTS, cuts=CUTS)
def test_the_draft_reads_the_text(pair: Pair, target: str, draft: str, text: str, cuts: list[int]) -> None:
    """However it grows: where it ends with a whole character, it is all there, but for special tokens."""
    ours, theirs, translation = pair(target, draft)
    tokens = ids_of(ours, text)
    translation.begin()
    for length in in_steps(len(tokens), cuts):
        read, whole = theirs.decode(translation.follow(tokens[:length])), ours.decode(tokens[:length])
        if not whole.endswith(LOST):
            assert read == round_trip(theirs, whole)


@pytest.mark.parametrize(("target", "draft"), BOTH)
@settings(max_examples=40, deadline=None)
@given(words=st.lists(WORDS, min_size=1, max_size=30), cuts=CUTS, data=st.data())
def test_the_targets_own_tokens_come_back(
    pair: Pair, target: str, draft: str, words: list[str], cuts: list[int], data: st.DataObject
) -> None:
    """A draft that writes on as the text does: proposed are the tokens that the target has for it, also half a word."""
    ours, theirs, translation = pair(target, draft)
    text = "".join(words)
    tokens = ids_of(ours, text)
    translation.begin()
    for length in in_steps(data.draw(st.integers(1, len(tokens))), cuts):
        ids = translation.follow(tokens[:length])
    known = theirs.decode(ids)
    assert ours.decode(tokens).startswith(known)
    drafted = inside(theirs, ours.decode(tokens)[len(known) :])
    assert theirs.decode([*ids, *drafted]) == ours.decode(tokens)
    assert translation.translate(drafted) == tokens[length:]


@pytest.mark.parametrize(("target", "draft"), [(a, b) for a in KINDS for b in KINDS if a != b])
@settings(max_examples=25, deadline=None)
@given(data=st.data(), cuts=CUTS)
def test_any_tokens_whatever(pair: Pair, target: str, draft: str, data: st.DataObject, cuts: list[int]) -> None:
    """Bytes, special tokens, words cut anywhere: what is proposed is text, and the text that was drafted."""
    ours, theirs, translation = pair(target, draft)
    any_id = {codec: st.integers(0, codec.tokenizer.get_vocab_size() - 1) for codec in (ours, theirs)}
    tokens = data.draw(st.lists(any_id[ours] | st.sampled_from(ids_of(ours, "the dog🦜\n")), min_size=1, max_size=40))
    drafted = data.draw(st.lists(any_id[theirs], min_size=1, max_size=6))
    translation.begin()
    for length in in_steps(len(tokens), cuts):
        ids = translation.follow(tokens[:length])
    proposed = translation.translate(drafted)
    assert all(0 <= token < theirs.tokenizer.get_vocab_size() for token in ids)
    if not proposed:
        return
    assert all(token < ours.tokenizer.get_vocab_size() and not ours.is_special(token) for token in proposed)
    said = theirs.decode([*ids, *drafted])[len(theirs.decode(ids)) :].rstrip(LOST)
    before, behind = ours.decode(tokens), ours.decode([*tokens, *proposed])
    if round_trip(ours, f"the{said}") == f"the{said}" and before and LOST not in before + said:
        assert behind == before + said


@pytest.mark.parametrize(("target", "draft"), [("byte-level", "sentencepiece"), ("smollm2", "byte-level")])
def test_special_tokens_do_not_pass(pair: Pair, target: str, draft: str) -> None:
    """The target's are no text for the draft, and where a draft spells the name of one, the proposal ends."""
    ours, theirs, translation = pair(target, draft)
    name = ours.tokenizer.id_to_token(2)
    assert ours.is_special(2)
    tokens = [2, *ids_of(ours, "the dog"), 2, 2, *ids_of(ours, "\nthe fox"), 2]
    translation.begin()
    assert theirs.decode(translation.follow(tokens)) == "the dog\nthe fox"
    assert translation.translate(inside(theirs, f" jumps{name} over")) == inside(ours, " jumps")
    assert translation.translate(inside(theirs, name)) == []


def test_a_last_token_that_would_be_joined_stands(pair: Pair) -> None:
    """ "the d" and "og" are never "the dog" again: behind the "d", the rest is encoded by itself."""
    ours, theirs, translation = pair("smollm2", "sentencepiece")
    tokens = [*ids_of(ours, "the d"), *ids_of(ours, "o")]
    translation.begin()
    translation.follow(tokens)
    proposed = translation.translate(inside(theirs, "g jumps"))
    assert proposed == ids_of(ours, "g jumps")
    assert ours.decode([*tokens, *proposed]) == "the dog jumps"
    assert ids_of(ours, "the dog jumps")[: len(tokens)] != tokens


def test_half_a_character_is_completed_or_nothing_is_proposed(pair: Pair) -> None:
    ours, theirs, translation = pair("byte-level", "sentencepiece")
    whole = ids_of(ours, "the dog🦜")
    for cut in (1, 2, 3):
        translation.begin()
        assert theirs.decode(translation.follow(whole[:-cut])) == "the dog"
        assert translation.translate(inside(theirs, "🦜 the")) == [*whole[-cut:], *ids_of(ours, " the")]
        assert translation.translate(inside(theirs, "日 the")) is None
        assert translation.translate(inside(theirs, "🦜")[:2]) == []  # may become the same character


@pytest.mark.parametrize("text", ["the quick brown fox, 1969! ", "龘", "\u1000\u1001", "THE \u00e9"])
@pytest.mark.parametrize(("target", "draft"), [("sentencepiece", "smollm2"), ("byte-level", "lower-case")])
def test_only_a_window_is_encoded_anew(
    pair: Pair, target: str, draft: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any length, also where all is bytes, or the draft reads another text."""
    ours, theirs, translation = pair(target, draft)
    tokens, drafted = ids_of(ours, text * 200)[:600], inside(theirs, text)
    lengths = []
    encode = translate._Encoder.__call__

    def measured(self: translate._Encoder, text: str, first: bool) -> translate._Continuation:
        lengths.append(len(text))
        return encode(self, text, first)

    translation.begin()
    translation.follow(tokens[:300])
    monkeypatch.setattr(translate._Encoder, "__call__", measured)
    for length in range(301, len(tokens), 3):
        translation.follow(tokens[:length])
        translation.translate(drafted)
    longest = max(len(ours.alone(token)) for token in tokens)
    assert max(lengths) <= (translate._LONGEST + 3) * longest + len(text)
