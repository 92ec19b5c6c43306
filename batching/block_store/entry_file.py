"""A file of the store: the arrays of a block, or of a state, as bytes.

    8 bytes     magic
    4 bytes     format version, little endian
    4 bytes     length of the header
    header      JSON: the identity of the model, the key, the tokens of the block and the hash before them, sizes
    contents    the bytes of each layer, one behind the other
    16 bytes    XXH3 (128 bits) of all before

The checksum finds what was torn, cut off or changed by accident: files are not synced before they get their names.
"""

import json
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from batching.block_manager import BlockContents, BlockHash
from batching.block_store.keys import Key, Kind
from batching.prefix_cache import hash_of

Buffer = bytes | memoryview

_MAGIC: Final = b"MLXBLOCK"
# Of the format.  The name of a model's folder depends on it, so that no server finds files of another one there.
VERSION: Final = 1
# Of the header.
_START: Final = len(_MAGIC) + 8
_DIGEST_BYTES: Final = 16
# POSIX's least is 16; Linux and macOS take 1,024 buffers in a call.
_MAX_PARTS: Final = min(1024, os.sysconf("SC_IOV_MAX"))


class DamagedEntry(Exception):
    """A file is not what was written, or not by this version; the text says how one sees that."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is stored under a key.

    parent, token_ids: the hash of the prefix before the block, and the block's tokens.
    contents: the bytes of each layer.
    """

    key: Key
    parent: BlockHash
    token_ids: Sequence[int]
    contents: Sequence[Buffer]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.contents))


def write(descriptor: int, identity: str, entry: Entry) -> int:
    """Write an entry of the model with this identity to an open file; return the number of bytes."""
    described = {
        "identity": identity,
        "kind": entry.key.kind,
        "hash": entry.key.block_hash.hex(),
        "parent": entry.parent.hex(),
        "tokens": list(entry.token_ids),
        "sizes": [len(each) for each in entry.contents],
    }
    header = json.dumps(described).encode()
    start = _MAGIC + VERSION.to_bytes(4, "little") + len(header).to_bytes(4, "little") + header
    digest = xxhash.xxh3_128(start)
    for part in entry.contents:
        digest.update(part)
    return _write_all(descriptor, [start, *entry.contents, digest.digest()])


def _write_all(descriptor: int, parts: Sequence[Buffer]) -> int:
    """Write buffers behind each other; return the number of bytes.

    Without a copy, and with few calls: each of them asks for the interpreter's lock, which the steps need.
    """
    num_bytes = 0
    for first in range(0, len(parts), _MAX_PARTS):
        some = parts[first : first + _MAX_PARTS]
        size = sum(map(len, some))
        num_written = os.writev(descriptor, some)
        if num_written < size:
            rest = memoryview(b"".join(some))[num_written:]
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        num_bytes += size
    return num_bytes


def read(path: Path, identity: str, key: Key) -> Entry:
    """Return what a file has.

    Raises:
        DamagedEntry: it is not what was written under this key for this model.
        OSError: it cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        data = memoryview(os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0))
    start, end = _contents(data)
    if xxhash.xxh3_128(data[:end]).digest() != data[end:]:
        raise DamagedEntry("its checksum is another one")
    try:
        header = json.loads(bytes(data[_START:start]))
        entry = _entry(header, data[start:end])
        is_expected = (header["identity"], entry.key) == (identity, key)
    except (ValueError, TypeError, LookupError):
        raise DamagedEntry("its header is not one of this version") from None
    if not is_expected:
        raise DamagedEntry("it belongs to another model or prefix")
    return entry


def check(path: Path) -> None:
    """Raise DamagedEntry, or OSError, unless a file has what its name and its folder's name say."""
    key = Key.of_name(path.name)
    if key is None:
        raise DamagedEntry("its name is none of the store's")
    entry = read(path, path.parent.parent.name, key)
    prefix = BlockContents(entry.parent, array("q", entry.token_ids))
    if hash_of(prefix) != key.block_hash:
        raise DamagedEntry("its name is not the hash of its tokens")


def _contents(data: memoryview) -> tuple[int, int]:
    """Return where the contents begin and end."""
    if bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise DamagedEntry("it does not begin like a file of the store")
    version, length = (
        int.from_bytes(data[at : at + 4], "little") for at in (_START - 8, _START - 4)
    )
    if version != VERSION:
        raise DamagedEntry(f"its format is version {version}, not {VERSION}")
    start, end = _START + length, len(data) - _DIGEST_BYTES
    if start > end:
        raise DamagedEntry("it is cut off")
    return start, end


def _entry(header: dict[str, Any], data: memoryview) -> Entry:
    """Return the entry of a header that is what was written."""
    key = Key(Kind(header["kind"]), BlockHash(bytes.fromhex(header["hash"])))
    parent = BlockHash(bytes.fromhex(header["parent"]))
    contents: list[Buffer] = []
    for size in header["sizes"]:
        contents.append(data[:size])
        data = data[size:]
    return Entry(key, parent, header["tokens"], contents)
