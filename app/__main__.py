"""`mlx-batch-server` and `python -m app`: the process, before and after what it is for.

Little is imported here: the rest takes seconds, in which a signal may come already.
"""

import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Final, NoReturn

from app.server.stop_signals import stop_signals

_KILLED_BY: Final = 128  # a shell's status of a process that a signal ended, less its number
# macOS takes no more than `kern.maxfilesperproc`, whatever the hard limit is.
_MAX_FILES: Final = (65_536, 49_152, 24_576, 10_240)


def start() -> NoReturn:
    """Be the server."""
    open_standard_files()
    # In a container this is process 1, for which the default of SIGTERM would be to do nothing.
    for number in stop_signals():
        signal.signal(number, stop_at_once)
    allow_connections()
    from app.cli import main

    leave(main(sys.argv[1:]))


def stop_at_once(number: int, _: object = None) -> NoReturn:
    """End before there is anything to finish; the server has a better answer to a signal."""
    with suppress(OSError):
        os.write(2, b"stopped before it was ready\n")
    os._exit(_KILLED_BY + number)


def open_standard_files() -> None:
    """Fill closed standard files, so that no socket gets their number and their output."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def allow_connections() -> None:
    """Open as many files as this process may: each connection is one."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    for files in _MAX_FILES:
        most = files if limit == resource.RLIM_INFINITY else min(files, limit)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, limit))
            return


def leave(status: int) -> NoReturn:
    """End the process now.

    Not by returning: a step that never ends would be waited for, and a standard error that
    cannot be written to would turn the status into 120.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    start()
