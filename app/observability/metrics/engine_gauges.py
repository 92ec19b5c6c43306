"""Metrics that are read from the engines and the process when the page is requested."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from itertools import repeat
from resource import RUSAGE_SELF, getrusage
from time import time
from typing import Any, Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.observability.metrics.adapters import MAX_NAMES
from batching import (
    NOT_IN_USE,
    AdaptersInUse,
    MemoryUse,
    ModelState,
    ModelStatus,
    SchedulerStats,
    StoreUse,
)

_VERSIONS: Final = ("mlx", "mlx-lm")
# The unit in which getrusage reports memory, in bytes.
_RSS_UNIT: Final = 1 if sys.platform == "darwin" else 1024


_NONE: Final[Iterable[Any]] = repeat(
    0, len(SchedulerStats._fields) - len(SchedulerStats._field_defaults)
)
_NO_STATS: Final = SchedulerStats(*_NONE)


class Reading(NamedTuple):
    """A metric whose value is in the statistics of the scheduler."""

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
        "Fraction of the KV cache blocks in use by requests, 0 to 1; cached blocks in no use are free.",
        _share_in_use,
    ),
    Reading(
        "mlx_server:num_requests_prefilling",
        "Requests in the batch whose prompt is being prefilled.",
        lambda s: s.num_prefilling,
    ),
    Reading(
        "mlx_server:cached_blocks",
        "Blocks in no use by requests whose contents a later request may reuse.",
        lambda s: s.num_cached_blocks,
    ),
    Reading(
        "mlx_server:retained_blocks",
        "Blocks that requests asked to be evicted behind all others, for a time.",
        lambda s: s.num_retained_blocks,
    ),
)

_COUNTERS: Final = (
    Reading("vllm:num_preemptions", "Preemptions of requests.", lambda s: s.num_preemptions),
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
    Reading("vllm:spec_decode_num_drafts", "Drafts verified.", lambda s: s.num_drafts),
    Reading(
        "vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", lambda s: s.num_draft_tokens
    ),
    Reading(
        "vllm:spec_decode_num_accepted_tokens",
        "Draft tokens accepted.",
        lambda s: s.num_accepted_tokens,
    ),
    Reading(
        "mlx_server:images_encoded",
        "Images read by the vision tower; those that were found in a cache are not.",
        lambda s: s.num_images_encoded,
    ),
    Reading("mlx_server:block_evictions", "Cached blocks evicted.", lambda s: s.num_evictions),
    Reading(
        "mlx_server:urgent_preemptions",
        "Preemptions of running requests for a waiting request of a higher priority.",
        lambda s: s.num_urgent_preemptions,
    ),
    Reading(
        "mlx_server:aged_admissions",
        "Requests admitted before a waiting request of a higher priority, due to aging.",
        lambda s: s.num_aged_admissions,
    ),
    Reading(
        "mlx_server:prefix_waits",
        "Requests that waited for another request to compute their prefix.",
        lambda s: s.num_prefix_waits,
    ),
)


# Only of models with recurrent state.
_STATE_GAUGES: Final = (
    Reading(
        "mlx_server:state_checkpoints",
        "Recurrent states in the prefix cache.",
        lambda s: s.num_checkpoints or 0,
    ),
)

_STATE_COUNTERS: Final = (
    Reading(
        "mlx_server:state_checkpoint_stores",
        "Recurrent states stored in the prefix cache.",
        lambda s: s.num_checkpoints_stored,
    ),
    Reading(
        "mlx_server:state_checkpoint_hits",
        "Requests that began with a recurrent state from the prefix cache.",
        lambda s: s.num_checkpoints_hit,
    ),
    Reading(
        "mlx_server:state_checkpoint_evictions",
        "Recurrent states evicted from the prefix cache.",
        lambda s: s.num_checkpoints_evicted,
    ),
    Reading(
        "mlx_server:state_checkpoint_skips",
        "Recurrent states not stored, for want of memory for any or of their blocks.",
        lambda s: s.num_checkpoints_skipped,
    ),
    Reading(
        "mlx_server:state_missed_tokens",
        "Prompt tokens found in blocks and computed again, since no recurrent state was kept there.",
        lambda s: s.num_state_missed_tokens,
    ),
)


# Only of models whose layers with a window have blocks of their own.
_WINDOW_GAUGES: Final = (
    Reading(
        "mlx_server:window_cache_usage_perc",
        "Fraction of the blocks of layers with a window in use by requests, 0 to 1.",
        lambda s: 1 - s.num_free_window_blocks / max(1, s.num_window_blocks or 0),
    ),
)

_WINDOW_COUNTERS: Final = (
    Reading(
        "mlx_server:window_missed_tokens",
        "Prompt tokens found in blocks and computed again, since layers with a window had evicted theirs.",
        lambda s: s.num_window_missed_tokens,
    ),
)


# Only of models with a store of blocks.
_STORE_GAUGES: Final = (
    Reading(
        "mlx_server:kv_store_entries",
        "Blocks and recurrent states of the model in the folder of the KV cache.",
        lambda s: _store(s).num_entries,
    ),
    Reading("mlx_server:kv_store_bytes", "Their size.", lambda s: _store(s).num_bytes),
    Reading(
        "mlx_server:kv_store_host_bytes",
        "Bytes of blocks and recurrent states in the memory of the host.",
        lambda s: _store(s).host_bytes,
    ),
    Reading(
        "mlx_server:kv_store_unsaved",
        "Blocks and recurrent states that wait to be written there.",
        lambda s: _store(s).num_unsaved,
    ),
)

_STORE_COUNTERS: Final = (
    Reading(
        "mlx_server:kv_store_hit_tokens",
        "Prompt tokens whose keys and values were read, from the folder or the memory of the host, instead of computed.",
        lambda s: _store(s).num_restored_tokens,
    ),
    Reading("mlx_server:kv_store_reads", "Entries read.", lambda s: _store(s).num_read),
    Reading("mlx_server:kv_store_read_bytes", "Bytes read.", lambda s: _store(s).bytes_read),
    Reading("mlx_server:kv_store_writes", "Entries written.", lambda s: _store(s).num_written),
    Reading(
        "mlx_server:kv_store_written_bytes", "Bytes written.", lambda s: _store(s).bytes_written
    ),
    Reading(
        "mlx_server:kv_store_lost",
        "Entries that were gone, or could not be read, when they were needed.",
        lambda s: _store(s).num_lost,
    ),
    Reading(
        "mlx_server:kv_store_damaged",
        "Entries that were not what was written, and were deleted.",
        lambda s: _store(s).num_damaged,
    ),
)


# Only of models that are served with adapters.
_ADAPTER_GAUGES: Final = (
    Reading(
        "mlx_server:adapters_loaded",
        "Adapters in the device's memory.",
        lambda s: s.num_adapters_loaded,
    ),
)

_ADAPTER_COUNTERS: Final = (
    Reading(
        "mlx_server:adapter_hits",
        "Requests whose adapter was in the device's memory when they were admitted.",
        lambda s: s.num_adapter_hits,
    ),
    Reading(
        "mlx_server:adapter_loads",
        "Adapters that were put there.",
        lambda s: s.num_adapter_loads,
    ),
)


def _store(stats: SchedulerStats) -> StoreUse:
    return stats.store or StoreUse()


@dataclass(slots=True)
class EngineState:
    """The last known state of an engine; `cache_config` is empty until it is known.

    status: of its model; None until it is known.
    adapters: of the requests that run, and of those that wait.
    """

    status: ModelStatus | None = None
    stats: SchedulerStats = _NO_STATS
    is_healthy: bool = True
    seconds_since_step: float = 0.0
    cache_config: Mapping[str, object] = field(default_factory=dict)
    adapters: AdaptersInUse = NOT_IN_USE

    @property
    def max_adapters(self) -> int:
        return 0 if self.status is None else self.status.model.config.max_adapters

    def forget_engine(self) -> None:
        """Forget what was known of an engine that is unloaded."""
        self.stats, self.is_healthy, self.seconds_since_step = _NO_STATS, True, 0.0
        self.adapters = NOT_IN_USE

    def set_cache_config(
        self, *, block_size: int, num_blocks: int, enable_prefix_cache: bool
    ) -> None:
        """Set the facts of the KV cache under vLLM's names, which has GPU blocks only."""
        self.cache_config = {
            "block_size": block_size,
            "num_gpu_blocks": num_blocks,
            "enable_prefix_caching": enable_prefix_cache,
        }


