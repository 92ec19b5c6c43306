"""Rendering prompts: what takes long, or ends a renderer, is not the fault of others' requests."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Event
from typing import Any

import pytest

from app.prompts.templates import model_template, template_process
from app.prompts.templates.template_sandbox import rendered
from batching import Sandbox, SandboxLimits
from batching.sandbox import sandbox as room
from batching.sandbox.sandbox import SandboxProcess
from tests.support.speaker import ByteTokenizer, served


class Templated(ByteTokenizer):
    """Has a template that the server's processes render; counts how often it tokenizes."""

    special_tokens_map = {"bos_token": "<s>"}  # noqa: RUF012

    def __init__(self) -> None:
        self.num_encoded = 0
        self.chat_template = "{{ messages[0].content }}"

    def get_chat_template(self, name: str | None, tools: Any) -> str | None:
        return self.chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.num_encoded += 1
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """Replace the server's processes by one."""
    made = Sandbox(template_process.__file__, SandboxLimits(5), wall_seconds=5, num_processes=1)
    monkeypatch.setattr(model_template, "SANDBOX", made)
    with closing(made):
        yield made


def kill_before_answers(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Kill as many renderers when they have got their line, as a system without memory does; return their ids."""
    killed: list[int] = []
    start = SandboxProcess.start

    def start_to_be_killed(self: SandboxProcess) -> Any:
        line = start(self)
        process = self._process
        assert process is not None
        if len(killed) < times:
            os.kill(process.pid, signal.SIGKILL)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            killed.append(process.pid)
        return line

    monkeypatch.setattr(SandboxProcess, "start", start_to_be_killed)
    return killed


@pytest.mark.anyio
@pytest.mark.usefixtures("sandbox")
async def test_a_renderer_that_is_killed_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = kill_before_answers(monkeypatch, 1)
    async with served(tokenizer=Templated()) as server:
        response = await server.chat("Hi")
    assert (response.status_code, len(killed)) == (200, 1)


@pytest.mark.anyio
@pytest.mark.usefixtures("sandbox")
async def test_where_renderers_are_killed_it_is_not_the_requests_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed = kill_before_answers(monkeypatch, 3)
    async with served(tokenizer=Templated()) as server:
        response = await server.chat("Hi")
        # Once more, and then it is served.
        again = await server.chat("Hi")
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (503, "server_error")
    assert response.headers["retry-after"] == "1"
    assert "template" not in (error["param"] or "")
    assert (again.status_code, len(killed)) == (200, 3)


def test_the_wait_for_a_process_counts_against_no_request(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request waits longer than all of its own rendering may take, and is rendered then."""
    clock = [0.0]
    monkeypatch.setattr(room, "monotonic", lambda: clock[0])
    acquire, asked = sandbox._places.acquire, Event()
    acquire()

    def acquire_later() -> bool:
        asked.set()
        return acquire()

    monkeypatch.setattr(sandbox._places, "acquire", acquire_later)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(rendered, sandbox, "a", [], {})
        asked.wait()
        clock[0] += 60
        sandbox._places.release()
        assert waiting.result() == "a"


@pytest.mark.anyio
@pytest.mark.usefixtures("sandbox")
async def test_a_request_tokenizes_its_prompt_and_nothing_else() -> None:
    """The markers of the model's format are known once a request has needed them."""
    tokenizer = Templated()
    async with served(tokenizer=tokenizer) as server:
        assert (await server.chat("Hi")).status_code == 200
        before = tokenizer.num_encoded
        assert (await server.chat("Hello")).status_code == 200
    assert tokenizer.num_encoded - before == 1
