from dataclasses import dataclass

import pytest
from hypothesis import given, strategies as st

from batching.priority_queue import Priority, PriorityQueueWithAging


@dataclass(frozen=True)
class Item:
    request_id: int
    priority: Priority
    arrival_time: float


def queue_of(*items: Item, aging_rate: float = 0.1) -> PriorityQueueWithAging[Item]:
    queue = PriorityQueueWithAging[Item](aging_rate)
    for item in items:
        queue.push(item)
    return queue


def pop(queue: PriorityQueueWithAging[Item]) -> Item:
    item = queue.peek()
    queue.remove(item)
    return item


def drain(queue: PriorityQueueWithAging[Item]) -> list[int]:
    return [pop(queue).request_id for _ in range(len(queue))]


@st.composite
def arrivals(draw: st.DrawFn) -> list[Item]:
    """Requests in the order in which they arrive."""
    gaps = draw(st.lists(st.sampled_from([0.0, 0.5, 3.0, 10.0, 12.0]), max_size=12))
    now, items = 0.0, []
    for request_id, gap in enumerate(gaps):
        now += gap
        items.append(Item(request_id, draw(st.sampled_from(Priority)), now))
    return items


def test_the_more_urgent_goes_first_and_equals_go_in_order_of_arrival() -> None:
    queue = queue_of(
        Item(0, Priority.LOW, 0.0),
        Item(1, Priority.NORMAL, 0.0),
        Item(2, Priority.HIGH, 0.0),
        Item(3, Priority.NORMAL, 0.0),
    )
    assert drain(queue) == [2, 1, 3, 0]


def test_low_is_as_urgent_as_normal_after_10_seconds_and_as_high_after_20() -> None:
    low = Item(0, Priority.LOW, 0.0)
    queue = queue_of(low)
    assert queue.effective_priority(low, now=10.0) == pytest.approx(Priority.NORMAL)
    assert queue.effective_priority(low, now=20.0) == pytest.approx(Priority.HIGH)
    # At equal effective priority the one that arrived first is served first.
    assert drain(queue_of(low, Item(1, Priority.HIGH, 20.0))) == [0, 1]
    assert drain(queue_of(low, Item(1, Priority.HIGH, 19.9))) == [1, 0]


@given(arrivals(), st.floats(0, 100))
def test_the_constant_key_orders_as_the_effective_priority_at_any_time(
    items: list[Item], wait: float
) -> None:
    queue = queue_of(*items)
    now = max((i.arrival_time for i in items), default=0.0) + wait
    served = [round(queue.effective_priority(i, now), 6) for i in queue.first(len(queue))]
    assert served == sorted(served)


@given(arrivals())
def test_no_request_is_overtaken_by_one_that_arrives_more_than_p_over_rate_later(
    items: list[Item],
) -> None:
    queue = queue_of(*items)
    order = {request_id: position for position, request_id in enumerate(drain(queue))}
    for early in items:
        for late in items:
            if late.arrival_time > early.arrival_time + early.priority / queue.aging_rate:
                assert order[early.request_id] < order[late.request_id]


@given(arrivals(), st.data())
def test_a_preempted_request_returns_to_its_position(
    items: list[Item], data: st.DataObject
) -> None:
    expected = drain(queue_of(*items))
    queue = queue_of(*items)
    for _ in range(data.draw(st.integers(0, len(items)))):
        queue.push(pop(queue))
    assert drain(queue) == expected


@given(arrivals(), st.data())
def test_a_removed_request_is_gone_and_the_rest_stays_in_order(
    items: list[Item], data: st.DataObject
) -> None:
    queue = queue_of(*items)
    removed = data.draw(st.sets(st.sampled_from(items))) if items else set()
    for item in removed:
        queue.remove(item)
    gone = {i.request_id for i in removed}
    assert drain(queue) == [i for i in drain(queue_of(*items)) if i not in gone]


def test_an_empty_queue_has_no_first_item() -> None:
    queue = queue_of(Item(0, Priority.LOW, 0.0))
    queue.remove(queue.peek())
    with pytest.raises(IndexError):
        queue.peek()


def test_a_rate_of_zero_would_starve_and_is_rejected() -> None:
    with pytest.raises(ValueError, match="aging_rate must be above 0, not 0"):
        PriorityQueueWithAging[Item](0)


def test_it_knows_whether_a_more_urgent_request_waits() -> None:
    high, low = Item(0, Priority.HIGH, 0.0), Item(1, Priority.LOW, 0.0)
    queue = queue_of(high, low)
    assert queue.has_more_urgent(Priority.NORMAL)
    assert not queue.has_more_urgent(Priority.HIGH)
    pop(queue)
    assert not queue.has_more_urgent(Priority.LOW)
    queue.push(high)
    queue.remove(high)
    assert not queue.has_more_urgent(Priority.LOW)
