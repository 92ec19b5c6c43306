"""A snapshot says what there is to do, and which blocks belong to what."""

import pytest

from batching.batch_inference import BatchInferenceEngine
from batching.config import SchedulerConfig
from batching.priority_queue import Priority
from batching.request import BatchRequest, RequestStatus
from batching.scheduler import ContinuousBatchingScheduler
from batching.scheduling import snapshot as snapshots
from batching.scheduling.snapshot import EngineSnapshot
from tests.support.fakes import make_engine, small_config
from tests.support.requests import make_request

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def request(request_id: int, **fields: object) -> BatchRequest:
    facts = {"prompt": PROMPT, "max_tokens": 8, "arrival_time": float(request_id)}
    return make_request(request_id, **(facts | fields))  # type: ignore[arg-type]


def engine(**changes: int) -> tuple[ContinuousBatchingScheduler, BatchInferenceEngine]:
    config: SchedulerConfig = small_config(**changes)
    return make_engine(config)


def blocks_of(snapshot: EngineSnapshot) -> dict[int, list[int]]:
    """Return the blocks of each running request."""
    return {
        r.request_id: [b for first, number in r.runs for b in range(first, first + number)]
        for r in snapshot.running
    }


def test_an_idle_engine_has_nothing_but_empty_blocks() -> None:
    _, idle = engine()
    snapshot = idle.snapshot()
    assert snapshot.running == snapshot.waiting == ()
    assert snapshot.empty_runs == ((0, 16),)
    assert snapshot.is_map_whole
    assert snapshot.stats == idle.stats()
    assert snapshot.duration == 0


def test_a_request_is_seen_to_wait_to_prefill_and_to_run() -> None:
    scheduler, busy = engine()
    busy.add(request(0), request(1))
    assert [r.status for r in scheduler.snapshot(3.0).waiting] == [RequestStatus.WAITING] * 2
    busy.step()
    first = scheduler.snapshot(3.0).running[0]
    assert (first.status, first.num_computed_tokens, first.age) == (RequestStatus.PREFILLING, 8, 3)
    busy.step()
    running = scheduler.snapshot(3.0).running[0]
    assert (running.status, running.num_output_tokens) == (RequestStatus.RUNNING, 1)
    assert (running.num_prompt_tokens, running.max_tokens) == (9, 8)


def test_the_queue_is_in_the_order_of_service_with_its_aged_priorities() -> None:
    scheduler, busy = engine(max_num_seqs=1)
    busy.add(request(0, priority=Priority.LOW), request(1), request(2, priority=Priority.HIGH))
    waiting = scheduler.snapshot(now=10.0).waiting
    assert [r.request_id for r in waiting] == [2, 1, 0]
    assert [r.effective_priority for r in waiting] == pytest.approx([-0.8, 0.1, 1.0])
    assert [r.age for r in waiting] == [8, 9, 10]


def test_a_preempted_request_waits_again_without_blocks() -> None:
    scheduler, busy = engine(num_blocks=6)
    busy.add(request(0), request(1, prompt=PROMPT[::-1]))
    while not scheduler.stats().num_preemptions:
        busy.step()
    [waiting] = scheduler.snapshot(0.0).waiting
    assert (waiting.request_id, waiting.num_preemptions, waiting.runs) == (1, 1, ())


def test_every_block_is_of_a_request_or_empty_or_cached() -> None:
    scheduler, busy = engine()
    busy.add(request(0))
    while busy.has_work:
        busy.step()
    busy.add(request(1), request(2))
    busy.step()
    busy.step()
    snapshot = scheduler.snapshot(0.0)
    used = blocks_of(snapshot)
    # The full blocks of the common prompt are shared.
    assert used[1][:2] == used[2][:2]
    assert used[1][2:] != used[2][2:]
    tables = {r.request_id: r.block_table.block_ids for r in scheduler._running.requests}
    assert used == tables
    empty = {b for start, stop in snapshot.empty_runs for b in range(start, stop)}
    pool = scheduler.block_manager
    assert empty == {b.block_id for b in pool.blocks if not b.ref_count and b.block_hash is None}


def test_choices_that_wait_for_a_prefill_are_counted() -> None:
    scheduler, busy = engine()
    first = request(0)
    busy.add(first, first.fork(1), first.fork(2))
    assert [r.num_choices for r in scheduler.snapshot(0.0).waiting] == [3]


def test_a_snapshot_does_not_change_afterwards() -> None:
    scheduler, busy = engine()
    busy.add(request(0))
    busy.step()
    snapshot = scheduler.snapshot(0.0)
    before = repr(snapshot)
    while busy.has_work:
        busy.step()
    assert repr(snapshot) == before


def test_a_snapshot_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MAX_RUNNING", 2)
    monkeypatch.setattr(snapshots, "MAX_WAITING", 3)
    monkeypatch.setattr(snapshots, "MAX_RUNS", 1)
    scheduler, busy = engine(max_num_seqs=3, num_blocks=64, max_num_batched_tokens=64)
    busy.add(*(request(i, prompt=[i, *PROMPT]) for i in range(8)))
    busy.step()
    snapshot = scheduler.snapshot(0.0)
    assert (len(snapshot.running), len(snapshot.waiting)) == (2, 3)
    assert [len(r.runs) for r in snapshot.running] == [1, 0]
    assert snapshot.empty_runs == ()
    assert not snapshot.is_map_whole
    assert (snapshot.stats.num_running, snapshot.stats.num_waiting) == (3, 5)
