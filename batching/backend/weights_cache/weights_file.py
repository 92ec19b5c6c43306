"""A file of packed weights and of the arrays beside them, in the format of safetensors.

Packed weights are bytes; `__metadata__` has their layouts, and digests by which a file that is not what was written
is recognised.
"""

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np

from batching.backend.exceptions import one_line
from batching.backend.host_array import host_array
from batching.engine.load_slices import ONE_SLICE, LoadSlices
from batching.host.private_files import open_private

# A multiple of the page size of any system, in bytes.
_ALIGNMENT: Final = 1 << 16
_MAX_HEADER_BYTES: Final = 1 << 26
_SAMPLE_BYTES: Final = 1 << 12
_DIGEST_LENGTH: Final = hashlib.sha256().digest_size * 2
_DTYPES: Final = {
    mx.complex64: "C64",
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint8: "U8",
    mx.uint16: "U16",
    mx.uint32: "U32",
    mx.uint64: "U64",
    mx.int8: "I8",
    mx.int16: "I16",
    mx.int32: "I32",
    mx.int64: "I64",
    mx.bool_: "BOOL",
}

Header = dict[str, Any]  # JSON


class DamagedFile(Exception):
    """A file is not what was written."""


class AlreadyWritten(Exception):
    """Another process writes the same file."""


@dataclass(frozen=True)
class WeightsFile:
    """An open file that is what was written.

    packed: where each of the packed weights begins.
    others: arrays, read when they are computed.
    """

    path: Path
    descriptor: int
    layouts: Mapping[str, Mapping[str, int]]
    sizes: Mapping[str, int]
    offsets: Mapping[str, int]
    others: Mapping[str, mx.array]

    def packed(self, kernels: Any, name: str) -> Any:
        """Return packed weights; raise KeyError if there are none of this name."""
        where = (self.sizes[name], self.descriptor, self.offsets[name])
        return kernels.stored_weights(self.layouts[name], *where)


@contextmanager
def opened(path: Path, key: str) -> Iterator[WeightsFile | None]:
    """Open what was written with this key; None if there is another key in it.

    Raises:
        DamagedFile: it is cut off or has other bytes than were written, where that was looked at.
        OSError: it cannot be opened or read, or others could change it.
    """
    descriptor = open_private(path)
    try:
        yield _checked(path, descriptor, key)
    finally:
        os.close(descriptor)


def _checked(path: Path, descriptor: int, key: str) -> WeightsFile | None:
    header, start = _read_header(descriptor)
    metadata = header["__metadata__"]
    if metadata["key"] != key:
        return None
    _check(descriptor, header, start)
    layouts = json.loads(metadata["layouts"])
    arrays = mx.load(str(path), format="safetensors")
    assert isinstance(arrays, dict)
    if not os.path.samestat(path.stat(), os.fstat(descriptor)):
        # Another process has just replaced it.
        return None
    return WeightsFile(
        path,
        descriptor,
        layouts,
        json.loads(metadata["sizes"]),
        {name: start + header[name]["data_offsets"][0] for name in layouts},
        {name: array for name, array in arrays.items() if name not in layouts},
    )


