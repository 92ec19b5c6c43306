"""What the folder of a store has, for its owner: listed, deleted and checked, also while servers use it."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from batching.block_store.entry_file import DamagedEntry, check
from batching.block_store.folder import (
    LOCK,
    entries_in,
    files_in,
    is_unused,
    lock_unused,
    model_folders,
)
from batching.block_store.keys import Key
from batching.block_store.model_note import delete_note, read_note
from batching.host.private_files import check_folder


class CacheInUse(Exception):
    """A server has the model loaded."""


class StoredCache(NamedTuple):
    """The keys, values and states of a model.

    identity: a digest of all that they depend on, which is the name of their folder.
    model: the id with which a server has loaded it last; empty if that is not known.
    made, used: when the folder was made, and an entry written or read last, in seconds of Unix; None if there is none.
    """

    identity: str
    model: str
    made: float | None
    used: float | None
    num_entries: int
    num_bytes: int
    is_loaded: bool


class CheckedFile(NamedTuple):
    """A file that was checked; `problem` is empty if it is what was written."""

    path: Path
    problem: str = ""
    is_deleted: bool = False


def stored_bytes(folder: Path) -> int:
    """Return the size of all files of a store, those of others included.

    Raises:
        OSError: the folder cannot be used, or others can change it.
    """
    check_folder(folder)
    return sum(file.size for file in files_in(folder))


def stored_caches(folder: Path) -> list[StoredCache]:
    """Return what a store has of each model.

    Raises:
        OSError: the folder cannot be used, or others can change it.
    """
    check_folder(folder)
    return [_cache(model) for model in model_folders(folder)]


def delete_cache(folder: Path, identity: str) -> int:
    """Delete what a store has of a model, but for files of others; return how many bytes that were.

    Raises:
        CacheInUse: a server has it loaded.
        OSError: it cannot be deleted.
    """
    check_folder(folder)
    model = folder / identity
    lock = lock_unused(model)
    if lock is None:
        raise CacheInUse(identity)
    try:
        return _delete(model)
    finally:
        os.close(lock)


def check_caches(folder: Path, *, delete: bool = False) -> Iterator[CheckedFile]:
    """Check all entries of a store, and delete those that are damaged if so asked.

    Raises:
        OSError: the folder cannot be used, or others can change it.
    """
    check_folder(folder)
    for model in model_folders(folder):
        for file in entries_in(model):
            with suppress(FileNotFoundError):
                yield _checked(model, file.path, delete=delete)


def _cache(model: Path) -> StoredCache:
    entries, note = list(entries_in(model)), read_note(model)
    used = max((entry.used for entry in entries), default=None)
    return StoredCache(
        model.name,
        note.model,
        note.made,
        None if used is None else used / 1e9,
        len(entries),
        sum(entry.size for entry in entries),
        not is_unused(model),
    )


def _delete(model: Path) -> int:
    num_bytes = 0
    for file in files_in(model):
        if _is_own(file.path.name):
            file.path.unlink(missing_ok=True)
            num_bytes += file.size
    delete_note(model)
    (model / LOCK).unlink()
    for folder in (*model.glob("[0-9a-f][0-9a-f]"), model):
        # Those with files of others stay.
        with suppress(OSError):
            folder.rmdir()
    return num_bytes


def _is_own(name: str) -> bool:
    """Return whether a file is an entry, or one that a server has begun to write."""
    begun = name[1:].rpartition(".")[0] if name.startswith(".") else ""
    return any(Key.of_name(each) is not None for each in (name, begun))


def _checked(model: Path, path: Path, *, delete: bool) -> CheckedFile:
    name = path.name.lower()
    try:
        if path != model / name[:2] / name:
            raise DamagedEntry("it is not where one of its name belongs")
        check(path)
    except DamagedEntry as reason:
        if delete:
            path.unlink()
        return CheckedFile(path, str(reason), delete)
    except FileNotFoundError:
        raise
    except OSError as error:
        return CheckedFile(path, f"it cannot be read: {error.strerror}")
    return CheckedFile(path)
