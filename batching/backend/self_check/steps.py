"""The steps that a model must take right before it is served."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from batching.block_manager import BlockCopy, BlockTable
from batching.config import blocks_in_window
from batching.request import BatchRequest, SamplingParams
from batching.steps.step_plan import Slice, StateCopy, StepPlan

BLOCK_SIZE: Final = 4
NUM_BLOCKS: Final = 32
# The last one begins with `_NUM_SHARED` tokens of the first.
PROMPT_LENGTHS: Final = (41, 12, 15, 7, 14)
_NUM_SHARED: Final = 8
# Spreads the blocks of a request over the pool; prime to its size.
_STRIDE: Final = 13
_CHECKPOINT: Final = len(PROMPT_LENGTHS)
# A request with wrong tokens, which nothing is compared with.
DRAFTED: Final = -1


def probe_prompts(vocab_size: int, salt: int = 0) -> list[list[int]]:
    """Return unlike prompts; with another salt, others."""
    prompts = [
        [(7919 * (i + 1) + 104729 * (index + 31 * salt)) % vocab_size for i in range(length)]
        for index, length in enumerate(PROMPT_LENGTHS)
    ]
    prompts[-1][:_NUM_SHARED] = prompts[0][:_NUM_SHARED]
    return prompts


class Script(NamedTuple):
    """Steps over a pool of so many blocks.

    requests: makes a request of each prompt, whose id is the index of the prompt.
    steps: yields what is to be done with them.
    """

    num_blocks: int
    requests: Callable[[Sequence[Sequence[int]]], list[BatchRequest]]
    steps: Callable[[Sequence[BatchRequest]], Iterator[StepPlan]]

    @property
    def num_window_blocks(self) -> int:
        """Those of windowed layers; what these give up becomes a copy of the last one."""
        return self.num_blocks + 1

    def nan_slice(self) -> Slice:
        """Return a slice whose keys and values fill that block."""
        request = BatchRequest(0, [0] * BLOCK_SIZE, max_tokens=1)
        request.block_table, request.window_table = BlockTable([0]), BlockTable([self.num_blocks])
        return Slice(request, 0, BLOCK_SIZE)

    def plans(self, prompts: Sequence[Sequence[int]], window: int | None) -> Iterator[StepPlan]:
        """Yield the steps.

        window: layers with it have blocks of their own, in which there is NaN once they have left it;
            None is no such layers.
        """
        requests = self.requests(prompts)
        for plan in self.steps(requests):
            copies: tuple[BlockCopy, ...] = ()
            if window is not None:
                copies = _give_up(plan.slices, requests, window, self.num_blocks)
            yield replace(plan, copies=copies)


def _give_up(
    slices: Sequence[Slice], requests: Sequence[BatchRequest], window: int, nan_block: int
) -> tuple[BlockCopy, ...]:
    """Drop the blocks that no token of these slices sees; return the copies that overwrite them."""
    dropped: set[int] = set()
    for s in slices:
        first = s.start // BLOCK_SIZE - blocks_in_window(window, BLOCK_SIZE)
        if first > s.request.window_table.num_dropped:
            dropped.update(s.request.window_table.drop(first))
    held = {block_id for request in requests for block_id in request.window_table.held}
    return tuple(BlockCopy(nan_block, block_id, True) for block_id in sorted(dropped - held))


def _steps(requests: Sequence[BatchRequest]) -> Iterator[StepPlan]:
    a, b, c, d, e = requests
    wrong = BatchRequest(DRAFTED, [*c.token_ids[:11], *d.token_ids[:2]], max_tokens=1)
    wrong.block_table, wrong.window_table = c.block_table, c.window_table
    wrong.state_slot = c.state_slot
    slots = [request.state_slot or 0 for request in (a, e)]
    yield _plan(Slice(a, 0, 5))
    yield _plan(Slice(a, 5, 30, keep=(_NUM_SHARED,)), Slice(b, 0, 4))
    yield _plan(
        *(Slice(a, 30, 39), Slice(b, 4, 6), Slice(c, 0, 7), Slice(d, 0, 1)),
        copies=[StateCopy(slots[0], _CHECKPOINT, _NUM_SHARED)],
    )
    yield _plan(
        *(Slice(a, 39, 40), Slice(b, 6, 7), Slice(c, 7, 9), Slice(d, 1, 2)),
        Slice(e, _NUM_SHARED, 13),
        copies=[StateCopy(_CHECKPOINT, slots[1], _NUM_SHARED)],
    )
    yield _plan(*(Slice(r, n, n + 1) for r, n in ((a, 40), (b, 7), (c, 9), (d, 2), (e, 13))))
    yield _plan(Slice(b, 8, 9), Slice(wrong, 10, 13, keep=(10,)), Slice(d, 3, 4))
    yield _plan(Slice(b, 9, 10), Slice(c, 10, 12), Slice(d, 4, 5))
    yield _plan(Slice(c, 12, 13), Slice(b, 10, 11), Slice(d, 5, 6))
    yield _plan(Slice(d, 6, 7), Slice(c, 13, 14), Slice(b, 11, 12))


def _requests(prompts: Sequence[Sequence[int]]) -> list[BatchRequest]:
    scattered = iter([block * _STRIDE % NUM_BLOCKS for block in range(NUM_BLOCKS)])
    requests: list[BatchRequest] = []
    for index, prompt in enumerate(prompts):
        # So that every token gets logits.
        sampling = SamplingParams(prompt_logprobs=0)
        request = BatchRequest(index, prompt, max_tokens=1, sampling=sampling)
        is_last = index == len(prompts) - 1
        shared = requests[0].block_table.block_ids[: _NUM_SHARED // BLOCK_SIZE] if is_last else []
        missing = -(-len(prompt) // BLOCK_SIZE) - len(shared)
        request.block_table = BlockTable([*shared, *(next(scattered) for _ in range(missing))])
        # Unlike the others, and scattered as they are.
        request.window_table = BlockTable(NUM_BLOCKS - 1 - b for b in request.block_table.block_ids)
        request.state_slot = index
        requests.append(request)
    return requests


def _plan(*slices: Slice, copies: Sequence[StateCopy] = ()) -> StepPlan:
    return StepPlan(slices, state_copies=tuple(copies))


# Chunks beside decodes, a prefix that is found, and drafts that are wrong.
SHORT: Final = Script(NUM_BLOCKS, _requests, _steps)
