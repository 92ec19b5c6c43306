"""Runs targets in a process of their own, and tells what it ended of."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.fuzz.worker import Engine, Job

# Seconds of the clock beyond those that were asked for: imports, and the last input.
_GRACE: Final = 60.0
_NUM_LINES: Final = 25


@dataclass(frozen=True, slots=True)
class Finding:
    """An input, why the process ended of it, and the end of what it wrote."""

    data: bytes
    reason: str
    output: str


def run(
    corpora: Mapping[str, Sequence[Path]],
    engine: Engine,
    folder: Path,
    *,
    seconds: float = 0.0,
    grace: float = _GRACE,
) -> Finding | str:
    """Run targets, by their modules; return what was found, else what was written.

    folder: for what a run keeps.

    Raises:
        RuntimeError: the process has ended before the first input.
    """
    current, inputs = folder / "current", folder / "inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    current.unlink(missing_ok=True)
    names = {module: [str(path) for path in paths] for module, paths in corpora.items()}
    job = Job(names, engine, seconds, str(current), str(inputs))
    with (folder / "output").open("w+", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", job.to_json()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # What targets write is left behind where they are killed.
            env=os.environ | {"TMPDIR": str(folder)},
        )
        try:
            reason = _reason(process.wait(seconds + grace))
        except subprocess.TimeoutExpired:
            reason = "it waits for ever"
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        lines = "".join(output.readlines()[-_NUM_LINES:])
    if not reason:
        return lines
    if not current.exists():
        raise RuntimeError(f"no target has begun:\n{lines}")
    return Finding(current.read_bytes(), reason, lines)


def _reason(status: int) -> str:
    """Return why a process ended; empty if it should have."""
    if status == -signal.SIGXCPU:
        return "it takes too much time"
    if status < 0:
        return f"it ends by {signal.Signals(-status).name}"
    return "it raises" if status else ""
