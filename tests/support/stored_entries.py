"""Small entries of a store of blocks, and its parts around them."""

import os
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from batching.block_manager import BlockContents, BlockHash
from batching.block_store import entry_file
from batching.block_store.entry_file import Entry
from batching.block_store.folder import ModelFolder, StoreFolder
from batching.block_store.keys import Key, Kind
from batching.prefix_cache import hash_of

IDENTITY: Final = "0" * 31 + "a"
OTHER: Final = "0" * 31 + "b"
MUCH: Final = 1 << 30


def entry_of(seed: int, num_bytes: int = 60, kind: Kind = Kind.BLOCK) -> Entry:
    """Return an entry of two layers with random contents, under the hash of its tokens."""
    rng = random.Random(seed)
    parent = BlockHash(rng.randbytes(32))
    tokens = [rng.randrange(100, 1000) for _ in range(4)]
    key = Key(kind, hash_of(BlockContents(parent, array("q", tokens))))
    first = num_bytes // 3
    return Entry(key, parent, tokens, [rng.randbytes(first), rng.randbytes(num_bytes - first)])


def entry_with(token_ids: Sequence[int], contents: bytes = b"keys") -> Entry:
    """Return an entry of these tokens, at the beginning of a prompt."""
    parent = BlockHash(bytes(32))
    key = Key(Kind.BLOCK, hash_of(BlockContents(parent, array("q", token_ids))))
    return Entry(key, parent, token_ids, [contents])


def size_of_file(num_bytes: int = 60) -> int:
    """Return the size of a file of `entry_of(seed, num_bytes)`."""
    return len(file_of(entry_of(0, num_bytes)))


def file_of(entry: Entry, identity: str = IDENTITY) -> bytes:
    """Return what the file of an entry has."""
    with TemporaryFile(buffering=0) as file:
        num_bytes = entry_file.write(file.fileno(), identity, entry)
        file.seek(0)
        data = file.read()
    assert num_bytes == len(data)
    return data


def is_same(one: Entry, other: Entry) -> bool:
    contents = [[bytes(part) for part in each.contents] for each in (one, other)]
    return contents[0] == contents[1] and (one.key, one.parent, list(one.token_ids)) == (
        other.key,
        other.parent,
        list(other.token_ids),
    )


def write_file(path: Path, entry: Entry, identity: str = IDENTITY, used: int | None = None) -> Path:
    """Write a file as the store does; `used` is when it was used, in seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file_of(entry, identity))
    if used is not None:
        os.utime(path, (used, used))
    return path


def put_file(model: ModelFolder, entry: Entry, used: int | None = None) -> Path:
    """Write an entry to its place in a folder of a model."""
    path = write_file(model.path_of(entry.key), entry, model.identity, used)
    model.add(entry.key, path.stat().st_size)
    return path


def opened(folder: Path, identity: str = IDENTITY, max_bytes: int = MUCH) -> ModelFolder:
    """Open a folder of a model as a server that has just started."""
    model = StoreFolder(folder, max_bytes).open(identity)
    model.load()
    return model
