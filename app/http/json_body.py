"""Reading a body as JSON, which holds up everybody else: it happens in the event loop.

Four megabytes of text take some milliseconds, and as many bytes of numbers 60; but nested lists
take 800, and the keys of objects 150.  So these are counted first, which takes 20 at most.
"""

import json
from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

# A conversation of thousands of turns, with their tool calls, has half as many.
MAX_PARTS: Final = 200_000

_PARTS: Final = b"[{:"
_NO_PARTS: Final = bytes({*range(256)} - {*_PARTS})
_NO_PARTS_OR_QUOTES: Final = bytes({*_NO_PARTS} - {*b'"'})


class JsonRequest(Request):
    async def json(self) -> Any:
        return read_json(await self.body())


class JsonRoute(APIRoute):
    """A route whose bodies are read by `read_json`: `APIRouter(route_class=JsonRoute)`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def answer_json(request: Request) -> Response:
            return await answer(JsonRequest(request.scope, request.receive))

        return answer_json


def read_json(body: bytes) -> Any:
    """Return what a body says.

    Raises:
        json.JSONDecodeError: it is no JSON, which is UTF-8, or has what cannot be read.
        HTTPException: it is JSON of too many parts.
    """
    if num_parts(body) > MAX_PARTS:
        message = f"the request body has more than {MAX_PARTS} lists, objects and members"
        raise HTTPException(400, message)
    try:
        # With and without a mark of its byte order.
        return json.loads(body.decode("utf-8-sig"))
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError:
        raise json.JSONDecodeError("it is not UTF-8", "", 0) from None
    except ValueError:
        raise json.JSONDecodeError("a number has too many digits", "", 0) from None
    except RecursionError:
        raise json.JSONDecodeError("it is nested too deep", "", 0) from None


def num_parts(body: bytes) -> int:
    """Count lists, objects and members, and not the characters of strings that look like them.

    Up to MAX_PARTS these count as well: that is enough to know, and sooner known.
    """
    num_at_most = len(body.translate(None, _NO_PARTS))
    if num_at_most <= MAX_PARTS:
        return num_at_most
    text = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NO_PARTS_OR_QUOTES)
    # Strings without such characters are gone with this, and neighbours become one string.
    outside_strings = text.replace(b'""', b"").split(b'"')[::2]
    return sum(map(len, outside_strings))
