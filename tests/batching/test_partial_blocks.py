"""Requests that begin within a block: what is copied, what is kept for it, and when neither is."""

from typing import Any

import pytest

from batching.config import SchedulerConfig
from batching.inputs.sampling_params import SamplingParams
from batching.kv_cache.manager import KVCacheManager
from batching.priority_queue import RunningKey
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from tests.support.fakes import TokenRunner, expected_output, small_config
from tests.support.requests import make_request

NO_OTHER = 9


def limits(**changes: Any) -> SchedulerConfig:
    return small_config(
        **{"block_size": 8, "max_num_batched_tokens": 32, "min_copied_tokens": 2} | changes
    )


class Server:
    """A scheduler and a runner that live through several requests."""

    def __init__(self, **changes: Any) -> None:
        self.scheduler = ContinuousBatchingScheduler(limits(**changes))
        self._runner = TokenRunner(self.scheduler.config)

    def step(self, now: float = 0.0) -> str:
        plan = self.scheduler.schedule(now=now)
        self.scheduler.update(plan, self._runner.run(plan))
        return str(plan)

    def serve(self, *requests: BatchRequest) -> list[str]:
        """Serve requests to their ends; return the plans.  The outputs are right."""
        for r in requests:
            self.scheduler.add(r)
        lines: list[str] = []
        while self.scheduler.has_work:
            lines.append(self.step())
        for r in requests:
            prompt = r.token_ids[: r.num_prompt_tokens]
            assert r.output_token_ids == expected_output(prompt, r.num_output_tokens)
        assert self.scheduler.stats().num_free_blocks == self.scheduler.config.num_blocks
        return lines


def prompt(num_common: int, num_tokens: int, last: int = NO_OTHER) -> list[int]:
    """Tokens of which the first are those of all prompts."""
    return [*range(num_common), *[last] * (num_tokens - num_common)]


def test_a_prompt_begins_where_it_differs_from_the_one_before() -> None:
    server = Server()
    server.serve(make_request(0, prompt(13, 20, last=40), max_tokens=1))
    second = make_request(1, prompt(13, 20, last=50), max_tokens=1)
    assert server.serve(second) == ["1[13:20] 1>3"]
    assert second.num_cached_tokens == 13
    assert server.scheduler.stats().num_hit_tokens == 13


def test_the_block_with_most_in_common_is_copied() -> None:
    server = Server()
    for i, num_common in enumerate([3, 6, 4]):
        server.serve(make_request(i, prompt(num_common, 8, last=40 + i), max_tokens=1))
    assert server.serve(make_request(9, prompt(8, 8), max_tokens=1))[0].startswith("9[6:8]")


def test_of_the_same_prompt_only_the_last_token_is_computed() -> None:
    server = Server()
    for i, num_tokens in enumerate([16, 13]):
        server.serve(make_request(i, prompt(0, num_tokens, last=i), max_tokens=1))
        again = make_request(10 + i, prompt(0, num_tokens, last=i), max_tokens=1)
        assert server.serve(again)[0].startswith(f"{10 + i}[{num_tokens - 1}:{num_tokens}]")


def test_the_next_turn_of_a_chat_begins_where_the_one_before_ended() -> None:
    """But for its last token, which the model has not read."""
    server = Server()
    first = make_request(0, prompt(11, 11), max_tokens=6)
    server.serve(first)
    turn = [*first.token_ids, *prompt(0, 5)]
    assert server.serve(make_request(1, turn, max_tokens=1))[0].startswith("1[16:22]")
    first = make_request(2, prompt(0, 11, last=3), max_tokens=3)
    server.serve(first)
    turn = [*first.token_ids, *prompt(0, 5)]
    assert server.serve(make_request(3, turn, max_tokens=1))[0].startswith("3[13:19]")


@pytest.mark.parametrize(("num_common", "begins"), [(1, "1[0:9]"), (2, "1[2:9] 0>1")])
def test_too_little_in_common_is_computed_again(num_common: int, begins: str) -> None:
    server = Server()
    server.serve(make_request(0, prompt(num_common, 9, last=40), max_tokens=1))
    assert server.serve(make_request(1, prompt(num_common, 9), max_tokens=1)) == [begins]


def test_what_too_few_tokens_fill_is_not_kept() -> None:
    server = Server()
    server.serve(make_request(0, prompt(9, 9), max_tokens=1))
    assert server.scheduler.stats().num_cached_blocks == 1


def test_nothing_is_copied_for_another_salt() -> None:
    server = Server()
    server.serve(make_request(0, prompt(13, 13), max_tokens=1))
    salted = make_request(1, prompt(13, 13), max_tokens=1, cache_salt="other")
    assert server.serve(salted) == ["1[0:13]"]


def test_nothing_is_copied_where_all_rows_are_needed() -> None:
    server = Server()
    server.serve(make_request(0, prompt(13, 13), max_tokens=1))
    sampling = SamplingParams(prompt_logprobs=0)
    scored = make_request(1, prompt(13, 13), max_tokens=1, sampling=sampling)
    assert server.serve(scored) == ["1[0:13]"]


