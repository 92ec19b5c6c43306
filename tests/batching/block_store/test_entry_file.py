"""Files of the store: what is read is what was written, or the file is damaged."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, strategies as st

from batching.block_manager import BlockHash
from batching.block_store import entry_file
from batching.block_store.entry_file import DamagedEntry, Entry, check, read
from batching.block_store.keys import Key, Kind
from tests.support.rows import rows
from tests.support.stored_entries import IDENTITY, OTHER, entry_of, file_of, is_same, write_file


def reason_for(path: Path, key: Key) -> str:
    with pytest.raises(DamagedEntry) as caught:
        read(path, IDENTITY, key)
    return str(caught.value)


def why_damaged(path: Path, contents: bytes, key: Key) -> str:
    path.write_bytes(contents)
    return reason_for(path, key)


@given(
    st.sampled_from(Kind),
    st.binary(min_size=32, max_size=32),
    st.lists(st.integers(0, 2**31), max_size=5),
    st.lists(st.binary(max_size=40), max_size=4),
)
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    kind: Kind,
    digest: bytes,
    tokens: list[int],
    contents: list[bytes],
) -> None:
    entry = Entry(Key(kind, BlockHash(digest)), BlockHash(digest[::-1]), tokens, contents)
    path = write_file(tmp_path_factory.getbasetemp() / "round-trip", entry)
    found = read(path, IDENTITY, entry.key)
    assert is_same(found, entry)
    assert found.num_bytes == sum(map(len, contents))


def test_no_beginning_of_a_file_is_taken_for_a_whole_one(tmp_path: Path) -> None:
    entry, path = entry_of(1), tmp_path / "file"
    whole = file_of(entry)
    path.write_bytes(whole + b"\0")
    for length in (len(whole) + 1, *reversed(range(len(whole)))):
        os.truncate(path, length)
        assert reason_for(path, entry.key)


def test_a_bit_that_is_flipped_is_found_wherever_it_is(tmp_path: Path) -> None:
    entry, path = entry_of(1, 12), tmp_path / "file"
    write_file(path, entry)
    with path.open("r+b", buffering=0) as file:
        for at, byte in enumerate(file.read()):
            os.pwrite(file.fileno(), bytes([byte ^ 1 << at % 8]), at)
            assert reason_for(path, entry.key)
            os.pwrite(file.fileno(), bytes([byte]), at)
    assert is_same(read(path, IDENTITY, entry.key), entry)


def test_a_part_that_the_disk_has_as_zeros_is_found(tmp_path: Path) -> None:
    """As after a loss of power: the size is right, but not all was written."""
    entry = entry_of(1, 600)
    whole = file_of(entry)
    for first in range(0, len(whole), 64):
        torn = whole[:first] + bytes(len(whole) - first)
        assert why_damaged(tmp_path / "file", torn, entry.key)


def signed(header: Any, contents: bytes = b"", version: int = 1) -> bytes:
    """Return a file of another program, whose checksum is right."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    start = b"MLXBLOCK" + version.to_bytes(4, "little") + len(text).to_bytes(4, "little")
    whole = start + text + contents
    return whole + xxhash.xxh3_128(whole).digest()


@rows(
    ("contents", "reason"),
    [
        (b"", "it does not begin like a file of the store"),
        (b"MLXBLOC", "it does not begin like a file of the store"),
        (b"GGUF" + bytes(100), "it does not begin like a file of the store"),
        (b"MLXBLOCK", "its format is version 0, not 1"),
        (signed({}, version=2), "its format is version 2, not 1"),
        (b"MLXBLOCK\1\0\0\0\xff\xff\xff\xff" + bytes(99), "it is cut off"),
        (signed(b"{"), "its header is not one of this version"),
        (signed(b"\xff"), "its header is not one of this version"),
        (signed([1]), "its header is not one of this version"),
        (signed({"identity": IDENTITY}), "its header is not one of this version"),
    ],
)
def test_a_file_that_is_none_of_this_version_says_why(
    tmp_path: Path, contents: bytes, reason: str
) -> None:
    assert why_damaged(tmp_path / "file", contents, entry_of(1).key) == reason


