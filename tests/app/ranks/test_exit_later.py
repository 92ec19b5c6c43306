"""A process ends although none of its threads runs."""

import subprocess
import sys
from pathlib import Path

from app.ranks.exit_later import exit_later

# The other thread never gets the interpreter's lock.
_HANGS = """
import sys, threading
from app.ranks.exit_later import exit_later
exit_later(0.2)
sys.setswitchinterval(3600)
while True: pass
"""


def test_a_process_that_hangs_ends_and_says_where() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", _HANGS], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "most recent call first" in done.stderr


def test_a_process_may_live_on() -> None:
    exit_later(3600.0)
    exit_later(None)
