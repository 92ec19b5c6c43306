"""What is counted of answers: their tokens, how long they take, how large they are."""

from collections import Counter as Tally
from typing import Final

from prometheus_client import Histogram

from app.observability.metrics import buckets as bounds
from app.observability.metrics.series import Series
from batching import Priority, SequenceStats

_FINISH_REASONS: Final = ("stop", "length", "abort", "timeout", "error")


class AnswerMetrics:
    """Counts tokens as they come, and the rest when an answer has ended."""

    def __init__(self, series: Series) -> None:
        self._times = AnswerTimes(series)
        self._sizes = AnswerSizes(series)
        self._prompt_tokens = series.counter(
            "vllm:prompt_tokens", "Tokens of prompts that have been read, cached ones included."
        )
        self._cached_tokens = series.counter(
            "vllm:prompt_tokens_cached", "Those of them that were cached."
        )
        self._output_tokens = series.counter("vllm:generation_tokens", "Tokens of answers.")
        self._ended = series.counter_by(
            "finished_reason", _FINISH_REASONS, "vllm:request_success", "Answers that have ended."
        )

    def observe_tokens(self, answer: SequenceStats, num_tokens: int, gap: float | None) -> None:
        self._output_tokens.inc(num_tokens)
        if gap is not None:
            self._times.between_tokens.observe(gap)
            return
        self._prompt_tokens.inc(answer.num_prompt_tokens)
        self._cached_tokens.inc(answer.num_cached_tokens)
        self._times.observe_first(answer)

    def observe_end(self, answer: SequenceStats) -> None:
        self._ended.count(str(answer.finish_reason))
        self._times.observe_end(answer)
        self._sizes.observe_end(answer)


class AnswerTimes:
    """Distributions of an answer's phases.

    ```
    arrival ── queue ── first step ── prefill ── first token ── decode ── last token ── end
       └───────── time to first token ──────────────┘
    ```
    """

    def __init__(self, series: Series) -> None:
        self._first_token = series.seconds(
            "vllm:time_to_first_token", "from arrival to the first token", bounds.FIRST_TOKEN
        )
        self.between_tokens = series.seconds(
            "vllm:inter_token_latency", "between tokens and the next ones", bounds.BETWEEN_TOKENS
        )
        self._per_token = series.seconds(
            "vllm:request_time_per_output_token",
            "for each token after an answer's first one, on average",
            bounds.BETWEEN_TOKENS,
        )
        self._whole = series.seconds("vllm:e2e_request_latency", "from arrival to the end")
        self._queue = series.seconds(
            "vllm:request_queue_time", "from arrival to the first step that reads the prompt"
        )
        self._prefill = series.seconds(
            "vllm:request_prefill_time", "from the first step to the first token"
        )
        self._decode = series.seconds(
            "vllm:request_decode_time", "from the first token to the last one"
        )
        self._inference = series.seconds(
            "vllm:request_inference_time", "from the first step to the last token"
        )
        self._wait_of_class = series.seconds_by(
            "priority",
            [priority.name.lower() for priority in Priority],
            "mlx_server:queue_wait",
            "from arrival to the first step, or to the end of an answer that got none",
            bounds.QUEUE_WAIT,
        )

    def observe_first(self, answer: SequenceStats) -> None:
        """Observe what is known at the first token; the end may be far away."""
        _observe(self._first_token, answer.arrival_time, answer.first_token_time)
        self._observe_wait(answer)

    def observe_end(self, answer: SequenceStats) -> None:
        if answer.first_token_time is None:
            self._observe_wait(answer)
        arrival, scheduled = answer.arrival_time, answer.scheduled_time
        first, last = answer.first_token_time, answer.last_token_time
        _observe(self._whole, arrival, answer.end_time)
        _observe(self._queue, arrival, scheduled)
        _observe(self._prefill, scheduled, first)
        _observe(self._decode, first, last)
        _observe(self._inference, scheduled, last)
        if answer.num_output_tokens > 1 and first is not None and last is not None:
            self._per_token.observe((last - first) / (answer.num_output_tokens - 1))

    def _observe_wait(self, answer: SequenceStats) -> None:
        until = answer.end_time if answer.scheduled_time is None else answer.scheduled_time
        _observe(self._wait_of_class[answer.priority], answer.arrival_time, until)


class AnswerSizes:
    """Distributions of what answers were asked for, and of what they became."""

    def __init__(self, series: Series) -> None:
        self._prompt_tokens = series.counts(
            "vllm:request_prompt_tokens", "Tokens of a prompt.", bounds.REQUEST_TOKENS
        )
        self._output_tokens = series.counts(
            "vllm:request_generation_tokens", "Tokens of an answer.", bounds.REQUEST_TOKENS
        )
        self._max_tokens = series.counts(
            "vllm:request_params_max_tokens",
            "Most tokens that an answer may have.",
            bounds.REQUEST_TOKENS,
        )
        self._choices = series.counts(
            "vllm:request_params_n", "Answers to one prompt.", bounds.CHOICES
        )
        self._num_ended: Tally[int] = Tally()

    def observe_end(self, answer: SequenceStats) -> None:
        self._prompt_tokens.observe(answer.num_prompt_tokens)
        self._output_tokens.observe(answer.num_output_tokens)
        self._max_tokens.observe(answer.max_tokens)
        self._observe_choices(answer.num_choices)

    def _observe_choices(self, num_choices: int) -> None:
        """Observe each prompt once: all of its answers end, so every n-th of those is a prompt."""
        self._num_ended[num_choices] += 1
        if self._num_ended[num_choices] % num_choices == 0:
            self._choices.observe(num_choices)


def _observe(histogram: Histogram, start: float | None, stop: float | None) -> None:
    """Observe the time between two moments that there were."""
    if start is not None and stop is not None:
        histogram.observe(stop - start)
