"""A server for all agents, and a home for each test."""

from collections.abc import Iterator

import pytest

from scripts.server_process import Server
from tests.agents.programs import scripted_server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with scripted_server() as started:
        started.address()
        yield started
        assert started.stop() == 0
        assert "Traceback" not in started.log


@pytest.fixture(scope="session")
def seeing_server() -> Iterator[Server]:
    """Serve a model that takes images."""
    with scripted_server("scripted_vision") as started:
        started.address()
        yield started
        assert started.stop() == 0
        assert "Traceback" not in started.log
        assert "status=4" not in started.log


@pytest.fixture(scope="session")
def small_server() -> Iterator[Server]:
    """Serve a context that is too short for what agents send."""
    with scripted_server(max_model_len="2048") as started:
        started.address()
        yield started
        assert started.stop() == 0
