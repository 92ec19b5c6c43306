"""Slots for the recurrent states of requests, and which states become checkpoints."""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from batching.block_manager import BlockHash, PagedBlockManager
from batching.kv_cache.state_checkpoints import StateCheckpoints
from batching.request import BatchRequest
from batching.steps.stats import SchedulerStats
from batching.steps.step_plan import Slice, StateCopy

# The least distance in tokens, and the largest number, of the checkpoints of one prompt.
_MIN_DISTANCE: Final = 512
_MAX_CHECKPOINTS: Final = 8


class Checkpoint(NamedTuple):
    """A state in the prefix cache: its slot, and how many tokens it follows."""

    slot: int
    position: int


class StateSlots:
    """Gives admitted requests a slot for their recurrent states, and keeps some states as checkpoints.

    A state belongs to one position and cannot be rewound, but copying it costs nothing (the arrays are
    shared).  A slot holds one or more states, at known positions.  Only this class writes a request's
    `state_slot`.

    Checkpoints are states at block boundaries from which a later request may start: at the last boundary
    of a prompt and some before it, at boundaries that a request has asked for, and at the last boundary
    of a request that ends.  For the latter, a running request keeps the state at its last boundary.

    A slice whose drafts were rejected is not committed; the states at its start and at the boundary
    before it are still in the slot.

    Copies are made before the next step, in the order in which they were planned, so a slot can be reused
    immediately: it is read before it is written.
    """

    def __init__(
        self, block_manager: PagedBlockManager, max_num_seqs: int, num_checkpoints: int
    ) -> None:
        slots = range(max_num_seqs, max_num_seqs + num_checkpoints)
        self.checkpoints = StateCheckpoints(slots)
        self._block_manager = block_manager
        self._block_size = block_manager.block_size
        self._free = list(reversed(range(max_num_seqs)))
        # The positions of the states that a request may still use, by slot.
        self._positions: dict[int, tuple[int, ...]] = {}
        self._copies: list[StateCopy] = []
        self.num_missed_tokens = 0

    def add_to(self, stats: SchedulerStats) -> SchedulerStats:
        """Return the statistics with those of the checkpoints filled in."""
        return stats._replace(
            num_checkpoints=len(self.checkpoints),
            num_checkpoints_stored=self.checkpoints.num_stored,
            num_checkpoints_hit=self.checkpoints.num_hit,
            num_checkpoints_evicted=self.checkpoints.num_evicted,
            num_checkpoints_skipped=self.checkpoints.num_skipped,
            num_state_missed_tokens=self.num_missed_tokens,
        )

    def take_copies(self) -> tuple[StateCopy, ...]:
        """Return the copies to be made before the next step, each once."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def restore(
        self, request: BatchRequest, block_hash: BlockHash, position: int
    ) -> tuple[int, ...]:
        """Return the slots that get the state at a position, which is read: the request's, and that of a checkpoint."""
        assert request.state_slot is not None, "the request is admitted"
        self._positions[request.state_slot] = (position,)
        target = self.checkpoints.store(block_hash) if self.checkpoints.num_slots else None
        return (request.state_slot,) if target is None else (request.state_slot, target)

    def start(self, request: BatchRequest, cached: Sequence[BlockHash], num_found: int) -> None:
        """Give an admitted request a slot, with the state behind its cached blocks.

        num_found: how many blocks it could have shared, were there a state behind them.
        """
        slot = self._take_slot(request)
        if request.num_preemptions == 0:
            self.num_missed_tokens += (num_found - len(cached)) * self._block_size
        if cached:
            position = len(cached) * self._block_size
            self._copy(self.checkpoints.use(cached[-1]), slot, position)

    def fork(self, request: BatchRequest, fork: BatchRequest, position: int) -> None:
        """Give a fork a slot, with the state of the request at `position`."""
        assert request.state_slot is not None, "the request is admitted"
        self._copy(request.state_slot, self._take_slot(fork), position)

    def keep(
        self,
        request: BatchRequest,
        hashes: Sequence[BlockHash],
        stop: int,
        num_drafts: int,
        *,
        may_end: bool = False,
    ) -> tuple[int, ...]:
        """Return the positions whose states must stay after a slice that ends at `stop`.

        may_end: the request may end before the slice is committed; then the state at the last boundary
            before the slice is still needed.
        """
        assert request.state_slot is not None, "the request is admitted"
        start, known = request.num_computed_tokens, stop - num_drafts
        wanted = {start} if num_drafts else set()
        if hashes and self.checkpoints.num_slots:
            wanted.add(known // self._block_size * self._block_size)
            if may_end:
                wanted.add(start // self._block_size * self._block_size)
            wanted.update(self._checkpoint_positions(request, hashes, start, known))
        held = self._positions[request.state_slot]
        return tuple(sorted(p for p in wanted if p < stop and (p > start or p in held)))

    def commit(
        self, request: BatchRequest, s: Slice, hashes: Sequence[BlockHash]
    ) -> list[Checkpoint]:
        """Record the states of a request's slice; return the new checkpoints that are made of them."""
        self._positions[s.slot] = (*s.keep, s.stop)
        positions = self._checkpoint_positions(request, hashes, s.start, s.stop)
        return [c for p in positions for c in self._store(s.slot, hashes, p)]

    def release(self, request: BatchRequest, hashes: Sequence[BlockHash]) -> list[Checkpoint]:
        """Take back a request's slot, if it has one; return the checkpoint of its last boundary, if that is new."""
        if (slot := request.state_slot) is None:
            return []
        position = request.num_computed_tokens // self._block_size * self._block_size
        new = self._store(slot, hashes, position) if hashes and position else []
        del self._positions[slot]
        self._free.append(slot)
        request.state_slot = None
        return new

    def forget(self) -> None:
        """Drop all states, as after a failed step."""
        self.checkpoints.forget()
        self._copies.clear()
        self._positions = dict.fromkeys(self._positions, ())

    def _take_slot(self, request: BatchRequest) -> int:
        slot = request.state_slot = self._free.pop()
        self._positions[slot] = ()
        return slot

    def _copy(self, source: int, target: int, position: int) -> None:
        self._copies.append(StateCopy(source, target, position))
        self._positions[target] = (position,)

    def _store(self, slot: int, hashes: Sequence[BlockHash], position: int) -> list[Checkpoint]:
        """Make a checkpoint of a state in a slot, if it is new; without its blocks it would not be found."""
        block_hash = hashes[position // self._block_size - 1]
        if not self.checkpoints.num_slots or self._block_manager.find(block_hash) is None:
            self.checkpoints.num_skipped += 1
            return []
        if position not in self._positions[slot]:
            return []
        if (target := self.checkpoints.store(block_hash)) is None:
            return []
        self._copies.append(StateCopy(slot, target, position))
        return [Checkpoint(target, position)]

    def _checkpoint_positions(
        self, request: BatchRequest, hashes: Sequence[BlockHash], start: int, stop: int
    ) -> Iterator[int]:
        """Yield the boundaries within `(start, stop]` where a later request may begin."""
        first, last = start // self._block_size, min(stop // self._block_size, len(hashes))
        for block_hash, index in zip(hashes[first:last], range(first + 1, last + 1), strict=True):
            position = index * self._block_size
            if self._is_chosen(request, position) or self.checkpoints.is_wanted(block_hash):
                yield position

    def _is_chosen(self, request: BatchRequest, position: int) -> bool:
        """True at the last boundary that a look-up of this prompt can return, and some before.

        Those are multiples of a power of two, so that prompts of any length choose alike.
        """
        last = (request.num_prompt_tokens - 1) // self._block_size * self._block_size
        if position > last - _MIN_DISTANCE:
            return position == last
        distance = max(_MIN_DISTANCE, -(-request.num_prompt_tokens // _MAX_CHECKPOINTS))
        num_blocks = 1 << (-(-distance // self._block_size) - 1).bit_length()
        return position % (num_blocks * self._block_size) == 0
