"""What is counted of steps."""

from app.observability.metrics import buckets as bounds
from app.observability.metrics.series import Series
from batching import StepRecord


class StepMetrics:
    """Counts steps, and what became of cached blocks in them."""

    def __init__(self, series: Series) -> None:
        self._tokens = series.counts(
            "vllm:iteration_tokens_total", "Tokens that a step reads.", bounds.STEP_TOKENS
        )
        self._duration = series.seconds(
            "mlx_server:step_duration", "that a step takes", bounds.DELAY
        )
        self._failed = series.counter("mlx_server:failed_steps", "Steps that raised.")
        self._lifetime = series.seconds(
            "vllm:kv_block_lifetime", "that evicted contents could be found", bounds.BLOCK_AGE
        )
        self._idle_time = series.seconds(
            "vllm:kv_block_idle_before_evict",
            "that nobody held contents before they were evicted",
            bounds.BLOCK_AGE,
        )
        self._reuse_gap = series.seconds(
            "vllm:kv_block_reuse_gap",
            "that nobody held contents before they were reused",
            bounds.BLOCK_AGE,
        )

    def observe(self, step: StepRecord) -> None:
        """Count a step; one that failed has read nothing."""
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
