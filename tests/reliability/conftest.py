"""The live server that most of these tests share."""

import os
from collections.abc import Iterator

import pytest

from scripts.server_process import Address, Server, num_open_files
from tests.support.live import AGING_RATE, MAX_QUEUED, check_all_is_well, live_server, warm_up


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    """Start a server with default settings but these; it must outlive all tests, and end well."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("open files are counted in /proc")
    with live_server(
        max_queued_requests=str(MAX_QUEUED),
        aging_rate=str(AGING_RATE),
        write_timeout="2",
        pooling="mean",
    ) as started:
        yield warm_up(started)
        assert started.stop() == 0
        assert "Traceback" not in started.log


@pytest.fixture(scope="module")
def all_is_well_in_the_end(server: Server) -> Iterator[None]:
    """Fail a module after which requests, connections or wrong answers are left."""
    num_files = num_open_files(server.pid)
    yield
    check_all_is_well(server, num_files)


@pytest.fixture
def address(server: Server) -> Iterator[Address]:
    """Fail a test after which requests, connections or wrong answers are left."""
    num_files = num_open_files(server.pid)
    yield server.address()
    check_all_is_well(server, num_files)
