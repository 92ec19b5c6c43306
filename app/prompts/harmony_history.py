"""The turns of a conversation as the template of gpt-oss takes them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Final

from app.parsing.harmony.harmony_parser import CHANNEL, END, MESSAGE, START
from app.parsing.message_format import MessageFormat
from app.prompts.chat_history import template_messages
from app.prompts.conversation import ChatMessage

# The template puts what it is given between the header and the end of an analysis.
_PREAMBLE: Final = f"{END}{START}assistant{CHANNEL}commentary{MESSAGE}"

_EFFORTS: Final = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


def harmony_effort(effort: str) -> str:
    """Return the nearest of the three efforts that gpt-oss knows."""
    return _EFFORTS.get(effort, effort)


def template_turns(messages: Sequence[ChatMessage], format_: MessageFormat) -> list[dict[str, Any]]:
    """Return the turns that the model's template gets."""
    # The renderer fills in `thinking`, the template's name of the reasoning.
    turns = _one_call_turns(messages) if format_.has_channels else messages
    return template_messages(turns, format_)


def _one_call_turns(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the turns with one call each, followed by its result.

    The template renders only the first call of a turn, and names a result by the call before it.
    """
    turns: list[ChatMessage] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        if not message.tool_calls:
            turns.append(message)
            continue
        results = list(takewhile(lambda turn: turn.role == "tool", messages[index:]))
        index += len(results)
        turns += _calls_with_results(message, results)
    return turns


def _calls_with_results(
    message: ChatMessage, results: Sequence[ChatMessage]
) -> Iterator[ChatMessage]:
    first = _without_preamble(message)
    by_id: dict[str | None, list[ChatMessage]] = {}
    for turn in results:
        by_id.setdefault(turn.tool_call_id, []).append(turn)
    for call in message.tool_calls:
        yield replace(first, tool_calls=[call])
        # The first one of several calls with the same id has the results: each is rendered once.
        yield from by_id.pop(call.id, ())
        first = replace(message, content="", reasoning=None)
    for turns in by_id.values():
        yield from turns


def _without_preamble(message: ChatMessage) -> ChatMessage:
    """Move content beside reasoning and a call into the reasoning: the template takes only one.

    Rendered, it is the part of the channel `commentary` that it was when it was generated.
    """
    if not (message.reasoning and message.content):
        return message
    return replace(message, content="", reasoning=message.reasoning + _PREAMBLE + message.content)
