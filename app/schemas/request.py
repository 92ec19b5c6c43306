"""What the chat and the completion endpoint take alike."""

from typing import Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from app.schemas import unsupported
from app.schemas.fields import LogitBias, StopStringList, Text
from batching import Priority, SamplingParams

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


class WireRequest(BaseModel):
    """An object that a client sends.

    Types are not converted: `"1"` is no number.  null means the default, unknown fields mean
    nothing, and a field of `defaults` that asks for something is refused.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    defaults: ClassVar[unsupported.Defaults] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return unsupported.without_nulls(data, cls.defaults)


class StreamOptions(WireRequest):
    defaults = unsupported.STREAM_OPTIONS

    include_usage: bool = False


class GenerationRequest(WireRequest):
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
    seed: int | None = Field(default=None, ge=-_INT64_MAX - 1, le=_INT64_MAX)
    stop: StopStringList = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Literal["high", "normal", "low"] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] = "auto"

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "stream_options", "this needs stream: true", {"param": "stream_options"}
            )
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def queue_priority(self) -> Priority:
        """Our own field if it is given, else what OpenAI's `service_tier` means."""
        if self.priority is not None:
            return _PRIORITIES[self.priority]
        return _SERVICE_TIERS[self.service_tier]

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple(self.logit_bias.items()),
            seed=self.seed,
        )
