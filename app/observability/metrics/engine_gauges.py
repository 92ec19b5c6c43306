"""What is not counted but read off, at the moment when somebody asks."""

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from itertools import repeat
from resource import RUSAGE_SELF, getrusage
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from batching import SchedulerStats

_VERSIONS: Final = ("mlx", "mlx-lm")
# What getrusage counts memory in.
_RSS_UNIT: Final = 1 if sys.platform == "darwin" else 1024


class Reading(NamedTuple):
    """A number that the engine's statistics hold."""

    name: str
    what: str
    read: Callable[[SchedulerStats], float]


def _share_in_use(stats: SchedulerStats) -> float:
    return (stats.num_blocks - stats.num_free_blocks) / max(1, stats.num_blocks)


_GAUGES: Final = (
    Reading("vllm:num_requests_running", "Requests in the batch.", lambda s: s.num_running),
    Reading("vllm:num_requests_waiting", "Requests in the queue.", lambda s: s.num_waiting),
    Reading(
        "vllm:kv_cache_usage_perc",
        "Share of the KV cache's blocks that requests hold, 0 to 1; what is only cached is free.",
        _share_in_use,
    ),
    Reading(
        "mlx_server:num_requests_prefilling",
        "Requests in the batch whose prompt is being read.",
        lambda s: s.num_prefilling,
    ),
    Reading(
        "mlx_server:cached_blocks",
        "Blocks that nobody holds and that a later request may still find.",
        lambda s: s.num_cached_blocks,
    ),
)

_COUNTERS: Final = (
    Reading(
        "vllm:num_preemptions", "Requests that gave up their blocks.", lambda s: s.num_preemptions
    ),
    Reading(
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.num_queried_tokens,
    ),
    Reading(
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        lambda s: s.num_hit_tokens,
    ),
    Reading("vllm:spec_decode_num_drafts", "Drafts checked.", lambda s: s.num_drafts),
    Reading(
        "vllm:spec_decode_num_draft_tokens", "Drafted tokens checked.", lambda s: s.num_draft_tokens
    ),
    Reading(
        "vllm:spec_decode_num_accepted_tokens",
        "Drafted tokens that were right.",
        lambda s: s.num_accepted_tokens,
    ),
    Reading(
        "mlx_server:block_evictions", "Cached blocks given to others.", lambda s: s.num_evictions
    ),
    Reading(
        "mlx_server:aged_admissions",
        "Requests that went before a waiting one of a more urgent class.",
        lambda s: s.num_aged_admissions,
    ),
    Reading(
        "mlx_server:prefix_waits",
        "Requests that waited for another one to compute their prefix.",
        lambda s: s.num_prefix_waits,
    ),
)


class Snapshot(Collector):
    """The engine's last statistics and the state of the process, as metrics."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        # Nothing has happened yet.
        self.stats = SchedulerStats._make(repeat(0, len(SchedulerStats._fields)))
        self.is_healthy = True
        self.seconds_since_step = 0.0
        self.cache_config: Mapping[str, object] = {}  # empty until it is known
        self._versions = {name.replace("-", "_"): version(name) for name in _VERSIONS}

    def collect(self) -> Iterator[Metric]:
        for name, what, read in _GAUGES:
            yield self._gauge(name, what, read(self.stats))
        for name, what, read in _COUNTERS:
            counter = CounterMetricFamily(name, what, labels=["model_name"])
            counter.add_metric([self._model_name], read(self.stats))
            yield counter
        yield self._waiting_by_reason()
        if self.cache_config:
            yield self._info("vllm:cache_config_info", "The KV cache.", self.cache_config)
        yield self._info("mlx_server:build_info", "Versions.", self._versions)
        yield self._gauge(
            "mlx_server:engine_healthy", "1 while the engine can answer.", self.is_healthy
        )
        yield self._gauge(
            "mlx_server:seconds_since_step",
            "Seconds since the engine last finished a step; an idle one makes none.",
            self.seconds_since_step,
        )
        yield self._gauge(
            "mlx_server:peak_resident_memory_bytes",
            "Most memory that the process has had.",
            getrusage(RUSAGE_SELF).ru_maxrss * _RSS_UNIT,
        )

    def _gauge(self, name: str, what: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, what, labels=["model_name"])
        gauge.add_metric([self._model_name], value)
        return gauge

    def _info(self, name: str, what: str, facts: Mapping[str, object]) -> GaugeMetricFamily:
        """Return facts as vLLM tells them: the labels of a gauge that is always 1."""
        info = GaugeMetricFamily(name, what, labels=["model_name", *facts])
        info.add_metric([self._model_name, *map(str, facts.values())], 1)
        return info

    def _waiting_by_reason(self) -> GaugeMetricFamily:
        num_deferred = self.stats.num_awaiting_prefix
        gauge = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests in the queue: for a seat or blocks, or for another one's prefix.",
            labels=["model_name", "reason"],
        )
        gauge.add_metric([self._model_name, "capacity"], self.stats.num_waiting - num_deferred)
        gauge.add_metric([self._model_name, "deferred"], num_deferred)
        return gauge
