"""Servers that are killed, stopped or restarted behind each router: docs/replicas.md has the table.

The servers are real but for their model, which does as it is told.  What had not begun is never lost, and a
response that another server gives is the same.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import sleep
from typing import Final

import pytest

from scripts.cluster.cluster import Cluster
from scripts.cluster.replica import Replica
from scripts.cluster.router import ROUTERS
from scripts.server_process import wait_until
from tests.support.asks import Answer, Ask, End, Load, counted
from tests.support.clusters import StartCluster

# Of a stream whose server is gone.
CUT: Final[Mapping[str, End]] = {
    "smg": End.ERROR_EVENT,
    "vllm-router": End.CUT,
    "haproxy": End.CUT,
}
# Those that end what waits for a server that does not answer; behind the others it waits until that is killed.
ENDS_THE_WAIT: Final = {"haproxy"}
# Those that send a request to two servers at most, so that two which die within two seconds are too many.
TRIES_TWO: Final = {"haproxy"}
# Seconds within which a request is answered that waits for no server which has stopped: it takes two at most, and
# routers find out within six.
BOUND: Final = 30.0
# By all tests of a router.
NUM_KILLS: Final = 10
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

    def load_slow_model(self) -> None:
        """Let the load of the model `slow` end."""
        (self._folder / "slow").write_text("1")

    def kill(self, replica: Replica) -> None:
        """End a server as a crash would, another one that has crashed being known where that matters."""
        if self.router.name in TRIES_TWO:
            self.until_known()
        self.num_kills += 1
        replica.kill()

    def until_known(self) -> None:
        """Wait until the router sends requests to none that has ended or is paused, and to all others."""
        urls = {r.url for r in self.cluster.replicas if r.is_running and r.is_ready()}
        wait_until(lambda: self.router.healthy() == urls, "one that is gone is still routed to")

    def heal(self) -> None:
        """Start what does not run, and wait until it is routed to."""
        for replica in self.cluster.replicas:
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


@pytest.fixture(scope="module", params=ROUTERS)
def faults(
    request: pytest.FixtureRequest,
    model: Path,
    start_cluster: StartCluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Faults]:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "slow").write_text("0.5")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SERVER_PYTHON", str(scripted_python(folder)))
        cluster = start_cluster(request.param, num_replicas=3, models=f"slow={folder / 'slow'}")
    with cluster:
        yield Faults(cluster, folder)


@pytest.fixture(autouse=True)
def healed(faults: Faults) -> None:
    faults.heal()


def check(answers: Sequence[Answer], text: str) -> None:
    """Fail unless all are whole, and in time."""
    wrong = [a for a in answers if a.end is not End.COMPLETE or a.text != text or a.seconds > BOUND]
    assert wrong == []


def check_cut(faults: Faults, answers: Sequence[Answer], text: str) -> int:
    """Fail unless each is whole, or a beginning that ends as this router ends it; return how many are cut."""
    cut = [answer for answer in answers if answer.end is not End.COMPLETE]
    assert {answer.end for answer in cut} <= {CUT[faults.router.name]}, cut
    assert all(answer.has_begun and text.startswith(answer.text) for answer in cut), cut
    check([answer for answer in answers if answer.end is End.COMPLETE], text)
    return len(cut)


def test_idle_servers_are_killed(faults: Faults) -> None:
    for replica in faults.cluster.replicas[:2]:
        faults.kill(replica)
        asks = [faults.ask("say one two", stream=index % 2 == 0) for index in range(4)]
        check([ask.answer() for ask in asks], "one two")
        check([faults.ask("say one", stream=False).answer() for _ in range(4)], "one")


def test_servers_are_killed_under_load(faults: Faults) -> None:
    with Load(faults.cluster.url) as load:
        for replica in faults.cluster.replicas[1:]:
            load.wait_for(6)
            faults.kill(replica)
        load.wait_for(12)
    check_cut(faults, load.answers, load.text)


@pytest.mark.parametrize("turn", range(2))
def test_servers_are_killed_while_they_read_a_prompt(faults: Faults, turn: int) -> None:
    held = [faults.held(stream=stream) for stream in (True, False)]
    for replica in faults.busy():
        faults.kill(replica)
    for _, gate in held:
        gate.touch()
    check([ask.answer() for ask, _ in held], "one two three")


def test_servers_are_killed_in_the_middle_of_streams(faults: Faults) -> None:
    asks = faults.begun(6, to=120)
    num_gone = 0
    while num_gone < 2 and (busy := faults.busy()):
        faults.kill(busy[0])
        num_gone += 1
    answers = [ask.answer() for ask in asks]
    assert check_cut(faults, answers, counted(120)) >= num_gone == 2


def test_a_server_is_killed_while_it_loads_a_model(faults: Faults) -> None:
    ask = faults.ask("say loaded", model="slow")
    if faults.router.name == "smg":
        # It knows a server's first model only.
        assert ask.answer().status == 404
        return
    wait_until(lambda: bool(faults.busy()), "no server loads the model")
    faults.kill(faults.busy()[0])
    faults.load_slow_model()
    check([ask.answer()], "loaded")


def test_servers_are_restarted_one_after_the_other_under_load(faults: Faults) -> None:
    streams = faults.begun(3)
    with Load(faults.cluster.url, to=20) as load:
        for replica in faults.cluster.replicas:
            load.wait_for(4)
            assert replica.stop() == 0
            load.wait_for(4)
            faults.heal()
    check(load.answers, load.text)
    check([stream.answer() for stream in streams], counted(60))


def test_a_server_leaves_and_joins_under_load(faults: Faults) -> None:
    url = faults.cluster.replicas[0].url
    with Load(faults.cluster.url, to=20) as load:
        load.wait_for(4)
        faults.router.leave(url)
        load.wait_for(8)
        faults.router.join(url)
        load.wait_for(8)
    check(load.answers, load.text)


def test_a_server_stops_answering(faults: Faults) -> None:
    held, gate = faults.held(stream=False)
    [stopped] = faults.busy()
    streams = faults.begun(4, to=30)
    stopped.pause()
    at_once = [faults.ask("say one", stream=index % 2 == 0) for index in range(4)]
    faults.until_known()
    check([faults.ask("say one").answer() for _ in range(4)], "one")
    gate.touch()
    if faults.router.name in ENDS_THE_WAIT:
        check([held.answer()], "one two three")
    else:
        assert not held.is_over
        faults.kill(stopped)
        check([held.answer()._replace(seconds=0.0)], "one two three")
    check_cut(faults, [stream.answer() for stream in streams], counted(30))
    check([ask.answer() for ask in at_once], "one")
    stopped.resume()


def test_these_were_many_kills(faults: Faults) -> None:
    assert faults.num_kills >= NUM_KILLS
