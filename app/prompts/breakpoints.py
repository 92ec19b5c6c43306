"""Where the parts of a prompt end that are to be retained.  It blocks, so not on the event loop."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from app.parsing.message_format import MessageFormat
from app.prompts.conversation import ChatMessage, Conversation
from app.prompts.render import Attached, ChatPrompt, template_text, tokens_of
from batching import ModelInfo, RetainedPrefix

# Noncharacters of Unicode, which are for such uses, around the number of a breakpoint.
_MARK: Final = re.compile("\ufdd2([0-9]{1,4})\ufdd3")


def retained_prefixes(
    model: ModelInfo,
    conversation: Conversation,
    format_: MessageFormat,
    prompt: ChatPrompt,
    attached: Mapping[str, Attached],
) -> tuple[RetainedPrefix, ...]:
    """Return the beginnings of a prompt that a conversation's breakpoints ask for, the longest time first.

    A breakpoint at the very end is the end of the prompt.  Others are looked for in the text of the conversation with
    marks in their places, as far as that text is the prompt's: templates may cut white space that is before a mark.
    """
    seconds = [each.seconds for m in conversation.messages for each in m.breakpoints]
    prefixes: list[RetainedPrefix] = []
    longest = 0.0
    last = conversation.messages[-1]
    if last.breakpoints and last.breakpoints[-1].num_characters == len(last.content):
        longest = seconds.pop()
        prefixes.append(RetainedPrefix(None, longest))
    if max(seconds, default=0.0) <= longest:
        return tuple(prefixes)
    text = template_text(model, _marked(conversation), format_, attached)
    for match in reversed([*_MARK.finditer(text)]):
        if (number := int(match[1])) < len(seconds) and seconds[number] > longest:
            longest = seconds[number]
            before = _MARK.sub("", text[: match.start()])
            before = before[: _num_common(before, prompt.template_text)]
            num_tokens = _num_common(tokens_of(model, before, attached), prompt.token_ids)
            prefixes.append(RetainedPrefix(num_tokens, longest))
    return tuple(reversed(prefixes))


def _marked(conversation: Conversation) -> Conversation:
    """Return a conversation with a mark at each breakpoint, numbered in their order."""
    number = 0
    messages: list[ChatMessage] = []
    for message in conversation.messages:
        content, done = "", 0
        for breakpoint_ in message.breakpoints:
            at = breakpoint_.num_characters
            content += f"{message.content[done:at]}\ufdd2{number}\ufdd3"
            done, number = at, number + 1
        messages.append(replace(message, content=content + message.content[done:]))
    return replace(conversation, messages=messages)


def _num_common(some: Sequence[object], others: Sequence[object]) -> int:
    """Return how many leading items two sequences have in common."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(some), len(others)))
