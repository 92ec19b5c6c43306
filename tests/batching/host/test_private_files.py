"""Files that no other user can change."""

from pathlib import Path

import pytest

from batching.host.private_files import open_private, replace_private


def test_a_file_of_this_user_is_opened(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    replace_private(path := tmp_path / "a", "text")
    with open(open_private(path), encoding="utf-8") as file:
        assert file.read() == "text"
    path.chmod(0o666)
    with pytest.raises(PermissionError):
        open_private(path)
