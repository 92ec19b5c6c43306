"""Which requests are admitted, and when rejected ones may retry."""

import pytest

from app.admission.controller import AdmissionController, AdmissionLimits, AdmissionTicket
from app.admission.service_rate import MAX_RETRY_AFTER, ServiceRate
from app.http.client import ANONYMOUS, Client
from app.http.errors.rejections import QueueFull, QuotaExceeded, ShuttingDown
from batching import Priority
from tests.support.fakes import FakeClock


def admission(clock: FakeClock | None = None, **limits: int | None) -> AdmissionController:
    return AdmissionController(AdmissionLimits(**limits), clock or FakeClock())  # type: ignore[arg-type]


def fill(controller: AdmissionController, priority: Priority) -> list[AdmissionTicket]:
    """Let in as many of a class as there is room for."""
    tickets: list[AdmissionTicket] = []
    while True:
        try:
            tickets.append(controller.admit(ANONYMOUS, priority))
        except QueueFull:
            return tickets


def test_the_less_urgent_are_rejected_first() -> None:
    controller = admission(max_num_seqs=2, max_queued_requests=10)
    low = fill(controller, Priority.LOW)
    assert len(low) == 2 + 5
    assert not controller.is_full
    normal = fill(controller, Priority.NORMAL)
    assert len(low + normal) == 2 + 9
    assert controller.is_full
    high = fill(controller, Priority.HIGH)
    assert len(low + normal + high) == 2 + 10
    for ticket in (*low, *normal, *high):
        ticket.release()
        ticket.release()
    assert controller.num_requests == 0
    assert len(fill(controller, Priority.HIGH)) == 12


def test_without_a_queue_those_that_run_are_all() -> None:
    controller = admission(max_num_seqs=3, max_queued_requests=0)
    assert len(fill(controller, Priority.LOW)) == 3


def test_prompts_that_wait_are_bounded_together_and_one_always_fits() -> None:
    controller = admission(max_queued_tokens=100)
    tickets = [controller.admit(ANONYMOUS, Priority.NORMAL) for _ in range(4)]
    tickets[0].reserve_tokens(500)
    assert controller.is_full
    with pytest.raises(QueueFull, match="too many prompt tokens"):
        tickets[1].reserve_tokens(1)
    tickets[0].release_tokens(500)
    tickets[1].reserve_tokens(70)
    with pytest.raises(QueueFull):
        tickets[2].reserve_tokens(21)
    tickets[2].reserve_tokens(20)
    urgent = controller.admit(ANONYMOUS, Priority.HIGH)
    urgent.reserve_tokens(10)
    for ticket in (*tickets, urgent):
        ticket.release()
    assert controller.num_waiting_tokens == 0


def test_a_rejection_says_how_long_the_queue_takes() -> None:
    clock = FakeClock(1000.0)
    controller = admission(clock, max_num_seqs=1, max_queued_requests=10)
    tickets = fill(controller, Priority.HIGH)
    # Nothing is known of how long they take.
    with pytest.raises(QueueFull) as caught:
        controller.admit(ANONYMOUS, Priority.HIGH)
    assert caught.value.retry_after == 1
    # One every two seconds is done with; then ten wait again.
    for ticket in tickets[:5]:
        clock.now += 2.0
        ticket.reserve_tokens(1)
        ticket.release()
        fill(controller, Priority.HIGH)
    with pytest.raises(QueueFull, match="try again in 20 s") as caught:
        controller.admit(ANONYMOUS, Priority.HIGH)
    assert caught.value.retry_after == 20


def test_a_ticket_that_was_never_used_does_not_count_for_the_service_rate() -> None:
    clock = FakeClock()
    controller = admission(clock, max_num_seqs=1, max_queued_requests=1)
    waiting = controller.admit(ANONYMOUS, Priority.HIGH)
    for _ in range(50):
        clock.now += 0.01
        controller.admit(ANONYMOUS, Priority.HIGH).release()
    assert controller.num_requests == 1
    controller.admit(ANONYMOUS, Priority.HIGH)
    clock.now = 7.0
    with pytest.raises(QueueFull) as caught:
        controller.admit(ANONYMOUS, Priority.HIGH)
    assert caught.value.retry_after == 7
    waiting.release()


def test_the_rate_is_that_of_the_last_minute_of_work() -> None:
    rate = ServiceRate(max_num_seqs=2)
    rate.begin(0.0)
    # As if both that run ended now.
    assert rate.seconds_for(8, 0.5) == 2
    for second in range(10):
        rate.record_end(float(second))
    assert rate.seconds_for(3, 10.0) == 3
    # All of that is longer ago than a minute, and nothing has ended since: as if two did now.
    assert rate.seconds_for(2, 100.0) == 91
    assert rate.seconds_for(3, 100.0) == MAX_RETRY_AFTER
    rate.record_end(110.0)
    assert rate.seconds_for(1, 110.0) == 60
    rate.begin(200.0)
    for _ in range(1000):
        rate.record_end(200.5)
    assert rate.seconds_for(1, 201.0) == 1


def test_a_client_has_so_many_requests_at_once_and_others_are_not_concerned() -> None:
    clock = FakeClock()
    controller = admission(clock, max_requests_per_key=2)
    ours, theirs = Client("ours"), Client("theirs")
    first, _ = controller.admit(ours, Priority.LOW), controller.admit(ours, Priority.LOW)
    with pytest.raises(QuotaExceeded, match="has 2 requests in flight") as caught:
        controller.admit(ours, Priority.HIGH)
    assert caught.value.retry_after == 1
    controller.admit(theirs, Priority.LOW)
    clock.now = 4.0
    first.reserve_tokens(1)
    first.release()
    controller.admit(ours, Priority.LOW)
    with pytest.raises(QuotaExceeded) as caught:
        controller.admit(ours, Priority.LOW)
    # One request every four seconds, and every third or second that ends is ours.
    assert caught.value.retry_after == 6


def test_a_client_may_come_so_often_in_a_minute() -> None:
    clock = FakeClock()
    controller = admission(clock, requests_per_minute=6)
    ours, theirs = Client("ours"), Client("theirs")
    for _ in range(6):
        controller.admit(ours, Priority.LOW).release()
    with pytest.raises(QuotaExceeded, match="6 requests a minute") as caught:
        controller.admit(ours, Priority.LOW)
    assert caught.value.retry_after == 10
    controller.admit(theirs, Priority.LOW)
    clock.now = 9.5
    with pytest.raises(QuotaExceeded) as caught:
        controller.admit(ours, Priority.LOW)
    assert caught.value.retry_after == 1
    clock.now = 10.0
    controller.admit(ours, Priority.LOW)
    with pytest.raises(QuotaExceeded):
        controller.admit(ours, Priority.LOW)
    # Nobody saves up for more than a minute.
    clock.now = 3600.0
    for _ in range(6):
        controller.admit(ours, Priority.LOW).release()
    with pytest.raises(QuotaExceeded):
        controller.admit(ours, Priority.LOW)


def test_a_draining_controller_rejects_every_request() -> None:
    controller = admission()
    inside = controller.admit(ANONYMOUS, Priority.NORMAL)
    controller.is_draining = True
    with pytest.raises(ShuttingDown) as caught:
        controller.admit(ANONYMOUS, Priority.HIGH)
    assert caught.value.retry_after == 30
    inside.reserve_tokens(5)
    inside.release()
