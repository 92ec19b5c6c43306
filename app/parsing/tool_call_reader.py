"""The interface of readers of tool calls, and the events that they return."""

from typing import NamedTuple, Protocol


class CallBegins(NamedTuple):
    """`call_id` is the id that the model has generated; most models generate none."""

    name: str
    call_id: str | None = None


class CallArguments(NamedTuple):
    text: str


class CallEnds(NamedTuple):
    """The arguments are complete; the end marker may still follow."""


class NotACall(NamedTuple):
    """Text after a start marker that is not a call, including the marker."""

    text: str


CallEvent = CallBegins | CallArguments | CallEnds | NotACall


class CallReader(Protocol):
    """Reads a character at a time, so the result does not depend on how the text is split."""

    @property
    def is_done(self) -> bool:
        """True after the end marker; further text is not part of the call."""
        ...

    def push(self, character: str) -> list[CallEvent]: ...

    def flush(self) -> list[CallEvent]:
        """Return the events held back; no more text follows."""
        ...
