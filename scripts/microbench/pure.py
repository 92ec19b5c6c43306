"""What the scheduler and its blocks cost, without a model: microseconds that must not grow."""

import random
from collections.abc import Callable
from itertools import count
from typing import Final

from batching.block_manager import BlockTable, PagedBlockManager
from batching.config import BLOCK_SIZE, SchedulerConfig
from batching.inputs.sequence_spec import SequenceSpec
from batching.prefix_cache import HashChain, PrefixCache
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from batching.steps.step_plan import SliceOutput
from scripts.microbench.timing import QUICK, Pace, Result, Timing, compare

NUM_PROMPT_TOKENS: Final = 2000
_NUM_ROWS: Final = 256
_NUM_FINISHED: Final = 10_000
_SMALL_POOL, _MIDDLE_POOL, _LARGE_POOL = 1024, 8192, 65536


def run_scheduler(pace: Pace) -> Result:
    """Time `schedule()` and `update()` of one decode step."""
    num_finished = _NUM_ROWS if pace == QUICK else _NUM_FINISHED
    title = f"{_NUM_ROWS} rows, pool of"
    cases = {f"{title} {n:,}": _decodes(n) for n in (_SMALL_POOL, _MIDDLE_POOL, _LARGE_POOL)}
    later = f"{title} {_MIDDLE_POOL:,}, {num_finished:,} requests later"
    return Result(compare(cases | {later: _decodes(_MIDDLE_POOL, num_finished)}, pace))


def _decodes(num_blocks: int, num_finished: int = 0) -> Callable[[], None]:
    """Return a step in which all rows decode; it can be taken 95 times."""
    scheduler = _scheduler(num_blocks)
    rng = random.Random(0)
    for i in range(num_finished):
        scheduler.add(
            BatchRequest(
                i, SequenceSpec(prompt=tuple(_tokens(rng.randint(1, 300), seed=i)), max_tokens=2)
            )
        )
    while scheduler.has_work:
        _step(scheduler)
    for i in range(num_finished, num_finished + _NUM_ROWS):
        # Of all lengths, so that each step has as many requests that need a block.
        scheduler.add(
            BatchRequest(
                i, SequenceSpec(prompt=tuple(_tokens(1 + i % BLOCK_SIZE, seed=i)), max_tokens=96)
            )
        )
    _step(scheduler)

    def step() -> None:
        assert _step(scheduler) == _NUM_ROWS, "no request has ended"

    return step


def run_blocks(pace: Pace) -> Result:
    """Time the block manager and the prefix cache."""
    cases: dict[str, Callable[[], object]] = {}
    for num_blocks in (_SMALL_POOL, _LARGE_POOL):
        for n in (1, 64):
            title, pool = f"allocate and release {n}", f"pool of {num_blocks:,}"
            empty = PagedBlockManager(num_blocks, BLOCK_SIZE)
            cases[f"{title}, empty {pool}"] = _taking(empty, n)
            cases[f"{title}, scattered {pool}"] = _taking(_scattered(num_blocks), n)
    cases["look up a prefix of 64 blocks"] = _lookup(64)
    token_ids = _tokens(1000)
    cases["hash 1,000 tokens"] = lambda: HashChain().extended(token_ids, BLOCK_SIZE)
    return Result([*compare(cases, pace), *time_prompts(pace)])


def _scattered(num_blocks: int) -> PagedBlockManager:
    """Return a pool of which every other block is held: no two empty ones touch."""
    manager = PagedBlockManager(num_blocks, BLOCK_SIZE)
    manager.release((manager.allocate(num_blocks) or [])[::2])
    return manager


def _taking(manager: PagedBlockManager, num_blocks: int) -> Callable[[], None]:
    return lambda: manager.release(manager.allocate(num_blocks) or [])


def _lookup(num_blocks: int) -> Callable[[], list[int]]:
    manager = PagedBlockManager(_SMALL_POOL, BLOCK_SIZE)
    cache = PrefixCache(manager)
    hashes = HashChain().extended(_tokens(num_blocks * BLOCK_SIZE), BLOCK_SIZE)
    cache.insert(hashes, BlockTable(manager.allocate(num_blocks) or []), 0, num_blocks)
    return lambda: cache.lookup(hashes)


def time_prompts(pace: Pace) -> list[Timing]:
    """Time what a prompt costs beside the model, without the prefix cache and with it."""
    name = f"schedule a prompt of {NUM_PROMPT_TOKENS:,} tokens, prefix cache"
    return compare({f"{name} off": _prompts(False), f"{name} on": _prompts(True)}, pace)


def _prompts(enable_prefix_cache: bool) -> Callable[[], None]:
    """Return what serves the next prompt, up to its first token, which is its last.

    No prompt begins like another, and the pool is full of those before.
    """
    scheduler = _scheduler(_SMALL_POOL, enable_prefix_cache)
    ids = count()
    rest = _tokens(NUM_PROMPT_TOKENS - 1)

    def serve() -> None:
        request_id = next(ids)
        scheduler.add(
            BatchRequest(request_id, SequenceSpec(prompt=(request_id, *rest), max_tokens=1))
        )
        while scheduler.has_work:
            _step(scheduler)

    for _ in range(_SMALL_POOL * BLOCK_SIZE // NUM_PROMPT_TOKENS + 1):
        serve()
    return serve


def _scheduler(num_blocks: int, enable_prefix_cache: bool = True) -> ContinuousBatchingScheduler:
    config = SchedulerConfig(
        num_blocks=num_blocks,
        max_num_seqs=_NUM_ROWS,
        max_num_batched_tokens=_NUM_ROWS * BLOCK_SIZE,
        enable_prefix_cache=enable_prefix_cache,
    )
    return ContinuousBatchingScheduler(config)


def _step(scheduler: ContinuousBatchingScheduler) -> int:
    """Take a step in which each token is the same one; return the number of rows."""
    plan = scheduler.schedule()
    scheduler.update(plan, [SliceOutput([0] * s.num_samples) for s in plan.slices])
    return len(plan.slices)


def _tokens(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(49152), k=num_tokens)
