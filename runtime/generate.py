"""Text in, text out: a bundle loaded once, requests generated from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import RLock
from typing import Any, cast

from outrider.engines.bundle import Bundle
from outrider.engines.engine import Engine, served_tiers
from outrider.engines.errors import OutriderError
from outrider.engines.open import Opener
from outrider.engines.plan import BoundEngine
from outrider.engines.probe import known_rows
from outrider.engines.round import DeviceRound
from outrider.runtime.accept import ExactRule
from outrider.runtime.controller import Controller
from outrider.runtime.decode import Request, decode
from outrider.runtime.drafters import Drafter, ModelSource
from outrider.runtime.drafters.roster import DRAFTERS, WITH_MODEL, Roster
from outrider.runtime.generation import Generation, GenerationResult
from outrider.runtime.intake import Intake
from outrider.runtime.resident import ResidentLaw, ResidentModel, ResidentPair, can_stay
from outrider.runtime.sampling.options import SamplingOptions
from outrider.runtime.sequence import CachedModel
from outrider.runtime.text import Message
from outrider.runtime.tuning import Tuning, read_tuning, tune

__all__ = ["DRAFTERS", "Pipeline"]


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
        self.target_engine = target
        self.draft_engine = draft
        self.tiers = served_tiers(bundle.manifest.tiers, target.table)
        self.intake = Intake(bundle, self.tiers, target.device)
        self.codec = self.intake.codec
        rows = known_rows(self.manifest.target, target, self.tiers)
        self.exactness = rows.exactness
        self.target = CachedModel(target, rows.min_rows)
        self.draft = CachedModel(draft, 1) if draft else None  # its bits decide no text
        self._rounds: dict[int, DeviceRound] = {}
        model = self.intake.model_drafter(self.draft) if self.draft else None
        self.roster = Roster(model, self.intake.next_tokens)
        self._tuning: Tuning | None = None
        self._controller: Controller | None = None
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
        prompt: str | Sequence[Message] | Sequence[int],
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
        prompt: str | Sequence[Message] | Sequence[int],
        options: SamplingOptions | None = None,
        *,
        k: int | None = None,
        drafter: str | None = None,
        acceptance: str = "exact",
        **changes: Any,
    ) -> Generation:
        """Start a request. Prompt tokens that the caches hold already, as in a conversation that goes on, are kept.

        Args:
            prompt: a text as it is, chat messages (``role``, ``content``) for the chat template, or token ids.
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
        speculation = self.intake.speculation(drafter, k, acceptance)
        ids = self.encode(prompt)
        return Generation(self, self.new_request(ids, parsed, acceptance), speculation)

    def new_request(self, prompt: Sequence[int], options: SamplingOptions, acceptance: str = "exact") -> Request:
        """See ``Intake.new_request``."""
        return self.intake.new_request(prompt, options, acceptance)

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
        target: CachedModel = self.target
        model: ModelSource | None = None  # the bundle's
        if not exact:
            target = CachedModel(self.target_engine, 1, exact=False)
            target.tokens = self.target.tokens  # one cache, one list
        heads = self.target_engine.heads
        if heads is not None and can_stay(request.chooser, request.rule):
            law = ResidentLaw(heads, request.chooser)
            if drafter in WITH_MODEL and k != 0 and self.draft is not None and self.draft.engine.heads is heads:
                rounds = lambda room: self.device_round(room if k is None else k)  # noqa: E731
                model = ResidentPair(target, self.draft, law, rounds, self.tiers)
                target = model.target
            else:
                target = ResidentModel(target, law)
        if k is not None:
            yield from decode(target, self.roster.drafter(drafter, model), k, request)
            return
        assert controller is not None
        free = self.drafts_freely(request)
        adaptive = self.roster.adaptive(drafter, controller, request.stats, free=free, model=model)
        yield from decode(target, adaptive, max(self.tiers), request)

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
        return self.intake.default_drafter

    def drafts_freely(self, request: Request) -> bool:
        """Whether a controller may see each token of the draft model before it chooses; see ``AdaptiveDrafter``."""
        return isinstance(request.rule, ExactRule) and self.target_engine.heads is None

    def encode(self, prompt: str | Sequence[Message] | Sequence[int]) -> list[int]:
        """See ``Intake.encode``."""
        return self.intake.encode(prompt)

    def check_k(self, k: int) -> None:
        """See ``Intake.check_k``."""
        self.intake.check_k(k)

    def check_acceptance(self, drafter: str, acceptance: str) -> None:
        """See ``Intake.check_acceptance``."""
        self.intake.check_acceptance(drafter, acceptance)

    def drafter(self, name: str) -> Drafter:
        """See ``Roster.drafter``."""
        return self.roster.drafter(name)

    def clear_caches(self) -> None:
        """Forget what the caches hold: the next request begins with its whole prompt."""
        with self.lock:
            self.owner = None  # a request that is running cannot go on
            for model in (self.target, self.draft):
                if model is not None:
                    model.rollback(0)

    def device_round(self, k: int) -> DeviceRound:
        """Of the smallest tier that holds K drafts; made once and kept."""
        tier = next(tier for tier in self.tiers if tier >= k)
        if tier not in self._rounds:
            target, draft = self.target_engine, self.draft_engine
            rows = max(tier + 1, self.target.min_rows)
            self._rounds[tier] = DeviceRound(cast(BoundEngine, target), cast(BoundEngine, draft), tier, rows)
        return self._rounds[tier]
