"""The servers under measurement: ours and its peers, running already or started for the run."""

import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from urllib.parse import urlsplit

import httpx

from scripts.server_process import ServerFailed, ServerProcess

_POLL_INTERVAL: Final = 0.1
# Of weights that are read from a slow disk.
_START_TIMEOUT: Final = 300.0
_RESPONSE_TIMEOUT: Final = 5.0
# Seconds.  Its requests are over or given up by then, so there is nothing to wait for.
_STOP_TIMEOUT: Final = 15.0
_LOG_TAIL: Final = 2000
_NAMED: Final = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)
_WITH_MODEL: Final = re.compile(r"(.*?)\s*#([^\s#]+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """How to get a server: at a URL, or by a command with `{port}` in it."""

    name: str
    model: str | None = None
    url: str | None = None
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Target:
    """A server that is ready; one that was started for the run is paused until its turn."""

    name: str
    url: str
    model: str
    process: ServerProcess | None = None

    @contextmanager
    def awake(self) -> Iterator[None]:
        if self.process is None:
            yield
            return
        self.process.resume()
        try:
            yield
        finally:
            self.process.pause()

    def premature_end(self) -> str | None:
        """Say how a server that was started ended, if it did."""
        if self.process is None or self.process.exit_status is None:
            return None
        return f"{self.name} ended with status {self.process.exit_status}: {_tail(self.process)}"


def our_server(model: str | None = None) -> ServerSpec:
    """Return this project's server with the settings of the environment, but for the address.

    Requests ask for greedy tokens, so the model's own sampling defaults are left out, as peers
    have none.
    """
    return ServerSpec(
        "ours",
        model,
        command=(sys.executable, "-m", "app"),
        environment={
            "MLX_SERVER_GENERATION_CONFIG": "openai",
            "MLX_SERVER_HOST": "127.0.0.1",
            "MLX_SERVER_PORT": "{port}",
        },
    )


def server_at(text: str) -> ServerSpec:
    """Read `[NAME=]URL[#MODEL]`.

    Raises:
        ValueError: it is no http URL.
    """
    name, url, model = _parts(text)
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no URL; it looks like http://127.0.0.1:8000")
    base = url.rstrip("/").removesuffix("/v1")
    return ServerSpec(name or parts.netloc, model, url=base)


def server_by_command(text: str) -> ServerSpec:
    """Read `[NAME=]COMMAND[#MODEL]`; no shell runs it, and `env A=B ...` sets a variable.

    Raises:
        ValueError: it has no `{port}` or unbalanced quotes.
    """
    name, line, model = _parts(text)
    command = tuple(shlex.split(line))
    if "{port}" not in line:
        raise ValueError(f"{line!r} has no {{port}} where the port belongs")
    return ServerSpec(name or Path(command[0]).name, model, command=command)


def _parts(text: str) -> tuple[str | None, str, str | None]:
    """Return the name, the rest and the model."""
    named = _NAMED.fullmatch(text)
    name, rest = (named[1], named[2]) if named else (None, text)
    with_model = _WITH_MODEL.fullmatch(rest)
    return (name, with_model[1], with_model[2]) if with_model else (name, rest, None)


@contextmanager
def fleet(
    specs: Sequence[ServerSpec], start_timeout: float = _START_TIMEOUT
) -> Iterator[list[Target]]:
    """Have the servers ready, those paused that are started here; end these in any case.

    Raises:
        ServerFailed: one of them does not start or does not respond.
    """
    with ExitStack() as stack:
        yield [_open(spec, stack, start_timeout) for spec in specs]


def _open(spec: ServerSpec, stack: ExitStack, start_timeout: float) -> Target:
    if spec.url is not None:
        return Target(spec.name, spec.url, spec.model or _first_model(spec.name, spec.url))
    port = str(_free_port())
    command = [word.replace("{port}", port) for word in spec.command]
    named = {name: value.replace("{port}", port) for name, value in spec.environment.items()}
    # Of this project's servers each needs a folder of its own.
    named["MLX_SERVER_DATA_DIR"] = stack.enter_context(TemporaryDirectory())
    process = ServerProcess(command, os.environ | named)
    stack.callback(process.stop, _STOP_TIMEOUT)
    url = f"http://127.0.0.1:{port}"
    _wait_until_ready(spec.name, url, process, start_timeout)
    target = Target(spec.name, url, spec.model or _first_model(spec.name, url), process)
    process.pause()
    return target


def _tail(process: ServerProcess) -> str:
    return process.log[-_LOG_TAIL:].strip()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
    return port


def _wait_until_ready(name: str, url: str, process: ServerProcess, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    with _http(url) as http:
        while not _is_ready(http):
            if process.exit_status is not None:
                reason = f"ended with status {process.exit_status}"
            elif time.monotonic() > deadline:
                reason = f"is not ready after {timeout:g} s"
            else:
                time.sleep(_POLL_INTERVAL)
                continue
            raise ServerFailed(f"{name} {reason}; it said:\n{_tail(process)}")


def _is_ready(http: httpx.Client) -> bool:
    """True if it is healthy or, where it has no `/health`, lists its models."""
    try:
        response = http.get("/health")
        if response.status_code == httpx.codes.NOT_FOUND:
            response = http.get("/v1/models")
    except httpx.HTTPError:
        return False
    return response.is_success


def _first_model(name: str, url: str) -> str:
    try:
        with _http(url) as http:
            model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    except httpx.HTTPError as error:
        raise ServerFailed(f"{name} at {url} cannot be asked for its models: {error}") from None
    except (ValueError, LookupError, TypeError):
        raise ServerFailed(f"{name} at {url} lists no model; name one: {url}#MODEL") from None
    return str(model)


def _http(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=_RESPONSE_TIMEOUT, trust_env=False)
