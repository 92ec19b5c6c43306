"""Routers before replicas, with the files and command lines of deploy/routers."""

import csv
import os
import re
import shutil
import socket
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Final

import httpx

from scripts.cluster.child import Child
from scripts.cluster.ports import HOST, NO_CERTIFICATES, PortInUse, free_port, is_free
from scripts.server_process import ROOT, wait_until

FILES: Final = ROOT / "deploy" / "routers"

_CALL_TIMEOUT: Final = 10.0
# HAProxy is where only root's PATH leads.
PATH: Final = os.pathsep.join(
    [
        str(Path(sys.executable).parent),
        str(ROOT / ".venv-routers" / "bin"),
        os.environ.get("PATH", os.defpath),
        "/usr/sbin",
    ]
)


class NotInstalled(Exception):
    """The router's program is in no folder of the path."""

    def __init__(self, program: str, remedy: str) -> None:
        super().__init__(f"{program} is not installed: {remedy}")


class Router(Child):
    """A router's process before the servers at some URLs.

    folder: for its log (`NAME.log`) and its configuration.
    api_key: of the servers, if they have keys.
    environment: further variables of its command.
    options: further flags of its command.

    Raises:
        NotInstalled: its program is not there.
        PortInUse: another process listens on the port.
    """

    name: ClassVar[str]
    remedy: ClassVar[str] = "make cluster and make test-routers install it"

    def __init__(
        self,
        urls: Sequence[str],
        folder: Path,
        *,
        port: int | None = None,
        api_key: str | None = None,
        environment: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        if shutil.which(self.name, path=PATH) is None:
            raise NotInstalled(self.name, self.remedy)
        if port and not is_free(port):
            raise PortInUse(port)
        super().__init__(port, folder / f"{self.name}.log")
        self.urls = list(urls)
        self._folder = folder
        self._api_key = api_key
        self._environment |= {"PATH": PATH, **(environment or {})}
        self._options = list(options)

    def is_ready(self) -> bool:
        """Return whether it passes requests on to all servers."""
        return self.healthy() == set(self.urls)

    @abstractmethod
    def healthy(self) -> set[str]:
        """Return the URLs that it sends requests to now; none if it does not answer."""

    def join(self, url: str) -> None:
        """Have it route to one more server, and wait until it does."""
        self.urls.append(url)
        self._join(url)
        self.wait_until_ready()

    def leave(self, url: str) -> None:
        """Have it send a server no more requests; those in flight go on."""
        self.urls.remove(url)
        self._leave(url)
        self.wait_until_ready()

    @abstractmethod
    def _join(self, url: str) -> None: ...

    @abstractmethod
    def _leave(self, url: str) -> None: ...


class _WithWorkers(Router):
    """A router with a script in deploy/, whose `GET /workers` lists the servers."""

    def _command(self) -> list[str]:
        script = str(FILES / f"{self.name}.sh")
        metrics = ["--prometheus-port", str(free_port())]
        return [script, str(self.port), *self.urls, *metrics, *self._options]

    def healthy(self) -> set[str]:
        try:
            return {worker["url"] for worker in self._workers() if worker["is_healthy"]}
        except httpx.HTTPError:
            return set()

    def _workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self._call("GET", "/workers").json()["workers"]
        return workers

    def _call(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        response = httpx.request(
            method,
            self.url + path,
            headers=headers,
            timeout=_CALL_TIMEOUT,
            trust_env=False,
            verify=NO_CERTIFICATES,
            **arguments,
        )
        return response.raise_for_status()


class Smg(_WithWorkers):
    """smg: `POST /workers` and `DELETE /workers/ID` while it runs."""

    name = "smg"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self._api_key:
            # Of clients it then takes the same one.
            self._environment["SMG_API_KEY"] = self._api_key

    def _join(self, url: str) -> None:
        # One that has left is there until its requests have ended.
        wait_until(lambda: url not in self._ids(), f"{url} still leaves")
        self._call("POST", "/workers", json={"url": url})

    def _leave(self, url: str) -> None:
        self._call("DELETE", f"/workers/{self._ids()[url]}")

    def _ids(self) -> dict[str, str]:
        return {worker["url"]: worker["id"] for worker in self._workers()}


class VllmRouter(_WithWorkers):
    """vllm-router: `POST /add_worker` and `POST /remove_worker` while it runs."""

    name = "vllm-router"

    def _join(self, url: str) -> None:
        self._call("POST", "/add_worker", params={"url": url})

    def _leave(self, url: str) -> None:
        self._call("POST", "/remove_worker", params={"url": url})


class HAProxy(Router):
    """HAProxy: its file is written again, and its master process reads it."""

    name = "haproxy"
    remedy = "the system's packages have it"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # Beside the log its path could be longer than a socket's may be.
        self._sockets = TemporaryDirectory()

    def _join(self, url: str) -> None:
        self._reload()

    def _leave(self, url: str) -> None:
        self._reload()

    def _command(self) -> list[str]:
        file = str(self._write())
        return [self.name, "-W", "-S", f"{self._socket},mode,600", "-f", file, *self._options]

    def _write(self) -> Path:
        """Write the file that ships, with this port and these servers."""
        text = (FILES / "haproxy.cfg").read_text(encoding="utf-8")
        text = re.sub(r"(?m)^  bind .*$", f"  bind {HOST}:{self.port}", text)
        text = _SERVERS.sub(self._servers, text)
        written = self._folder / "haproxy.cfg"
        written.write_text(text, encoding="utf-8")
        return written

    def _servers(self, found: re.Match[str]) -> str:
        """Return the lines of all servers, made of the last one of some."""
        options = found["options"]
        addresses = [url.removeprefix("http://") for url in self.urls]
        ports = [address.rpartition(":")[2] for address in addresses]
        lines = [
            f"  server {port} {address} " + re.sub(r"(id |servers/)\d+", rf"\g<1>{port}", options)
            for port, address in zip(ports, addresses, strict=True)
        ]
        return "\n".join(lines) + "\n"

    def _reload(self) -> None:
        """Have a new process read the file; streams go on in the old one.

        Not with SIGUSR2, which a master that has just started loses.
        """
        self._write()
        before = self._worker()
        self._ask("reload")
        wait_until(lambda: self._worker() not in (None, before), f"no reload: {self.log}")

    def _worker(self) -> str | None:
        """Return the id of the process that takes connections."""
        found = re.search(r"^(\d+)\s+worker", self._ask("show proc"), re.MULTILINE)
        return found[1] if found else None

    def healthy(self) -> set[str]:
        rows = csv.DictReader(self._ask("@1 show stat").splitlines())
        # Of those that track another one it is `no check`.
        return {
            f"http://{row['addr']}" for row in rows if row["addr"] and row["status"][:2] == "UP"
        }

    @property
    def _socket(self) -> Path:
        return Path(self._sockets.name) / "master"

    def _ask(self, command: str) -> str:
        """Return what the master process answers; nothing if it does not."""
        with socket.socket(socket.AF_UNIX) as master:
            master.settimeout(_CALL_TIMEOUT)
            try:
                master.connect(str(self._socket))
                master.sendall(f"{command};quit\n".encode())
                with master.makefile("rb") as answer:
                    return answer.read().decode()
            except OSError:
                return ""


_SERVERS: Final = re.compile(r"(?m)(?:^  server \S+ \S+ (?P<options>.*)\n)+")

ROUTERS: Final[dict[str, type[Router]]] = {
    router.name: router for router in (Smg, VllmRouter, HAProxy)
}
