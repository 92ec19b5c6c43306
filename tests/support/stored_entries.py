"""Entries in a store on disk, without a server that has computed them."""

from array import array
from collections.abc import Sequence
from pathlib import Path

from batching.block_manager import BlockContents, BlockHash
from batching.block_store.entry_file import Entry, write
from batching.block_store.folder import ModelFolder
from batching.block_store.keys import Key, Kind
from batching.prefix_cache import hash_of


def entry_of(token_ids: Sequence[int], contents: bytes = b"keys") -> Entry:
    parent = BlockHash(bytes(32))
    block_hash = hash_of(BlockContents(parent, array("q", token_ids)))
    return Entry(Key(Kind.BLOCK, block_hash), parent, token_ids, [contents])


def keep(model: ModelFolder, entry: Entry) -> Path:
    """Write an entry as a server does; return its file."""
    path = model.path_of(entry.key)
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        write(file, model.identity, entry)
    return path
