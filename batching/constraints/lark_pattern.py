"""A Lark grammar as one regular expression, which another process writes."""

import json
from functools import lru_cache
from typing import Final

from batching.constraints import lark_process
from batching.constraints.lark_process import NotRegular
from batching.errors import RequestFailed
from batching.sandbox.sandbox import Sandbox, SandboxExceeded, SandboxLimits, SandboxLost

# An agent sends the same grammars again and again.
_MAX_CACHED: Final = 64
_SANDBOX: Final = Sandbox(lark_process.__file__, SandboxLimits(cpu_seconds=2))


@lru_cache(_MAX_CACHED)
def lark_pattern(definition: str) -> str:
    """Return the regular expression of the texts that follow a grammar; blocking.

    Raises:
        NotRegular: there is none, or writing it takes too much time or memory.
        RequestFailed: the process was ended for another reason.
    """
    try:
        answer = json.loads(_SANDBOX.ask(json.dumps(definition).encode()))
    except SandboxExceeded:
        raise NotRegular("it takes too much time or memory") from None
    except SandboxLost:
        message = "the process that reads the grammar was ended; please try again"
        raise RequestFailed(message) from None
    if "pattern" not in answer:
        raise NotRegular(answer["reason"])
    return str(answer["pattern"])
