"""Models with recurrent state: which prefixes are hits, and what the slots of a plan hold."""

from collections.abc import Sequence
from typing import Any

import pytest

from batching.config import SchedulerConfig
from batching.constraints.protocol import AllowedTokens
from batching.inputs.sampling_params import SamplingParams
from batching.prompt_lookup import PromptLookup
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from batching.scheduling.outputs import RequestFailure, RequestOutput
from batching.steps.step_plan import StepPlan
from tests.support.fakes import TokenRunner, expected_output, make_engine, small_config
from tests.support.requests import make_request


class Server:
    """A scheduler and a runner that live through several rounds of traffic."""

    def __init__(self, **changes: Any) -> None:
        limits = {"num_blocks": 64, "num_checkpoints": 8, "max_num_batched_tokens": 64}
        self.config: SchedulerConfig = small_config(**limits | changes)
        self.scheduler = ContinuousBatchingScheduler(self.config)
        self.runner = TokenRunner(self.config)
        self.plans: list[StepPlan] = []
        self.items: list[RequestOutput | RequestFailure] = []

    def serve(self, *requests: BatchRequest, num_steps: int = 100) -> list[str]:
        """Add requests, run some steps, and return their plans; what ends has the right output."""
        for r in requests:
            self.scheduler.add(r)
        first = len(self.plans)
        while self.scheduler.has_work and len(self.plans) - first < num_steps:
            plan = self.scheduler.schedule()
            self.plans.append(plan)
            self.items += self.scheduler.update(plan, self.runner.run(plan))
        for r in requests:
            prompt = r.token_ids[: r.num_prompt_tokens]
            assert r.output_token_ids == expected_output(prompt, r.num_output_tokens)
        return list(map(str, self.plans[first:]))

    def num_hit(self, request_id: int, prompt: Sequence[int], **kwargs: Any) -> int:
        """Serve a request of one output token; return how many of its tokens were hits."""
        r = make_request(request_id, prompt, max_tokens=1, **kwargs)
        self.serve(r)
        return r.num_cached_tokens


SYSTEM = list(range(32))


def prompt_with(tail: int, num_tokens: int = 8, prefix: Sequence[int] = SYSTEM) -> list[int]:
    """A prefix that others share, and a tail that they do not."""
    return [*prefix, *[tail] * num_tokens]


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(16, 12), (17, 16), (19, 16), (4, 0)])
def test_an_identical_prompt_computes_its_last_block_only(num_tokens: int, num_hit: int) -> None:
    server = Server()
    prompt = list(range(num_tokens))
    assert [server.num_hit(i, prompt) for i in range(3)] == [0, num_hit, num_hit]


def test_turns_that_append_hit_all_that_was_computed() -> None:
    server = Server()
    history = list(range(10))
    num_hits = []
    for turn in range(4):
        r = make_request(turn, history, max_tokens=7)
        server.serve(r)
        num_hits.append(r.num_cached_tokens)
        history = [*r.token_ids, 40 + turn, 41, 42]
    # 16 tokens of the first turn are computed, 26 of the second, 36 of the third.
    assert num_hits == [0, 16, 24, 36]
    assert server.scheduler.stats().num_state_missed_tokens == 0


def test_of_requests_with_one_system_prompt_the_second_stores_its_state() -> None:
    server = Server()
    assert [server.num_hit(i, prompt_with(40 + i)) for i in range(4)] == [0, 0, 32, 32]
    stats = server.scheduler.stats()
    assert stats.num_state_missed_tokens == 32
    assert stats.num_checkpoints_hit == 2


def test_requests_that_come_at_once_wait_for_the_state_of_their_system_prompt() -> None:
    server = Server()
    requests = [make_request(i, prompt_with(40 + i), max_tokens=1) for i in range(4)]
    lines = server.serve(*requests)
    # The first one keeps its states where the prefix ends and at its own last boundary.
    assert lines[0] == "0[0:40]@32@36"
    assert [r.num_cached_tokens for r in requests] == [0, 32, 32, 32]
    assert server.scheduler.stats().num_state_missed_tokens == 0


