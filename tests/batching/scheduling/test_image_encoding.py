"""When images are encoded, and for how long their rows stay: traces of the scheduler."""

from collections.abc import Sequence

from batching.inputs.images import PlacedImage
from batching.request import BatchRequest, RequestStatus
from batching.scheduler import ContinuousBatchingScheduler
from tests.support.fakes import TokenRunner, request, right, small_config
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


def trace(
    scheduler: ContinuousBatchingScheduler,
    requests: Sequence[BatchRequest],
    runner: TokenRunner | None = None,
) -> list[str]:
    """Serve requests, and return the plans; without a runner the scheduler has served none before."""
    runner = runner or TokenRunner(scheduler.config)
    for each in requests:
        scheduler.add(each)
    lines: list[str] = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        lines.append(str(plan))
        scheduler.update(plan, runner.run(plan))
    assert right(*requests)
    return lines


def scheduler_of(max_image_rows: int = 100, **limits: int) -> ContinuousBatchingScheduler:
    return ContinuousBatchingScheduler(small_config(max_image_rows=max_image_rows, **limits))


def test_an_image_is_encoded_in_the_step_that_reaches_it_one_in_a_step() -> None:
    made = asking(0, PlacedImage(1, CAT), PlacedImage(6, DOG), num_tokens=12)
    assert trace(scheduler_of(max_num_batched_tokens=16), [made]) == [
        "0[0:6] *3",
        "0[6:12] *3",
        "0[12:13]",
    ]


def test_an_image_that_a_chunk_does_not_reach_is_not_encoded_yet() -> None:
    made = asking(0, PlacedImage(11, CAT), num_tokens=16)
    lines = trace(scheduler_of(prefill_chunk=5), [made])
    assert lines[:3] == ["0[0:5]", "0[5:10]", "0[10:15] *3"]


def test_an_image_may_be_cut_by_chunks() -> None:
    lines = trace(scheduler_of(prefill_chunk=3), [asking(0, PlacedImage(1, TALL), num_tokens=12)])
    assert lines[:4] == ["0[0:3] *9", "0[3:6]", "0[6:9]", "0[9:12]"]


def test_beside_streams_a_step_has_an_image_or_chunks_in_turns() -> None:
    asks = asking(1, PlacedImage(2, CAT), PlacedImage(6, DOG), num_tokens=12)
    lines = trace(scheduler_of(), [request(0, 2, 12), asks, request(2, 9, 1)])
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
    lines = trace(scheduler, [first, second])
    assert sum("*" in line for line in lines) == 1


def test_behind_an_image_that_is_cached_nothing_is_encoded() -> None:
    scheduler = scheduler_of(max_image_rows=0)
    runner = TokenRunner(scheduler.config)
    prompt, images = [*CAT.token_ids, 7, 7], (PlacedImage(0, CAT),)
    requests = [make_request(i, prompt, images=images, max_tokens=1) for i in range(2)]
    lines = [line for each in requests for line in trace(scheduler, [each], runner)]
    assert lines == ["0[0:6] *3", "1[4:6]"]


def test_the_rows_that_were_not_used_for_the_longest_time_make_room() -> None:
    scheduler = scheduler_of(max_image_rows=6)
    runner = TokenRunner(scheduler.config)
    images = [image_of(name, 3) for name in (b"a", b"b", b"a", b"c", b"a", b"b")]
    requests = [asking(i, PlacedImage(2, image), max_tokens=1) for i, image in enumerate(images)]
    lines = [line for each in requests for line in trace(scheduler, [each], runner)]
    assert [line.count("*") for line in lines if "[0:" in line] == [1, 1, 0, 1, 0, 1]


def test_an_image_that_is_larger_than_all_room_is_encoded_alone() -> None:
    lines = trace(scheduler_of(max_image_rows=1), [asking(0, PlacedImage(2, TALL), num_tokens=13)])
    assert lines[0] == "0[0:8] *9"


def test_an_image_waits_while_others_need_the_room() -> None:
    scheduler = scheduler_of(max_image_rows=9, prefill_chunk=4)
    first, second = asking(0, PlacedImage(1, TALL), num_tokens=12), asking(1, PlacedImage(1, CAT))
    assert trace(scheduler, [first, second])[:5] == [
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
    trace(scheduler, first, runner)
    second = [asking(2, *both, num_tokens=12), asking(3, PlacedImage(1, image_of(b"new", 3)))]
    lines = trace(scheduler, second, runner)
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
    assert trace(scheduler, [], runner)[0] == "0[0:8] *9"
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
    trace(scheduler, [], runner)
    assert right(stream)
