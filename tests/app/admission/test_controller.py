"""Who is let in, who is not, and when those may come back."""

import pytest

from app.admission.controller import AdmissionController, AdmissionLimits, AdmissionTicket
from app.admission.service_rate import MAX_RETRY_AFTER, ServiceRate
from app.http.client import ANONYMOUS, Client
from app.http.rejections import QueueFull, QuotaExceeded, ShuttingDown
from batching import DeadlineExceeded, Priority
from tests.support.fakes import FakeClock


def admission(clock: FakeClock | None = None, **limits: int | None) -> AdmissionController:
    return AdmissionController(AdmissionLimits(**limits), clock or FakeClock())  # type: ignore[arg-type]


def fill(door: AdmissionController, priority: Priority) -> list[AdmissionTicket]:
    """Let in as many of a class as there is room for."""
    places: list[AdmissionTicket] = []
    while True:
        try:
            places.append(door.enter(ANONYMOUS, priority))
        except QueueFull:
            return places


def test_the_less_urgent_are_refused_first() -> None:
    door = admission(max_running=2, max_queued_requests=10)
    low = fill(door, Priority.LOW)
    assert len(low) == 2 + 5
    assert not door.is_full
    normal = fill(door, Priority.NORMAL)
    assert len(low + normal) == 2 + 9
    assert door.is_full
    high = fill(door, Priority.HIGH)
    assert len(low + normal + high) == 2 + 10
    for place in (*low, *normal, *high):
        place.leave()
        place.leave()
    assert door.num_requests == 0
    assert len(fill(door, Priority.HIGH)) == 12


def test_without_a_queue_those_that_run_are_all() -> None:
    door = admission(max_running=3, max_queued_requests=0)
    assert len(fill(door, Priority.LOW)) == 3


def test_prompts_that_wait_are_bounded_together_and_one_always_fits() -> None:
    door = admission(max_queued_tokens=100)
    places = [door.enter(ANONYMOUS, Priority.NORMAL) for _ in range(4)]
    places[0].hold(500)
    assert door.is_full
    with pytest.raises(QueueFull, match="too many prompt tokens"):
        places[1].hold(1)
    places[0].read(500)
    places[1].hold(70)
    with pytest.raises(QueueFull):
        places[2].hold(21)
    places[2].hold(20)
    urgent = door.enter(ANONYMOUS, Priority.HIGH)
    urgent.hold(10)
    for place in (*places, urgent):
        place.leave()
    assert door.num_waiting_tokens == 0


def test_who_is_refused_hears_how_long_the_queue_takes() -> None:
    clock = FakeClock(1000.0)
    door = admission(clock, max_running=1, max_queued_requests=10)
    places = fill(door, Priority.HIGH)
    with pytest.raises(QueueFull) as caught:
        door.enter(ANONYMOUS, Priority.HIGH)
    assert caught.value.retry_after == MAX_RETRY_AFTER
    # One every two seconds is done with; then ten wait again.
    for place in places[:5]:
        clock.now += 2.0
        place.hold(1)
        place.leave()
        fill(door, Priority.HIGH)
    with pytest.raises(QueueFull, match="try again in 20 s") as caught:
        door.enter(ANONYMOUS, Priority.HIGH)
    assert caught.value.retry_after == 20


def test_a_place_that_was_never_used_says_nothing_of_how_fast_requests_are_served() -> None:
    clock = FakeClock()
    door = admission(clock, max_running=1, max_queued_requests=1)
    waiting = door.enter(ANONYMOUS, Priority.HIGH)
    for _ in range(50):
        clock.now += 0.01
        door.enter(ANONYMOUS, Priority.HIGH).leave()
    assert door.num_requests == 1
    door.enter(ANONYMOUS, Priority.HIGH)
    with pytest.raises(QueueFull) as caught:
        door.enter(ANONYMOUS, Priority.HIGH)
    assert caught.value.retry_after == MAX_RETRY_AFTER
    waiting.leave()


def test_the_rate_is_that_of_the_last_minute_of_work() -> None:
    rate = ServiceRate()
    rate.begin(0.0)
    for second in range(10):
        rate.record_end(float(second))
    assert rate.seconds_for(3, 10.0) == 3
    # All of that is longer ago than a minute, and nothing has ended since.
    assert rate.seconds_for(3, 100.0) == MAX_RETRY_AFTER
    rate.record_end(110.0)
    assert rate.seconds_for(1, 110.0) == 60
    rate.begin(200.0)
    for _ in range(1000):
        rate.record_end(200.5)
    assert rate.seconds_for(1, 201.0) == 1


def test_a_client_has_so_many_requests_at_once_and_others_are_not_concerned() -> None:
    clock = FakeClock()
    door = admission(clock, max_requests_per_key=2)
    ours, theirs = Client("ours"), Client("theirs")
    first, _ = door.enter(ours, Priority.LOW), door.enter(ours, Priority.LOW)
    with pytest.raises(QuotaExceeded, match="2 requests of this key are not finished") as caught:
        door.enter(ours, Priority.HIGH)
    assert caught.value.retry_after == MAX_RETRY_AFTER
    door.enter(theirs, Priority.LOW)
    clock.now = 4.0
    first.hold(1)
    first.leave()
    door.enter(ours, Priority.LOW)
    with pytest.raises(QuotaExceeded) as caught:
        door.enter(ours, Priority.LOW)
    # One request every four seconds, and every third or second that ends is ours.
    assert caught.value.retry_after == 6


def test_a_client_may_come_so_often_in_a_minute() -> None:
    clock = FakeClock()
    door = admission(clock, requests_per_minute=6)
    ours, theirs = Client("ours"), Client("theirs")
    for _ in range(6):
        door.enter(ours, Priority.LOW).leave()
    with pytest.raises(QuotaExceeded, match="6 requests a minute") as caught:
        door.enter(ours, Priority.LOW)
    assert caught.value.retry_after == 10
    door.enter(theirs, Priority.LOW)
    clock.now = 9.5
    with pytest.raises(QuotaExceeded) as caught:
        door.enter(ours, Priority.LOW)
    assert caught.value.retry_after == 1
    clock.now = 10.0
    door.enter(ours, Priority.LOW)


def test_a_door_that_closes_lets_nobody_in() -> None:
    door = admission()
    inside = door.enter(ANONYMOUS, Priority.NORMAL)
    door.is_draining = True
    with pytest.raises(ShuttingDown) as caught:
        door.enter(ANONYMOUS, Priority.HIGH)
    assert caught.value.retry_after == 30
    inside.hold(5)
    inside.leave()


def test_a_place_knows_how_long_the_request_still_has() -> None:
    clock = FakeClock(5.0)
    place = admission(clock).enter(ANONYMOUS, Priority.NORMAL, "mine")
    assert place.time_left() is None
    place.timeout = 10.0
    clock.now = 7.5
    assert (place.elapsed(), place.time_left()) == (2.5, 7.5)
    clock.now = 15.0
    with pytest.raises(DeadlineExceeded):
        place.time_left()


def test_what_is_cached_for_one_client_is_found_by_no_other() -> None:
    door = admission()
    places = [
        door.enter(client, Priority.NORMAL) for client in (ANONYMOUS, Client("a", "x"), Client("b"))
    ]
    salts = {place.cache_salt(salt) for place in places[:2] for salt in (None, "s", "x")}
    assert len(salts) == 6
    assert places[0].cache_salt(None) == places[2].cache_salt(None) == ""
