"""The HTTP side: routes and limits."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from outrider.runtime.service import Service
from outrider.serve.answers import Answer, finish_reason
from outrider.serve.errors import ErrorBody, add_handlers, failed, invalid
from outrider.serve.guard import Guard
from outrider.serve.metrics import CONTENT_TYPE, Metrics
from outrider.serve.page import page_response
from outrider.serve.protocol import ChatRequest, CompletionRequest
from outrider.serve.running import Running

_LOG = logging.getLogger("outrider.serve")
_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}
_ANSWERS: dict[int | str, dict[str, Any]] = _ERRORS | {200: {"content": {"text/event-stream": {}}}}


@dataclass(frozen=True)
class Settings:
    """Args: ``max_body`` in bytes, ``timeout`` in seconds of a request from arrival to its last token."""

    model: str
    api_key: str | None = None
    max_body: int = 4 << 20
    timeout: float = 600.0
    log_prompts: bool = False


def create_app(service: Service, settings: Settings) -> FastAPI:
    """The application over a running service, which it closes at its end."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(service.close)

    app = FastAPI(title="Outrider", lifespan=lifespan, docs_url=None, redoc_url=None)
    server = _Server(service, settings)
    app.state.metrics = server.metrics
    app.add_middleware(Guard, largest=settings.max_body, api_key=settings.api_key, timeout=settings.timeout)
    add_handlers(app)
    page = page_response()

    @app.post("/v1/chat/completions", response_model=None, responses=_ANSWERS)
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await server.answer(body, request, chat=True)

    @app.post("/v1/completions", response_model=None, responses=_ANSWERS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await server.answer(body, request, chat=False)

    @app.get("/v1/models", responses=_ERRORS)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [server.model]}

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return server.model

    @app.get("/health", responses={503: {"description": "The batch has stopped."}})
    async def health() -> Response:
        return JSONResponse({"status": "stopped"}, 503) if service.stopped else JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return page

    return app


class _Server:
    def __init__(self, service: Service, settings: Settings) -> None:
        self.service = service
        self.settings = settings
        batch = service.batch
        gauges = {
            ("num_requests_running", "Requests in a lane."): lambda: float(batch.running),
            ("num_requests_waiting", "Requests that wait for a lane."): lambda: float(service.waiting),
            ("kv_cache_usage_perc", "Share of the lanes' cache positions in use."): batch.cache_share,
        }
        self.metrics = Metrics(settings.model, max(batch.tiers), gauges)
        self.model = {
            "id": settings.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "outrider",
            "max_model_len": batch.manifest.max_length,
            "max_num_draft_tokens": max(batch.tiers),
        }

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.model:
            message = f"the model {name!r} does not exist; this server has {self.settings.model!r}"
            raise invalid(message, 404, param="model", code="model_not_found")

    async def answer(self, body: ChatRequest | CompletionRequest, request: Request, *, chat: bool) -> Response:
        self.check_model(body.model)
        largest = max(self.service.batch.tiers)
        if (body.num_draft_tokens or 0) > largest:
            message = (
                f"num_draft_tokens {body.num_draft_tokens} is outside 0 to {largest}, what this server's model has"
            )
            raise invalid(message, param="num_draft_tokens")
        options = body.options(self.service.batch.manifest.max_length)
        answer = Answer(
            self.settings.model, chat, options.get("logprobs") is not None, body.return_tokens, self.service.batch.codec
        )
        prompts, per_prompt = body.prompts(), body.n or 1
        if len(prompts) * per_prompt > self.service.capacity:
            most = f"this server takes at most {self.service.capacity} at once"
            raise invalid(f"{len(prompts)} prompts with {per_prompt} choices each are too many; {most}")
        running = Running(self.service)
        try:
            for prompt in prompts:
                for index in range(per_prompt):
                    await running.submit(
                        prompt, body.nth_options(index, options), k=body.num_draft_tokens, drafter=body.drafter
                    )
                    running.prompts.append(self._echo(body, prompt))
        except BaseException:
            running.leave()
            raise
        if body.stream:
            usage = bool(body.stream_options and body.stream_options.include_usage)
            events = self._events(running, answer, per_prompt, usage)
            return _EventStream(events, partial(self._left, running, answer))
        return await self._whole(running, answer, per_prompt, request)

    def _echo(self, body: ChatRequest | CompletionRequest, prompt: Any) -> str:
        if not isinstance(body, CompletionRequest) or not body.echo:
            return ""
        return prompt if isinstance(prompt, str) else self.service.batch.codec.decode(prompt)

    async def _whole(self, running: Running, answer: Answer, per_prompt: int, request: Request) -> Response:
        collecting = asyncio.ensure_future(_collect(running, self.settings.timeout))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({collecting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=499)  # nobody reads it
            collecting.result()
            running.outcome = None
            return JSONResponse(answer.whole(running.finished(), per_prompt))
        except Exception as error:
            running.outcome = "error"
            raise failed(error) from None
        finally:
            collecting.cancel()
            gone.cancel()
            self._left(running, answer)

    async def _events(self, running: Running, answer: Answer, per_prompt: int, usage: bool) -> AsyncIterator[str]:
        offsets = [len(prompt) for prompt in running.prompts]
        try:
            for index, prompt in enumerate(running.prompts):
                if (chunk := answer.first(index, prompt)) is not None:
                    yield _event(chunk)
            async for index, tokens, done in running.updates(self.settings.timeout):
                text = sum(len(token.text) for token in tokens)
                if text or (tokens and (answer.with_logprobs or answer.with_tokens)):
                    yield _event(answer.piece(index, tokens, offsets[index]))
                offsets[index] += text
                if done:
                    yield _event(answer.last(index, finish_reason(self.service.result(running.jobs[index]))))
            if usage:
                yield _event(answer.usage([one.result for one in running.finished()], per_prompt))
            running.outcome = None
        except Exception as error:
            running.outcome = "error"
            yield _event(failed(error).body)
        yield "data: [DONE]\n\n"

    def _left(self, running: Running, answer: Answer) -> None:
        """The answer is over, however it came to that: end what still runs, count and log."""
        running.leave()
        seconds = time.perf_counter() - running.started
        for job in running.jobs:
            finish = running.outcome or finish_reason(self.service.result(job))
            stats = job.request.stats
            self.metrics.finished(finish, stats, running.first, seconds)
            fields: dict[str, Any] = {
                "id": answer.number,
                "chat": answer.chat,
                "finish": finish,
                "prompt_tokens": stats.num_prompt_tokens,
                "cached_tokens": stats.num_cached_tokens,
                "completion_tokens": stats.num_output_tokens,
                "draft_tokens": stats.num_draft_tokens,
                "accepted_tokens": stats.num_accepted_draft_tokens,
                "first_ms": None if running.first is None else round(1e3 * running.first, 1),
                "ms": round(1e3 * seconds, 1),
            }
            if self.settings.log_prompts:
                tokens = job.request.history.tokens
                fields["prompt"] = self.service.batch.codec.decode(tokens[: stats.num_prompt_tokens])
            _LOG.info("request", extra={"fields": fields})


class _EventStream(StreamingResponse):
    """Server-sent events. ``left`` is called at the end, also where the client goes before the first or reads no more,
    when ``events`` itself hears nothing of it.
    """

    def __init__(self, events: AsyncIterator[str], left: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._left = left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._left()


async def _collect(running: Running, timeout: float) -> None:
    async for _ in running.updates(timeout):
        pass


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(content: dict[str, Any]) -> str:
    # Only ASCII: some clients take U+2028 and its like for ends of lines.
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"
