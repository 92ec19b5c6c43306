"""Slots of adapters: by themselves, and as the scheduler gives them."""

from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import example, given, strategies as st

from batching.adapters.adapter import Adapter
from batching.adapters.slots import AdapterSlots
from batching.priority_queue import Priority
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from tests.support.fakes import TokenRunner, request, right, small_config

A, B, C = (Adapter(name, f"/{name}", name * 64) for name in "abc")


def names(slots: AdapterSlots) -> list[str]:
    return [str(load) for load in slots.take_loads()]


def test_an_adapter_stays_until_another_one_needs_its_slot() -> None:
    slots = AdapterSlots(2)
    assert [slots.take(each) for each in (None, A, B, A)] == [0, 1, 2, 1]
    assert names(slots) == ["a>1", "b>2"]
    for each in (A, B, A):
        slots.release(each)
    assert slots.take(A) == 1
    assert names(slots) == []
    assert (slots.num_hits, slots.num_loads) == (2, 2)
    # The one that was used least recently goes.
    assert slots.take(C) == 2
    assert names(slots) == ["c>2"]
    assert slots.loaded == (A, C)


def test_none_goes_that_is_used() -> None:
    slots = AdapterSlots(2)
    slots.take(A), slots.take(B)
    assert not slots.has_room(C)
    assert slots.has_room(A) and slots.has_room(None)
    assert slots.has_room(C, leaving=[A])
    slots.take(A)
    assert not slots.has_room(C, leaving=[A]) and slots.has_room(C, leaving=[A, A])
    slots.release(B)
    assert slots.has_room(C)
    assert not slots.has_room(C, reserved=[B]) and slots.has_room(C, reserved=[None, A, C])


def test_a_load_that_another_one_replaces_is_not_done() -> None:
    slots = AdapterSlots(1)
    slots.take(A)
    slots.release(A)
    slots.take(B)
    assert names(slots) == ["b>1"]


def test_adapters_with_the_same_contents_share_a_slot() -> None:
    slots = AdapterSlots(2)
    assert slots.take(A) == slots.take(Adapter("other name", "/elsewhere", A.digest)) == 1


@given(st.integers(1, 3), st.lists(st.tuples(st.sampled_from([A, B, C]), st.booleans())))
@example(2, [(A, True), (B, True), (B, False), (C, True)])
def test_a_slot_has_the_adapter_that_was_loaded_last(
    num_slots: int, events: Sequence[tuple[Adapter, bool]]
) -> None:
    slots, used, contents = AdapterSlots(num_slots), list[Adapter](), dict[int, Adapter]()
    given = dict[Adapter, int]()
    for adapter, begins in events:
        if begins and slots.has_room(adapter):
            used.append(adapter)
            given[adapter] = slots.take(adapter)
        elif adapter in used and not begins:
            used.remove(adapter)
            slots.release(adapter)
        for slot, loaded in slots.take_loads():
            contents[slot] = loaded
        assert all(contents[given[each]] == each for each in used)


def trace(scheduler: ContinuousBatchingScheduler, *requests: BatchRequest) -> list[str]:
    runner = TokenRunner(scheduler.config)
    for each in requests:
        scheduler.add(each)
    lines: list[str] = []
    while scheduler.has_work:
        plan = scheduler.schedule(now=float(len(lines)))
        lines.append(str(plan))
        scheduler.update(plan, runner.run(plan))
    assert right(*requests)
    return lines


def test_requests_with_different_adapters_share_a_step_and_no_blocks() -> None:
    scheduler = ContinuousBatchingScheduler(small_config(max_adapters=2))
    alike = [request(0, 5, 2), request(0, 5, 2, adapter=A), request(0, 5, 2, adapter=B)]
    for request_id, each in enumerate(alike):
        each.request_id = request_id
    assert trace(scheduler, *alike) == [
        "0[0:5] 1[0:3]%1 a>1 b>2",
        "0[5:6] 1[3:5]%1 2[0:5]%2",
        "1[5:6]%1 2[5:6]%2",
    ]
    assert scheduler.stats().num_hit_tokens == 0


def test_a_request_waits_for_a_slot_and_is_not_overtaken() -> None:
    """Not by one without an adapter either: whatever it waits for, aging decides."""
    scheduler = ContinuousBatchingScheduler(small_config(max_adapters=1))
    lines = trace(
        scheduler,
        request(0, 2, 2, adapter=A),
        request(1, 2, 1, adapter=B, arrival_time=1.0),
        request(2, 2, 1, adapter=A, arrival_time=2.0),
        request(3, 2, 1, arrival_time=3.0),
    )
    assert lines == ["0[0:2]%1 a>1", "0[2:3]%1", "1[0:2]%1 b>1", "2[0:2]%1 3[0:2] a>1"]