@pytest.mark.parametrize(
    "changes",
    [
        {"enable_prefix_cache": False},
        {"min_copied_tokens": None},
        {"num_checkpoints": 0},
        {"window": 8, "num_window_blocks": 16},
    ],
)
def test_where_requests_begin_behind_full_blocks_only(changes: dict[str, Any]) -> None:
    server = Server(**changes)
    server.serve(make_request(0, prompt(6, 6), max_tokens=1))
    assert server.serve(make_request(1, prompt(6, 6), max_tokens=1)) == ["1[0:6]"]


def test_the_last_of_those_that_share_a_block_leaves_it() -> None:
    server = Server()
    made = make_request(0, prompt(5, 5), max_tokens=1)
    made.fork(1)
    server.serve(made)
    assert server.scheduler.stats().num_cached_blocks == 1
    assert server.serve(make_request(2, prompt(5, 5), max_tokens=1)) == ["2[4:5] 0>8"]


def test_a_block_is_found_when_it_is_full_though_one_that_shared_it_has_left() -> None:
    server = Server()
    made = make_request(0, prompt(5, 5), max_tokens=6)
    fork = made.fork(1)
    server.scheduler.add(made)
    server.step()
    server.scheduler.abort(made)
    assert server.serve()[0] == "1[5:6]"
    assert server.serve(make_request(2, [*fork.token_ids, 7], max_tokens=1))[0].startswith("2[10:")


def test_a_block_that_is_evicted_to_make_room_is_not_copied() -> None:
    server = Server(num_blocks=2)
    server.serve(make_request(0, prompt(6, 6), max_tokens=1))
    assert server.serve(make_request(1, prompt(6, 15), max_tokens=1)) == ["1[0:15]"]


def test_copies_are_made_in_the_order_in_which_they_were_planned() -> None:
    """A fork's copy takes the block that another copy is made of."""
    server = Server(num_blocks=3)
    server.serve(make_request(0, prompt(6, 6), max_tokens=1))
    best_effort = make_request(1, prompt(0, 5), max_tokens=3, is_best_effort=True)
    best_effort.fork(2)
    server.scheduler.add(best_effort)
    server.step(now=10.0)
    last = make_request(3, prompt(5, 7), max_tokens=1)
    server.scheduler.add(last)
    assert server.step(now=11.0) == "3[5:7] 1[5:6] 2[5:6] 0>2 1>0"
    assert last.output_token_ids == expected_output(prompt(5, 7), 1)


def test_another_block_is_evicted_before_the_one_that_is_copied() -> None:
    server = Server(num_blocks=4)
    for last in range(4):
        server.serve(make_request(last, prompt(0, 6, last=last), max_tokens=1))
    assert server.serve(make_request(9, prompt(0, 6, last=0), max_tokens=1)) == ["9[5:6] 0>1"]


def test_what_another_block_begins_with_is_not_kept_again() -> None:
    server = Server()
    for num_tokens in (15, 14, 13, 15):
        server.serve(make_request(num_tokens, prompt(num_tokens, num_tokens), max_tokens=1))
    assert server.scheduler.stats().num_cached_blocks == 2


def test_a_block_that_is_copied_counts_as_used() -> None:
    server = Server(num_blocks=3)
    server.serve(make_request(0, prompt(6, 6), max_tokens=1))
    server.serve(make_request(1, prompt(0, 6), max_tokens=1))
    server.serve(make_request(2, prompt(6, 6), max_tokens=1))
    # It takes the empty block, and that of the second request.
    server.serve(make_request(3, prompt(0, 12, last=40), max_tokens=1))
    assert server.serve(make_request(4, prompt(6, 7), max_tokens=1))[0].startswith("4[6:7]")


def test_a_request_that_makes_way_resumes_where_it_was() -> None:
    server = Server(max_num_seqs=1)
    best_effort = make_request(0, prompt(11, 11), max_tokens=9, is_best_effort=True)
    server.scheduler.add(best_effort)
    assert [server.step() for _ in range(3)] == ["0[0:11]", "0[11:12]", "0[12:13]"]
    lines = server.serve(make_request(1, prompt(0, 11), max_tokens=1))
    assert lines[:2] == ["1[0:11] -0", "0[13:14] 1>10"]
    assert best_effort.output_token_ids == expected_output(prompt(11, 11), 9)


def test_a_copy_that_is_not_made_leaves_nothing() -> None:
    kv = KVCacheManager(limits())
    first, stopped, other = (make_request(i, prompt(6, 6), max_tokens=1) for i in range(3))
    key = RunningKey(rank=0, due_time=0.0, request_id=0)
    kv.start(first, kv.prefixes.find(first), key)
    kv.commit(first, kv.make_slice(first, 6), 6)
    kv.release(first, key)
    for r in (stopped, other):
        kv.start(r, kv.prefixes.find(r), key)
    kv.release(stopped, key)
    assert [copy.target for copy in kv.take_copies()] == other.block_table.block_ids
    assert kv.block_manager.num_cached_blocks == 1


def test_a_failed_step_leaves_nothing_to_copy() -> None:
    server = Server()
    server.serve(make_request(0, prompt(6, 6), max_tokens=1))
    server.scheduler.add(make_request(1, prompt(6, 6), max_tokens=1))
    server.scheduler.discard(server.scheduler.schedule())
    assert server.serve(make_request(2, prompt(6, 6), max_tokens=1)) == ["2[0:6]"]
