"""What fails on the way to numpy is an error, and not memory as it was."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from batching.backend.host_array import host_array


def test_an_array_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    mx.save_safetensors(str(path), {"w": mx.ones((64, 64))})
    loaded: Any = mx.load(str(path))
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(RuntimeError):
        host_array(loaded["w"].astype(mx.float32))


def test_a_copy_has_the_values() -> None:
    assert host_array(mx.arange(3) * 2).tolist() == [0, 2, 4]
