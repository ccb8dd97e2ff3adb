"""Text in, text out: a bundle loaded once, requests generated from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from outrider.engines.bundle import Bundle, ModelInfo
from outrider.engines.engine import row_counts
from outrider.engines.errors import OutriderError
from outrider.engines.ort import OrtEngine
from outrider.engines.probe import probe_rows
from outrider.runtime.commit import Origin, Output
from outrider.runtime.decode import decode
from outrider.runtime.drafters import Drafter, NoDrafter
from outrider.runtime.drafters.model import ModelDrafter
from outrider.runtime.drafters.ngram import NgramDrafter
from outrider.runtime.sequence import CachedModel
from outrider.runtime.stats import DecodeStats
from outrider.runtime.text import Message, TextCodec, TextStream

DRAFTERS = ("model", "ngram", "none")


@dataclass(frozen=True)
class GenerationResult:
    """``exactness`` is ``bitwise`` when the row probe held on this machine: the text is plain decoding's own."""

    text: str
    token_ids: list[int]
    origins: list[Origin]
    finish_reason: str
    drafter: str
    k: int
    exactness: str
    stats: DecodeStats

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"origins": [origin.value for origin in self.origins], "stats": self.stats.as_dict()}


@dataclass(frozen=True)
class StreamedToken:
    """A committed token and the text that became certain with it ("" inside a character)."""

    token_id: int
    text: str
    origin: Origin