@rows("change", [{"kind": "blocks"}, {"hash": "xy"}, {"parent": 5}, {"sizes": ["1"]}, {"sizes": 1}])
def test_a_header_of_another_form_is_damage(tmp_path: Path, change: dict[str, Any]) -> None:
    entry = entry_of(1)
    header = {
        "identity": IDENTITY,
        "kind": "block",
        "hash": entry.key.block_hash.hex(),
        "parent": entry.parent.hex(),
        "tokens": [],
        "sizes": [],
    }
    path = tmp_path / "file"
    path.write_bytes(signed(header))
    assert read(path, IDENTITY, entry.key).contents == []
    reason = why_damaged(path, signed(header | change), entry.key)
    assert reason == "its header is not one of this version"


def test_a_whole_file_of_another_model_or_key_is_not_taken(tmp_path: Path) -> None:
    entry, other = entry_of(1), entry_of(2)
    reason = "it belongs to another model or prefix"
    assert why_damaged(tmp_path / "file", file_of(entry, OTHER), entry.key) == reason
    assert why_damaged(tmp_path / "file", file_of(other), entry.key) == reason
    window = entry.key._replace(kind=Kind.WINDOW)
    assert why_damaged(tmp_path / "file", file_of(entry), window) == reason


def test_a_file_that_is_not_there_is_not_damaged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "file", IDENTITY, entry_of(1).key)


def place(folder: Path, entry: Entry, name: str | None = None) -> Path:
    return folder / IDENTITY / "00" / (name or entry.key.name)


def test_a_file_is_checked_by_its_names_alone(tmp_path: Path) -> None:
    entry = entry_of(1)
    check(write_file(place(tmp_path, entry), entry))


@rows(
    ("entry", "identity", "name", "reason"),
    [
        (entry_of(1), OTHER, None, "it belongs to another model"),
        (entry_of(1), IDENTITY, entry_of(2).key.name, "it belongs to another model or prefix"),
        (entry_of(1), IDENTITY, "notes.txt", "its name is none of the store's"),
        (replace(entry_of(1), token_ids=[1]), IDENTITY, None, "its name is not the hash of its"),
    ],
)
def test_a_file_with_another_name_fails_its_check(
    tmp_path: Path, entry: Entry, identity: str, name: str | None, reason: str
) -> None:
    path = write_file(place(tmp_path, entry, name), entry, identity)
    with pytest.raises(DamagedEntry, match=reason):
        check(path)


DIGITS = "0123456789abcdef" * 4


@rows(
    ("name", "is_key"),
    [
        (f"{DIGITS}.block", True),
        (f"{DIGITS}.window", True),
        (f"{DIGITS}.state", True),
        (f"{DIGITS}.tmp", False),
        (f"{DIGITS}.block.1", False),
        (f".{DIGITS}.block.1", False),
        (DIGITS, False),
        (f"{DIGITS[2:]}.block", False),
        (f"{DIGITS.upper()}.block", False),
        (f"{DIGITS[:60]}    .block", False),
        (f"{DIGITS[:63]}x.block", False),
        ("lock", False),
    ],
)
def test_names_of_files_are_keys_or_none_of_the_stores(name: str, is_key: bool) -> None:
    key = Key.of_name(name)
    assert (key is not None) == is_key
    assert key is None or key.name == name


def test_a_file_is_whole_however_little_each_call_of_the_system_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A disk may take less than it is given; entries may have more buffers than one call takes."""
    entry = entry_of(3)
    expected = file_of(entry)

    def write_some(descriptor: int, parts: Sequence[bytes]) -> int:
        return os.write(descriptor, b"".join(parts)[:5])

    monkeypatch.setattr(entry_file, "_MAX_PARTS", 2)
    assert file_of(entry) == expected
    monkeypatch.setattr(os, "writev", write_some)
    assert file_of(entry) == expected
