"""When images are encoded, and for how long their rows stay: traces of the scheduler."""

from math import inf

import hypothesis.strategies as st
from hypothesis import given, settings

from batching.inputs.images import ImageInput, PlacedImage
from batching.request import BatchRequest, RequestStatus
from batching.scheduler import ContinuousBatchingScheduler
from batching.steps.step_plan import StepPlan
from tests.support.fakes import TokenRunner, request, right, small_config, trace_of
from tests.support.requests import image_of, make_request

CAT, DOG, TALL = image_of(b"cat", 3), image_of(b"dog", 3), image_of(b"tall", 9)


def asking(
    request_id: int, *images: PlacedImage, num_tokens: int = 10, max_tokens: int = 2
) -> BatchRequest:
    """Return a request with images, which no other one begins like."""
    prompt = [request_id, *range(num_tokens - 1)]
    for start, image in images:
        prompt[start : start + len(image.token_ids)] = image.token_ids
    return make_request(request_id, prompt, images=images, max_tokens=max_tokens)


def scheduler_of(max_image_rows: int = 100, **limits: int) -> ContinuousBatchingScheduler:
    return ContinuousBatchingScheduler(small_config(max_image_rows=max_image_rows, **limits))


class Steps:
    """Serves requests in steps that encode one piece of an image each, of 6."""

    def __init__(self, *requests: BatchRequest, **limits: int) -> None:
        self.scheduler = scheduler_of(num_image_pieces=6, **limits)
        self.runner = TokenRunner(self.scheduler.config)
        self.plans: list[StepPlan] = []
        for each in requests:
            self.scheduler.add(each)

    def run(self, num_steps: int = 100, max_image_bytes: float = 0.0) -> list[str]:
        """Run so many steps, fewer if no work is left; return their plans."""
        before = len(self.plans)
        while self.scheduler.has_work and len(self.plans) < before + num_steps:
            plan = self.scheduler.schedule(None, max_image_bytes)
            self.scheduler.update(plan, self.runner.run(plan))
            self.plans.append(plan)
        return [str(plan) for plan in self.plans[before:]]


def test_an_image_is_encoded_in_the_step_that_reaches_it_one_in_a_step() -> None:
    made = asking(0, PlacedImage(1, CAT), PlacedImage(6, DOG), num_tokens=12)
    assert trace_of(scheduler_of(max_num_batched_tokens=16), [made]) == [
        "0[0:6] *3",
        "0[6:12] *3",
        "0[12:13]",
    ]


def test_an_image_that_a_chunk_does_not_reach_is_not_encoded_yet() -> None:
    made = asking(0, PlacedImage(11, CAT), num_tokens=16)
    lines = trace_of(scheduler_of(prefill_chunk=5), [made])
    assert lines[:3] == ["0[0:5]", "0[5:10]", "0[10:15] *3"]


def test_an_image_may_be_cut_by_chunks() -> None:
    lines = trace_of(
        scheduler_of(prefill_chunk=3), [asking(0, PlacedImage(1, TALL), num_tokens=12)]
    )
    assert lines[:4] == ["0[0:3] *9", "0[3:6]", "0[6:9]", "0[9:12]"]


def test_beside_streams_a_step_has_an_image_or_chunks_in_turns() -> None:
    asks = asking(1, PlacedImage(2, CAT), PlacedImage(6, DOG), num_tokens=12)
    lines = trace_of(scheduler_of(), [request(0, 2, 12), asks, request(2, 9, 1)])
    # The first step has no stream yet.
    assert lines[:4] == [
        "0[0:2] 1[0:6] *3",
        "0[2:3] 2[0:7]",
        "0[3:4] *3",
        "0[4:5] 1[6:11] 2[7:9]",
    ]


def test_equal_images_are_encoded_once() -> None:
    scheduler = scheduler_of()
    first, second = (asking(i, PlacedImage(2, CAT)) for i in range(2))
    lines = trace_of(scheduler, [first, second])
    assert sum("*" in line for line in lines) == 1


def test_behind_an_image_that_is_cached_nothing_is_encoded() -> None:
    scheduler = scheduler_of(max_image_rows=0)
    runner = TokenRunner(scheduler.config)
    prompt, images = [*CAT.token_ids, 7, 7], (PlacedImage(0, CAT),)
    requests = [make_request(i, prompt, images=images, max_tokens=1) for i in range(2)]
    lines = [line for each in requests for line in trace_of(scheduler, [each], runner)]
    assert lines == ["0[0:6] *3", "1[4:6]"]


