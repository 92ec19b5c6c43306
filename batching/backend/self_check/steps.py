"""The steps that a model must take right before it is served."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from batching.backend.self_check.probe_sequence import ProbeSequence, ProbeStep, Read
from batching.block_manager import BlockCopy, BlockTable
from batching.config import blocks_in_window
from batching.steps.step_plan import Slice, StateCopy, StepPlan

BLOCK_SIZE: Final = 4
NUM_BLOCKS: Final = 32
# The last one begins with `_NUM_SHARED` tokens of the first.
PROMPT_LENGTHS: Final = (41, 12, 15, 7, 14)
_NUM_SHARED: Final = 8
# Spreads the blocks of a sequence over the pool; prime to its size.
_STRIDE: Final = 13
_CHECKPOINT: Final = len(PROMPT_LENGTHS)
# A sequence with wrong tokens, which nothing is compared with, in the blocks of another one.
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

    sequences: makes a sequence of each prompt, whose id is the index of the prompt.
    steps: yields what is to be done with them.
    """

    num_blocks: int
    sequences: Callable[[Sequence[Sequence[int]]], list[ProbeSequence]]
    steps: Callable[[Sequence[ProbeSequence]], Iterator[ProbeStep]]

    @property
    def num_window_blocks(self) -> int:
        """The number of blocks of windowed layers; a block that they give up becomes a copy of the last one."""
        return self.num_blocks + 1

    def nan_slice(self) -> Slice:
        """Return a slice whose keys and values fill that block."""
        tokens, last = [0] * BLOCK_SIZE, BlockTable([self.num_blocks])
        return ProbeSequence(0, tokens, BlockTable([0]), last).sampled(0, BLOCK_SIZE).to_slice()

    def plans(self, prompts: Sequence[Sequence[int]], window: int | None) -> Iterator[StepPlan]:
        """Yield the steps.

        window: layers with it have blocks of their own, in which there is NaN once they have left it;
            None is no such layers.
        """
        sequences = self.sequences(prompts)
        for step in self.steps(sequences):
            copies: tuple[BlockCopy, ...] = ()
            if window is not None:
                copies = _give_up(step.reads, sequences, window, self.num_blocks)
            slices = tuple(read.to_slice() for read in step.reads)
            yield StepPlan(slices, copies, state_copies=step.state_copies)


def _give_up(
    reads: Sequence[Read], sequences: Sequence[ProbeSequence], window: int, nan_block: int
) -> tuple[BlockCopy, ...]:
    """Drop the blocks that no token of these reads sees; return the copies that overwrite them."""
    dropped: set[int] = set()
    for read in reads:
        first = read.start // BLOCK_SIZE - blocks_in_window(window, BLOCK_SIZE)
        table = read.sequence.window_blocks
        if first > table.num_dropped:
            dropped.update(table.drop(first))
    held = {block_id for each in sequences for block_id in each.window_blocks.held}
    return tuple(BlockCopy(nan_block, block_id, True) for block_id in sorted(dropped - held))


def _steps(sequences: Sequence[ProbeSequence]) -> Iterator[ProbeStep]:
    a, b, c, d, e = sequences
    drafted = [*c.token_ids[:11], *d.token_ids[:2]]
    wrong = replace(c, sequence_id=DRAFTED, token_ids=drafted)
    slots = [sequence.state_slot or 0 for sequence in (a, e)]
    yield _step(a.scored(0, 5))
    yield _step(a.scored(5, 30, keep=(_NUM_SHARED,)), b.scored(0, 4))
    yield _step(
        *(a.scored(30, 39), b.scored(4, 6), c.scored(0, 7), d.scored(0, 1)),
        copies=[StateCopy(slots[0], _CHECKPOINT, _NUM_SHARED)],
    )
    yield _step(
        *(a.scored(39, 40), b.scored(6, 7), c.scored(7, 9), d.scored(1, 2)),
        e.scored(_NUM_SHARED, 13),
        copies=[StateCopy(_CHECKPOINT, slots[1], _NUM_SHARED)],
    )
    yield _step(*(r.scored(n, n + 1) for r, n in ((a, 40), (b, 7), (c, 9), (d, 2), (e, 13))))
    yield _step(b.scored(8, 9), wrong.sampled(10, 13, keep=(10,)), d.scored(3, 4))
    yield _step(b.scored(9, 10), c.scored(10, 12), d.scored(4, 5))
    yield _step(c.scored(12, 13), b.scored(10, 11), d.scored(5, 6))
    yield _step(d.scored(6, 7), c.scored(13, 14), b.scored(11, 12))


def _sequences(prompts: Sequence[Sequence[int]]) -> list[ProbeSequence]:
    scattered = iter([block * _STRIDE % NUM_BLOCKS for block in range(NUM_BLOCKS)])
    sequences: list[ProbeSequence] = []
    for index, prompt in enumerate(prompts):
        is_last = index == len(prompts) - 1
        shared = sequences[0].blocks.block_ids[: _NUM_SHARED // BLOCK_SIZE] if is_last else []
        missing = -(-len(prompt) // BLOCK_SIZE) - len(shared)
        blocks = BlockTable([*shared, *(next(scattered) for _ in range(missing))])
        # Unlike the others, and scattered as they are.
        windows = BlockTable(NUM_BLOCKS - 1 - b for b in blocks.block_ids)
        sequences.append(ProbeSequence(index, prompt, blocks, windows, state_slot=index))
    return sequences


def _step(*reads: Read, copies: Sequence[StateCopy] = ()) -> ProbeStep:
    return ProbeStep(reads, tuple(copies))


# Chunks beside decodes, a prefix that is found, and drafts that are wrong.
SHORT: Final = Script(NUM_BLOCKS, _sequences, _steps)
