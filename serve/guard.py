"""Before anything is parsed: who may ask, and how much."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

from starlette.datastructures import Headers

from outrider.serve.errors import ApiError, invalid


class Guard:
    """ASGI middleware: the key of all that is under ``/v1/``, and a bound on bodies, whatever length they claim.

    Args:
        largest: bytes of a body.
        api_key: None to let anybody in.
        timeout: seconds without any part of a body.
    """

    def __init__(self, app: Any, largest: int, api_key: str | None, timeout: float) -> None:
        self._app = app
        self._largest = largest
        self._api_key = api_key
        self._timeout = timeout

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._authorize(scope["path"], headers)
            parts = await self._body(headers, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return

        async def replay() -> Any:
            return parts.pop(0) if parts else await receive()

        await self._app(scope, replay, send)

    def _authorize(self, path: str, headers: Headers) -> None:
        if self._api_key is None or not path.startswith("/v1/"):
            return
        given = headers.get("authorization", "").encode("latin-1")  # as it came
        if not hmac.compare_digest(given, f"Bearer {self._api_key}".encode()):
            message, challenge = "the API key is missing or wrong", {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, "authentication_error", code="invalid_api_key", headers=challenge)

    async def _body(self, headers: Headers, receive: Any) -> list[Any]:
        """All of it, since it is parsed whole anyway."""
        too_large = invalid(f"the body is larger than {self._largest} bytes", 413)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._largest:
            raise too_large
        parts: list[Any] = []
        size = 0
        while not parts or parts[-1].get("more_body", False):
            try:
                message = await asyncio.wait_for(receive(), self._timeout)
            except asyncio.TimeoutError:
                raise invalid("the body did not come to its end", 408) from None
            parts.append(message)
            size += len(message.get("body", b""))
            if size > self._largest:
                raise too_large
        return parts
