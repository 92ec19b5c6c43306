"""The process: a real server, the OpenAI client, signals, and what keeps it from starting."""

import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import httpx
import openai
import pytest

from app.__main__ import base_url, main, run
from app.main import create_app
from app.server import BindError, bind, serve
from app.settings import Settings
from batching import SchedulerManager
from tests.app.speaker import ENDLESS_BLOCKS, MODEL_ID, Gate, speaking_manager

T = TypeVar("T")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Restore what belongs to the process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    root = logging.getLogger()
    level, loggers = root.level, [logging.getLogger(n) for n in ("uvicorn", "sse_starlette")]
    levels = [logger.level for logger in loggers]
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    root.setLevel(level)
    for logger, before in zip(loggers, levels, strict=True):
        logger.setLevel(before)


def stop(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def while_serving(
    manager: SchedulerManager,
    visit: Callable[[str], T],
    *,
    shutdown_timeout: float = 20.0,
    number: int = signal.SIGTERM,
) -> T:
    """Serve in this thread, which gets the signals, and visit from another."""

    def visit_and_stop(url: str) -> T:
        try:
            return visit(url)
        finally:
            stop(number)

    with bind("127.0.0.1", 0) as sock, ThreadPoolExecutor() as pool:
        sock.listen()
        visitor = pool.submit(visit_and_stop, f"http://127.0.0.1:{sock.getsockname()[1]}")
        try:
            serve(create_app(manager), sock, manager, shutdown_timeout)
        finally:
            manager.close()
        return visitor.result()


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_openai_client_gets_its_answers(number: int) -> None:
    def visit(url: str) -> None:
        with client_of(url) as client:
            whole = client.chat.completions.create(
                model=MODEL_ID,
                messages=[{"role": "user", "content": "Hi"}],
                extra_body={"priority": "high", "top_k": 5},
            )
            stream = client.chat.completions.create(
                model=MODEL_ID,
                messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
                stream=True,
                stream_options={"include_usage": True},
            )
            parts = list(stream)
            completion = client.completions.create(model=MODEL_ID, prompt="Hi")
            models = [model.id for model in client.models.list()]
            retrieved = client.models.retrieve(MODEL_ID)
            with pytest.raises(openai.NotFoundError) as not_found:
                client.models.retrieve("gpt-4")
            with pytest.raises(openai.BadRequestError) as bad:
                client.completions.create(model=MODEL_ID, prompt="Hi", n=0)
        assert whole.choices[0].message.content == "Hello!"
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == "Hello!"
        assert parts[-1].usage == whole.usage
        assert completion.choices[0].text == "Hello!"
        assert models == [retrieved.id] == [MODEL_ID]
        assert not_found.value.code == "model_not_found"
        assert bad.value.param == "n"

    while_serving(speaking_manager(b"Hello!"), visit, number=number)


@contextmanager
def idle_connection(url: str) -> Iterator[Callable[[], None]]:
    """Open a connection; yield a function that waits until the server closes it.

    It closes the idle ones when it is told to stop, right after it stops listening.
    """
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80)) as sock:

        def wait() -> None:
            assert sock.recv(1) == b""

        yield wait


def test_a_running_stream_finishes_after_the_signal() -> None:
    gate = Gate(is_open=False)

    def visit(url: str) -> str:
        with client_of(url) as client, idle_connection(url) as wait_until_closed:
            stream = client.completions.create(model=MODEL_ID, prompt="Hi", stream=True)
            text = next(stream).choices[0].text
            stop()
            wait_until_closed()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", httpx.URL(url).port or 80))
            gate.open()
            return text + "".join(part.choices[0].text for part in stream)

    assert while_serving(speaking_manager(b"Hello!", gate=gate), visit) == "Hello!"


def test_a_stream_that_outlasts_the_deadline_is_told_so() -> None:
    gate = Gate(is_open=False)

    def visit(url: str) -> None:
        with client_of(url) as client, idle_connection(url) as wait_until_closed:
            stream = client.chat.completions.create(
                model=MODEL_ID, messages=[{"role": "user", "content": "Hi"}], stream=True
            )
            next(stream)
            stop()
            wait_until_closed()
            gate.open()
            with pytest.raises(openai.APIError, match="the engine has stopped"):
                list(stream)

    manager = speaking_manager(None, gate=gate, num_blocks=ENDLESS_BLOCKS)
    while_serving(manager, visit, shutdown_timeout=0)


def test_the_address_must_be_free_and_ours() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BindError, match=rf"cannot listen on 127.0.0.1 port {port}: .*in use"):
            bind("127.0.0.1", port)
    with pytest.raises(BindError, match=r"cannot listen on no\.such\.host\.invalid port 1: "):
        bind("no.such.host.invalid", 1)
    with pytest.raises(BindError, match=r"cannot listen on a\.\.b port 1: no name of a host"):
        bind("a..b", 1)


def test_somebody_may_listen_while_the_model_loads() -> None:
    manager = speaking_manager()
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", first.getsockname()[1]) as second:
        first.listen()
        with pytest.raises(BindError, match="in use"):
            serve(create_app(manager), second, manager, 0)


def free_port() -> int:
    with bind("127.0.0.1", 0) as sock:
        return int(sock.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("192.168.1.7", "192.168.1.7"),
        ("::1", "[::1]"),
        ("::", "[::1]"),
    ],
)
def test_the_url_can_be_copied(host: str, shown: str) -> None:
    assert base_url(host, 8000) == f"http://{shown}:8000/v1"


def test_a_start_says_where_the_server_is_and_the_end_stops_the_engine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = Settings(host="0.0.0.0", port=free_port(), _env_file=None)
    url = base_url(settings.host, settings.port)
    manager = speaking_manager()

    def visit() -> int:
        with httpx.Client() as client:
            while True:
                with suppress(httpx.ConnectError):
                    return client.get(f"{url}/models").status_code

    with ThreadPoolExecutor() as pool:
        visitor = pool.submit(visit)
        visitor.add_done_callback(lambda _: stop())
        assert run(settings, manager) == 0
    assert visitor.result() == 200
    assert not manager.get(MODEL_ID).is_alive
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [f"loading {MODEL_ID} ...", "a speaker"]
    assert lines[2] == f"serving {MODEL_ID} at {url}; try:"
    assert lines[3].startswith(f"  curl {url}/chat/completions -H")


class TestMain:
    """What keeps the server from starting is one line and status 2."""

    @pytest.fixture(autouse=True)
    def _no_env(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("MLX_SERVER_PORT", "0")

    def test_a_bad_setting(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("MLX_SERVER_PORT", "many")
        assert main() == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("MLX_SERVER_PORT must be")

    def test_a_missing_model_and_a_setting_that_is_none(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("MLX_SERVER_MODEL", "./nowhere.gguf")
        monkeypatch.setenv("MLX_SERVER_PROT", "1")
        assert main() == 2
        warning, _, line = capsys.readouterr().err.splitlines()
        assert warning.startswith("warning: MLX_SERVER_PROT is not a setting; did you mean")
        assert "nowhere.gguf" in line

    def test_an_address_in_use(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with bind("127.0.0.1", 0) as taken:
            taken.listen()
            monkeypatch.setenv("MLX_SERVER_PORT", str(taken.getsockname()[1]))
            assert main() == 2
        assert "in use" in capsys.readouterr().err

    def test_an_interrupt_while_it_starts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Interrupted(dict[str, str]):
            def __iter__(self) -> Iterator[str]:
                signal.raise_signal(signal.SIGINT)
                return super().__iter__()

        monkeypatch.setattr(os, "environ", Interrupted(os.environ))
        assert main() == 130
