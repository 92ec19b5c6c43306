"""Gates that end badly, each in its own way."""

import os
import threading

from scripts.gpu_check.record import Options, Record


def crash(options: Options, record: Record) -> None:
    """Kill the process behind a row, as a fault of a driver does."""
    record.table("row")
    record.row("found before")
    os.abort()


def fail(options: Options, record: Record) -> None:
    raise RuntimeError(f"planted in {__file__}")


def hang(options: Options, record: Record) -> None:
    threading.Event().wait()


def wrong(options: Options, record: Record) -> None:
    """Find something wrong, and go on."""
    right(options, record)
    record.expect(False, "row 0 is off by 1")


def right(options: Options, record: Record) -> None:
    record.table("row")
    record.row("found")