def _read_header(descriptor: int) -> tuple[Header, int]:
    """Return the header, and where the data begin."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 0 < length <= _MAX_HEADER_BYTES:
        raise DamagedFile("it has no header")
    try:
        header = json.loads(os.pread(descriptor, length, 8))
        digest = header["__metadata__"].pop("digest")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"its header cannot be read: {one_line(error)}") from error
    if digest != _digest_of(header):
        raise DamagedFile("its header has been changed")
    return header, 8 + length


def _check(descriptor: int, header: Header, start: int) -> None:
    entries = _entries(header)
    size = start + max((end for _, end in entries), default=0)
    if os.fstat(descriptor).st_size != size:
        raise DamagedFile(f"it has {os.fstat(descriptor).st_size} bytes, not {size}")
    if _samples(descriptor, header, start) != header["__metadata__"]["samples"]:
        raise DamagedFile("its weights have been changed")


def _entries(header: Header) -> list[tuple[int, int]]:
    """Return where each array begins and ends."""
    return [
        (entry["data_offsets"][0], entry["data_offsets"][1])
        for name, entry in header.items()
        if name != "__metadata__"
    ]


def _samples(descriptor: int, header: Header, start: int) -> str:
    """Return a digest of the first, the middle and the last bytes of each array."""
    digest = hashlib.sha256()
    for begin, end in _entries(header):
        last = max(begin, end - _SAMPLE_BYTES)
        for at in (begin, (begin + last) // 2, last):
            digest.update(os.pread(descriptor, min(_SAMPLE_BYTES, end - at), start + at))
    return digest.hexdigest()


def _digest_of(header: Header) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def size_of(packed: Mapping[str, Any], others: Mapping[str, mx.array]) -> int:
    """Return about how many bytes a file has."""
    of_packed = sum(_aligned(weights.nbytes) for weights in packed.values())
    return of_packed + sum(array.nbytes for array in others.values()) + _ALIGNMENT


def write(
    path: Path,
    key: str,
    packed: Mapping[str, Any],
    others: Mapping[str, mx.array],
    slices: LoadSlices = ONE_SLICE,
) -> None:
    """Write a file in place of the one that is there, if any.

    A file of this name is always a whole one, which is not written to any more: it gets its name when all is on the
    disk, and takes that of another, which stays as it is where it is open.

    Raises:
        AlreadyWritten: another process is about it.
        OSError: the disk is full, or the like.
    """
    part = path.with_name(f"{path.name}.part")
    with _locked(part) as descriptor:
        try:
            _write(descriptor, key, packed, others, slices)
            slices.in_thread(partial(_sync, os.dup(descriptor)))
            # Not even this user shortens it by mistake.
            os.fchmod(descriptor, stat.S_IRUSR)
            part.rename(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _sync(descriptor: int) -> None:
    """Wait until a file is on the disk, and close it: a load that ends meanwhile does not wait."""
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(part: Path) -> Iterator[int]:
    """Open a file that no other process has open so; the lock ends with the process at the latest."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(part, flags, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyWritten from None
        # The opened file may have been renamed or deleted before it was locked.
        if not part.exists() or not os.path.samestat(part.stat(), os.fstat(descriptor)):
            raise AlreadyWritten
        os.ftruncate(descriptor, 0)
        yield descriptor
    finally:
        os.close(descriptor)


def remove_abandoned(folder: Path) -> None:
    """Delete what processes have left half-written."""
    for part in folder.glob("*.part"):
        try:
            with _locked(part):
                part.unlink()
        except (AlreadyWritten, OSError):
            continue


def _write(
    descriptor: int,
    key: str,
    packed: Mapping[str, Any],
    others: Mapping[str, mx.array],
    slices: LoadSlices,
) -> None:
    header, start = _layout(key, packed, others)
    end = start + max((end for _, end in _entries(header)), default=0)
    if hasattr(os, "posix_fallocate"):
        # A disk that is full says so now.
        os.posix_fallocate(descriptor, 0, end)
    os.ftruncate(descriptor, end)
    offsets = {
        name: start + header[name]["data_offsets"][0] for name in header if name != "__metadata__"
    }
    for name, weights in packed.items():
        _write_at(descriptor, weights.bytes, offsets[name])
        slices.pause()
    for name, array in others.items():
        # numpy has no bfloat16.
        _write_at(descriptor, host_array(array.flatten().view(mx.uint8)), offsets[name])
    metadata = header["__metadata__"]
    metadata["samples"] = _samples(descriptor, header, start)
    metadata["digest"] = _digest_of(header)
    text = json.dumps(header).encode().ljust(start - 8)
    _write_at(descriptor, np.frombuffer((start - 8).to_bytes(8, "little") + text, np.uint8), 0)


def _write_at(descriptor: int, data: Any, offset: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written


def _layout(
    key: str, packed: Mapping[str, Any], others: Mapping[str, mx.array]
) -> tuple[Header, int]:
    """Return a header whose digests are still missing, and where the data begin."""
    header: Header = {
        "__metadata__": {
            "key": key,
            "layouts": json.dumps({name: weights.layout for name, weights in packed.items()}),
            "sizes": json.dumps({name: weights.nbytes for name, weights in packed.items()}),
        }
    }
    end = 0

    def add(name: str, dtype: str, shape: list[int], num_bytes: int) -> None:
        nonlocal end
        offsets = [end, end + num_bytes]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        end += num_bytes

    for name, weights in packed.items():
        num_bytes = _aligned(weights.nbytes)
        add(name, "U8", [num_bytes], num_bytes)
    for name, array in sorted(others.items(), key=lambda item: -item[1].dtype.size):
        add(name, _DTYPES[array.dtype], list(array.shape), array.nbytes)
    of_digests = 2 * (_DIGEST_LENGTH + len('"samples": "", '))
    return header, _aligned(8 + len(json.dumps(header)) + of_digests)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
