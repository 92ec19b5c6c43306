"""The process: a real server, the OpenAI client, signals, and what keeps it from starting."""

import json
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any, Final, NamedTuple, TypeVar

import httpx
import openai
import pytest

from app.__main__ import allow_connections, leave, open_standard_files, start
from app.cli import base_url, main, run
from app.main import create_app
from app.server import uvicorn_server
from app.server.stop_signals import stop_at_once, stop_signals
from app.server.uvicorn_server import BindError, Server, bind, serve
from app.settings import Settings
from batching import RankLost, SchedulerManager
from batching.steps.step_plan import SliceOutput, StepPlan
from tests.support.speaker import (
    ENDLESS_BLOCKS,
    MODEL_ID,
    Breaking,
    Gate,
    Speaker,
    speaking_manager,
)

T = TypeVar("T")

# Seconds.  A test that waits that long has failed.
LONG: Final = 20

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Phases(NamedTuple):
    """What has happened to a server."""

    listening: Event
    signalled: Event
    draining: Event
    closing: Event


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> Phases:
    """Let a test wait for the phases of the server that it starts."""
    phases = Phases(*(Event() for _ in Phases._fields))

    class ObservedServer(Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            phases.listening.set()

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            super().handle_exit(sig, frame)
            phases.signalled.set()

        async def on_tick(self, counter: int) -> bool:
            can_exit = await super().on_tick(counter)
            if self._is_draining:
                phases.draining.set()
            return can_exit

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            phases.closing.set()
            await super().shutdown(sockets)

    monkeypatch.setattr(uvicorn_server, "Server", ObservedServer)
    return phases


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Restore what belongs to the process."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    # Tests that run under `nohup` test the same.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    root = logging.getLogger()
    level, loggers = root.level, [logging.getLogger(n) for n in ("uvicorn", "sse_starlette")]
    levels = [logger.level for logger in loggers]
    log_handlers, raises = list(root.handlers), logging.raiseExceptions
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    root.setLevel(level)
    root.handlers, logging.raiseExceptions = log_handlers, raises
    for logger, before in zip(loggers, levels, strict=True):
        logger.setLevel(before)


def stop(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def while_serving(
    manager: SchedulerManager,
    visit: Callable[[str], T],
    *,
    number: int = signal.SIGTERM,
    status: int = 0,
    **settings: Any,
) -> T:
    """Serve in this thread, which gets the signals, and visit from another.

    The visit may stop the server itself; `status` is what it exits with.
    """

    def visit_and_stop(url: str) -> T:
        try:
            return visit(url)
        finally:
            stop(number)

    with bind("127.0.0.1", 0) as sock, ThreadPoolExecutor() as pool:
        sock.listen()
        visitor = pool.submit(visit_and_stop, f"http://127.0.0.1:{sock.getsockname()[1]}")
        try:
            app = create_app(manager, Settings.model_construct(**settings))
            manager.get(MODEL_ID)
            assert serve(app, sock) == status
        finally:
            manager.close()
        return visitor.result()


def openai_client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_connections_are_bounded_by_the_setting_and_counted() -> None:
    def visit(url: str) -> str:
        address = (httpx.URL(url).host, httpx.URL(url).port or 0)
        with socket.create_connection(address, LONG) as first:
            first.sendall(b"GET /metrics")
            with pytest.raises(httpx.HTTPStatusError, match="503"):
                httpx.get(f"{url}/metrics").raise_for_status()
            first.sendall(b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return b"".join(iter(lambda: first.recv(1 << 16), b"")).decode()

    page = while_serving(speaking_manager(b"Hello!"), visit, max_connections=1)
    assert re.search(r'rejections_total{.*reason="too_many_connections".*} 1.0', page)


def test_connections_that_do_not_fit_the_open_files_are_fewer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uvicorn_server, "max_files", lambda: 100)
    manager = speaking_manager(b"Hello!")
    app = create_app(manager)
    try:
        assert Server(app, app.state.service).config.backlog == 25
    finally:
        manager.close()
    assert "at most 25 connections: MLX_SERVER_MAX_CONNECTIONS has room" in caplog.text


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_openai_client_works(number: int) -> None:
    def visit(url: str) -> None:
        with openai_client(url) as client:
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


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_a_signal_lets_requests_in_flight_finish_and_rejects_new_ones(
    phases: Phases, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="app.server.uvicorn_server")
    gate = Gate(is_open=False)

    def visit(url: str) -> str:
        assert httpx.get(f"{url}/ready").json() == {"status": "ready"}
        with openai_client(url) as client:
            stream = client.completions.create(model=MODEL_ID, prompt="Hi", stream=True)
            text = next(stream).choices[0].text
            stop()
            # What is sent from here on is not counted.
            assert phases.draining.wait(LONG)
            # A second signal at once counts as the same one.
            stop(signal.SIGHUP)
            assert code_of(httpx.get(f"{url}/ready")) == (503, "unavailable")
            assert httpx.get(f"{url}/health").status_code == 200
            rejected = httpx.post(f"{url}/v1/completions", json={"prompt": "Hi"})
            assert code_of(rejected) == (503, "shutting_down")
            assert int(rejected.headers["Retry-After"]) == 30
            gate.open()
            return text + "".join(part.choices[0].text for part in stream)

    assert while_serving(speaking_manager(b"Hello!", gate=gate), visit) == "Hello!"
    assert [r.getMessage() for r in caplog.records if r.name == "app.server.uvicorn_server"] == [
        "shutting down; requests in flight: 1",
        "the server has stopped",
    ]


def end_early(url: str, gate: Gate, phases: Phases, end: Callable[[], None]) -> None:
    """Start an endless stream, and check its error when the server ends."""
    with openai_client(url) as client:
        stream = client.chat.completions.create(
            model=MODEL_ID, messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        next(stream)
        stop()
        assert phases.signalled.wait(LONG)
        end()
        assert phases.closing.wait(LONG)
        gate.open()
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)


def test_a_stream_beyond_the_shutdown_timeout_ends_with_an_error(phases: Phases) -> None:
    gate = Gate(is_open=False)
    manager = speaking_manager(None, gate=gate, num_blocks=ENDLESS_BLOCKS)
    while_serving(
        manager, lambda url: end_early(url, gate, phases, lambda: None), shutdown_timeout=0.0
    )


def test_a_second_signal_forces_the_shutdown(
    phases: Phases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn_server, "_SIGNAL_DEBOUNCE", -1.0)
    gate = Gate(is_open=False)
    manager = speaking_manager(None, gate=gate, num_blocks=ENDLESS_BLOCKS)
    while_serving(manager, lambda url: end_early(url, gate, phases, stop), shutdown_timeout=3600.0)


class HeldAtOnce(Speaker):
    """Reads no prompt before the gate is open."""

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        self._gate.wait()
        return super().run(plan)


def test_a_signal_ends_the_warming_at_once(
    phases: Phases, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="app.warming.warmer")
    path = tmp_path / "warm.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n' * 2)
    gate = Gate(is_open=False)

    def visit(url: str) -> None:
        try:
            assert gate.reached.wait(LONG)
            stop()
            assert phases.closing.wait(LONG)
        finally:
            gate.open()

    manager = speaking_manager(runner=HeldAtOnce, gate=gate)
    while_serving(manager, visit, warm_file=path, shutdown_timeout=3600.0)
    assert "warming=cancelled warmed=0 failed=0" in caplog.text


def test_a_server_whose_engine_fails_exits_with_1_if_configured(phases: Phases) -> None:
    """Each step after the first token raises."""
    manager = speaking_manager(b"H", runner=Breaking)

    def visit(url: str) -> None:
        for _ in range(3):
            assert httpx.post(f"{url}/v1/completions", json={"prompt": "Hi"}).status_code == 500
        assert code_of(httpx.get(f"{url}/health")) == (503, "unavailable")
        assert phases.closing.wait(LONG)

    while_serving(manager, visit, status=1, exit_on_engine_failure=True)


def test_a_server_that_has_lost_a_rank_says_so_and_exits_with_1(phases: Phases) -> None:
    lost: list[RankLost] = []
    manager = speaking_manager(lost=lambda: lost[0] if lost else None)

    def visit(url: str) -> None:
        assert httpx.get(f"{url}/health").status_code == 200
        lost.append(RankLost(1, "(mac1) is gone"))
        while (health := httpx.get(f"{url}/health")).status_code == 200:
            pass
        assert health.json()["error"]["message"] == "rank 1 (mac1) is gone"
        while not phases.draining.is_set():
            assert httpx.get(f"{url}/health").status_code == 503
        assert code_of(httpx.post(f"{url}/v1/completions", json={"prompt": "Hi"})) == (
            503,
            "shutting_down",
        )
        assert phases.closing.wait(LONG)

    while_serving(manager, visit, status=1)


def test_a_server_whose_engine_fails_goes_on_by_default() -> None:
    manager = speaking_manager(b"H", runner=Breaking)
    failed = Event()

    def visit(url: str) -> None:
        for _ in range(3):
            assert httpx.post(f"{url}/v1/completions", json={"prompt": "Hi"}).status_code == 500
        assert failed.wait(LONG)
        assert code_of(httpx.get(f"{url}/health")) == (503, "unavailable")

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            failed.set()

    listener = Listener()
    logging.getLogger("app.server.watchdog").addHandler(listener)
    while_serving(manager, visit)
    logging.getLogger("app.server.watchdog").removeHandler(listener)


def test_the_address_must_be_free_and_ours() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BindError, match=rf"cannot listen on 127.0.0.1 port {port}: .*in use"):
            bind("127.0.0.1", port)
    with pytest.raises(BindError, match=r"cannot listen on no\.such\.host\.invalid port 1: "):
        bind("no.such.host.invalid", 1)
    with pytest.raises(BindError, match=r"cannot listen on a\.\.b port 1: not a host name"):
        bind("a..b", 1)


def test_another_process_may_listen_while_the_model_loads() -> None:
    manager = speaking_manager()
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", first.getsockname()[1]) as second:
        first.listen()
        with pytest.raises(BindError, match="in use"):
            serve(create_app(manager), second)


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


class Closed:
    """A tracer that records that it was closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_the_start_prints_the_url_and_the_end_stops_the_engine(
    phases: Phases,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    tracer = Closed()
    monkeypatch.setattr("app.cli.make_tracer", lambda *_: tracer)
    settings = Settings(host="0.0.0.0", port=free_port(), data_dir=tmp_path, _env_file=None)
    url = base_url(settings.host, settings.port)
    manager = speaking_manager()

    def visit() -> int:
        assert phases.listening.wait(LONG)
        return httpx.get(f"{url}/models").status_code

    with ThreadPoolExecutor() as pool:
        visitor = pool.submit(visit)
        visitor.add_done_callback(lambda _: stop())
        assert run(settings, manager) == 0
    assert visitor.result() == 200
    assert manager.health.unhealthy_reason == "the engine has stopped"
    assert tracer.is_closed
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [f"loading {MODEL_ID} ...", "a speaker"]
    assert lines[2] == f"serving {MODEL_ID} at {url}; try:"
    assert lines[3].startswith(f"  curl {url}/chat/completions -H")
    assert lines[4] == f"  or open {url.removesuffix('/v1')} in a browser"


class TestMain:
    """What keeps the server from starting is one line and status 2."""

    @pytest.fixture(autouse=True)
    def _no_env(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("MLX_SERVER_PORT", "0")
        monkeypatch.setenv("MLX_SERVER_DATA_DIR", str(tmp_path))

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

    def test_a_process_can_be_stopped_from_its_first_moment(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        statuses: list[int] = []

        def exit_process(status: int) -> None:
            statuses.append(status)

        def main_until_signalled(arguments: list[str]) -> int:
            assert arguments == ["--port=1"]
            for number in STOP_SIGNALS:
                signal.raise_signal(number)
            return 7

        monkeypatch.setattr(os, "_exit", exit_process)
        monkeypatch.setattr(sys, "argv", ["mlx-batch-server", "--port=1"])
        monkeypatch.setattr("app.cli.main", main_until_signalled)
        monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
        start()
        assert statuses == [130, 143, 129, 7]
        assert capfd.readouterr().err == "stopped before it was ready\n" * 3
        assert signal.getsignal(signal.SIGTERM) is stop_at_once

    @staticmethod
    def signalled(number: signal.Signals, *, is_hangup_ignored: bool = False) -> tuple[int, str]:
        """Return status and standard error of a process that gets a signal as it starts.

        The signal comes where the command line would be read, with nothing else replaced.
        """
        hangup = "SIG_IGN" if is_hangup_ignored else "SIG_DFL"
        code = (
            "import signal, sys, types\n"
            f"signal.signal(signal.SIGHUP, signal.{hangup})\n"
            "from app.__main__ import start\n"
            "cli = sys.modules['app.cli'] = types.ModuleType('app.cli')\n"
            f"cli.main = lambda _: signal.raise_signal({int(number)}) or 7\n"
            "start()\n"
        )
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert ended.stdout == ""
        return ended.returncode, ended.stderr

    @pytest.mark.parametrize("number", STOP_SIGNALS)
    def test_a_real_process_ends_with_the_status_of_the_signal(
        self, number: signal.Signals
    ) -> None:
        assert self.signalled(number) == (128 + number, "stopped before it was ready\n")

    def test_a_process_of_nohup_outlives_its_terminal(self) -> None:
        assert self.signalled(signal.SIGHUP, is_hangup_ignored=True) == (7, "")

    @pytest.mark.parametrize(
        ("handler", "expected"),
        [(signal.SIG_DFL, STOP_SIGNALS), (signal.SIG_IGN, STOP_SIGNALS[:2])],
    )
    def test_a_signal_that_is_ignored_from_the_start_ends_nothing(
        self, handler: signal.Handlers, expected: tuple[signal.Signals, ...]
    ) -> None:
        signal.signal(signal.SIGHUP, handler)
        assert stop_signals() == expected

    def test_a_system_without_room_for_processes(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail() -> None:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr("app.cli.SANDBOX.warm_up", fail)
        assert main() == 2
        assert capsys.readouterr().err == (
            "the processes that render chat templates cannot be started: "
            "[Errno 24] Too many open files\n"
        )

    def test_each_line_of_the_start_is_json_if_the_log_is(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("MLX_SERVER_LOG_FORMAT", "json")
        monkeypatch.setenv("MLX_SERVER_MODEL", "./nowhere.gguf")
        monkeypatch.setenv("MLX_SERVER_PROT", "1")
        monkeypatch.setenv("MLX_SERVER_TRUST_REMOTE_CODE", "true")
        assert main() == 2
        lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
        levels = [line["level"] for line in lines]
        assert levels == ["warning", "warning", "info", "error"]
        assert "nowhere.gguf" in lines[-1]["message"]

    def test_what_is_risky_is_said(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("MLX_SERVER_MODEL", "./nowhere.gguf")
        monkeypatch.setenv("MLX_SERVER_HOST", "0.0.0.0")
        monkeypatch.setenv("MLX_SERVER_TRUST_REMOTE_CODE", "true")
        assert main() == 2
        open_to_all, code, *_ = capsys.readouterr().err.splitlines()
        assert "every client that reaches 0.0.0.0 can use this server" in open_to_all
        assert "code that comes with a model is run" in code
        monkeypatch.setenv("MLX_SERVER_API_KEYS", "key")
        assert main() == 2
        assert "every client" not in capsys.readouterr().err

    def test_closed_standard_files_are_filled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        opened: list[str] = []
        fstat = os.fstat

        def is_closed(number: int) -> os.stat_result:
            if number == 2:
                raise OSError("bad file descriptor")
            return fstat(number)

        monkeypatch.setattr(os, "fstat", is_closed)
        monkeypatch.setattr(os, "open", lambda path, _: opened.append(path))
        open_standard_files()
        assert opened == [os.devnull]

    @pytest.mark.parametrize("limit", [5000, 1 << 20, resource.RLIM_INFINITY])
    def test_as_many_connections_are_allowed_as_may_be(
        self, limit: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limits: list[tuple[int, int]] = []
        monkeypatch.setattr(resource, "getrlimit", lambda _: (256, limit))
        monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
        allow_connections()
        assert limits == [(5000 if limit == 5000 else 65_536, limit)]

    @pytest.mark.parametrize(
        ("most", "expected"), [(61_440, [49_152]), (10_240, [10_240]), (256, [])]
    )
    def test_a_system_may_take_less_than_its_hard_limit(
        self, most: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limits: list[int] = []

        def set_limit(_: int, new: tuple[int, int]) -> None:
            if new[0] > most:
                raise ValueError("current limit exceeds maximum limit")
            limits.append(new[0])

        monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
        monkeypatch.setattr(resource, "setrlimit", set_limit)
        allow_connections()
        assert limits == expected

    def test_the_end_does_not_wait_for_what_cannot_be_written(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class FullDisk(StringIO):
            def flush(self) -> None:
                raise OSError(28, "No space left on device")

        statuses: list[int] = []
        monkeypatch.setattr("sys.stdout", None)
        monkeypatch.setattr("sys.stderr", FullDisk())
        monkeypatch.setattr(os, "_exit", statuses.append)
        leave(3)
        assert statuses == [3]
