"""Snapshots of the engine's state for the operator: numbers only, no tokens."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

from batching.block_manager import PagedBlockManager, Run
from batching.priority_queue import Priority, PriorityQueueWithAging
from batching.request import BatchRequest, RequestStatus
from batching.steps.stats import SchedulerStats

# Requests and runs beyond these show in the statistics only; a snapshot stays below a hundred kilobytes.
MAX_RUNNING: Final = 256
MAX_WAITING: Final = 128
MAX_RUNS: Final = 4096


class RequestSnapshot(NamedTuple):
    """One request; times are in seconds.

    age: time since its arrival.
    effective_priority: see `PriorityQueueWithAging`; the smallest is served first.
    num_choices: the request itself and the choices that wait for its prefill.
    runs: the runs of its KV blocks, which other requests may share.
    adapter: the name of its adapter; None if it has none.
    """

    request_id: int
    status: RequestStatus
    priority: Priority
    age: float
    effective_priority: float
    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_preemptions: int
    num_choices: int
    runs: tuple[Run, ...]
    adapter: str | None = None


class EngineSnapshot(NamedTuple):
    """The queue, the admitted requests and the map of the pool.

    It describes the pool in runs of blocks, so that taking it costs no more for a large pool.

    duration: seconds that taking it took.
    running, waiting: in the order in which they are served.
    empty_runs: runs `[start, stop)` of empty blocks.  Blocks in none of these and in no request's runs
        are cached.
    is_map_whole: False if there are too many requests or runs, and some were left out.
    """

    duration: float
    stats: SchedulerStats
    max_num_seqs: int
    running: tuple[RequestSnapshot, ...]
    waiting: tuple[RequestSnapshot, ...]
    empty_runs: tuple[tuple[int, int], ...]
    is_map_whole: bool

    def took(self, seconds: float) -> "EngineSnapshot":
        return self._replace(duration=seconds)


def take_snapshot(
    stats: SchedulerStats,
    max_num_seqs: int,
    running: Sequence[BatchRequest],
    waiting: PriorityQueueWithAging[BatchRequest],
    blocks: PagedBlockManager,
    now: float,
) -> EngineSnapshot:
    """Return a copy of what is shown, which does not change when the engine goes on."""

    def described(requests: Iterable[BatchRequest]) -> tuple[RequestSnapshot, ...]:
        return tuple(_described(r, now, waiting.effective_priority(r, now)) for r in requests)

    shown, num_left = [], MAX_RUNS
    for request in described(islice(running, MAX_RUNNING)):
        kept = request.runs[:num_left]
        num_left -= len(kept)
        shown.append(request._replace(runs=kept))
    empty = blocks.empty_runs(num_left + 1)
    return EngineSnapshot(
        duration=0.0,
        stats=stats,
        max_num_seqs=max_num_seqs,
        running=tuple(shown),
        waiting=described(waiting.first(MAX_WAITING)),
        empty_runs=tuple(empty[:num_left]),
        is_map_whole=len(empty) <= num_left and len(shown) == len(running),
    )


def _described(request: BatchRequest, now: float, effective_priority: float) -> RequestSnapshot:
    return RequestSnapshot(
        request.request_id,
        request.status,
        request.priority,
        now - request.arrival_time,
        effective_priority,
        request.num_prompt_tokens,
        request.num_computed_tokens,
        request.num_cached_tokens,
        request.num_output_tokens,
        request.spec.output_limit,
        request.num_preemptions,
        1 + len(request.forks),
        tuple(request.block_table.runs),
        None if request.spec.adapter is None else request.spec.adapter.name,
    )