def test_a_flood_of_one_adapter_does_not_starve_another() -> None:
    """However many requests of one come first and later: the other's is admitted in its turn."""
    scheduler = ContinuousBatchingScheduler(small_config(max_num_seqs=2, max_adapters=1))
    before = [request(i, 2, 3, adapter=A, arrival_time=0.0) for i in range(3)]
    one = request(9, 2, 1, adapter=B, arrival_time=0.5)
    behind = [request(20 + i, 2, 3, adapter=A, arrival_time=1.0) for i in range(20)]
    lines = trace(scheduler, *before, one, *behind)
    first = next(i for i, line in enumerate(lines) if line.startswith("9["))
    assert not any("20[" in line for line in lines[:first])


def plan_behind(
    scheduler: ContinuousBatchingScheduler, running: Sequence[BatchRequest], urgent: BatchRequest
) -> str:
    """Return the plan that follows when an urgent request comes behind running ones."""
    runner = TokenRunner(scheduler.config)
    for each in running:
        scheduler.add(each)
    for now in range(3):
        plan = scheduler.schedule(now=float(now))
        scheduler.update(plan, runner.run(plan))
    scheduler.add(urgent)
    return str(scheduler.schedule(now=5.0))


@pytest.mark.parametrize("num_running", [1, 2])
def test_an_urgent_request_makes_those_give_way_that_have_its_slot(num_running: int) -> None:
    scheduler = ContinuousBatchingScheduler(
        small_config(
            max_adapters=1, max_num_seqs=num_running, max_urgent_wait_ms=1.0, aging_rate=0.001
        )
    )
    slow = [request(i, 2, 8, adapter=A, priority=Priority.LOW) for i in range(num_running)]
    urgent = request(7, 2, 1, adapter=B, priority=Priority.HIGH, arrival_time=1.0)
    assert plan_behind(scheduler, slow, urgent).startswith("7[0:2]%1")
    assert [r.num_preemptions for r in slow] == [1] * num_running


def test_only_those_give_way_that_have_one_adapter() -> None:
    """However many are due later: they keep what they have computed."""
    scheduler = ContinuousBatchingScheduler(small_config(max_num_seqs=8, max_adapters=3))
    adapters = [A, B, C, A, None, B, C]
    paused = [
        request(i, 2, 8, adapter=each, is_best_effort=True) for i, each in enumerate(adapters)
    ]
    runner = TokenRunner(scheduler.config)
    for each in paused:
        scheduler.add(each)
    for now in range(2):
        plan = scheduler.schedule(now=float(now))
        scheduler.update(plan, runner.run(plan))
    scheduler.add(request(7, 2, 1, adapter=Adapter("d", "/d", "4"), arrival_time=2.0))
    assert str(scheduler.schedule(now=2.0)).startswith("7[0:2]%3")
    assert [r.num_preemptions for r in paused] == [0, 0, 1, 0, 0, 0, 1]


def test_a_request_that_gets_no_slot_takes_no_turn_of_other_engines() -> None:
    """Those that would make way for it do not have the slot alone."""
    scheduler = ContinuousBatchingScheduler(small_config(max_num_seqs=4, max_adapters=1))
    stream, paused = request(0, 2, 8, adapter=A), request(1, 2, 8, adapter=A, is_best_effort=True)
    runner = TokenRunner(scheduler.config)
    for each in (paused, stream):
        scheduler.add(each)
        plan = scheduler.schedule()
        scheduler.update(plan, runner.run(plan))
    scheduler.add(request(2, 2, 1, adapter=B))
    assert scheduler.demand(now=0.0).num_pending == inf
    scheduler.abort(stream)
    assert scheduler.demand(now=0.0).num_pending == 2


def test_what_a_failed_step_had_loaded_is_loaded_again() -> None:
    scheduler = ContinuousBatchingScheduler(small_config(max_adapters=2))
    requests = [request(0, 2, 3, adapter=A), request(1, 2, 3)]
    for each in requests:
        scheduler.add(each)
    plan = scheduler.schedule()
    assert str(plan) == "0[0:2]%1 1[0:2] a>1"
    scheduler.discard(plan, {1})
    assert str(scheduler.schedule()) == "0[0:2]%1 a>1"


def test_none_gives_way_in_vain() -> None:
    """Two requests have the slot, and only one of them may be stopped."""
    scheduler = ContinuousBatchingScheduler(
        small_config(max_adapters=1, max_urgent_wait_ms=1.0, aging_rate=0.001)
    )
    slow = request(0, 2, 12, adapter=A, priority=Priority.LOW)
    same = request(1, 2, 12, adapter=A, priority=Priority.HIGH)
    urgent = request(7, 2, 1, adapter=B, priority=Priority.HIGH, arrival_time=2.0)
    assert plan_behind(scheduler, [slow, same], urgent).startswith("1[")
    assert [r.num_preemptions for r in (slow, same)] == [0, 0]
