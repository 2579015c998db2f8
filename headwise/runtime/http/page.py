"""The page at `/`: files that are the same for everybody. What they show they ask `/deployment` for, with a key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_ASSETS = Path(__file__).parent / "assets"
_FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
PATHS = tuple(_FILES)

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "data:",  # the empty icon
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",  # with the next one: browsers that know it insert no text as HTML
    "trusted-types": "'none'",
}
HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def page_routes() -> Iterator[Route]:
    """The files are read now, and kept."""
    for path, (name, media_type) in _FILES.items():
        yield Route(path, _always((_ASSETS / name).read_bytes(), media_type), methods=["GET"])


def _always(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    return answer
