"""What is logged and how: lines for people, or JSON for machines; to standard error."""

import json
import logging
import sys
from datetime import UTC, datetime

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


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


def say(line: str) -> None:
    """Write a line for the person who started the server; one that cannot be written is dropped."""
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        # There is no standard error, its disk is full, or it was closed.
        return


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
