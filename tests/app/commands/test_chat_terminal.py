"""`chat` in a terminal of its own: what a user sees, types and stops."""

import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Final

from tests.support.fake_server import text_chunk
from tests.support.talking_server import COMMENT, Stream, TalkingServer, says

ROOT: Final = Path(__file__).parents[3]
PATIENCE: Final = 30.0  # seconds
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"
# As the entry point does, it has a handler of Ctrl-C; the terminal becomes that of its session.
PROGRAM: Final = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, lambda *_: sys.exit("stopped as a whole"))
from app.commands import chat
from tests.support.commands import run_command
sys.exit(run_command(chat, *sys.argv[1:]))
"""


class Terminal:
    """The user's end of a terminal."""

    def __init__(self, fd: int, process: "subprocess.Popen[bytes]") -> None:
        self._fd = fd
        self._process = process
        self._unread = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Return what is shown up to the end of a pattern."""
        deadline = monotonic() + PATIENCE
        while (found := re.search(pattern, self._unread)) is None:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - monotonic()))
            assert ready, f"no {pattern!r} in {self._unread!r}"
            self._unread += os.read(self._fd, 4096).decode(errors="replace")
        shown, self._unread = self._unread[: found.end()], self._unread[found.end() :]
        return shown

    def give_up(self) -> None:
        """Press Ctrl-C at the prompt: readline does not see one that comes while it handles a key."""
        state = Path(f"/proc/{self._process.pid}/stat")
        while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "S":
            os.sched_yield()
        self.type(CTRL_C)

    def wait_for_the_end(self) -> int:
        return self._process.wait(PATIENCE)


@contextmanager
def chatting(server: TalkingServer, *flags: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "INPUTRC": os.devnull}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "--url", server.url, *flags],
        env=variables,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_an_answer_streams_and_is_stopped_by_the_user(server: TalkingServer) -> None:
    server.models = {"data": [{"id": "toy", "status": {"value": "loading", "progress": 0.1}}]}
    events = [COMMENT, text_chunk("One, "), text_chunk("two")]
    server.answers += [Stream(events, is_open=True), says("Because.")]
    with chatting(server) as terminal:
        terminal.wait_for(r"/help lists commands[^>]*>>> ")
        terminal.type("Count\r")
        terminal.wait_for(r"loading toy 10 % \.\.\.")
        terminal.wait_for(r"One, two")
        terminal.type(CTRL_C)
        terminal.wait_for(r"\(stopped\)")
        server.wait_for_the_client_to_leave()
        terminal.wait_for(r">>> ")
        terminal.type("given up")
        terminal.wait_for(r"given up")
        terminal.give_up()
        terminal.wait_for(r">>> ")
        terminal.type("Why?\r")
        terminal.wait_for(r"Because\.[^>]*>>> ")
        terminal.type(CTRL_D)
        assert terminal.wait_for_the_end() == 0
    messages = [turn["content"] for turn in server.bodies[1]["messages"]]
    assert messages == ["Count", "One, two", "Why?"]


def test_lines_of_an_earlier_conversation_come_back(server: TalkingServer, tmp_path: Path) -> None:
    for _ in range(2):
        server.answers += [says("Yes.")]
    with chatting(server) as terminal:
        terminal.wait_for(r">>> ")
        terminal.type("Is it?\r")
        terminal.wait_for(r"Yes\.[^>]*>>> ")
        terminal.type("/exit\r")
        assert terminal.wait_for_the_end() == 0
    history = tmp_path / "state" / "mlx-batch-server" / "chat_history"
    assert history.read_text() == "Is it?\n/exit\n"
    assert history.stat().st_mode & 0o777 == 0o600
    with chatting(server) as terminal:
        terminal.wait_for(r">>> ")
        terminal.type(UP + UP)
        terminal.wait_for(r"Is it\?")
        terminal.type("\r")
        terminal.wait_for(r"Yes\.[^>]*>>> ")
    assert [body["messages"][0]["content"] for body in server.bodies] == ["Is it?"] * 2


def test_without_a_history_nothing_is_kept(server: TalkingServer, tmp_path: Path) -> None:
    with chatting(server, "--no-history") as terminal:
        terminal.wait_for(r">>> ")
        terminal.type("/system Be brief.\r")
        terminal.wait_for(r"system message: Be brief\.")
        terminal.type("/model\r")
        terminal.wait_for(r"\* toy")
        terminal.wait_for(r">>> ")
        terminal.type(CTRL_D)
        assert terminal.wait_for_the_end() == 0
    assert not (tmp_path / "state").exists()
