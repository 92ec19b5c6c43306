"""Where the metrics of one model come together, and the page that Prometheus reads."""

from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder

from app.observability.metrics import buckets as bounds
from app.observability.metrics.engine_gauges import Snapshot
from app.observability.metrics.requests import AnswerMetrics
from app.observability.metrics.series import Series
from app.observability.metrics.steps import StepMetrics
from batching import SchedulerStats, SequenceStats, StepRecord

_OPEN_METRICS: Final = "application/openmetrics-text"
# Asked for anything else, the library's OpenMetrics has underscores instead of colons.
_WITH_COLONS: Final = f"{_OPEN_METRICS};version=1.0.0;escaping=allow-utf-8"


class Metrics:
    """Counts what an engine does; an EngineObserver.

    Its registry is its own, so that several apps in a process do not meet.  Only the event loop
    calls it.  As at vLLM, each of the `n` answers to a prompt is counted as a request with that
    prompt.  Pass the `rejection_reasons` that are known: what has a 0 before its 1 shows in a rate.
    """

    def __init__(self, model_name: str, *, rejection_reasons: Iterable[str] = ()) -> None:
        self._registry = CollectorRegistry()
        self._snapshot = Snapshot(model_name)
        self._registry.register(self._snapshot)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        series = Series(self._registry, model_name)
        self._answers = AnswerMetrics(series)
        self._steps = StepMetrics(series)
        self._refused = series.counter_by(
            "reason", rejection_reasons, "vllm:admission_rejections", "Requests turned away."
        )
        self._loop_lag = series.seconds(
            "mlx_server:event_loop_lag", "that the event loop is late", bounds.DELAY
        )

    # What the engine does

    def observe_step(self, step: StepRecord) -> None:
        self._snapshot.stats = step.stats
        self._steps.observe(step)

    def observe_stats(self, stats: SchedulerStats) -> None:
        self._snapshot.stats = stats

    def observe_tokens(self, answer: SequenceStats, num_tokens: int, gap: float | None) -> None:
        """Count tokens that came together, and the time since those before.

        What a preemption costs is in that gap, or in the time to the first token.
        """
        self._answers.observe_tokens(answer, num_tokens, gap)

    def observe_end(self, answer: SequenceStats) -> None:
        self._answers.observe_end(answer)

    # What happens around it

    def refused(self, reason: str) -> None:
        """Count a request that was turned away; `reason` is one of our words, never a client's."""
        self._refused.count(reason)

    def observe_loop_lag(self, seconds: float) -> None:
        """Take how late the event loop was with something that was due."""
        self._loop_lag.observe(seconds)

    def set_health(self, is_healthy: bool, seconds_since_step: float) -> None:
        """Say how the engine is; one that has nothing to do makes no steps and is well."""
        self._snapshot.is_healthy = is_healthy
        self._snapshot.seconds_since_step = seconds_since_step

    def set_cache_config(
        self, *, block_size: int, num_blocks: int, enable_prefix_cache: bool
    ) -> None:
        """Say what the KV cache is like, in vLLM's words; it calls all blocks those of a GPU."""
        self._snapshot.cache_config = {
            "block_size": block_size,
            "num_gpu_blocks": num_blocks,
            "enable_prefix_caching": enable_prefix_cache,
        }

    def render(self, accept: str | None) -> tuple[bytes, str]:
        """Return the page and its content type: OpenMetrics for whoever names it, else text.

        The header itself is not for the library, which raises on versions that are no numbers.
        """
        wants_open_metrics = _OPEN_METRICS in (accept or "")
        encode, content_type = choose_encoder(_WITH_COLONS if wants_open_metrics else "")
        return encode(self._registry), content_type
