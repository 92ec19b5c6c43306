"""The conversation of a request: items become turns, as a chat template takes them."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from typing import Final

from app.api.openai.responses.items.input_items import (
    AdditionalToolsItem,
    CallOutputItem,
    CompactionItem,
    CustomToolCallItem,
    FunctionCallItem,
    InputItem,
    MessageItem,
    ReasoningItem,
    Turn,
    all_tools,
)
from app.api.openai.responses.items.tools import to_tool_choice
from app.api.openai.responses.request import ResponseRequest
from app.api.unsealer import Unsealer
from app.http.errors.invalid_requests import InvalidEncryptedContent
from app.prompts.compaction import REQUEST, summary_message
from app.prompts.conversation import SYSTEM_ROLES, ChatMessage, Conversation
from app.prompts.images.image_marks import Attachment, attachments_in
from app.storage.seal import ForgedValue, Sealer

# The purposes of sealed values.
REASONING: Final = "reasoning"
SUMMARY: Final = "summary"


def to_conversation(
    body: ResponseRequest, items: Sequence[InputItem], *, compacts: bool = False
) -> Conversation:
    """Return the conversation of a request over all items, those of earlier responses included.

    items: none is sealed.
    compacts: its last turn asks for a summary.
    """
    turns = [item for item in items if not isinstance(item, AdditionalToolsItem | CompactionItem)]
    if compacts:
        turns.append(MessageItem(role="user", content=REQUEST))
    tools = [tool.spec for tool in all_tools(body.tools, items).values()]
    return Conversation(
        messages=list(to_messages(turns, body.instructions)),
        tools=tools,
        tool_choice=to_tool_choice(body.tool_choice) if tools else "none",
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort,
        thinking_budget=body.reasoning.budget,
        template_kwargs=body.chat_template_kwargs,
        adapt_turns=True,
    )


def attachments(
    items: Sequence[InputItem], num_before: int = 0, before: str = ""
) -> Mapping[str, Attachment]:
    """Return the images and files of items, by their marks.

    num_before: how many items are in what the request goes on from; they come first.
    before: the field that names it.
    """
    found: dict[str, Attachment] = {}
    for index, item in enumerate(items, -num_before):
        name, text = _content(item)
        param = f"input.{index}.{name}" if index >= 0 else before
        found |= attachments_in(text, param)
    return found


def _content(item: InputItem) -> tuple[str, str]:
    """Return the field that may have images, and what it has."""
    if isinstance(item, MessageItem):
        return "content", item.content
    return "output", item.output if isinstance(item, CallOutputItem) else ""


def unsealed(
    items: Sequence[InputItem], sealer: Sealer, num_before: int = 0, before: str = ""
) -> list[InputItem]:
    """Return the items with the text of sealed reasoning as its content, and summaries as messages.

    num_before, before: see `attachments`.

    Raises:
        InvalidEncryptedContent: it was not sealed here.
        InvalidRequest: it is too long in all.
    """
    reasoning, summaries = Unsealer(sealer, REASONING), Unsealer(sealer, SUMMARY)
    found: list[InputItem] = []
    for index, item in enumerate(items, -num_before):
        param = before if index < 0 else f"input.{index}.encrypted_content"
        if isinstance(item, ReasoningItem) and item.encrypted_content is not None:
            text = _unsealed(item.encrypted_content, reasoning, param)
            found.append(item.model_copy(update={"content": text}))
        elif isinstance(item, CompactionItem):
            text = _unsealed(item.encrypted_content, summaries, param)
            found.append(MessageItem(role="user", content=summary_message(text)))
        else:
            found.append(item)
    return found


def _unsealed(value: str, unsealer: Unsealer, param: str) -> str:
    try:
        return unsealer.unseal(value)
    except ForgedValue:
        raise InvalidEncryptedContent(param) from None


def to_messages(items: Sequence[Turn], instructions: str | None = None) -> Iterator[ChatMessage]:
    """Yield the turns.

    The instructions and the system messages after them are one turn: many templates take one only.
    Consecutive items of the assistant are one turn, too, as the model wrote them.
    """
    leading = [
        item.content for item in takewhile(_is_system, items) if isinstance(item, MessageItem)
    ]
    texts = [*([instructions] if instructions else []), *leading]
    if texts:
        yield ChatMessage(role="system", content="\n\n".join(texts))
    for is_assistant, group in groupby(items[len(leading) :], _is_assistant):
        if is_assistant:
            yield _assistant_turn(list(group))
        else:
            yield from map(_turn, group)


def _is_system(item: Turn) -> bool:
    return isinstance(item, MessageItem) and item.role in SYSTEM_ROLES


def _is_assistant(item: Turn) -> bool:
    if isinstance(item, MessageItem):
        return item.role == "assistant"
    return not isinstance(item, CallOutputItem)


def _assistant_turn(items: Sequence[Turn]) -> ChatMessage:
    texts = [item.content for item in items if isinstance(item, MessageItem)]
    reasoning = [_reasoning_text(item) for item in items if isinstance(item, ReasoningItem)]
    return ChatMessage(
        role="assistant",
        content="\n".join(texts),
        reasoning="\n".join(filter(None, reasoning)) or None,
        tool_calls=tuple(
            item.to_call()
            for item in items
            if isinstance(item, FunctionCallItem | CustomToolCallItem)
        ),
    )


def _reasoning_text(item: ReasoningItem) -> str:
    return item.content or item.summary


def _turn(item: Turn) -> ChatMessage:
    if isinstance(item, CallOutputItem):
        return ChatMessage(role="tool", content=item.output, tool_call_id=item.call_id)
    assert isinstance(item, MessageItem), "the assistant's items are turns of their own"
    return ChatMessage(role=item.role, content=item.content)
