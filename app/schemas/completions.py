"""`/v1/completions`: the request, the answer, and the chunks of a streamed answer."""

from types import UnionType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator
from pydantic_core import PydanticCustomError

from app.schemas import unsupported
from app.schemas.fields import check_encodable
from app.schemas.request import GenerationRequest
from app.schemas.usage import Usage
from batching import FinishReason


def _only_prompt(value: Any) -> str | list[int]:
    """Return the prompt, in text or tokens, also from a list of one prompt."""
    prompts = value if _is_list_of(value, str | list) else [value]
    if len(prompts) > 1:
        raise PydanticCustomError("prompts", "several prompts at once are not supported yet")
    if isinstance(prompts[0], str):
        return check_encodable(prompts[0])
    if not _is_list_of(prompts[0], int) and prompts[0] != []:
        raise PydanticCustomError("prompt", "it must be a text or a list of token ids")
    token_ids: list[int] = prompts[0]
    return token_ids


def _is_list_of(value: Any, kind: type | UnionType) -> bool:
    """True for a list that is not empty; a boolean is no integer here."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, kind) and not isinstance(item, bool) for item in value)
    )


Prompt = Annotated[
    str | list[int],
    PlainValidator(
        _only_prompt, json_schema_input_type=str | list[int] | list[str] | list[list[int]]
    ),
]


class CompletionRequest(GenerationRequest):
    defaults = unsupported.COMPLETIONS

    prompt: Prompt
    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1, description="16 if left out.")


class CompletionChoice(BaseModel):
    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: FinishReason


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str


class CompletionChunkChoice(BaseModel):
    index: int
    text: str
    logprobs: None
    finish_reason: FinishReason | None


class CompletionChunk(BaseModel):
    """Only what is set is sent: without `include_usage` there is no `usage`, not even null."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None
