"""What the chat and the completion endpoint take alike."""

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from app.api.openai.schemas import unsupported
from app.api.openai.schemas.structured_outputs import StructuredOutputs
from app.api.schemas.base import RequestModel
from app.api.schemas.fields import MAX_TOKEN_IDS, LogitBias, StopStringList, Text, TokenId, fault
from batching import Priority

_INT32_MAX: Final = 2**31 - 1
_INT64_MAX: Final = 2**63 - 1

_PRIORITIES: Final = {"high": Priority.HIGH, "normal": Priority.NORMAL, "low": Priority.LOW}

# What OpenAI's clients can say without a field of ours.
_SERVICE_TIERS: Final = {
    "priority": Priority.HIGH,
    "fast": Priority.HIGH,
    "auto": Priority.NORMAL,
    "default": Priority.NORMAL,
    "scale": Priority.NORMAL,
    "flex": Priority.LOW,
}

# The engine holds as many at once; the server's setting says how many are served.
MAX_CHOICES: Final = 128

_MAX_TIMEOUT: Final = 86_400
_MAX_STOP_TOKENS: Final = 1024
_MAX_BAD_WORDS: Final = 128

BadWord = Annotated[Text, Field(min_length=1, max_length=256)]


class StreamOptions(RequestModel):
    defaults = unsupported.STREAM_OPTIONS

    include_usage: bool = False


class GenerationRequest(RequestModel):
    """Ranges are vLLM's, and OpenAI's where it has the field."""

    model: Text | None = Field(default=None, description="The default model if left out.")
    max_tokens: int | None = Field(default=None, ge=1, le=_INT32_MAX)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, le=_INT32_MAX, description="0 and -1 are off.")
    min_p: float = Field(default=0.0, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    # Beyond these, logits overflow.
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    logit_bias: LogitBias = Field(default_factory=dict)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    min_tokens: int = Field(default=0, ge=0, le=_INT32_MAX)
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=_MAX_STOP_TOKENS)] = Field(
        default_factory=list
    )
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    bad_words: Annotated[list[BadWord], Field(max_length=_MAX_BAD_WORDS)] = Field(
        default_factory=list
    )
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKEN_IDS)] | None
    ) = None
    truncate_prompt_tokens: int | None = Field(
        default=None,
        ge=-1,
        le=_INT32_MAX,
        description="Keep the last ones only; -1 keeps as many as fit.",
    )
    cache_salt: Annotated[Text, Field(min_length=1, max_length=1024)] | None = None
    structured_outputs: StructuredOutputs | None = None
    return_progress: bool = Field(
        default=False, description="Chunks that say how far the prompt is read; llama.cpp's."
    )
    return_timings: bool = Field(
        default=False, description="How long the parts of the work took; llama.cpp's `timings`."
    )
    timeout: float | None = Field(
        default=None,
        gt=0,
        le=_MAX_TIMEOUT,
        allow_inf_nan=False,
        description="Seconds after which the request ends with an error, waiting or running; "
        "the header `X-Request-Timeout` means the same.",
    )
    seed: int | None = Field(default=None, ge=-_INT64_MAX - 1, le=_INT64_MAX)
    stop: StopStringList = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Literal["high", "normal", "low"] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] = "auto"

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise fault("this needs stream: true", "stream_options")
        return self

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        wanted = self.num_requested_tokens
        if wanted is not None and self.min_tokens > wanted:
            raise fault("it must not be above the most tokens of an answer", "min_tokens")
        if self.truncate_prompt_tokens == 0:
            raise fault("a prompt of no tokens cannot be answered", "truncate_prompt_tokens")
        if self.return_progress and not self.stream:
            raise fault("this needs stream: true", "return_progress")
        if self.allowed_token_ids is not None and self.structured_outputs is not None:
            raise fault("it cannot be combined with structured_outputs", "allowed_token_ids")
        return self

    @property
    def num_requested_tokens(self) -> int | None:
        """The most tokens of an answer; None asks for as many as fit the context."""
        return self.max_tokens

    @property
    def num_choices(self) -> int:
        """How many answers to each prompt are made."""
        return self.n

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def queue_priority(self) -> Priority:
        """Our own field if it is given, else what OpenAI's `service_tier` means."""
        if self.priority is not None:
            return _PRIORITIES[self.priority]
        return _SERVICE_TIERS[self.service_tier]
