"""Routes whose bodies are JSON, whatever curl says they are."""

from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from app.api.ollama.response import ERROR_RESPONSES
from app.http.json_body import JsonRoute

# What `curl -d` sends, as in Ollama's own examples.  `BrowserGuard` has looked at what browsers send for other sites.
_OF_CURL: Final = (b"content-type", b"application/x-www-form-urlencoded")


class OllamaRoute(JsonRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_any(request: Request) -> Response:
            headers = [header for header in request.scope["headers"] if header != _OF_CURL]
            return await handle(Request({**request.scope, "headers": headers}, request.receive))

        return handle_any


def new_router() -> APIRouter:
    """Return a router for paths below `/api/`; some clients name no type at all."""
    return APIRouter(route_class=OllamaRoute, responses=ERROR_RESPONSES, strict_content_type=False)
