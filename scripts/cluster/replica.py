"""One server of several."""

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import httpx

from scripts.cluster.child import Child
from scripts.cluster.ports import EVENTS, HOST, NO_CERTIFICATES, REPLAYS
from scripts.server_process import server_environment

_PROBE_TIMEOUT: Final = 2.0
_NUM_KEY_BYTES: Final = 32


class Replica(Child):
    """A server process on a port and a data folder that stay its own when it is started again.

    settings: variables without their prefix, as for `Server`.
    kv_events: publish what its prefix cache has, where vllm-router.sh expects it.
    folder: what it stores (`data-NAME`) and its log (`replica-NAME.log`) are there.
    python: the interpreter of an environment with the server; `SERVER_PYTHON`, or else this one.
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
        super().__init__(port, folder / f"replica-{name}.log")
        self.name: Final = name
        self.data: Final = folder / f"data-{name}"
        self._python = python or os.environ.get("SERVER_PYTHON") or sys.executable
        self._environment = server_environment(
            {
                **(settings or {}),
                "host": HOST,
                "port": str(self.port),
                "data_dir": str(self.data),
                **(self._event_settings() if kv_events else {}),
            }
        )

    def _command(self) -> list[str]:
        self.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        return [self._python, "-m", "app"]

    def is_ready(self) -> bool:
        return self.get("/ready") is not None

    def get(self, path: str) -> Any:
        """Return the JSON of a path; None if it does not answer with a 200 and JSON."""
        try:
            response = httpx.get(
                self.url + path, timeout=_PROBE_TIMEOUT, trust_env=False, verify=NO_CERTIFICATES
            )
            return response.json() if response.status_code == httpx.codes.OK else None
        except (httpx.HTTPError, ValueError):
            return None

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
