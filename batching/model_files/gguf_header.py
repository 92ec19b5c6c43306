"""Reading a GGUF file's header: metadata, and what tensors follow.

`mx.load` and `gguf`'s own reader trust the file: one that is cut off or hostile ends the process
or fills the memory.  Here every length is checked before it is read.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from batching.errors import ModelLoadError, printable

Scalar = bool | int | float | str
Value = Scalar | list[bool] | list[int] | list[float] | list[str]

_FORMATS: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_LENGTH: Final = struct.Struct("<Q")
_UINT32: Final = 4
_STRING: Final = 8
_ARRAY: Final = 9

# Far beyond what models have: some hundred values and tensors, a million tokens and merges, a
# tokenizer of 33 MB.  A file that claims more would be read for minutes, or fill the memory.
_MAX_ENTRIES: Final = 1 << 16
_MAX_ITEMS: Final = 1 << 22
_MAX_HEADER_BYTES: Final = 1 << 27
_MAX_DIMENSIONS: Final = 4
# MLX's shapes are of 32 bits.
_MAX_LENGTH: Final = (1 << 31) - 1

_ALIGNMENT: Final = "general.alignment"

# Types that `gguf` dequantizes.  The other types are integers, or are not written into files.
_READABLE: Final = frozenset(
    [
        "F32",
        "F16",
        "BF16",
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "TQ1_0",
        "TQ2_0",
        "MXFP4",
        "NVFP4",
        "IQ1_S",
        "IQ1_M",
        "IQ2_XXS",
        "IQ2_XS",
        "IQ2_S",
        "IQ3_XXS",
        "IQ3_S",
        "IQ4_NL",
        "IQ4_XS",
    ]
)


class _Damaged(Exception):
    """The header ends too soon, or says what cannot be."""

    def __init__(self, reason: str = "it is damaged or incomplete") -> None:
        super().__init__(reason)


class _Reader:
    """A position in the mapped file; _Damaged when it would pass the end."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self._end = min(len(buffer), _MAX_HEADER_BYTES)
        self.position = 0

    def numbers(self, code: str, count: int = 1) -> tuple[bool | int | float, ...]:
        layout = struct.Struct(f"<{count}{code}")
        return layout.unpack_from(self._buffer, self._pass(layout.size))

    def count(self, code: str = "Q") -> int:
        return int(self.numbers(code)[0])

    def length(self, limit: int, code: str = "Q") -> int:
        """Return a number of what follows."""
        if (length := self.count(code)) > limit:
            raise _Damaged("its header claims more than any model has")
        return length

    def string(self) -> str:
        start = self._pass(self.length(_MAX_HEADER_BYTES))
        return self._buffer[start : self.position].decode("utf-8", "replace")

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.numbers(_format(kind))[0]
        element, length = self.count("I"), self.length(_MAX_ITEMS)
        if element == _STRING:
            return self.strings(length)
        return list(self.numbers(_format(element), length))

    def strings(self, count: int) -> list[str]:
        """Return as many strings: a vocabulary has too many for several calls each."""
        buffer, end, strings = self._buffer, self._end, []
        for _ in range(count):
            start = self.position + _LENGTH.size
            if start > end:
                raise _Damaged
            (length,) = _LENGTH.unpack_from(buffer, self.position)
            if (stop := start + length) > end:
                raise _Damaged
            strings.append(buffer[start:stop].decode("utf-8", "replace"))
            self.position = stop
        return strings

    def _pass(self, num_bytes: int) -> int:
        """Move on; return where what was passed begins."""
        start, self.position = self.position, self.position + num_bytes
        if self.position > self._end:
            raise _Damaged
        return start


