"""What belongs to the process, and is as it was after each test."""

import signal
from collections.abc import Iterator

import pytest

from app.ranks import first_rank, other_rank
from batching.ranks.heartbeats import no_guard

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (first_rank, other_rank):
        # It would end the tests with a rank that hangs.
        monkeypatch.setattr(module, "exit_later", no_guard)
    monkeypatch.setattr(first_rank, "_LAST_SECONDS", 3600.0)
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
