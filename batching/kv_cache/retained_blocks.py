"""Which blocks of a pool are evicted behind all others, whose they are, and for how long."""

from collections import OrderedDict
from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

from batching.block_manager import BlockHash

# Of all blocks that may be retained, those of one group, and those that are pinned, of all groups.
_SHARE_OF_GROUP: Final = 0.5
# Between looks for what is over, in seconds.
_EXPIRY_INTERVAL: Final = 1.0


class Group(NamedTuple):
    """Blocks of one session of a client and one time: those that were retained first are over first."""

    client: str
    name: str
    seconds: float


class _OfClient:
    """What a client retains: when each block is over, by group; groups and blocks least recently used first."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self.groups: OrderedDict[Group, OrderedDict[BlockHash, float]] = OrderedDict()


class RetainedBlocks:
    """Bounds what is retained: of each group, of each client, and of all together.

    A block belongs to one group, where it is retained for longest.  Beyond the bound of a group its least
    recently used blocks give way.  Beyond that of all those of the client that has most do, of its least
    recently used group: so no client loses what it has below its share.  The blocks of a prefix give way from
    its end.

    Pinned blocks, those without a time limit, are of no client and do not give way: when there is no more room,
    no others are pinned.

    max_blocks: of all groups.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks: Final = max_blocks
        self._max_of_group = int(max_blocks * _SHARE_OF_GROUP)
        self.max_pinned: Final = self._max_of_group
        self._pinned: set[BlockHash] = set()
        self._group_of: dict[BlockHash, Group] = {}
        # Least recently used first.
        self._clients: OrderedDict[str, _OfClient] = OrderedDict()
        self._next_look = 0.0

    def __len__(self) -> int:
        return len(self._group_of) + len(self._pinned)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._group_of or block_hash in self._pinned

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    def retain(self, group: Group, hashes: Sequence[BlockHash], now: float) -> list[BlockHash]:
        """Retain blocks of a prefix, in its order, for the group's time from now; return those that give way.

        These are blocks of others, or the last ones of this prefix.
        """
        if group.seconds == inf:
            return self._pin(hashes)
        until = now + group.seconds
        mine = [each for each in reversed(hashes) if not self._is_in_longer(each, group, until)]
        if not mine:
            return []
        members = self._add(group, mine, until)
        given_way: list[BlockHash] = []
        while len(members) > self._max_of_group:
            given_way.append(self._pop(members))
        return given_way + self._bound()

    def expire(self, now: float) -> list[BlockHash]:
        """Return the blocks whose time is over, each once; it looks once a second."""
        if now < self._next_look:
            return []
        self._next_look = now + _EXPIRY_INTERVAL
        over: list[BlockHash] = []
        for client in [*self._clients.values()]:
            for members in [*client.groups.values()]:
                while members and next(iter(members.values())) <= now:
                    over.append(self._pop(members))
        return over

    def drop(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Retain these blocks no longer, unless they are pinned; return those that were."""
        dropped = [each for each in hashes if each in self._group_of]
        for block_hash in dropped:
            self._remove(block_hash)
        return dropped

    def forget(self) -> None:
        """Drop all, since their contents are lost."""
        self._clients.clear()
        self._group_of.clear()
        self._pinned.clear()

    def _pin(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        new = [each for each in hashes if each not in self._pinned]
        room = self.max_pinned - self.num_pinned
        self.drop(new[:room])
        self._pinned.update(new[:room])
        return [each for each in new[room:] if each not in self] + self._bound()

    def _add(
        self, group: Group, hashes: Sequence[BlockHash], until: float
    ) -> OrderedDict[BlockHash, float]:
        """Put blocks into a group, as its most recently used ones, and take them out of others; return the group's."""
        self.drop(hashes)
        client = self._clients.setdefault(group.client, _OfClient())
        self._clients.move_to_end(group.client)
        members = client.groups.setdefault(group, OrderedDict())
        client.groups.move_to_end(group)
        client.num_blocks += len(hashes)
        for block_hash in hashes:
            members[block_hash] = until
            self._group_of[block_hash] = group
        return members

    def _bound(self) -> list[BlockHash]:
        """Remove blocks of the clients that have most, so that there are not too many in all; return them."""
        given_way: list[BlockHash] = []
        while len(self) > self.max_blocks:
            client = max(self._clients.values(), key=lambda each: each.num_blocks)
            given_way.append(self._pop(next(iter(client.groups.values()))))
        return given_way

    def _is_in_longer(self, block_hash: BlockHash, group: Group, until: float) -> bool:
        """Return whether a block is pinned, or another group retains it for longer."""
        other = self._group_of.get(block_hash)
        if other is None or other == group:
            return block_hash in self._pinned
        return self._clients[other.client].groups[other][block_hash] > until

    def _pop(self, members: OrderedDict[BlockHash, float]) -> BlockHash:
        """Remove the block of a group that was used least recently."""
        block_hash = next(iter(members))
        self._remove(block_hash)
        return block_hash

    def _remove(self, block_hash: BlockHash) -> None:
        """Remove a block, a group with its last one, and a client with its last group."""
        group = self._group_of.pop(block_hash)
        client = self._clients[group.client]
        client.num_blocks -= 1
        del client.groups[group][block_hash]
        if not client.groups[group]:
            del client.groups[group]
        if not client.groups:
            del self._clients[group.client]
