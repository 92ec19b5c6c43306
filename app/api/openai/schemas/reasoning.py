"""Reasoning effort, and further variables of the chat template."""

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator

from app.api.schemas.fields import field_error, json_text

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_MAX_CHARACTERS: Final = 64 * 1024
# Templates walk through what they get recursively.
_MAX_DEPTH: Final = 32

# Variables that the server sets, that would change how the template is found or rendered, that
# templates call, and the texts of special tokens.
RESERVED: Final = frozenset(
    {
        "messages",
        "conversation",
        "conversations",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "return_dict",
        "return_tensors",
        "return_assistant_tokens_mask",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
        "self",
        "raise_exception",
        "strftime_now",
        "namespace",
        "dict",
        "range",
        "lipsum",
        "cycler",
        "joiner",
        "loop",
        "caller",
        "super",
        "varargs",
        "kwargs",
        "additional_special_tokens",
        "extra_special_tokens",
        "bos_token",
        "eos_token",
        "unk_token",
        "sep_token",
        "pad_token",
        "cls_token",
        "mask_token",
    }
)


def _check_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    json_text(kwargs, max_depth=_MAX_DEPTH, max_characters=_MAX_CHARACTERS)
    for name in kwargs:
        if name in RESERVED or name.startswith("_"):
            message = f"{name[:40]!r} cannot be set by a request"
            raise field_error(message)
    return kwargs


TemplateKwargs = Annotated[dict[str, Any], AfterValidator(_check_kwargs)]
