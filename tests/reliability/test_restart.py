"""Unplanned ends and starts: a crash, a port in use, a log that cannot be written."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from scripts.server_process import Address, Server, wait_until
from scripts.soak.client import CHAT, Outcome, ask
from scripts.soak.prober import probe
from tests.support.live import ask_golden, golden_cases, golden_request, live_server

pytestmark = pytest.mark.timeout(240)


def free_address() -> Address:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return Address(*sock.getsockname())


@contextmanager
def serving_at(address: Address, server: Server) -> Iterator[Server]:
    """Wait until a server that may have no log is ready."""
    with server:
        wait_until(lambda: probe(address, "/ready") is not None, f"not ready: {server.log}")
        yield server


async def be_cut_off(server: Server, address: Address) -> Outcome:
    """Be in the middle of an answer while the server crashes."""
    body = golden_request(golden_cases(1)[0], max_tokens=8000, ignore_eos=True)
    return await ask(address, CHAT, body, on_head=lambda _: server.send_signal(signal.SIGKILL))


def close_standard_error() -> None:
    os.close(2)


def test_after_a_crash_the_same_port_serves_again() -> None:
    """The second start has nowhere to log to, which does not stop it."""
    address = free_address()
    with serving_at(address, live_server(port=str(address.port))) as server:
        outcome = asyncio.run(be_cut_off(server, address))
        assert outcome.broken is not None
        assert not outcome.is_done
        assert server.wait() == -signal.SIGKILL
    with serving_at(
        address, live_server(port=str(address.port), preexec=close_standard_error)
    ) as server:
        assert asyncio.run(ask_golden(address)) == []
        assert server.stop() == 0
        assert server.log == ""


def test_a_log_on_a_full_disk_does_not_stop_the_server() -> None:
    address = free_address()
    with open("/dev/full", "wb") as full:
        server = live_server(port=str(address.port), stderr=full.fileno())
    with serving_at(address, server):
        assert asyncio.run(ask_golden(address)) == []
        assert server.stop() == 0
