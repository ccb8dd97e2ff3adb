"""Prompts and options in, requests out: what a bundle takes, and what it refuses."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import cached_property
from threading import Lock
from typing import cast

from outrider.engines.bundle import NEXT_TOKENS, Bundle
from outrider.engines.errors import OutriderError
from outrider.engines.next_tokens import NextTokens
from outrider.runtime.accept import acceptance_rule
from outrider.runtime.choose import Chooser
from outrider.runtime.commit import Output
from outrider.runtime.decode import Request
from outrider.runtime.drafters import ModelSource
from outrider.runtime.drafters.model import ModelDrafter
from outrider.runtime.drafters.roster import WITH_MODEL, check_drafter
from outrider.runtime.drafters.translated import TranslatedDrafter
from outrider.runtime.generation import Speculation
from outrider.runtime.sampling.grammar import GrammarCompiler, GrammarState
from outrider.runtime.sampling.history import History
from outrider.runtime.sampling.options import SamplingOptions, is_int
from outrider.runtime.sequence import SequenceModel
from outrider.runtime.stats import DecodeStats
from outrider.runtime.text import Message, StoppingStream, TextCodec


class PromptTooLongError(OutriderError):
    """No room for a token is left behind the prompt."""


class Intake:
    """The tokenizer, the template and the grammars of a bundle.

    Args:
        tiers: the values of K that its engines were made for.
        device: of the target's engine.
    """

    def __init__(self, bundle: Bundle, tiers: tuple[int, ...], device: str) -> None:
        self.bundle = bundle
        self.manifest = bundle.manifest
        self.codec = TextCodec(bundle)
        self.tiers = tiers
        self._device = device
        self._draft_codec: TextCodec | None = None
        self._grammars: GrammarCompiler | None = None
        self._lock = Lock()

    @property
    def default_drafter(self) -> str:
        return "cascade" if self.manifest.draft else "ngram"

    def encode(self, prompt: str | Sequence[Message] | Sequence[int]) -> list[int]:
        """Token ids of a prompt.

        Raises:
            OutriderError: it is empty, no text and no ids, or leaves no room for a token.
        """
        ids = self._ids(prompt)
        if len(ids) >= self.manifest.max_length:
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens, this bundle takes at most {self.manifest.max_length - 1}; "
                "shorten it or export with a larger --max-length"
            )
        return ids

    def _ids(self, prompt: str | Sequence[Message] | Sequence[int]) -> list[int]:
        is_ids = isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes)) and all(map(is_int, prompt))
        if not prompt or not is_ids:
            return self.codec.encode(cast("str | Sequence[Message]", prompt))
        size = self.manifest.target.vocab_size
        ids = [int(token) for token in cast("Sequence[int]", prompt)]
        for token in ids:
            if not 0 <= token < size:
                raise OutriderError(f"the prompt has token {token}; this model's are 0 to {size - 1}")
        return ids

    def new_request(self, prompt: Sequence[int], options: SamplingOptions, acceptance: str = "exact") -> Request:
        """A request for ``decode``, with room for what was asked and still fits the context behind ``prompt``.

        Raises:
            OutriderError: the options name a token that does not exist, or a grammar that does not compile.
        """
        vocab_size = self.manifest.target.vocab_size
        options.check_vocabulary(vocab_size)
        eos = options.eos_token_ids(self.manifest.eos_token_ids)
        ends = {*eos, *options.stop_token_ids}
        history = History(prompt, ends, self._grammar(options), counting=options.penalizing)
        output = Output(
            history,
            StoppingStream(self.codec, options.stop_strings),
            min(options.max_new_tokens, self.manifest.max_length - len(prompt)),
            options.min_new_tokens,
            frozenset(eos),
            frozenset(options.stop_token_ids),
        )
        seed = secrets.randbits(64) if options.seed is None else int(options.seed)
        chooser = Chooser(options, history, seed, vocab_size)
        return Request(history, chooser, acceptance_rule(acceptance), output, DecodeStats(len(prompt)))

    def speculation(self, drafter: str | None, k: int | None, acceptance: str) -> Speculation:
        """Raises OutriderError: what was asked for is not to be had of this bundle."""
        name = self.default_drafter if drafter is None else drafter
        check_drafter(name, self.manifest.draft is not None)
        if k is not None:
            self.check_k(k)
        if k == 0 or name == "none":
            return Speculation("none", 0, acceptance)
        self.check_acceptance(name, acceptance)
        return Speculation(name, k, acceptance, translated=name in WITH_MODEL and self.manifest.translated)

    def check_k(self, k: int) -> None:
        """Raises OutriderError when K is negative or larger than the tiers that are served."""
        largest, exported = max(self.tiers), max(self.manifest.tiers)
        if not is_int(k):
            raise OutriderError(f"K is {k!r}; it must be a whole number")
        if k < 0:
            raise OutriderError(f"K = {k} is negative; use 0 for plain decoding")
        if k > largest:
            made = "bundle; export" if largest == exported else f"bundle's {self._device}; build"
            raise OutriderError(f"K = {k} is outside 0 to {largest}, the largest tier of this {made} with --k {k}")

    def check_acceptance(self, drafter: str, acceptance: str) -> None:
        """Raises OutriderError for a rule that judges drafts by the law they were drawn from, where they have none."""
        acceptance_rule(acceptance)
        if drafter in WITH_MODEL and self.manifest.translated and acceptance != "exact":
            raise OutriderError(
                f"acceptance {acceptance} needs the draft's probabilities of the target's tokens, and this draft has "
                "another tokenizer; use --acceptance exact, or --drafter ngram"
            )

    def model_drafter(self, draft: SequenceModel) -> ModelSource:
        """The bundle's draft model, over a cache of one sequence."""
        if not self.manifest.translated:
            return ModelDrafter(draft)
        if self._draft_codec is None:
            self._draft_codec = TextCodec(self.bundle, draft.info.tokenizer)
        return TranslatedDrafter(draft, self.codec, self._draft_codec)

    @cached_property
    def next_tokens(self) -> NextTokens | None:
        """The bundle's table, if it has one."""
        if NEXT_TOKENS not in self.bundle.files:
            return None
        return NextTokens.load(self.bundle.path(NEXT_TOKENS), self.manifest.target.vocab_size)

    def _grammar(self, options: SamplingOptions) -> GrammarState | None:
        if not options.grammar:
            return None
        with self._lock:
            if self._grammars is None:
                manifest, tokenizer = self.manifest, self.codec.tokenizer.to_str()  # its file may be gone by now
                self._grammars = GrammarCompiler(tokenizer, manifest.target.vocab_size, manifest.eos_token_ids)
        return self._grammars.compile(**options.grammar)
