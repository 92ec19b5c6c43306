"""Whether a grammar compiles within limits, found out in processes that are kept for it."""

import json

from batching.constraints import compile_process
from batching.constraints.compile_process import SpecialTokens
from batching.constraints.kept_process import WALL_SECONDS, KeptProcesses, was_killed


class CompileInterrupted(Exception):
    """What became of the process says nothing of the grammar."""


class CompileLimits:
    """Tries the grammars of one vocabulary, in any thread."""

    def __init__(self, tokens: SpecialTokens, wall_seconds: float = WALL_SECONDS) -> None:
        self._processes = KeptProcesses(
            compile_process.__file__, tokens.encode() + b"\n", wall_seconds=wall_seconds
        )

    def allow(self, grammar: str) -> bool:
        """Return True if a grammar compiles, or is found to be invalid, within the limits; blocking.

        Raises:
            CompileInterrupted: the process was ended for another reason, or there was none.
        """
        try:
            status = int(self._processes.ask(json.dumps(grammar).encode()))
        except OSError:
            raise CompileInterrupted from None
        if was_killed(status):
            raise CompileInterrupted
        return status == 0
