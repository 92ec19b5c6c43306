"""A server with canned answers, in a thread of the test or as a command: `fake_server.py PORT`.

It streams as the real ones do, over a socket; only the standard library, so that it starts fast.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

Body = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """A status and the lines of a body; `num_missing` bytes are promised and never sent."""

    lines: tuple[str, ...]
    status: int = 200
    num_missing: int = 0


def data(chunk: Body) -> str:
    return f"data: {json.dumps(chunk)}\n"


def text_chunk(text: str, finish_reason: str | None = None) -> str:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    return data({"choices": [choice]})


def usage_chunk(num_prompt: int, num_output: int, num_cached: int | None = None) -> str:
    usage: Body = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
    if num_cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
    return data({"choices": [], "usage": usage})


ROLE = data({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
DONE = "data: [DONE]\n"


def canned(body: Body) -> Reply:
    """Answer with as many tokens as may be, and count words as prompt tokens."""
    num_output = body["max_tokens"]
    num_prompt = sum(len(message["content"].split()) for message in body["messages"])
    texts = [text_chunk(f"word{number} ") for number in range(num_output)]
    end = [text_chunk("", "length"), usage_chunk(num_prompt, num_output, num_cached=0), DONE]
    return Reply((ROLE, ": a comment\n", *texts, *end))


@dataclass
class FakeServer:
    """`bodies` are the requests so far."""

    url: str
    bodies: list[Body] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def take(self, body: Body) -> None:
        with self.lock:
            self.bodies.append(body)


class _Listener(ThreadingHTTPServer):
    request_queue_size = 128  # the default of 5 drops connections of clients that come at once

    def __init__(self, port: int, answer: Callable[[Body], Reply]) -> None:
        super().__init__(("127.0.0.1", port), _Connection)
        self.answer = answer
        self.fake = FakeServer(f"http://127.0.0.1:{self.server_port}")

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing about clients that leave."""


class _Connection(BaseHTTPRequestHandler):
    server: _Listener

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(Reply((json.dumps({"data": [{"id": "fake-model"}]}),)))
        else:
            self._send(Reply(("{}",), status=200 if self.path == "/health" else 404))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.fake.take(body)
        self._send(self.server.answer(body))

    def _send(self, reply: Reply) -> None:
        text = "\n".join(reply.lines).encode()
        self.send_response(reply.status)
        self.send_header("Content-Length", str(len(text) + reply.num_missing))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def fake_server(answer: Callable[[Body], Reply] = canned) -> Iterator[FakeServer]:
    """Serve in a thread for the time of the block."""
    with _Listener(0, answer) as listener:
        thread = Thread(target=listener.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield listener.fake
        finally:
            listener.shutdown()
            thread.join()


if __name__ == "__main__":
    _Listener(int(sys.argv[1]), canned).serve_forever()
