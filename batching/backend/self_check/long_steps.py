"""Steps over a context as long as those for which GPUs have attention kernels of their own.

MLX on CUDA has one for a query of one token over 256 keys and more, where 256 divides the slots of the array
that they are a part of: the pool, or what was gathered.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from batching.backend.self_check.steps import BLOCK_SIZE, Script
from batching.block_manager import BlockTable
from batching.request import BatchRequest
from batching.steps.step_plan import Slice, StateCopy, StepPlan

# 1,024 slots: 256 divides them.
_NUM_BLOCKS: Final = 256
# For the last tokens 512 slots are gathered: 256 divides these, too.
MAX_TOKENS: Final = 511
# With fewer there is nothing that other steps have not.
MIN_TOKENS: Final = 64
# Tokens at the end of each request that are read one by one.
_NUM_DECODES: Final = 7
# Where the run of the first request begins: what reads from the pool's beginning reads something else.
_FIRST_BLOCK: Final = 5
_FIRST_WINDOW_BLOCK: Final = 9
_CHECKPOINT: Final = 2


def long_prompt(vocab_size: int, num_tokens: int, salt: int) -> list[int]:
    """Return a prompt of both requests; with another salt, another."""
    return [(7919 * (i + 1) + 104729 * salt) % vocab_size for i in range(num_tokens)]


def _requests(prompts: Sequence[Sequence[int]]) -> list[BatchRequest]:
    """Return one request in a run of blocks, and one that finds most of these and has others behind."""
    num_blocks = -(-len(prompts[0]) // BLOCK_SIZE)
    num_shared = _num_shared(prompts[0]) // BLOCK_SIZE
    own = [_NUM_BLOCKS - 1 - 2 * i for i in range(num_blocks - num_shared)]
    requests = [BatchRequest(i, prompt, max_tokens=1) for i, prompt in enumerate(prompts)]

    def tables(first: int) -> list[BlockTable]:
        run = range(first, first + num_blocks)
        return [BlockTable(run), BlockTable([*run[:num_shared], *own])]

    everywhere = zip(requests, tables(_FIRST_BLOCK), tables(_FIRST_WINDOW_BLOCK), strict=True)
    for request, table, window_table in everywhere:
        request.block_table, request.window_table = table, window_table
        request.state_slot = request.request_id
    return requests


def _num_shared(prompt: Sequence[int]) -> int:
    """Return how many tokens of the first request the second finds: less than those read in chunks."""
    return (len(prompt) - _NUM_DECODES - 1) // BLOCK_SIZE * BLOCK_SIZE


def _steps(requests: Sequence[BatchRequest]) -> Iterator[StepPlan]:
    """Yield steps with decodes alone, in a run and elsewhere, and together, with one length and with two."""
    a, b = requests
    prompt, shared = tuple(a.token_ids), _num_shared(a.token_ids)
    at = len(prompt) - _NUM_DECODES

    def read(request: BatchRequest, start: int, stop: int, keep: tuple[int, ...] = ()) -> Slice:
        # It has no more tokens yet, so that the last one has logits.
        request.token_ids[:] = prompt[:stop]
        return Slice(request, start, stop, keep=keep)

    def decodes(of_a: int | None, of_b: int | None) -> StepPlan:
        pairs = ((a, of_a), (b, of_b))
        return StepPlan(tuple(read(r, at + i, at + i + 1) for r, i in pairs if i is not None))

    yield StepPlan((read(a, 0, at // 2),))
    yield StepPlan((read(a, at // 2, at, (shared,)),))
    found = (StateCopy(0, _CHECKPOINT, shared), StateCopy(_CHECKPOINT, 1, shared))
    yield StepPlan((read(a, at, at + 1), read(b, shared, at)), state_copies=found)
    yield decodes(1, None)
    yield decodes(2, 0)
    yield decodes(None, 1)
    yield decodes(None, 2)
    yield decodes(3, 3)
    yield decodes(4, None)
    yield decodes(5, 4)
    yield decodes(None, 5)
    yield decodes(6, 6)


LONG: Final = Script(_NUM_BLOCKS, _requests, _steps)
