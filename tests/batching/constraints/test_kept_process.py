"""Processes that are kept, and ended when no caller waits for them any more."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from batching.constraints.kept_process import KeptProcesses
from batching.interruption import Interrupted, Interruption

# Says that it has begun, and then reads for ever what is never sent.
SILENT = """
import os
import sys
from pathlib import Path
for line in sys.stdin:
    if line == "echo\\n":
        open(0, "wb", closefd=False).write(b"echo\\n")
    else:
        # A child has the socket, too, as one that compiles a grammar.
        os.fork()
        Path(line.strip()).touch()
"""


def test_a_process_ends_when_its_caller_gives_up(tmp_path: Path) -> None:
    program, begun = tmp_path / "silent.py", tmp_path / "begun"
    program.write_text(SILENT)
    processes, interruption = KeptProcesses(str(program)), Interruption()
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(interruption.run, lambda: processes.ask(str(begun).encode()))
        pause = threading.Event()
        while not begun.exists():
            pause.wait(0.01)
        interruption.interrupt()
        with pytest.raises(Interrupted):
            asking.result(20)
    # The next caller has another one.
    assert processes.ask(b"echo") == b"echo"
