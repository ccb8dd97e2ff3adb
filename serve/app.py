"""The HTTP side: routes, limits, errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from outrider.engines.errors import OutriderError
from outrider.runtime.intake import PromptTooLongError
from outrider.runtime.service import QueueFullError, Service, StoppedError
from outrider.serve.answers import Answer, error_body, finish_reason
from outrider.serve.guard import Guard
from outrider.serve.metrics import CONTENT_TYPE, Metrics
from outrider.serve.page import page_response
from outrider.serve.protocol import ChatRequest, CompletionRequest
from outrider.serve.running import Running

_LOG = logging.getLogger("outrider.serve")
_RETRY_SECONDS = "1"


@dataclass(frozen=True)
class Settings:
    """Args: ``max_body`` in bytes, ``timeout`` in seconds of a request from arrival to its last token."""

    model: str
    api_key: str | None = None
    max_body: int = 4 << 20
    timeout: float = 600.0
    log_prompts: bool = False


class _ApiError(Exception):
    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(body["error"]["message"])
        self.status = status
        self.body = body


def create_app(service: Service, settings: Settings) -> FastAPI:
    """The application over a running service, which it closes at its end."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(service.close)

    app = FastAPI(title="Outrider", lifespan=lifespan, docs_url=None, redoc_url=None, strict_content_type=False)
    server = _Server(service, settings)
    app.add_middleware(Guard, largest=settings.max_body, api_key=settings.api_key)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(_ApiError, _api_error)
    app.add_exception_handler(OutriderError, _refused)
    app.add_exception_handler(Exception, _fault)
    page = page_response()

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await server.answer(body, request, chat=True)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await server.answer(body, request, chat=False)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [server.model]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return server.model

    @app.get("/health")
    async def health() -> Response:
        stopped = service.failure is not None
        return JSONResponse({"status": "stopped" if stopped else "ok"}, 503 if stopped else 200)

    @app.get("/metrics")
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
            raise _ApiError(404, error_body(message, "invalid_request_error", param="model", code="model_not_found"))

    async def answer(self, body: ChatRequest | CompletionRequest, request: Request, *, chat: bool) -> Response:
        self.check_model(body.model)
        options = body.options(self.service.batch.manifest.max_length)
        answer = Answer(
            self.settings.model, chat, options.get("logprobs") is not None, body.return_tokens, self.service.batch.codec
        )
        running = Running(self.service, [])
        per_prompt = body.n or 1
        try:
            for prompt in body.prompts():
                for index in range(per_prompt):
                    running.prompts.append(self._echo(body, prompt))
                    await running.submit(
                        prompt, body.nth_options(index, options), k=body.num_draft_tokens, drafter=body.drafter
                    )
        except BaseException:
            running.leave()
            raise
        usage = bool(body.stream_options and body.stream_options.include_usage)
        if body.stream:
            events = self._events(running, answer, per_prompt, usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return await self._whole(running, answer, per_prompt, request)

    def _echo(self, body: ChatRequest | CompletionRequest, prompt: Any) -> str:
        if not isinstance(body, CompletionRequest) or not body.echo:
            return ""
        return prompt if isinstance(prompt, str) else self.service.batch.codec.decode(prompt)

    async def _whole(self, running: Running, answer: Answer, per_prompt: int, request: Request) -> Response:
        collecting = asyncio.ensure_future(_collect(running, self.settings.timeout))
        gone = asyncio.ensure_future(_disconnected(request))
        reason = "abort"
        try:
            await asyncio.wait({collecting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=499)  # nobody reads it
            reason = "error"
            collecting.result()
            reason = ""
            return JSONResponse(answer.whole(running.finished(), per_prompt))
        except asyncio.TimeoutError:
            raise _ApiError(504, _too_slow(self.settings.timeout)) from None
        finally:
            collecting.cancel()
            gone.cancel()
            self._left(running, answer, reason)

    async def _events(self, running: Running, answer: Answer, per_prompt: int, usage: bool) -> AsyncIterator[str]:
        offsets = [len(prompt) for prompt in running.prompts]
        reason = "abort"
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
            reason = ""
        except OutriderError as error:
            reason = "error"
            yield _event(error_body(str(error), "server_error"))
        except asyncio.TimeoutError:
            reason = "error"
            yield _event(_too_slow(self.settings.timeout))
        finally:
            self._left(running, answer, reason)
        yield "data: [DONE]\n\n"

    def _left(self, running: Running, answer: Answer, reason: str) -> None:
        """End what still runs; count and log. ``reason`` is "" where all came to their ends."""
        running.leave()
        seconds = time.perf_counter() - running.started
        for job in running.jobs:
            finish = reason or finish_reason(self.service.result(job))
            stats = job.request.stats
            self.metrics.finished(finish, stats, running.first, seconds)
            record: dict[str, Any] = {
                "event": "request",
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
                record["prompt"] = self.service.batch.codec.decode(tokens[: stats.num_prompt_tokens])
            _LOG.info(json.dumps(record))


async def _collect(running: Running, timeout: float) -> None:
    async for _ in running.updates(timeout):
        pass


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _too_slow(seconds: float) -> dict[str, Any]:
    return error_body(f"the request took longer than {seconds:g} s; ask for fewer tokens", "timeout")


def _invalid(_: Request, error: Exception) -> Response:
    """What pydantic says of a body, as one line about its first fault."""
    assert isinstance(error, RequestValidationError)
    fault = error.errors()[0]
    place = [str(part) for part in fault["loc"] if part != "body"]
    param = ".".join(place) or None
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        message = f"the field {param} is not supported; leave it out"
    elif param:
        message = f"{param}: {message}"
    return JSONResponse(error_body(message, "invalid_request_error", param=param), 400)


def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(error_body(error.detail, "invalid_request_error"), error.status_code, error.headers)


def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, _ApiError)
    return JSONResponse(error.body, error.status)


def _fault(_: Request, error: Exception) -> Response:
    return JSONResponse(error_body(f"{type(error).__name__} in the server; see its log", "server_error"), 500)


def _refused(_: Request, error: Exception) -> Response:
    if isinstance(error, QueueFullError):
        body = error_body(str(error), "rate_limit_error", code="queue_full")
        return JSONResponse(body, 429, {"Retry-After": _RETRY_SECONDS})
    if isinstance(error, StoppedError):
        return JSONResponse(error_body(str(error), "server_error"), 503)
    code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
    return JSONResponse(error_body(str(error), "invalid_request_error", code=code), 400)
