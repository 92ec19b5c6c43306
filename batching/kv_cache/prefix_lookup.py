"""Looks up which part of a waiting request is in the prefix cache or being computed."""

from collections.abc import Sequence
from typing import NamedTuple

from batching.block_manager import BlockHash
from batching.config import SchedulerConfig
from batching.kv_cache.partial_blocks import PartialBlocks, PartialHit
from batching.kv_cache.state_checkpoints import StateCheckpoints
from batching.kv_cache.window_blocks import WindowBlocks
from batching.prefix_cache import PrefixCache
from batching.priority_queue import RunningKey
from batching.request import BatchRequest


class PrefixHit(NamedTuple):
    """The beginning of a request that the prefix cache has.

    block_ids: the blocks that the request may share.
    num_found: how many leading blocks are in the pool.  Those beyond `block_ids` cannot be used: there
        is no recurrent state at their end, or the blocks of sliding-window layers are gone.
    awaited: the hash of the block that it could share next if another request has computed it; empty
        if there is none.
    partial: a block to copy, which shares the tokens after `block_ids`; None if there is none.
    """

    block_ids: list[int]
    num_found: int
    awaited: Sequence[BlockHash]
    partial: PartialHit | None = None


class PrefixLookup:
    """Finds what a waiting request may share.

    checkpoints, windows, partials: None where `KVCacheManager` has none.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        prefix_cache: PrefixCache,
        checkpoints: StateCheckpoints | None,
        windows: WindowBlocks | None,
        partials: PartialBlocks | None,
    ) -> None:
        self._block_size = config.block_size
        self._is_sharing = config.enable_prefix_cache
        self._prefix_cache = prefix_cache
        self._checkpoints = checkpoints
        self._windows = windows
        self._partials = partials

    def find(self, request: BatchRequest) -> PrefixHit:
        """Return the cached blocks that a waiting request may share.

        A request can start only where a recurrent state was kept, if the model has one, and where the blocks
        of sliding-window layers are still there.
        """
        hashes = self.shareable(request)
        block_ids = self._prefix_cache.lookup(hashes)
        num_found = len(block_ids)
        if self._checkpoints is None:
            num_usable = self.num_usable(hashes[:num_found])
            awaited = hashes[num_usable : num_usable + 1]
            partial = self._partial(request, num_usable)
            return PrefixHit(block_ids[:num_usable], num_found, awaited, partial)
        if self._checkpoints.num_slots == 0:
            return PrefixHit([], num_found, ())
        num_usable = self.num_usable(hashes[:num_found])
        # In the pool or being computed right now; a state is wanted where that ends.
        num_known = num_found + self._prefix_cache.num_in_flight(hashes[num_found:])
        junction = hashes[max(num_usable, num_known - 1) : num_known]
        for block_hash in junction:
            self._checkpoints.want(block_hash)
        return PrefixHit(block_ids[:num_usable], num_found, junction)

    def is_worth_waiting(self, hit: PrefixHit, key: RunningKey) -> bool:
        """Return whether a request that is due earlier computes the block that could be shared next."""
        return any(self._prefix_cache.is_in_flight(block_hash, key) for block_hash in hit.awaited)

    def hashes(self, request: BatchRequest) -> list[BlockHash]:
        """Return the hashes of the full blocks of a request; none without a prefix cache."""
        if not self._is_sharing:
            return []
        return request.hashes.extended(
            request.cache_ids, self._block_size, request.num_known_tokens
        )

    def num_usable(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many of these leading blocks a request can start behind."""
        num_usable = len(hashes)
        if self._checkpoints is not None:
            num_usable = self._checkpoints.num_usable(hashes)
        if self._windows is None:
            return num_usable
        num_seen = self._windows.num_usable(hashes[:num_usable])
        if self._checkpoints is None or num_seen == num_usable:
            return num_seen
        return self.num_usable(hashes[:num_seen])

    def _partial(self, request: BatchRequest, num_shared: int) -> PartialHit | None:
        if self._partials is None or request.needs_every_row:
            return None
        return self._partials.find(request, num_shared)

    def shareable(self, request: BatchRequest) -> list[BlockHash]:
        """Return the hashes of the blocks that a request may take from the prefix cache.

        The last token is always computed: the first output token is sampled from its logits, or its hidden
        state is pooled.
        """
        if request.needs_every_row:
            return []
        return self.hashes(request)[: (request.num_tokens - 1) // self._block_size]
