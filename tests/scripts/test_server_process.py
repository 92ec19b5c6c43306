"""Processes on their own; the servers in them are ordinary commands."""

import os
import signal
import sys
from pathlib import Path

import pytest

from scripts.server_process import ServerFailed, ServerProcess

SLEEPS = "import time; print('ready', flush=True); time.sleep(60)"


def python(code: str) -> ServerProcess:
    return ServerProcess([sys.executable, "-c", code])


def test_a_process_that_runs_is_asked_to_end() -> None:
    with python(SLEEPS) as process:
        assert process.wait_for_line("^ready$")
        assert process.exit_status is None
        assert process.stop() == process.kill() == -signal.SIGTERM
    assert process.log == "ready\n"


def test_leaving_the_context_kills_it_even_when_it_is_paused() -> None:
    with python(SLEEPS) as process:
        process.pause()
    assert process.exit_status == -signal.SIGKILL


def test_a_process_that_does_not_end_when_asked_is_killed() -> None:
    ignore = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"
    with python(ignore) as process:
        process.wait_for_line("ready")
        assert process.stop(timeout=0.01) == -signal.SIGKILL


def test_children_end_with_it(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = f"""
import os, time
fifo = os.open({str(fifo)!r}, os.O_WRONLY)
os.fork()
os.write(fifo, b"x")
time.sleep(60)
"""
    process = python(code)
    with fifo.open("rb", buffering=0) as reader:
        both = reader.read(1) + reader.read(1)
        process.pause()
        process.stop()
        # The end comes when no process holds the other side any more.
        assert (both, reader.read()) == (b"xx", b"")


def test_a_line_that_never_comes_fails_with_the_log() -> None:
    with python("print('no model here')") as process:
        with pytest.raises(ServerFailed, match="no model here"):
            process.wait_for_line("ready")
    with python(SLEEPS) as process:
        with pytest.raises(ServerFailed, match="no 'done' in the log"):
            process.wait_for_line("done", timeout=0.0)


def test_a_command_that_does_not_exist_fails() -> None:
    with pytest.raises(ServerFailed, match="/no/such/server cannot be started: No such file"):
        ServerProcess(["/no/such/server"])
