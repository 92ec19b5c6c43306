"""How many tokens a request took."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel

from batching import SequenceStats


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    """`completion_tokens` counts every generated token, the one that ended the text included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(
        cls,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_output_tokens: int,
        num_reasoning_tokens: int,
    ) -> Self:
        return cls(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_output_tokens,
            total_tokens=num_prompt_tokens + num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached_tokens),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=num_reasoning_tokens
            ),
        )


class Timings(BaseModel):
    """How long the parts of the work took; llama.cpp's names, and the time in the queue.

    `prompt_n` is what was computed, `cache_n` what was there already.  The prompt's time ends
    with the first token, the answer's begins there.
    """

    queue_ms: float
    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float

    @classmethod
    def of(cls, answers: Sequence[SequenceStats], usage: Usage) -> Self:
        """Look at all answers of a request as one: from the first event to the last."""
        started = min(answer.scheduled_time or 0.0 for answer in answers)
        first = min(answer.first_token_time or 0.0 for answer in answers)
        last = max(answer.last_token_time or 0.0 for answer in answers)
        num_cached = usage.prompt_tokens_details.cached_tokens
        num_read = usage.prompt_tokens - num_cached
        return cls(
            queue_ms=_ms(started - answers[0].arrival_time),
            cache_n=num_cached,
            prompt_n=num_read,
            prompt_ms=_ms(first - started),
            prompt_per_second=_rate(num_read, first - started),
            predicted_n=usage.completion_tokens,
            predicted_ms=_ms(last - first),
            # The first token is the prompt's: it took no time of its own.
            predicted_per_second=_rate(usage.completion_tokens - len(answers), last - first),
        )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _rate(number: int, seconds: float) -> float:
    return round(number / seconds, 3) if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Totals:
    """What is told of a request as a whole; timings only if they were asked for."""

    usage: Usage
    timings: Timings | None = None

    def told(self, *, with_usage: bool = True) -> dict[str, Any]:
        """Return the fields to send."""
        told: dict[str, Any] = {"usage": self.usage} if with_usage else {}
        return told if self.timings is None else told | {"timings": self.timings}