class EngineGauges(Collector):
    """The last statistics of the engines and the state of the process, as metrics."""

    def __init__(self, server_name: str, states: Mapping[str, EngineState]) -> None:
        """`states` are by the name of the model; `server_name` is the label of the process."""
        self._server_name = server_name
        self._states = states
        self._versions = _versions()

    def collect(self) -> Iterator[Metric]:
        states = self._states
        stats = {model: s.stats for model, s in states.items()}
        yield from _readings(_GAUGES, _COUNTERS, stats)
        if recurrent := {m: s for m, s in stats.items() if s.num_checkpoints is not None}:
            yield from _readings(_STATE_GAUGES, _STATE_COUNTERS, recurrent)
        if windowed := {m: s for m, s in stats.items() if s.num_window_blocks is not None}:
            yield from _readings(_WINDOW_GAUGES, _WINDOW_COUNTERS, windowed)
        if stored := {m: s for m, s in stats.items() if s.store is not None}:
            yield from _readings(_STORE_GAUGES, _STORE_COUNTERS, stored)
            yield _store_skips({model: _store(s).skipped for model, s in stored.items()})
        if adapted := {m: s for m, s in states.items() if s.max_adapters}:
            yield from _readings(_ADAPTER_GAUGES, _ADAPTER_COUNTERS, {m: stats[m] for m in adapted})
            yield _adapters_in_use(adapted)
        yield self._waiting_by_reason()
        if configs := {model: s.cache_config for model, s in states.items() if s.cache_config}:
            yield _info("vllm:cache_config_info", "The KV cache.", configs)
        yield _info("mlx_server:build_info", "Versions.", {self._server_name: self._versions})
        yield _gauge(
            "mlx_server:engine_healthy",
            "1 while the engine is healthy.",
            {model: s.is_healthy for model, s in states.items()},
        )
        yield _gauge(
            "mlx_server:seconds_since_step",
            "Seconds since the engine last finished a step; an idle engine makes no steps.",
            {model: s.seconds_since_step for model, s in states.items()},
        )
        yield from _model_gauges({m: s.status for m, s in states.items() if s.status is not None})
        yield _gauge(
            "mlx_server:peak_resident_memory_bytes",
            "Peak resident memory of the process.",
            {self._server_name: getrusage(RUSAGE_SELF).ru_maxrss * _RSS_UNIT},
        )

    def _waiting_by_reason(self) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests in the queue: for capacity (a slot or blocks), or deferred until another "
            "request has computed their prefix.",
            labels=["model_name", "reason"],
        )
        for model, state in self._states.items():
            num_deferred = state.stats.num_awaiting_prefix
            gauge.add_metric([model, "capacity"], state.stats.num_waiting - num_deferred)
            gauge.add_metric([model, "deferred"], num_deferred)
        return gauge


