"""Requests of commands to the running server; what goes wrong becomes one line for the user."""

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, Final

import httpx

from app.commands.errors import CommandError, RequestFailed
from app.commands.server.models import Model
from app.commands.server.server_address import Server
from app.commands.server.sse import BadStream, Chunk, read_chunks
from app.settings.names import KEY_VARIABLE

# A request in JSON.
Body = Mapping[str, Any]

_CONNECT_TIMEOUT: Final = 5.0  # seconds
# Seconds between two pieces of an answer; while a request waits, the server sends a comment every ten.
_READ_TIMEOUT: Final = 60.0
_MAX_SHOWN: Final = 300
_JSON: Final = {"Content-Type": "application/json"}


def fetch_models(server: Server) -> list[Model]:
    """Return what the server says of its models.

    Raises:
        CommandError: there is no server.
        RequestFailed: it refuses the request, or is another kind of server.
    """
    with _connected(server) as client:
        response = client.get("/v1/models")
        _check(response)
        try:
            models = response.json()["data"]
            if all(isinstance(model["id"], str) for model in models):
                return list(models)
        except (ValueError, TypeError, KeyError):
            pass
    raise RequestFailed(f"{server.url} is no server of OpenAI's API: it lists no models")


def stream_chat(server: Server, body: Body) -> Generator[Chunk | None, None, None]:
    """Yield the chunks of a completion, and None whenever the server says that it is still at work.

    Closing the generator closes the connection, by which the server ends the request.

    Raises:
        CommandError: there is no server.
        RequestFailed: it refuses the request, or the answer breaks off.
    """
    # Not httpx's `json=`: that cannot write NaN or half of a surrogate pair, which files may have.
    content = json.dumps({**body, "stream": True})
    with (
        _connected(server) as client,
        client.stream("POST", "/v1/chat/completions", content=content, headers=_JSON) as response,
    ):
        _check(response)
        for chunk in read_chunks(response.iter_bytes()):
            if chunk is not None and "error" in chunk:
                raise RequestFailed(_message(chunk))
            yield chunk


@contextmanager
def _connected(server: Server) -> Iterator[httpx.Client]:
    """Open a client for one request, and report what goes wrong with it."""
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    timeout = httpx.Timeout(_READ_TIMEOUT, connect=_CONNECT_TIMEOUT)
    try:
        is_near = _is_loopback(httpx.URL(server.url).host)
        # Proxies of the environment reach no server of this machine.
        with httpx.Client(
            base_url=server.url, headers=headers, timeout=timeout, trust_env=not is_near
        ) as client:
            yield client
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        reason = str(error).partition("] ")[2] or str(error) or "no answer"
        message = f"no server at {server.url} ({reason}); mlx-batch-server starts one"
        raise CommandError(message) from None
    except httpx.InvalidURL as error:
        raise CommandError(f"--url: {error}") from None
    except httpx.ReadTimeout:
        raise RequestFailed(f"{server.url} is silent") from None
    except (httpx.HTTPError, BadStream) as error:
        raise RequestFailed(f"{server.url}: {str(error) or type(error).__name__}") from None


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    if response.status_code == HTTPStatus.UNAUTHORIZED:
        raise RequestFailed(f"{response.url} wants a key: --api-key or {KEY_VARIABLE} gives one")
    text = response.read().decode(errors="replace")
    try:
        message = _message(json.loads(text))
    except ValueError:
        message = text
    shown = " ".join(message.split())[:_MAX_SHOWN]
    raise RequestFailed(f"{response.url} answers {response.status_code}: {shown}")


def _message(body: Any) -> str:
    """Return the message of an error in JSON, whatever its form is."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return message if isinstance(message, str) else json.dumps(message)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
