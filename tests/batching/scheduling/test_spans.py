"""Tokens of an image that see each other: no step cuts them, and none waits for ever. Traces of the scheduler."""

from collections.abc import Sequence

import pytest

from batching.inputs.images import PlacedImage, Span
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from tests.support.fakes import TokenRunner, small_config, trace_of
from tests.support.requests import image_of, make_request, slice_of

# A token, then tokens 3 to 8 of the prompt, which see each other.
SEEN = PlacedImage(2, image_of(b"cat", 6, sees_ahead=True))


def asking(request_id: int, tail: Sequence[int] = (1, 2, 3)) -> BatchRequest:
    prompt = [0, 9, *SEEN.image.token_ids, *tail]
    return make_request(request_id, prompt, images=(SEEN,), max_tokens=2)


def scheduler_of(**limits: int) -> ContinuousBatchingScheduler:
    config = {
        "num_blocks": 32,
        "max_image_rows": 100,
        "max_num_batched_tokens": 32,
        "max_span": 6,
        **limits,
    }
    return ContinuousBatchingScheduler(small_config(**config))


def test_a_chunk_ends_before_a_span_or_has_all_of_it() -> None:
    assert trace_of(scheduler_of(prefill_chunk=4), [asking(0)]) == [
        "0[0:3] *6",
        "0[3:9]",
        "0[9:12]",
        "0[12:13]",
    ]


def test_a_slice_says_which_of_its_tokens_see_each_other() -> None:
    request = asking(0)
    assert slice_of(request, 0, 12).spans == (Span(3, 9),)
    assert slice_of(request, 0, 3).spans == ()
    # The others are in the cache.
    assert slice_of(request, 5, 9).spans == (Span(5, 9),)


def test_beside_streams_a_prompt_saves_what_it_was_granted_for_a_span() -> None:
    scheduler = scheduler_of(prefill_chunk=8)
    runner = TokenRunner(scheduler.config)
    stream, text = make_request(7, [7], max_tokens=9), make_request(8, [8] * 14, max_tokens=1)
    scheduler.add(stream)
    runner_step(scheduler, runner)
    lines = trace_of(scheduler, [text, asking(9)], runner, 4)
    # Of four tokens a step the first prompt has two, and the shorter one the others.
    assert lines[:8] == [
        "7[1:2] *6",
        "7[2:3] 8[0:2] 9[0:2]",
        "7[3:4] 8[2:4] 9[2:3]",
        "7[4:5] 8[4:6]",
        "7[5:6] 8[6:10]",
        "7[6:7] 8[10:14]",
        "7[7:8]",
        "7[8:9] 9[3:9]",
    ]


def runner_step(scheduler: ContinuousBatchingScheduler, runner: TokenRunner) -> None:
    plan = scheduler.schedule()
    scheduler.update(plan, runner.run(plan))


def test_a_request_whose_prefix_is_cached_begins_within_a_span() -> None:
    scheduler = scheduler_of()
    runner = TokenRunner(scheduler.config)
    trace_of(scheduler, [asking(0)], runner=runner)
    lines = trace_of(scheduler, [asking(1, tail=(4, 5, 6))], runner=runner)
    # Blocks have four tokens.
    assert lines == ["1[8:12]", "1[12:13]"]


def test_a_step_must_have_room_for_a_span() -> None:
    with pytest.raises(
        ValueError, match="leaves 4 tokens of a step to prompts, and 6 of an image see"
    ):
        scheduler_of(max_num_batched_tokens=16, max_num_seqs=4, max_drafting_rows=8)
