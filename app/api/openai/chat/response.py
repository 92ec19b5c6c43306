"""`/v1/chat/completions`: the response, and the chunks of a streamed one.

Only the fields that are set are sent.
"""

from typing import Any, Literal

from pydantic import BaseModel

from app.api.openai.schemas.logprobs import ChoiceLogprobs, PromptLogprobs
from app.api.openai.schemas.usage import PromptProgressChunk, Timings, Usage
from app.generation.choice import ChoiceFinishReason


class FunctionCall(BaseModel):
    """In a chunk, `arguments` is the next piece."""

    name: str | None = None
    arguments: str | None = None


class ResponseToolCall(BaseModel):
    """`index` is in chunks only; there the other fields are in a call's first chunk."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class CustomCall(BaseModel):
    """In a chunk, `input` is the next piece."""

    name: str | None = None
    input: str | None = None


class ResponseCustomCall(BaseModel):
    """The call of a tool that takes text.

    OpenAI documents no type for its chunks, and sends them like this:
    https://github.com/openai/openai-openapi/issues/576
    """

    index: int | None = None
    id: str | None = None
    type: Literal["custom"] | None = None
    custom: CustomCall


AnyCall = ResponseToolCall | ResponseCustomCall


class ResponseMessage(BaseModel):
    """The reasoning has both names that clients use."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    annotations: list[Any]
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[AnyCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ResponseMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: ChoiceFinishReason
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    service_tier: str
    timings: Timings | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(BaseModel):
    """The part of a message that a chunk adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[AnyCall] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None
    finish_reason: ChoiceFinishReason | None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    """Without `include_usage` there is no `usage`, not even null.

    The tokens of the prompt are in the first chunks only.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    timings: Timings | None = None
    prompt_progress: PromptProgressChunk | None = None
    prompt_token_ids: list[int] | None = None
