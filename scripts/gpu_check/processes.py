"""Runs each check in a process of its own, so that one which crashes or hangs takes none along."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Final

from scripts.gpu_check.checks import Check
from scripts.gpu_check.record import Options, Record, Status

ROOT: Final = Path(__file__).parent.parent.parent
_CHILD: Final = "scripts.gpu_check.child"
# Beyond its own time, for the start of Python and of MLX, and for one step too many.
_GRACE: Final = 15.0
# Less is not worth the start.
_LEAST: Final = 5.0
_LINES_OF_ERROR: Final = 12


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a check, and how many seconds it took."""

    check: Check
    record: Record
    seconds: float

    @property
    def status(self) -> Status:
        assert self.record.status is not None, "a check has ended"
        return self.record.status


def run_all(checks: Sequence[Check], options: Options, seconds: float) -> Iterator[Outcome]:
    """Yield what becomes of each check within so many seconds for all."""
    deadline = monotonic() + seconds
    for check in checks:
        left = deadline - monotonic() - _GRACE
        if left < _LEAST:
            reason = f"the {seconds / 60:.0f} minutes of the whole check were over"
            yield Outcome(check, Record(status=Status.SKIPPED, notes=[reason]), 0.0)
            continue
        yield run_check(check, replace(options, seconds=min(check.seconds, left)))


def run_check(check: Check, options: Options, grace: float = _GRACE) -> Outcome:
    """Run a check to its end, or until its time is over."""
    began = monotonic()
    with TemporaryDirectory() as folder:
        path, errors = Path(folder) / "record.json", Path(folder) / "errors"
        arguments = [check.function, json.dumps(asdict(options)), str(path)]
        with errors.open("wb") as file:
            # A group of its own: what it starts ends with it.
            child = subprocess.Popen(
                [sys.executable, "-m", _CHILD, *arguments],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = child.wait(options.seconds + grace)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        record = Record.load(path) if path.exists() else Record()
        text = errors.read_text(encoding="utf-8", errors="replace")
    if code is None:
        record.status = Status.TIMED_OUT
        record.failures.append(f"stopped after {options.seconds + grace:.0f} s")
    elif code or record.status is None:
        record.status = Status.CRASHED
        record.failures.append(_death(code, text))
    elif record.failures:
        record.status = Status.FAIL
    elif check.is_bench and record.status is Status.PASS:
        record.status = Status.MEASURED
    return Outcome(check, record, monotonic() - began)


def _death(code: int, text: str) -> str:
    """Return how a process ended and the last lines of what it said."""
    how = f"exit status {code}"
    if code < 0:
        with suppress(ValueError):
            how = f"signal {signal.Signals(-code).name}"
    # The report may be published.
    text = text.replace(str(ROOT), ".").replace(str(Path.home()), "~")
    lines = text.strip().splitlines()[-_LINES_OF_ERROR:]
    return "\n".join([f"ended with {how}", *lines])
