"""What a reader of tool calls makes of the text between a start marker and its end."""

from typing import NamedTuple, Protocol


class CallBegins(NamedTuple):
    """`call_id` is what the model itself calls it; most do not."""

    name: str
    call_id: str | None = None


class CallArguments(NamedTuple):
    text: str


class CallEnds(NamedTuple):
    """The arguments are complete; the end marker may still be to come."""


class NotACall(NamedTuple):
    """What seemed to be a call and is none, with its marker."""

    text: str


CallEvent = CallBegins | CallArguments | CallEnds | NotACall


class CallReader(Protocol):
    """Takes a character at a time, so what it reads does not depend on any pieces."""

    @property
    def is_done(self) -> bool:
        """True behind the end; what comes next is not part of a call."""
        ...

    def push(self, character: str) -> list[CallEvent]: ...

    def flush(self) -> list[CallEvent]:
        """Return what was held back; no more text will come."""
        ...
