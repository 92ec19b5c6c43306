"""Processes of `serve --ranks` on this machine: a model of a few kilobytes over several of them."""

import json
import os
import random
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

import httpx

from scripts.server_process import ServerProcess
from tests.support.small_model import small_model

# Seconds after a fault within which all ranks have ended.
ENDED_WITHIN: Final = 10.0
# The system gives none of these to a program that asks for any port.
_PORTS: Final = range(15_000, 30_000)
_QUESTION: Final = {"role": "user", "content": "Tell me all."}
_LONG: Final = {"role": "user", "content": "Read this. " * 500}


def free_ports(count: int) -> int:
    """Return the first of some ports that follow each other and are free."""
    while True:
        first = random.SystemRandom().choice(_PORTS)
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def hosts(*names: str) -> str:
    """Return a file's text of hosts, which are all this one."""
    return json.dumps(
        [{"ssh": name, "ips": [f"127.0.0.{index}"]} for index, name in enumerate(names, start=1)]
    )


@contextmanager
def rank(
    settings: Mapping[str, object],
    number: int | None = None,
    *,
    module: str = "app",
    **environment: str,
) -> Iterator[ServerProcess]:
    """Start a rank; None is one that starts the others itself.

    module: what is run in the place of the server.
    """
    kept = {name: text for name, text in os.environ.items() if not name.startswith("MLX_")}
    variables = {f"MLX_SERVER_{name.upper()}": str(value) for name, value in settings.items()}
    own = {} if number is None else {"MLX_RANK": str(number)}
    command = [sys.executable, "-m", module, "serve"]
    with ServerProcess(command, {**kept, **variables, **own, **environment}) as process:
        yield process


def settings(**changed: object) -> dict[str, object]:
    """Return the settings of ranks that find each other."""
    return {
        "model": small_model(),
        "ranks": hosts("mac0", "mac1"),
        "ranks_port": free_ports(3),
        "port": 0,
        "device": "cpu",
        "num_blocks": 512,
        **changed,
    }


@contextmanager
def ranks(**changed: object) -> Iterator[list[ServerProcess]]:
    """Start two ranks, as supervisors do; yield them when they serve.  `changed` may be all settings."""
    with loading_ranks(**changed) as processes:
        url_of(processes[0])
        yield processes


@contextmanager
def loading_ranks(**changed: object) -> Iterator[list[ServerProcess]]:
    shared = settings(**changed)
    with rank(shared, 0) as first, rank(shared, 1) as second:
        yield [first, second]


def url_of(first: ServerProcess) -> str:
    """Wait until rank 0 serves; return where."""
    return first.wait_for_line(r"curl (http://\S+)/v1/")[1]


@dataclass
class Answer:
    """What a client gets.

    status: None if there was none.
    error: of the body, or of an event.
    is_cut: the connection has ended too early.
    """

    status: int | None = None
    text: str = ""
    error: Mapping[str, Any] | None = None
    is_done: bool = False
    is_cut: bool = False
    tokens: list[str] = field(default_factory=list)


def ask(
    url: str,
    on_token: Callable[[], object] = lambda: None,
    *,
    num_tokens: int = 400,
    is_long: bool = False,
    key: str = "",
) -> Answer:
    """Ask for a streamed completion; `on_token` is called at the third event with a text."""
    answer = Answer()
    body = {
        "messages": [_LONG if is_long else _QUESTION],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    try:
        with (
            httpx.Client(timeout=60, headers={"X-Api-Key": key} if key else {}) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
        ):
            answer.status = response.status_code
            for line in response.iter_lines():
                _take(answer, line, on_token)
    except httpx.HTTPError:
        answer.is_cut = True
    return answer


def _take(answer: Answer, line: str, on_token: Callable[[], object]) -> None:
    text = line.removeprefix("data: ")
    if text == "[DONE]":
        answer.is_done = True
        return
    if not text.startswith("{"):
        return
    event = json.loads(text)
    answer.error = event.get("error", answer.error)
    for choice in event.get("choices", ()):
        if content := choice["delta"].get("content"):
            answer.tokens.append(content)
            if len(answer.tokens) == 3:
                on_token()


def ended(*processes: ServerProcess, within: float = ENDED_WITHIN) -> list[int]:
    """Wait until processes have ended, which a fault makes them do in time; return their statuses."""
    until = monotonic() + within
    for process in processes:
        with suppress(Exception):
            process._process.wait(max(0.0, until - monotonic()))
        assert process.exit_status is not None, f"it still runs:\n{process.log}"
    return [process.wait() for process in processes]