def test_the_rows_that_were_not_used_for_the_longest_time_make_room() -> None:
    scheduler = scheduler_of(max_image_rows=6)
    runner = TokenRunner(scheduler.config)
    images = [image_of(name, 3) for name in (b"a", b"b", b"a", b"c", b"a", b"b")]
    requests = [asking(i, PlacedImage(2, image), max_tokens=1) for i, image in enumerate(images)]
    lines = [line for each in requests for line in trace_of(scheduler, [each], runner)]
    assert [line.count("*") for line in lines if "[0:" in line] == [1, 1, 0, 1, 0, 1]


def test_an_image_that_is_larger_than_all_room_is_encoded_alone() -> None:
    lines = trace_of(
        scheduler_of(max_image_rows=1), [asking(0, PlacedImage(2, TALL), num_tokens=13)]
    )
    assert lines[0] == "0[0:8] *9"


def test_an_image_waits_while_others_need_the_room() -> None:
    scheduler = scheduler_of(max_image_rows=9, prefill_chunk=4)
    first, second = asking(0, PlacedImage(1, TALL), num_tokens=12), asking(1, PlacedImage(1, CAT))
    assert trace_of(scheduler, [first, second])[:5] == [
        "0[0:4] 1[0:1] *9",
        "0[4:8]",
        "0[8:12]",
        "0[12:13] *3",
        "1[1:5]",
    ]


def test_what_a_step_reads_is_not_dropped_for_what_it_encodes() -> None:
    scheduler = scheduler_of(max_image_rows=6, max_num_batched_tokens=40, max_model_len=64)
    runner = TokenRunner(scheduler.config)
    both = [PlacedImage(1, CAT), PlacedImage(6, DOG)]
    first = [asking(i, image, max_tokens=1) for i, image in enumerate(both)]
    trace_of(scheduler, first, runner)
    second = [asking(2, *both, num_tokens=12), asking(3, PlacedImage(1, image_of(b"new", 3)))]
    lines = trace_of(scheduler, second, runner)
    assert lines[:2] == ["2[0:12] 3[0:1]", "2[12:13] *3"]


def test_a_request_that_is_preempted_has_its_image_encoded_again_if_it_is_gone() -> None:
    scheduler = scheduler_of(max_image_rows=0)
    made = asking(0, PlacedImage(1, TALL), num_tokens=12)
    runner = TokenRunner(scheduler.config)
    scheduler.add(made)
    plan = scheduler.schedule()
    scheduler.update(plan, runner.run(plan))
    scheduler.discard(plan, failed_ids=[])
    runner.reset()
    assert trace_of(scheduler, [], runner)[0] == "0[0:8] *9"
    assert right(made)


def test_an_image_that_cannot_be_encoded_fails_its_request_alone() -> None:
    scheduler = scheduler_of()
    runner = TokenRunner(scheduler.config)
    stream, broken = request(0, 2, 9), asking(1, PlacedImage(8, CAT), num_tokens=13)
    for each in (stream, broken):
        scheduler.add(each)
    plan = scheduler.schedule()
    while not plan.encodes:
        scheduler.update(plan, runner.run(plan))
        plan = scheduler.schedule()
    scheduler.discard(plan, failed_ids=[1])
    runner.reset()
    assert broken.status is RequestStatus.CANCELLED
    trace_of(scheduler, [], runner)
    assert right(stream)


def test_beside_streams_an_image_is_encoded_in_pieces_and_prompts_are_read_between_them() -> None:
    steps = Steps(request(0, 2, 20))
    steps.run(num_steps=1)
    steps.scheduler.add(asking(1, PlacedImage(2, CAT), num_tokens=8, max_tokens=1))
    steps.scheduler.add(request(2, 20, 1))
    assert steps.run(num_steps=6, max_image_bytes=1.0) == [
        "0[2:3] *3[0:2]",
        "0[3:4] 1[0:2] 2[0:5]",
        "0[4:5] *3[2:4]",
        "0[5:6] 2[5:12]",
        "0[6:7] *3[4:6]",
        "0[7:8] 1[2:8] 2[12:13]",
    ]


def test_an_image_alone_is_encoded_in_pieces_where_a_request_may_arrive_meanwhile() -> None:
    steps = Steps(asking(0, PlacedImage(0, CAT), num_tokens=6, max_tokens=1))
    assert steps.run(num_steps=1, max_image_bytes=1.6) == ["*3[0:3]"]
    assert steps.run() == ["*3[3:4]", "*3[4:5]", "0[0:6] *3[5:6]"]
    assert steps.scheduler.stats().num_images_encoded == 1


def test_without_a_limit_the_pieces_that_are_left_are_encoded_at_once() -> None:
    steps = Steps(asking(0, PlacedImage(0, CAT), num_tokens=6, max_tokens=1))
    assert steps.run(num_steps=1) == ["*3[0:1]"]
    assert steps.run(max_image_bytes=inf) == ["0[0:6] *3[1:6]"]


