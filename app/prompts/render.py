"""Renders prompts to token ids: chat templates and tokenization.  It blocks, so not on the event loop."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from jinja2 import TemplateError

from app.parsing.message_format import MessageFormat
from app.prompts.chat_history import with_description
from app.prompts.conversation import Conversation
from app.prompts.harmony_history import harmony_effort, template_turns
from app.prompts.images.image_marks import MARK, filled, moved_first
from app.prompts.images.image_places import image_text, placed
from app.prompts.length_bound import longest_token
from app.prompts.templates.model_template import render_turns
from app.prompts.templates.template_sandbox import RendererLost, TemplateFailed
from app.prompts.turn_order import adapted_turns, takes_system
from batching import (
    ContextLengthExceeded,
    ImageInput,
    InvalidRequest,
    ModelInfo,
    PlacedImage,
    check_generates,
)

# What stands at a mark: an image, or the text of a file.
Attached = ImageInput | str

logger = logging.getLogger(__name__)

# Efforts without reasoning; most templates have a switch for it, some know the word.
_NO_REASONING: Final = ("none", "minimal")

# So many tokens before the cut decide where the words after it begin.
NUM_CONTEXT_TOKENS: Final = 64


class PromptTooLong(ContextLengthExceeded):
    """A prompt whose length in characters already shows that it does not fit in the context."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(num_tokens, None, limit)
        # Clients look for the beginning of the text.
        message = (
            f"This model's maximum context length is {limit} tokens. "
            f"However, your prompt has at least {num_tokens}. "
            "Please reduce the length of the prompt."
        )
        self.args = (message,)


# Tokens of output that a truncated prompt leaves room for, unless the request says how many.
DEFAULT_RESERVED: Final = 256


