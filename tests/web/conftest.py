"""A browser for all tests, and for each test pages that report what goes wrong in them."""

from collections.abc import Iterator
from typing import Any

import pytest

from scripts.browser import browser
from scripts.server_process import Server
from tests.web.visit import Visit, new_visit, scripted_server


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with scripted_server() as started:
        started.address()
        yield started
        assert started.stop() == 0
        assert "Traceback" not in started.log


@pytest.fixture
def visit(chromium: Any, server: Server) -> Iterator[Visit]:
    with new_visit(chromium, server.url) as visit:
        yield visit
