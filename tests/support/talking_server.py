"""A server whose answers a test writes, in a thread: models, and streams that stay open until the client leaves."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any, Final

from tests.support.fake_server import data, text_chunk

COMMENT: Final = ": ping\n"
_DONE: Final = "data: [DONE]\n"
_PATIENCE: Final = 20.0  # seconds, until a test has failed

Body = dict[str, Any]


@dataclass(frozen=True)
class Stream:
    """Events of an answer; `is_open` keeps the connection until the client closes it."""

    events: Sequence[str]
    is_open: bool = False
    status: int = HTTPStatus.OK


@dataclass
class TalkingServer:
    """`answers` are taken one a request; `bodies` and `keys` are what the requests had."""

    url: str = ""
    models: Any = field(default_factory=lambda: {"data": [{"id": "toy"}]})
    status: int = HTTPStatus.OK
    answers: list[Stream] = field(default_factory=list)
    bodies: list[Body] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    on_models: Callable[[], None] = lambda: None
    left: Event = field(default_factory=Event)

    def wait_for_the_client_to_leave(self) -> None:
        assert self.left.wait(_PATIENCE), "the client is still connected"


def says(*texts: str, finish_reason: str = "stop", **fields: Any) -> Stream:
    """Return an answer of pieces of text, with usage."""
    usage = {"prompt_tokens": 5, "completion_tokens": len(texts)}
    end = [text_chunk("", finish_reason), data({"choices": [], "usage": usage, **fields}), _DONE]
    return Stream([*map(text_chunk, texts), *end])


def reasons(reasoning: str, *texts: str) -> Stream:
    """Return an answer with reasoning before it."""
    delta = {"reasoning_content": reasoning, "reasoning": reasoning}
    return Stream([data({"choices": [{"index": 0, "delta": delta}]}), *says(*texts).events])


class _Listener(ThreadingHTTPServer):
    def __init__(self, talking: TalkingServer) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.talking = talking
        talking.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing about clients that leave."""


class _Connection(BaseHTTPRequestHandler):
    server: _Listener

    def do_GET(self) -> None:
        talking = self.server.talking
        talking.keys.append(self.headers["Authorization"])
        talking.on_models()
        models = talking.models
        self._begin(talking.status)
        self.wfile.write((models if isinstance(models, str) else json.dumps(models)).encode())

    def do_POST(self) -> None:
        talking = self.server.talking
        talking.keys.append(self.headers["Authorization"])
        talking.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        answer = talking.answers.pop(0)
        self._begin(answer.status)
        for event in answer.events:
            self.wfile.write(f"{event}\n".encode())
            self.wfile.flush()
        if answer.is_open:
            self.connection.settimeout(_PATIENCE)
            if not self.rfile.read(1):
                talking.left.set()

    def _begin(self, status: int) -> None:
        """Send the head; the end of the connection is that of the body."""
        self.send_response(status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def talking_server(*answers: Stream) -> Iterator[TalkingServer]:
    """Serve in a thread for the time of the block."""
    talking = TalkingServer(answers=[*answers])
    with _Listener(talking) as listener:
        thread = Thread(target=listener.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield talking
        finally:
            listener.shutdown()
            thread.join()
