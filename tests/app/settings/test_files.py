"""Files that settings name and that are read later are checked at the start."""

import os
from pathlib import Path

import pytest

from app.settings import SettingsError
from app.settings.files import check_file


def test_a_file_that_can_be_read_later_is_good(tmp_path: Path) -> None:
    (tmp_path / "warm.jsonl").write_bytes(b"\xff")
    check_file("warm_file", tmp_path / "warm.jsonl")


def test_one_that_cannot_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reasons = {"none": "No such file or directory", "pipe": "it is no file", ".": "it is no file"}
    for name, reason in reasons.items():
        with pytest.raises(SettingsError) as caught:
            check_file("warm_file", tmp_path / name)
        line = f"MLX_SERVER_WARM_FILE cannot be read: {tmp_path / name}: {reason}"
        assert str(caught.value) == line
