"""The turns of a conversation, as a chat template takes them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Final

from app.parsing.json_text import load_json
from app.parsing.message_format import HistoryFormat
from app.parsing.tool_spec import ToolSpec
from app.parsing.tools.tool_format import call_text
from app.prompts.conversation import SYSTEM_ROLES, ChatMessage, ToolCall

_DESCRIPTION: Final = """\
# Tools

You can call functions. Each line between <tools> and </tools> describes one:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as a JSON object, like this:
{example}
What it returns comes back between <tool_response> and </tool_response>."""


def template_messages(
    messages: Sequence[ChatMessage], format_: HistoryFormat
) -> list[dict[str, Any]]:
    """Return the turns that a chat template gets.

    A template that knows tools gets calls and results in fields of their own.  For any other,
    calls are text, and results are the user's.
    """
    if format_.is_native:
        names = {call.id: call.name for turn in messages for call in turn.tool_calls}
        return [_native_turn(turn, names, format_.num_id_characters) for turn in messages]
    return _merged([_turn_as_text(message) for message in messages], messages)


def _native_turn(
    message: ChatMessage, names: dict[str, str], num_id_characters: int | None
) -> dict[str, Any]:
    turn = message.template_fields()
    if message.tool_calls:
        turn["tool_calls"] = [_native_call(call, num_id_characters) for call in message.tool_calls]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = _short_id(message.tool_call_id, num_id_characters)
        # OpenAI's results carry no name, but some templates ask for one.
        if message.tool_call_id in names:
            turn.setdefault("name", names[message.tool_call_id])
    return turn


def _native_call(call: ToolCall, num_id_characters: int | None) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _parsed(call.arguments)}
    return {"id": _short_id(call.id, num_id_characters), "type": "function", "function": function}


def _short_id(call_id: str, num_characters: int | None) -> str:
    return call_id if num_characters is None else call_id[-num_characters:]


def _parsed(arguments: str) -> dict[str, Any] | str:
    """Return the object that templates expect, or the text if it is none."""
    try:
        value = load_json(arguments or "{}")
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _turn_as_text(message: ChatMessage) -> dict[str, Any]:
    if message.role == "tool":
        text = f"<tool_response>\n{message.content}\n</tool_response>"
        return {"role": "user", "content": text}
    calls = [call_text(call.name, call.arguments or "{}") for call in message.tool_calls]
    turn = message.template_fields()
    turn["content"] = "\n".join([*([message.content] if message.content else []), *calls])
    return turn


def _merged(
    turns: Sequence[dict[str, Any]], messages: Sequence[ChatMessage]
) -> list[dict[str, Any]]:
    """Return one turn for consecutive results and the user's turn after them.

    Many templates reject two turns of a user in a row.
    """
    merged: list[dict[str, Any]] = []
    is_after_result = False
    for turn, message in zip(turns, messages, strict=True):
        if is_after_result and turn["role"] == "user":
            merged[-1]["content"] += f"\n{turn['content']}"
        else:
            merged.append(turn)
        is_after_result = message.role == "tool"
    return merged


def with_description(
    messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]
) -> list[ChatMessage]:
    """Return the turns with the tools in a system message, for a template that knows no tools."""
    lines = [json.dumps(tool.template_fields(), ensure_ascii=False) for tool in tools]
    example = call_text("<name>", '{"<parameter>": "<value>"}')
    text = _DESCRIPTION.format(tools="\n".join(lines), example=example)
    system = list(takewhile(lambda message: message.role in SYSTEM_ROLES, messages))
    rest = messages[len(system) :]
    if not system:
        return [ChatMessage(role="system", content=text), *rest]
    last = replace(system[-1], content=f"{system[-1].content}\n\n{text}")
    return [*system[:-1], last, *rest]
