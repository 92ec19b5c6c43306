"""Files on disk: what a crash leaves is cleared, and what is not a file is none."""

import json
import sqlite3
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from pydantic import SecretStr

from app.settings import Settings
from app.settings.storage import file_limits
from app.storage.batch_storage import BatchStorage
from app.storage.batches import StoredBatch
from app.storage.disk.database import Database
from app.storage.disk.quota import NoRoomForFile
from app.storage.files import Draft, FileLimits, StoredFile
from app.storage.responses.limits import StoreLimits
from app.storage.storage import open_folder


def left_in(folder: Path) -> set[str]:
    return {path.name for path in (folder / "files").iterdir()}


def test_drafts_and_files_without_a_row_are_cleared(tmp_path: Path) -> None:
    with closing(BatchStorage(folder=tmp_path)) as storage:
        storage.files._draft_path().write_bytes(b"half")
        storage.files.end(storage.files.begin_output(), "file-unknown")
        file = StoredFile("file-1", "me", "batch", "a", 0, 0)
        storage.files.add(file, storage.files.begin("me"))
    assert len(left_in(tmp_path)) == 3
    with closing(BatchStorage(folder=tmp_path)):
        assert left_in(tmp_path) == {"file-1"}


def test_results_of_batches_that_have_ended_are_cleared(tmp_path: Path) -> None:
    with closing(BatchStorage(folder=tmp_path)) as storage:
        for suffix in ("", "-wal", "-shm"):
            path = storage.work_path("batch_1")
            path.with_name(path.name + suffix).touch()
    with closing(BatchStorage(folder=tmp_path)):
        assert list((tmp_path / "work").iterdir()) == []


def test_without_a_folder_files_are_elsewhere_and_go_with_the_storage() -> None:
    storage = BatchStorage()
    draft = storage.files.begin("me")
    storage.files.end(draft, "file-1")
    path = storage.files.path("file-1")
    assert path.exists()
    assert path.stat().st_mode & 0o777 == 0o600
    storage.close()
    assert not path.exists()


def write(storage: BatchStorage, draft: Draft, size: int, file_id: str) -> None:
    draft.write(b"x" * size)
    storage.files.add(StoredFile(file_id, "me", "batch", "a", size, 0), draft)


def test_an_empty_file_counts_as_what_it_takes_of_the_disk(tmp_path: Path) -> None:
    with closing(BatchStorage(FileLimits(100_000, 3 * 4096), tmp_path)) as storage:
        for number in range(3):
            draft = storage.files.begin("me")
            write(storage, draft, 0, f"file-{number}")
            storage.files.discard(draft)
        with pytest.raises(NoRoomForFile):
            storage.files.begin("me")


def a_batch(batch_id: str, owner: str) -> StoredBatch:
    return StoredBatch(
        id=batch_id,
        owner=owner,
        endpoint="/v1/chat/completions",
        input_file_id=f"file-{owner}",
        completion_window="24h",
        created=0,
        expires=60,
    )


def test_owners_of_batches_take_turns(tmp_path: Path) -> None:
    with closing(BatchStorage(folder=tmp_path)) as storage:
        for owner in ("one", "two"):
            file = StoredFile(f"file-{owner}", owner, "batch", "a", 0, 0)
            storage.files.add(file, storage.files.begin(owner))
        for number, owner in enumerate(("one", "one", "one", "two", "one", "two")):
            assert storage.batches.add(a_batch(f"{owner}-{number}", owner))

        def started(running: set[str], limit: int) -> list[str]:
            found = storage.batches.next_to_run(running, limit, limit_over=limit, now=1)
            return [batch.id for batch in found]

        assert started(set(), 3) == ["one-0", "two-3", "one-1"]
        assert started({"one-0", "one-1"}, 3) == ["two-3", "two-5", "one-2"]
        assert storage.batches.num_unfinished("two") == 2
        # One of which none runs waits for no other.
        assert started({"one-0", "one-1"}, 0) == ["two-3"]
        # Those that only have to end take no room of the others.
        storage.batches.change("one-0", lambda batch: replace(batch, status="cancelling"))
        found = storage.batches.next_to_run({"one-1"}, 1, limit_over=1, now=1)
        assert {batch.id for batch in found} == {"one-0", "two-3"}


def test_batches_outlive_an_upgrade(tmp_path: Path) -> None:
    with closing(BatchStorage(folder=tmp_path)):
        pass
    with closing(sqlite3.connect(tmp_path / "batches.sqlite")) as database, database:
        database.execute("ALTER TABLE batches ADD COLUMN server TEXT NOT NULL DEFAULT ''")
        database.execute(
            "INSERT INTO batches (id, owner, is_finished, input_file_id, body) "
            "VALUES ('batch_1', 'me', 0, 'file-1', ?)",
            (json.dumps(asdict(a_batch("batch_1", "me"))),),
        )
        database.execute("PRAGMA user_version = 1")
    with closing(BatchStorage(folder=tmp_path)) as storage:
        (kept,) = storage.batches.next_to_run((), 1, limit_over=1, now=1)
        assert replace(kept, errors=()) == a_batch("batch_1", "me")
        file = StoredFile("file-me", "me", "batch", "a", 0, 0)
        storage.files.add(file, storage.files.begin("me"))
        assert storage.batches.add(a_batch("batch_2", "me"))


def test_the_files_of_another_owner_are_not_deleted(tmp_path: Path) -> None:
    with closing(BatchStorage(folder=tmp_path)) as storage:
        draft = storage.files.begin("me")
        storage.files.add(StoredFile("file-1", "me", "batch", "a", 0, 0), draft)
        storage.files.delete("you", "file-1")
        assert left_in(tmp_path) == {"file-1"}


def test_a_database_that_is_none_is_reported_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "batches.sqlite").write_text("no database" * 100, encoding="ascii")
    with pytest.raises(OSError, match=r"/batches\.sqlite: "):
        BatchStorage(folder=tmp_path)


def test_a_database_in_a_folder_that_is_none_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    path.mkdir()
    with pytest.raises(OSError, match=r"/x\.sqlite: "):
        Database(path, "PRAGMA user_version = 1")


def test_the_default_limits_are_those_of_the_settings() -> None:
    assert FileLimits() == FileLimits(512 << 20, 10_240 << 20)
    assert file_limits(Settings.model_construct()) == FileLimits()


def test_each_key_has_an_equal_share() -> None:
    settings = Settings.model_construct(
        api_keys=SecretStr("one,two,three"), admin_keys=SecretStr("one,four"), max_files_mib=8
    )
    assert file_limits(settings).max_owner_bytes == 2 << 20


def test_storage_that_cannot_be_opened_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "batches").touch()
    with pytest.raises(OSError, match="batches"):
        open_folder(tmp_path, StoreLimits(), keeps_responses=True)
    (tmp_path / "batches").unlink()
    open_folder(tmp_path, StoreLimits(), keeps_responses=True).close()
