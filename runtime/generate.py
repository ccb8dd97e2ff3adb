"""Text in, text out: a bundle loaded once, requests generated from it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import RLock
from typing import Any, cast

from outrider.engines.bundle import NEXT_TOKENS, TOKENIZER, Bundle
from outrider.engines.engine import Engine, PlanShape
from outrider.engines.errors import OutriderError
from outrider.engines.next_tokens import NextTokens
from outrider.engines.open import Opener
from outrider.engines.plan import BoundEngine
from outrider.engines.probe import probe_rows
from outrider.engines.round import DeviceRound
from outrider.runtime.accept import ExactRule, acceptance_rule
from outrider.runtime.choose import Chooser
from outrider.runtime.commit import Output
from outrider.runtime.controller import Controller
from outrider.runtime.decode import Request, decode
from outrider.runtime.drafters import Drafter, ModelSource, NoDrafter
from outrider.runtime.drafters.adaptive import AdaptiveDrafter, Lookups
from outrider.runtime.drafters.cascade import CascadeDrafter
from outrider.runtime.drafters.model import ModelDrafter
from outrider.runtime.drafters.ngram import NgramDrafter
from outrider.runtime.drafters.translated import TranslatedDrafter
from outrider.runtime.generation import Generation, GenerationResult, Speculation
from outrider.runtime.resident import ResidentLaw, ResidentModel, ResidentPair, can_stay
from outrider.runtime.sampling.grammar import GrammarCompiler, GrammarState
from outrider.runtime.sampling.history import History
from outrider.runtime.sampling.options import SamplingOptions, is_int
from outrider.runtime.sequence import CachedModel
from outrider.runtime.stats import DecodeStats
from outrider.runtime.text import Message, StoppingStream, TextCodec
from outrider.runtime.tuning import Tuning, read_tuning, tune

DRAFTERS = ("model", "ngram", "cascade", "none")
_WITH_MODEL = ("model", "cascade")


class Pipeline:
    """A loaded bundle. It holds the caches of one sequence: a new request takes them over from the last.

    ``tiers`` are the values of K that its engines were made for.

    Args:
        target: the engine of the bundle's target.
        draft: that of its draft, on the same device or another; None for a bundle without.
    """

    def __init__(self, bundle: Bundle, target: Engine, draft: Engine | None) -> None:
        self.bundle = bundle
        self.manifest = bundle.manifest
        self.codec = TextCodec(bundle)
        self.target_engine = target
        self.draft_engine = draft
        table = target.table
        self.tiers = tuple(k for k in bundle.manifest.tiers if not table or PlanShape(k + 1, k + 1) in table)
        self.exactness, min_rows = self._probe_rows()
        self.target = CachedModel(target, min_rows)
        self.draft = CachedModel(draft, 1) if draft else None  # its bits decide no text
        self._rounds: dict[int, DeviceRound] = {}
        next_tokens = self._next_tokens()
        self.lookups = Lookups(next_tokens)
        self._ngram_drafter = NgramDrafter(next_tokens)
        self.model_drafter = self._model_drafter(self.draft) if self.draft else None
        self._tuning: Tuning | None = None
        self._controller: Controller | None = None
        self._grammars: GrammarCompiler | None = None
        self.lock = RLock()  # a round at a time, whatever thread it is for
        self.owner: Generation | None = None

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        threads: int | None = None,
        provider: str = "cpu",
        draft_provider: str | None = None,
    ) -> Pipeline:
        """Open a bundle.

        Args:
            threads: of each engine; by default all processors this process may use.
            provider: one of ``engines.open.PROVIDERS``.
            draft_provider: the draft model's, by default the same.

        Raises:
            OutriderError: the bundle is not whole, or its engine cannot run here.
        """
        bundle = Bundle(folder)
        if draft_provider and not bundle.manifest.draft:
            raise OutriderError(f"{folder} has no draft model; leave --draft-provider out")
        opener = Opener(bundle, threads)
        target = opener.open("target", provider)
        draft = opener.open("draft", draft_provider or provider) if bundle.manifest.draft else None
        return cls(bundle, target, draft)

    def generate(
        self,
        prompt: str | Sequence[Message],
        options: SamplingOptions | None = None,
        *,
        k: int | None = None,
        drafter: str | None = None,
        acceptance: str = "exact",
        **changes: Any,
    ) -> GenerationResult:
        """The whole answer at once; see ``stream``."""
        return self.stream(prompt, options, k=k, drafter=drafter, acceptance=acceptance, **changes).result()

    def stream(
        self,
        prompt: str | Sequence[Message],
        options: SamplingOptions | None = None,
        *,
        k: int | None = None,
        drafter: str | None = None,
        acceptance: str = "exact",
        **changes: Any,
    ) -> Generation:
        """Start a request. Prompt tokens that the caches hold already, as in a conversation that goes on, are kept.

        Args:
            prompt: a text as it is, or chat messages (``role``, ``content``) for the chat template.
            options: what decides the text; greedy by default.
            k: draft tokens a round, 0 for plain decoding; by default chosen in each round (``controller.py``).
            drafter: one of ``DRAFTERS``; by default ``cascade`` where there is a draft model, else ``ngram``.
            acceptance: ``exact`` gives plain decoding's own text; see ``accept.py`` for the other rules.
            changes: options by name, as in ``temperature=0.8``; they win over ``options``.

        Raises:
            OutriderError: an empty or too long prompt, a K above the tiers, a drafter that the bundle has not, an
                option out of its range, a grammar that does not compile.
        """
        options = SamplingOptions() if options is None else options
        if not isinstance(options, SamplingOptions):
            raise OutriderError(f"options is {options!r}; give SamplingOptions, or options by name")
        parsed = options.replace(changes)
        speculation = self._speculation(drafter, k, acceptance)
        ids = self.encode(prompt)
        return Generation(self, self.new_request(ids, parsed, acceptance), speculation)

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

    def decode(
        self,
        request: Request,
        drafter: str,
        k: int | None,
        *,
        exact: bool = True,
        controller: Controller | None = None,
    ) -> Iterator[int]:
        """The tokens of a request as they are committed; what the device can decide is decided there.

        Nothing is touched before the first token is asked for.

        Args:
            drafter: one of ``DRAFTERS``.
            k: None to have it chosen in each round, and who drafts among what ``drafter`` may ask.
            exact: False for passes at their fastest, whatever their bits.
            controller: chooses in place of the pipeline's own, where K is None.
        """
        if k is None and controller is None:
            controller = self.prepare_controller()  # first: it may run passes, and write to the inputs of heads
        target, model = self.target, self.model_drafter
        if not exact:
            target = CachedModel(self.target_engine, 1, exact=False)
            target.tokens = self.target.tokens  # one cache, one list
        heads = self.target_engine.heads
        if heads is not None and can_stay(request.chooser, request.rule):
            law = ResidentLaw(heads, request.chooser)
            if drafter in _WITH_MODEL and k != 0 and self.draft is not None and self.draft.engine.heads is heads:
                rounds = lambda room: self.device_round(room if k is None else k)  # noqa: E731
                model = ResidentPair(target, self.draft, law, rounds, self.tiers)
                target = model.target
            else:
                target = ResidentModel(target, law)
        if k is not None:
            yield from decode(target, self.drafter(drafter, model), k, request)
            return
        assert controller is not None
        chosen = self._adaptive_drafter(drafter, model, request, controller)
        yield from decode(target, chosen, max(self.tiers), request)

    @property
    def tuning(self) -> Tuning:
        """What passes cost here: as ``outrider tune`` found, or measured in short when first asked for."""
        with self.lock:
            if self._tuning is None:
                found = read_tuning(self)
                self._tuning = found if isinstance(found, Tuning) else tune(self, short=True, reason=found)
        return self._tuning

    def prepare_controller(self) -> Controller:
        """It chooses K for all requests, and learns from them. What the caches held may be forgotten the first time."""
        if self._controller is None:
            self._controller = Controller(self.tuning.costs, self.tuning.priors)
        return self._controller

    @property
    def default_drafter(self) -> str:
        return "cascade" if self.draft else "ngram"

    def drafts_freely(self, request: Request) -> bool:
        """Whether a controller may see each token of the draft model before it chooses; see ``AdaptiveDrafter``."""
        return isinstance(request.rule, ExactRule) and self.target_engine.heads is None

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Token ids of a prompt.

        Raises:
            OutriderError: it is empty, no text, or leaves no room for a token.
        """
        ids = self.codec.encode(prompt)
        if len(ids) >= self.manifest.max_length:
            raise OutriderError(
                f"the prompt has {len(ids)} tokens, this bundle takes at most {self.manifest.max_length - 1}; "
                "shorten it or export with a larger --max-length"
            )
        return ids

    def check_k(self, k: int) -> None:
        """Raises OutriderError when K is negative or larger than the tiers that are served."""
        largest, exported = max(self.tiers), max(self.manifest.tiers)
        if not is_int(k):
            raise OutriderError(f"K is {k!r}; it must be a whole number")
        if k < 0:
            raise OutriderError(f"K = {k} is negative; use 0 for plain decoding")
        if k > largest:
            made = "bundle; export" if largest == exported else f"bundle's {self.target_engine.device}; build"
            raise OutriderError(f"K = {k} is outside 0 to {largest}, the largest tier of this {made} with --k {k}")

    def check_acceptance(self, drafter: str, acceptance: str) -> None:
        """Raises OutriderError for a rule that judges drafts by the law they were drawn from, where they have none."""
        acceptance_rule(acceptance)
        if drafter in _WITH_MODEL and self.manifest.translated and acceptance != "exact":
            raise OutriderError(
                f"acceptance {acceptance} needs the draft's probabilities of the target's tokens, and this draft has "
                "another tokenizer; use --acceptance exact, or --drafter ngram"
            )

    def drafter(self, name: str, model: ModelSource | None = None) -> Drafter:
        """The drafter called ``name`` (one of ``DRAFTERS``).

        Args:
            model: what drafts in place of the bundle's draft model.

        Raises:
            OutriderError: there is no such drafter, or this bundle has no draft model.
        """
        if name not in DRAFTERS:
            raise OutriderError(f"unknown drafter {name!r}; choose one of {', '.join(DRAFTERS)}")
        if name == "none":
            return NoDrafter()
        if name == "ngram":
            return self._ngram_drafter
        model = model or self.model_drafter
        if model is None:
            raise OutriderError("this bundle has no draft model; use --drafter ngram, or export with --draft PATH")
        return model if name == "model" else CascadeDrafter(NgramDrafter(), model)

    def clear_caches(self) -> None:
        """Forget what the caches hold: the next request begins with its whole prompt."""
        with self.lock:
            self.owner = None  # a request that is running cannot go on
            for model in (self.target, self.draft):
                if model is not None:
                    model.rollback(0)

    def _speculation(self, drafter: str | None, k: int | None, acceptance: str) -> Speculation:
        name = self.default_drafter if drafter is None else drafter
        self.drafter(name)
        if k is not None:
            self.check_k(k)
        if k == 0 or name == "none":
            return Speculation("none", 0, acceptance)
        self.check_acceptance(name, acceptance)
        return Speculation(name, k, acceptance, translated=name in _WITH_MODEL and self.manifest.translated)

    def _next_tokens(self) -> NextTokens | None:
        if NEXT_TOKENS not in self.bundle.files:
            return None
        return NextTokens.load(self.bundle.path(NEXT_TOKENS), self.manifest.target.vocab_size)

    def _adaptive_drafter(
        self, name: str, model: ModelSource | None, request: Request, controller: Controller
    ) -> Drafter:
        """Chooses among what the drafter ``name`` may ask, and the table of next tokens with ``cascade``."""
        return AdaptiveDrafter(
            controller,
            self.lookups if name in ("ngram", "cascade") else None,
            model if name in _WITH_MODEL else None,
            free=self.drafts_freely(request),
            stats=request.stats,
        )

    def _model_drafter(self, draft: CachedModel) -> ModelSource:
        if not self.manifest.translated:
            return ModelDrafter(draft)
        return TranslatedDrafter(draft, self.codec, TextCodec(self.bundle, draft.engine.info.tokenizer))

    def _grammar(self, options: SamplingOptions) -> GrammarState | None:
        if not options.grammar:
            return None
        if self._grammars is None:
            manifest = self.manifest
            self._grammars = GrammarCompiler(
                self.bundle.path(TOKENIZER), manifest.target.vocab_size, manifest.eos_token_ids
            )
        return self._grammars.compile(**options.grammar)

    def device_round(self, k: int) -> DeviceRound:
        """Of the smallest tier that holds K drafts; made once and kept."""
        tier = next(tier for tier in self.tiers if tier >= k)
        if tier not in self._rounds:
            target, draft = self.target_engine, self.draft_engine
            rows = max(tier + 1, self.target.min_rows)
            self._rounds[tier] = DeviceRound(cast(BoundEngine, target), cast(BoundEngine, draft), tier, rows)
        return self._rounds[tier]

    def _probe_rows(self) -> tuple[str, int]:
        """The export's probe holds for the machine it ran on; elsewhere kernels may differ, and it runs again."""
        info, engine = self.manifest.target, self.target_engine
        if info.device == engine.device:
            return info.exactness, info.min_rows
        probe = probe_rows(engine, self.tiers)
        return probe.exactness, probe.min_rows
