"""`cache ls`, `rm` and `verify` on a folder that a server may use."""

import json
import os
from pathlib import Path
from typing import Any, Final

import pytest

from app.commands.parser import main
from batching.block_store.folder import ModelFolder, StoreFolder
from tests.support.rows import rows
from tests.support.stored_entries import entry_with, put_file

FIRST: Final = "ab" * 16
SECOND: Final = "ac" * 16


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLX_SERVER_KV_CACHE_DIR", str(tmp_path / "kv"))
    return tmp_path / "kv"


@pytest.fixture
def model(folder: Path) -> ModelFolder:
    """Return a model with an entry, which a server has loaded, beside one that none has."""
    store = StoreFolder(folder, 1 << 30)
    store.close(store.open(SECOND))
    model = store.open(FIRST, "org/model")
    os.utime(put_file(model, entry_with([1, 2], bytes(2048))), (86_400, 86_400))
    return model


def lines(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> list[str]:
    capsys.readouterr()
    assert main(["cache", *arguments]) == status
    out, error = capsys.readouterr()
    assert error == ""
    return out.splitlines()


def document(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    return json.loads("\n".join(lines(capsys, *arguments, "--json", status=status)))


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["cache", *arguments]) == 2
    out, line = capsys.readouterr()
    assert out == ""
    assert line.count("\n") == 1
    return line.removesuffix("\n")


def test_models_are_listed(
    model: ModelFolder, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lines(capsys, "ls") == [
        "IDENTITY      MODEL      ENTRIES  SIZE     LAST USE    LOADED",
        "abababababab  org/model  1        2 KiB    1970-01-02  yes",
        "acacacacacac  -          0        0 bytes  -           no",
    ]
    first, second = document(capsys, "ls")
    assert first.pop("made").endswith("+00:00")
    assert first == {
        "identity": FIRST,
        "model": "org/model",
        "used": "1970-01-02T00:00:00+00:00",
        "num_entries": 1,
        "num_bytes": model.path_of(entry_with([1, 2]).key).stat().st_size,
        "is_loaded": True,
    }
    assert (second["identity"], second["used"]) == (SECOND, None)


def test_an_empty_folder_is_listed_as_such(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir(mode=0o700)
    assert lines(capsys, "ls") == [f"nothing is kept in {folder}"]
    assert document(capsys, "ls") == []
    assert lines(capsys, "rm", "--all") == ["0 bytes are free again"]
    assert lines(capsys, "verify") == ["0 files checked, none damaged"]


def test_a_folder_can_be_named(
    model: ModelFolder,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    listed = lines(capsys, "ls")
    monkeypatch.delenv("MLX_SERVER_KV_CACHE_DIR")
    # It needs no settings.
    monkeypatch.setenv("MLX_SERVER_PORT", "x")
    assert lines(capsys, "ls", "--dir", str(folder)) == listed
    monkeypatch.setenv("HOME", str(folder.parent))
    assert lines(capsys, "ls", "--dir", "~/kv") == listed


class TestBadInput:
    def test_without_a_folder_a_line_says_how_one_is_set(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert error(capsys, "ls") == "no folder is set: MLX_SERVER_KV_CACHE_DIR or --dir names one"

    def test_settings_that_are_wrong_are_one_line(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("MLX_SERVER_PORT", "x")
        assert error(capsys, "ls").startswith("MLX_SERVER_PORT must be")

    @pytest.mark.parametrize("arguments", [["ls"], ["rm", "--all", "--yes"], ["verify"]])
    def test_a_folder_that_cannot_be_used_is_one_line(
        self, arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert error(capsys, *arguments) == f"cannot use {folder}: No such file or directory"
        folder.touch()
        assert error(capsys, *arguments) == f"cannot use {folder}: Not a directory"
        folder.unlink()
        folder.mkdir()
        folder.chmod(0o777)
        assert error(capsys, *arguments) == f"cannot use {folder}: another user can write to it"

    @rows(
        ("arguments", "line"),
        [
            (["rm"], "one of the arguments identity --all is required"),
            (["rm", "ab", "--all"], "--all: not allowed with argument identity"),
            (["rm", "b"], "nothing in {folder} begins with 'b'; cache ls lists what is there"),
            (["rm", ""], "nothing in {folder} begins with ''; cache ls lists what is there"),
            (
                ["rm", "a"],
                "a is the beginning of abababababab (org/model) and acacacacacac",
            ),
            (
                ["rm", "ac"],
                "delete acacacacacac, 0 bytes, from {folder}? --yes says so, since no terminal is here to ask at",
            ),
        ],
    )
    def test_what_is_not_clear_deletes_nothing(
        self,
        arguments: list[str],
        line: str,
        model: ModelFolder,
        folder: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert error(capsys, *arguments).endswith(line.format(folder=folder))
        assert len(document(capsys, "ls")) == 2


class TestRemove:
    def test_one_is_deleted_by_its_beginning(
        self, model: ModelFolder, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model.close()
        size = model.path_of(entry_with([1, 2]).key).stat().st_size
        assert lines(capsys, "rm", "ab", "--yes") == [
            "abababababab (org/model) is deleted",
            "2 KiB are free again",
        ]
        assert size // 1024 == 2
        assert [cache["identity"] for cache in document(capsys, "ls")] == [SECOND]

    def test_one_that_is_loaded_stays(
        self, model: ModelFolder, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert lines(capsys, "rm", FIRST, status=1) == [
            "abababababab (org/model) is loaded by a server, and stays",
            "0 bytes are free again",
        ]
        assert model.path_of(entry_with([1, 2]).key).exists()

    def test_all_that_are_not_loaded_are_deleted(
        self, model: ModelFolder, capsys: pytest.CaptureFixture[str]
    ) -> None:
        removed = document(capsys, "rm", "--all", "--yes", status=1)
        assert removed == {"deleted": [SECOND], "loaded": [FIRST], "freed": 0}
        model.close()
        size = model.path_of(entry_with([1, 2]).key).stat().st_size
        removed = document(capsys, "rm", "--all", "--yes")
        assert removed == {"deleted": [FIRST], "loaded": [], "freed": size}
        assert document(capsys, "ls") == []


class TestVerify:
    def test_what_is_good_is_counted(
        self, model: ModelFolder, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert lines(capsys, "verify") == ["1 files checked, none damaged"]
        assert document(capsys, "verify") == {"checked": 1, "damaged": []}

    def test_what_is_damaged_is_told_and_deleted_if_asked(
        self, model: ModelFolder, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = put_file(model, entry_with([3, 4]))
        path.write_bytes(path.read_bytes()[:-1])
        problem = "its checksum is another one"
        summary = "2 files checked, 1 damaged"
        assert lines(capsys, "verify", status=1) == [f"{path}: {problem}", summary]
        described = {"path": str(path), "problem": problem, "is_deleted": False}
        found = document(capsys, "verify", status=1)
        assert found == {"checked": 2, "damaged": [described]}
        assert lines(capsys, "verify", "--delete") == [f"{path}: {problem}; deleted", summary]
        assert lines(capsys, "verify") == ["1 files checked, none damaged"]
