"""A server that is killed while it writes: what has its final name is whole, or is seen to be damaged."""

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Event
from typing import Final

import pytest

from batching.block_store.entry_file import DamagedEntry, check, read
from batching.block_store.store import shared_store
from tests.support.stored_entries import IDENTITY, MUCH, entry_of, is_same, size_of_file

# Of the entries that a child writes again and again; one is whole before another one is begun.
SIZES: Final = (60, *7 * [40_000])
SIZE: Final = size_of_file(SIZES[-1])

# It forks for each kill, since the interpreter's start takes longer than all of them.  A child has an order: of how many bytes
# a file may be, at which the system kills it; 0 is no limit.
_CHILD: Final = """
import os, resource, signal, sys
from itertools import cycle
from pathlib import Path
from batching.block_store.store import shared_store
from tests.support.stored_entries import entry_of

folder, identity, *sizes = sys.argv[1:]
entries = [entry_of(i, int(size)) for i, size in enumerate(sizes)]
for order in sys.stdin:
    if (child := os.fork()) == 0:
        store = shared_store(Path(folder), 1 << 30, None, identity)
        if limit := int(order):
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        print(os.getpid(), flush=True)
        for entry in cycle(entries):
            store.put(entry)
            store.flush()
    _, status = os.waitpid(child, 0)
    print(os.WTERMSIG(status), flush=True)
"""


@contextmanager
def writers(folder: Path) -> Iterator[Callable[[int, float], int]]:
    """Start a process whose children write; yield what lets one write, for so long, and returns the signal that ended it."""
    args = [sys.executable, "-c", _CHILD, str(folder), IDENTITY, *map(str, SIZES)]
    with Popen(args, stdin=PIPE, stdout=PIPE, text=True) as process:
        orders, said = process.stdin, process.stdout
        assert orders is not None
        assert said is not None

        def kill(limit: int, seconds: float) -> int:
            orders.write(f"{limit}\n")
            orders.flush()
            child = int(said.readline())
            if not limit:
                Event().wait(seconds)
                os.kill(child, signal.SIGKILL)
            return int(said.readline())

        yield kill
        orders.close()


def parts_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".*") if path.is_file()]


def check_whole(folder: Path) -> int:
    """Check what has a final name; return how many files that are."""
    entries = {each.key.name: each for each in map(entry_of, range(len(SIZES)), SIZES)}
    paths = [*folder.rglob("*.block")]
    for path in paths:
        check(path)
        entry = entries[path.name]
        assert is_same(read(path, IDENTITY, entry.key), entry)
    return len(paths)


def check_next_start(folder: Path) -> None:
    """It has what is whole, tidies up, and goes on."""
    store = shared_store(folder, MUCH, None, IDENTITY)
    assert store.num_entries == check_whole(folder) > 0
    assert parts_in(folder) == []
    assert store.put(entry_of(99))
    store.close()
    check(next(folder.rglob(entry_of(99).key.name)))


def test_a_server_that_is_killed_within_a_file_leaves_no_wrong_one(tmp_path: Path) -> None:
    with writers(tmp_path) as kill:
        for at in (400, SIZE // 2, SIZE - 16, SIZE - 1):
            assert kill(at, 0) == signal.SIGXFSZ
            assert check_whole(tmp_path) == 1
            # Each one has found those of the others, and has taken them away.
            assert [path.stat().st_size for path in parts_in(tmp_path)] == [at]
    check_next_start(tmp_path)


@pytest.mark.slow
def test_a_server_that_is_killed_at_200_moments_leaves_no_wrong_file(tmp_path: Path) -> None:
    rng, num_left = random.Random(7), 0
    with writers(tmp_path) as kill:
        for _ in range(200):
            assert kill(0, rng.uniform(0, 0.02)) == signal.SIGKILL
            check_whole(tmp_path)
            num_left += len(parts_in(tmp_path))
    assert num_left, "kills met files that were being written"
    check_next_start(tmp_path)


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
