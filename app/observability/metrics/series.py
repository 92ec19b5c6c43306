"""Creates counters and histograms, each with a series per model."""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from app.observability.metrics.buckets import REQUEST

# Creation times would double the number of series.
disable_created_metrics()  # type: ignore[no-untyped-call]


class LabelledCounter:
    """A counter with one series for each value of a label; values known beforehand start at 0."""

    def __init__(self, counter: Counter, model_name: str, words: Iterable[str]) -> None:
        self._counter = counter
        self._model_name = model_name
        for word in words:
            counter.labels(model_name, word)

    def count(self, word: str, number: float = 1) -> None:
        self._counter.labels(self._model_name, word).inc(number)


class Families:
    """The metrics of a registry by name; each is registered once, however many models there are."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}

    def counter(self, name: str, what: str, labels: Sequence[str]) -> Counter:
        if name not in self._counters:
            self._counters[name] = Counter(name, what, labels, registry=self._registry)
        return self._counters[name]

    def gauge(self, name: str, what: str, labels: Sequence[str]) -> Gauge:
        return Gauge(name, what, labels, registry=self._registry)

    def histogram(
        self, name: str, what: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> Histogram:
        if name not in self._histograms:
            self._histograms[name] = Histogram(
                name, what, labels, registry=self._registry, buckets=buckets
            )
        return self._histograms[name]


class Series:
    """The series of one model, with the label of its name bound in advance.

    Some of them are updated for each token, and looking up a label costs more than counting.
    """

    def __init__(self, families: Families, model_name: str) -> None:
        self._families = families
        self._model_name = model_name

    def counter(self, name: str, what: str) -> Counter:
        return self._families.counter(name, what, ["model_name"]).labels(self._model_name)

    def counter_by(self, label: str, words: Iterable[str], name: str, what: str) -> LabelledCounter:
        counter = self._families.counter(name, what, ["model_name", label])
        return LabelledCounter(counter, self._model_name, words)

    def gauge(self, name: str, what: str) -> Gauge:
        return self._families.gauge(name, what, ["model_name"]).labels(self._model_name)

    def counts(self, name: str, what: str, buckets: Sequence[float]) -> Histogram:
        histogram = self._families.histogram(name, what, ["model_name"], buckets)
        return histogram.labels(self._model_name)

    def seconds(self, name: str, what: str, buckets: Sequence[float] = REQUEST) -> Histogram:
        return self.counts(f"{name}_seconds", f"Seconds {what}.", buckets)

    def seconds_by(
        self, label: str, words: Iterable[str], name: str, what: str, buckets: Sequence[float]
    ) -> list[Histogram]:
        """Return a histogram for each word, in their order."""
        histogram = self._families.histogram(
            f"{name}_seconds", f"Seconds {what}.", ["model_name", label], buckets
        )
        return [histogram.labels(self._model_name, word) for word in words]
