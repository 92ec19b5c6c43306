"""The entry point of `mlx-batch-server` and `python -m app`: the work before and after serving.

Little is imported at the top: the other imports take seconds, during which a signal may arrive.
"""

import os
import resource
import sys
from contextlib import suppress
from typing import Final, NoReturn

from app.server.stop_signals import set_stop_handler, stop_at_once

# macOS takes no more than `kern.maxfilesperproc`, whatever the hard limit is.
_MAX_FILES: Final = (65_536, 49_152, 24_576, 10_240)


def start() -> NoReturn:
    """Run the command and end the process with its status."""
    open_standard_files()
    # In a container this is process 1, for which the default of SIGTERM would be to do nothing.
    set_stop_handler(stop_at_once)
    allow_connections()
    from app.commands.parser import main

    leave(main(sys.argv[1:]))


def open_standard_files() -> None:
    """Open closed standard streams on the null device, so that no socket gets their descriptor."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def allow_connections() -> None:
    """Raise the limit of open files as far as allowed: each connection needs one."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    for files in _MAX_FILES:
        most = files if limit == resource.RLIM_INFINITY else min(files, limit)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, limit))
            return


def leave(status: int) -> NoReturn:
    """End the process immediately.

    Returning from the main thread would wait for a step that never ends, and would turn the status into
    120 if standard error cannot be written to.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    start()
