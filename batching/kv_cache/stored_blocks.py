"""What the scheduler asks the store of blocks."""

from collections.abc import Sequence
from typing import Protocol

from batching.block_manager import BlockHash
from batching.block_store.keys import Fetch, Key
from batching.block_store.statistics import StoreStats


class StoredBlocks(Protocol):
    """The store of one model, as the scheduler asks for it; `batching.block_store` has one on disk."""

    def has(self, key: Key) -> bool: ...

    @property
    def num_entries(self) -> int: ...

    @property
    def num_bytes(self) -> int:
        """The size of all entries."""
        ...

    @property
    def is_full(self) -> bool:
        """True while it takes no more than it has to write already."""
        ...

    def size_of(self, key: Key) -> int:
        """Return the bytes of an entry; 0 if it is not there."""
        ...

    @property
    def stats(self) -> StoreStats:
        """What it has done, and how long that took."""
        ...

    @property
    def host_bytes(self) -> int:
        """The size of those that are in the host's memory."""
        ...

    def seconds_to_read(self, keys: Sequence[Key]) -> float:
        """Return about how long reading these takes; 0 before anything was read."""
        ...

    def mark_used(self, hashes: Sequence[BlockHash], seconds: float) -> None:
        """Record that the blocks of a prefix are used until so many seconds from now: their entries are deleted later."""
        ...

    def end_retention(self, hashes: Sequence[BlockHash]) -> None:
        """Record that these blocks are used no longer than now."""
        ...

    def fetch(self, keys: Sequence[Key]) -> None:
        """Begin to read these, in this order, unless that was asked for."""
        ...

    def state_of(self, key: Key) -> Fetch:
        """Return what has become of an entry that was asked for."""
        ...

    def claim(self, keys: Sequence[Key]) -> None:
        """Keep these, which are READY, for the step that is planned, whatever else is dropped."""
        ...

    def drop_claimed(self) -> None:
        """Forget what was claimed: the step has failed."""
        ...

    def drop(self, keys: Sequence[Key]) -> None:
        """Forget what was asked for."""
        ...
