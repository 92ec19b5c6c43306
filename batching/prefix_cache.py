"""Finds the blocks that already contain the beginning of a prompt."""

from array import array
from collections.abc import Sequence
from hashlib import sha256

from batching.block_manager import BlockContents, BlockHash, BlockTable, PagedBlockManager
from batching.priority_queue import QueueKey


class HashChain:
    """The chained hashes of a token sequence's full blocks, extended as it grows.

    Hash i is sha256 over hash i-1 and the tokens of block i, so it stands for the whole
    prefix up to there.  The first link is `extra_key`: what else makes the cached tensors
    differ (a cache salt, an adapter).  Never Python's `hash()`, whose collisions can be provoked.
    """

    def __init__(self, extra_key: bytes = b"") -> None:
        self._parent = BlockHash(sha256(extra_key).digest())
        self._hashes: list[BlockHash] = []

    def extended(
        self, token_ids: Sequence[int], block_size: int, num_tokens: int | None = None
    ) -> list[BlockHash]:
        """Return the hashes of all full blocks of the first `num_tokens` of `token_ids`, or of all.

        Only the new ones are hashed.
        """
        num_tokens = len(token_ids) if num_tokens is None else num_tokens
        for index in range(len(self._hashes), num_tokens // block_size):
            block = token_ids[index * block_size : (index + 1) * block_size]
            self._hashes.append(hash_of(self.contents(index, block)))
        return self._hashes

    def contents(self, index: int, token_ids: Sequence[int]) -> BlockContents:
        """Return what block `index` has that begins with these tokens; those before it are hashed."""
        parent = self._hashes[index - 1] if index else self._parent
        return BlockContents(parent, array("q", token_ids))


def hash_of(contents: BlockContents) -> BlockHash:
    return BlockHash(sha256(contents.parent + contents.tokens.tobytes()).digest())


class PrefixCache:
    """Shares full blocks between requests that begin with the same tokens.

    The blocks are the block manager's, which also evicts them; this class maps tokens to
    blocks.  It also knows which blocks are in flight (being computed right now), so that a
    second request with the same prefix can wait for them and not compute them again.

    `num_queried_tokens` and `num_hit_tokens` count prompt tokens of admitted requests.
    """

    def __init__(self, block_manager: PagedBlockManager) -> None:
        self._block_manager = block_manager
        self._in_flight: dict[BlockHash, QueueKey] = {}
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def lookup(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the longest run of blocks from the beginning that is in the pool."""
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
        """Make blocks `[start, stop)` of a table findable: their tensors are written.

        contents: of these blocks, if they are to be found by how they begin, too.
        """
        for index in range(start, stop):
            of_block = contents[index - start] if contents else None
            self._block_manager.publish(table.block_ids[index], hashes[index], of_block)
            self._in_flight.pop(hashes[index], None)

    def mark_in_flight(self, hashes: Sequence[BlockHash], key: QueueKey) -> None:
        """Record that the request with this key computes these blocks from now on.

        Of several requests, the one that is due first counts: it computes them first.
        """
        for block_hash in hashes:
            self._in_flight[block_hash] = min(key, self._in_flight.get(block_hash, key))

    def is_in_flight(self, block_hash: BlockHash, key: QueueKey) -> bool:
        """True while a request that is due before `key` computes this very block.

        Waiting for one that is due later would let it overtake.
        """
        return self._in_flight.get(block_hash, key) < key

    def num_in_flight(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many blocks from the first one on are being computed by any request."""
        missing = (i for i, block_hash in enumerate(hashes) if block_hash not in self._in_flight)
        return next(missing, len(hashes))

    def clear_in_flight(self, hashes: Sequence[BlockHash], key: QueueKey) -> None:
        """Drop the blocks that a request has not computed when it stops."""
        for block_hash in hashes:
            if self._in_flight.get(block_hash) == key:
                del self._in_flight[block_hash]

    def record(self, num_tokens: int, num_hit_tokens: int) -> None:
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += num_hit_tokens
