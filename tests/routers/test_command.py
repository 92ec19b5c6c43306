"""`python -m scripts.cluster`, as `make cluster` starts it."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from scripts.cluster.ports import free_port, is_free
from scripts.server_process import ServerProcess, wait_until

ENDED = r"ended with -9 and is started again"


@pytest.fixture
def command(model: Path, tmp_path: Path) -> Iterator[tuple[ServerProcess, int]]:
    """Return the command's process, and the port of its router."""
    port = free_port()
    options = ["--replicas", "2", "--port", str(port), "--data", str(tmp_path)]
    environment = {**os.environ, "MLX_SERVER_MODEL": str(model)}
    with ServerProcess([sys.executable, "-m", "scripts.cluster", *options], environment) as started:
        yield started, port


def test_it_starts_again_what_ends_and_ends_all(command: tuple[ServerProcess, int]) -> None:
    process, port = command
    url = process.wait_for_line(r"^smg: (\S+)$")[1]
    assert url == f"http://127.0.0.1:{port}/v1"
    process.wait_for_line(r"^replica 2: ")
    replicas = re.findall(r"^replica \d: (\S+)", process.log, re.MULTILINE)
    assert httpx.get(f"{url}/models").json()["data"][0]["id"] == "small"

    killed, *others = [pid for pid in children(process.pid) if "app" in command_line(pid)]
    os.kill(killed, signal.SIGKILL)
    process.wait_for_line(ENDED)
    wait_until(lambda: all(map(is_ready, replicas)), "a replica is not back")

    assert process.stop() == 0
    ports = [int(address.rpartition(":")[2]) for address in replicas]
    assert all(map(is_free, [port, *ports]))
    assert not any(map(is_alive, others))


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").split("\0")


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.HTTPError:
        return False
