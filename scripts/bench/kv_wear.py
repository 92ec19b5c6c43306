"""What a day of traffic writes to the KV cache on disk, and what a restart in the evening finds there.

`python -m scripts.bench.kv_wear` has no model and no clock: a day of agents and chats passes on the store's own code, whose
files have a thousandth of their sizes.  It assumes that what is computed is stored before the pool evicts it.
"""

import argparse
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Final, NamedTuple

from batching.block_manager import BlockHash, BlockTable, PagedBlockManager
from batching.block_store.entry_file import Entry, write
from batching.block_store.folder import StoreFolder
from batching.block_store.keys import Key, Kind
from batching.block_store.store import BlockStore, ModelOnDisk
from batching.block_store.write_behind import WriteBehind
from batching.block_store.write_limit import WriteLimit
from batching.kv_cache.saved_blocks import SavedBlocks
from batching.prefix_cache import HashChain, PrefixCache
from batching.steps.step_plan import SaveOrder

_GIB: Final = 1 << 30
_HOUR: Final = 3600.0
# Files are so many times as small as they would be.
_SCALE: Final = 1000
_BLOCK_SIZE: Final = 32
# Of a model with 4 billion parameters: 36 layers of 8 heads of 128, keys and values in 2 bytes.
_BYTES_PER_TOKEN: Final = 36 * 8 * 128 * 2 * 2
_IDENTITY: Final = "0" * 32

_NUM_AGENTS: Final = 40
_NUM_CHATS: Final = 300
_SYSTEM_TOKENS: Final = 10_000
_MORNING: Final = 8 * _HOUR
_RESTART: Final = 20 * _HOUR


@dataclass
class Conversation:
    """Whose prompt each turn appends to.

    turns: when they are, and how many tokens each appends, the answer before it included.
    """

    prompt: list[int]
    turns: Sequence[tuple[float, int]]
    chain: HashChain = field(default_factory=HashChain)


def agent(rng: random.Random, system: Sequence[int]) -> Conversation:
    """Return an agent that works for an hour or two, and comes back in the evening."""
    now = rng.uniform(_MORNING, 17 * _HOUR)
    turns: list[tuple[float, int]] = []
    for _ in range(rng.randint(10, 25)):
        turns.append((now, rng.randint(200, 1200)))
        now += rng.expovariate(1 / 240)
    turns.append((rng.uniform(_RESTART, 23 * _HOUR), 300))
    return Conversation([*system], turns)


def chat(rng: random.Random) -> Conversation:
    """Return a chat of a few turns at any time of the day, some of which go on after the restart."""
    now = rng.uniform(0, 23 * _HOUR)
    turns: list[tuple[float, int]] = []
    for _ in range(rng.randint(1, 5)):
        turns.append((now, rng.randint(50, 800)))
        now += rng.expovariate(1 / 120)
    return Conversation([], turns)


def traffic(seed: int) -> Iterator[tuple[float, Conversation]]:
    """Yield the turns of a day, whose prompts have grown by then."""
    rng = random.Random(seed)
    system = tokens(rng, _SYSTEM_TOKENS)
    everyone = [agent(rng, system) for _ in range(_NUM_AGENTS)]
    everyone += [chat(rng) for _ in range(_NUM_CHATS)]
    turns = [(*turn, i) for i, each in enumerate(everyone) for turn in each.turns]
    for when, num_tokens, i in sorted(turns):
        everyone[i].prompt += tokens(rng, num_tokens)
        yield when, everyone[i]


def tokens(rng: random.Random, num: int) -> list[int]:
    # Of five digits, so that all headers have one size.
    return [rng.randrange(10_000, 100_000) for _ in range(num)]


class Found(NamedTuple):
    """Of the prompts of a turn, how many tokens there are, and how many need not be computed."""

    num_tokens: int
    num_cached: int


