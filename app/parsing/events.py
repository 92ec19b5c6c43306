"""The parts of a message, in the order in which they are generated."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ContentPiece:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of a tool call; `index` counts the calls of the message from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of a call's arguments; all pieces together are the text of a JSON object."""

    index: int
    text: str


MessageEvent = ContentPiece | ReasoningPiece | ToolCallStart | ToolCallArguments


def join_pieces(events: Iterable[MessageEvent]) -> list[MessageEvent]:
    """Return the events with adjacent pieces of one text merged and empty ones removed."""
    runs: list[list[MessageEvent]] = []
    for event in events:
        if runs and _continues(runs[-1][0], event):
            runs[-1].append(event)
        elif isinstance(event, ToolCallStart) or event.text:
            runs.append([event])
    return [_joined(run) for run in runs]


def _continues(first: MessageEvent, event: MessageEvent) -> bool:
    """True for two pieces of one text; the arguments of two calls are never adjacent."""
    return type(first) is type(event) and not isinstance(event, ToolCallStart)


def _joined(run: list[MessageEvent]) -> MessageEvent:
    first = run[0]
    if len(run) == 1 or isinstance(first, ToolCallStart):
        return first
    texts = (event.text for event in run if not isinstance(event, ToolCallStart))
    return replace(first, text="".join(texts))
