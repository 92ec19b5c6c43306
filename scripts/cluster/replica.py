"""One server of several."""

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import httpx

from scripts.cluster.ports import EVENTS, HOST, REPLAYS, free_port
from scripts.server_process import ServerFailed, ServerProcess, server_environment, wait_until

_START_TIMEOUT: Final = 120.0
_PROBE_TIMEOUT: Final = 2.0
_NUM_KEY_BYTES: Final = 32


class Replica:
    """A server process on a port and a data folder that stay its own when it is started again.

    settings: variables without their prefix, as for `Server`.
    kv_events: publish what its prefix cache has, where vllm-router.sh expects it.
    folder: what it stores (`data-NAME`) and its log (`replica-NAME.log`) are there.
    python: the interpreter of an environment with the server; `SERVER_PYTHON`, or else this one.

    `start`, `stop`, `kill`, `pause` and `resume` may be called in any state.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        settings: Mapping[str, str] | None = None,
        *,
        port: int | None = None,
        kv_events: bool = False,
        python: str | None = None,
    ) -> None:
        self.name: Final = name
        self.port: Final = port or free_port()
        self.url: Final = f"http://{HOST}:{self.port}"
        self.log: Final = folder / f"replica-{name}.log"
        self.data: Final = folder / f"data-{name}"
        self._python = python or os.environ.get("SERVER_PYTHON") or sys.executable
        self._settings = {
            **(settings or {}),
            "host": HOST,
            "port": str(self.port),
            "data_dir": str(self.data),
            **(self._event_settings() if kv_events else {}),
        }
        self._process: ServerProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int | None:
        """None unless it runs."""
        return self._process.pid if self._process and self.is_running else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.exit_status is None

    @property
    def exit_status(self) -> int | None:
        """Of its last run; None while it runs and before the first one."""
        return self._process.exit_status if self._process else None

    def start(self) -> None:
        """Start it, unless it runs; `wait_until_ready` says when it takes requests."""
        if self.is_running:
            return
        self.kill()  # what remains of its last run
        self.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._process = ServerProcess(
            [self._python, "-m", "app"], server_environment(self._settings), output=self.log
        )

    def wait_until_ready(self, timeout: float = _START_TIMEOUT) -> None:
        """Wait until it takes requests.

        Raises:
            ServerFailed: it has ended; the text has what it wrote.
            TimeoutError: it takes too long.
        """
        wait_until(self.has_started, f"{self.url} is not ready: {self.log}", timeout)

    def has_started(self) -> bool:
        """Return whether it takes requests.

        Raises:
            ServerFailed: it has ended; the text has what it wrote.
        """
        if self._process is not None and not self.is_running:
            log = self._process.log.strip()
            raise ServerFailed(log or f"{self.url} ended with {self.exit_status}")
        return self.is_ready()

    def is_ready(self) -> bool:
        return self.get("/ready") is not None

    def get(self, path: str) -> Any:
        """Return the JSON of a path; None if it does not answer with a 200 and JSON."""
        try:
            response = httpx.get(self.url + path, timeout=_PROBE_TIMEOUT, trust_env=False)
            return response.json() if response.status_code == httpx.codes.OK else None
        except (httpx.HTTPError, ValueError):
            return None

    def stop(self) -> int | None:
        """Ask it to end, and wait; return its exit status, None if it never ran."""
        return self._process.stop() if self._process else None

    def terminate(self) -> None:
        """Ask it to end, and do not wait."""
        if self._process:
            self._process.terminate()

    def kill(self) -> int | None:
        """End it as a crash would; return its exit status, None if it never ran."""
        return self._process.kill() if self._process else None

    def pause(self) -> None:
        if self._process:
            self._process.pause()

    def resume(self) -> None:
        if self._process:
            self._process.resume()

    def restart(self) -> None:
        """Stop it, start it again and wait until it is ready."""
        self.stop()
        self.start()
        self.wait_until_ready()

    def _event_settings(self) -> dict[str, str]:
        return {
            "kv_events": f"tcp://{HOST}:{self.port + EVENTS}",
            "kv_events_replay": f"tcp://{HOST}:{self.port + REPLAYS}",
        }


def share_signing_key(replicas: list[Replica]) -> None:
    """Let all sign with one key, so that each takes the reasoning that another one has signed.

    A folder that has a key keeps it, and the others get the first one's.
    """
    files = [replica.data / "signing.key" for replica in replicas]
    key = next((file.read_bytes() for file in files if file.exists()), None)
    key = key or secrets.token_bytes(_NUM_KEY_BYTES)
    for file in files:
        if not file.exists():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.touch(mode=0o600)
            file.write_bytes(key)
