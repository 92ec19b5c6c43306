"""How many lines are in flight, and in which order they come to be."""

import asyncio

import pytest

from app.admission.controller import AdmissionController, AdmissionLimits
from app.batches.pacing import Pacer, Slot
from app.http.client import ANONYMOUS, Client
from batching import Priority
from tests.support.fakes import FakeClock

pytestmark = pytest.mark.anyio

LINE = Client("anonymous", is_batch=True)

Turn = asyncio.Task[Slot]


def controller(clock: FakeClock, **limits: int) -> AdmissionController:
    return AdmissionController(AdmissionLimits(**{"max_num_seqs": 4, **limits}), clock)


async def ask(pacer: Pacer, num_lines: int) -> tuple[list[Slot], list[Turn]]:
    """Ask for slots; return those that there are, and the tasks that wait for theirs."""
    turns = [asyncio.create_task(pacer.acquire("one")) for _ in range(num_lines)]
    await asyncio.sleep(0)
    return [t.result() for t in turns if t.done()], [t for t in turns if not t.done()]


async def test_lines_fill_the_batch_and_a_few_wait() -> None:
    pacer = Pacer(controller(FakeClock()))
    slots, waiting = await ask(pacer, 10)
    assert (pacer.num_taken, len(slots), len(waiting)) == (6, 6, 4)
    for slot in slots:
        slot.release()
        slot.release()
    for turn in waiting:
        (await turn).release()
    assert pacer.num_taken == 0


async def test_lines_leave_the_queue_to_others() -> None:
    for num_running, num_queued in ((1, 2), (2, 0)):
        limits = {"max_num_seqs": num_running, "max_queued_requests": num_queued}
        slots, waiting = await ask(Pacer(controller(FakeClock(), **limits)), 3)
        assert (len(slots), len(waiting)) == (2, 1)
        waiting[0].cancel()


async def test_beside_live_requests_lines_have_few_slots_and_one_at_least() -> None:
    clock = FakeClock()
    admission = controller(clock)
    pacer = Pacer(admission, 1)
    live = admission.admit(ANONYMOUS, Priority.NORMAL)
    (slot,), waiting = await ask(pacer, 3)
    slot.release()
    await asyncio.sleep(0)
    assert pacer.num_taken == 1
    live.release()
    clock.now = 4.5
    pacer.wake()
    assert pacer.num_taken == 1
    clock.now = 5.5
    pacer.wake()
    assert pacer.num_taken == 2
    await asyncio.gather(*waiting)


async def test_lines_themselves_are_not_live() -> None:
    admission = controller(FakeClock())
    tickets = [admission.admit(LINE, Priority.HIGH) for _ in range(4)]
    assert {ticket.priority for ticket in tickets} == {Priority.LOW}
    assert all(ticket.is_best_effort for ticket in tickets)
    assert admission.seconds_since_live() > 1e9
    slots, _ = await ask(Pacer(admission), 6)
    assert len(slots) == 6
    for ticket in tickets:
        ticket.release()


async def test_a_full_queue_and_a_shutdown_hold_lines_back() -> None:
    admission = controller(FakeClock(), max_num_seqs=1, max_queued_requests=4)
    pacer = Pacer(admission, 9)
    live = [admission.admit(ANONYMOUS, Priority.NORMAL) for _ in range(3)]
    slots, (turn,) = await ask(pacer, 1)
    assert not slots
    admission.is_draining = True
    for ticket in live:
        ticket.release()
    pacer.wake()
    await asyncio.sleep(0)
    assert not turn.done()
    admission.is_draining = False
    pacer.wake()
    await turn


async def test_a_slot_that_is_free_is_for_the_key_that_has_the_fewest() -> None:
    pacer = Pacer(controller(FakeClock()))
    slots, waiting = await ask(pacer, 9)
    other = asyncio.create_task(pacer.acquire("two"))
    await asyncio.sleep(0)
    slots[0].release()
    (await other).release()
    await waiting[0]
    assert pacer.num_taken == len(slots)
    for turn in waiting:
        turn.cancel()


async def test_lines_that_are_cancelled_leave_their_slots_to_others() -> None:
    pacer = Pacer(controller(FakeClock(), max_num_seqs=1, max_queued_requests=0))
    (slot,), (first, second, third) = await ask(pacer, 4)
    first.cancel()
    slot.release()
    # It has its turn, and is cancelled before it knows.
    second.cancel()
    await third
    assert pacer.num_taken == 1
    assert first.cancelled() and second.cancelled()


async def test_what_backs_off_goes_on_at_the_next_change() -> None:
    pacer = Pacer(controller(FakeClock()))
    tasks = [asyncio.create_task(pacer.back_off()) for _ in range(2)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    pacer.wake()
    await tasks[1]
    assert not pacer.num_taken
