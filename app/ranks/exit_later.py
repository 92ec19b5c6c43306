"""Ends a process in which not even Python's threads run."""

import faulthandler


def exit_later(seconds: float | None) -> None:
    """End this process with status 1 in so many seconds, unless this is called again by then; None lets it live.

    It needs no lock of the interpreter, and says in the log what each thread did.
    """
    if seconds is None:
        faulthandler.cancel_dump_traceback_later()
    else:
        faulthandler.dump_traceback_later(seconds, exit=True)
