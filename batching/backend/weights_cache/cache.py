"""A folder of packed weights, by model and options; the least recently used ones make room."""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from huggingface_hub import constants

from batching.backend.weights_cache.identity import identity, short_digest
from batching.backend.weights_cache.weights_file import (
    AlreadyWritten,
    DamagedFile,
    WeightsFile,
    opened,
    remove_abandoned,
    size_of,
    write,
)
from batching.engine.load_slices import ONE_SLICE, LoadSlices
from batching.host.private_files import check_folder, open_private

logger = logging.getLogger(__name__)

GIB: Final = 1 << 30
MIB: Final = 1 << 20
_NAME: Final = "mlx-batch-server"
_SUFFIX: Final = ".safetensors"
# Below this, packing takes no time worth the space.
MIN_BYTES: Final = 256 * MIB
# Space that is left on a disk for others: a share of it, or so many bytes if these are fewer.
_FREE_SHARE: Final = 0.05
_FREE_BYTES: Final = 8 * GIB


class NotKept(Exception):
    """Weights are not written to the folder; the text says why."""


def default_folder() -> Path | None:
    """Return the folder beside the hub's cache; None if that is in a home directory that is not known."""
    try:
        return Path(constants.HF_HUB_CACHE).expanduser().parent / _NAME
    except RuntimeError:
        # A container's own user id has no known home directory.
        return None


@dataclass(frozen=True)
class WeightsCache:
    """max_bytes: of all files together; 0 keeps and finds none."""

    folder: Path
    max_bytes: int

    def entry(self, model: Path, name: str, **options: object) -> "CacheEntry":
        """Return where the weights of a model belong that is packed with these options."""
        stem = re.sub(r"[^\w.-]+", "-", name)[-64:].strip(".-") or "model"
        of_path = short_digest(str(model.resolve()), options)
        path = self.folder / f"{stem}-{of_path}{_SUFFIX}"
        key = identity(model, **options) if self.max_bytes else ""
        return CacheEntry(self, path, key)

    def make_room(self, num_bytes: int, beside: Path) -> None:
        """Delete files, those that were used last at the end, until another one may be written.

        Raises:
            NotKept: there is no room for it.
        """
        remove_abandoned(self.folder)
        if num_bytes > self.max_bytes:
            raise NotKept(f"{_size(num_bytes)} are more than the {_size(self.max_bytes)} allowed")
        files: dict[Path, os.stat_result] = {}
        for path in self.folder.glob(f"*{_SUFFIX}"):
            # Another process may make room, too.
            with suppress(FileNotFoundError):
                files[path] = path.stat()
        files.pop(beside, None)
        left = sum(stat.st_size for stat in files.values())
        for path, stat in sorted(files.items(), key=lambda item: item[1].st_mtime_ns):
            if left + num_bytes <= self.max_bytes:
                break
            logger.info("the weights cache is full: %s is deleted", path.name)
            _delete(path)
            left -= stat.st_size
        disk = shutil.disk_usage(self.folder)
        if disk.free - num_bytes < min(_FREE_SHARE * disk.total, _FREE_BYTES):
            raise NotKept(f"{_size(num_bytes)} would fill the disk, {_size(disk.free)} are free")


NO_CACHE: Final = WeightsCache(Path(), 0)


@dataclass(frozen=True)
class CacheEntry:
    """One file of the folder, which is there or not; `key` is that of what it must have."""

    cache: WeightsCache
    path: Path
    key: str

    @contextmanager
    def opened(self) -> Iterator[WeightsFile | None]:
        """Open the file; None if it is not there, of something else, or not this user's alone."""
        if not self._is_kept():
            yield None
            return
        try:
            with opened(self.path, self.key) as file:
                if file is not None:
                    self._touch()
                yield file
        except (DamagedFile, OSError) as error:
            raise DamagedFile(f"{self.path}: {error}") from error

    def _touch(self) -> None:
        try:
            os.utime(self.path)
        except OSError:
            # On a disk that is mounted to be read only.
            return

    def drop(self) -> None:
        try:
            _delete(self.path)
        except OSError as error:
            logger.warning("%s cannot be deleted: %s", self.path, error.strerror)

    def note(self, name: str) -> Any:
        """Return what was noted of the model beside its weights; None if nothing was."""
        try:
            return self._notes()[name]
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def keep_note(self, name: str, value: Any) -> None:
        """Note something, in JSON's types, if the weights are kept."""
        if not self._is_kept():
            return
        try:
            known = {**self._notes()}
        except (OSError, ValueError, LookupError, TypeError):
            known = {}
        new = _notes(self.path).with_suffix(f".{os.getpid()}.tmp")
        try:
            new.touch(mode=0o600)
            new.write_text(json.dumps({self.key: {**known, name: value}}))
            new.replace(_notes(self.path))
        except OSError as error:
            logger.info("%s cannot be written: %s", _notes(self.path), error.strerror)
            with suppress(OSError):
                new.unlink(missing_ok=True)

    def _notes(self) -> Any:
        with open(open_private(_notes(self.path)), encoding="utf-8") as file:
            return json.load(file)[self.key]

    def _is_kept(self) -> bool:
        """Return whether there is a file, and no other user can change it."""
        if not self.cache.max_bytes:
            return False
        try:
            os.close(open_private(self.path))
        except FileNotFoundError:
            return False
        except OSError as error:
            logger.warning("%s is not used: %s", self.path, error.strerror)
            return False
        return True

    def keep(
        self,
        packed: Mapping[str, Any],
        others: Mapping[str, mx.array],
        slices: LoadSlices = ONE_SLICE,
    ) -> None:
        """Write packed weights to the file.

        Raises:
            NotKept: they stay as they are.
        """
        num_bytes = size_of(packed, others)
        if not self.cache.max_bytes:
            raise NotKept("the cache is off")
        if num_bytes < MIN_BYTES:
            raise NotKept(f"less than {_size(MIN_BYTES)}")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_folder(self.path.parent)
            self.cache.make_room(num_bytes, self.path)
            write(self.path, self.key, packed, others, slices)
        except AlreadyWritten:
            raise NotKept("another process writes the same file") from None
        except OSError as error:
            reason = f"{self.path.parent}: {error.strerror or error}"
            logger.warning(
                "packed weights are not kept, so that the next start packs them again: %s", reason
            )
            raise NotKept(reason) from error


def _notes(path: Path) -> Path:
    """Return the file of what was noted beside weights."""
    return path.with_suffix(".json")


def _delete(path: Path) -> None:
    path.unlink(missing_ok=True)
    _notes(path).unlink(missing_ok=True)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes // MIB} MiB"
