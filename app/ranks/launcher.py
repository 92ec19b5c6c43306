"""Starts the processes of the other ranks, here and by ssh, and ends them."""

import os
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import app
from app.observability.logs import print_stderr
from app.ranks.mlx_environment import LAUNCHED_VARIABLE, RANK_VARIABLE
from app.ranks.plan import RankPlan
from app.settings import ENV_PREFIX, Settings, env_name
from app.settings.engine_settings import EngineSettings
from batching import CannotJoin

_HERE: Final = ("localhost", "127.0.0.1")
# No question can be answered, and a host that does not answer is known soon.
_SSH: Final = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "--")
# What the other ranks need to know: nothing of clients, keys or stored data.
_PASSED: Final = {*EngineSettings.model_fields, "trust_remote_code", "step_timeout"} | {
    "log_level",
    "log_format",
}
_OWN: Final = {"ranks", "ranks_backend", "ranks_host", "ranks_port"}
# A command shows what is in it to all users of both machines, so these variables come as lines; an empty one ends them.
_READ_VARIABLES: Final = (
    'while IFS= read -r line && [ -n "$line" ]; do export "$line"; done; exec "$@"'
)
_MAX_LINE: Final = 8192
# Seconds in which a process ends that rank 0 has told to, and in which its last line is read.
_END_SECONDS: Final = 3.0
_LINE_SECONDS: Final = 1.0


@dataclass
class _Started:
    """A process, or the ssh that runs it elsewhere."""

    rank: int
    host: str
    process: subprocess.Popen[bytes]
    last_line: str = ""

    def tell(self, variables: Mapping[str, str]) -> None:
        """Send what `_READ_VARIABLES` reads."""
        stream = self.process.stdin
        assert stream is not None
        lines = [f"{name}={value}\n" for name, value in variables.items()]
        # It may have ended.
        with suppress(BrokenPipeError):
            os.write(stream.fileno(), "".join([*lines, "\n"]).encode())

    def forward(self) -> None:
        """Print the lines of the process with its rank in front."""
        stream = self.process.stdout
        assert stream is not None
        while piece := stream.readline(_MAX_LINE):
            self.last_line = piece.decode(errors="replace").rstrip()
            print_stderr(f"rank {self.rank}: {self.last_line}")


class Launcher:
    """The processes of the other ranks; they end when rank 0 does."""

    def __init__(self, plan: RankPlan, settings: Settings) -> None:
        self._plan, self._settings = plan, settings
        self._started: list[_Started] = []
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start all of them.

        Raises:
            CannotJoin: one cannot be started.
        """
        for rank, host in enumerate(self._plan.hostfile.names[1:], start=1):
            told = self._plan.hostfile.variables
            variables = member_variables(self._settings, self._plan, rank)
            is_here = host in _HERE or host == socket.gethostname()
            program = [sys.executable, "-m", "app", "serve"]
            command = program if is_here else _ssh(host, variables, program)
            try:
                process = subprocess.Popen(
                    command,
                    # It ends with this process, however that ends: also behind ssh, which passes on the end of the input.
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env={**_environment(), **told, **variables} if is_here else None,
                    # A terminal's signals are for rank 0, which ends the others when it has ended its requests.
                    start_new_session=True,
                )
            except OSError as error:
                reason = f"{command[0]}: {error.strerror}"
                raise CannotJoin(f"rank {rank} ({host}) cannot be started: {reason}") from None
            started = _Started(rank, host, process)
            self._started.append(started)
            if not is_here:
                started.tell(told)
            thread = threading.Thread(target=started.forward, name="rank-lines", daemon=True)
            self._threads.append(thread)
            thread.start()

    def check(self) -> None:
        """Check that all run.

        Raises:
            CannotJoin: one has ended.
        """
        for started, thread in zip(self._started, self._threads, strict=True):
            if (status := started.process.poll()) is not None:
                thread.join(_LINE_SECONDS)
                name = f"rank {started.rank} ({started.host})"
                reason = f": {started.last_line}" if started.last_line else ""
                raise CannotJoin(f"{name} has ended with status {status}{reason}")

    def kill(self) -> None:
        """End the processes that still run: also those that are stopped."""
        for started in self._started:
            started.process.kill()

    def close(self) -> None:
        """Wait until the processes have ended, which rank 0 has told them to; kill those that do not."""
        for started in self._started:
            with suppress(subprocess.TimeoutExpired):
                started.process.wait(_END_SECONDS)
        self.kill()
        for started, thread in zip(self._started, self._threads, strict=True):
            started.process.wait()
            thread.join(_LINE_SECONDS)
            for stream in (started.process.stdin, started.process.stdout):
                assert stream is not None
                stream.close()


def member_variables(settings: Settings, plan: RankPlan, rank: int) -> dict[str, str]:
    """Return the variables of the environment that make a process a rank; there are no secrets among them."""
    variables = {
        env_name(field): _text(value)
        for field in settings.model_fields_set & _PASSED - _OWN
        if (value := getattr(settings, field)) is not None
    }
    host, port = plan.control_address
    return {
        **variables,
        env_name("ranks"): plan.hostfile.to_json(),
        env_name("ranks_backend"): plan.backend,
        env_name("ranks_host"): host,
        env_name("ranks_port"): str(port),
        RANK_VARIABLE: str(rank),
        LAUNCHED_VARIABLE: "1",
        "PYTHONPATH": str(Path(app.__file__).parents[1]),
    }


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _environment() -> dict[str, str]:
    """Return the variables of this process but for its settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}


def _ssh(host: str, variables: Mapping[str, str], program: Sequence[str]) -> Sequence[str]:
    """Return a command that starts a program on another host."""
    assigned = [f"{name}={value}" for name, value in variables.items()]
    read = ["sh", "-c", _READ_VARIABLES, "sh", "env", *assigned, *program]
    return [*_SSH, host, f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(read)}"]
