"""A server that is killed while it writes: what has its final name is whole, or is seen to be damaged."""

import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import IO, Final

import pytest

from batching.block_store.entry_file import DamagedEntry, check, read
from batching.block_store.store import shared_store
from tests.support.stored_entries import IDENTITY, MUCH, entry_of, is_same

NUM_BYTES: Final = 40_000
# Of entries that a child writes again and again.
NUM_ENTRIES: Final = 8

# It says so before it writes, and forks for each kill: the interpreter's start is what takes time.
_CHILD: Final = """
import os, sys
from itertools import count
from pathlib import Path
from batching.block_store.store import shared_store
from tests.support.stored_entries import entry_of

folder, identity, num_bytes, num_entries = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
entries = [entry_of(i, num_bytes) for i in range(num_entries)]
for _ in sys.stdin:
    if (child := os.fork()) == 0:
        store = shared_store(folder, 1 << 30, None, identity)
        print(os.getpid(), flush=True)
        for i in count():
            store.put(entries[i % num_entries])
            store._writer.flush()
    os.waitpid(child, 0)
    print(flush=True)
"""


@contextmanager
def writers(folder: Path) -> Iterator[tuple[IO[str], IO[str]]]:
    """Start a process whose children write; yield what it reads and says."""
    args = [sys.executable, "-c", _CHILD, str(folder), IDENTITY, str(NUM_BYTES), str(NUM_ENTRIES)]
    with Popen(args, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdin, process.stdout
        process.stdin.close()


def kill_one(orders: IO[str], said: IO[str], seconds: float) -> None:
    """Let a child write for so long, and kill it."""
    orders.write("\n")
    orders.flush()
    child = int(said.readline())
    signal.sigtimedwait([signal.SIGUSR1], seconds)
    os.kill(child, signal.SIGKILL)
    assert said.readline() == "\n"


def parts_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".*") if path.is_file()]


def check_whole(folder: Path) -> int:
    """Check what has a final name; return how many files that are."""
    entries = {each.key.name: each for each in (entry_of(i, NUM_BYTES) for i in range(NUM_ENTRIES))}
    paths = [*folder.rglob("*.block")]
    for path in paths:
        check(path)
        entry = entries[path.name]
        assert is_same(read(path, IDENTITY, entry.key), entry)
    return len(paths)


def check_kills(folder: Path, num: int) -> None:
    rng, num_left = random.Random(num), 0
    with writers(folder) as (orders, said):
        for _ in range(num):
            kill_one(orders, said, rng.uniform(0, 0.02))
            check_whole(folder)
            num_left += len(parts_in(folder))
    assert num_left, "a kill met a file that was being written"
    # The next start serves, and tidies up.
    store = shared_store(folder, MUCH, None, IDENTITY)
    assert store.num_entries == check_whole(folder) > 0
    assert parts_in(folder) == []
    assert store.put(entry_of(99))
    store.close()
    check(next(folder.rglob(entry_of(99).key.name)))


def test_a_server_that_is_killed_while_it_writes_leaves_no_wrong_file(tmp_path: Path) -> None:
    check_kills(tmp_path, 6)


@pytest.mark.slow
def test_a_server_that_is_killed_at_200_points_leaves_no_wrong_file(tmp_path: Path) -> None:
    check_kills(tmp_path, 200)


def test_a_name_that_came_before_the_contents_is_seen_as_damaged(tmp_path: Path) -> None:
    """As after a loss of power, since files are not synced."""
    store, entry = shared_store(tmp_path, MUCH, None, IDENTITY), entry_of(1)
    store.put(entry)
    store.close()
    (path,) = tmp_path.rglob("*.block")
    os.truncate(path, 0)
    os.truncate(path, 300)
    with pytest.raises(DamagedEntry):
        check(path)
    again = shared_store(tmp_path, MUCH, None, IDENTITY)
    assert again.has(entry.key)
    again.close()
