"""Events of the prefix cache, against what is in the pool."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import pytest
from hypothesis import given, settings, strategies as st

from batching.adapters.adapter import Adapter
from batching.batch_inference import BatchInferenceEngine
from batching.config import SchedulerConfig, blocks_held
from batching.inputs.images import PlacedImage
from batching.kv_cache.cache_events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
)
from batching.prefix_cache import HashChain
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from batching.steps.step_plan import SliceOutput, StepPlan
from tests.support.block_stores import FakeStore
from tests.support.fakes import FakeClock, TokenRunner, make_engine, request, small_config
from tests.support.requests import image_of, make_request

IMAGES: Final = tuple(image_of(name, 2) for name in (b"a", b"b"))
ADAPTER: Final = Adapter("name", "", "digest")


class Consumer:
    """A router's view: for each block its parent and its tokens, by the hash that it was told."""

    def __init__(self, block_size: int) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self._block_size = block_size

    def take(self, events: Sequence[CacheEvent]) -> None:
        assert events, "nothing has happened"
        for event in events:
            match event:
                case BlocksStored(hashes, parent, tokens, block_size):
                    assert block_size == self._block_size
                    assert len(tokens) == block_size * len(hashes)
                    for index, number in enumerate(hashes):
                        assert number not in self.blocks, "it has that"
                        of_block = tokens[index * block_size : (index + 1) * block_size]
                        self.blocks[number] = (parent, tuple(of_block))
                        parent = number
                case BlocksRemoved(hashes):
                    for number in hashes:
                        del self.blocks[number]
                case AllBlocksCleared():
                    self.blocks.clear()


