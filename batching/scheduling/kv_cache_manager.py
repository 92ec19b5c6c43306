"""Which KV blocks a request uses, shares and publishes."""

from batching.block_manager import BlockCopy, BlockHash, NoFreeBlocks, PagedBlockManager
from batching.config import SchedulerConfig
from batching.prefix_cache import PrefixCache
from batching.priority_queue import QueueKey
from batching.request import BatchRequest


class KVCacheManager:
    """Gives requests their blocks, from the pool and from the prefix cache.

    Only this class writes a request's `block_table` and `num_computed_tokens`.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_manager = PagedBlockManager(config.num_blocks, config.block_size)
        self.prefix_cache = PrefixCache(self.block_manager)
        self._is_sharing = config.enable_prefix_cache

    def cached_blocks(self, request: BatchRequest) -> list[int]:
        """Return the blocks that already contain the beginning of a waiting request."""
        return self.prefix_cache.lookup(self._shareable(request))

    def num_blocks_to_start(self, request: BatchRequest, cached: list[int]) -> int:
        """Return how many free blocks it takes to start a request on these cached ones.

        A cached block without a reference leaves the free blocks when it is shared.
        """
        num_idle = sum(not self.block_manager.blocks[b].ref_count for b in cached)
        return self.block_manager.blocks_for(request.num_tokens) - len(cached) + num_idle

    def awaits_prefix(self, request: BatchRequest, num_cached: int, key: QueueKey) -> bool:
        """True if the next block the request could share is being computed right now."""
        next_one = self._shareable(request)[num_cached : num_cached + 1]
        return any(self.prefix_cache.is_in_flight(block_hash, key) for block_hash in next_one)

    def start(self, request: BatchRequest, cached: list[int], key: QueueKey) -> None:
        """Give an admitted request room for all its tokens; the caller has checked the room."""
        for block_id in cached:
            self.block_manager.increment_ref(block_id)
        request.block_table.extend(cached)
        has_grown = self.grow(request, [])
        assert has_grown, "room was checked"
        request.num_computed_tokens = len(cached) * self.block_manager.block_size
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            self.prefix_cache.record(request.num_tokens, request.num_cached_tokens)
        self.prefix_cache.mark_in_flight(self._hashes(request)[len(cached) :], key)

    def fork(self, request: BatchRequest, fork: BatchRequest, num_tokens: int) -> None:
        """Share all blocks of a request, of which `num_tokens` tokens are computed."""
        fork.block_table = self.block_manager.fork(request.block_table)
        fork.num_computed_tokens = num_tokens
        fork.num_cached_tokens = request.num_cached_tokens

    def grow(self, request: BatchRequest, copies: list[BlockCopy]) -> bool:
        """Make room for all tokens of a request; False, and no change, if there is none.

        `copies` gets what is to be copied before the request writes into a shared block.
        """
        table = request.block_table
        missing = self.block_manager.blocks_for(request.num_tokens) - len(table)
        if missing == 0:
            return self._make_writable(request, copies)
        if (block_ids := self.block_manager.allocate(missing, table.last_block)) is None:
            return False
        table.extend(block_ids)
        return True

    def commit(self, request: BatchRequest, start: int, stop: int) -> None:
        """Record that tokens `[start, stop)` are computed; full blocks can be shared now."""
        request.num_computed_tokens = stop
        hashes = self._hashes(request)
        first, last = (at // self.block_manager.block_size for at in (start, stop))
        self.prefix_cache.insert(hashes, request.block_table, first, min(last, len(hashes)))

    def release(self, request: BatchRequest, key: QueueKey) -> None:
        """Take back all blocks of a request."""
        self.prefix_cache.clear_in_flight(self._hashes(request), key)
        self.block_manager.release(request.block_table.block_ids)
        request.block_table.clear()
        request.num_computed_tokens = 0

    def _make_writable(self, request: BatchRequest, copies: list[BlockCopy]) -> bool:
        """Make the block that is written next the request's own."""
        index = request.num_computed_tokens // self.block_manager.block_size
        try:
            copy = self.block_manager.make_writable(request.block_table, index)
        except NoFreeBlocks:
            return False
        if copy is not None:
            copies.append(copy)
        return True

    def _shareable(self, request: BatchRequest) -> list[BlockHash]:
        """Return the hashes of the blocks that a request may take from the prefix cache.

        The last token is always computed: the first output token is sampled from its logits.
        """
        if request.wants_prompt_logprobs:
            return []
        return self._hashes(request)[: (request.num_tokens - 1) // self.block_manager.block_size]

    def _hashes(self, request: BatchRequest) -> list[BlockHash]:
        if not self._is_sharing:
            return []
        return request.hashes.extended(request.token_ids, self.block_manager.block_size)
