"""What is no HTTP, or asks for what is not there."""

from typing import Final

from tests.support.hostile.apis import (
    CHAT,
    CONVERSATIONS,
    COUNT,
    MESSAGES,
    RESPONSES,
    chat,
)
from tests.support.hostile.wire import head, post

_PATHS: Final = [
    "//v1/models",
    "/v1//models",
    "/./v1/models",
    "/V1/MODELS",
    "/v1/models/",
    "/v1/models;a",
    "/v1/models/../../etc/passwd",
    "/v1/models/%2e%2e/%2e%2e/etc/passwd",
    "/v1/models/..%2f..%2fetc%2fpasswd",
    "/v1/models/%00",
    "/%00",
    "/%",
    "/%ff%fe",
    "/v1/models/%0d%0aSet-Cookie:%20a=b",
    "/v1/models/<script>alert(1)</script>",
    "/v1/models/\xff",
    "/v1/models/" + "a" * 20_000,
    "/static/../../etc/passwd",
    "/.env",
    "/admin",
    "*",
    "http://example.com/v1/models/x",
]

_METHODS: Final = {
    CHAT: ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "FOO", "post"],
    "/v1/models": ["POST", "DELETE", "A" * 1000],
    MESSAGES: ["GET", "PUT", "DELETE", "OPTIONS"],
    COUNT: ["GET", "FOO"],
    RESPONSES: ["GET", "PUT", "PATCH", "OPTIONS", "TRACE", "FOO"],
    CONVERSATIONS: ["GET", "PUT", "DELETE", "FOO"],
    "/": ["PUT", "POST"],
    "/health": ["POST", "PUT"],
    "/tokenize": ["GET"],
    "/metrics": ["POST"],
}

_HEADERS: Final = {
    "long": ["X: " + "a" * 70_000],
    "many": [f"X{i}: a" for i in range(10_000)],
    "two hosts": ["Host: y"],
    "a NUL": ["X: a\0b"],
    "no colon": ["X"],
    "a blank before the colon": ["X : a"],
    "no name": [": a"],
    "a length below zero": ["Content-Length: -1"],
    "a length of many digits": ["Content-Length: " + "9" * 5000],
    "a length that is none": ["Content-Length: many"],
    "two lengths": ["Content-Length: 1", "Content-Length: 2"],
    "an unknown coding": ["Transfer-Encoding: gzip"],
    "a time that is none": ["X-Request-Timeout: soon"],
    "a time that is over": ["X-Request-Timeout: -1"],
    "no time": ["X-Request-Timeout: NaN"],
    "for ever": ["X-Request-Timeout: inf"],
}

_NO_HTTP: Final = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100) + b"\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "NULs": bytes(1000) + b"\r\n\r\n",
    "a chunk that is none": head("POST", CHAT, "Transfer-Encoding: chunked") + b"zzzz\r\n",
    "a chunk below zero": head("POST", CHAT, "Transfer-Encoding: chunked") + b"-1\r\n",
}
# Paths below `/v1/responses` and `/v1/conversations`, of which nothing is stored.
_NOT_STORED: Final = [
    "resp_1",
    "resp_1?stream=true",
    "resp_1?stream=maybe",
    "resp_1/input_items",
    "resp_1/input_items?limit=-1",
    "resp_1/input_items?order=up",
    "resp_1/input_items?after=%ed%a0%80",
    "conv_1",
    "conv_1/items",
    "conv_1/items?limit=-1",
    "conv_1/items?include[]=a",
    "conv_1/items?after=%ed%a0%80",
    "conv_1/items/%ed%a0%80",
    "%00",
    "%ff",
    "%ed%a0%80",
    "'%20OR%201=1%20--",
    "..%2f..%2fetc%2fpasswd",
    "a" * 20_000,
    "",
]

# By name: the path, whose envelope an answer has, and the bytes of a request.
Requests = dict[str, tuple[str, bytes]]


def paths() -> Requests:
    return {path[:40]: (path, head("GET", path)) for path in _PATHS}


def not_stored() -> Requests:
    found: Requests = {}
    for path in (f"{api}/{name}" for api in (RESPONSES, CONVERSATIONS) for name in _NOT_STORED):
        for method in ("GET", "DELETE"):
            found[f"{method} {path[:40]}"] = (path, head(method, path))
        found[f"cancel {path[:40]}"] = (path, post(f"{path}/cancel", b""))
        found[f"update {path[:40]}"] = (path, post(path, b'{"metadata": {}, "items": []}'))
    return found


def methods() -> Requests:
    return {
        f"{method[:10]} {path}": (path, head(method, path))
        for path, wrong in _METHODS.items()
        for method in wrong
    }


def headers() -> Requests:
    return {name: (CHAT, _with_headers(lines)) for name, lines in _HEADERS.items()}


def no_http() -> Requests:
    return {name: (CHAT, data) for name, data in _NO_HTTP.items()}


def _with_headers(lines: list[str]) -> bytes:
    lines = [*lines, "Content-Type: application/json"]
    if not any(line.startswith(("Content-Length", "Transfer")) for line in lines):
        lines.append(f"Content-Length: {len(chat())}")
    return head("POST", CHAT, *lines) + chat()
