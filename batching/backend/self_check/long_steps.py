"""Steps over a context as long as those for which GPUs have attention kernels of their own.

MLX on CUDA has one for a query of one token over 256 keys and more, where 256 divides the slots of the array
that they are a part of: the pool, or what was gathered.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from batching.backend.self_check.probe_sequence import ProbeSequence, ProbeStep
from batching.backend.self_check.steps import BLOCK_SIZE, Script
from batching.block_manager import BlockTable
from batching.steps.step_plan import StateCopy

# 1,024 slots: 256 divides them.
_NUM_BLOCKS: Final = 256
# For the last tokens 512 slots are gathered: 256 divides these, too.
MAX_TOKENS: Final = 511
# With fewer there is nothing that other steps have not.
MIN_TOKENS: Final = 64
# Tokens at the end of each sequence that are read one by one.
_NUM_DECODES: Final = 7
# Where the run of the first sequence begins: what reads from the pool's beginning reads something else.
_FIRST_BLOCK: Final = 5
_FIRST_WINDOW_BLOCK: Final = 9
_CHECKPOINT: Final = 2


def long_prompt(vocab_size: int, num_tokens: int, salt: int) -> list[int]:
    """Return a prompt of both sequences; with another salt, another."""
    return [(7919 * (i + 1) + 104729 * salt) % vocab_size for i in range(num_tokens)]


def _sequences(prompts: Sequence[Sequence[int]]) -> list[ProbeSequence]:
    """Return one sequence in a run of blocks, and one that finds most of these and has others behind."""
    num_blocks = -(-len(prompts[0]) // BLOCK_SIZE)
    num_shared = _num_shared(prompts[0]) // BLOCK_SIZE
    own = [_NUM_BLOCKS - 1 - 2 * i for i in range(num_blocks - num_shared)]

    def tables(first: int) -> list[BlockTable]:
        run = range(first, first + num_blocks)
        return [BlockTable(run), BlockTable([*run[:num_shared], *own])]

    everywhere = zip(prompts, tables(_FIRST_BLOCK), tables(_FIRST_WINDOW_BLOCK), strict=True)
    return [
        ProbeSequence(i, prompt, table, window_table, state_slot=i)
        for i, (prompt, table, window_table) in enumerate(everywhere)
    ]


def _num_shared(prompt: Sequence[int]) -> int:
    """Return how many tokens of the first sequence the second finds: less than those read in chunks."""
    return (len(prompt) - _NUM_DECODES - 1) // BLOCK_SIZE * BLOCK_SIZE


def _steps(sequences: Sequence[ProbeSequence]) -> Iterator[ProbeStep]:
    """Yield steps with decodes alone, in a run and elsewhere, and together, with one length and with two."""
    a, b = sequences
    shared, at = _num_shared(a.token_ids), len(a.token_ids) - _NUM_DECODES

    def decodes(of_a: int | None, of_b: int | None) -> ProbeStep:
        pairs = ((a, of_a), (b, of_b))
        return ProbeStep(tuple(r.sampled(at + i, at + i + 1) for r, i in pairs if i is not None))

    yield ProbeStep((a.sampled(0, at // 2),))
    yield ProbeStep((a.sampled(at // 2, at, (shared,)),))
    found = (StateCopy(0, _CHECKPOINT, shared), StateCopy(_CHECKPOINT, 1, shared))
    yield ProbeStep((a.sampled(at, at + 1), b.sampled(shared, at)), state_copies=found)
    yield decodes(1, None)
    yield decodes(2, 0)
    yield decodes(None, 1)
    yield decodes(None, 2)
    yield decodes(3, 3)
    yield decodes(4, None)
    yield decodes(5, 4)
    yield decodes(None, 5)
    yield decodes(6, 6)


LONG: Final = Script(_NUM_BLOCKS, _sequences, _steps)
