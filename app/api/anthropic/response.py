"""`/v1/messages`: the response, and the errors.

What has no meaning here has the value that Anthropic documents for that, which is the field's default.
"""

from typing import Any, Final, Literal, Self

from pydantic import BaseModel

from app.api.schemas.errors import error_responses
from app.observability.request_record import TokenUsage

_HOUR: Final = 3600.0

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(BaseModel):
    type: Literal["text"]
    text: str
    citations: None = None


class ThinkingBlock(BaseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class DirectCaller(BaseModel):
    """The model itself calls a tool, and no program of it."""

    type: Literal["direct"] = "direct"


class ToolUseBlock(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller = DirectCaller()


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(BaseModel):
    thinking_tokens: int


class CacheCreation(BaseModel):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(BaseModel):
    """The tokens of the prompt are those three together.

    What is computed counts as created up to the last `cache_control`, as it is retained; a stream knows what was
    cached at its end, where it has no `cache_creation`.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_creation: CacheCreation | None
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    inference_geo: None = None
    server_tool_use: None = None
    service_tier: Literal["standard"] = "standard"

    @classmethod
    def of(cls, usage: TokenUsage) -> Self:
        written = usage.written_tokens
        hour = sum(number for seconds, number in written.items() if seconds >= _HOUR)
        created = usage.num_written_tokens
        return cls(
            input_tokens=usage.num_prompt_tokens - usage.num_cached_tokens - created,
            cache_creation_input_tokens=created,
            cache_creation=CacheCreation(
                ephemeral_5m_input_tokens=created - hour, ephemeral_1h_input_tokens=hour
            ),
            cache_read_input_tokens=usage.num_cached_tokens,
            output_tokens=usage.num_output_tokens,
            output_tokens_details=ThinkingTokens(thinking_tokens=usage.num_reasoning_tokens),
        )


class Message(BaseModel):
    """At the start of a stream it has no content and no reason."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None = None
    container: None = None
    diagnostics: None = None
    usage: MessageUsage


class BetaMessageUsage(MessageUsage):
    iterations: None = None
    speed: None = None


class BetaMessage(Message):
    """The same with the query `beta=true`, which Anthropic's SDKs send for their beta types."""

    context_management: None = None
    usage: BetaMessageUsage


class TokenCount(BaseModel):
    input_tokens: int


class BetaTokenCount(TokenCount):
    context_management: None = None


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


ERROR_RESPONSES: Final = error_responses(AnthropicError)
