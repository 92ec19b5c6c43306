"""Tokens, timings and progress of a request."""

from collections.abc import Sequence
from typing import Self

from pydantic import BaseModel

from app.observability.request_record import TokenUsage
from batching import SequenceStats


class PromptTokensDetails(BaseModel):
    """Only what is set is sent: `image_tokens` is there with images only, and `cache_write_tokens` if the prompt is to be retained."""

    cached_tokens: int
    audio_tokens: int
    cache_write_tokens: int | None = None
    image_tokens: int | None = None


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int
    audio_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """`completion_tokens` counts every generated token, also the one that ended the text."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, usage: TokenUsage) -> Self:
        images = {"image_tokens": usage.num_image_tokens} if usage.num_image_tokens else {}
        written = {"cache_write_tokens": usage.num_written_tokens} if usage.written_tokens else {}
        return cls(
            prompt_tokens=usage.num_prompt_tokens,
            completion_tokens=usage.num_output_tokens,
            total_tokens=usage.num_prompt_tokens + usage.num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=usage.num_cached_tokens, audio_tokens=0, **written, **images
            ),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=usage.num_reasoning_tokens,
                audio_tokens=0,
                accepted_prediction_tokens=0,
                rejected_prediction_tokens=0,
            ),
        )


class Timings(BaseModel):
    """llama.cpp's names, and the time in the queue.

    `prompt_n` are the prefilled tokens, `cache_n` the cached ones.  The prompt's time ends with
    the first token, that of the output begins there.
    """

    queue_ms: float
    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float

    @classmethod
    def of(cls, sequences: Sequence[SequenceStats], usage: TokenUsage) -> Self:
        """Return the timings of all sequences as of one: from the first event to the last."""
        started = min(sequence.scheduled_time or 0.0 for sequence in sequences)
        first = min(sequence.first_token_time or 0.0 for sequence in sequences)
        last = max(sequence.last_token_time or 0.0 for sequence in sequences)
        num_prefilled = usage.num_prompt_tokens - usage.num_cached_tokens
        # The first token is the prompt's: it took no time of its own.
        num_decoded = max(0, usage.num_output_tokens - len(sequences))
        return cls(
            queue_ms=_ms(started - sequences[0].arrival_time),
            cache_n=usage.num_cached_tokens,
            prompt_n=num_prefilled,
            prompt_ms=_ms(first - started),
            prompt_per_token_ms=_ms((first - started) / max(1, num_prefilled)),
            prompt_per_second=_rate(num_prefilled, first - started),
            predicted_n=usage.num_output_tokens,
            predicted_ms=_ms(last - first),
            predicted_per_token_ms=_ms((last - first) / max(1, num_decoded)),
            predicted_per_second=_rate(num_decoded, last - first),
        )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _rate(number: int, seconds: float) -> float:
    return round(number / seconds, 3) if seconds > 0 else 0.0


class PromptProgressChunk(BaseModel):
    """How much of a prompt is prefilled, in tokens; llama.cpp's names."""

    total: int
    cache: int
    processed: int
    time_ms: int
