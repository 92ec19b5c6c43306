"""SIGTERM under load: what runs is completed, what comes is rejected, no client hangs."""

import asyncio
import signal
from collections.abc import Iterator
from http import HTTPStatus

import pytest

from scripts.server_process import Address, Server, wait_until
from scripts.soak.client import CHAT, Outcome, ask, get
from tests.support.live import golden_cases, golden_request, live_server, status_of

pytestmark = pytest.mark.timeout(240)

NUM_STREAMS = 32
# So many that all answers together go on for the best part of a second.
NUM_TOKENS = 150


@pytest.fixture
def server() -> Iterator[Server]:
    """Start a server of the test's own, which ends it."""
    with live_server(shutdown_timeout="1000") as started:
        started.address()
        yield started


class Crowd:
    """Clients of a server that is about to stop; `are_taken` once each has the head of a stream."""

    def __init__(self, num_clients: int) -> None:
        self.are_taken = asyncio.Event()
        self._num_missing = num_clients

    def take(self, outcome: Outcome) -> None:
        self._num_missing -= 1
        if self._num_missing == 0:
            self.are_taken.set()


async def wait_until_not_ready(address: Address) -> Outcome:
    while (outcome := await get(address, "/ready")).status == HTTPStatus.OK:
        pass
    return outcome


def check_rejected(outcome: Outcome) -> None:
    assert outcome.status == HTTPStatus.SERVICE_UNAVAILABLE, outcome
    assert outcome.error is not None
    assert outcome.error["code"] == "shutting_down"
    assert 1 <= int(outcome.headers["retry-after"]) <= 120


def test_streams_in_flight_are_completed_and_new_requests_are_rejected(server: Server) -> None:
    """Two signals sent at once are one wish: a supervisor and a terminal may each send one.

    They are different ones, since of two alike the system may deliver only one.
    """
    address = server.address()
    body = golden_request(golden_cases(1)[0], max_tokens=NUM_TOKENS, ignore_eos=True)
    alone = asyncio.run(ask(address, CHAT, body))

    async def visit() -> tuple[list[Outcome], Outcome, list[Outcome], int | None]:
        crowd = Crowd(NUM_STREAMS)
        async with asyncio.TaskGroup() as group:
            streams = [
                group.create_task(ask(address, CHAT, body, on_head=crowd.take))
                for _ in range(NUM_STREAMS)
            ]
            await crowd.are_taken.wait()
            server.send_signal(signal.SIGTERM)
            server.send_signal(signal.SIGINT)
            not_ready = await wait_until_not_ready(address)
            late = [await ask(address, CHAT, body | {"stream": stream}) for stream in (True, False)]
            health = await status_of(address, "/health")
            assert not all(stream.done() for stream in streams), "the drain was too short to test"
        return [stream.result() for stream in streams], not_ready, late, health

    outcomes, not_ready, late, health = asyncio.run(visit())
    assert [str(outcome) for outcome in outcomes if not outcome.is_complete] == []
    assert {outcome.text for outcome in outcomes} == {alone.text}
    assert not_ready.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert health == HTTPStatus.OK
    for outcome in late:
        check_rejected(outcome)
    assert server.wait() == 0
    assert "Traceback" not in server.log


def test_a_signal_right_after_the_start_is_not_lost() -> None:
    with live_server() as server:
        server.wait_for_line("curl")
        server.send_signal(signal.SIGINT)
        assert server.wait() in (0, 128 + signal.SIGINT)
        assert "Traceback" not in server.log


def test_a_signal_while_the_model_loads_ends_the_start_in_one_line() -> None:
    with Server() as server:
        server.wait_for_line("^loading ")
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM
        assert len(server.log.splitlines()) == 2


def test_a_signal_while_the_program_itself_loads_leaves_no_traceback() -> None:
    """The imports take a second; Ctrl-C during that prints no page of text."""
    with Server() as server:
        wait_until(lambda: is_importing(server.pid), "it never loads anything")
        server.send_signal(signal.SIGINT)
        assert server.wait() in (130, -signal.SIGINT)
        assert "Traceback" not in server.log


def is_importing(pid: int) -> bool:
    """Tell whether a process has loaded an extension module of ours or of a library."""
    with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
        return "site-packages" in maps.read()