class Life:
    """A pool from the start of a server to its end, and the store that outlives it."""

    def __init__(
        self, store: BlockStore, disk: ModelOnDisk, num_blocks: int, num_uses: Iterator[int]
    ) -> None:
        """`num_uses` are times of files instead of the clock's, so that a day is always the same."""
        self._store = store
        self._folder = disk.folder
        self._blocks = PagedBlockManager(num_blocks, _BLOCK_SIZE)
        self._cache = PrefixCache(self._blocks)
        self._saved = SavedBlocks(store)
        self._contents = bytes(block_bytes() - header_bytes())
        self._num_uses = num_uses

    def serve(self, turn: Conversation) -> Found:
        """Compute a prompt, but for what is cached, and store it."""
        hashes = turn.chain.extended(turn.prompt, _BLOCK_SIZE)
        shareable = hashes[: (len(turn.prompt) - 1) // _BLOCK_SIZE]
        shared = self._cache.lookup(shareable)
        stop = len(shared)
        while stop < len(shareable) and self._store.has(key_of(shareable[stop])):
            self._mark_used(key_of(shareable[stop]))
            stop += 1
        for block_id in shared:
            self._blocks.increment_ref(block_id)
        own = self._blocks.allocate(len(hashes) - len(shared))
        assert own is not None, "the pool has room for a prompt"
        table = BlockTable([*shared, *own])
        self._cache.insert(hashes, table, len(shared), len(hashes))
        self._save(turn, hashes, table, stop)
        self._blocks.release(table.block_ids)
        return Found(len(turn.prompt), stop * _BLOCK_SIZE)

    def _save(
        self, turn: Conversation, hashes: Sequence[BlockHash], table: BlockTable, first: int
    ) -> None:
        for i in range(first, len(hashes)):
            block = turn.prompt[i * _BLOCK_SIZE : (i + 1) * _BLOCK_SIZE]
            parent = turn.chain.contents(i, block).parent
            order = SaveOrder(key_of(hashes[i]), table.block_ids[i], parent, tuple(block))
            self._saved.add(order, is_of_prompt=True)
        orders = self._saved.take(len(hashes), self._is_there)
        for order in orders:
            self._store.put(Entry(order.key, order.parent, order.token_ids, [self._contents]))
        self._store.flush()
        for order in orders:
            self._mark_used(order.key)

    def _mark_used(self, key: Key) -> None:
        used = next(self._num_uses)
        # It was not written, or has made room.
        with suppress(FileNotFoundError):
            os.utime(self._folder.path_of(key), ns=(used, used))

    def _is_there(self, order: SaveOrder) -> bool:
        return self._blocks.find(order.key.block_hash) == order.source


def key_of(block_hash: BlockHash) -> Key:
    return Key(Kind.BLOCK, block_hash)


def block_bytes() -> int:
    return _BLOCK_SIZE * _BYTES_PER_TOKEN // _SCALE


def header_bytes() -> int:
    """Return what a file has beside its contents: nothing, if it had its real size."""
    entry = Entry(key_of(BlockHash(bytes(32))), BlockHash(bytes(32)), [10_000] * _BLOCK_SIZE, [b""])
    with TemporaryFile(buffering=0) as file:
        return write(file.fileno(), _IDENTITY, entry)


class Day(NamedTuple):
    """GiB that were written, and what the first turns after the restart have found."""

    gib_written: float
    found: Found


def pass_day(folder: Path, gib: float, gib_a_day: float | None, num_blocks: int, seed: int) -> Day:
    now = 0.0

    def scaled(limit: float) -> int:
        return int(limit * _GIB / _SCALE)

    most = None if gib_a_day is None else scaled(gib_a_day)
    limit = WriteLimit(folder / "written.json", most, lambda: now)
    files = StoreFolder(folder, scaled(gib))
    writer = WriteBehind(files, limit, _GIB)
    disk = ModelOnDisk(files.open(_IDENTITY), writer, writer.close)
    store = BlockStore(disk)
    num_uses = count()
    life, is_restarted = Life(store, disk, num_blocks, num_uses), False
    seen: set[int] = set()
    found: list[Found] = []
    for now, turn in traffic(seed):
        if now >= _RESTART and not is_restarted:
            life, is_restarted = Life(store, disk, num_blocks, num_uses), True
        result = life.serve(turn)
        # Conversations that began before, once each.
        if is_restarted and turn.turns[0][0] < _RESTART and id(turn) not in seen:
            seen.add(id(turn))
            found.append(result)
    store.close()
    return Day(
        store.stats.bytes_written * _SCALE / _GIB, Found(*map(sum, zip(*found, strict=True)))
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, nargs="+", default=[128], help="of the folder")
    parser.add_argument("--gib-a-day", type=float, nargs="+", default=[50, 20, 5, 0])
    parser.add_argument("--num-blocks", type=int, default=2048, help="of the pool")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    for gib in chosen.gib:
        for limit in (None, *chosen.gib_a_day):
            with TemporaryDirectory() as folder:
                day = pass_day(Path(folder), gib, limit, chosen.num_blocks, chosen.seed)
            share = day.found.num_cached / day.found.num_tokens
            of_day = "no limit" if limit is None else f"{limit:g} GiB a day"
            print(
                f"folder of {gib:g} GiB, {of_day}: {day.gib_written:.0f} GiB written; "
                f"after the restart {share:.0%} of {day.found.num_tokens} prompt tokens are found"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
