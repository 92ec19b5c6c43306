"""Three servers behind a router, and what happens to them: for `tests/routers`."""

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from time import sleep
from typing import Final

import httpx

from scripts.cluster.cluster import Cluster
from scripts.cluster.replica import Replica
from scripts.server_process import wait_until
from tests.support.asks import Ask

# What becomes of some requests that have not begun, if two servers die before it is known of the first.
LOST: Final[Mapping[str, Set[int]]] = {
    "smg": {500},
    "vllm-router": {500},
    "haproxy": {502, 503},
}
# Seconds within which a request is answered that waits for no server which has stopped, and within which a router finds
# out that one has: they take two and six at most on a machine that has nothing else to do.
BOUND: Final = 30.0
_POLL_INTERVAL: Final = 0.05
_NUM_POLLS: Final = 4


class Faults:
    """Three servers behind a router, and what happens to them."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.router = cluster.router
        self.num_kills = 0
        self._folder = folder
        self._gates = 0

    def ask(self, said: str, *, stream: bool = True, model: str = "small") -> Ask:
        return Ask(self.cluster.url, said, stream=stream, model=model)

    def spread(self, said: str, number: int) -> list[Ask]:
        """Ask for streams and others in such a way that not all are at one server."""
        made = range(number)
        return [Ask(self.cluster.url, said, stream=i % 2 == 0, is_session=True) for i in made]

    def held(self, *, stream: bool) -> tuple[Ask, Path]:
        """Ask for what is prefilled until there is a file, and wait until a server has it."""
        self._gates += 1
        gate = self._folder / f"gate{self._gates}"
        before = self._loads()
        ask = self.ask(f"held {gate} one two three", stream=stream)
        self._until_settled(before)
        return ask, gate

    def begun(self, number: int, to: int = 60) -> list[Ask]:
        """Ask for streams, and wait until each has begun."""
        asks = [self.ask(f"count {to}") for _ in range(number)]
        assert all(ask.begun.wait(BOUND) for ask in asks)
        return asks

    def busy(self) -> list[Replica]:
        """Return the servers that have requests, the one that has most first."""
        loads = self._loads()
        found = [replica for replica in self.cluster.replicas if loads[replica.name]]
        return sorted(found, key=lambda replica: -loads[replica.name])

    def busiest(self) -> Replica:
        """Return the server that has most requests, once one has any."""
        found: list[Replica] = []

        def is_one_busy() -> bool:
            found[:] = self.busy()
            return bool(found)

        wait_until(is_one_busy, "no server has a request")
        return found[0]

    def hold_slow_model(self) -> None:
        """Have each load of the model `slow` wait, which none has then."""
        self._write_slow("0.5")
        for replica in self.cluster.replicas:
            httpx.post(f"{replica.url}/models/unload", json={"model": "slow"}, timeout=BOUND)

    def load_slow_model(self) -> None:
        self._write_slow("1")

    def _write_slow(self, text: str) -> None:
        # At once: a load would take an empty file for a fault.
        new = self._folder / "new"
        new.write_text(text)
        new.replace(self._folder / "slow")

    def kill(self, replica: Replica) -> None:
        """End a server as a crash would, another one that has crashed being known."""
        self.until_known()
        self.kill_at_once([replica])

    def kill_at_once(self, replicas: Sequence[Replica]) -> None:
        """End servers as a crash of all of them would."""
        for replica in replicas:
            self.num_kills += 1
            replica.kill()

    def until_known(self) -> None:
        """Wait until the router sends requests to none that has ended or is paused, and to all others."""
        urls = {r.url for r in self.cluster.replicas if r.is_running and r.is_ready()}
        wait_until(lambda: self.router.healthy() == urls, "one that is gone is routed to", BOUND)

    def heal(self) -> None:
        """Start what does not run, let go on what is paused, and wait until they are routed to."""
        for replica in self.cluster.replicas:
            replica.resume()
            replica.start()
        self.cluster.wait_until_ready()

    def _loads(self) -> Counter[str]:
        replicas = [replica for replica in self.cluster.replicas if replica.is_running]
        found = {replica.name: replica.get("/load") for replica in replicas}
        return Counter({name: load["server_load"] for name, load in found.items() if load})

    def _until_settled(self, before: Counter[str]) -> None:
        """Wait until a server has one more request for a while: a router may ask another one for its tokens first."""
        num_polls, latest = 0, before

        def is_settled() -> bool:
            nonlocal num_polls, latest
            sleep(_POLL_INTERVAL)
            loads = self._loads()
            has_one_more = (loads - before).total() == 1
            num_polls = num_polls + 1 if has_one_more and loads == latest else 0
            latest = loads
            return num_polls >= _NUM_POLLS

        wait_until(is_settled, "no server has the request")


def scripted_python(folder: Path) -> Path:
    """Return what runs the server with a scripted model, whatever module it is told to run."""
    python = os.environ.get("SERVER_PYTHON", sys.executable)
    file = folder / "python"
    file.write_text(f'#!/bin/sh\nexec "{python}" -m tests.support.scripted_server\n')
    file.chmod(0o755)
    return file
