"""Models with layers that see a window: what a request keeps of them, and which prefixes are hits."""

from collections.abc import Sequence
from typing import Any

import pytest

from batching.config import SchedulerConfig
from batching.inputs.images import PlacedImage
from batching.kv_cache.window_blocks import WindowBlocks
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from tests.support.fakes import TokenRunner, expected_output, make_engine, small_config
from tests.support.requests import image_of, make_request

WINDOW = 8
# Of 4 tokens; a request has those of its window, and of what it computes.
NUM_VISIBLE = 2


class Server:
    """A scheduler and a runner that live through several rounds of traffic."""

    def __init__(self, *, num_window_blocks: int = 34, **changes: Any) -> None:
        self.config: SchedulerConfig = small_config(
            **{"num_blocks": 64, "max_model_len": 256} | changes,
            window=WINDOW,
            num_window_blocks=num_window_blocks,
        )
        self.scheduler = ContinuousBatchingScheduler(self.config)
        self.runner = TokenRunner(self.config)
        self.max_held = 0

    def serve(self, *requests: BatchRequest, num_steps: int = 500) -> list[str]:
        """Add requests, run some steps, and return their plans; what ends has the right output."""
        for r in requests:
            self.scheduler.add(r)
        lines: list[str] = []
        while self.scheduler.has_work and len(lines) < num_steps:
            plan = self.scheduler.schedule()
            lines.append(str(plan))
            outputs = self.runner.run(plan)
            held = [
                len(s.window_blocks.block_ids) - s.window_blocks.num_dropped for s in plan.slices
            ]
            self.max_held = max(self.max_held, *held)
            self.scheduler.update(plan, outputs)
        for r in requests:
            prompt = r.token_ids[: r.num_prompt_tokens]
            assert r.output_token_ids == expected_output(prompt, r.num_output_tokens)
        if not self.scheduler.has_work:
            stats = self.scheduler.stats()
            assert stats.num_free_window_blocks == stats.num_window_blocks
        return lines

    def num_hit(self, request_id: int, prompt: Sequence[int], max_tokens: int = 1) -> int:
        """Serve a request; return how many of its tokens were hits."""
        r = make_request(request_id, prompt, max_tokens=max_tokens)
        self.serve(r)
        return r.num_cached_tokens


def tokens(first: int, count: int) -> list[int]:
    return [(first + 7 * i) % 64 for i in range(count)]


def test_a_request_keeps_what_it_sees_however_long_it_is() -> None:
    server = Server(max_num_batched_tokens=8)
    server.serve(make_request(0, tokens(0, 100), max_tokens=100))
    # The window, and the blocks that a chunk of 8 tokens writes to.
    assert server.max_held == NUM_VISIBLE + 2


def test_long_requests_share_few_blocks() -> None:
    """They have 200 blocks of the other layers, and never run out."""
    server = Server(num_window_blocks=4 * (NUM_VISIBLE + 1) + 2, num_blocks=256)
    server.serve(*(make_request(i, tokens(i, 120), max_tokens=80) for i in range(8)))
    assert server.scheduler.stats().num_preemptions == 0


def test_short_requests_run_at_once_where_the_windows_of_all_would_not_fit() -> None:
    server = Server(num_window_blocks=8)
    requests = [make_request(i, tokens(i, 3), max_tokens=4) for i in range(4)]
    assert server.serve(*requests) == [
        "0[0:3] 1[0:3] 2[0:2]",
        "0[3:4] 1[3:4] 2[2:3] 3[0:3]",
        "0[4:5] 1[4:5] 2[3:4] 3[3:4]",
        "0[5:6] 1[5:6] 2[4:5] 3[4:5]",
        "2[5:6] 3[5:6]",
    ]


def test_a_request_waits_until_there_is_room_for_its_window() -> None:
    """The least number of blocks: a chunk ends where these do."""
    server = Server(num_window_blocks=NUM_VISIBLE + 1, max_num_batched_tokens=32)
    requests = [
        make_request(0, tokens(0, 18), max_tokens=2),
        make_request(1, tokens(1, 6), max_tokens=2),
    ]
    assert server.serve(*requests) == [
        "0[0:12]",
        "0[12:16]",
        "0[16:18]",
        "0[18:19]",
        "1[0:6]",
        "1[6:7]",
    ]


