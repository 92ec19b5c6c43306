"""kill -9 at random points: every line has exactly one result after the next start."""

import json
import multiprocessing
import signal
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest

from app.storage.responses.limits import StoreLimits
from app.storage.storage import open_folder
from tests.support.batch_child import NUM_LINES, serve_batch

pytestmark = pytest.mark.timeout(600)


class Children:
    """Processes that are forked off one which has all modules."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.support.batch_child"])

    def serve(self, folder: Path, kill_at: int = 0) -> int | None:
        """Return how many events it took, or None if it was killed."""
        report = folder / "report"
        child = self._context.Process(target=serve_batch, args=(folder, kill_at, report))
        child.start()
        child.join()
        if child.exitcode == -signal.SIGKILL:
            return None
        assert child.exitcode == 0
        return int(report.read_text(encoding="ascii"))


@pytest.fixture(scope="module")
def children() -> Children:
    return Children()


def results(folder: Path) -> tuple[list[Any], list[Any]]:
    """Return the lines of the output and of the error file of the finished batch."""
    with closing(open_folder(folder, StoreLimits(), keeps_responses=False)) as storage:
        (batch,) = storage.batch.batches.page("", after=None, limit=10).items
        assert batch.status == "completed"
        assert batch.num_total == NUM_LINES
        files = storage.batch.files
        found = []
        for file_id in (batch.output_file_id, batch.error_file_id):
            assert file_id is not None
            file, text = files.get("", file_id), files.path(file_id).read_bytes()
            assert file is not None
            assert file.num_bytes == len(text)
            found.append([json.loads(line) for line in text.splitlines()])
        assert (len(found[0]), len(found[1])) == (batch.num_completed, batch.num_failed)
        known = {
            file.id
            for file in files.page("", after=None, limit=10, order="asc", purpose=None).items
        }
    left = [path.name for path in (folder / "batches" / "files").iterdir()]
    assert set(left) == known
    assert list((folder / "batches" / "work").iterdir()) == []
    return found[0], found[1]


def check(folder: Path) -> None:
    output, errors = results(folder)
    numbers = [int(record["id"].rpartition("_")[2]) for record in (*output, *errors)]
    assert sorted(numbers) == list(range(1, NUM_LINES + 1))
    assert [r["response"]["body"]["choices"][0]["text"] for r in output] == ["Hello!"] * len(output)
    assert [r["custom_id"] for r in errors] == ["id-3", "id-4", "id-7"]


def kill_at_random_points(children: Children, tmp_path: Path, num_points: int, seed: int) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    num_events = children.serve(whole)
    assert num_events is not None
    check(whole)
    random = Random(seed)
    num_killed = 0
    for point in range(num_points):
        folder = tmp_path / f"killed-{point}"
        folder.mkdir()
        # One of three starts over twice.
        for _ in range(1 + (point % 3 == 0)):
            num_killed += children.serve(folder, random.randrange(1, num_events)) is None
        assert children.serve(folder) is not None
        check(folder)
    assert num_killed >= num_points * 0.8


def test_no_line_is_lost_or_served_twice_after_kills(children: Children, tmp_path: Path) -> None:
    kill_at_random_points(children, tmp_path, num_points=5, seed=1)


@pytest.mark.slow
def test_the_same_at_fifty_points(children: Children, tmp_path: Path) -> None:
    kill_at_random_points(children, tmp_path, num_points=50, seed=2)
