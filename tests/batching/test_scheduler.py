"""The scheduler against golden traces, and the whole core against one oracle."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final
from weakref import WeakKeyDictionary

import pytest
from hypothesis import given, settings, strategies as st

from batching.adapters.adapter import Adapter
from batching.batch_inference import BatchInferenceEngine
from batching.block_manager import BlockCopy, BlockTable
from batching.config import SchedulerConfig, blocks_held
from batching.inputs.images import ImageInput, PlacedImage
from batching.inputs.retention import NOT_RETAINED, NOT_STORED, RetainedPrefix, Retention
from batching.inputs.sampling_params import SamplingParams
from batching.priority_queue import Priority
from batching.prompt_lookup import PromptLookup
from batching.request import BatchRequest, RequestStatus
from batching.scheduler import ContinuousBatchingScheduler
from batching.scheduling.outputs import RequestFailure, RequestOutput
from batching.steps.model_runner import ModelRunner, SlicesFailed
from batching.steps.sequences import SequenceState
from batching.steps.step_plan import SliceOutput, StepPlan
from batching.steps.token_output import TokenOutput
from tests.support.block_stores import FakeStore
from tests.support.fakes import (
    FakeClock,
    TokenRunner,
    expected_logprobs,
    expected_output,
    make_engine,
    read_by_model,
    request,
    right,
    small_config,
)
from tests.support.remote import RemoteRunner
from tests.support.requests import image_of, make_request

# An executor has to know the sequences that it steps, so that a scheduler keeps its own.
RUNNERS: WeakKeyDictionary[ContinuousBatchingScheduler, TokenRunner] = WeakKeyDictionary()


def trace(
    scheduler: ContinuousBatchingScheduler,
    requests: Sequence[BatchRequest] = (),
    *,
    num_steps: int = 100,
    max_prefill_tokens: int | None = None,
) -> list[str]:
    runner = RUNNERS.setdefault(scheduler, TokenRunner(scheduler.config))
    for r in requests:
        scheduler.add(r)
    lines: list[str] = []
    while scheduler.has_work and len(lines) < num_steps:
        plan = scheduler.schedule(max_prefill_tokens)
        lines.append(str(plan))
        scheduler.update(plan, runner.run(plan))
    if not scheduler.has_work:
        assert scheduler.stats().num_free_blocks == scheduler.config.num_blocks
    return lines


def test_prompts_are_read_in_chunks_beside_decodes() -> None:
    scheduler = ContinuousBatchingScheduler(small_config(prefill_chunk=6))
    assert trace(scheduler, [request(0, 3, 3), request(1, 12, 2)]) == [
        "0[0:3] 1[0:5]",
        "0[3:4] 1[5:11]",
        "0[4:5] 1[11:12]",
        "1[12:13]",
    ]


def test_a_short_prompt_does_not_wait_for_a_long_ones_whole_prefill() -> None:
    scheduler = ContinuousBatchingScheduler(small_config(max_model_len=64))
    assert trace(scheduler, [request(0, 30, 1), request(1, 4, 1)]) == [
        "0[0:4] 1[0:4]",
        "0[4:12]",
        "0[12:20]",
        "0[20:28]",
        "0[28:30]",
    ]


def test_the_prompt_that_is_due_first_keeps_half_of_the_budget() -> None:
    """Short prompts that keep coming cannot starve a long one."""
    scheduler = ContinuousBatchingScheduler(small_config())
    requests = [request(0, 24, 1), *(request(i, 6, 1) for i in range(1, 4))]
    assert trace(scheduler, requests, num_steps=3) == [
        "0[0:4] 1[0:4]",
        "0[4:8] 1[4:6] 2[0:2]",
        "0[8:12] 2[2:6]",
    ]


def test_beside_running_streams_a_prompt_gets_what_it_is_allowed() -> None:
    scheduler = ContinuousBatchingScheduler(small_config())
    assert trace(scheduler, [request(0, 2, 4), request(1, 12, 1)], num_steps=1) == ["0[0:2] 1[0:6]"]
    assert trace(scheduler, max_prefill_tokens=3) == [
        "0[2:3] 1[6:9]",
        "0[3:4] 1[9:12]",
        "0[4:5]",
    ]


def test_what_a_prompt_is_allowed_beside_streams_does_not_enlarge_a_step() -> None:
    scheduler = ContinuousBatchingScheduler(small_config())
    assert trace(scheduler, [request(0, 2, 3), request(1, 20, 1)], max_prefill_tokens=99) == [
        "0[0:2] 1[0:6]",
        "0[2:3] 1[6:13]",
        "0[3:4] 1[13:20]",
    ]


def test_prompts_that_have_no_slot_yet_do_not_count_against_streams() -> None:
    scheduler = ContinuousBatchingScheduler(small_config(max_num_seqs=3))
    trace(scheduler, [request(0, 2, 9)], num_steps=1)
    for i in range(1, 6):
        scheduler.add(request(i, 9, 1))
    assert scheduler.num_prompts_and_streams() == (2, 1)
    trace(scheduler, num_steps=1)
    assert scheduler.num_prompts_and_streams() == (2, 1)


def test_the_more_urgent_request_is_admitted_first() -> None:
    scheduler = ContinuousBatchingScheduler(small_config(max_num_seqs=1))
    low = request(0, 2, 1, priority=Priority.LOW)
    high = request(1, 2, 1, priority=Priority.HIGH, arrival_time=5.0)
    assert trace(scheduler, [low, high]) == ["1[0:2]", "0[0:2]"]


def test_no_request_overtakes_one_that_waits_for_blocks() -> None:
    scheduler = ContinuousBatchingScheduler(small_config(num_blocks=4))
    requests = [request(0, 8, 3), request(1, 12, 1), request(2, 2, 1)]
    assert trace(scheduler, requests) == [
        "0[0:8]",
        "0[8:9]",
        "0[9:10]",
        "1[0:6] 2[0:2]",
        "1[6:12]",
    ]


def test_the_request_due_last_is_preempted_and_resumes_on_its_cached_prefix() -> None:
    scheduler = ContinuousBatchingScheduler(small_config(num_blocks=4, max_num_seqs=2))
    assert trace(scheduler, [request(0, 7, 6), request(1, 5, 5)]) == [
        "0[0:4] 1[0:4]",
        "0[4:7] 1[4:5]",
        "0[7:8] 1[5:6]",
        "0[8:9] -1",
        "0[9:10]",
        "0[10:11]",
        "0[11:12]",
        "1[4:7]",
        "1[7:8]",
        "1[8:9]",
    ]
    assert scheduler.stats().num_preemptions == 1


def test_a_request_preempts_itself_when_it_is_due_last() -> None:
    scheduler = ContinuousBatchingScheduler(small_config(num_blocks=4, max_num_seqs=2))
    lines = trace(scheduler, [request(0, 7, 5), request(1, 8, 2)])
    assert lines[:4] == ["0[0:7] 1[0:1]", "0[7:8] 1[1:8]", "0[8:9] -1", "0[9:10]"]


def test_a_request_waits_for_a_prefix_that_is_being_computed() -> None:
    scheduler = ContinuousBatchingScheduler(small_config())
    prompt = list(range(9))
    same = [make_request(i, prompt, max_tokens=1) for i in range(3)]
    assert trace(scheduler, same) == ["0[0:8]", "0[8:9] 1[8:9] 2[8:9]"]
    assert [r.num_cached_tokens for r in same] == [0, 8, 8]


def test_while_one_waits_for_a_prefix_another_prompt_is_prefilled() -> None:
    scheduler = ContinuousBatchingScheduler(small_config(prefill_chunk=4))
    prompt = list(range(9))
    requests = [make_request(i, prompt, max_tokens=1) for i in range(2)]
    assert trace(scheduler, [*requests, request(2, 4, 1)]) == [
        "0[0:4] 2[0:4]",
        "0[4:8]",
        "0[8:9] 1[8:9]",
    ]


def test_a_sequence_slot_is_reserved_for_a_request_that_waits_for_a_prefix() -> None:
    scheduler = ContinuousBatchingScheduler(small_config(max_num_seqs=2))
    prompt = list(range(13))
    requests = [make_request(i, prompt, max_tokens=1) for i in range(2)]
    assert trace(scheduler, [*requests, request(2, 2, 1)]) == [
        "0[0:8]",
        "0[8:13]",
        "1[12:13] 2[0:2]",
    ]


def test_the_blocks_for_a_request_that_waits_for_a_prefix_are_reserved() -> None:
    """Else the third would take them, and the second be overtaken."""
    scheduler = ContinuousBatchingScheduler(small_config(num_blocks=8, max_num_seqs=3))
    prompt = list(range(12))
    first, second = (make_request(i, [*prompt, *[i] * 4], max_tokens=1) for i in range(2))
    # As many blocks, and fewer tokens, so that it would have a part of the first step.
    lines = trace(scheduler, [first, second, request(2, 13, 1)])
    assert lines == ["0[0:8]", "0[8:16]", "1[12:16] 2[0:4]", "2[4:12]", "2[12:13]"]


def test_no_request_waits_for_a_prefix_that_a_less_urgent_one_computes() -> None:
    scheduler = ContinuousBatchingScheduler(small_config())
    prompt = list(range(17))
    low = make_request(0, prompt, max_tokens=1, priority=Priority.LOW)
    high = make_request(1, prompt, max_tokens=1, priority=Priority.HIGH, arrival_time=1.0)
    assert trace(scheduler, [low], num_steps=1) == ["0[0:8]"]
    assert trace(scheduler, [high], num_steps=1) == ["1[8:16]"]


def test_what_a_request_computed_itself_does_not_count_as_cached() -> None:
    scheduler = ContinuousBatchingScheduler(small_config(num_blocks=5, max_num_seqs=2))
    first, second = request(0, 7, 9), request(1, 12, 1)
    lines = trace(scheduler, [first, second])
    assert lines[2] == "0[8:9] -1"
    assert lines[-1] == "1[4:12]"
    assert second.num_cached_tokens == 0
    assert scheduler.stats().num_queried_tokens == 19


def test_if_the_request_that_computes_a_prefix_is_aborted_the_next_one_computes_it() -> None:
    scheduler = ContinuousBatchingScheduler(small_config())
    first, second = (make_request(i, list(range(20)), max_tokens=1) for i in range(2))
    assert trace(scheduler, [first, second], num_steps=1) == ["0[0:8]"]
    scheduler.abort(first)
    assert trace(scheduler) == ["1[8:16]", "1[16:20]"]


def test_without_a_prefix_cache_every_request_computes_its_whole_prompt() -> None:
    scheduler = ContinuousBatchingScheduler(small_config(enable_prefix_cache=False))
    same = [make_request(i, list(range(5)), max_tokens=1) for i in range(2)]
    assert trace(scheduler, same) == ["0[0:5] 1[0:3]", "1[3:5]"]
    assert scheduler.stats().num_hit_tokens == 0


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    scheduler = ContinuousBatchingScheduler(small_config())
    trace(scheduler, [make_request(0, list(range(8)), max_tokens=1)])
    assert trace(scheduler, [make_request(1, list(range(8)), max_tokens=1)]) == ["1[4:8]"]


def test_a_shared_block_is_copied_before_a_decode_writes_into_it() -> None:
    """Two tables over one half-full block, as parallel choices will have."""
    scheduler = ContinuousBatchingScheduler(small_config())
    parent = request(0, 6, 4)
    trace(scheduler, [parent], num_steps=1)
    twin = BlockTable(scheduler.block_manager.fork(parent.block_table).block_ids)
    plan = scheduler.schedule()
    assert plan.copies == (BlockCopy(source=1, target=9),)
    assert str(plan) == "0[6:7] 1>9"
    assert parent.block_table.block_ids == [0, 9]
    assert twin.block_ids == [0, 1]


def test_a_copy_that_finds_no_block_preempts_the_request_due_last() -> None:
    scheduler = ContinuousBatchingScheduler(small_config(num_blocks=4))
    first, last = request(0, 6, 4), request(1, 6, 4)
    trace(scheduler, [first, last], num_steps=2)
    twin = scheduler.block_manager.fork(first.block_table)
    assert str(scheduler.schedule()).endswith("-1")
    scheduler.block_manager.release(twin.block_ids)


def test_a_request_that_cannot_run_alone_is_our_bug() -> None:
    scheduler = ContinuousBatchingScheduler(small_config(num_blocks=4))
    with pytest.raises(AssertionError, match="could not run alone"):
        scheduler.add(request(0, 10, 7))
    assert not scheduler.has_work


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_abort_frees_the_blocks_at_once(num_steps: int) -> None:
    """Waiting, in the middle of its prefill, decoding."""
    scheduler = ContinuousBatchingScheduler(small_config())
    aborted = request(0, 12, 4)
    trace(scheduler, [aborted], num_steps=num_steps)
    scheduler.abort(aborted)
    assert aborted.status is RequestStatus.CANCELLED
    assert scheduler.stats().num_free_blocks == 16
    assert not scheduler.has_work
    scheduler.abort(aborted)


def test_a_step_that_raised_cancels_its_requests_and_clears_the_cache() -> None:
    scheduler = ContinuousBatchingScheduler(small_config(max_num_batched_tokens=4, max_num_seqs=3))
    cached = make_request(9, list(range(5)), max_tokens=1)
    trace(scheduler, [cached])
    decoding, reading, idle = request(0, 2, 9), request(1, 9, 1), request(2, 9, 1)
    trace(scheduler, [decoding], num_steps=1)
    for r in (reading, idle):
        scheduler.add(r)
    plan = scheduler.schedule(max_prefill_tokens=1)
    assert str(plan) == "0[2:3] 1[0:1]"
    scheduler.discard(plan)
    assert decoding.status is reading.status is RequestStatus.CANCELLED
    assert idle.status is RequestStatus.WAITING
    assert scheduler.stats().num_cached_blocks == 0
    assert trace(scheduler)[0] == "2[0:4]"


def forked(num_tokens: int, max_tokens: int, num_forks: int, **kwargs: Any) -> BatchRequest:
    made = request(0, num_tokens, max_tokens, **kwargs)
    for fork_id in range(1, num_forks + 1):
        made.fork(fork_id)
    return made


def test_forks_begin_where_the_prompt_ends_and_copy_the_block_they_write_into() -> None:
    scheduler = ContinuousBatchingScheduler(small_config(num_blocks=8))
    assert trace(scheduler, [forked(6, 3, 2)]) == [
        "0[0:6]&1&2",
        "0[6:7] 1[6:7] 2[6:7] 1>2 1>3",
        "0[7:8] 1[7:8] 2[7:8]",
    ]


def test_each_fork_begins_with_the_token_that_was_sampled_for_it() -> None:
    class OwnTokens(TokenRunner):
        def _choose(self, sequence: SequenceState, prefix: list[int]) -> int:
            return sequence.sequence_id

    scheduler = ContinuousBatchingScheduler(small_config())
    made = forked(6, 1, 3)
    requests = [made, *made.forks]
    scheduler.add(made)
    plan = scheduler.schedule()
    scheduler.update(plan, OwnTokens(scheduler.config).run(plan))
    assert [r.output_token_ids for r in requests] == [[0], [1], [2], [3]]


def test_a_fork_without_a_sequence_slot_waits_with_its_first_token() -> None:
    scheduler = ContinuousBatchingScheduler(small_config(max_num_seqs=2))
    made = forked(6, 2, 2)
    forks = list(made.forks)
    assert trace(scheduler, [made]) == ["0[0:6]&1&2", "0[6:7] 1[6:7] 1>9 -2", "2[4:7]"]
    assert all(fork.output_token_ids == made.output_token_ids for fork in forks)
    assert scheduler.stats().num_preemptions == 0


@pytest.mark.parametrize("num_steps", [0, 1])
def test_if_a_request_is_aborted_its_first_fork_prefills_the_prompt(num_steps: int) -> None:
    scheduler = ContinuousBatchingScheduler(small_config(max_num_batched_tokens=4))
    made = forked(6, 1, 2)
    forks = list(made.forks)
    trace(scheduler, [made], num_steps=num_steps)
    scheduler.abort(forks[0])
    scheduler.abort(made)
    assert trace(scheduler)[-1].startswith("2[4:6]")
    assert [fork.status for fork in forks] == [RequestStatus.CANCELLED, RequestStatus.COMPLETED]


def test_a_step_that_raised_cancels_the_forks_of_its_requests_too() -> None:
    scheduler = ContinuousBatchingScheduler(small_config(max_num_batched_tokens=4))
    made = forked(6, 1, 1)
    (fork,) = made.forks
    scheduler.add(made)
    scheduler.discard(scheduler.schedule())
    assert made.status is fork.status is RequestStatus.CANCELLED
    assert not scheduler.has_work


def test_a_prompt_with_logprobs_is_prefilled_whole_once() -> None:
    scheduler = ContinuousBatchingScheduler(small_config(num_blocks=4, max_num_seqs=2))
    trace(scheduler, [request(0, 9, 1)])
    asking = request(0, 9, 1, sampling=SamplingParams(prompt_logprobs=0))
    assert trace(scheduler, [asking]) == ["0[0:8]", "0[8:9]"]
    assert asking.prompt_logprobs == [expected_logprobs(asking.token_ids[:i]) for i in range(1, 9)]


def test_progress_is_reported_to_requests_that_ask_for_it() -> None:
    scheduler = ContinuousBatchingScheduler(small_config())
    runner = TokenRunner(scheduler.config)
    for r in (request(0, 14, 1, reports_progress=True), request(1, 14, 1)):
        scheduler.add(r)
    items: list[RequestOutput | RequestFailure] = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        items += scheduler.update(plan, runner.run(plan))
    assert [
        o.num_read_tokens for i, o in items if isinstance(o, TokenOutput) and not o.token_ids
    ] == [8]


class OracleDrafter(PromptLookup):
    """Proposes what will be sampled, but for the tokens that `is_wrong` names."""

    def __init__(self, is_wrong: Callable[[int], bool] = lambda _: False) -> None:
        super().__init__()
        self._is_wrong = is_wrong

    def draft(self, token_ids: Sequence[int], max_length: int) -> tuple[int, ...]:
        drafts = expected_output(token_ids, max_length)
        return tuple(token ^ self._is_wrong(token) for token in drafts)

    def may_draft(self, token_ids: Sequence[int]) -> bool:
        return token_ids[-1] % 4 == 0


OUTPUT = expected_output([7, 8, 9], 8)


def drafting(request_id: int = 0, **kwargs: Any) -> BatchRequest:
    made = make_request(request_id, [7, 8, 9], max_tokens=len(OUTPUT), **kwargs)
    made.drafter = OracleDrafter()
    return made


def test_right_drafts_save_steps() -> None:
    """As many as fit into the last block, and one less than the request still needs."""
    scheduler = ContinuousBatchingScheduler(small_config(max_draft_tokens=7))
    made = drafting()
    assert trace(scheduler, [made]) == ["0[0:3]", "0[3:4]", "0[4:5]+3", "0[8:9]+1"]
    assert made.output_token_ids == OUTPUT
    stats = scheduler.stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 4, 4)


def test_after_a_wrong_draft_the_right_token_is_output() -> None:
    scheduler = ContinuousBatchingScheduler(small_config(max_draft_tokens=7))
    made = drafting()
    made.drafter = OracleDrafter(lambda token: token == OUTPUT[3])
    lines = trace(scheduler, [made])
    assert lines == ["0[0:3]", "0[3:4]", "0[4:5]+3", "0[6:7]+1", "0[8:9]+1"]
    assert made.output_token_ids == OUTPUT
    stats = scheduler.stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 5, 3)


def test_a_stop_token_among_the_drafts_ends_the_request() -> None:
    scheduler = ContinuousBatchingScheduler(small_config(max_draft_tokens=7))
    made = drafting(stop_token_ids={OUTPUT[3]})
    assert len(trace(scheduler, [made])) == 3
    assert made.output_token_ids == OUTPUT[:4]


def test_requests_share_the_drafting_rows_until_the_batch_is_large() -> None:
    limits = small_config(max_draft_tokens=7, max_drafting_rows=5, enable_prefix_cache=False)
    scheduler = ContinuousBatchingScheduler(limits)
    assert trace(scheduler, [drafting(0), drafting(1)], num_steps=3)[-1] == "0[4:5]+1 1[4:5]+1"
    scheduler.add(drafting(2))
    assert trace(scheduler, num_steps=2)[-1] == "0[8:9] 1[8:9] 2[3:4]"


def draw_images(
    draw: st.DrawFn, images: Sequence[ImageInput], length: int
) -> tuple[PlacedImage, ...]:
    """Place some images in a prompt of so many tokens."""
    placed: list[PlacedImage] = []
    at = draw(st.integers(0, 3))
    for image in draw(st.lists(st.sampled_from(images), max_size=3)):
        if at + len(image.token_ids) <= length:
            placed.append(PlacedImage(at, image))
            at += len(image.token_ids) + draw(st.integers(0, 2))
    return tuple(placed)


RETENTIONS: Final = (
    NOT_RETAINED,
    NOT_STORED,
    Retention("a", (RetainedPrefix(None, 9),)),
    Retention("b", (RetainedPrefix(4, 90), RetainedPrefix(9, 2))),
)


ADAPTERS: Final = (None, *(Adapter(name, f"/{name}", name) for name in "abcd"))


@st.composite
def loads(draw: st.DrawFn) -> tuple[SchedulerConfig, list[BatchRequest]]:
    """A small engine, and requests of which many share their beginning."""
    num_slots = draw(st.sampled_from([1, 2, 3, 5]))
    limits = SchedulerConfig(
        num_blocks=draw(st.integers(3, 14)),
        block_size=draw(st.sampled_from([1, 2, 4, 8])),
        max_num_seqs=num_slots,
        max_num_batched_tokens=num_slots + draw(st.integers(0, 12)),
        prefill_chunk=draw(st.integers(1, 9)),
        enable_prefix_cache=draw(st.booleans()),
        max_draft_tokens=draw(st.sampled_from([0, 1, 7])),
        max_drafting_rows=draw(st.integers(1, 20)),
        num_checkpoints=draw(st.sampled_from([None, None, 0, 1, 2, 3, 12])),
        min_copied_tokens=draw(st.sampled_from([None, 1, 2, 3])),
        max_urgent_wait_ms=draw(st.sampled_from([1.0, 500.0, None])),
        max_adapters=draw(st.sampled_from([0, 0, 1, 2, 3])),
    )
    max_span = draw(st.sampled_from([0, 0, 5]))
    if max_span:
        rows = limits.max_num_batched_tokens + limits.max_drafting_rows + max_span
        limits = replace(limits, max_num_batched_tokens=rows, max_span=max_span)
    if (window := draw(st.sampled_from([None, None, 1, 2, 3, 5, 9, 30]))) is not None:
        num_blocks = blocks_held(window, limits.block_size) + -(-max_span // limits.block_size)
        num_blocks += draw(st.integers(0, 20))
        limits = replace(limits, window=window, num_window_blocks=num_blocks)
    room = limits.max_request_tokens
    # Few, of which two have the same tokens.
    sizes = {b"a": 3, b"b": 3, b"c": 1, b"d": 5}
    images = [image_of(name, sizes[name], sees_ahead=max_span > 0) for name in sizes]
    limits = replace(
        limits,
        max_image_rows=draw(st.sampled_from([0, 3, 6, 100])),
        num_image_pieces=draw(st.sampled_from([1, 2, 5])),
    )
    requests: list[BatchRequest] = []
    for request_id in range(draw(st.integers(1, 8))):
        length = draw(st.integers(1, room - 1))
        prompt = [1, 2, 3, 4] * length if draw(st.booleans()) else []
        prompt += draw(st.lists(st.integers(0, 2), min_size=length, max_size=length))
        placed = draw_images(draw, images, length)
        for start, image in placed:
            prompt[start : start + len(image.token_ids)] = image.token_ids
        requests.append(
            make_request(
                request_id,
                prompt[:length],
                images=placed,
                max_tokens=draw(st.integers(1, room - length)),
                priority=draw(st.sampled_from(Priority)),
                is_best_effort=draw(st.integers(0, 3)) == 3,
                arrival_time=draw(st.sampled_from([-5.0, 0.0, float(request_id)])),
                retention=draw(st.sampled_from(RETENTIONS)),
                adapter=draw(st.sampled_from(ADAPTERS if limits.max_adapters else [None])),
                sampling=SamplingParams(
                    logprobs=draw(st.sampled_from([None, 0])),
                    prompt_logprobs=draw(st.sampled_from([None, 0])),
                ),
            )
        )
        for fork_id in range(draw(st.integers(0, 2))):
            requests[-1].fork(100 + 10 * request_id + fork_id)
        for each in (requests[-1], *requests[-1].forks):
            each.drafter = OracleDrafter(lambda token: token % 5 == 0)
    return limits, requests


def with_forks(requests: Iterable[BatchRequest]) -> list[BatchRequest]:
    return [each for r in requests for each in (r, *r.forks)]


class FlakyRunner:
    """Loses the pool and all states in some steps, of which it reports one request."""

    def __init__(self, runner: TokenRunner, data: st.DataObject) -> None:
        self._runner = runner
        self._data = data
        self.reset = runner.reset

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        outputs = self._runner.run(plan)
        if self._data.draw(st.integers(0, 15)) == 15:
            self._runner.reset()
            ids = [s.sequence_id for s in plan.slices]
            ids += [order.sequence_id for order in plan.encodes] or [-1]
            raise SlicesFailed([self._data.draw(st.sampled_from(ids))])
        return outputs


def serve(
    engine: BatchInferenceEngine,
    requests: list[BatchRequest],
    clock: FakeClock,
    data: st.DataObject,
) -> tuple[dict[int, list[TokenOutput]], set[int]]:
    """Serve requests that come and go between the steps.

    Returns the outputs, and the ids of those that were aborted or failed.
    """
    all_requests = with_forks(requests)
    outputs: dict[int, list[TokenOutput]] = {r.request_id: [] for r in all_requests}
    aborted: set[int] = set()
    arriving = list(requests)
    while arriving or engine.has_work:
        if arriving and (not engine.has_work or data.draw(st.booleans())):
            engine.add(*with_forks([arriving.pop(0)]))
        if data.draw(st.integers(0, 15)) == 15:
            aborted.add(data.draw(st.sampled_from(all_requests)).request_id)
            aborted -= {r.request_id for r in with_forks(arriving)}
        for request_id in aborted:
            engine.abort(request_id)
        if engine.has_work:
            clock.now += data.draw(st.sampled_from([0.1, 0.6, 2.5, 2.5]))
            for item in engine.step():
                if isinstance(item, RequestFailure):
                    aborted.add(item.request_id)
                else:
                    outputs[item.request_id].append(item.output)
            assert not engine.last_step.has_failed
    return outputs, aborted


@settings(max_examples=100, deadline=None)
@given(loads(), st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.data())
def test_batching_never_changes_the_output(
    load: tuple[SchedulerConfig, list[BatchRequest]],
    is_pipelined: bool,
    is_flaky: bool,
    is_remote: bool,
    is_storing: bool,
    data: st.DataObject,
) -> None:
    """Nor does it matter whether the runner gets its plans as bytes, and whether blocks are stored and read."""
    limits, requests = load
    all_requests = with_forks(requests)
    leaders = {r.request_id for r in requests}
    clock = FakeClock()

    def wrap(runner: TokenRunner) -> ModelRunner:
        made = FlakyRunner(runner, data) if is_flaky else runner
        return RemoteRunner(made) if is_remote else made

    store = FakeStore(lambda most: data.draw(st.integers(0, most))) if is_storing else None
    scheduler, engine = make_engine(
        limits,
        wrap,
        is_pipelined=is_pipelined,
        clock=clock,
        store=store,
    )
    outputs, aborted = serve(engine, requests, clock, data)
    for r in all_requests:
        prompt = read_by_model(r.spec)
        expected = expected_output(prompt, r.spec.output_limit)
        got = [token_id for output in outputs[r.request_id] for token_id in output.token_ids]
        assert got == (expected[: len(got)] if r.request_id in aborted else expected)
        got_logprobs = [each for output in outputs[r.request_id] for each in output.logprobs]
        asks = r.spec.sampling.logprobs is not None
        assert got_logprobs == [
            expected_logprobs([*prompt, *got[:i]]) for i in range(len(got)) if asks
        ]
        got_logprobs = [each for output in outputs[r.request_id] for each in output.prompt_logprobs]
        asks = r.spec.sampling.prompt_logprobs is not None and bool(got)
        # The request that prefills the prompt gets them: a fork, if the one before it was aborted.
        assert got_logprobs == [
            expected_logprobs(prompt[:i]) for i in range(1, len(prompt)) if asks
        ] or (got_logprobs == [] and r.request_id not in leaders)
    assert scheduler.stats().num_free_blocks == limits.num_blocks
    assert scheduler.stats().num_free_window_blocks == limits.num_window_blocks
    assert scheduler.stats().num_running == scheduler.stats().num_waiting == 0


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 1, 2]),
    st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=3), min_size=2, max_size=9),
)
def test_another_image_of_the_same_size_is_never_found(
    block_size: int, min_copied_tokens: int | None, prompts: list[list[str]]
) -> None:
    limits = SchedulerConfig(
        num_blocks=64,
        block_size=block_size,
        max_num_seqs=2,
        min_copied_tokens=min_copied_tokens,
        max_image_rows=6,
    )
    _, engine = make_engine(limits)
    for request_id, names in enumerate(prompts):
        images = [image_of(name.encode(), 3) for name in names]
        ids = [token_id for image in images for token_id in image.token_ids]
        placed = tuple(PlacedImage(4 * i, image) for i, image in enumerate(images))
        made = make_request(request_id, [*ids, 2], images=placed, max_tokens=2)
        engine.add(made)
        # Two at once, then what they leave behind.
        while engine.has_work and request_id % 2:
            engine.step()
        assert not request_id % 2 or right(made)


def holds_state(r: BatchRequest, limits: SchedulerConfig) -> bool:
    is_admitted = r.status in (RequestStatus.PREFILLING, RequestStatus.RUNNING)
    return limits.num_checkpoints is not None and is_admitted


@settings(max_examples=60, deadline=None)
@given(loads())
def test_a_plan_stays_within_its_limits_and_always_advances(
    load: tuple[SchedulerConfig, list[BatchRequest]],
) -> None:
    limits, requests = load
    all_requests = with_forks(requests)
    scheduler = ContinuousBatchingScheduler(limits)
    runner = TokenRunner(limits)
    for r in requests:
        scheduler.add(r)
    now = 0.0
    while scheduler.has_work:
        plan = scheduler.schedule(now=now)
        now += 0.7
        assert now < 3500, "requests keep taking each other's room"
        assert 0 < plan.num_tokens <= limits.max_num_batched_tokens
        assert len(plan.slices) <= limits.max_num_seqs
        chunks = [s for s in plan.slices if s.is_prefill]
        assert all(len(s) <= max(limits.prefill_chunk, limits.max_span) for s in chunks)
        assert all(len(s.drafts) <= limits.max_draft_tokens for s in plan.slices)
        num_drafts = sum(len(s.drafts) for s in plan.slices)
        assert not num_drafts or num_drafts < limits.max_drafting_rows
        assert all(len(s) <= limits.max_drafting_rows for s in plan.slices if s.drafts)
        assert all((r.state_slot is None) != holds_state(r, limits) for r in all_requests)
        idle = [
            r for r in all_requests if r.status in (RequestStatus.WAITING, RequestStatus.COMPLETED)
        ]
        assert not any(len(r.block_table) + len(r.window_table) for r in idle)
        waiting = [r for r in all_requests if r.status is RequestStatus.WAITING]
        assert not any(r.num_computed_tokens for r in waiting)
        scheduler.update(plan, runner.run(plan))