@pytest.mark.parametrize("is_at_once", [False, True])
def test_a_shifted_tail_hits_the_long_prefix(is_at_once: bool) -> None:
    """The tails differ in length, so that the ends of the prompts never meet."""
    server = Server(num_blocks=512, max_model_len=2048)
    prefix = [i % 50 for i in range(4 * 64)]
    requests = [
        make_request(i, prompt_with(50 + i, 25 * i + 7, prefix), max_tokens=1) for i in range(4)
    ]
    for batch in [requests] if is_at_once else [[r] for r in requests]:
        server.serve(*batch)
    num_first_hits = 256 if is_at_once else 0
    assert [r.num_cached_tokens for r in requests] == [0, num_first_hits, 256, 256]


def test_requests_with_other_salts_share_nothing() -> None:
    server = Server()
    hits = [server.num_hit(i, prompt_with(40), cache_salt=s) for i, s in enumerate("abba")]
    assert hits == [0, 0, 36, 36]
    assert server.scheduler.stats().num_state_missed_tokens == 0


def test_a_request_waits_while_the_state_that_it_needs_is_computed_again() -> None:
    """Its blocks are all there, but their state was evicted."""
    server = Server(num_checkpoints=3)
    server.num_hit(0, prompt_with(40))
    assert [server.num_hit(i, [50 + i] * 9) for i in (1, 2, 3)] == [0, 0, 0]
    assert server.scheduler.stats().num_checkpoints_evicted == 2
    requests = [make_request(i, prompt_with(40 + i), max_tokens=1) for i in (4, 5)]
    assert server.serve(*requests)[0].startswith("4[0:40]@32@36")
    assert [r.num_cached_tokens for r in requests] == [0, 32]
    assert server.scheduler.stats().num_state_missed_tokens == 32


def test_a_state_is_copied_out_of_a_slot_before_the_next_request_gets_it() -> None:
    """Slot 0 is that of both: its states go to 1 and 2, and one of them into 0 again."""
    server = Server(max_num_seqs=1)
    first, second = (make_request(i, prompt_with(40), max_tokens=1) for i in range(2))
    assert server.serve(first, second) == ["0[0:40]@36", "1[36:40] 0@36>1 0@40>2 1@36>0"]


@pytest.mark.parametrize(
    ("num_tokens", "positions"),
    [
        (699, [696]),
        (1599, [512, 1024, 1596]),
        (4095, [*range(512, 3073, 512), 4092]),
        (4098, [1024, 2048, 3072, 4096]),
        (6001, [*range(1024, 5121, 1024), 6000]),
    ],
)
def test_a_long_prompt_keeps_few_states_far_apart(num_tokens: int, positions: list[int]) -> None:
    limits = {"num_blocks": 2048, "max_model_len": 8192, "max_num_seqs": 1}
    server = Server(prefill_chunk=512, max_num_batched_tokens=512, **limits)
    prompt = [i % 60 for i in range(num_tokens)]
    server.serve(make_request(0, prompt, max_tokens=1), make_request(1, [61], max_tokens=1))
    assert [c.position for plan in server.plans for c in plan.state_copies] == positions
    assert server.num_hit(2, prompt[: positions[0] + 3]) == positions[0]
    assert server.num_hit(3, prompt) == positions[-1]


def test_a_resumed_request_begins_at_its_last_whole_block() -> None:
    server = Server(num_blocks=4, max_num_seqs=2, max_num_batched_tokens=8)
    first, last = make_request(0, [0] * 7, max_tokens=6), make_request(1, [1] * 5, max_tokens=5)
    lines = server.serve(first, last)
    assert lines[2:5] == ["0[7:8] 1[5:6]@4", "0[8:9]@8 -1", "0[9:10]@8"]
    assert lines[-3] == "1[4:7]@4 0@12>4 3@4>0"


