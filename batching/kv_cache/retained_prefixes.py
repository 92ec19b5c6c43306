"""Retains prefixes in all pools: their blocks, and what a request needs that begins at their end."""

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from batching.block_manager import BlockHash, PagedBlockManager
from batching.kv_cache.prefix_lookup import PrefixLookup
from batching.kv_cache.retained_blocks import Group, RetainedBlocks
from batching.kv_cache.state_checkpoints import StateCheckpoints
from batching.kv_cache.window_blocks import WindowBlocks
from batching.request import BatchRequest

# Of each pool, what may be retained.
_SHARE: Final = 0.5


class RetainedPrefix(NamedTuple):
    """Blocks of a request that leaves, and the blocks of others that gave way to them.

    seconds: how long the blocks are used from now on.
    """

    hashes: Sequence[BlockHash]
    seconds: float
    given_way: Sequence[BlockHash]


class _Evicting(Protocol):
    """Something that evicts what is retained behind all else."""

    def retain(self, block_hash: BlockHash, *, is_retained: bool = True) -> None: ...


class _Pool:
    """A pool, of which some is retained."""

    def __init__(self, pool: _Evicting, size: int) -> None:
        self.retained: Final = RetainedBlocks(int(size * _SHARE))
        self._pool = pool

    def retain(self, group: Group, hashes: Sequence[BlockHash], now: float) -> list[BlockHash]:
        """Retain these; return those that give way, perhaps some of these."""
        given_way = self.retained.retain(group, hashes, now)
        self._set(hashes, is_retained=True)
        self._set(given_way, is_retained=False)
        return given_way

    def expire(self, now: float) -> None:
        self._set(self.retained.expire(now), is_retained=False)

    def drop(self, hashes: Sequence[BlockHash]) -> None:
        self._set(self.retained.drop(hashes), is_retained=False)

    def _set(self, hashes: Sequence[BlockHash], *, is_retained: bool) -> None:
        for block_hash in hashes:
            self._pool.retain(block_hash, is_retained=is_retained)


class RetainedPrefixes:
    """Retains all blocks of a prefix in the main pool, and what they are of use with.

    That is the last recurrent state that the prefix has, and the blocks of sliding-window layers that are seen
    from there.  Each pool has bounds of its own; what gives way in the main pool is retained in none.

    checkpoints, windows: None where `KVCacheManager` has none.
    """

    def __init__(
        self,
        prefixes: PrefixLookup,
        block_manager: PagedBlockManager,
        checkpoints: StateCheckpoints | None,
        windows: WindowBlocks | None,
    ) -> None:
        self._prefixes = prefixes
        self._windows = windows
        self._block_size = block_manager.block_size
        self._blocks = _Pool(block_manager, block_manager.num_blocks)
        self._of_states: _Pool | None = None
        if checkpoints is not None:
            self._of_states = _Pool(checkpoints, checkpoints.num_slots)
        self._of_windows: _Pool | None = None
        if windows is not None:
            self._of_windows = _Pool(windows.block_manager, windows.block_manager.num_blocks)

    @property
    def blocks(self) -> RetainedBlocks:
        """What is retained of the main pool."""
        return self._blocks.retained

    def retain(
        self, request: BatchRequest, hashes: Sequence[BlockHash], now: float
    ) -> list[RetainedPrefix]:
        """Retain what a request that leaves has asked for; the longest time is that of the first blocks.

        Return all its computed blocks: those behind the prefixes are used no longer.
        """
        retention, size = request.spec.retention, self._block_size
        first, num_computed = 0, min(request.num_computed_tokens, len(hashes) * size)
        retained = []
        for num_tokens, seconds in retention.prefixes:
            # The next turn may leave out of the output what was only thought.
            ends = [request.num_prompt_tokens, num_computed] if num_tokens is None else [num_tokens]
            ends = [min(end, num_computed) // size for end in ends]
            group = Group(retention.client, retention.group, seconds)
            given_way = self._retain(group, hashes, first, ends, now)
            retained.append(RetainedPrefix(hashes[first : ends[-1]], seconds, given_way))
            first = max(first, ends[-1])
        retained.append(RetainedPrefix(hashes[first : num_computed // size], 0.0, ()))
        return retained

    def _retain(
        self,
        group: Group,
        hashes: Sequence[BlockHash],
        first: int,
        ends: Sequence[int],
        now: float,
    ) -> list[BlockHash]:
        """Retain a prefix from block `first` to the last of `ends`; return the blocks that give way.

        ends: in blocks, where later requests may begin.
        """
        stop = ends[-1]
        given_way = self._blocks.retain(group, hashes[first:stop], now)
        for pool in self._beside_blocks():
            pool.drop(given_way)
        while stop > first and hashes[stop - 1] not in self.blocks:
            stop -= 1
        if stop > first:
            self._retain_ends(group, hashes, [min(end, stop) for end in ends], now)
        return given_way

    def expire(self, now: float) -> None:
        """Retain no longer what is over."""
        for pool in (self._blocks, *self._beside_blocks()):
            pool.expire(now)

    def forget(self) -> None:
        """Drop all, since their contents are lost."""
        for pool in (self._blocks, *self._beside_blocks()):
            pool.retained.forget()

    def _beside_blocks(self) -> list[_Pool]:
        return [each for each in (self._of_states, self._of_windows) if each is not None]

    def _retain_ends(
        self, group: Group, hashes: Sequence[BlockHash], ends: Sequence[int], now: float
    ) -> None:
        usable = sorted({self._prefixes.num_usable(hashes[:end]) for end in ends} - {0})
        if self._of_states is not None:
            self._of_states.retain(group, [hashes[end - 1] for end in usable], now)
        if self._of_windows is not None:
            assert self._windows is not None, "they are its blocks"
            seen = {i for end in usable for i in self._windows.visible_before(end)}
            self._of_windows.retain(group, [hashes[i] for i in sorted(seen)], now)
