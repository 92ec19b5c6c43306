"""Maps the turns of a request to a conversation of the model."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from app.api.anthropic.blocks import (
    RedactedThinkingParam,
    TextParam,
    ThinkingParam,
    ToolReferenceParam,
    ToolResultParam,
    ToolUseParam,
    parts_of,
)
from app.api.anthropic.cache_control import longest
from app.api.anthropic.request import PromptRequest, TurnParam
from app.api.unsealer import Unsealer
from app.parsing.tool_spec import ToolSpec
from app.prompts.conversation import Breakpoint, ChatMessage, Conversation, ToolCall
from app.prompts.images.image_marks import Attachment, Source, attachments_in, joined
from app.storage.seal import ForgedValue, Sealer
from batching import InvalidRequest

THINKING: Final = "thinking"  # the purpose of sealed values

_SEPARATOR: Final = "\n"
# Claude Code's first system block.  It differs from conversation to conversation, and would keep all
# that follows from being found in the prefix cache.
_BILLING_LINE: Final = "x-anthropic-billing-header:"
_ID_PREFIX: Final = "toolu_"


def to_conversation(body: PromptRequest, sealer: Sealer) -> Conversation:
    """Return the conversation; unsealing takes a moment, so not for the event loop.

    Raises:
        InvalidRequest: a signature is forged, or a turn refers to what is not there.
    """
    turns, continues = _without_empty_prefill(body.messages)
    messages = [*_system(body.system), *_Turns(body.tool_specs, sealer).of(turns)]
    return Conversation(
        messages=_with_ends(messages, body),
        tools=body.tool_specs,
        tool_choice=body.effective_tool_choice,
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        reasoning_effort=body.output_config.effort,
        thinking=None if body.thinking is None else body.thinking.type != "disabled",
        thinking_budget=None if body.thinking is None else body.thinking.budget_tokens,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        adapt_turns=True,
    )


def attachments(messages: Sequence[TurnParam]) -> Mapping[str, Attachment]:
    """Return the images and files of turns, by their marks."""
    found: dict[str, Attachment] = {}
    for index, message in enumerate(messages):
        for block, param in _with_results(message.content, f"messages.{index}.content"):
            found |= attachments_in(joined(parts_of([block])), param)
    return found


def _with_results(blocks: Sequence[object], param: str) -> Iterator[tuple[object, str]]:
    """Yield blocks and those within results, each with its field, as Anthropic's API names it."""
    for index, block in enumerate(blocks):
        name = f"{param}.{index}.{getattr(block, 'type', '')}"
        yield block, name
        if isinstance(block, ToolResultParam):
            yield from _with_results(block.content, f"{name}.content")


def tool_use_id(call_id: str) -> str:
    """Return the id that a client gets for a call; `_call_id` returns what the model has written."""
    return _ID_PREFIX + call_id.removeprefix("call_")


def _call_id(client_id: str) -> str:
    return client_id.removeprefix(_ID_PREFIX)


def _without_empty_prefill(messages: Sequence[TurnParam]) -> tuple[Sequence[TurnParam], bool]:
    """Return the turns, and whether the completion continues the last of them."""
    last = messages[-1]
    if last.role != "assistant":
        return messages, False
    if any(isinstance(block, ToolUseParam) for block in last.content):
        raise InvalidRequest("messages", "the last turn calls tools, and has no results of them")
    if _text(last.content):
        return messages, True
    if len(messages) == 1:
        raise InvalidRequest("messages", "there is no turn to complete")
    return messages[:-1], False


def _with_ends(messages: list[ChatMessage], body: PromptRequest) -> list[ChatMessage]:
    """Return the messages with the breakpoints of the tools, and with that of the whole prompt."""
    if seconds := longest(body.tools):
        # Templates write tools before the first turn, in or around the system's message.
        roles = [message.role for message in messages]
        first = next((i for i, role in enumerate(roles) if role != "system"), 0)
        before = [Breakpoint(0, seconds), *messages[first].breakpoints]
        messages[first] = replace(messages[first], breakpoints=before)
    if (control := body.cache_control) is not None:
        end = Breakpoint(len(messages[-1].content), control.seconds)
        messages[-1] = replace(messages[-1], breakpoints=[*messages[-1].breakpoints, end])
    return messages


def _breakpoints(blocks: Sequence[object]) -> tuple[Breakpoint, ...]:
    """Return the ends of what is to be cached in the text of these blocks, of which there are few."""
    ends = ((index + 1, longest([block])) for index, block in enumerate(blocks))
    return tuple(Breakpoint(len(_text(blocks[:end])), seconds) for end, seconds in ends if seconds)


