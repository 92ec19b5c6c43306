"""Requests that run while there is nothing else to do, and now and then beside others."""

from collections.abc import Sequence
from typing import Any

import pytest

from batching.priority_queue import Priority
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from tests.support.fakes import TokenRunner, request, right, small_config
from tests.support.requests import make_request


class Server:
    """A scheduler, and the plans that it makes at given times."""

    def __init__(self, **limits: Any) -> None:
        self.scheduler = ContinuousBatchingScheduler(small_config(**limits))
        self._runner = TokenRunner(self.scheduler.config)

    def add(self, *requests: BatchRequest) -> None:
        for r in requests:
            self.scheduler.add(r)

    def plans(self, times: Sequence[float], max_prefill_tokens: int | None = None) -> list[str]:
        lines: list[str] = []
        for now in times:
            plan = self.scheduler.schedule(max_prefill_tokens, now=now)
            lines.append(str(plan))
            self.scheduler.update(plan, self._runner.run(plan))
        return lines

    def finish(self) -> list[str]:
        """Serve what there is, and check that nothing is left."""
        lines: list[str] = []
        while self.scheduler.has_work:
            lines += self.plans([0.0])
        assert self.scheduler.stats().num_free_blocks == self.scheduler.config.num_blocks
        return lines


def line(request_id: int, num_tokens: int, max_tokens: int, **kwargs: Any) -> BatchRequest:
    kwargs = {"priority": Priority.LOW, "is_best_effort": True} | kwargs
    return request(request_id, num_tokens, max_tokens, **kwargs)


def test_alone_they_take_all_of_a_step() -> None:
    server, requests = Server(), [line(0, 3, 2), line(1, 4, 2)]
    server.add(*requests)
    assert server.finish() == ["0[0:3] 1[0:4]", "0[3:4] 1[4:5]"]
    assert right(*requests)


def test_beside_others_they_run_twice_a_second() -> None:
    server, decoding, prefilling, other = Server(), line(0, 2, 6), line(1, 9, 2), request(2, 2, 6)
    server.add(decoding)
    assert server.plans([10.0]) == ["0[0:2]"]
    server.add(prefilling, other)
    assert server.plans([10.1, 10.2, 10.51, 10.6, 11.1, 11.2, 11.3]) == [
        "2[0:2]",
        "2[2:3]",
        "2[3:4] 0[2:3] 1[0:6]",
        "2[4:5]",
        "2[5:6] 0[3:4] 1[6:9]",
        "2[6:7]",
        "0[4:5] 1[9:10]",
    ]
    server.finish()
    assert right(decoding, prefilling, other)


def test_beside_others_their_prompts_get_what_the_others_leave() -> None:
    """Streams stall no longer for them than for a prompt of the others."""
    server = Server()
    server.add(request(0, 2, 8), line(1, 20, 1))
    assert server.plans([0.0, 1.0], max_prefill_tokens=3) == ["0[0:2]", "0[2:3] 1[0:3]"]
    server.add(request(2, 4, 1))
    assert server.plans([2.0, 2.1], max_prefill_tokens=3) == ["0[3:4] 2[0:3]", "0[4:5] 2[3:4]"]
    assert server.plans([3.0], max_prefill_tokens=3) == ["0[5:6] 1[3:6]"]


def test_soon_after_others_more_of_them_are_expected() -> None:
    """Another request may come, and has to wait for the step that it finds."""
    server, first = Server(), line(1, 12, 1)
    server.add(request(0, 2, 1))
    assert server.plans([1.0]) == ["0[0:2]"]
    assert server.scheduler.expects_others(1.1)
    server.add(first)
    assert [server.scheduler.expects_others(now) for now in (5.9, 6.0)] == [True, False]
    assert server.plans([6.0], max_prefill_tokens=3) == ["1[0:3]"]
    server.finish()
    assert right(first)


