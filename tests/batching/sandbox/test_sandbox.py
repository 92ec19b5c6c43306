"""Sandboxed processes: limited, replaced when they end, and ended when no caller waits for them any more."""

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from batching.sandbox.interruption import Interrupted, Interruption
from batching.sandbox.sandbox import Sandbox, SandboxExceeded, SandboxLimits, SandboxLost
from scripts.server_process import wait_until

WORKER: Final = """
import os, signal, threading

def prepare(*arguments):
    global was_prepared
    was_prepared = repr(arguments).encode()

class Endless(bytes):
    def __len__(self):
        return 1 << 40

def overflow(n):
    return [overflow(n + 1)] if n < 10 ** 9 else n

ANSWERS = {
    b"pid": lambda: b"%d" % os.getpid(),
    b"prepared": lambda: was_prepared,
    b"zone": lambda: repr(sorted(os.environ)).encode(),
    b"memory": lambda: b"a" * (1 << 40),
    b"time": lambda: [None for _ in iter(int, 1)],
    b"crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    b"killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    # The signal may reach another thread, so this one waits for it.
    b"stopped": lambda: (os.kill(os.getpid(), signal.SIGSTOP), threading.Event().wait()),
    b"file": lambda: open("/dev/null"),
    b"megabytes": lambda: b"\\n\\xff" * (1 << 19),
    b"endless": lambda: Endless(),
}

def answer(line):
    return ANSWERS[line.rstrip()]()
"""


@pytest.fixture
def worker(tmp_path: Path) -> str:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return str(path)


def made(worker: str, **options: Any) -> Sandbox:
    return Sandbox(worker, SandboxLimits(cpu_seconds=1), num_processes=1, **options)


@pytest.fixture
def sandbox(worker: str) -> Iterator[Sandbox]:
    with closing(made(worker)) as sandbox:
        yield sandbox


def pid(sandbox: Sandbox) -> int:
    return int(sandbox.ask(b"pid"))


def is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_process_is_prepared_and_kept(sandbox: Sandbox) -> None:
    sandbox.warm_up()
    first = pid(sandbox)
    sandbox.warm_up()
    assert pid(sandbox) == first != os.getpid()
    assert sandbox.ask(b"prepared") == b"()"
    assert sandbox.ask(b"megabytes") == b"\n\xff" * (1 << 19)


def test_a_worker_is_prepared_with_its_arguments(worker: str) -> None:
    with closing(made(worker, arguments=("a b", "2"))) as sandbox:
        assert sandbox.ask(b"prepared") == b"('a b', '2')"


def test_one_that_is_not_kept_answers_once(worker: str) -> None:
    with closing(made(worker, num_kept=0)) as sandbox:
        first = pid(sandbox)
        assert not is_there(first)
        assert pid(sandbox) != first


@pytest.mark.parametrize("line", [b"memory", b"time", b"crash", b"file", b"endless", b"unknown"])
def test_work_that_ends_its_process_has_exceeded_it_and_others_go_on(
    sandbox: Sandbox, line: bytes
) -> None:
    before = pid(sandbox)
    with pytest.raises(SandboxExceeded):
        sandbox.ask(line)
    assert pid(sandbox) != before


def test_what_was_killed_says_nothing_of_the_work(sandbox: Sandbox) -> None:
    before = pid(sandbox)
    os.kill(before, signal.SIGKILL)
    assert pid(sandbox) != before
    with pytest.raises(SandboxLost):
        sandbox.ask(b"killed")
    assert pid(sandbox)


def test_a_process_that_does_not_get_on_is_ended(worker: str) -> None:
    with closing(made(worker, wall_seconds=0.5)) as sandbox:
        with pytest.raises(SandboxLost):
            sandbox.ask(b"stopped")


def test_time_that_is_over_before_it_is_sent_is_not_exceeded(worker: str) -> None:
    with closing(made(worker, wall_seconds=-1)) as sandbox, pytest.raises(SandboxLost):
        sandbox.ask(b"pid")


@pytest.mark.parametrize("script", ["kill -9 $$", "exit 0", "exit 1", None])
def test_a_system_that_starts_no_process_says_nothing_of_the_work(
    script: str | None, worker: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    interpreter = tmp_path / "python"
    if script is not None:
        interpreter.write_text(f"#!/bin/sh\n{script}\n")
        interpreter.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    with pytest.raises(SandboxLost):
        made(worker).ask(b"pid")


def test_signals_of_a_terminal_or_a_supervisor_do_not_end_it(sandbox: Sandbox) -> None:
    process = pid(sandbox)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(process, number)
    assert pid(sandbox) == process


def test_it_has_no_variable_but_the_time_zone(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "XYZ-3")
    monkeypatch.setenv("MLX_SERVER_API_KEYS", "secret")
    # The interpreter sets the other one.
    assert sandbox.ask(b"zone") in (b"['TZ']", b"['LC_CTYPE', 'TZ']")


def test_others_are_answered_while_one_is_stuck(worker: str) -> None:
    sandbox = Sandbox(worker, SandboxLimits(cpu_seconds=1))
    with closing(sandbox), ThreadPoolExecutor() as threads:
        stuck = threads.submit(sandbox.ask, b"time")
        (other,) = {pid(sandbox) for _ in range(20)}
        assert not stuck.done()
        with pytest.raises(SandboxExceeded):
            stuck.result()
        assert pid(sandbox) == other


def test_only_so_many_processes_stay(worker: str) -> None:
    with closing(Sandbox(worker, SandboxLimits(cpu_seconds=1))) as sandbox:
        sandbox.warm_up()
        pids = {pid(sandbox) for _ in range(3)}
        assert [process.is_running for process in sandbox._free] == [False, True]
        assert is_there(pid(sandbox))
        assert [is_there(each) for each in pids].count(True) == 1


def test_a_process_ends_when_its_caller_gives_up(worker: str) -> None:
    sandbox = Sandbox(worker, SandboxLimits(cpu_seconds=1000), num_processes=1)
    interruption = Interruption()
    with closing(sandbox), ThreadPoolExecutor(1) as threads:
        before = pid(sandbox)
        asking = threads.submit(interruption.run, lambda: sandbox.ask(b"time"))
        wait_until(lambda: interruption._end is not None, "it is not asked")
        interruption.interrupt()
        with pytest.raises(Interrupted):
            asking.result(20)
        assert not is_there(before)
        assert pid(sandbox)
    # As one that gives up when the server has ended.
    sandbox._processes[0]._kill()


def test_processes_end_with_their_sandbox(worker: str) -> None:
    sandbox = made(worker)
    process = pid(sandbox)
    del sandbox
    assert not is_there(process)
