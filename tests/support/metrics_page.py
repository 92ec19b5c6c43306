"""The metrics page, parsed as Prometheus does."""

from typing import Final

from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.samples import Sample

from app.observability.metrics.registry import Metrics

MODEL: Final = "fake/model"

# The metrics of a Linux process; on other systems the library has none.
PROCESS: Final = {"process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds_total"}


class MetricsPage:
    """The page of a server; samples are looked up for one model."""

    def __init__(self, metrics: Metrics, model: str = MODEL) -> None:
        text = metrics.render(None)[0].decode()
        self._model = model
        self.families = {family.name: family.type for family in parse_text(text)}
        self.samples: list[Sample] = [s for f in parse_text(text) for s in f.samples]

    def __call__(self, name: str, **labels: str) -> float | None:
        """Return the value of the sample with exactly these labels; None without one."""
        expected = {"model_name": self._model, **labels}
        found = [s.value for s in self.samples if s.name == name and s.labels == expected]
        assert len(found) < 2, f"{name} is there twice"
        return found[0] if found else None

    def histogram(self, name: str, **labels: str) -> tuple[float | None, float | None]:
        """Return the number and the sum of a histogram's observations."""
        return self(f"{name}_count", **labels), self(f"{name}_sum", **labels)
