"""A simulated day is the same each time, keeps its limits, and a restart finds what was written."""

from pathlib import Path

import pytest

from scripts.bench import kv_wear
from scripts.bench.kv_wear import Day, pass_day

NUM_BLOCKS = 1024


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_NUM_AGENTS", 2), ("_NUM_CHATS", 3), ("_SYSTEM_TOKENS", 320)):
        monkeypatch.setattr(kv_wear, name, value)


def day(folder: Path, name: str, gib_a_day: float | None) -> Day:
    return pass_day(folder / name, 64, gib_a_day, NUM_BLOCKS, seed=1)


def test_a_day_is_the_same_each_time_and_keeps_its_limit(tmp_path: Path) -> None:
    whole, again = day(tmp_path, "whole", None), day(tmp_path, "again", None)
    assert whole == again
    assert whole.found.num_cached > 0.9 * whole.found.num_tokens
    half = day(tmp_path, "half", whole.gib_written / 2)
    assert 0 < half.gib_written <= whole.gib_written / 2
    none = day(tmp_path, "none", 0)
    assert none.gib_written == 0
    assert none.found.num_cached <= half.found.num_cached < whole.found.num_cached
    assert none.found.num_tokens == whole.found.num_tokens
