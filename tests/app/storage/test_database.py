"""Databases: what is reported of one that cannot be read or written."""

from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from app.storage.disk.database import Database, StorageError

SCHEMA: Final = "CREATE TABLE IF NOT EXISTS texts (text TEXT); PRAGMA user_version = 1"
SECRET: Final = "my diary"


def add(database: Database, text: str) -> None:
    with database.transaction() as connection:
        connection.execute("INSERT INTO texts VALUES (?)", (text,))


def reason(database: Database, text: str) -> str:
    """Return what is reported of a text that cannot be added."""
    with pytest.raises(StorageError) as failed:
        add(database, text)
    return str(failed.value)


def test_a_full_disk_is_reported_without_what_was_to_be_written(tmp_path: Path) -> None:
    path = tmp_path / "texts.sqlite"
    with closing(Database(path, SCHEMA)) as database:
        with database.transaction() as connection:
            connection.execute("PRAGMA max_page_count = 1")
        assert reason(database, SECRET * 10_000) == f"{path}: database or disk is full"


def test_a_damaged_file_is_reported_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "texts.sqlite"
    Database(path, SCHEMA).close()
    content = path.read_bytes()
    # The root page of the table: the first page has the schema.
    path.write_bytes(content[:4096] + b"x" * (len(content) - 4096))
    with closing(Database(path, SCHEMA)) as database:
        assert reason(database, SECRET) == (
            f"{path}: database disk image is malformed; move the file away, and a new one is made"
        )


def test_a_database_in_memory_has_no_file() -> None:
    database = Database(None, SCHEMA)
    database.close()
    assert reason(database, SECRET).startswith("the database in memory: Cannot operate on a closed")
