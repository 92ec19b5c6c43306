"""Which signals end the server, and what they do before it serves."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Final, NoReturn

KILLED_BY: Final = 128  # a shell's status of a process that a signal ended, less its number


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that this process ends with.

    A terminal that is closed sends SIGHUP.  `nohup` starts a process that ignores it, and so it stays.
    """
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *(() if is_ignored else (signal.SIGHUP,)))


def set_stop_handler(handler: Callable[[int, FrameType | None], object]) -> None:
    """Have all of them call a function with the signal's number."""
    for number in stop_signals():
        signal.signal(number, handler)


def stop_at_once(number: int, _: object = None) -> NoReturn:
    """End the process; the handler of signals that arrive before the server has its own."""
    with suppress(OSError):
        os.write(2, b"stopped before it was ready\n")
    os._exit(KILLED_BY + number)
