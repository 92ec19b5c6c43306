"""Which cached blocks are evicted behind all others, whose they are, and for how long."""

from collections import OrderedDict
from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

from batching.block_manager import BlockHash

# Of all blocks that may be retained, those of one group, and those that are pinned, of all groups.
_SHARE_OF_GROUP: Final = 0.5
# Between looks for what is over, in seconds.
_EXPIRY_INTERVAL: Final = 1.0


class _Group(NamedTuple):
    """Blocks of one owner and one time: those that were retained first are over first."""

    name: str
    seconds: float

    @property
    def is_pinned(self) -> bool:
        return self.seconds == inf


class RetainedBlocks:
    """Bounds what is retained: of each group, and of all together; the least recently used ones give way.

    A block belongs to one group, where it is retained for longest.  The blocks of a prefix give way from its end.
    Pinned blocks, those without a time limit, do not give way: when there is no more room, no others are pinned.

    max_blocks: of all groups.
    num_pinned, max_pinned: of all groups.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks: Final = max_blocks
        self._max_of_group = int(max_blocks * _SHARE_OF_GROUP)
        self.max_pinned: Final = self._max_of_group
        self.num_pinned = 0
        self._group_of: dict[BlockHash, _Group] = {}
        # When each is over, by group; groups and blocks least recently used first.
        self._groups: OrderedDict[_Group, OrderedDict[BlockHash, float]] = OrderedDict()
        self._next_look = 0.0

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._group_of

    def retain(
        self, name: str, hashes: Sequence[BlockHash], seconds: float, now: float
    ) -> list[BlockHash]:
        """Retain blocks of a prefix, in its order, for so long from now; return those that give way.

        These are blocks of others, or the last ones of this prefix.
        """
        group, until = _Group(name, seconds), now + seconds
        if group.is_pinned:
            return self._pin(group, hashes)
        mine = [each for each in reversed(hashes) if not self._is_in_longer(each, group, until)]
        self._add(group, mine, until)
        given_way: list[BlockHash] = []
        while len(self._groups.get(group, ())) > self._max_of_group:
            given_way.append(self._pop(group))
        return given_way + self._bound()

    def expire(self, now: float) -> list[BlockHash]:
        """Return the blocks whose time is over, each once; it looks once a second."""
        if now < self._next_look:
            return []
        self._next_look = now + _EXPIRY_INTERVAL
        over: list[BlockHash] = []
        for group, members in [*self._groups.items()]:
            while members and next(iter(members.values())) <= now:
                over.append(self._pop(group))
        return over

    def forget(self) -> None:
        """Drop all, since their contents are lost."""
        self._groups.clear()
        self._group_of.clear()
        self.num_pinned = 0

    def _pin(self, group: _Group, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        new = [each for each in hashes if not self._is_pinned(each)]
        room = self.max_pinned - self.num_pinned
        self._add(group, new[:room], inf)
        return [each for each in new[room:] if each not in self] + self._bound()

    def _add(self, group: _Group, hashes: Sequence[BlockHash], until: float) -> None:
        """Put blocks into a group, as its most recently used ones, and take them out of others."""
        if not hashes:
            return
        for block_hash in hashes:
            if block_hash in self._group_of:
                self._remove(block_hash)
        members = self._groups.setdefault(group, OrderedDict())
        self._groups.move_to_end(group)
        for block_hash in hashes:
            members[block_hash] = until
            self._group_of[block_hash] = group
        self.num_pinned += group.is_pinned * len(hashes)

    def _bound(self) -> list[BlockHash]:
        """Remove the least recently used blocks, so that there are not too many in all; return them."""
        given_way: list[BlockHash] = []
        while len(self) > self.max_blocks:
            group = next(each for each in self._groups if not each.is_pinned)
            given_way.append(self._pop(group))
        return given_way

    def _is_pinned(self, block_hash: BlockHash) -> bool:
        group = self._group_of.get(block_hash)
        return group is not None and group.is_pinned

    def _is_in_longer(self, block_hash: BlockHash, group: _Group, until: float) -> bool:
        """Return whether another group retains a block for longer."""
        other = self._group_of.get(block_hash)
        if other is None or other == group:
            return False
        return self._groups[other][block_hash] > until

    def _pop(self, group: _Group) -> BlockHash:
        """Remove the block of a group that was used least recently, and the group with its last one."""
        block_hash = next(iter(self._groups[group]))
        self._remove(block_hash)
        return block_hash

    def _remove(self, block_hash: BlockHash) -> None:
        group = self._group_of.pop(block_hash)
        members = self._groups[group]
        del members[block_hash]
        if not members:
            del self._groups[group]
