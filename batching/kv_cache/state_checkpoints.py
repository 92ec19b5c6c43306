"""The recurrent states in the prefix cache, by the prefix that they follow."""

from collections import OrderedDict
from collections.abc import Sequence

from batching.block_manager import BlockHash


class StateCheckpoints:
    """Maps the hash of a block to the slot of the recurrent state after it; evicts the least recently used.

    Those that are retained are evicted when all are.

    If a request finds blocks but no state at their end, it marks the hash as wanted; the next request that
    computes that block stores the state.

    Invariants, checked by tests/batching/kv_cache/test_state_checkpoints.py:

    - each slot of `slots` is free or belongs to one hash
    - a hash has one slot, or is wanted, or neither
    - no more hashes are wanted than there are slots
    """

    def __init__(self, slots: range) -> None:
        self.num_stored = 0
        self.num_hit = 0
        self.num_evicted = 0
        self.num_skipped = 0
        self.num_slots = len(slots)
        self._free = list(reversed(slots))
        # Both least recently used first.
        self._slot_by_hash: OrderedDict[BlockHash, int] = OrderedDict()
        self._wanted: OrderedDict[BlockHash, None] = OrderedDict()
        self._retained: set[BlockHash] = set()

    def __len__(self) -> int:
        return len(self._slot_by_hash)

    def num_usable(self, hashes: Sequence[BlockHash]) -> int:
        """Return the length of the longest prefix of these hashes that ends with a checkpoint."""
        for index in range(len(hashes), 0, -1):
            if hashes[index - 1] in self._slot_by_hash:
                return index
        return 0

    def find(self, block_hash: BlockHash) -> int | None:
        """Return the slot of a checkpoint; None if there is none."""
        return self._slot_by_hash.get(block_hash)

    def use(self, block_hash: BlockHash) -> int:
        """Return the slot of a checkpoint for a request that begins there."""
        self._slot_by_hash.move_to_end(block_hash)
        self.num_hit += 1
        return self._slot_by_hash[block_hash]

    def store(self, block_hash: BlockHash) -> int | None:
        """Return the slot for a new checkpoint; None if this hash has one."""
        assert self.num_slots > 0, "the caller checks"
        if block_hash in self._slot_by_hash:
            self._slot_by_hash.move_to_end(block_hash)
            return None
        if not self._free:
            evicted = next(
                (each for each in self._slot_by_hash if each not in self._retained),
                next(iter(self._slot_by_hash)),
            )
            self._free.append(self._slot_by_hash.pop(evicted))
            self._retained.discard(evicted)
            self.num_evicted += 1
        self._wanted.pop(block_hash, None)
        self._slot_by_hash[block_hash] = self._free.pop()
        self.num_stored += 1
        return self._slot_by_hash[block_hash]

    def retain(self, block_hash: BlockHash, *, is_retained: bool = True) -> None:
        """Evict the checkpoint with this hash, if there is one, behind those that are not retained; or no longer."""
        if is_retained and block_hash in self._slot_by_hash:
            self._retained.add(block_hash)
        else:
            self._retained.discard(block_hash)

    def want(self, block_hash: BlockHash) -> None:
        """Ask the next request that computes this block for a checkpoint, if there is none."""
        if block_hash in self._slot_by_hash:
            self._slot_by_hash.move_to_end(block_hash)
            return
        self._wanted[block_hash] = None
        self._wanted.move_to_end(block_hash)
        if len(self._wanted) > self.num_slots:
            self._wanted.popitem(last=False)

    def is_wanted(self, block_hash: BlockHash) -> bool:
        return block_hash in self._wanted

    def forget(self) -> None:
        """Drop all checkpoints, as after a failed step."""
        self._free += self._slot_by_hash.values()
        self._slot_by_hash.clear()
        self._retained.clear()