def test_the_pieces_of_an_image_are_shared_by_the_requests_that_need_it() -> None:
    first, second = (asking(i, PlacedImage(0, CAT), num_tokens=6, max_tokens=1) for i in range(2))
    steps = Steps(first, second)
    assert steps.run(num_steps=2) == ["*3[0:1]", "*3[1:2]"]
    steps.scheduler.abort(first)
    assert steps.run() == ["*3[2:3]", "*3[3:4]", "*3[4:5]", "1[0:6] *3[5:6]"]


def test_an_image_that_nobody_needs_any_more_is_dropped_half_done() -> None:
    first, other, last = (
        asking(i, PlacedImage(0, image), num_tokens=6, max_tokens=1)
        for i, image in enumerate((CAT, DOG, CAT))
    )
    steps = Steps(first)
    steps.run(num_steps=3)
    steps.scheduler.abort(first)
    steps.scheduler.add(other)
    assert steps.run(num_steps=1) == ["*3[0:1]"]
    assert steps.plans[-1].dropped_images == (CAT.digest,)
    steps.scheduler.add(last)
    assert steps.run(max_image_bytes=inf) == ["1[0:6] *3[1:6]", "2[0:6] *3"]
    assert right(other, last)


def test_an_image_behind_one_that_is_still_read_is_not_begun_again() -> None:
    made = asking(0, PlacedImage(0, TALL), PlacedImage(10, CAT), num_tokens=14, max_tokens=1)
    steps = Steps(made, max_num_batched_tokens=4)
    assert steps.run(num_steps=1, max_image_bytes=inf) == ["0[0:4] *9"]
    assert steps.run() == [
        "0[4:8] *3[0:1]",
        "0[8:10] *3[1:2]",
        *(f"*3[{i}:{i + 1}]" for i in range(2, 5)),
        "0[10:14] *3[5:6]",
    ]


def test_a_best_effort_image_stays_half_done_while_others_come_first() -> None:
    steps = Steps(
        make_request(
            0, CAT.token_ids, images=(PlacedImage(0, CAT),), is_best_effort=True, max_tokens=1
        )
    )
    assert steps.run(num_steps=2) == ["*3[0:1]", "*3[1:2]"]
    steps.scheduler.add(asking(1, PlacedImage(0, DOG), num_tokens=6, max_tokens=1))
    assert steps.run(num_steps=2) == ["*3[0:1]", "*3[1:2]"]
    assert steps.run(max_image_bytes=inf) == ["1[0:6] *3[2:6]", "0[0:4] *3[2:6]"]


def test_after_a_failure_at_any_piece_the_others_begin_anew() -> None:
    broken, other = (
        asking(i, PlacedImage(0, image), num_tokens=6, max_tokens=1)
        for i, image in enumerate((CAT, DOG))
    )
    steps = Steps(broken, other)
    steps.run(num_steps=1)
    plan = steps.scheduler.schedule(None, 0.0)
    assert str(plan) == "*3[1:2]"
    steps.scheduler.discard(plan, failed_ids=[0])
    steps.runner.reset()
    assert broken.status is RequestStatus.CANCELLED
    assert steps.run(max_image_bytes=inf) == ["1[0:6] *3"]
    assert right(other)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 2),
    st.sampled_from([0, 6, 100]),
    st.lists(st.sampled_from([None, CAT, DOG, TALL]), min_size=1, max_size=5),
    st.integers(0, 9),
    st.lists(st.sampled_from([0.0, 1.0, 2.0, inf]), min_size=1, max_size=5),
)
def test_beside_streams_every_image_is_encoded_in_pieces_that_fit(
    num_streams: int,
    max_image_rows: int,
    images: list[ImageInput | None],
    gap: int,
    allowed: list[float],
) -> None:
    """No step beside streams has more pieces than it may, and every other one is for prompts."""
    streams = [request(i, 2, 400) for i in range(num_streams)]
    steps = Steps(*streams, max_image_rows=max_image_rows, num_blocks=256, max_model_len=512)
    steps.run(num_steps=1)
    requests = [
        request(i, 30, 1) if image is None else asking(i, PlacedImage(2, image), num_tokens=14)
        for i, image in enumerate(images, 10)
    ]
    arriving = [*requests]
    while not all(each.has_ended for each in requests):
        num_steps = len(steps.plans)
        assert num_steps < 200, "streams end before the prompts are read"
        if arriving and num_steps >= gap * (len(requests) - len(arriving)):
            steps.scheduler.add(arriving.pop(0))
        most = allowed[num_steps % len(allowed)]
        steps.run(1, most)
        before, plan = steps.plans[-2:]
        for order in plan.encodes:
            assert order.stop - order.first == 1 or order.num_bytes <= most
            assert not before.encodes
            assert not any(s.is_prefill for s in plan.slices)
    assert right(*requests)