def _adapters_in_use(states: Mapping[str, EngineState]) -> GaugeMetricFamily:
    """Return which adapters requests use, as vLLM does: in labels, with the time as the value."""
    info = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters of the requests that have tokens or are read, and of those that wait; the value is the time.",
        labels=["model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    for model, state in states.items():
        names = [",".join(sorted(each)[:MAX_NAMES]) for each in state.adapters]
        info.add_metric([model, str(state.max_adapters), *names], time())
    return info


def _store_skips(skipped: Mapping[str, Mapping[str, int]]) -> CounterMetricFamily:
    counter = CounterMetricFamily(
        "mlx_server:kv_store_skips",
        "Entries that were not written, and prefixes that were not read, by the reason.",
        labels=["model_name", "reason"],
    )
    for model, reasons in skipped.items():
        for reason, num in reasons.items():
            counter.add_metric([model, reason], num)
    return counter


def _model_gauges(statuses: Mapping[str, ModelStatus]) -> Iterator[Metric]:
    """Yield which models are loaded, and what they take."""
    state = GaugeMetricFamily(
        "mlx_server:model_state",
        "1 for the state of the model.",
        labels=["model_name", "state"],
    )
    memory = GaugeMetricFamily(
        "mlx_server:model_memory_bytes",
        "Bytes of a loaded model: weights, KV cache, recurrent states.",
        labels=["model_name", "kind"],
    )
    for model, status in statuses.items():
        for each in ModelState:
            state.add_metric([model, each], status.state is each)
        use = status.use or MemoryUse()
        for kind, num_bytes in asdict(use).items():
            memory.add_metric([model, kind], num_bytes)
    yield state
    yield memory
    yield _gauge(
        "mlx_server:num_requests_waiting_for_model",
        "Requests that wait for the model to be loaded.",
        {model: status.num_waiting for model, status in statuses.items()},
    )


def _readings(
    gauges: Iterable[Reading], counters: Iterable[Reading], stats: Mapping[str, SchedulerStats]
) -> Iterator[Metric]:
    for name, what, read in gauges:
        yield _gauge(name, what, {model: read(s) for model, s in stats.items()})
    for name, what, read in counters:
        counter = CounterMetricFamily(name, what, labels=["model_name"])
        for model, s in stats.items():
            counter.add_metric([model], read(s))
        yield counter


def _gauge(name: str, what: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, what, labels=["model_name"])
    for model, value in values.items():
        gauge.add_metric([model], value)
    return gauge


def _info(name: str, what: str, facts: Mapping[str, Mapping[str, object]]) -> GaugeMetricFamily:
    """Return facts by model name as vLLM does: as the labels of a gauge that is always 1."""
    labels = next(iter(facts.values()))
    info = GaugeMetricFamily(name, what, labels=["model_name", *labels])
    for model, values in facts.items():
        info.add_metric([model, *map(str, values.values())], 1)
    return info


@cache
def _versions() -> dict[str, str]:
    """Return the versions of the packages, which are read from files."""
    return {name.replace("-", "_"): version(name) for name in _VERSIONS}
