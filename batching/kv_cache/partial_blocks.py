"""Reuse within a block: a request starts on a copy of a block that shares its first tokens."""

from typing import NamedTuple

from batching.block_manager import BlockHash, PagedBlockManager
from batching.prefix_cache import hash_of
from batching.request import BatchRequest


class PartialHit(NamedTuple):
    """A cached block whose first `num_tokens` tokens are the next ones of a request."""

    block_id: int
    block_hash: BlockHash
    num_tokens: int


class PartialBlocks:
    """Finds blocks to copy for requests that share only their first tokens.

    Full blocks are shared.  A prompt that differs within its next block gets a copy of the block that has
    the longest beginning in common with it.  So does a prompt that ends with a full block, since its last
    token is always computed.  When a request ends, its last, partly filled block is kept findable as
    well, so that the next turn of a chat continues where the previous one ended.

    Nothing is reserved for a copy: if its source is evicted to make room for the request, the request
    starts at the beginning of the block.

    min_tokens: the least number of common tokens for which a block is copied, and the least number of
        tokens for which a request's last block is kept.
    """

    def __init__(self, block_manager: PagedBlockManager, min_tokens: int) -> None:
        self._block_manager = block_manager
        self._min_tokens = min_tokens

    def find(self, request: BatchRequest, index: int) -> PartialHit | None:
        """Return the block to copy for block `index` of a waiting request, whose hashes are computed.

        The last token of a request is always computed, because its logits are needed.
        """
        size = self._block_manager.block_size
        tokens = request.cache_ids[index * size : min((index + 1) * size, request.num_tokens - 1)]
        if len(tokens) < self._min_tokens:
            return None
        contents = request.hashes.contents(index, tokens)
        num_tokens, block_id = self._block_manager.find_beginning(contents)
        if num_tokens < self._min_tokens:
            return None
        block_hash = self._block_manager.blocks[block_id].block_hash
        assert block_hash is not None, "a block with contents has a hash"
        return PartialHit(block_id, block_hash, num_tokens)

    def release(self, request: BatchRequest) -> None:
        """Keep the request's last block findable; call this before its blocks are released."""
        index, num_tokens = divmod(request.num_computed_tokens, self._block_manager.block_size)
        if num_tokens < self._min_tokens:
            return
        block = self._block_manager.blocks[request.block_table.block_ids[index]]
        if block.ref_count > 1:
            return
        start = index * self._block_manager.block_size
        tokens = request.cache_ids[start : start + num_tokens]
        contents = request.hashes.contents(index, tokens)
        num_common, _ = self._block_manager.find_beginning(contents)
        if num_common < num_tokens:
            self._block_manager.publish(block.block_id, hash_of(contents), contents)
