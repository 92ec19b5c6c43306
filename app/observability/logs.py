"""Logging to standard error, as text or as JSON lines."""

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from traceback import StackSummary, walk_tb
from typing import Final

from app.storage.disk.database import StorageError

# The logger of lines for the operator, which are shown at any level of the log.
logger = logging.getLogger(__name__)
logger.setLevel(logging.DEBUG)

# Limits of the summary of an exception: innermost frames, and exceptions in its chain.
_MAX_FRAMES: Final = 12
_MAX_DEPTH: Final = 3

TEXT_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure(level: str, log_format: str) -> None:
    """Log everything from `level` up as `text` or as `json`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if log_format == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # A line that cannot be written (full disk, closed pipe) is dropped; reporting that would use
    # the same stream.
    logging.raiseExceptions = False
    # The server logs its start and stop itself; debug lines of sse-starlette contain responses.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("sse_starlette").setLevel(logging.INFO)


def print_stderr(text: str, level: int = logging.INFO) -> None:
    """Write lines for the operator to standard error, as JSON if the log format is JSON.

    Errors of writing are ignored.
    """
    if any(isinstance(h.formatter, JsonLines) for h in logging.getLogger().handlers):
        for line in text.splitlines():
            logger.log(level, "%s", line)
        return
    prefix = "warning: " if level == logging.WARNING else ""
    try:
        sys.stderr.write(f"{prefix}{text}\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        # There is no standard error, the disk is full, or the stream is closed.
        return


def logfmt(fields: Mapping[str, object]) -> str:
    """Return `name=value` pairs; the values contain no spaces."""
    return " ".join(f"{name}={'-' if value is None else value}" for name, value in fields.items())


def summarize_exception(error: BaseException, depth: int = _MAX_DEPTH) -> str:
    """Return the type and traceback of an exception in one line, innermost frame first.

    The message is left out, since it may contain text of a client, except for what the system or the
    database says about a disk.
    """
    frames = StackSummary.extract(
        walk_tb(error.__traceback__), limit=-_MAX_FRAMES, lookup_lines=False
    )
    locations = " < ".join(
        f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}"
        for frame in reversed(frames)
    )
    causes = [summarize_exception(e, depth - 1) for e in _causes(error)] if depth > 1 else []
    name = f"{type(error).__qualname__}{_reason(error)}"
    return "; from ".join([f"{name} at {locations}", *causes])


def _reason(error: BaseException) -> str:
    """Return why something cannot be read or written, in brackets; nothing of other exceptions."""
    if isinstance(error, StorageError):
        return f" ({error})"
    # Not `strerror`, which may be any text.
    return f" ({os.strerror(error.errno)})" if isinstance(error, OSError) and error.errno else ""


def _causes(error: BaseException) -> list[BaseException]:
    """Return the exceptions that an exception was raised from, or that a group consists of."""
    if isinstance(error, BaseExceptionGroup):
        return list(error.exceptions[:_MAX_DEPTH])
    cause = error.__cause__
    if cause is None and not error.__suppress_context__:
        cause = error.__context__
    return [] if cause is None else [cause]


class JsonLines(logging.Formatter):
    """One JSON object per line; the `fields` of a record become keys beside the message."""

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
