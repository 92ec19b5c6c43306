"""API keys: which requests may pass, and which client sends them."""

import hmac
import re
from collections.abc import Container, Iterable
from dataclasses import replace
from hashlib import sha256
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from app.http.body_limit import RequestBody, send_rejection
from app.http.client import ANONYMOUS, VISITOR, Client
from app.http.errors.rejections import Unauthorized
from app.http.errors.responses import CountRejection, error_response, ignore_rejection
from app.http.request_context import PROBE_PATHS
from app.http.web_socket import sender

# Each is compared with all.
_MAX_PRESENTED: Final = 2
_BEARER: Final = re.compile(rb"bearer +(.*)", re.IGNORECASE)


def client_for_key(key: str, *, share_prefix_cache: bool, is_admin: bool = False) -> Client:
    """Return the client of a key; neither its name nor its cache salt reveals the key or each other."""
    key_digest = sha256(key.encode()).hexdigest()
    client = client_for_digest(key_digest, share_prefix_cache=share_prefix_cache)
    return replace(client, is_admin=is_admin)


def client_for_digest(key_digest: str, *, share_prefix_cache: bool) -> Client:
    """Return the client whose key has this digest; the empty digest is that of a server without keys."""
    if not key_digest:
        return ANONYMOUS
    salted = b"prefix cache\n" + bytes.fromhex(key_digest)
    salt = "" if share_prefix_cache else sha256(salted).hexdigest()
    return Client(key_digest[:8], salt, key_digest)


class Authentication:
    """Rejects requests without a valid API key, and puts the client into the state of the scope."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Iterable[str],
        share_prefix_cache: bool,
        count_rejection: CountRejection = ignore_rejection,
        *,
        admin_keys: Container[str] = (),
        open_paths: Container[str] = (),
    ) -> None:
        """Check the keys of all requests; without any `keys` every request passes.

        admin_keys: the keys that may also see what the server does for others.
        open_paths: further paths that, as health probes, need no key for a request without a body.
        """
        self._app = app
        self._open_paths = open_paths
        self._count_rejection = count_rejection
        # By digest, so that all compared values have the same length.
        self._clients = {
            sha256(key.encode()).digest(): client_for_key(
                key, share_prefix_cache=share_prefix_cache, is_admin=key in admin_keys
            )
            for key in keys
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
        elif (client := self._client(scope, body := RequestBody(scope, receive))) is None:
            response = error_response(Unauthorized(), scope, self._count_rejection)
            await send_rejection(response, body, sender(scope, send))
        else:
            scope.setdefault("state", {})["client"] = client
            await self._app(scope, receive, send)

    def _client(self, scope: Scope, body: RequestBody) -> Client | None:
        """Return the client that sends the request, or None if it has no valid key.

        Nothing of a visitor is kept: open paths need no key to be read, and any body needs one.
        """
        if not self._clients:
            return ANONYMOUS
        is_open = scope["path"] in PROBE_PATHS or scope["path"] in self._open_paths
        if is_open and not body.is_open:
            return VISITOR
        found = None
        presented_keys = _presented_keys(scope["headers"])
        if len(presented_keys) > _MAX_PRESENTED:
            return None
        for key in presented_keys:
            presented = sha256(key).digest()
            # No early exit: the time must not reveal which key matched.
            for digest, client in self._clients.items():
                if hmac.compare_digest(digest, presented):
                    found = client
        return found


def _presented_keys(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Return the keys that a request presents; some clients send one in each of two headers."""
    keys = []
    for name, value in headers:
        if name == b"x-api-key":
            keys.append(value)
        elif name == b"authorization" and (match := _BEARER.fullmatch(value)):
            keys.append(match[1])
    return keys
