"""Metrics of steps, and of the cached blocks that they evict or reuse."""

from app.observability.metrics import buckets
from app.observability.metrics.series import Series
from batching import StepRecord


class StepMetrics:
    """Counts steps and observes the ages of cached blocks."""

    def __init__(self, series: Series) -> None:
        self._tokens = series.counts(
            "vllm:iteration_tokens_total", "Tokens processed in a step.", buckets.STEP_TOKENS
        )
        self._duration = series.seconds("mlx_server:step_duration", "per step", buckets.DELAY)
        self._failed = series.counter("mlx_server:failed_steps", "Steps that raised an exception.")
        self._lifetime = series.seconds(
            "vllm:kv_block_lifetime",
            "from the caching of a block to its eviction",
            buckets.BLOCK_AGE,
        )
        self._idle_time = series.seconds(
            "vllm:kv_block_idle_before_evict",
            "from the last use of a cached block to its eviction",
            buckets.BLOCK_AGE,
        )
        self._reuse_gap = series.seconds(
            "vllm:kv_block_reuse_gap",
            "from the last use of a cached block to its reuse",
            buckets.BLOCK_AGE,
        )

    def observe(self, step: StepRecord) -> None:
        """Count a step; a failed one has processed nothing."""
        self._duration.observe(step.duration)
        if step.has_failed:
            self._failed.inc()
        else:
            self._tokens.observe(step.num_tokens)
        for lifetime in step.block_ages.lifetimes:
            self._lifetime.observe(lifetime)
        for idle_time in step.block_ages.idle_times:
            self._idle_time.observe(idle_time)
        for gap in step.block_ages.reuse_gaps:
            self._reuse_gap.observe(gap)
