"""Serves the files of the page, from memory, under a policy that lets nothing else in."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response

_STATIC: Final = Path(__file__).parent / "static"
_INDEX: Final = "index.html"
_PREFIX: Final = "/web/"

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

# Nothing is loaded from elsewhere and no script or style is inline, so a completion that gets
# past the sanitizer can neither run nor call anything.  `blob:` are the images that the user has added:
# such a name is made by the page's own scripts, for what is in the browser already.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src {}; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)

_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    # A new version of the server is a new page at once; what is unchanged is not sent again.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class WebPage:
    """A file, and the tag that changes with its contents."""

    content: bytes
    media_type: str
    etag: str


@cache
def load_pages() -> Mapping[str, WebPage]:
    """Read the files that are served, by their paths; licences and the like are not."""
    files = sorted(path for path in _STATIC.rglob("*") if path.suffix in _TYPES)
    pages = {f"{_PREFIX}{path.relative_to(_STATIC).as_posix()}": _load(path) for path in files}
    pages["/"] = pages.pop(f"{_PREFIX}{_INDEX}")
    return pages


def _load(path: Path) -> WebPage:
    content = path.read_bytes()
    return WebPage(content, _TYPES[path.suffix], f'"{sha256(content).hexdigest()[:16]}"')


def page_router(pages: Mapping[str, WebPage], tool_origins: Sequence[str] = ()) -> APIRouter:
    """Return a router with a route for each file and none besides.

    `tool_origins` are what the page may connect to beside this server; its script reads them from the policy.
    """
    policy = _POLICY.format(" ".join(("'self'", *tool_origins)))
    headers = _HEADERS | {"Content-Security-Policy": policy}
    router = APIRouter(include_in_schema=False)
    for path, page in pages.items():
        # Not `add_api_route`: there is nothing to validate, and its analysis was half the making of an app.
        router.add_route(path, _sender(page, headers), methods=["GET", "HEAD"])
    return router


def _sender(page: WebPage, common: Mapping[str, str]) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        headers = {**common, "ETag": page.etag}
        if page.etag in request.headers.get("If-None-Match", ""):
            return Response(status_code=304, headers=headers)
        return Response(page.content, headers=headers, media_type=page.media_type)

    return send
