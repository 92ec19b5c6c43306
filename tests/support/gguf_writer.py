"""Writes small GGUF files, also with the quantized types that `mx.save_gguf` has not."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Value = bool | int | float | str | Sequence[int] | Sequence[float] | Sequence[str]

F32, F16, Q4_0, Q4_1, Q4_K, Q8_0, F64 = 0, 1, 2, 3, 12, 8, 28


@dataclass(frozen=True)
class RawTensor:
    """Bytes as they stand in the file; `shape` has its rows first, as in numpy."""

    kind: int
    shape: tuple[int, ...]
    content: bytes


def write_gguf(
    path: Path,
    metadata: Mapping[str, Value],
    tensors: Mapping[str, RawTensor | NDArray[np.float32]],
    *,
    version: int = 3,
) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _string(key) + _typed(value)
    data = b""
    for name, tensor in tensors.items():
        if not isinstance(tensor, RawTensor):
            tensor = RawTensor(F32, tensor.shape, tensor.astype("<f4").tobytes())
        head += _string(name) + struct.pack("<I", len(tensor.shape))
        head += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        head += struct.pack("<IQ", tensor.kind, len(data))
        data += _padded(tensor.content)
    path.write_bytes(_padded(head) + data)
    return path


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 32)


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _typed(value: Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, Sequence):
        kind, content = _elements(value)
        return struct.pack("<IIQ", 9, kind, len(value)) + content
    kind, content = _number(value)
    return struct.pack("<I", kind) + content


def _elements(values: Sequence[int] | Sequence[float] | Sequence[str]) -> tuple[int, bytes]:
    parts = [(8, _string(item)) if isinstance(item, str) else _number(item) for item in values]
    return parts[0][0], b"".join(content for _, content in parts)


def _number(value: float) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 5, struct.pack("<i", value)
    return 6, struct.pack("<f", value)