class Pipeline:
    """A loaded bundle. It holds the caches of one sequence: a new request takes them over from the last."""

    def __init__(self, bundle: Bundle, *, threads: int | None = None, provider: str = "cpu") -> None:
        self.bundle = bundle
        self.manifest = bundle.manifest
        self.codec = TextCodec(bundle)
        self.target_engine = self._open(self.manifest.target, threads, provider)
        self.draft_engine = self._open(self.manifest.draft, threads, provider) if self.manifest.draft else None
        self.exactness, min_rows = self._probe_rows()
        self.target = CachedModel(self.target_engine, min_rows)
        self.draft = CachedModel(self.draft_engine, self.draft_engine.info.min_rows) if self.draft_engine else None
        self._drafters: dict[str, Drafter] = {"ngram": NgramDrafter(), "none": NoDrafter()}
        if self.draft is not None:
            self._drafters["model"] = ModelDrafter(self.draft, self.manifest.eos_token_ids)
        self.lock = Lock()  # a round at a time, whatever thread it is for
        self.owner: Generation | None = None

    @classmethod
    def load(cls, folder: str | Path, *, threads: int | None = None, provider: str = "cpu") -> Pipeline:
        """Open a bundle.

        Args:
            threads: of each engine; by default all processors this process may use.
            provider: ``cpu`` or ``cuda``.

        Raises:
            OutriderError: the bundle is not whole, or its engine cannot run here.
        """
        return cls(Bundle(folder), threads=threads, provider=provider)

    def generate(
        self,
        prompt: str | Sequence[Message],
        *,
        max_new_tokens: int = 128,
        k: int | None = None,
        drafter: str | None = None,
    ) -> GenerationResult:
        """The whole answer at once; see ``stream``."""
        return self.stream(prompt, max_new_tokens=max_new_tokens, k=k, drafter=drafter).result()

    def stream(
        self,
        prompt: str | Sequence[Message],
        *,
        max_new_tokens: int = 128,
        k: int | None = None,
        drafter: str | None = None,
    ) -> Generation:
        """Start a greedy request.

        Args:
            prompt: a text as it is, or chat messages (``role``, ``content``) for the chat template.
            max_new_tokens: at least 0; less are generated at the end of the sequence or where the context is full.
            k: draft tokens a round, 0 for plain decoding; by default the middle tier of the bundle.
            drafter: ``model``, ``ngram`` or ``none``; by default the draft model where there is one.

        Raises:
            OutriderError: an empty or too long prompt, a K above the tiers, a drafter that the bundle has not.
        """
        ids = self.encode(prompt)
        if max_new_tokens < 0:
            raise OutriderError(f"max_new_tokens {max_new_tokens} is negative; use 0 or more")
        name, k = self._choose_drafter(drafter, k)
        return Generation(self, ids, name, k, self.new_output(ids, max_new_tokens))

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
        """Raises OutriderError when K is negative or larger than the bundle's tiers."""
        largest = max(self.manifest.tiers)
        if k < 0:
            raise OutriderError(f"K = {k} is negative; use 0 for plain decoding")
        if k > largest:
            raise OutriderError(
                f"K = {k} is outside 0 to {largest}, the largest tier of this bundle; export with --k {k}"
            )

    def drafter(self, name: str) -> Drafter:
        """The drafter called ``name`` (one of ``DRAFTERS``).

        Raises:
            OutriderError: there is no such drafter, or this bundle has no draft model.
        """
        if name not in DRAFTERS:
            raise OutriderError(f"unknown drafter {name!r}; choose one of {', '.join(DRAFTERS)}")
        if name not in self._drafters:
            raise OutriderError("this bundle has no draft model; use --drafter ngram, or export with --draft PATH")
        return self._drafters[name]

    def _choose_drafter(self, drafter: str | None, k: int | None) -> tuple[str, int]:
        tiers = self.manifest.tiers
        name = drafter or ("model" if self.draft else "ngram")
        self.drafter(name)
        k = tiers[len(tiers) // 2] if k is None else k
        self.check_k(k)
        return ("none", 0) if k == 0 or name == "none" else (name, k)

    def new_output(self, prompt: Sequence[int], max_new_tokens: int) -> Output:
        """An empty output with room for what was asked and still fits the context behind ``prompt``."""
        room = min(max_new_tokens, self.manifest.max_length - len(prompt))
        return Output(room, self.manifest.eos_token_ids)

    def _open(self, info: ModelInfo, threads: int | None, provider: str) -> OrtEngine:
        tiers = () if provider == "cpu" else row_counts(self.manifest.tiers)
        return OrtEngine(self.bundle.path(info.graph), info, provider=provider, threads=threads, row_tiers=tiers)

    def _probe_rows(self) -> tuple[str, int]:
        """The export's probe holds for the machine it ran on; elsewhere kernels may differ, and it runs again."""
        info, engine = self.manifest.target, self.target_engine
        if info.device == engine.device:
            return info.exactness, info.min_rows
        probe = probe_rows(engine, self.manifest.tiers)
        return probe.exactness, probe.min_rows


class Generation:
    """A running request: iterate over its tokens, or take the result. Leaving it halfway needs no clean-up."""

    def __init__(self, pipeline: Pipeline, prompt: list[int], drafter: str, k: int, output: Output) -> None:
        self._pipeline = pipeline
        self._prompt = prompt
        self._drafter = drafter
        self._k = k
        self._output = output
        self._stats = DecodeStats(num_prompt_tokens=len(prompt))
        self._tokens = self._run()

    def __iter__(self) -> Iterator[StreamedToken]:
        return self._tokens

    def result(self) -> GenerationResult:
        """Generate what is left and return the whole.

        Raises:
            OutriderError: the request cannot go on: it was interrupted, or a newer one took over.
        """
        for _ in self._tokens:
            pass
        output = self._output
        if output.finish_reason is None:
            raise OutriderError("this request was cut off before its end; generate it again")
        return GenerationResult(
            text=self._pipeline.codec.decode(output.tokens),
            token_ids=output.tokens,
            origins=output.origins,
            finish_reason=output.finish_reason,
            drafter=self._drafter,
            k=self._k,
            exactness=self._pipeline.exactness,
            stats=self._stats,
        )

    def _run(self) -> Iterator[StreamedToken]:
        output, text = self._output, TextStream(self._pipeline.codec)
        for position, token in enumerate(self._rounds()):
            last = output.finish_reason is not None and position + 1 == len(output.tokens)
            piece = text.push(token) + (text.finish(output.tokens) if last else "")
            yield StreamedToken(token, piece, output.origins[position])

    def _rounds(self) -> Iterator[int]:
        """The committed tokens; each round runs only while the pipeline's caches are this request's."""
        pipeline, output = self._pipeline, self._output
        if output.finish_reason is not None:
            return
        drafter = pipeline.drafter(self._drafter)
        tokens = decode(pipeline.target, drafter, self._prompt, self._k, output, self._stats)
        pipeline.owner = self
        position = 0
        while output.finish_reason is None or position < len(output.tokens):
            with pipeline.lock:
                if pipeline.owner is not self and position == len(output.tokens):
                    raise OutriderError("a newer request took over this pipeline; load a Pipeline for each")
                token = next(tokens)
            position += 1
            yield token
