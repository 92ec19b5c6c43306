"""JSON bodies, with a bound on the time that parsing and validating them blocks the event loop.

Parsing 32 MiB of text takes 70 milliseconds and 4 MiB of numbers 70 to 200, but 4 MiB of nested lists take
1,200 and unique keys 190.  So what is in no string is counted before: lists, objects and members, values, and
bytes.  That takes 60 milliseconds for an image of 32 MiB; a body at a limit takes about 200.

`pydantic_core.from_json` does not make the count superfluous: it takes 1,600 and 150 milliseconds,
since most of that is Python's garbage collector.  It also rejects lone surrogates without the name of
the field.

Validating takes longer: 1 MB of messages with tool calls 400 milliseconds.  So a large body is parsed and
validated in a thread, one at a time for each key.
"""

import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope

from app.http.client import client_in
from app.worker_threads import WorkerThreads

# A conversation of thousands of turns, with their tool calls, has half as many.
MAX_PARTS: Final = 200_000
# The token ids of all prompts of a request are at most 1 << 20.
MAX_VALUES: Final = (1 << 20) + (1 << 16)
_MAX_QUOTES: Final = 2 * (MAX_PARTS + MAX_VALUES)
# Bytes that are in no string, as of numbers.
MAX_PLAIN: Final = 4 << 20

# The codings in use of https://www.iana.org/assignments/http-parameters.
_CODINGS: Final = frozenset({"gzip", "x-gzip", "compress", "x-compress", "deflate", "br", "zstd"})

_PARTS: Final = b"[{:"
_SEPARATORS: Final = b","


# In bytes; validating them takes some ten milliseconds at most.
LARGE: Final = 32 * 1024
# One key has one of them at most, so that there is one for the others.
_THREADS: Final = WorkerThreads(2, per_key=1)


class JsonRequest(Request):
    """A request whose body is validated as it is parsed."""

    def __init__(self, scope: Scope, receive: Receive, model: TypeAdapter[Any]) -> None:
        super().__init__(scope, receive)
        self._model = model

    async def json(self) -> Any:
        """Return the body, an object of the model.

        Raises:
            RequestValidationError: the body is none of the model.
            json.JSONDecodeError, HTTPException: see `read_json`.
        """
        encoding = self.headers.get("content-encoding", "")
        # Some clients name a charset there, which JSON needs not.
        if _CODINGS & {part.strip().lower() for part in encoding.split(",")}:
            message = f"bodies are not decoded: send it without Content-Encoding: {encoding[:100]}"
            raise HTTPException(415, message)
        body = await self.body()
        if len(body) <= LARGE:
            return _validated(self._model, body)
        validate = partial(_validated, self._model, body)
        return await _THREADS.run(validate, client_in(self.scope).name)


class JsonRoute(APIRoute):
    """A route whose bodies are read by `JsonRequest`: `APIRouter(route_class=JsonRoute)`.

    FastAPI validates again what it gets, which takes no time: it is an object of the model already.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        body: Any = self.body_field.field_info.annotation
        model = TypeAdapter[Any](body)

        async def handle_json(request: Request) -> Response:
            try:
                return await handle(JsonRequest(request.scope, request.receive, model))
            except HTTPException as error:
                # FastAPI takes whatever `json` raises for a fault of parsing.
                if isinstance(error.__cause__, RequestValidationError):
                    raise error.__cause__ from None
                raise

        return handle_json


def _validated(model: TypeAdapter[Any], body: bytes) -> Any:
    value = read_json(body)
    try:
        return model.validate_python(value)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        errors = [{**fault, "loc": ("body", *fault["loc"])} for fault in faults]
        raise RequestValidationError(errors, body=value) from None


def read_json(body: bytes) -> Any:
    """Return the value of a body.

    Raises:
        json.JSONDecodeError: it is not JSON in UTF-8, or it cannot be represented.
        HTTPException: it has too many parts.
    """
    if body.count(b'"') > _MAX_QUOTES and _without_escapes(body).count(b'"') > _MAX_QUOTES:
        # More strings than values and members may be; counting those would take it apart into as many pieces.
        raise _too_many_values()
    if num_parts(body) > MAX_PARTS:
        message = f"the request body has more than {MAX_PARTS} lists, objects and members"
        raise HTTPException(400, message)
    if _num_outside_strings(body, _SEPARATORS, MAX_VALUES) > MAX_VALUES:
        raise _too_many_values()
    if len(body) > MAX_PLAIN and _num_plain(body) > MAX_PLAIN:
        raise HTTPException(400, f"the request body has more than {MAX_PLAIN} bytes beside strings")
    try:
        # A byte order mark is allowed.
        return json.loads(body.decode("utf-8-sig"))
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError:
        raise json.JSONDecodeError("it is not UTF-8", "", 0) from None
    except ValueError:
        raise json.JSONDecodeError("a number has too many digits", "", 0) from None
    except RecursionError:
        raise json.JSONDecodeError("it is nested too deep", "", 0) from None


def _too_many_values() -> HTTPException:
    return HTTPException(400, f"the request body has more than {MAX_VALUES} values")


def num_parts(body: bytes) -> int:
    """Count lists, objects and members; brackets and colons in strings do not count.

    Up to MAX_PARTS these do count: the body is within the limit either way.
    """
    return _num_outside_strings(body, _PARTS, MAX_PARTS)


def _num_outside_strings(body: bytes, characters: bytes, limit: int) -> int:
    """Count characters; up to the limit those in strings count, too."""
    num_at_most = sum(body.count(character) for character in characters)
    if num_at_most <= limit:
        return num_at_most
    others = bytes({*range(256)} - {*characters, *b'"'})
    return _num_beside(_without_escapes(body).translate(None, others))


def _num_plain(body: bytes) -> int:
    """Count the bytes of a body that are in no string."""
    return _num_beside(_without_escapes(body))


def _without_escapes(body: bytes) -> bytes:
    """Return JSON in which each quote begins or ends a string."""
    return body.replace(rb"\\", b"").replace(rb"\"", b"")


def _num_beside(text: bytes) -> int:
    # This removes strings without characters; adjacent strings become one.
    return sum(map(len, text.replace(b'""', b"").split(b'"')[::2]))
