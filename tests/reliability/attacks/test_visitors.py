"""What visitors without a key, one key against the others, and pages of other sites can hold or have computed."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import pytest
from pydantic import SecretStr
from starlette.types import Receive, Scope, Send

from app.http.body_limit import MAX_STREAMED
from tests.support.raw_http import LONG, SHORT, Site, running, split
from tests.support.speaker import speaking_app

KEYS: Final = SecretStr("one,two")
CHATS: Final = "/v1/chat/completions"
FILES: Final = "/v1/files"
# What all bodies together may hold, in bodies of the largest size.
NUM_BODIES: Final = 16
MAX_BODY: Final = 1024
# All but the last byte of a body of the largest size.
UNFINISHED: Final = b"a" * (MAX_BODY - 1)


@contextmanager
def site(**settings: Any) -> Iterator[Site]:
    with speaking_app(**settings) as app, running(app) as made:
        yield made


def head(path: str, key: str, length: int, *headers: str) -> bytes:
    """Return the head of a request with a body; without a key it is a visitor's."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    lines += [f"Authorization: Bearer {key}"] * bool(key)
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def chat(key: str, num_bytes: int = 0) -> bytes:
    """Return a chat whose body has at least so many bytes."""
    message = {"role": "user", "content": "Hi"}
    body = json.dumps({"messages": [message], "max_tokens": 4}).ljust(num_bytes).encode()
    return head(CHATS, key, len(body), "Content-Type: application/json") + body


FORM: Final = "Content-Type: multipart/form-data; boundary=x"


def upload(key: str) -> bytes:
    parts = (('name="purpose"', "batch"), ('name="file"; filename="a"', "{}"))
    form = "".join(
        f"--x\r\nContent-Disposition: form-data; {name}\r\n\r\n{value}\r\n" for name, value in parts
    )
    body = f"{form}--x--\r\n".encode()
    return head(FILES, key, len(body), FORM) + body


def status(site: Site, request: bytes) -> int:
    return split(site.ask(request))[0]


def read(path: str, *headers: str, host: str = "localhost") -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", f"Host: {host}", *headers, "", ""]).encode()


def test_a_visitor_holds_no_memory() -> None:
    """On open paths, too: what has no key is not read, so that it takes nothing from those with one."""
    with site(api_keys=KEYS, max_body_bytes=MAX_BODY) as server, ExitStack() as stack:
        visitors = [stack.enter_context(server.connection()) for _ in range(NUM_BODIES + 1)]
        for path, visitor in zip(["/health", "/ready", "/"] * NUM_BODIES, visitors, strict=False):
            visitor.send(head(path, "", MAX_BODY) + UNFINISHED)
        assert status(server, chat("one")) == 200
        assert {split(visitor.read(b"}}"))[0] for visitor in visitors} == {401}
        assert status(server, read("/health", "Connection: close")) == 200


def test_a_key_leaves_the_others_their_share_of_the_memory() -> None:
    with site(api_keys=KEYS, max_body_bytes=MAX_BODY) as server, ExitStack() as stack:
        for _ in range(NUM_BODIES):
            connection = stack.enter_context(server.connection())
            connection.send(head(CHATS, "one", MAX_BODY) + UNFINISHED)
        assert status(server, chat("one", MAX_BODY)) == 503
        assert status(server, chat("two", MAX_BODY)) == 200


@pytest.mark.parametrize("path", [CHATS, FILES])
def test_a_body_that_trickles_ends(path: str) -> None:
    """A byte now and then is no progress: what counts is the average over the whole body."""
    start = FORM if path == FILES else "Content-Type: application/json"
    with site(api_keys=KEYS, read_timeout=4 * SHORT) as server, server.connection() as client:
        client.send(head(path, "one", 1 << 20, start))
        for _ in range(1000):
            client.send(b"\r")
            if answer := client.read_within(SHORT / 20):
                break
        assert answer.startswith(b"HTTP/1.1 408")
        assert status(server, upload("one")) == 200


def test_a_key_uploads_a_few_files_at_a_time() -> None:
    """Each takes a connection and a file for as long as it comes."""
    with site(api_keys=KEYS) as server, ExitStack() as stack:
        for _ in range(MAX_STREAMED):
            connection = stack.enter_context(server.connection())
            connection.send(head(FILES, "one", 1 << 20, FORM))
        code, fields, _ = split(server.ask(upload("one")))
        assert (code, fields["retry-after"]) == (429, "1")
        assert status(server, upload("two")) == 200
        assert status(server, chat("one")) == 200


def test_a_body_that_has_arrived_is_served_however_late_the_loop_is() -> None:
    """It is read in several pieces, all of them when its time is over."""
    reached, gate = threading.Event(), threading.Event()
    with speaking_app(read_timeout=1e-9) as app:

        async def late(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] == "/late":
                reached.set()
                assert gate.wait(LONG)
            await app(scope, receive, send)

        with running(late) as server, server.connection() as other:
            other.send(read("/late"))
            assert reached.wait(LONG)
            with server.connection() as client:
                client.send(chat("", 3 << 14))
                gate.set()
                assert split(client.read_all())[0] == 200
