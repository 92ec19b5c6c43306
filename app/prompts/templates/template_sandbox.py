"""Chat templates are rendered in sandboxed processes.

A template is a program from a third party: it may loop for ever, or fill the memory with one multiplication.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from app.http.errors.rejections import Unavailable
from app.prompts.templates import template_process
from batching import Sandbox, SandboxExceeded, SandboxLimits, SandboxLost

# Seconds of a core for one rendering: a template that takes more is at fault.
_CPU_SECONDS: Final = 5

# For the model's own template.
SANDBOX: Final = Sandbox(template_process.__file__, SandboxLimits(_CPU_SECONDS), num_kept=2)


class TemplateFailed(Exception):
    """A template failed in its process.

    kind: the kind of failure, or the type of the exception.
    reason: the message of an exception that the template raised on purpose.
    """

    def __init__(self, kind: str, reason: str = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.reason = reason


class TemplateTooMuch(TemplateFailed):
    def __init__(self) -> None:
        super().__init__("it took too much time or memory")


class RendererLost(Unavailable):
    """The process that renders was killed or does not get on, which is no template's fault."""

    def __init__(self) -> None:
        super().__init__(
            "the process that renders chat templates was ended or has no time; try again",
            retry_after=1,
        )


def rendered(
    sandbox: Sandbox,
    template: str,
    turns: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
) -> str:
    """Render a template; blocking.

    Raises:
        TemplateFailed: the template raises, or takes too much.
        RendererLost: the process was killed, or had no answer in time.
    """
    try:
        line = sandbox.ask(json.dumps([template, turns, variables], default=str).encode())
    except SandboxExceeded:
        raise TemplateTooMuch from None
    except SandboxLost:
        raise RendererLost from None
    answer = json.loads(line)
    if "text" not in answer:
        raise TemplateFailed(answer["error"], answer["message"])
    return str(answer["text"])