def _format(kind: int) -> str:
    if kind not in _FORMATS:
        raise _Damaged
    return _FORMATS[kind]


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor is: bytes [start, start + num_bytes), counted from the data's begin."""

    type_name: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata, and what tensors follow; each of them lies inside the file."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, Tensor]
    data_start: int

    def refuse(self, reason: str) -> ModelLoadError:
        return _refusal(self.path, reason)

    @property
    def file_type(self) -> str | None:
        """The name of the mixture of types, as in the names of files: `Q4_K_M`."""
        number = self.metadata.get("general.file_type")
        names = {kind.value: kind.name for kind in LlamaFileType}
        name = names.get(number) if isinstance(number, int) else None
        return name and name.removeprefix("MOSTLY_").removeprefix("ALL_")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(key, default)
        if not isinstance(value, int | float):
            raise self.refuse(f"{key} is {'missing' if value is None else 'not one number'}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))

    def text(self, key: str, default: str | None = None) -> str | None:
        value = self.metadata.get(key, default)
        return value if isinstance(value, str) else default

    def strings(self, key: str) -> list[str]:
        return [item for item in self._items(key) if isinstance(item, str)]

    def numbers(self, key: str) -> list[float]:
        return [item for item in self._items(key) if isinstance(item, int | float)]

    def _items(self, key: str) -> list[bool] | list[int] | list[float] | list[str]:
        value = self.metadata.get(key, [])
        return value if isinstance(value, list) else []


def read_header(path: Path) -> GgufHeader:
    """Read the header, and refuse what lies outside of the file or is not supported."""
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer,
        ):
            return _read(_Reader(buffer), path, len(buffer))
    except OSError as error:
        raise _refusal(path, error.strerror or str(error)) from error
    except _Damaged as error:
        raise _refusal(path, str(error)) from error
    except ValueError as error:
        # An empty file cannot be mapped.
        raise _refusal(path, str(_Damaged())) from error


def _refusal(path: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(f"cannot read {path}: {printable(reason)}")


def _read(reader: _Reader, path: Path, size: int) -> GgufHeader:
    if reader.numbers("B", 4) != tuple(b"GGUF"):
        raise _refusal(path, "it is not a GGUF file")
    if (version := reader.count("I")) not in (2, 3):
        raise _refusal(path, f"GGUF version {version} (only 2 and 3 are)")
    num_tensors, num_values = reader.length(_MAX_ENTRIES), reader.length(_MAX_ENTRIES)
    metadata, alignment = _read_metadata(reader, num_values)
    tensors = dict(_read_tensor(reader, path) for _ in range(num_tensors))
    data_start = -(-reader.position // alignment) * alignment
    header = GgufHeader(path, metadata, tensors, data_start)
    # All parts but the first have no other metadata, which would be missed with a less helpful reason.
    if header.integer("split.count", 1) > 1:
        raise header.refuse("a part of a split file; join the parts first")
    room = size - data_start
    if any(tensor.start + tensor.num_bytes > room for tensor in tensors.values()):
        raise header.refuse("it is incomplete, tensors lie beyond its end")
    if len(tensors) < num_tensors or sum(t.num_bytes for t in tensors.values()) > max(0, room):
        raise _Damaged("tensors share a name or their bytes, so that a small file fills the memory")
    return header


def _read_metadata(reader: _Reader, num_values: int) -> tuple[dict[str, Value], int]:
    """Return the values, and the alignment of what follows the header."""
    metadata: dict[str, Value] = {}
    alignment = 32
    for _ in range(num_values):
        key, kind = reader.string(), reader.count("I")
        if key in metadata or (key == _ALIGNMENT and kind != _UINT32):
            raise _Damaged
        metadata[key] = reader.value(kind)
        if key == _ALIGNMENT:
            alignment = _checked_alignment(metadata[key])
    return metadata, alignment


def _checked_alignment(value: Value) -> int:
    if not isinstance(value, int) or value < 1 or value & (value - 1):
        raise _Damaged
    return value


def _read_tensor(reader: _Reader, path: Path) -> tuple[str, Tensor]:
    name = reader.string()
    num_dimensions = reader.length(_MAX_DIMENSIONS, "I")
    # GGUF writes the fastest dimension first.
    shape = tuple(map(int, reversed(reader.numbers("Q", num_dimensions))))
    kind, start = reader.count("I"), reader.count()
    type_name = _type_name(kind)
    if type_name not in _READABLE:
        raise _refusal(path, f"tensor {name} has type {type_name}, which is not supported")
    if not shape or not all(0 < length <= _MAX_LENGTH for length in shape):
        raise _Damaged
    block, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    if shape[-1] % block:
        raise _Damaged(f"rows of {shape[-1]} weights are no whole blocks of {block}")
    return name, Tensor(type_name, shape, start, math.prod(shape) // block * num_bytes)


def _type_name(kind: int) -> str:
    try:
        return GGMLQuantizationType(kind).name
    except ValueError:
        return f"number {kind}"
