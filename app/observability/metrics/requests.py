"""Metrics of requests: their tokens, their latencies, their sizes."""

from collections import Counter as Tally
from collections.abc import Sequence
from typing import Final

from prometheus_client import Histogram

from app.observability.metrics import buckets
from app.observability.metrics.series import Series
from batching import NewTokens, Priority, SequenceStats

_FINISH_REASONS: Final = ("stop", "length", "abort", "timeout", "error")


class RequestMetrics:
    """Counts tokens as they are generated, and the rest when a request ends."""

    def __init__(self, series: Series) -> None:
        self._times = RequestTimes(series)
        self._sizes = RequestSizes(series)
        self._prompt_tokens = series.counter(
            "vllm:prompt_tokens", "Prompt tokens prefilled, including cached tokens."
        )
        self._cached_tokens = series.counter(
            "vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache."
        )
        self._output_tokens = series.counter("vllm:generation_tokens", "Tokens generated.")
        self._ended = series.counter_by(
            "finished_reason",
            _FINISH_REASONS,
            "vllm:request_success",
            "Requests finished, by reason.",
        )

    def observe_tokens(self, tokens: Sequence[NewTokens]) -> None:
        self._output_tokens.inc(sum(new.num_tokens for new in tokens))
        for sequence, _, gap in tokens:
            if gap is not None:
                self._times.between_tokens.observe(gap)
                continue
            self._prompt_tokens.inc(sequence.num_prompt_tokens)
            self._cached_tokens.inc(sequence.num_cached_tokens)
            self._times.observe_first(sequence)

    def observe_end(self, sequence: SequenceStats) -> None:
        self._ended.count(str(sequence.finish_reason))
        self._times.observe_end(sequence)
        self._sizes.observe_end(sequence)


class RequestTimes:
    """Histograms of the phases of a request.

    ```
    arrival ── queue ── first step ── prefill ── first token ── decode ── last token ── end
       └───────── time to first token ──────────────┘
    ```
    """

    def __init__(self, series: Series) -> None:
        self._first_token = series.seconds(
            "vllm:time_to_first_token", "from arrival to the first token", buckets.FIRST_TOKEN
        )
        self.between_tokens = series.seconds(
            "vllm:inter_token_latency",
            "between the tokens of successive steps",
            buckets.BETWEEN_TOKENS,
        )
        self._per_token = series.seconds(
            "vllm:request_time_per_output_token",
            "per output token after the first, averaged over a request",
            buckets.BETWEEN_TOKENS,
        )
        self._whole = series.seconds("vllm:e2e_request_latency", "from arrival to the end")
        self._queue = series.seconds(
            "vllm:request_queue_time", "from arrival to the first step that prefills the prompt"
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
        self._queue_wait = series.seconds_by(
            "priority",
            [priority.name.lower() for priority in Priority],
            "mlx_server:queue_wait",
            "from arrival to the first step, or to the end of a request that had none",
            buckets.QUEUE_WAIT,
        )

    def observe_first(self, sequence: SequenceStats) -> None:
        """Observe what is known at the first token; the request may end much later."""
        _observe(self._first_token, sequence.arrival_time, sequence.first_token_time)
        self._observe_wait(sequence)

    def observe_end(self, sequence: SequenceStats) -> None:
        if sequence.first_token_time is None:
            self._observe_wait(sequence)
        arrival, scheduled = sequence.arrival_time, sequence.scheduled_time
        first, last = sequence.first_token_time, sequence.last_token_time
        _observe(self._whole, arrival, sequence.end_time)
        _observe(self._queue, arrival, scheduled)
        _observe(self._prefill, scheduled, first)
        _observe(self._decode, first, last)
        _observe(self._inference, scheduled, last)
        if sequence.num_output_tokens > 1 and first is not None and last is not None:
            self._per_token.observe((last - first) / (sequence.num_output_tokens - 1))

    def _observe_wait(self, sequence: SequenceStats) -> None:
        until = sequence.end_time if sequence.scheduled_time is None else sequence.scheduled_time
        _observe(self._queue_wait[sequence.priority], sequence.arrival_time, until)


class RequestSizes:
    """Histograms of the requested and the actual sizes of requests."""

    def __init__(self, series: Series) -> None:
        self._prompt_tokens = series.counts(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", buckets.REQUEST_TOKENS
        )
        self._output_tokens = series.counts(
            "vllm:request_generation_tokens",
            "Tokens generated for a request.",
            buckets.REQUEST_TOKENS,
        )
        self._max_tokens = series.counts(
            "vllm:request_params_max_tokens",
            "Value of max_tokens of a request.",
            buckets.REQUEST_TOKENS,
        )
        self._choices = series.counts(
            "vllm:request_params_n", "Choices per prompt.", buckets.CHOICES
        )
        self._num_ended: Tally[int] = Tally()

    def observe_end(self, sequence: SequenceStats) -> None:
        self._prompt_tokens.observe(sequence.num_prompt_tokens)
        self._output_tokens.observe(sequence.num_output_tokens)
        self._max_tokens.observe(sequence.max_tokens)
        self._observe_choices(sequence.num_choices)

    def _observe_choices(self, num_choices: int) -> None:
        """Observe each prompt once: each of its n choices ends, so every n-th end is a prompt."""
        self._num_ended[num_choices] += 1
        if self._num_ended[num_choices] % num_choices == 0:
            self._choices.observe(num_choices)


def _observe(histogram: Histogram, start: float | None, stop: float | None) -> None:
    """Observe the time between two events if both occurred."""
    if start is not None and stop is not None:
        histogram.observe(stop - start)
