"""A log line with the throughput, every ten seconds in which the engine made steps."""

import logging
from collections.abc import Sequence
from typing import Final

from batching import NewTokens, SchedulerStats, SequenceStats, StepRecord

logger = logging.getLogger(__name__)

# Seconds.
INTERVAL: Final = 10.0


class ThroughputLogger:
    """Accumulates tokens and steps of the engines; an EngineObserver.

    Tokens of prompts count when they are prefilled, and those found in the cache do not.
    """

    def __init__(self) -> None:
        self._stats: SchedulerStats | None = None
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_steps = 0
        self._logged_at: float | None = None

    def observe_step(self, step: StepRecord) -> None:
        self._num_steps += 1
        self._num_prompt_tokens += step.num_prompt_tokens
        self._stats = step.stats

    def observe_stats(self, stats: SchedulerStats) -> None:
        self._stats = stats

    def observe_tokens(self, tokens: Sequence[NewTokens]) -> None:
        self._num_output_tokens += sum(new.num_tokens for new in tokens)

    def observe_end(self, sequence: SequenceStats) -> None:
        """Ignore it: the request has a log line of its own."""

    def log_if_due(self, now: float) -> None:
        """Log the throughput since the last line if ten seconds have passed and there were steps."""
        if self._logged_at is None:
            self._logged_at = now
        elapsed = now - self._logged_at
        if elapsed < INTERVAL:
            return
        if self._num_steps and self._stats is not None:
            logger.info("%s", self._line(self._stats, elapsed))
        self._num_prompt_tokens = self._num_output_tokens = self._num_steps = 0
        self._logged_at = now

    def _line(self, stats: SchedulerStats, elapsed: float) -> str:
        used = 1 - stats.num_free_blocks / stats.num_blocks
        hits = stats.num_hit_tokens / max(1, stats.num_queried_tokens)
        return (
            f"running={stats.num_running} waiting={stats.num_waiting} "
            f"prompt={self._num_prompt_tokens / elapsed:.1f}/s "
            f"output={self._num_output_tokens / elapsed:.1f}/s "
            f"kv_cache={used:.0%} prefix_hits={hits:.0%} preemptions={stats.num_preemptions}"
        )
