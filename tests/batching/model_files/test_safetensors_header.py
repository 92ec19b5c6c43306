"""The header of a safetensors file."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from batching.errors import ModelLoadError
from batching.model_files.safetensors_header import read_tensors
from batching.model_files.tensor import StoredTensor
from tests.support.rows import rows


def content(header: Any, num_bytes: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


def entry(start: Any = 0, stop: Any = 8, shape: Any = (2, 2)) -> dict[str, Any]:
    return {"dtype": "BF16", "shape": shape, "data_offsets": [start, stop]}


def test_tensors_are_read_without_their_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content({"__metadata__": {"format": "mlx"}, "a": entry()}, 8))
    assert read_tensors(path) == [StoredTensor("a", "BF16", (2, 2), 8)]


@rows(
    "damaged",
    [
        b"",
        b"abc",
        struct.pack("<Q", 1 << 62) + b"{}",
        content(b"{"),
        content(b"\xff\xff"),
        content([]),
        content({"a": 1}),
        content({"a": {}}),
        content({"a": entry()}, 7),
        content({"a": entry(start=9)}, 16),
        content({"a": entry(start="x")}, 8),
        content({"a": entry(shape=7)}, 8),
    ],
)
def test_a_file_that_is_cut_off_or_lies_is_refused(damaged: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(damaged)
    with pytest.raises(ModelLoadError, match="it is damaged or incomplete"):
        read_tensors(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="No such file"):
        read_tensors(tmp_path / "model.safetensors")
