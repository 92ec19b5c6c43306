"""Recurrent states take the memory that is reckoned for them, however many requests were served."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import mlx.core as mx
import numpy as np
import pytest

from batching.backend.paged.kv_cache import PagedKVCache
from batching.backend.paged.state_cache import arrays_of
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.runner.mlx_runner import MLXRunner
from batching.batch_inference import BatchInferenceEngine
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from batching.steps.step_plan import SliceOutput, StepPlan
from batching.steps.token_output import TokenOutput
from scripts.make_model.tiny_configs import VOCAB_SIZE
from tests.support.model_zoo import make_tiny
from tests.support.platforms import check_model
from tests.support.requests import make_request
from tests.support.serving import TIGHT

NUM_CHECKPOINTS: Final = 6
CONFIG: Final = replace(
    TIGHT,
    num_blocks=120,
    max_num_seqs=16,
    max_num_batched_tokens=64,
    prefill_chunk=16,
    max_draft_tokens=3,
    num_checkpoints=NUM_CHECKPOINTS,
)
# A running request has its state, the new one that a step makes, and the one at its last full block.
MOST_STATES: Final = 3 * CONFIG.max_num_seqs + NUM_CHECKPOINTS


class Weighed(MLXRunner):
    """Remembers the most bytes that were kept after a step."""

    cache: PagedKVCache
    most_bytes = 0

    def run(self, plan: StepPlan) -> Sequence[SliceOutput]:
        outputs = super().run(plan)
        kept = [state._slots for state in self.cache._states]
        num_bytes = sum({id(array): array.nbytes for array in arrays_of(kept)}.values())
        self.most_bytes = max(self.most_bytes, num_bytes)
        return outputs


def requests(first_id: int, count: int) -> Iterator[BatchRequest]:
    """Yield short requests with a shared beginning, of which some have a second choice."""
    rng = np.random.default_rng(first_id)
    shared = np.random.default_rng(0).integers(1, VOCAB_SIZE, 9).tolist()
    for request_id in range(first_id, first_id + count):
        own = rng.integers(1, VOCAB_SIZE, rng.integers(1, 9)).tolist()
        # They end one after the other, so that batches change all the time.
        max_tokens = int(rng.integers(1, 7))
        request = make_request(request_id, [*shared, *own], max_tokens=max_tokens)
        yield request
        if request_id % 10 == 0:
            yield request.fork(request_id + 1_000_000)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_states_are_as_many_as_reckoned_and_memory_stays_flat() -> None:
    model = make_tiny("falcon_h1")
    checked = check_model(model, VOCAB_SIZE)
    cache = checked.cache(CONFIG.num_blocks, CONFIG.block_size)
    cache.reset()
    runner = Weighed(model, VOCAB_SIZE, checked.selection, cache, checked.platform.sampler())
    runner.cache = cache
    scheduler = ContinuousBatchingScheduler(CONFIG)
    engine = BatchInferenceEngine(scheduler, runner, max_stall=1e9)
    used: list[int] = []
    for turn in range(10):
        # The last one is alone in its steps, so that always as much is left.
        last = make_request(1000 * turn + 500, [turn + 1] * 10, max_tokens=3)
        for batch in ([*requests(1000 * turn, 60)], [last]):
            for request in batch:
                if request.fork_of is None:
                    engine.add(request, *request.forks)
            while engine.has_work:
                assert all(isinstance(output, TokenOutput) for _, output in engine.step())
        gc.collect()
        used.append(mx.get_active_memory())
    stats = scheduler.stats()
    assert stats.num_checkpoints == NUM_CHECKPOINTS
    assert stats.num_checkpoints_hit > 300
    bytes_each = checked.layout.state_bytes(0)
    assert 8 * bytes_each < runner.most_bytes <= MOST_STATES * bytes_each
    # A draft in a turn's last step leaves a state or two more.
    assert max(used) <= min(used) + 4 * bytes_each
    # With a leak all of the last turns would be above all of the first.
    assert min(used[5:]) <= max(used[:5])


@pytest.mark.parametrize("is_native", [False, True])
def test_without_attention_steps_are_queued_for_the_kernels_only(
    native: Native, *, is_native: bool
) -> None:
    """Else the host samples, which waits for a step before the one ahead of it is read."""
    checked = check_model(make_tiny("mamba"), VOCAB_SIZE, native if is_native else None)
    cache = checked.cache(CONFIG.num_blocks, CONFIG.block_size)
    runner = MLXRunner(
        make_tiny("mamba"), VOCAB_SIZE, checked.selection, cache, checked.platform.sampler()
    )
    assert runner.takes_queued_steps == is_native
