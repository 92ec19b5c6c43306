"""The page's JavaScript, in a process of node."""

import json
import select
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.fuzz.target import Unavailable

_SCRIPT: Final = Path(__file__).with_suffix(".mjs")
_HEAP_MIB: Final = 256
# Of the clock, after which the answer does not come any more.
_MAX_WAIT: Final = 30.0


class Page:
    """Answers one question after another.

    cpu_seconds: for each answer.
    """

    def __init__(self, cpu_seconds: float) -> None:
        if (node := shutil.which("node")) is None:
            raise Unavailable("the page's JavaScript needs node")
        self._cpu_seconds = cpu_seconds
        self._node = subprocess.Popen(
            [node, f"--max-old-space-size={_HEAP_MIB}", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        # Before there are limits, which its virtual memory exceeds.
        self.ask("markdown", ["a"])

    def ask(self, kind: str, pieces: Sequence[str]) -> Any:
        assert self._node.stdin is not None
        assert self._node.stdout is not None
        self._node.stdin.write(json.dumps({"kind": kind, "pieces": pieces}) + "\n")
        self._node.stdin.flush()
        if not select.select([self._node.stdout], [], [], _MAX_WAIT)[0]:
            self._node.kill()
            raise AssertionError(f"no answer within {_MAX_WAIT} s")
        line = self._node.stdout.readline()
        assert line, "it has ended"
        answer = json.loads(line)
        assert answer["seconds"] <= self._cpu_seconds, answer["seconds"]
        return answer["answer"]
