"""One server at a time uses a folder."""

import errno
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from app.storage.disk.folder_lock import FolderInUse, FolderLock

OTHER: Final = """
import sys
from pathlib import Path
from app.storage.disk.folder_lock import FolderLock

lock = FolderLock(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_folder_is_one_servers_until_it_closes(tmp_path: Path) -> None:
    with closing(FolderLock(tmp_path)):
        with pytest.raises(FolderInUse, match=f"another server uses {tmp_path}; each server needs"):
            FolderLock(tmp_path)
    FolderLock(tmp_path).close()


def test_a_server_that_is_killed_leaves_the_folder_free(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"locked\n"
            with pytest.raises(FolderInUse):
                FolderLock(tmp_path)
        finally:
            process.kill()
    FolderLock(tmp_path).close()


def test_a_folder_without_locks_is_an_os_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", fail)
    with pytest.raises(OSError, match="no locks"):
        FolderLock(tmp_path)
