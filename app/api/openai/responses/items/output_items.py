"""The items of a response's output, and the response itself.

Only the fields that are set are sent.
"""

from typing import Any, Final, Literal, Self

from pydantic import BaseModel, Field

from app.api.openai.schemas.logprobs import TokenLogprobs
from app.observability.request_record import TokenUsage

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
UNFINISHED: Final = ("queued", "in_progress")


class OutputText(BaseModel):
    """`logprobs` are empty if they were not asked for."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: TokenLogprobs = Field(default_factory=list)


class SummaryText(BaseModel):
    type: Literal["summary_text"] = "summary_text"
    text: str


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class Message(BaseModel):
    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class Reasoning(BaseModel):
    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class FunctionCall(BaseModel):
    type: Literal["function_call"]
    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomToolCall(BaseModel):
    type: Literal["custom_tool_call"]
    id: str
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class Compaction(BaseModel):
    type: Literal["compaction"]
    id: str
    encrypted_content: str


OutputItem = Message | Reasoning | FunctionCall | CustomToolCall | Compaction


class InputTokensDetails(BaseModel):
    """`cache_write_tokens` were computed, and are retained as the request asks."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """`output_tokens` counts every generated token, also the one that ended the text."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: TokenUsage) -> Self:
        return cls(
            input_tokens=usage.num_prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=usage.num_cached_tokens,
                cache_write_tokens=usage.num_written_tokens,
            ),
            output_tokens=usage.num_output_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.num_reasoning_tokens),
            total_tokens=usage.num_prompt_tokens + usage.num_output_tokens,
        )


class ResponseError(BaseModel):
    code: str
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseConversation(BaseModel):
    id: str


class ResponseObject(BaseModel):
    """The parameters of the request, and its results so far."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    # Those that were stored before have no such fields.
    prompt_cache_retention: str | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    store: bool = True
    conversation: ResponseConversation | None = None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