def test_what_a_resumed_request_computes_again_does_not_count_as_missed() -> None:
    server = Server(num_blocks=4, max_num_seqs=2, max_num_batched_tokens=8, num_checkpoints=0)
    server.serve(make_request(0, [0] * 7, max_tokens=6), make_request(1, [1] * 5, max_tokens=5))
    assert server.scheduler.stats().num_preemptions == 1
    assert server.scheduler.stats().num_state_missed_tokens == 0


def test_states_of_forks_are_copied_from_where_the_prompt_ends() -> None:
    server = Server(max_num_seqs=3, num_blocks=8)
    made = make_request(0, [1] * 6, max_tokens=3)
    forks = [made.fork(1), made.fork(2)]
    assert server.serve(made) == [
        "0[0:6]&1&2@4",
        "0[6:7]@4 1[6:7] 2[6:7] 1>2 1>3 0@6>1 0@6>2 0@4>3",
        "0[7:8] 1[7:8] 2[7:8]",
    ]
    assert all(fork.output_token_ids == made.output_token_ids for fork in forks)


def test_a_fork_without_a_sequence_slot_gets_no_state_slot() -> None:
    server = Server(max_num_seqs=2)
    made = make_request(0, [1] * 6, max_tokens=2)
    fork, requeued = made.fork(1), made.fork(2)
    server.serve(made, num_steps=1)
    assert [made.state_slot, fork.state_slot, requeued.state_slot] == [0, 1, None]
    assert server.serve()[-1].startswith("2[4:7]")


class Drafter(PromptLookup):
    """Proposes what will be sampled, but for a token at one position."""

    def __init__(self, wrong_position: int | None = None) -> None:
        super().__init__()
        self._wrong_position = wrong_position

    def draft(self, token_ids: Sequence[int], max_length: int) -> tuple[int, ...]:
        drafts = expected_output(token_ids, max_length)
        positions = range(len(token_ids), len(token_ids) + max_length)
        return tuple(
            d ^ (p == self._wrong_position) for d, p in zip(drafts, positions, strict=True)
        )


def drafting(request_id: int, wrong_position: int | None = None, **kwargs: Any) -> BatchRequest:
    made = make_request(request_id, [7, 8, 9], **{"max_tokens": 9} | kwargs)
    made.drafter = Drafter(wrong_position)
    return made


def test_right_drafts_advance_the_state() -> None:
    server = Server(max_draft_tokens=7, block_size=8)
    assert server.serve(drafting(0)) == ["0[0:3]", "0[3:4]+4@3", "0[8:9]+2@8"]


def test_after_a_wrong_draft_the_next_slice_begins_where_that_one_did() -> None:
    """Its rows are the accepted tokens, the one sampled after them, and new drafts."""
    server = Server(max_draft_tokens=7, block_size=8)
    lines = server.serve(drafting(0, wrong_position=6))
    assert lines == ["0[0:3]", "0[3:4]+4@3", "0[3:7]+1@3", "0[8:9]+2@8"]


def test_pending_tokens_and_drafts_share_the_drafting_rows() -> None:
    server = Server(max_draft_tokens=7, block_size=16, max_drafting_rows=4)
    lines = server.serve(drafting(0, wrong_position=5, max_tokens=13))
    assert lines[:4] == ["0[0:3]", "0[3:4]+3@3", "0[3:6]+1@3", "0[7:8]+3@7"]


def test_pending_tokens_that_exceed_a_step_are_computed_in_two() -> None:
    """Three more requests decode now, so that the first two's tokens do not all fit."""
    limits = {"max_num_batched_tokens": 9, "max_num_seqs": 5, "max_draft_tokens": 3}
    server = Server(block_size=16, **limits)
    wrong = [drafting(i, wrong_position=6, reports_progress=True) for i in range(2)]
    late = make_request(2, [1], max_tokens=3)
    late.fork(3)
    late.fork(4)
    server.serve(*wrong, num_steps=1)
    lines = server.serve(late)
    assert lines[0] == "0[3:4]+3@3 1[3:4]+3@3 2[0:1]&3&4"
    assert lines[1].startswith("0[3:7] 1[3:5] 2[1:2] 3[1:2] 4[1:2]")
    assert lines[2].startswith("0[7:8] 1[5:7] 2[2:3] 3[2:3] 4[2:3]")
    assert all(r.output_token_ids == expected_output([7, 8, 9], 9) for r in wrong)
    outputs = [i.output for i in server.items if isinstance(i, RequestOutput)]
    assert all(output.token_ids for output in outputs)


