from pathlib import Path

import pytest

from batching.backend.memory import blocks_within, container_limit, device_memory


@pytest.mark.parametrize(("content", "limit"), [("1048576\n", 1048576), ("max\n", None)])
def test_a_containers_limit_is_read(tmp_path: Path, content: str, limit: int | None) -> None:
    path = tmp_path / "memory.max"
    path.write_text(content, encoding="ascii")
    assert container_limit(path) == limit
    assert container_limit(tmp_path / "missing") is None


def test_blocks_are_what_a_share_of_the_memory_holds() -> None:
    assert blocks_within(0.5, device_memory()) == 0
    assert blocks_within(1e-9, 1) == 0
    assert 0 < blocks_within(0.9, 1 << 20) < device_memory() >> 20
