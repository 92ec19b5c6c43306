"""What is logged and how: lines for people, or JSON for machines; to standard error."""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from traceback import StackSummary, walk_tb
from typing import Final

# How much of an exception is told: frames, the innermost ones, and exceptions behind it.
_MAX_FRAMES: Final = 12
_MAX_DEPTH: Final = 3

TEXT_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure(level: str, log_format: str) -> None:
    """Have everything from `level` up logged as `text` or as `json`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if log_format == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # A line that cannot be written (the disk is full, the reader has gone) is dropped, and
    # nobody is told about that on the same closed way.
    logging.raiseExceptions = False
    # uvicorn tells of each start and stop what we say ourselves; sse-starlette's debug
    # lines would log the text of answers.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("sse_starlette").setLevel(logging.INFO)


def print_stderr(line: str) -> None:
    """Write a line for the person who started the server; one that cannot be written is dropped."""
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        # There is no standard error, its disk is full, or it was closed.
        return


def logfmt(fields: Mapping[str, object]) -> str:
    """Return `name=value` pairs; no value has a space."""
    return " ".join(f"{name}={'-' if value is None else value}" for name, value in fields.items())


def summarize_exception(error: BaseException, depth: int = _MAX_DEPTH) -> str:
    """Return the type of an exception and where it came from, innermost first, in one line.

    Not its message, which may hold what a client sent.
    """
    frames = StackSummary.extract(
        walk_tb(error.__traceback__), limit=-_MAX_FRAMES, lookup_lines=False
    )
    places = " < ".join(
        f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}"
        for frame in reversed(frames)
    )
    behind = [summarize_exception(e, depth - 1) for e in _behind(error)] if depth > 1 else []
    return "; from ".join([f"{type(error).__qualname__} at {places}", *behind])


def _behind(error: BaseException) -> list[BaseException]:
    """Return the exceptions that led to one."""
    if isinstance(error, BaseExceptionGroup):
        return list(error.exceptions[:_MAX_DEPTH])
    cause = error.__cause__
    if cause is None and not error.__suppress_context__:
        cause = error.__context__
    return [] if cause is None else [cause]


class JsonLines(logging.Formatter):
    """One object a line; a record's `fields` stand beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