@pytest.mark.parametrize("limits", [{"num_checkpoints": 0}, {"enable_prefix_cache": False}])
def test_without_checkpoints_nothing_is_kept_and_nothing_is_a_hit(limits: dict[str, Any]) -> None:
    server = Server(**limits)
    requests = [make_request(i, prompt_with(40), max_tokens=2) for i in range(2)]
    assert server.serve(*requests) == ["0[0:40] 1[0:24]", "0[40:41] 1[24:40]", "1[40:41]"]
    assert server.num_hit(2, prompt_with(40)) == 0


def test_what_is_missing_without_checkpoints_can_be_seen() -> None:
    server = Server(num_checkpoints=0)
    for i in range(2):
        assert server.num_hit(i, prompt_with(40)) == 0
    stats = server.scheduler.stats()
    assert stats.num_state_missed_tokens == 36
    assert (stats.num_checkpoints, stats.num_checkpoints_stored) == (0, 0)
    assert stats.num_checkpoints_skipped > 0


def test_a_state_whose_blocks_cannot_be_found_is_not_stored() -> None:
    """The second request's block is private, since the first one's was cached; that is evicted."""
    server = Server(num_blocks=5)
    server.num_hit(0, [1] * 5)
    sampling = SamplingParams(prompt_logprobs=0)
    private = make_request(1, [1] * 5, max_tokens=9, sampling=sampling)
    server.serve(private, num_steps=1)
    server.serve(make_request(2, [2] * 12, max_tokens=1), num_steps=1)
    assert server.scheduler.stats().num_checkpoints_skipped == 0
    server.scheduler.abort(private)
    assert server.scheduler.stats().num_checkpoints_skipped == 1


def test_a_model_without_state_has_no_checkpoints() -> None:
    server = Server(num_checkpoints=None)
    assert [server.num_hit(i, prompt_with(40)) for i in range(2)] == [0, 36]
    assert server.scheduler.stats().num_checkpoints is None


def test_a_state_is_of_no_use_where_the_window_is_gone() -> None:
    server = Server(window=8, num_window_blocks=18, num_checkpoints=64)
    prompt = list(range(52))
    assert [server.num_hit(i, prompt) for i in range(2)] == [0, 48]
    others = [[(150 + 7 * i + 3 * j) % 256 for j in range(12)] for i in range(8)]
    assert [server.num_hit(10 + i, other) for i, other in enumerate(others)] == [0] * 8
    assert [server.num_hit(20 + i, prompt) for i in range(2)] == [0, 48]


def test_a_failed_step_loses_all_states() -> None:
    server = Server()
    server.num_hit(0, prompt_with(40))
    r = make_request(1, prompt_with(41), max_tokens=2)
    server.serve(r, num_steps=1)
    assert server.scheduler.stats().num_checkpoints == 4
    server.scheduler.discard(server.scheduler.schedule(), ())
    server.runner.reset()
    assert server.scheduler.stats().num_checkpoints == 0
    assert server.serve()[0] == "1[0:41]@36@40"


def test_a_state_stored_in_a_step_that_raised_afterwards_is_not_copied() -> None:
    class Raising(AllowedTokens):
        def accept(self, token_id: int) -> None:
            raise RuntimeError("injected")

    _, engine = make_engine(
        small_config(num_checkpoints=4, max_num_seqs=2, max_num_batched_tokens=32)
    )
    engine.add(make_request(0, [0] * 9, max_tokens=3))
    engine.add(make_request(1, [1] * 9, max_tokens=3, constraint=Raising([1])))
    engine.add(make_request(2, [2] * 9, max_tokens=3))
    failed = {item.request_id for item in engine.step()}
    assert failed == {0, 1}
    while engine.has_work:
        engine.step()
        assert not engine.last_step.has_failed
