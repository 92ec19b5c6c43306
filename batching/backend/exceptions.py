"""Exceptions, told briefly and let go of."""

import traceback
from typing import Final

_MAX_MESSAGE: Final = 300


def one_line(error: BaseException) -> str:
    text = printable(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def printable(text: str) -> str:
    """Return one line, not too long, that does nothing to a terminal, of what others wrote."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in line[:_MAX_MESSAGE])


def forget_locals(error: BaseException) -> None:
    """Let go of the arrays that an exception's frames hold.

    Whoever logs it keeps it while the pool is made anew, and beside the old one and the
    graph of the failed step there may be no room for that.
    """
    while True:
        traceback.clear_frames(error.__traceback__)
        if (behind := error.__cause__ or error.__context__) is None:
            return
        error = behind
