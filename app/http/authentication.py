"""Who may ask this server: keys, and the clients that hold them."""

import hmac
import re
from collections.abc import Iterable
from hashlib import sha256
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from app.http.body_limit import RequestBody, send_rejection
from app.http.client import ANONYMOUS, Client
from app.http.rejections import Unauthorized

# Whoever watches over the server has no key.
_OPEN_PATHS: Final = frozenset({"/health", "/ready"})

_KEY: Final = re.compile(r"[!-~]+")
_BEARER: Final = re.compile(rb"bearer +(.*)", re.IGNORECASE)
# RFC 6455: a policy of the server.
_POLICY_VIOLATION: Final = 1008


def read_keys(text: str) -> list[str]:
    """Return the keys of a file, one a line; lines that are blank or begin with `#` have none.

    Raises:
        ValueError: a key has characters that no header carries unchanged.
    """
    keys = []
    # Not splitlines, which would make two keys of one around a control character.
    for number, line in enumerate(text.split("\n"), 1):
        key = line.strip(" \t\r")
        if not key or key.startswith("#"):
            continue
        if not _KEY.fullmatch(key):
            raise ValueError(f"line {number}: a key is of visible ASCII characters, without spaces")
        keys.append(key)
    return keys


def client_of(key: str, *, share_prefix_cache: bool) -> Client:
    """Return who holds a key; neither name nor salt tells the key or the other."""
    digest = sha256(key.encode())
    salt = "" if share_prefix_cache else sha256(b"prefix cache\n" + digest.digest()).hexdigest()
    return Client(digest.hexdigest()[:8], salt)


class Authentication:
    """Lets those pass who show a key, and says who they are in the scope's state."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], share_prefix_cache: bool) -> None:
        self._app = app
        # By digest, so that what is compared has the same length for all keys.
        self._clients = {
            sha256(key.encode()).digest(): client_of(key, share_prefix_cache=share_prefix_cache)
            for key in keys
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        elif (client := self._client(scope)) is None:
            await send_rejection(Unauthorized(), RequestBody(scope, receive), send)
        else:
            scope.setdefault("state", {})["client"] = client
            await self._app(scope, receive, send)

    def _client(self, scope: Scope) -> Client | None:
        """Return who asks, or None if they may not."""
        if not self._clients or scope["path"] in _OPEN_PATHS:
            return ANONYMOUS
        found = None
        for key in _shown_keys(scope["headers"]):
            shown = sha256(key).digest()
            # To the last one in any case: the time tells nothing of which it was.
            for digest, client in self._clients.items():
                if hmac.compare_digest(digest, shown):
                    found = client
        return found


def _shown_keys(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Return what is shown as a key; a client that knows no better shows it in two headers."""
    keys = []
    for name, value in headers:
        if name == b"x-api-key":
            keys.append(value)
        elif name == b"authorization" and (match := _BEARER.fullmatch(value)):
            keys.append(match[1])
    return keys
