"""Exceptions as one line, and without the arrays that they keep alive."""

import traceback

from batching.errors import printable


def one_line(error: BaseException) -> str:
    text = printable(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def forget_locals(error: BaseException) -> None:
    """Drop the arrays that an exception's frames reference.

    A handler keeps the exception while the pool is allocated again, and beside the old pool
    and the graph of the failed step there may be no room for that.
    """
    while True:
        traceback.clear_frames(error.__traceback__)
        if (behind := error.__cause__ or error.__context__) is None:
            return
        error = behind
