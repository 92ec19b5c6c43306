import os
import signal
import sys
from pathlib import Path

import httpx
import pytest

from scripts.bench.load.servers import (
    ServerSpec,
    fleet,
    server_at,
    server_by_command,
)
from scripts.server_process import ServerFailed
from tests.support.fake_server import fake_server

FAKE = Path(__file__).parents[1] / "support" / "fake_server.py"
FAKE_COMMAND = f"{sys.executable} {FAKE} {{port}}"
SAYS_GOODBYE = "print('no model here', flush=True); raise SystemExit(3)"


def is_stopped(pid: int) -> bool:
    """Wait for the next change of a child: stopped, or running again."""
    _, status = os.waitpid(pid, os.WUNTRACED | os.WCONTINUED)
    return os.WIFSTOPPED(status)


def test_a_command_is_awake_only_for_its_turn_and_ends_with_the_fleet() -> None:
    with fleet([server_by_command(FAKE_COMMAND)], start_timeout=20) as (server,):
        process = server.process
        assert process is not None
        assert server.model == "fake-model"
        assert is_stopped(process.pid)
        with server.awake():
            assert not is_stopped(process.pid)
            assert httpx.get(f"{server.url}/health", trust_env=False).is_success
        assert is_stopped(process.pid)
        assert server.premature_end() is None
    assert process.exit_status == -signal.SIGTERM


def test_whatever_happens_ends_the_servers() -> None:
    processes = []

    def be_interrupted() -> None:
        with fleet([server_by_command(FAKE_COMMAND)], start_timeout=20) as (server,):
            processes.append(server.process)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        be_interrupted()
    assert [process and process.exit_status for process in processes] == [-signal.SIGTERM]


def test_a_command_that_ends_early_fails_with_its_log() -> None:
    spec = ServerSpec("peer", command=(sys.executable, "-c", SAYS_GOODBYE))
    with pytest.raises(ServerFailed, match=r"peer ended with status 3; it said:\nno model here"):
        with fleet([spec], start_timeout=20):
            pass


def test_a_command_that_never_responds_is_ended() -> None:
    spec = ServerSpec("peer", command=(sys.executable, "-c", "import time; time.sleep(60)"))
    with pytest.raises(ServerFailed, match=r"peer is not ready after 0\.1 s"):
        with fleet([spec], start_timeout=0.1):
            pass


def test_a_server_that_ended_is_reported() -> None:
    with fleet([server_by_command(FAKE_COMMAND)], start_timeout=20) as (server,):
        assert server.process is not None
        server.process.kill()
        assert server.premature_end() == f"{server.name} ended with status -9: "
        with server.awake():
            pass


def test_a_server_that_runs_already_is_asked_for_its_model() -> None:
    with fake_server() as fake:
        with fleet([server_at(f"{fake.url}/v1/")], start_timeout=1) as (server,):
            assert (server.url, server.model, server.process) == (fake.url, "fake-model", None)
            with server.awake():
                pass
    with pytest.raises(ServerFailed, match="cannot be asked for its models"):
        with fleet([server_at(fake.url)], start_timeout=1):
            pass


@pytest.mark.parametrize(
    ("text", "name", "url", "model"),
    [
        ("http://127.0.0.1:80", "127.0.0.1:80", "http://127.0.0.1:80", None),
        ("vllm=https://box/v1", "vllm", "https://box", None),
        ("mlx=http://box:1#default_model", "mlx", "http://box:1", "default_model"),
        ("http://box:1/x?a=b#org/model", "box:1", "http://box:1/x?a=b", "org/model"),
    ],
)
def test_urls_may_have_a_name_and_a_model(
    text: str, name: str, url: str, model: str | None
) -> None:
    spec = server_at(text)
    assert (spec.name, spec.url, spec.model) == (name, url, model)


@pytest.mark.parametrize("text", ["localhost:8000", "ftp://box", "http://", "x="])
def test_what_is_no_url_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is no URL"):
        server_at(text)


@pytest.mark.parametrize(
    ("text", "name", "command", "model"),
    [
        ("/usr/bin/srv -p {port}", "srv", ("/usr/bin/srv", "-p", "{port}"), None),
        ("peer=srv {port}", "peer", ("srv", "{port}"), None),
        ("srv 'a b' {port} #m/x", "srv", ("srv", "a b", "{port}"), "m/x"),
        ("env A=1 srv {port}", "env", ("env", "A=1", "srv", "{port}"), None),
    ],
)
def test_commands_may_have_a_name_and_a_model(
    text: str, name: str, command: tuple[str, ...], model: str | None
) -> None:
    spec = server_by_command(text)
    assert (spec.name, spec.command, spec.model) == (name, command, model)


def test_a_command_without_a_port_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"has no \{port\}"):
        server_by_command("srv --port 80")
