"""GGUF files byte by byte, and headers that lie."""

import struct
from pathlib import Path
from typing import Final

from batching.errors import ModelLoadError
from batching.model_files.gguf_header import GgufHeader, read_header

HUGE: Final = (1 << 31, 1 << 32, 1 << 62, (1 << 64) - 1)


def text(content: str | bytes) -> bytes:
    encoded = content if isinstance(content, bytes) else content.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def value(key: str, kind: int, content: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + content


def tensor(name: str, shape: tuple[int, ...], *, kind: int = 0, start: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, start)


def gguf(
    *values: bytes, tensors: tuple[bytes, ...] = (), counts: tuple[int, int] | None = None
) -> bytes:
    num_tensors, num_values = counts or (len(tensors), len(values))
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_values)
    return head + b"".join((*values, *tensors)) + bytes(4096)


A_NUMBER: Final = value("a", 4, struct.pack("<I", 7))
A_TENSOR: Final = tensor("t", (4, 2))

HOSTILE: Final[dict[str, bytes]] = {
    **{f"{n} values": gguf(A_NUMBER, counts=(0, n)) for n in HUGE},
    **{f"{n} tensors": gguf(tensors=(A_TENSOR,), counts=(n, 0)) for n in HUGE},
    **{f"a key of {n} bytes": gguf(struct.pack("<Q", n), counts=(0, 1)) for n in HUGE},
    **{f"a text of {n} bytes": gguf(value("a", 8, struct.pack("<Q", n))) for n in HUGE},
    **{
        f"{n} items of type {kind}": gguf(value("a", 9, struct.pack("<IQ", kind, n)))
        for n in (1 << 22, (1 << 22) + 1, *HUGE)
        for kind in (0, 4, 7, 8, 11)
    },
    "arrays in an array": gguf(value("a", 9, struct.pack("<IQIQ", 9, 1, 0, 1))),
    "an unknown type": gguf(value("a", 13, bytes(8))),
    "items of an unknown type": gguf(value("a", 9, struct.pack("<IQ", 99, 1))),
    "one key twice": gguf(A_NUMBER, A_NUMBER),
    **{
        f"an alignment of {n}": gguf(value("general.alignment", 4, struct.pack("<I", n)))
        for n in (0, 3, 33, (1 << 32) - 1)
    },
    "an alignment that is signed": gguf(value("general.alignment", 5, struct.pack("<i", 32))),
    "an alignment that is a text": gguf(value("general.alignment", 8, text("32"))),
    "an alignment beyond the end": gguf(
        value("general.alignment", 4, struct.pack("<I", 1 << 31)), tensors=(A_TENSOR,)
    ),
    "a tensor without dimensions": gguf(tensors=(tensor("t", ()),)),
    "a tensor of five dimensions": gguf(tensors=(tensor("t", (1,) * 5),)),
    **{
        f"a tensor of {n} dimensions": gguf(tensors=(text("t") + struct.pack("<I", n),))
        for n in (9, 1 << 31, (1 << 32) - 1)
    },
    "a tensor of nothing": gguf(tensors=(tensor("t", (0, 4)),)),
    **{f"a row of {n}": gguf(tensors=(tensor("t", (n, 1)),)) for n in HUGE},
    # 2**32 * 2**32 is 0 in 64 bits.
    "a size that overflows": gguf(tensors=(tensor("t", (1 << 32, 1 << 32)),)),
    "a size that overflows in small steps": gguf(tensors=(tensor("t", (1 << 16,) * 4),)),
    **{f"a tensor at {n}": gguf(tensors=(tensor("t", (4,), start=n),)) for n in HUGE},
    "one name twice": gguf(tensors=(A_TENSOR, tensor("t", (4, 2), start=32))),
    "many tensors of the same bytes": gguf(
        tensors=tuple(tensor(f"t{i}", (1000,)) for i in range(5000))
    ),
}


def read_or_reject(path: Path, content: bytes) -> GgufHeader | None:
    path.write_bytes(content)
    try:
        return read_header(path)
    except ModelLoadError as error:
        message = str(error)
    assert "\n" not in message
    assert str(path) in message
    return None


def check_inside(header: GgufHeader, size: int) -> None:
    """Whatever is accepted lies inside the file."""
    for t in header.tensors.values():
        assert t.num_bytes > 0
        assert header.data_start + t.start + t.num_bytes <= size
    assert sum(t.num_bytes for t in header.tensors.values()) <= size
