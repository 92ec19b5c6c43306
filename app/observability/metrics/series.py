"""Makes the counters and histograms of one model."""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from app.observability.metrics.buckets import REQUEST

# When a series began doubles the number of series, and nobody asks.
disable_created_metrics()  # type: ignore[no-untyped-call]


class LabelledCounter:
    """A counter for each word; the words known beforehand begin at 0 and not out of nowhere."""

    def __init__(self, counter: Counter, model_name: str, words: Iterable[str]) -> None:
        self._counter = counter
        self._model_name = model_name
        for word in words:
            counter.labels(model_name, word)

    def count(self, word: str) -> None:
        self._counter.labels(self._model_name, word).inc()


class Series:
    """Registers metrics that carry a model's name, with that label filled in once and for all.

    Some of them are met at every token, and looking up a label costs more than counting.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._model_name = model_name

    def counter(self, name: str, what: str) -> Counter:
        return Counter(name, what, ["model_name"], registry=self._registry).labels(self._model_name)

    def counter_by(self, label: str, words: Iterable[str], name: str, what: str) -> LabelledCounter:
        counter = Counter(name, what, ["model_name", label], registry=self._registry)
        return LabelledCounter(counter, self._model_name, words)

    def counts(self, name: str, what: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(name, what, ["model_name"], registry=self._registry, buckets=buckets)
        return histogram.labels(self._model_name)

    def seconds(self, name: str, what: str, buckets: Sequence[float] = REQUEST) -> Histogram:
        return self.counts(f"{name}_seconds", f"Seconds {what}.", buckets)

    def seconds_by(
        self, label: str, words: Iterable[str], name: str, what: str, buckets: Sequence[float]
    ) -> list[Histogram]:
        """Return a histogram for each word, in their order."""
        histogram = Histogram(
            f"{name}_seconds",
            f"Seconds {what}.",
            ["model_name", label],
            registry=self._registry,
            buckets=buckets,
        )
        return [histogram.labels(self._model_name, word) for word in words]
