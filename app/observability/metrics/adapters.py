"""Metrics by adapter, with a bounded number of names."""

from collections.abc import Sequence
from typing import Final

from app.observability.metrics.series import Series
from batching import NewTokens, SequenceStats

# Names of one model; clients cannot make any, but those who load adapters at run time may.
MAX_NAMES: Final = 64
OTHER: Final = "other"


class AdapterMetrics:
    """Counts what requests with adapters do; adapters beyond the first 64 count as `other`."""

    def __init__(self, series: Series) -> None:
        self._names: set[str] = set()
        self._requests = series.counter_by(
            "adapter", (), "mlx_server:adapter_requests", "Requests with the adapter that ended."
        )
        self._prompt_tokens = series.counter_by(
            "adapter", (), "mlx_server:adapter_prompt_tokens", "Their prompt tokens."
        )
        self._output_tokens = series.counter_by(
            "adapter",
            (),
            "mlx_server:adapter_generation_tokens",
            "Tokens generated with the adapter.",
        )
        self._first_tokens = series.counter_by(
            "adapter",
            (),
            "mlx_server:adapter_first_token_seconds",
            "Seconds from arrival to the first token, of all its requests together.",
        )

    def observe_tokens(self, tokens: Sequence[NewTokens]) -> None:
        for sequence, num_tokens, gap in tokens:
            if sequence.adapter is None:
                continue
            name = self._label(sequence.adapter)
            self._output_tokens.count(name, num_tokens)
            if gap is None and sequence.first_token_time is not None:
                self._prompt_tokens.count(name, sequence.num_prompt_tokens)
                self._first_tokens.count(name, sequence.first_token_time - sequence.arrival_time)

    def observe_end(self, sequence: SequenceStats) -> None:
        if sequence.adapter is not None:
            self._requests.count(self._label(sequence.adapter))

    def _label(self, name: str) -> str:
        if name not in self._names and len(self._names) >= MAX_NAMES:
            return OTHER
        self._names.add(name)
        return name
