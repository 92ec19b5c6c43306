"""Prompts to tokens: the chat template, and the tokenizer.  Blocking, so not for the event loop."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from jinja2 import TemplateError

from app.api.openai.chat.request import ChatCompletionRequest
from app.parsing.tool_format import ToolFormat
from app.prompts.chat_history import template_messages
from app.prompts.length_bound import token_bytes
from batching import ContextLengthExceeded, InvalidRequest, ModelInfo

logger = logging.getLogger(__name__)

# Efforts that ask for no reasoning at all; templates know a switch for it, and some the word.
_NO_REASONING: Final = ("none", "minimal")

_MAX_CHARACTER_BYTES: Final = 4

# Before the tokens that a long prompt is cut to, as many more decide where words begin.
_NUM_CONTEXT_TOKENS: Final = 64


class PromptTooLong(ContextLengthExceeded):
    """A prompt of which the length alone says that it does not fit the context."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(num_tokens, None, limit)
        # Clients look for the beginning of the text.
        message = (
            f"This model's maximum context length is {limit} tokens. "
            f"However, your prompt has at least {num_tokens}. "
            "Please reduce the length of the prompt."
        )
        self.args = (message,)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the model will see it."""

    text: str
    token_ids: list[int]


def chat_prompt(model: ModelInfo, body: ChatCompletionRequest, tools: ToolFormat) -> Rendered:
    """Render the conversation with the model's template, up to where the answer begins.

    Raises:
        InvalidRequest: the model has no template, or its template refuses the conversation.
        PromptTooLong: it cannot fit the context.
    """
    if not model.tokenizer.has_chat_template:
        raise InvalidRequest(
            "model", f"the model '{model.model_id}' has no chat template; use /v1/completions"
        )
    text = _rendered(model, body, tools)
    token_ids = _encoded(
        model, text, add_special_tokens=False, num_kept=body.truncate_prompt_tokens
    )
    return Rendered(text, token_ids)


def _rendered(model: ModelInfo, body: ChatCompletionRequest, tools: ToolFormat) -> str:
    described = [] if body.used_tool_choice == "none" else body.tools
    kwargs = _template_kwargs(body)
    if described and tools.is_native:
        kwargs["tools"] = [tool.template_fields() for tool in described]
    turns = template_messages(body.messages, tools, described)
    try:
        text: str = model.tokenizer.apply_chat_template(turns, tokenize=False, **kwargs)
    # A template is a program of the model's authors: with what it does not expect it raises
    # anything, and that concerns this request only.
    except Exception as error:
        param = "chat_template_kwargs" if body.chat_template_kwargs else "messages"
        raise InvalidRequest(param, _why_not_rendered(model, error)) from None
    return text


def _why_not_rendered(model: ModelInfo, error: Exception) -> str:
    """Return why a template failed, in its own words if nothing of the prompt is among them."""
    reason = str(error)
    template = model.tokenizer.chat_template
    if isinstance(error, TemplateError) and isinstance(template, str) and reason in template:
        return f"the model's chat template refuses the messages: {reason}"
    logger.warning("the chat template raised %s", type(error).__name__)
    return f"the model's chat template fails with this request ({type(error).__name__})"


def _template_kwargs(body: ChatCompletionRequest) -> dict[str, Any]:
    kwargs = dict(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        kwargs.setdefault("enable_thinking", body.reasoning_effort not in _NO_REASONING)
    return kwargs | {
        "add_generation_prompt": body.add_generation_prompt and not body.continue_final_message,
        "continue_final_message": body.continue_final_message,
    }


def completion_prompt(
    model: ModelInfo,
    prompt: str | Sequence[int],
    *,
    add_special_tokens: bool,
    num_kept: int | None = None,
) -> list[int]:
    """Return the tokens of a text; tokens are taken as they are.

    num_kept: how many tokens of its end are wanted; None wants all, and -1 as many as fit.

    Raises:
        PromptTooLong: it cannot fit the context.
    """
    if isinstance(prompt, str):
        return _encoded(model, prompt, add_special_tokens=add_special_tokens, num_kept=num_kept)
    return list(prompt)


def _encoded(
    model: ModelInfo, text: str, *, add_special_tokens: bool, num_kept: int | None
) -> list[int]:
    """Tokenize a text, unless its length alone tells that it is too long: that takes seconds."""
    limit = model.max_model_len
    # No token is shorter than a byte.
    known = token_bytes(model) if len(text) * _MAX_CHARACTER_BYTES > limit else None
    if known is not None and (num_tokens := known.fewest_tokens(text)) > limit:
        if num_kept is None or num_kept > limit:
            raise PromptTooLong(num_tokens, limit)
        num_wanted = (limit if num_kept < 0 else num_kept) + _NUM_CONTEXT_TOKENS
        text = text[-num_wanted * known.num_longest :]
    return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
