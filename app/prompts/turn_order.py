"""Conversations in an order of turns that a chat template takes.

Templates differ: many take a system message only first, some move all of them there, some know none,
and some take no user's turn after a tool's result.  A turn that a template does not take is rendered
in another role, at the same position: what was rendered before it stays a prefix, which the prefix
cache needs.  For the same reason a template is judged by probes and not by each conversation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from app.parsing.formats.model_format import message_format
from app.prompts.conversation import SYSTEM_ROLES, ChatMessage, ToolCall
from app.prompts.harmony_history import template_turns
from app.prompts.templates.model_template import render_turns
from app.prompts.templates.template_sandbox import RendererLost, TemplateTooMuch
from batching import ModelInfo

_SEPARATOR: Final = "\n"

_FIRST: Final = ChatMessage(role="system", content="probe-0")
_USER: Final = ChatMessage(role="user", content="probe-1")
_LATER: Final = ChatMessage(role="system", content="probe-2")
_ASSISTANT: Final = ChatMessage(role="assistant", content="probe-3")
_NEXT: Final = ChatMessage(role="user", content="probe-4")
_CALL: Final = ToolCall("call00001", "probe", "{}")
_CALLING: Final = ChatMessage(role="assistant", content="", tool_calls=[_CALL])
_RESULT: Final = ChatMessage(role="tool", content="probe-5", tool_call_id=_CALL.id)


@dataclass(frozen=True, slots=True)
class TurnOrder:
    """The turns that a template renders where they stand, and once.

    system_first, system_later: a system message before all other turns, and after some.
    user_after_result: a user's turn after a tool's result.
    """

    system_first: bool
    system_later: bool
    user_after_result: bool


@lru_cache(maxsize=8)
def turn_order(model: ModelInfo) -> TurnOrder:
    """Return what a model's template takes.

    Raises:
        TemplateTooMuch: it took too much time or memory.
        RendererLost: the process that renders was killed, or had no time.
    """
    return TurnOrder(
        system_first=takes_system(model),
        system_later=_takes(model, _USER, _LATER, _ASSISTANT, _NEXT)
        and _takes(model, _USER, _ASSISTANT, _LATER, _NEXT),
        user_after_result=_takes(model, _USER, _CALLING, _RESULT, _NEXT),
    )


@lru_cache(maxsize=8)
def takes_system(model: ModelInfo) -> bool:
    """Return whether a template takes a system message before all other turns."""
    return _takes(model, _FIRST, _USER)


def _takes(model: ModelInfo, *messages: ChatMessage) -> bool:
    turns = template_turns(messages, message_format(model))
    try:
        text = render_turns(model, turns, add_generation_prompt=True)
    except (RendererLost, TemplateTooMuch):
        # The caller keeps the answer.
        raise
    except Exception:  # a template may raise anything
        return False
    contents = [message.content for message in messages if message.content]
    positions = [text.find(content) for content in contents]
    return positions == sorted(positions) and all(text.count(content) == 1 for content in contents)


def adapted_turns(model: ModelInfo, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return turns that the model's template takes; adjacent ones of one role are joined."""
    order = turn_order(model)
    groups: list[list[ChatMessage]] = []
    for message in messages:
        is_later = any(group[0].role not in SYSTEM_ROLES for group in groups)
        turn = _in_a_role(message, is_taken=order.system_later if is_later else order.system_first)
        if groups and _are_joined(groups[-1][0], turn, order):
            groups[-1].append(turn)
        else:
            groups.append([turn])
    return [_joined(group) for group in groups]


def _in_a_role(message: ChatMessage, *, is_taken: bool) -> ChatMessage:
    if message.role not in SYSTEM_ROLES:
        return message
    if is_taken:
        return replace(message, role="system")
    return replace(message, role="user", content=f"<system>\n{message.content}\n</system>")


def _are_joined(first: ChatMessage, turn: ChatMessage, order: TurnOrder) -> bool:
    if first.role == "tool":
        return turn.role == "user" and not order.user_after_result
    return first.role == turn.role


def _joined(group: Sequence[ChatMessage]) -> ChatMessage:
    if len(group) == 1:
        return group[0]
    reasoning = [turn.reasoning for turn in group if turn.reasoning is not None]
    return replace(
        group[0],
        content=_SEPARATOR.join(turn.content for turn in group if turn.content),
        reasoning=_SEPARATOR.join(reasoning) if reasoning else None,
        tool_calls=tuple(call for turn in group for call in turn.tool_calls),
    )
