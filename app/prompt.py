"""Prompts to tokens: the chat template, and the tokenizer.  Blocking, so not for the event loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from jinja2 import TemplateError

from app.messages.history import template_messages
from app.messages.tool_format import ToolFormat
from app.schemas.chat import ChatCompletionRequest
from batching import InvalidRequest, ModelInfo

# Efforts that ask for no reasoning at all; templates know a switch for it, and some the word.
_NO_REASONING: Final = ("none", "minimal")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the model will see it."""

    text: str
    token_ids: list[int]


def chat_prompt(model: ModelInfo, body: ChatCompletionRequest, tools: ToolFormat) -> Rendered:
    """Render the conversation with the model's template, up to where the answer begins.

    Raises:
        InvalidRequest: the model has no template, or its template refuses the conversation.
    """
    if not model.tokenizer.has_chat_template:
        raise InvalidRequest(
            "model", f"the model '{model.model_id}' has no chat template; use /v1/completions"
        )
    described = [] if body.used_tool_choice == "none" else body.tools
    kwargs = _template_kwargs(body)
    if described and tools.is_native:
        kwargs["tools"] = [tool.template_fields() for tool in described]
    turns = template_messages(body.messages, tools, described)
    try:
        text: str = model.tokenizer.apply_chat_template(turns, tokenize=False, **kwargs)
    except TemplateError as error:
        message = f"the model's chat template refuses the messages: {error}"
        raise InvalidRequest("messages", message) from None
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            "chat_template_kwargs", f"the template cannot use it: {error}"
        ) from None
    return Rendered(text, model.tokenizer.encode(text, add_special_tokens=False))


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
    model: ModelInfo, prompt: str | Sequence[int], *, add_special_tokens: bool
) -> list[int]:
    """Return the tokens of a text; tokens are taken as they are."""
    if isinstance(prompt, str):
        return model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    return list(prompt)
