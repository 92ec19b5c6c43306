"""Ends a run by SIGINT and SIGTERM, so that no server is left behind."""

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

T = TypeVar("T")

_ENDING: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM, as at Ctrl-C; also in a job of the background."""
    # A background job starts with SIGINT ignored.
    before = {number: signal.signal(number, signal.default_int_handler) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_until_signal(measurement: Coroutine[Any, Any, T]) -> T:
    """Run it in an event loop; a signal cancels it.

    Raises:
        KeyboardInterrupt: by SIGINT or SIGTERM.
    """
    return asyncio.run(_until_signal(measurement))


async def _until_signal(measurement: Coroutine[Any, Any, T]) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(measurement)
    before = {number: signal.getsignal(number) for number in _ENDING}
    for number in _ENDING:
        # A plain handler is not called while the loop waits, if the signal comes as it begins to.
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