def test_the_request_that_is_due_last_is_preempted_for_a_block_of_a_window() -> None:
    server = Server(num_window_blocks=5)
    requests = [make_request(i, tokens(i, 4), max_tokens=7) for i in range(2)]
    assert server.serve(*requests) == [
        "0[0:4] 1[0:4]",
        "0[4:5] 1[4:5]",
        "0[5:6] 1[5:6]",
        "0[6:7] 1[6:7]",
        "0[7:8] 1[7:8]",
        "0[8:9] -1",
        "0[9:10]",
        "1[8:9]",
        "1[9:10]",
    ]


def test_a_prompt_that_is_due_first_gets_the_block_of_a_decode() -> None:
    server = Server(num_window_blocks=4, prefill_chunk=2)
    requests = [
        make_request(0, tokens(0, 16), max_tokens=2),
        make_request(1, tokens(1, 2), max_tokens=6),
    ]
    assert server.serve(*requests) == [
        "0[0:2] 1[0:2]",
        "1[2:3] 0[2:4]",
        "1[3:4] 0[4:6]",
        "1[4:5] 0[6:8]",
        "0[8:10] -1",
        "0[10:12]",
        "0[12:14]",
        "0[14:16]",
        "0[16:17]",
        "1[4:6]",
        "1[6:7]",
    ]


@pytest.mark.parametrize("num_tokens", [1, 4, 7, 8, 9, 12, 13, 40, 41])
def test_an_identical_prompt_computes_its_last_block_only(num_tokens: int) -> None:
    server = Server()
    num_hits = [server.num_hit(i, tokens(0, num_tokens)) for i in range(3)]
    last = (num_tokens - 1) // 4 * 4
    assert num_hits == [0, last, last]


def test_turns_that_append_hit_all_that_was_computed() -> None:
    server = Server(num_window_blocks=20)
    history = tokens(0, 30)
    for turn in range(5):
        num_computed = len(history) - 1 if turn else 0
        request = make_request(turn, [*history, 9, 8, 7] if turn else history, max_tokens=23)
        server.serve(request)
        assert request.num_cached_tokens == num_computed // 4 * 4
        history = request.token_ids


def test_a_prefix_is_a_hit_as_long_as_its_window_is_there() -> None:
    server = Server(num_window_blocks=18)
    system = tokens(0, 32)
    assert server.num_hit(0, [*system, *tokens(1, 20)]) == 0
    assert server.num_hit(1, [*system, *tokens(2, 20)]) == 32
    # The blocks of all its tokens are still there, but not those of the windowed layers.
    assert [server.num_hit(10 + i, tokens(40 + i, 10)) for i in range(8)] == [0] * 8
    assert server.scheduler.stats().num_window_missed_tokens == 0
    assert server.num_hit(3, [*system, *tokens(4, 20)]) == 0
    assert server.scheduler.stats().num_window_missed_tokens == 32
    assert server.num_hit(4, [*system, *tokens(5, 20)]) == 32


def test_a_long_prompt_evicts_no_window_in_which_a_request_will_begin() -> None:
    """What it gives up goes first: not the ends of others, not those of prefixes that many share."""
    server = Server(num_blocks=256)
    system = tokens(0, 32)
    turns = [[*system, *tokens(i, 20)] for i in range(1, 4)]
    num_hits = [server.num_hit(i, turn) for i, turn in enumerate(turns)]
    assert num_hits == [0, 32, 32]
    assert server.num_hit(3, tokens(3, 200)) == 0
    assert [server.num_hit(4 + i, [*turn, 1, 2, 3]) for i, turn in enumerate(turns)] == [52, 52, 52]
    assert server.num_hit(7, [*system, *tokens(9, 20)]) == 32
    assert server.scheduler.stats().num_window_missed_tokens == 0


def test_a_request_waits_while_the_window_that_it_needs_is_computed_again() -> None:
    server = Server(num_window_blocks=18, max_num_batched_tokens=64)
    system = tokens(0, 32)
    server.num_hit(0, [*system, *tokens(1, 20)])
    assert [server.num_hit(10 + i, tokens(40 + i, 10)) for i in range(20)] == [0] * 20
    requests = [make_request(i, [*system, *tokens(i, 20)], max_tokens=1) for i in (4, 5)]
    assert server.serve(*requests)[0] == "4[0:52]"
    assert [r.num_cached_tokens for r in requests] == [0, 32]


