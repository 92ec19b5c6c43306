"""What an answer consists of, in the order in which it comes."""

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
    """A call begins; `index` counts the calls of the answer from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next part of a call's arguments; together they are the text of one JSON object."""

    index: int
    text: str


MessageEvent = ContentPiece | ReasoningPiece | ToolCallStart | ToolCallArguments


def join_pieces(events: Iterable[MessageEvent]) -> list[MessageEvent]:
    """Return the same events, with neighbouring pieces of one text as one and none empty."""
    runs: list[list[MessageEvent]] = []
    for event in events:
        if runs and _continues(runs[-1][0], event):
            runs[-1].append(event)
        elif isinstance(event, ToolCallStart) or event.text:
            runs.append([event])
    return [_joined(run) for run in runs]


def _continues(first: MessageEvent, event: MessageEvent) -> bool:
    """True of two pieces of one text; between those of two calls the second one begins."""
    return type(first) is type(event) and not isinstance(event, ToolCallStart)


def _joined(run: list[MessageEvent]) -> MessageEvent:
    first = run[0]
    if len(run) == 1 or isinstance(first, ToolCallStart):
        return first
    texts = (event.text for event in run if not isinstance(event, ToolCallStart))
    return replace(first, text="".join(texts))