@dataclass(frozen=True, slots=True)
class Truncation:
    """How much of a prompt is kept.

    num_tokens: None keeps as many as fit in the context beside `num_reserved` tokens of output.
    side: the side from which tokens are removed.
    """

    num_tokens: int | None
    num_reserved: int
    side: Literal["left", "right"] = "left"

    def max_tokens(self, model: ModelInfo) -> int:
        """Return how many tokens of a prompt are kept."""
        if self.num_tokens is not None:
            return self.num_tokens
        room = model.max_model_len - self.num_reserved
        # More output than there is context for is refused or reduced later; the prompt stays.
        least = min(DEFAULT_RESERVED, model.max_model_len // 2)
        return room if room > 0 else model.max_model_len - least

    def kept(self, num_tokens: int) -> slice:
        """Return where so many tokens, or characters, of a prompt are kept."""
        return slice(-num_tokens, None) if self.side == "left" else slice(num_tokens)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation; with truncation, `token_ids` are only a part of `text`.

    template_text: as the template has written it, with the marks of images.
    images: those whose tokens are among these.
    """

    text: str
    token_ids: list[int]
    template_text: str
    images: tuple[PlacedImage, ...] = ()


def chat_prompt(
    model: ModelInfo,
    conversation: Conversation,
    format_: MessageFormat,
    truncation: Truncation | None = None,
    attached: Mapping[str, Attached] | None = None,
) -> ChatPrompt:
    """Render a conversation with the chat template, up to where the completion begins.

    attached: the images and files of the conversation, by their marks.

    Raises:
        InvalidRequest: the model writes no text or has no template, or the template rejects the conversation or leaves out an image.
        RendererLost: the process that renders was killed, or had no time.
        PromptTooLong: the prompt cannot fit in the context.
    """
    check_generates(model)
    if not model.tokenizer.has_chat_template:
        raise InvalidRequest(
            "model", f"the model '{model.model_id}' has no chat template; use /v1/completions"
        )
    attached = attached or {}
    conversation = _with_texts(conversation, attached)
    if truncation is None:
        # A long text takes a while to render, too.
        _check_length(model, [message.content for message in conversation.messages])
    if images := _images(attached):
        return _with_images(model, conversation, format_, truncation, images)
    text = _rendered(model, conversation, format_)
    token_ids = _encoded(model, text, add_special_tokens=False, truncation=truncation)
    return ChatPrompt(text, token_ids, text)


def template_text(
    model: ModelInfo,
    conversation: Conversation,
    format_: MessageFormat,
    attached: Mapping[str, Attached],
) -> str:
    """Return the `template_text` of the prompt of a conversation."""
    return _rendered(
        model,
        _arranged(model, _with_texts(conversation, attached), _images(attached)),
        format_,
    )


def tokens_of(model: ModelInfo, text: str, attached: Mapping[str, Attached]) -> list[int]:
    """Return the tokens of a beginning of a prompt's `template_text`."""
    if images := _images(attached):
        return placed(model, text, images)[0]
    return model.tokenizer.encode(text, add_special_tokens=False)


def _with_texts(conversation: Conversation, attached: Mapping[str, Attached]) -> Conversation:
    """Return a conversation with the texts of its files."""
    texts = {mark: each for mark, each in attached.items() if isinstance(each, str)}
    if not texts:
        return conversation
    messages = [replace(m, content=filled(m.content, texts)) for m in conversation.messages]
    return replace(conversation, messages=messages)


def _images(attached: Mapping[str, Attached]) -> dict[str, ImageInput]:
    return {mark: each for mark, each in attached.items() if isinstance(each, ImageInput)}


def _arranged(
    model: ModelInfo, conversation: Conversation, images: Mapping[str, ImageInput]
) -> Conversation:
    """Return a conversation with its images where the model is used to them."""
    if not images or not image_text(model).is_first:
        return conversation
    messages = [replace(m, content=moved_first(m.content)) for m in conversation.messages]
    return replace(conversation, messages=messages)


def _with_images(
    model: ModelInfo,
    conversation: Conversation,
    format_: MessageFormat,
    truncation: Truncation | None,
    images: Mapping[str, ImageInput],
) -> ChatPrompt:
    conversation = _arranged(model, conversation, images)
    text = _rendered(model, conversation, format_)
    _check_length(model, [text])
    token_ids, found = placed(model, text, images)
    marks = [mark for m in conversation.messages for mark in MARK.findall(m.content)]
    num_images = sum(mark in images for mark in marks)
    if len(found) != num_images:
        raise InvalidRequest(
            "messages",
            f"the model's chat template leaves out images: {len(found)} of {num_images} are left",
        )
    if truncation is not None and len(token_ids) > truncation.max_tokens(model):
        raise InvalidRequest("truncate_prompt_tokens", "a prompt with images cannot be truncated")
    written = image_text(model).text
    shown = MARK.sub(lambda mark: written if mark[0] in images else mark[0], text)
    return ChatPrompt(shown, token_ids, text, found)


def _rendered(model: ModelInfo, conversation: Conversation, format_: MessageFormat) -> str:
    described = conversation.described_tools
    kwargs = _template_kwargs(conversation, format_)
    if described and format_.is_native:
        kwargs["tools"] = [tool.template_fields() for tool in described]
    try:
        return render_turns(model, _turns(model, conversation, format_), **kwargs)
    except (InvalidRequest, RendererLost):
        raise
    # A template is a program of the model's authors: on input that it does not expect it may
    # raise anything, and only this request fails.
    except Exception as error:
        param = "chat_template_kwargs" if conversation.template_kwargs else "messages"
        raise InvalidRequest(param, _template_error_message(model, error)) from None


def _turns(
    model: ModelInfo, conversation: Conversation, format_: MessageFormat
) -> list[dict[str, Any]]:
    messages = conversation.messages
    is_adapted = conversation.adapt_turns
    if (described := conversation.described_tools) and not format_.is_native:
        messages = with_description(messages, described)
        # The system message may be none of the client's.
        is_adapted = is_adapted or not takes_system(model)
    return template_turns(adapted_turns(model, messages) if is_adapted else messages, format_)


def _template_error_message(model: ModelInfo, error: Exception) -> str:
    """Return why a template failed: its own message if that holds no part of the prompt."""
    if isinstance(error, TemplateFailed):
        kind, reason = error.kind, error.reason
    else:
        kind, reason = type(error).__name__, str(error) if isinstance(error, TemplateError) else ""
    template = model.tokenizer.chat_template
    if reason and isinstance(template, str) and reason in template:
        return f"the model's chat template rejects the messages: {reason}"
    logger.warning("the model's chat template failed: %s", kind)
    return f"the model's chat template fails with this request ({kind})"


def _template_kwargs(conversation: Conversation, format_: MessageFormat) -> dict[str, Any]:
    kwargs = dict(conversation.template_kwargs)
    if (thinking := conversation.thinking_switch) is not None:
        # Templates have a switch of either name.
        kwargs = {"enable_thinking": thinking, "thinking": thinking} | kwargs
    if (effort := conversation.reasoning_effort) is not None:
        known = harmony_effort(effort) if format_.has_channels else effort
        kwargs.setdefault("reasoning_effort", known)
        kwargs.setdefault("enable_thinking", effort not in _NO_REASONING)
    if (budget := conversation.thinking_budget) is not None:
        # Seed-OSS's says it to the model.
        kwargs.setdefault("thinking_budget", budget)
    continues = conversation.continue_final_message
    return kwargs | {
        "add_generation_prompt": conversation.add_generation_prompt and not continues,
        "continue_final_message": continues,
    }


def completion_prompt(
    model: ModelInfo,
    prompt: str | Sequence[int],
    *,
    add_special_tokens: bool,
    truncation: Truncation | None = None,
) -> list[int]:
    """Return the token ids of a prompt, which is a text or token ids.

    Raises:
        PromptTooLong: the prompt cannot fit in the context.
    """
    if isinstance(prompt, str):
        return _encoded(model, prompt, add_special_tokens=add_special_tokens, truncation=truncation)
    return _truncated(model, list(prompt), truncation)


def _encoded(
    model: ModelInfo, text: str, *, add_special_tokens: bool, truncation: Truncation | None
) -> list[int]:
    """Tokenize a text, unless its length alone shows that it is too long: that takes seconds."""
    limit = model.max_model_len
    longest = _longest_token(model, len(text))
    if longest is not None and (num_tokens := len(text) // longest) > limit:
        if truncation is None or (max_tokens := truncation.max_tokens(model)) > limit:
            raise PromptTooLong(num_tokens, limit)
        text = text[truncation.kept((max_tokens + NUM_CONTEXT_TOKENS) * longest)]
    token_ids = model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return _truncated(model, token_ids, truncation)


def _check_length(model: ModelInfo, texts: Sequence[str]) -> None:
    """Raise PromptTooLong if the lengths of texts, without their marks, show that they do not fit in the context."""
    num_characters = sum(len(MARK.sub("", text)) for text in texts)
    longest = _longest_token(model, num_characters)
    if longest is not None and num_characters // longest > model.max_model_len:
        raise PromptTooLong(num_characters // longest, model.max_model_len)


def _longest_token(model: ModelInfo, num_characters: int) -> int | None:
    """Return the length of the longest token, unless any text of this length fits in the context."""
    # A short text does not need the vocabulary, which takes a moment to read.
    return longest_token(model) if num_characters > model.max_model_len else None


def _truncated(model: ModelInfo, token_ids: list[int], truncation: Truncation | None) -> list[int]:
    return (
        token_ids
        if truncation is None
        else token_ids[truncation.kept(truncation.max_tokens(model))]
    )