def test_they_have_rows_even_if_the_others_prompts_fill_each_step() -> None:
    server, waits = Server(max_model_len=128), line(0, 2, 3)
    server.add(waits)
    assert server.plans([1.0]) == ["0[0:2]"]
    server.add(request(1, 60, 1))
    assert server.plans([1.1, 1.6, 1.7, 2.2]) == [
        "1[0:8]",
        "1[8:15] 0[2:3]",
        "1[15:23]",
        "1[23:30] 0[3:4]",
    ]
    assert right(waits)


def test_they_make_way_for_a_sequence_slot() -> None:
    """The one that came last, which goes on where it was."""
    server, lines, other = Server(max_num_seqs=2), [line(0, 3, 4), line(1, 6, 4)], request(2, 2, 2)
    server.add(*lines)
    assert server.plans([0.0, 0.1]) == ["0[0:3] 1[0:5]", "0[3:4] 1[5:6]"]
    server.add(other)
    assert server.plans([0.2, 0.3]) == ["2[0:2] -1", "2[2:3]"]
    assert server.scheduler.stats().num_preemptions == 1
    # Its first block is in the prefix cache.
    assert server.plans([0.4]) == ["0[4:5] 1[4:7]"]
    server.finish()
    assert right(*lines, other)


def test_they_make_way_for_blocks() -> None:
    server, lines, other = Server(num_blocks=4), [line(0, 7, 3), line(1, 7, 3)], request(2, 12, 2)
    server.add(*lines)
    assert server.plans([0.0, 0.1]) == ["0[0:7] 1[0:1]", "0[7:8] 1[1:7]"]
    server.add(other)
    assert server.plans([0.2]) == ["2[0:8] -1 -0"]
    assert server.scheduler.stats().num_preemptions == 2
    server.finish()
    assert right(*lines, other)


def test_they_give_their_blocks_to_others_that_grow() -> None:
    """However long they have been there."""
    server, old = Server(num_blocks=4), line(0, 7, 6)
    others = [request(1, 3, 6, arrival_time=50.0), request(2, 3, 6, arrival_time=60.0)]
    server.add(old, *others)
    server.finish()
    assert right(old, *others)
    assert (old.num_preemptions, others[0].num_preemptions, others[1].num_preemptions) == (1, 0, 0)


def test_none_starts_in_the_room_that_a_running_one_needs_now() -> None:
    server, runs, waits = Server(num_blocks=4), line(0, 4, 5), line(1, 12, 1)
    server.add(runs)
    assert server.plans([0.0]) == ["0[0:4]"]
    server.add(waits)
    assert server.plans([0.1, 0.2]) == ["0[4:5]", "0[5:6]"]
    server.finish()
    assert right(runs, waits) and waits.num_preemptions == 0


def test_one_that_has_waited_is_not_overtaken() -> None:
    """A priority is a head start of so many seconds, for them as for others."""
    server, first = Server(max_num_seqs=1), request(0, 2, 2)
    old, new = line(1, 2, 1), request(2, 2, 1, arrival_time=25.0)
    server.add(first)
    server.plans([0.0])
    server.add(old, new)
    assert server.plans([26.0, 26.1, 26.2]) == ["0[2:3]", "1[0:2]", "2[0:2]"]


def test_one_that_has_waited_advances_though_others_always_wait() -> None:
    """It takes a slot twice a second, for a step of its own; the others find all slots else."""
    server, waits = Server(max_num_seqs=1), line(0, 2, 2)
    server.add(waits, *(request(i, 2, 1, arrival_time=90.0) for i in range(1, 8)))
    times = [100.0, 100.1, 100.2, 100.3, 100.4, 100.6, 100.7]
    assert server.plans(times) == [
        "0[0:2]",
        "1[0:2] -0",
        "2[0:2]",
        "3[0:2]",
        "4[0:2]",
        "0[0:3]",
        "5[0:2]",
    ]
    assert right(waits)


