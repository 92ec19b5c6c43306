"""`python -m app` with the bundled model, over real sockets, as its users have it."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import httpx
import mlx.core as mx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from app.main import create_app
from app.server.uvicorn_server import bind, serve
from batching import EngineConfig, EngineThread, SchedulerManager, SchedulerStats
from batching.backend import BLAS
from scripts.server_process import ROOT, Server
from tests.support.golden import GOLDEN, GoldenCase
from tests.support.small_model import small_model

pytestmark = pytest.mark.timeout(240)

MODEL = "smollm2-135m-instruct"
# The golden texts are greedy ones; the model's own defaults have a repetition penalty.
NO_PENALTY = {"repetition_penalty": 1}
SHORT = [case for case in GOLDEN if len(case.prompt_token_ids) < 200]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(cpu_precision="exact") as started:
        yield started
        assert started.stop() == 0


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def messages(case: GoldenCase) -> list[ChatCompletionMessageParam]:
    return cast(list[ChatCompletionMessageParam], case.messages)


def stream_text(client: openai.OpenAI, case: GoldenCase) -> tuple[str, str | None]:
    """Stream a golden case; return its text and finish reason."""
    text, reason = "", None
    stream = client.chat.completions.create(
        model=MODEL,
        messages=messages(case),
        temperature=0,
        max_tokens=48,
        stream=True,
        extra_body=NO_PENALTY,
    )
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    return text, reason


def test_the_start_says_what_was_chosen(server: Server) -> None:
    server.wait_for_line("^serving ")
    assert f"BLAS: {BLAS}" in server.log
    for word in ("device    cpu", "kernels   ", "1024 blocks", "MiB", "curl"):
        assert word in server.log


def python_examples(document: str) -> list[str]:
    """Return its examples, less those of clients that tests/clients runs."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found: list[str] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return [example for example in found if not re.search("litellm|llama_index", example)]


@pytest.mark.parametrize(
    "example", [*python_examples("README.md"), *python_examples("docs/clients.md")]
)
def test_the_documents_examples_run_as_they_stand(
    server: Server, capsys: pytest.CaptureFixture[str], example: str
) -> None:
    assert "http://127.0.0.1:8000" in example
    exec(example.replace("http://127.0.0.1:8000", server.url), {})
    assert capsys.readouterr().out.strip()


def test_the_first_request_is_answered_right_by_default(bundled_server: Server) -> None:
    body = bundled_server.wait_for_line(r"curl .* -d '(.*)'")[1]
    assert "Can you tell me the capital of France?" in body
    bodies = [body, body.replace("Can you tell me the", "What is the")]
    url, headers = f"{bundled_server.url}/v1/chat/completions", {"Content-Type": "application/json"}
    responses = [httpx.post(url, content=each, headers=headers).json() for each in 3 * bodies]
    texts = {response["choices"][0]["message"]["content"] for response in responses}
    assert texts == {"The capital of France is Paris."}


def test_many_clients_at_once_get_the_golden_answers(server: Server) -> None:
    with client_of(server) as client, ThreadPoolExecutor(len(SHORT)) as pool:
        answers = pool.map(lambda case: stream_text(client, case), SHORT)
    assert list(answers) == [(case.text, case.finish_reason) for case in SHORT]


def test_a_whole_answer_reports_what_the_cache_gave(server: Server) -> None:
    with client_of(server) as client:
        for _ in range(2):
            answer = client.chat.completions.create(
                model=MODEL,
                messages=messages(SHORT[2]),
                temperature=0,
                max_tokens=48,
                extra_body=NO_PENALTY,
            )
    assert answer.choices[0].message.content == SHORT[2].text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(SHORT[2].prompt_token_ids)
    assert answer.usage.prompt_tokens_details is not None
    # On a CPU all but the last token, otherwise full blocks.
    num_cached = len(SHORT[2].prompt_token_ids) - 1 if mx.default_device() == mx.cpu else 32
    assert answer.usage.prompt_tokens_details.cached_tokens == num_cached