def _system(blocks: Sequence[TextParam]) -> Iterable[ChatMessage]:
    if blocks and blocks[0].text.startswith(_BILLING_LINE):
        blocks = blocks[1:]
    if blocks:
        yield ChatMessage(role="system", content=_text(blocks), breakpoints=_breakpoints(blocks))


def _text(blocks: Iterable[object]) -> str:
    return joined(parts_of(blocks))


class _Turns:
    """Maps turns in their order: results refer to the calls before them."""

    def __init__(self, tools: Iterable[ToolSpec], sealer: Sealer) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._unsealer = Unsealer(sealer, THINKING)
        self._described_names: set[str] = set()
        self._calls: Mapping[str, int] = {}

    def of(self, messages: Iterable[TurnParam]) -> Iterable[ChatMessage]:
        # Of a turn whose calls are to be cached, which templates write behind its text.
        seconds = 0.0
        for index, message in enumerate(messages):
            for made in self._of(message, f"messages.{index}"):
                before = [Breakpoint(0, seconds)] if seconds else []
                yield replace(made, breakpoints=(*before, *made.breakpoints))
                seconds = 0.0
            seconds = longest(b for b in message.content if isinstance(b, ToolUseParam))

    def _of(self, message: TurnParam, param: str) -> Iterable[ChatMessage]:
        if message.role == "assistant":
            yield self._assistant(message, param)
        elif message.role == "user":
            yield from self._user(message, param)
        else:
            yield ChatMessage(
                role="system",
                content=_text(message.content),
                breakpoints=_breakpoints(message.content),
            )

    def _assistant(self, message: TurnParam, param: str) -> ChatMessage:
        calls = [
            ToolCall(_call_id(block.id), block.name, json.dumps(block.input, ensure_ascii=False))
            for block in message.content
            if isinstance(block, ToolUseParam)
        ]
        self._calls = {call.id: index for index, call in enumerate(calls)}
        thinking = [
            self._unsealed(block, f"{param}.content.{index}")
            for index, block in enumerate(message.content)
            if isinstance(block, ThinkingParam | RedactedThinkingParam)
        ]
        return ChatMessage(
            role="assistant",
            content=_text(message.content),
            reasoning=_SEPARATOR.join(thinking) if thinking else None,
            tool_calls=calls,
            breakpoints=_breakpoints(
                [block for block in message.content if not isinstance(block, ToolUseParam)]
            ),
        )

    def _user(self, message: TurnParam, param: str) -> Iterable[ChatMessage]:
        """Yield the results in the order of the calls, as templates without ids need them."""
        results = [block for block in message.content if isinstance(block, ToolResultParam)]
        results.sort(key=lambda r: self._calls.get(_call_id(r.tool_use_id), len(self._calls)))
        for result in results:
            content, seconds = self._result(result, param), longest([result, *result.content])
            yield ChatMessage(
                role="tool",
                content=content,
                tool_call_id=_call_id(result.tool_use_id),
                breakpoints=[Breakpoint(len(content), seconds)] if seconds else (),
            )
        others = [block for block in message.content if not isinstance(block, ToolResultParam)]
        if others or not results:
            yield ChatMessage(role="user", content=_text(others), breakpoints=_breakpoints(others))

    def _result(self, result: ToolResultParam, param: str) -> str:
        parts: list[str | Source] = []
        for block in result.content:
            if isinstance(block, ToolReferenceParam):
                parts.append(self._described(block, param))
            else:
                parts += block.parts
        text = joined(parts)
        return f"Error: {text}" if result.is_error else text

    def _described(self, reference: ToolReferenceParam, param: str) -> str:
        """Return the description of a tool; where the prompt has it before, its name is enough."""
        if (tool := self._tools.get(reference.tool_name)) is None:
            message = f"a tool_reference names {reference.tool_name[:128]!r}, which is not in tools"
            raise InvalidRequest(param, message)
        if tool.name in self._described_names:
            return tool.name
        self._described_names.add(tool.name)
        description = json.dumps(tool.template_fields(), ensure_ascii=False)
        return f"<tools>\n{description}\n</tools>"

    def _unsealed(self, block: ThinkingParam | RedactedThinkingParam, param: str) -> str:
        if isinstance(block, RedactedThinkingParam):
            field, sealed, shown = "data", block.data, ""
        else:
            field, sealed, shown = "signature", block.signature, block.thinking
        text = None
        with suppress(ForgedValue):
            text = self._unsealer.unseal(sealed)
        if text is None or shown not in ("", text):
            raise InvalidRequest(param, f"Invalid `{field}` in `{block.type}` block")
        return text