def test_while_others_wait_none_starts_only_to_be_stopped() -> None:
    server, runs, waits = Server(max_num_seqs=2), line(0, 2, 9), line(1, 2, 9)
    server.add(runs)
    assert server.plans([100.0]) == ["0[0:2]"]
    server.add(waits, *(request(i, 2, 1, arrival_time=90.0) for i in range(2, 6)))
    assert server.plans([100.1, 100.2, 100.3]) == [
        "2[0:2] 3[0:2] -0",
        "4[0:2] 5[0:2]",
        "0[0:3] 1[0:2]",
    ]
    assert (runs.num_preemptions, waits.num_preemptions) == (1, 0)


def test_one_that_makes_way_keeps_its_place_in_the_queue() -> None:
    server, old = Server(max_num_seqs=1), line(0, 2, 3)
    server.add(old)
    assert server.plans([0.0]) == ["0[0:2]"]
    server.add(request(1, 2, 1, arrival_time=25.0), request(2, 2, 1, arrival_time=26.0))
    assert server.plans([30.0, 30.1, 30.2, 30.3]) == [
        "1[0:2] -0",
        "0[0:3]",
        "2[0:2] -0",
        "0[0:4]",
    ]
    assert right(old)


def test_nobody_else_waits_for_a_prefix_that_they_compute() -> None:
    server, prefix = Server(), list(range(8))
    computes = make_request(0, [*prefix, 1, 2], max_tokens=1, is_best_effort=True)
    server.add(computes)
    assert server.plans([0.0]) == ["0[0:8]"]
    server.add(
        make_request(1, [*range(20, 30), 1], max_tokens=1, is_best_effort=True),
        make_request(2, [*range(20, 30), 2], max_tokens=1),
    )
    assert server.plans([0.1]) == ["2[0:8]"]


def test_a_slot_stays_reserved_for_one_that_waits_for_a_prefix_when_they_make_way() -> None:
    """Else the last one would take the slot, and that one be overtaken."""
    server, prefix = Server(max_num_seqs=3), list(range(17))
    server.add(line(0, 2, 9), make_request(1, prefix, max_tokens=1))
    assert server.plans([1.0]) == ["1[0:8]"]
    waits = make_request(2, prefix, max_tokens=1)
    server.add(waits, request(3, 5, 9), request(4, 5, 1))
    assert server.plans([1.1, 1.2, 1.3]) == [
        "1[8:12] 3[0:4]",
        "1[12:17] 3[4:5]",
        "3[5:6] 2[16:17] 4[0:5]",
    ]
    server.finish()
    assert right(waits)


def test_one_that_waits_for_a_prefix_makes_way_with_the_one_that_computes_it() -> None:
    server, prefix = Server(max_num_seqs=2), list(range(20))
    lines = [make_request(i, prefix, max_tokens=1, is_best_effort=True) for i in range(2)]
    server.add(*lines)
    assert server.plans([1.0]) == ["0[0:8]"]
    assert server.scheduler.stats().num_awaiting_prefix == 1
    server.add(request(2, 2, 2), request(3, 2, 2))
    assert server.plans([2.0, 2.1]) == ["2[0:2] 3[0:2] -0", "2[2:3] 3[2:3]"]
    server.finish()
    assert right(*lines)


@pytest.mark.parametrize("is_best_effort", [False, True])
def test_what_may_have_to_make_way_is_read_before_the_next_plan(is_best_effort: bool) -> None:
    server = Server(max_num_seqs=1)
    server.add(request(0, 2, 9, is_best_effort=is_best_effort))
    plan = server.scheduler.schedule()
    assert server.scheduler.can_expect(plan, lambda _: True)
    server.add(request(1, 2, 1))
    assert server.scheduler.can_expect(plan, lambda _: True) is not is_best_effort
    server.scheduler.abort(server.scheduler._waiting.peek())
    assert server.scheduler.can_expect(plan, lambda _: True)
