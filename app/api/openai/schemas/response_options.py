"""The parts of a response that a request may ask for, besides the text."""

from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from app.api.schemas.base import RequestModel
from app.api.schemas.fields import TokenId, field_error

_MAX_LOGPROBS: Final = 20
_MAX_LOGPROB_TOKENS: Final = 128


class StreamOptions(RequestModel):
    include_usage: bool | None = Field(
        default=None, description="If left out, as `continuous_usage_stats`."
    )
    continuous_usage_stats: bool = Field(
        default=False,
        description="`usage` so far in every chunk, unless `include_usage` is false; vLLM's.",
    )

    @property
    def has_usage(self) -> bool:
        return self.continuous_usage_stats if self.include_usage is None else self.include_usage


class ResponseOptions(RequestModel):
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_progress: bool = Field(
        default=False, description="Chunks with the progress of the prefill; llama.cpp's."
    )
    return_timings: bool = Field(
        default=False, description="`timings` of the request; llama.cpp's."
    )
    timings_per_token: bool = Field(
        default=False, description="`timings` also in every chunk; llama.cpp's."
    )
    return_token_ids: bool = Field(
        default=False, description="The tokens of prompt and output; vLLM's."
    )
    return_tokens_as_token_ids: bool = Field(
        default=False, description="Tokens in log probabilities are named `token_id:…`; vLLM's."
    )
    prompt_logprobs: int | None = Field(
        default=None, ge=0, le=_MAX_LOGPROBS, description="Of the prompt's tokens; vLLM's."
    )
    logprob_token_ids: Annotated[list[TokenId], Field(max_length=_MAX_LOGPROB_TOKENS)] = Field(
        default_factory=list,
        description="Log probabilities of these tokens instead of the most probable ones; vLLM's.",
    )

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        for name in ("stream_options", "return_progress"):
            if getattr(self, name) and not self.stream:
                raise field_error("this needs stream: true", name)
        if self.prompt_logprobs is not None and self.stream:
            raise field_error("this cannot be streamed", "prompt_logprobs")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.has_usage

    @property
    def include_timings(self) -> bool:
        return self.return_timings or self.timings_per_token

    @property
    def includes_running_usage(self) -> bool:
        """True if every chunk has the usage so far."""
        options = self.stream_options
        return options is not None and options.continuous_usage_stats and options.has_usage
