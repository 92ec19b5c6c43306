"""The metrics of a server and of the engines of its models, and the page that Prometheus reads."""

from collections.abc import Iterable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder

from app.observability.metrics import buckets
from app.observability.metrics.adapters import AdapterMetrics
from app.observability.metrics.engine_gauges import EngineGauges, EngineState
from app.observability.metrics.requests import RequestMetrics
from app.observability.metrics.series import Families, Series
from app.observability.metrics.steps import StepMetrics
from batching import NewTokens, SchedulerStats, SequenceStats, StepRecord

_OPEN_METRICS: Final = "application/openmetrics-text"
# For other versions the library replaces colons in names by underscores.
_WITH_COLONS: Final = f"{_OPEN_METRICS};version=1.0.0;escaping=allow-utf-8"


class EngineMetrics:
    """Counts what the engine of one model does; an EngineObserver, called in the event loop.

    As in vLLM, each of the `n` choices of a prompt counts as a request with that prompt.
    """

    def __init__(self, series: Series, state: EngineState) -> None:
        self.state = state
        self._requests = RequestMetrics(series)
        self._adapters = AdapterMetrics(series)
        self._steps = StepMetrics(series)

    def observe_step(self, step: StepRecord) -> None:
        self.state.stats = step.stats
        self._steps.observe(step)

    def observe_stats(self, stats: SchedulerStats) -> None:
        self.state.stats = stats

    def observe_tokens(self, tokens: Sequence[NewTokens]) -> None:
        """Count the tokens of one step, and the times since those before.

        The cost of a preemption is part of that gap, or of the time to the first token.
        """
        self._requests.observe_tokens(tokens)
        self._adapters.observe_tokens(tokens)

    def observe_end(self, sequence: SequenceStats) -> None:
        self._requests.observe_end(sequence)
        self._adapters.observe_end(sequence)


class Metrics:
    """All metrics of a server, in a registry of its own, so that apps in one process are independent.

    Metrics that concern no engine, such as rejections, are labelled with the model's name if there is only
    one model; with several the label is empty, which Prometheus treats as absent.

    engines: the metrics of each model's engine.
    num_batches: the gauge of running batches.
    """

    def __init__(
        self, model_names: Sequence[str], *, rejection_reasons: Iterable[str] = ()
    ) -> None:
        """The `rejection_reasons` start at 0, so that the first rejection shows in a rate."""
        self._registry = CollectorRegistry()
        server_name = model_names[0] if len(model_names) == 1 else ""
        states = {name: EngineState() for name in model_names}
        self._registry.register(EngineGauges(server_name, states))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        families = Families(self._registry)
        self.engines = {
            name: EngineMetrics(Series(families, name), state) for name, state in states.items()
        }
        server = Series(families, server_name)
        self._rejections = server.counter_by(
            "reason",
            rejection_reasons,
            "vllm:admission_rejections",
            "Requests rejected by admission control.",
        )
        self._batch_lines = server.counter_by(
            "outcome",
            ("completed", "failed"),
            "mlx_server:batch_lines",
            "Lines of batches that have their result.",
        )
        self.num_batches = server.gauge(
            "mlx_server:num_batches_running", "Batches that this server runs."
        )
        self._loop_lag = server.seconds(
            "mlx_server:event_loop_lag", "by which the event loop is late", buckets.DELAY
        )

    def count_batch_line(self, outcome: str) -> None:
        """Count a line of a batch that has its result: `completed` or `failed`."""
        self._batch_lines.count(outcome)

    def count_rejection(self, reason: str) -> None:
        """Count a rejected request; `reason` is one of a fixed set, never text of a client."""
        self._rejections.count(reason)

    def observe_loop_lag(self, seconds: float) -> None:
        """Record by how much the event loop is late."""
        self._loop_lag.observe(seconds)

    def render(self, accept: str | None) -> tuple[bytes, str]:
        """Return the page and its content type: OpenMetrics if the header names it, else text.

        The header is not passed to the library, which raises on versions that are not numbers.
        """
        wants_open_metrics = _OPEN_METRICS in (accept or "")
        encode, content_type = choose_encoder(_WITH_COLONS if wants_open_metrics else "")
        return encode(self._registry), content_type
