"""Prompts of a request: one or several, each in text or in tokens."""

from typing import Annotated, Any, Final

from pydantic import Field

from app.api.schemas.fields import TokenId, check_encodable, check_length, field_error

_MAX_TOKEN_IDS: Final = 1 << 20  # in all prompts together

Prompts = list[str | list[int]]


def read_prompts(value: Any, *, max_prompts: int) -> Prompts:
    """Return a list of prompts, each in text or in tokens, also of a single one."""
    if not isinstance(value, list) or not value or not isinstance(value[0], str | list):
        prompts = [value]
    else:
        prompts = value
    check_length(prompts, max_prompts)
    if sum(len(prompt) for prompt in prompts if isinstance(prompt, list)) > _MAX_TOKEN_IDS:
        raise field_error(f"it has more than {_MAX_TOKEN_IDS} tokens")
    return [_prompt(prompt) for prompt in prompts]


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, str):
        return check_encodable(value)
    # A boolean is no integer here.
    if not isinstance(value, list) or not {*map(type, value)} <= {int}:
        raise field_error("it must be a text or a list of token ids")
    return value


def prompts_type(max_prompts: int) -> Any:
    """Return what `read_prompts` takes, for the schema."""
    tokens = Annotated[list[TokenId], Field(min_length=1)]
    texts = Annotated[list[str], Field(min_length=1, max_length=max_prompts)]
    token_lists = Annotated[list[tokens], Field(min_length=1, max_length=max_prompts)]
    return str | tokens | texts | token_lists
