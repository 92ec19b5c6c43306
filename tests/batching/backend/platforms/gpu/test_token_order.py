"""MLX does not know that kernels write to the pool: each read must see the writes before it, and none after.

Steps are queued, and computed when and in the order in which the test asks for them: what an operation does not
wait for may come later, or not at all.  Keys and values are the number of the write that made them, and queries
are 0, so that attention is the mean of the numbers that it sees.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest

from batching.backend.paged.kv_cache import PagedKVCache
from batching.backend.paged.layout import LayerShape
from batching.backend.paged.mlx_attention import GatheredContext
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.gpu import kernel_pool
from batching.backend.platforms.gpu.kernel_pool import KernelLayerCache, kernel_cache
from batching.backend.platforms.gpu.pool_kernels import PoolKernels
from batching.block_manager import BlockCopy, BlockTable
from batching.request import BatchRequest
from batching.steps.step_plan import Slice
from tests.support.host_kernels import HostKernels
from tests.support.requests import make_request, slice_of
from tests.support.weekly import weekly

NUM_STEPS: Final = 200
NUM_BLOCKS: Final = 24
BLOCK_SIZE: Final = 4
MAX_TOKENS: Final = 44
HEADS: Final = 2
DIM: Final = 4
LAYER: Final = LayerShape(HEADS, DIM, DIM, mx.float32)
# As many as may be queued before something is asked for.
MAX_QUEUED: Final = 12


@dataclass
class Pool:
    """What two layers should have in their slots, and what attention found there.

    queued: outputs `[T, HEADS, 1, DIM]`, and what they should be, in the order in which they were queued.
    """

    cache: PagedKVCache
    rng: random.Random
    stamps: np.ndarray[Any, Any] = field(
        default_factory=lambda: np.zeros(NUM_BLOCKS * BLOCK_SIZE, np.int64)
    )
    num_writes: int = 0
    queued: list[tuple[mx.array, list[float]]] = field(default_factory=list)
    num_wrong: int = 0

    def run(self, slices: Sequence[Slice]) -> None:
        step = self.cache.begin(slices)
        num_rows = len(step.slots)
        self.num_writes += 1
        self.stamps[step.slots] = self.num_writes
        seen = [self._mean(s, at) for s in step.attention.slices for at in range(s.start, s.stop)]
        for index, layer in enumerate(self.cache.layers):
            sign = 1 - 2 * index
            new = mx.full((num_rows, HEADS, 1, DIM), sign * self.num_writes, mx.float32)
            layer.update_and_fetch(new, new)
            queries = mx.zeros((num_rows, 2 * HEADS, 1, DIM))
            output = layer.attend(queries, scale=1.0, mask=None, sinks=None)
            self.queued.append((output, [sign * mean for mean in seen]))
        self.cache.flush()

    def copy(self, source: int, target: int) -> None:
        self.cache.copy_blocks([BlockCopy(source, target)])
        blocks = self.stamps.reshape(NUM_BLOCKS, BLOCK_SIZE)
        blocks[target] = blocks[source]

    def reset(self) -> None:
        self.cache.reset()
        self.stamps[:] = 0

    def compute(self, num_left: int) -> None:
        """Ask for outputs in any order, until so many are left."""
        while len(self.queued) > num_left:
            output, expected = self.queued.pop(self.rng.randrange(len(self.queued)))
            found = np.array(output)[:, 0, 0, 0]
            self.num_wrong += not np.allclose(found, expected, rtol=1e-4)

    def _mean(self, s: Slice, position: int) -> float:
        at = np.arange(position + 1)
        blocks = np.array(s.blocks.block_ids)
        return float(self.stamps[blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE].mean())


class Traffic:
    """Requests that come, decode, are forked, and end at any time; their blocks are reused at once."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._rng = pool.rng
        self._free = list(range(NUM_BLOCKS))
        self._requests: list[BatchRequest] = []
        self.num_chunks = self.num_copies = self.num_aborted = 0

    def step(self) -> None:
        kind = self._rng.random()
        if kind < 0.2 and self._requests:
            self._end(self._rng.choice(self._requests))
            self.num_aborted += 1
        elif kind < 0.35 and self._requests:
            self._fork(self._rng.choice(self._requests))
        slices = [s for request in list(self._requests) if (s := self._decode(request))]
        if self._rng.random() < 0.5 and (chunk := self._chunk()):
            slices.append(chunk)
        if slices:
            self._rng.shuffle(slices)
            self._pool.run(slices)

    def forget(self) -> None:
        """Start over, as after a step that raised."""
        for request in list(self._requests):
            self._end(request)

    def _chunk(self) -> Slice | None:
        num_tokens = self._rng.choice((2, 9, 14, 20))
        request = make_request(0, [0] * num_tokens, max_tokens=MAX_TOKENS)
        if not self._grow(request, num_tokens):
            return None
        self._requests.append(request)
        self.num_chunks += num_tokens > 8
        return slice_of(request, 0, num_tokens)

    def _decode(self, request: BatchRequest) -> Slice | None:
        """Return a slice of a token, or of one and drafts."""
        start = len(request.token_ids)
        stop = start + self._rng.choice((1, 1, 3))
        if stop > MAX_TOKENS or not self._grow(request, stop):
            self._end(request)
            return None
        request.token_ids += [0] * (stop - start)
        return slice_of(request, start, stop)

    def _fork(self, request: BatchRequest) -> None:
        """Copy on write: the fork gets all but the last block, and a copy of that."""
        if not self._free:
            return
        self.num_copies += 1
        fork = make_request(0, list(request.token_ids), max_tokens=MAX_TOKENS)
        *shared, last = request.block_table.block_ids
        target = self._free.pop(0)
        self._pool.copy(last, target)
        fork.block_table = BlockTable([*shared, target])
        self._requests.append(fork)

    def _grow(self, request: BatchRequest, num_tokens: int) -> bool:
        missing = -(-num_tokens // BLOCK_SIZE) - len(request.block_table)
        if missing > len(self._free):
            return False
        # Those that were given back last come first.
        request.block_table.extend(self._free.pop() for _ in range(missing))
        return True

    def _end(self, request: BatchRequest) -> None:
        self._requests.remove(request)
        in_use = {block for other in self._requests for block in other.block_table.block_ids}
        self._free += [b for b in request.block_table.block_ids if b not in in_use]


def serve(kernels: PoolKernels, seed: int = 0, *, resets: bool = True) -> tuple[Pool, Traffic]:
    rng = random.Random(seed)
    cache = kernel_cache(kernels, [LAYER, LAYER], NUM_BLOCKS, BLOCK_SIZE)
    pool = Pool(cache, rng)
    traffic = Traffic(pool)
    for index in range(NUM_STEPS):
        traffic.step()
        if len(pool.queued) > MAX_QUEUED:
            pool.compute(rng.randrange(MAX_QUEUED))
        if resets and index % 50 == 49:
            # What is queued may be asked for afterwards.
            traffic.forget()
            pool.reset()
    pool.compute(0)
    return pool, traffic


@pytest.mark.parametrize("seed", weekly(range(4), 2))
def test_each_read_sees_the_writes_before_it_and_none_after(native: Native, seed: int) -> None:
    pool, traffic = serve(HostKernels(native), seed)
    assert pool.num_wrong == 0
    assert pool.num_writes > 0.8 * NUM_STEPS
    assert min(traffic.num_chunks, traffic.num_copies, traffic.num_aborted) > 10
    # Each slot was written again and again.
    assert pool.num_writes > 3 * NUM_BLOCKS


class Forgetful(HostKernels):
    """A fault: what a kernel returns as its token does not wait for it."""

    forgets: str = ""

    def write(self, *args: Any) -> mx.array:
        made = super().write(*args)
        return args[-1] if self.forgets == "writes" else made

    def decode(self, *args: Any, **options: Any) -> tuple[mx.array, mx.array]:
        output, made = super().decode(*args, **options)
        return output, args[-1] if self.forgets == "decodes" else made


def gathers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = GatheredContext.read
    monkeypatch.setattr(GatheredContext, "read", lambda self, pool, _: plain(self, pool))


def writes_beside_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_pool, "_after", lambda token, _: token)


def copies_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = KernelLayerCache.copy

    def copy(self: KernelLayerCache, sources: Any, targets: Any) -> None:
        self._token = mx.zeros_like(self._token)
        plain(self, sources, targets)

    monkeypatch.setattr(KernelLayerCache, "copy", copy)


@pytest.mark.parametrize("forgets", ["writes", "decodes"])
def test_a_kernel_whose_token_waits_for_nothing_is_found(native: Native, forgets: str) -> None:
    kernels = Forgetful(native)
    object.__setattr__(kernels, "forgets", forgets)
    pool, _ = serve(kernels)
    assert pool.num_wrong > 0


@pytest.mark.parametrize("plant", [gathers_at_once, writes_beside_chunks, copies_at_once])
def test_an_operation_of_mlx_beside_the_tokens_is_found(
    native: Native, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    pool, _ = serve(HostKernels(native))
    assert pool.num_wrong > 0
