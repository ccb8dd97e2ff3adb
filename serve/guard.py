"""Before anything is parsed: who may ask, and how much."""

from __future__ import annotations

import hmac
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from outrider.serve.answers import error_body


class Guard:
    """ASGI middleware: the key of all that is under ``/v1/``, and a bound on bodies, whatever length they claim.

    Args:
        largest: bytes of a body.
        api_key: None to let anybody in.
    """

    def __init__(self, app: Any, largest: int, api_key: str | None) -> None:
        self._app = app
        self._largest = largest
        self._api_key = api_key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if not self._authorized(scope["path"], headers):
            body = error_body("the API key is missing or wrong", "authentication_error", code="invalid_api_key")
            await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        length = headers.get("content-length", "0")
        parts = await self._body(receive) if length.isdecimal() and int(length) <= self._largest else None
        if parts is None:
            message = f"the body is larger than {self._largest} bytes"
            await JSONResponse(error_body(message, "invalid_request_error"), 413)(scope, receive, send)
            return

        async def replay() -> Any:
            return parts.pop(0) if parts else await receive()

        await self._app(scope, replay, send)

    def _authorized(self, path: str, headers: Headers) -> bool:
        if self._api_key is None or not path.startswith("/v1/"):
            return True
        given = headers.get("authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self._api_key}".encode())

    async def _body(self, receive: Any) -> list[Any] | None:
        """All of it, since it is parsed whole anyway; None where it is too large."""
        parts: list[Any] = []
        size = 0
        while not parts or parts[-1].get("more_body", False):
            message = await receive()
            parts.append(message)
            size += len(message.get("body", b""))
            if size > self._largest:
                return None
        return parts
