"""How much a model should think, and what else its chat template is told."""

import json
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator

from app.schemas.fields import check_encodable, fault

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_MAX_CHARACTERS: Final = 64 * 1024

# What the server itself tells a template, and what would change how it is found or rendered.
_RESERVED: Final = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "return_dict",
        "return_tensors",
        "return_assistant_tokens_mask",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
    }
)


def _check_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    for name in kwargs:
        if name in _RESERVED or name.startswith("_"):
            message = f"{name[:40]!r} is not for requests to set"
            raise fault(message)
    if len(check_encodable(json.dumps(kwargs, ensure_ascii=False))) > _MAX_CHARACTERS:
        message = f"it is longer than {_MAX_CHARACTERS} characters"
        raise fault(message)
    return kwargs


TemplateKwargs = Annotated[dict[str, Any], AfterValidator(_check_kwargs)]