def number_of(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


def shared_blocks(
    requests: Iterable[BatchRequest], block_size: int
) -> Iterator[tuple[bytes, tuple[int | None, tuple[int, ...]]]]:
    """Yield hash, parent and tokens of each block that any request could share."""
    for r in requests:
        if r.spec.cache_salt or r.spec.adapter is not None:
            continue
        tokens, parent, chain = r.cache_ids[: r.num_known_tokens], None, HashChain()
        for index, block_hash in enumerate(chain.extended(tokens, block_size)):
            block = tuple(tokens[index * block_size : (index + 1) * block_size])
            if min(block) < 0:
                break
            yield block_hash, (parent, block)
            parent = number_of(block_hash)


def in_pool(
    scheduler: ContinuousBatchingScheduler, requests: Iterable[BatchRequest]
) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    manager = scheduler.block_manager
    shared = shared_blocks(requests, manager.block_size)
    return {number_of(h): block for h, block in shared if manager.find(h) is not None}  # type: ignore[arg-type]


def watched(
    config: SchedulerConfig, **made_with: Any
) -> tuple[ContinuousBatchingScheduler, BatchInferenceEngine, list[Sequence[CacheEvent]]]:
    scheduler, engine = make_engine(config, **made_with)
    batches: list[Sequence[CacheEvent]] = []
    engine.report_cache(batches.append)
    return scheduler, engine, batches


def serve(engine: BatchInferenceEngine, *requests: BatchRequest) -> None:
    engine.add(*requests)
    while engine.has_work:
        engine.step()


def numbers(r: BatchRequest, block_size: int = 4) -> list[int]:
    return [number_of(h) for h in HashChain().extended(r.token_ids, block_size)]


def test_a_step_tells_what_it_has_stored_in_one_event_for_each_prompt() -> None:
    _, engine, batches = watched(small_config(max_num_batched_tokens=32))
    first, second = request(1, 9, 1), request(2, 5, 1)
    serve(engine, first, second)
    prompts = list(first.spec.prompt), list(second.spec.prompt)
    assert batches == [
        [
            BlocksStored(numbers(first)[:2], None, prompts[0][:8], 4),
            BlocksStored(numbers(second)[:1], None, prompts[1][:4], 4),
        ]
    ]


def test_a_block_that_a_step_fills_follows_the_one_before_it() -> None:
    _, engine, batches = watched(small_config())
    made = request(1, 6, 7)
    serve(engine, made)
    one, two, three = numbers(made)
    tokens = made.token_ids
    assert batches == [
        [BlocksStored([one], None, tokens[:4], 4)],
        [BlocksStored([two], one, tokens[4:8], 4)],
        [BlocksStored([three], two, tokens[8:12], 4)],
    ]


def test_a_hit_is_no_event() -> None:
    _, engine, batches = watched(small_config())
    serve(engine, request(1, 6, 1))
    batches.clear()
    serve(engine, request(1, 6, 1))
    assert batches == []


def test_what_is_evicted_is_removed_in_one_event_the_last_block_first() -> None:
    _, engine, batches = watched(small_config(num_blocks=4, max_num_batched_tokens=32))
    old, new = request(1, 12, 1), request(2, 12, 1)
    serve(engine, old)
    serve(engine, new)
    (removed, stored) = batches[1]
    assert removed == BlocksRemoved(numbers(old)[2:0:-1])
    assert stored == BlocksStored(numbers(new)[:3], None, list(new.spec.prompt), 4)


def test_after_a_step_that_failed_there_are_none() -> None:
    class Failing:
        def __init__(self, runner: TokenRunner) -> None:
            self.reset, self._runner, self.fails = runner.reset, runner, False

        def run(self, plan: StepPlan) -> list[SliceOutput]:
            if self.fails:
                raise ValueError
            return self._runner.run(plan)

    runners: list[Failing] = []

    def wrap(runner: TokenRunner) -> Failing:
        runners.append(Failing(runner))
        return runners[0]

    _, engine, batches = watched(small_config(), wrap=wrap)
    serve(engine, request(1, 9, 1))
    runners[0].fails = True
    engine.add(request(2, 9, 1))
    engine.step()
    assert batches[-1] == [AllBlocksCleared()]


@pytest.mark.parametrize(
    "fields",
    [{"cache_salt": "a"}, {"adapter": ADAPTER}, {"cache_salt": "a", "adapter": ADAPTER}],
    ids=str,
)
def test_blocks_that_others_cannot_share_are_not_told(fields: dict[str, Any]) -> None:
    _, engine, batches = watched(small_config(num_blocks=4, max_adapters=1))
    serve(engine, request(1, 12, 2, **fields))
    serve(engine, request(2, 12, 2, **fields))
    assert batches == []


def test_before_an_image_blocks_are_told_and_from_its_first_row_on_none() -> None:
    _, engine, batches = watched(small_config(max_num_batched_tokens=32, max_image_rows=8))
    image = image_of(b"a", 2)
    # The token before the rows is the last one of the second block.
    prompt = [*range(7), *image.token_ids, *range(9)]
    serve(engine, make_request(1, prompt, images=(PlacedImage(7, image),), max_tokens=1))
    (events,) = batches
    chain = HashChain().extended(prompt[:8], 4)
    assert events == [BlocksStored([*map(number_of, chain)], None, prompt[:8], 4)]


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    block_size = draw(st.sampled_from([1, 2, 4]))
    window = draw(st.sampled_from([None, None, 3]))
    return SchedulerConfig(
        num_blocks=draw(st.integers(4, 12)),
        block_size=block_size,
        max_num_seqs=3,
        max_num_batched_tokens=draw(st.integers(3, 20)),
        prefill_chunk=draw(st.integers(1, 9)),
        min_copied_tokens=draw(st.sampled_from([None, 1, 2])),
        max_adapters=1,
        max_image_rows=6,
        num_checkpoints=draw(st.sampled_from([None, None, 2])),
        window=window,
        num_window_blocks=0 if window is None else 3 * blocks_held(window, block_size),
    )


@st.composite
def requests_for(draw: st.DrawFn, config: SchedulerConfig, request_id: int) -> BatchRequest:
    room = config.max_request_tokens
    length = draw(st.integers(1, room - 1))
    prompt = draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
    fields: dict[str, Any] = {}
    start = draw(st.integers(0, 15))
    if draw(st.integers(0, 3)) == 3 and start + 3 <= length:
        image = draw(st.sampled_from(IMAGES))
        prompt[start : start + 3] = image.token_ids
        fields["images"] = (PlacedImage(start, image),)
    made = make_request(
        request_id,
        prompt,
        max_tokens=draw(st.integers(1, room - length)),
        cache_salt=draw(st.sampled_from(["", "", "", "a"])),
        adapter=draw(st.sampled_from([None, None, None, ADAPTER])),
        arrival_time=float(request_id),
        **fields,
    )
    if draw(st.integers(0, 3)) == 3:
        made.fork(100 + request_id)
    return made


class Failing:
    """Fails in some steps."""

    def __init__(self, runner: TokenRunner, data: st.DataObject) -> None:
        self.reset, self._runner, self._data = runner.reset, runner, data

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        if self._data.draw(st.integers(0, 20)) == 20:
            raise ValueError
        return self._runner.run(plan)


@settings(max_examples=150, deadline=None)
@given(configs(), st.booleans(), st.booleans(), st.data())
def test_who_applies_all_events_has_what_is_in_the_pool(
    config: SchedulerConfig, is_pipelined: bool, is_storing: bool, data: st.DataObject
) -> None:
    clock = FakeClock()
    scheduler, engine = make_engine(
        config,
        lambda runner: Failing(runner, data),
        is_pipelined=is_pipelined,
        clock=clock,
        store=FakeStore(lambda most: data.draw(st.integers(0, most))) if is_storing else None,
    )
    consumer = Consumer(config.block_size)
    engine.report_cache(consumer.take)
    requests: list[BatchRequest] = []
    num_requests = data.draw(st.integers(2, 9))
    while len(requests) < num_requests or engine.has_work:
        if len(requests) < num_requests and (not engine.has_work or data.draw(st.booleans())):
            made = data.draw(requests_for(config, len(requests)))
            requests.append(made)
            engine.add(made, *made.forks)
            requests += made.forks
        if data.draw(st.integers(0, 15)) == 15:
            engine.abort(data.draw(st.sampled_from(requests)).request_id)
        if engine.has_work:
            clock.now += 0.7
            engine.step()
        assert consumer.blocks == in_pool(scheduler, requests)