def test_a_stop_string_is_not_part_of_the_answer(server: Server) -> None:
    assert SHORT[0].text == "The capital of France is Paris."
    with client_of(server) as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=messages(SHORT[0]),
            temperature=0,
            stop=["of Fr", "Paris"],
        )
    assert answer.choices[0].message.content == "The capital "
    assert answer.choices[0].finish_reason == "stop"


def test_a_seeded_completion_is_the_same_again(server: Server) -> None:
    with client_of(server) as client:
        texts = {
            client.completions.create(
                model=MODEL, prompt="Once upon a time", max_tokens=24, seed=seed, temperature=1
            )
            .choices[0]
            .text
            for seed in (1, 2, 1, 2)
        }
    assert len(texts) == 2


class Departures:
    """A server in this process, so that its engine can be asked, and a client that leaves it."""

    def __init__(self, engine: EngineThread, port: int) -> None:
        self._engine = engine
        self._port = port

    def send(self, prompt: str) -> socket.socket:
        body = json.dumps({"prompt": prompt, "max_tokens": 6000, "stream": True, "temperature": 0})
        sock = socket.create_connection(("127.0.0.1", self._port))
        head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        sock.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
        return sock

    def wait_for(self, condition: Callable[[SchedulerStats], bool]) -> None:
        """Ask between any two steps; pytest's time-out ends a wait for what never comes."""
        while not condition(asyncio.run(self._engine.stats())):
            pass

    def wait_until_all_is_free(self) -> None:
        self.wait_for(lambda stats: stats.num_running + stats.num_waiting == 0)
        stats = asyncio.run(self._engine.stats())
        assert stats.num_free_blocks == stats.num_blocks


def leave_before_the_head(clients: Departures) -> None:
    clients.send("Hello").close()
    # Behind it in line: when this one runs, the server has read the other's request.
    with clients.send("Hello again") as sock:
        sock.recv(1)
    clients.wait_until_all_is_free()


def leave_in_mid_prefill(clients: Departures) -> None:
    with clients.send("one two three four five " * 80):
        clients.wait_for(lambda stats: stats.num_prefilling == 1)
    clients.wait_until_all_is_free()


def leave_in_mid_decode(clients: Departures) -> None:
    with clients.send("Once upon a time") as sock:
        received = b""
        while received.count(b"data: ") < 3:
            received += sock.recv(1000)
    clients.wait_until_all_is_free()


def test_a_client_that_leaves_frees_its_blocks(caplog: pytest.LogCaptureFixture) -> None:
    # Steps so small that the prompt takes many.
    config = EngineConfig(
        model=str(small_model()),
        model_id=MODEL,
        num_blocks=256,
        device="cpu",
        max_num_batched_tokens=32,
    )
    manager = SchedulerManager([config])
    engine = manager.get(MODEL)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}

    def visit(port: int) -> None:
        try:
            clients = Departures(engine, port)
            for leave in (leave_before_the_head, leave_in_mid_prefill, leave_in_mid_decode):
                leave(clients)
            assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with bind("127.0.0.1", 0) as sock, ThreadPoolExecutor() as pool:
            sock.listen()
            visitor = pool.submit(visit, sock.getsockname()[1])
            with caplog.at_level(logging.INFO, "app.observability.request_log"):
                serve(create_app(manager), sock)
            visitor.result()
    finally:
        manager.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    # Each would have gone on to 6000 tokens.
    logged = [
        vars(r)["fields"] for r in caplog.records if r.name == "app.observability.request_log"
    ]
    outputs = [fields["output"] for fields in logged if fields["reason"] == "aborted"]
    # The first one has left before the engine got it, if the server has seen it go in time.
    assert len(outputs) == len(logged) >= 3
    assert max(outputs) < 3000
