"""The sequences and the steps of the self-check, which no scheduler plans."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from batching.block_manager import BlockTable
from batching.steps.step_plan import Slice, StateCopy


@dataclass
class ProbeSequence:
    """The tokens of a sequence, and the blocks and the slot that it has."""

    sequence_id: int
    token_ids: Sequence[int]
    blocks: BlockTable
    window_blocks: BlockTable = field(default_factory=BlockTable)
    state_slot: int | None = None

    def scored(self, start: int, stop: int, keep: tuple[int, ...] = ()) -> "Read":
        """Return a read of `[start, stop)`, all of whose tokens get logits."""
        return Read(self, start, stop, keep, num_scored=stop - start)

    def sampled(self, start: int, stop: int, keep: tuple[int, ...] = ()) -> "Read":
        """Return a read of `[start, stop)`, whose last token gets logits."""
        return Read(self, start, stop, keep, num_samples=1)


class Read(NamedTuple):
    """Tokens of a sequence that a step processes; see `Slice`."""

    sequence: ProbeSequence
    start: int
    stop: int
    keep: tuple[int, ...] = ()
    num_scored: int = 0
    num_samples: int = 0

    def to_slice(self) -> Slice:
        """Return the slice, with the blocks that the sequence has now."""
        return Slice(
            self.sequence.sequence_id,
            self.start,
            tuple(self.sequence.token_ids[self.start : self.stop]),
            self.sequence.blocks.value,
            self.sequence.window_blocks.value,
            self.sequence.state_slot,
            num_samples=self.num_samples,
            num_scored=self.num_scored,
            keep=self.keep,
        )


class ProbeStep(NamedTuple):
    """The reads of one step, after copies of states."""

    reads: Sequence[Read]
    state_copies: tuple[StateCopy, ...] = ()
