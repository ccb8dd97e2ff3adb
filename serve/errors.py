"""What clients get instead of an answer: errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from outrider.engines.errors import OutriderError
from outrider.runtime.intake import PromptTooLongError
from outrider.runtime.service import QueueFullError, StoppedError

_LOG = logging.getLogger("outrider.serve")
_RETRY_SECONDS = "1"


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorFields


class ApiError(Exception):
    """An answer other than the one that was asked for."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        # What was not UTF-8 in a request is none in the answer.
        fields = {"message": _text(message), "type": kind, "param": param and _text(param), "code": code}
        self.body = {"error": fields}
        self.headers = headers

    def response(self) -> Response:
        return JSONResponse(self.body, self.status, self.headers)


def invalid(message: str, status: int = 400, *, param: str | None = None, code: str | None = None) -> ApiError:
    """The request is at fault."""
    return ApiError(status, message, "invalid_request_error", param=param, code=code)


def failed(error: Exception) -> ApiError:
    """A request that was taken did not come to its end."""
    if isinstance(error, asyncio.TimeoutError):
        return ApiError(504, "the request took longer than this server allows; ask for fewer tokens", "timeout")
    if isinstance(error, StoppedError):
        return ApiError(503, str(error), "server_error")
    if isinstance(error, OutriderError):
        return ApiError(500, str(error), "server_error")
    _LOG.error("a request failed", exc_info=error)
    return ApiError(500, f"{type(error).__name__} in the server; see its log", "server_error")


def add_handlers(app: FastAPI) -> None:
    """Have all errors of an application answered in the one shape."""

    async def answer(_: Request, error: Exception) -> Response:
        return _api_error(error).response()

    for kind in (RequestValidationError, HTTPException, ApiError, OutriderError, Exception):
        app.add_exception_handler(kind, answer)


def _api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _not_valid(error)
    if isinstance(error, HTTPException):
        detail = _unreadable(error.__cause__) if error.status_code == 400 else error.detail
        return ApiError(error.status_code, detail, "invalid_request_error", headers=error.headers)
    if isinstance(error, QueueFullError):
        wait = {"Retry-After": _RETRY_SECONDS}
        return ApiError(429, str(error), "rate_limit_error", code="queue_full", headers=wait)
    if isinstance(error, PromptTooLongError):
        return invalid(str(error), code="context_length_exceeded")
    if isinstance(error, StoppedError) or not isinstance(error, OutriderError):
        return failed(error)
    return invalid(str(error))


def _unreadable(cause: BaseException | None) -> str:
    """Of a body that is no JSON in another way than its grammar."""
    if isinstance(cause, UnicodeDecodeError):
        return "the body is not UTF-8 text"
    if isinstance(cause, RecursionError):
        return "the body is nested too deeply"
    return f"the body cannot be read: {cause}"


def _not_valid(error: RequestValidationError) -> ApiError:
    """What pydantic says of a body, as one line about the fault that is deepest in it.

    Where a field takes several kinds, each of them finds faults; the kind that was meant is the one that got furthest.
    """
    if isinstance(error.body, bytes):
        return invalid("the body is not JSON; send it with the header Content-Type: application/json")
    faults = [(_place(fault, error.body), fault) for fault in error.errors()]
    place, fault = max(faults, key=lambda pair: (len(pair[0]), not pair[1]["type"].endswith("_type")))
    if fault["type"] == "json_invalid":
        return invalid(f"the body is not JSON: {fault['ctx']['error']} at character {fault['loc'][-1]}")
    param = ".".join(place) or None
    if fault["type"] == "conflict":  # of two fields of an object (``protocol.py``)
        param = ".".join([*place, fault["ctx"]["param"]])
        message = str(fault["msg"])
    elif fault["type"] == "extra_forbidden":
        message = f"the field {param} is not supported; leave it out"
    else:
        message = f"{param or 'the body'}: {fault['msg']}"
    return invalid(message, param=param)


def _place(fault: Mapping[str, Any], body: Any) -> list[str]:
    """The path of a fault in the body, without the names of kinds that pydantic puts in between."""
    place: list[str] = []
    parts: Sequence[Any] = fault["loc"][1:]
    for part in parts:
        try:
            body = body[part]
        except (LookupError, TypeError):
            if not (fault["type"] == "missing" and part == parts[-1]):
                continue
        place.append(str(part))
    return place


def _text(given: str) -> str:
    return given.encode(errors="replace").decode()