def test_a_hit_shares_no_more_than_the_window() -> None:
    server = Server()
    prompt = tokens(0, 41)
    server.num_hit(0, prompt)
    again = make_request(1, prompt, max_tokens=3)
    server.serve(again, num_steps=1)
    assert again.window_table.num_dropped == 40 // 4 - NUM_VISIBLE
    assert len(again.window_table) == len(again.block_table)


def test_a_fork_copies_the_block_that_it_writes_into() -> None:
    server = Server()
    made = make_request(0, tokens(0, 22), max_tokens=12)
    fork = made.fork(1)
    lines = server.serve(made)
    copies = [part for line in lines for part in line.split() if ">" in part]
    assert [part.endswith("w") for part in copies] == [False, True]
    assert fork.output_token_ids == made.output_token_ids == expected_output(tokens(0, 22), 12)


def test_a_failed_step_leaves_no_window_behind() -> None:
    server = Server()
    prompt = tokens(0, 30)
    server.num_hit(0, prompt)
    failing = make_request(1, tokens(1, 30), max_tokens=9)
    server.serve(failing, num_steps=3)
    server.scheduler.discard(server.scheduler.schedule())
    server.runner.reset()
    assert not server.scheduler.has_work
    assert server.num_hit(2, prompt) == 0
    # What the one before has computed, and nothing older.
    assert server.num_hit(3, prompt) == 28


@pytest.mark.parametrize("num_window_blocks", range(NUM_VISIBLE + 1, 16))
def test_whatever_of_a_window_is_evicted_no_output_changes(num_window_blocks: int) -> None:
    server = Server(num_window_blocks=num_window_blocks)
    prompt = tokens(0, 30)
    server.serve(make_request(0, prompt, max_tokens=1))
    server.serve(make_request(1, tokens(1, 30), max_tokens=1))
    server.serve(make_request(2, prompt, max_tokens=9))


def test_fewer_blocks_than_one_request_sees_are_rejected() -> None:
    with pytest.raises(ValueError, match="num_window_blocks must be at least 3, not 2"):
        small_config(window=WINDOW, num_window_blocks=2)


def test_a_block_that_is_given_up_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault."""
    plain = WindowBlocks.commit

    def commit(self: WindowBlocks, request: BatchRequest, *args: Any) -> None:
        plain(self, request, *args)
        table = request.window_table
        if len(table) > table.num_dropped + 1:
            self.block_manager.release(table.drop(table.num_dropped + 1))

    monkeypatch.setattr(WindowBlocks, "commit", commit)
    config = small_config(window=WINDOW, num_window_blocks=32)
    _, engine = make_engine(config)
    engine.add(make_request(0, tokens(0, 20), max_tokens=4))
    while engine.has_work:
        engine.step()
    assert engine.last_step.has_failed


def test_a_step_is_not_planned_ahead_without_blocks_for_all_windows() -> None:
    server = Server(num_window_blocks=5)
    manager = server.scheduler._kv
    assert manager.windows is not None
    waiting = [make_request(i, [1]) for i in range(6)]
    assert [manager.has_room_to_grow(waiting[:num]) for num in (5, 6)] == [True, False]
    seeing = PlacedImage(0, image_of(b"cat", 5, sees_ahead=True))
    waiting[0] = make_request(0, [1, *(0,) * 6], images=(seeing,))
    spans = Server(num_window_blocks=5, max_span=5, max_num_batched_tokens=32)
    manager = spans.scheduler._kv
    # The image has two blocks more than a token.
    assert [manager.has_room_to_grow(waiting[:num]) for num in (3, 4)] == [True, False]


def test_a_request_goes_on_behind_a_prefix_in_blocks_of_its_own_or_stays_where_it_is() -> None:
    windows = WindowBlocks(small_config(window=WINDOW, num_window_blocks=7))
    request, pool = make_request(0, tokens(0, 40)), windows.block_manager
    windows.start(request, [], 0)
    windows.grow(request, 12)
    before = list(request.window_table.block_ids)
    others = pool.allocate(3)
    assert others is not None
    # It sees two blocks there, and one is free.
    assert windows.restart(request, 5) is None
    assert (request.window_table.block_ids, pool.num_free_blocks) == (before, 1)
    pool.release(others[:1])
    found = windows.restart(request, 5)
    assert found is not None
    assert (request.window_table.held, request.window_table.num_dropped) == (found, 3)
    assert len({*found} - {*before}) == NUM_VISIBLE
    assert pool.num_free_blocks == 3
