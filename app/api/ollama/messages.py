"""The turns of `/api/chat`."""

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, model_validator

from app.api.ollama.fields import Images, with_images
from app.api.schemas.base import RequestModel
from app.api.schemas.fields import (
    MAX_MESSAGES,
    GivenName,
    Text,
    check_length,
    field_error,
    json_text,
)
from app.prompts.conversation import ChatMessage, ToolCall

_MAX_CALLS: Final = 8192
_MAX_DEPTH: Final = 64
_MAX_CHARACTERS: Final = 4 << 20


def _check_arguments(value: dict[str, Any]) -> dict[str, Any]:
    json_text(value, max_depth=_MAX_DEPTH, max_characters=_MAX_CHARACTERS)
    return value


class CalledFunction(RequestModel):
    name: GivenName
    arguments: Annotated[dict[str, Any], AfterValidator(_check_arguments)] = Field(
        default_factory=dict
    )


class Call(RequestModel):
    id: GivenName | None = None
    function: CalledFunction


class Turn(RequestModel):
    role: Annotated[Text, Field(min_length=1, max_length=64)]
    content: Text = ""
    thinking: Text | None = None
    images: Images = Field(default_factory=list)
    tool_calls: Annotated[list[Call], Field(max_length=_MAX_CALLS)] = Field(default_factory=list)
    tool_name: Text | None = None
    tool_call_id: GivenName | None = None

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise field_error("only an assistant calls tools", "tool_calls")
        if self.images and self.role not in ("user", "tool"):
            raise field_error(f"a turn of the role {self.role!r} has no images", "images")
        return self

    @property
    def marked_content(self) -> str:
        return with_images(self.content, self.images)


def _check_number(messages: Any) -> Any:
    if isinstance(messages, list):
        check_length(messages, MAX_MESSAGES)
    return messages


Turns = Annotated[
    list[Turn],
    FailFast(),
    BeforeValidator(
        _check_number, json_schema_input_type=Annotated[list[Turn], Field(max_length=MAX_MESSAGES)]
    ),
]


def chat_messages(turns: Iterable[Turn]) -> Iterator[ChatMessage]:
    """Yield the messages of turns, with ids for the calls that have none.

    A result without an id belongs to the first call of its tool that has none yet, or else to the first one.
    """
    number = 0
    waiting: list[ToolCall] = []
    for turn in turns:
        if turn.role == "tool":
            found = next(
                (c for c in waiting if c.name == turn.tool_name), next(iter(waiting), None)
            )
            if found is not None:
                waiting.remove(found)
            call_id = turn.tool_call_id or ("" if found is None else found.id)
            yield ChatMessage(
                role="tool",
                content=turn.marked_content,
                name=turn.tool_name,
                tool_call_id=call_id,
            )
            continue
        calls = []
        for call in turn.tool_calls:
            # Some templates want nine letters and digits.
            call_id = call.id or f"call{number:05d}"
            arguments = json.dumps(call.function.arguments, ensure_ascii=False)
            calls.append(ToolCall(call_id, call.function.name, arguments))
            number += 1
        waiting = list(calls)
        yield ChatMessage(
            role=turn.role,
            content=turn.marked_content,
            reasoning=turn.thinking,
            tool_calls=calls,
        )
