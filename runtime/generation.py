"""A running request, and what comes out of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from outrider.engines.errors import OutriderError
from outrider.runtime.choose import TokenLogprobs
from outrider.runtime.commit import Origin, Output
from outrider.runtime.decode import Request
from outrider.runtime.stats import DecodeStats

if TYPE_CHECKING:
    from outrider.runtime.generate import Pipeline


@dataclass(frozen=True)
class Speculation:
    """How a request is sped up: who drafts, K (None where it is chosen in each round), the acceptance rule, and whether
    drafts come from another vocabulary.
    """

    drafter: str
    k: int | None
    acceptance: str
    translated: bool = False


@dataclass(frozen=True)
class GenerationResult:
    """``exactness`` is what the row probe found on this machine: with ``bitwise`` and ``fixed-rows`` the text is plain
    decoding's own (see ``engines/probe.py``).

    ``seed`` is the one that was used; None when decoding was greedy. ``k`` is None where it was chosen in each round,
    by the figures that ``tuning`` names (None where no round ran); ``stats.sources`` says what was chosen. ``logprobs``
    has an entry for each token, or is None when none were asked for.
    """

    text: str
    token_ids: list[int]
    origins: list[Origin]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str
    seed: int | None
    drafter: str
    k: int | None
    acceptance: str
    translated: bool
    exactness: str
    tuning: str | None
    stats: DecodeStats

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {
            "origins": [origin.value for origin in self.origins],
            "logprobs": None if self.logprobs is None else [asdict(entry) for entry in self.logprobs],
            "stats": self.stats.as_dict(),
        }


@dataclass(frozen=True)
class StreamedToken:
    """A committed token and the text that became certain with it: "" inside a character or a possible stop string."""

    token_id: int
    text: str
    origin: Origin
    logprobs: TokenLogprobs | None = None


class Generation:
    """A running request: iterate over its tokens, or take the result. Leaving it halfway needs no clean-up."""

    def __init__(self, pipeline: Pipeline, request: Request, speculation: Speculation) -> None:
        self._pipeline = pipeline
        self._request = request
        self._speculation = speculation
        self._streamed = 0
        self._cancelled = False
        self._tuning: str | None = None
        self._tokens = self._run()

    def __iter__(self) -> Iterator[StreamedToken]:
        return self._tokens

    def cancel(self) -> None:
        """End the request behind the last streamed token; from any thread. The result has what was streamed."""
        self._cancelled = True

    def result(self) -> GenerationResult:
        """Generate what is left and return the whole.

        Raises:
            OutriderError: the request cannot go on: it was interrupted, or a newer one took over.
        """
        for _ in self._tokens:
            pass
        if self._cancelled:
            cancel(self._request, self._streamed)
        return result_of(self._request, self._speculation, self._pipeline.exactness, self._tuning)

    def _run(self) -> Iterator[StreamedToken]:
        """The committed tokens; each round runs only while the pipeline's caches are this request's."""
        pipeline, output = self._pipeline, self._request.output
        if output.finish_reason is not None or self._cancelled:
            return
        tokens = pipeline.decode(self._request, self._speculation.drafter, self._speculation.k)
        if self._speculation.k is None:
            pipeline.prepare_controller()  # before the caches are this request's
            self._tuning = pipeline.tuning.origin
        pipeline.owner = self
        while not self._cancelled and (output.finish_reason is None or self._streamed < len(output.tokens)):
            with pipeline.lock:
                if pipeline.owner is not self and self._streamed == len(output.tokens):
                    raise OutriderError("a newer request took over this pipeline; load a Pipeline for each")
                next(tokens)
            self._streamed += 1
            yield streamed(output, self._streamed - 1)


def streamed(output: Output, position: int) -> StreamedToken:
    """The token that was committed at a position."""
    logprobs = output.logprobs[position] if output.logprobs else None
    return StreamedToken(output.tokens[position], output.pieces[position], output.origins[position], logprobs)


def cancel(request: Request, tokens: int) -> None:
    """End a request behind its first ``tokens``."""
    request.output.cancel(tokens)
    request.stats.num_output_tokens = len(request.output.tokens)


def result_of(request: Request, speculation: Speculation, exactness: str, tuning: str | None) -> GenerationResult:
    """Raises OutriderError: the request has not come to its end."""
    output, chooser = request.output, request.chooser
    if output.finish_reason is None:
        raise OutriderError("this request was cut off before its end; generate it again")
    return GenerationResult(
        text="".join(output.pieces),
        token_ids=output.tokens,
        origins=output.origins,
        logprobs=None if chooser.options.logprobs is None else output.logprobs,
        finish_reason=output.finish_reason,
        seed=None if chooser.options.greedy else chooser.seed,
        **vars(speculation),
        exactness=exactness,
        tuning=tuning,
        stats=request.stats,
    )
