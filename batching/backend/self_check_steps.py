"""The steps that a model must take right before it is served."""

from collections.abc import Iterator, Sequence
from typing import Final

from batching.block_manager import BlockTable
from batching.request import BatchRequest, SamplingParams
from batching.scheduling.step_plan import Slice, StateCopy, StepPlan

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


def probe_steps(prompts: Sequence[Sequence[int]]) -> Iterator[StepPlan]:
    """Yield steps with chunks beside decodes, a prefix that is found, and drafts that are wrong.

    The id of a request is the index of its prompt.
    """
    a, b, c, d, e = _requests(prompts)
    wrong = BatchRequest(DRAFTED, [*c.token_ids[:11], *d.token_ids[:2]], max_tokens=1)
    wrong.block_table, wrong.state_slot = c.block_table, c.state_slot
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
        request.state_slot = index
        requests.append(request)
    return requests


def _plan(*slices: Slice, copies: Sequence[StateCopy] = ()) -> StepPlan:
    return StepPlan(slices, state_copies=tuple(copies))
