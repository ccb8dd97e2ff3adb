"""The page at ``/``: one file, which may load and run nothing but what is in it."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from fastapi.responses import HTMLResponse


def page_response() -> HTMLResponse:
    """The page with its Content-Security-Policy (https://www.w3.org/TR/CSP3/): its own script and style by their
    hashes, calls to this server only, and no way from text to HTML (``require-trusted-types-for``).
    """
    page = files("outrider.serve").joinpath("page.html").read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hash(page, "script"),
        "style-src": _hash(page, "style"),
        "connect-src": "'self'",
        "img-src": "data:",  # the icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return HTMLResponse(page, headers=headers)


def _hash(page: str, tag: str) -> str:
    """Of the text inside the only element of a tag."""
    (text,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
