"""The programs that `make test-agents` has installed, each run in a home of its own against one server."""

import os
import re
import signal
import subprocess
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from scripts.server_process import Server, wait_until
from tests.support.fake_images import picture

INSTALLED: Final = Path(__file__).parents[2] / "build" / "agents"
MODEL: Final = "smollm2-135m-instruct"
SECRET: Final = "marmalade"
# An image in PNG.
PIXEL: Final = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
# Seconds after which programs give up on a stream that is silent, wherever that can be set.
IDLE_TIMEOUT: Final = 20
_TIMEOUT: Final = 150.0  # seconds; most runs take five
_BLOCK_SIZE: Final = 32
_LOGGED: Final = re.compile(
    r"client=\S+ prompt=(\d+) cached=(\d+) output=(\d+) .*reason=(\S+)$", re.MULTILINE
)


class LoggedRequest(NamedTuple):
    """A line of the server's request log; numbers are tokens."""

    num_prompt: int
    num_cached: int
    num_output: int
    reason: str


def logged_requests(server: Server) -> list[LoggedRequest]:
    """Return the requests that have ended, in that order."""
    found = _LOGGED.findall(server.log)
    return [LoggedRequest(int(p), int(c), int(o), reason) for p, c, o, reason in found]


def scripted_server(module: str = "scripted_server", **settings: Any) -> Server:
    """Start a server whose model does what the prompt says; all agents at once are in its batch."""
    return Server(("-m", f"tests.support.{module}"), max_num_seqs="32", **settings)


@dataclass(frozen=True)
class Workplace:
    """A home folder without any configuration, and a git repository in it with one file."""

    home: Path
    environment: Mapping[str, str]

    @property
    def folder(self) -> Path:
        return self.home / "work"

    @property
    def notes(self) -> Path:
        return self.folder / "notes.txt"

    def draw(self, width: int, colour: str) -> Path:
        """Make a picture in the folder, 30 pixels high."""
        path = self.folder / f"{colour}.png"
        path.write_bytes(picture(width, 30, colour))
        return path

    def run(
        self, command: Sequence[str | Path], prompt: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end; `prompt` is its standard input."""
        return subprocess.run(
            command,
            cwd=self.folder,
            env=dict(self.environment),
            input=prompt,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )

    def interrupt(self, command: Sequence[str | Path], prompt: str, server: Server) -> None:
        """Start a program, and end it once the server's model is writing."""
        num_before = server.log.count(_WRITING)
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=dict(self.environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdin is not None
            process.stdin.write(prompt)
            process.stdin.close()
            wait_until(lambda: server.log.count(_WRITING) > num_before, "the model never wrote")
        finally:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


_WRITING: Final = "the scripted model counts"


def workplace(home: Path, **environment: str) -> Workplace:
    """Make a home; the programs inherit nothing of this process but the path."""
    place = Workplace(home, {"PATH": os.environ["PATH"], "HOME": str(home), **environment})
    place.folder.mkdir()
    place.notes.write_text(f"the secret word is {SECRET}\n")
    subprocess.run(["git", "init", "-q"], cwd=place.folder, check=True)
    return place


@contextmanager
def requests_of(server: Server) -> Iterator[list[LoggedRequest]]:
    """Yield a list that has, after the block, the requests that ended during it."""
    num_before = len(logged_requests(server))
    requests: list[LoggedRequest] = []
    yield requests
    requests += logged_requests(server)[num_before:]


def wait_for_abort(server: Server, num_before: int) -> None:
    """Wait until one more request was aborted than before."""
    wait_until(lambda: num_aborted(server) > num_before, "no request was aborted")


def num_aborted(server: Server) -> int:
    return sum(request.reason == "aborted" for request in logged_requests(server))


def found_all_but_the_end(request: LoggedRequest, before: LoggedRequest) -> bool:
    """True if a turn found at least 95 % of what it shares with the one before it, in blocks."""
    shared = before.num_prompt // _BLOCK_SIZE * _BLOCK_SIZE
    return request.num_cached >= 0.95 * shared
