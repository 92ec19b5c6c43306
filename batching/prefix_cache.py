"""The prefix cache: finds KV blocks that already contain the beginning of a prompt."""

from array import array
from collections.abc import Sequence
from hashlib import sha256

from batching.block_manager import BlockContents, BlockHash, BlockTable, PagedBlockManager
from batching.priority_queue import RunningKey


class HashChain:
    """The chained hashes of a token sequence's full blocks, extended as the sequence grows.

    Hash i is the SHA-256 of hash i-1 and the tokens of block i, so it identifies the whole prefix up to
    and including that block.  The chain starts from `extra_key`: whatever else makes cached tensors
    differ, such as a cache salt.  Python's `hash()` would not do, since its collisions can be provoked.
    """

    def __init__(self, extra_key: bytes = b"") -> None:
        self._parent = BlockHash(sha256(extra_key).digest())
        self._hashes: list[BlockHash] = []

    def extended(
        self, token_ids: Sequence[int], block_size: int, num_tokens: int | None = None
    ) -> list[BlockHash]:
        """Return the hashes of the full blocks of `token_ids[:num_tokens]`; None is all tokens.

        Only blocks that are new since the last call are hashed.
        """
        num_tokens = len(token_ids) if num_tokens is None else num_tokens
        for index in range(len(self._hashes), num_tokens // block_size):
            block = token_ids[index * block_size : (index + 1) * block_size]
            self._hashes.append(hash_of(self.contents(index, block)))
        return self._hashes

    def contents(self, index: int, token_ids: Sequence[int]) -> BlockContents:
        """Return the identity of a block with these tokens at position `index` of the sequence.

        The blocks before it must have been hashed.
        """
        parent = self._hashes[index - 1] if index else self._parent
        return BlockContents(parent, array("q", token_ids))


def hash_of(contents: BlockContents) -> BlockHash:
    """Return the SHA-256 of a block's parent hash and its tokens, which identifies the block."""
    return BlockHash(sha256(contents.parent + contents.tokens.tobytes()).digest())


class PrefixCache:
    """Shares full blocks between requests that begin with the same tokens.

    The blocks belong to the block manager, which also evicts them; this class looks blocks up by hash.
    It also knows which blocks are in flight (being computed by an admitted request), so that a second
    request with the same prefix can wait for them instead of computing them again.

    num_queried_tokens, num_hit_tokens: prompt tokens of admitted requests, and how many of them were
        found.
    """

    def __init__(self, block_manager: PagedBlockManager) -> None:
        self._block_manager = block_manager
        self._in_flight: dict[BlockHash, RunningKey] = {}
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def lookup(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the ids of the leading blocks that are in the pool, up to the first that is not."""
        block_ids: list[int] = []
        for block_hash in hashes:
            if (block_id := self._block_manager.find(block_hash)) is None:
                break
            block_ids.append(block_id)
        return block_ids

    def insert(
        self,
        hashes: Sequence[BlockHash],
        table: BlockTable,
        start: int,
        stop: int,
        contents: Sequence[BlockContents] = (),
    ) -> None:
        """Make blocks `[start, stop)` of a table findable; their keys and values have been written.

        contents: one entry per block, to find the blocks by their first tokens as well; empty does not.
        """
        for index in range(start, stop):
            of_block = contents[index - start] if contents else None
            self._block_manager.publish(table.block_ids[index], hashes[index], of_block)
            self._in_flight.pop(hashes[index], None)

    def mark_in_flight(self, hashes: Sequence[BlockHash], key: RunningKey) -> None:
        """Record that the request with this key computes these blocks from now on.

        If several requests compute a block, the one that is due first counts: it is served first.
        """
        for block_hash in hashes:
            self._in_flight[block_hash] = min(key, self._in_flight.get(block_hash, key))

    def is_in_flight(self, block_hash: BlockHash, key: RunningKey) -> bool:
        """Return whether a request that is due before `key` is computing this block.

        A request must not wait for one that is due later, which would overtake it that way.
        """
        return self._in_flight.get(block_hash, key) < key

    def num_in_flight(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks are being computed, by any request."""
        missing = (i for i, block_hash in enumerate(hashes) if block_hash not in self._in_flight)
        return next(missing, len(hashes))

    def clear_in_flight(self, hashes: Sequence[BlockHash], key: RunningKey) -> None:
        """Forget the blocks that a request was going to compute; it is leaving."""
        for block_hash in hashes:
            if self._in_flight.get(block_hash) == key:
                del self._in_flight[block_hash]

    def record(self, num_tokens: int, num_hit_tokens: int) -> None:
        """Count the prompt tokens of an admitted request, and those that were found."""
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += num_hit_tokens
