"""A folder of the store is listed, deleted and checked, also while servers use it."""

import fcntl
import os
import stat
import time
from pathlib import Path
from typing import Any, Final

import pytest

from batching.block_store.entry_file import check
from batching.block_store.folder import StoreFolder
from batching.block_store.inventory import (
    CacheInUse,
    check_caches,
    delete_cache,
    stored_bytes,
    stored_caches,
)
from batching.block_store.model_note import ModelNote, read_note, write_note
from tests.support.rows import rows
from tests.support.stored_entries import entry_with, put_file

GIB: Final = 1 << 30
NOW: Final = 1_000_000.0


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoreFolder:
    monkeypatch.setattr(time, "time", lambda: NOW)
    return StoreFolder(tmp_path / "store", GIB)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def problems(folder: Path, *, delete: bool = False) -> dict[str, str]:
    """Return what is wrong with which file."""
    checked = check_caches(folder, delete=delete)
    return {file.path.name: file.problem for file in checked if file.problem}


class TestList:
    def test_models_are_listed_with_what_they_have(self, store: StoreFolder) -> None:
        first, second = store.open("a" * 32, "org/model"), store.open("b" * 32)
        old, new = put_file(first, entry_with([1, 2])), put_file(first, entry_with([3, 4]))
        os.utime(old, (1, 1))
        os.utime(new, (2.5, 2.5))
        size = old.stat().st_size + new.stat().st_size
        (store.folder / "a folder of others").mkdir()
        (first.path_of(entry_with([1, 2]).key).parent / "a file of others").touch()
        store.close(second)
        assert stored_caches(store.folder) == [
            ("a" * 32, "org/model", NOW, 2.5, 2, size, True),
            ("b" * 32, "", None, None, 0, 0, False),
        ]
        assert stored_bytes(store.folder) >= size

    def test_the_last_id_of_a_model_is_noted(self, store: StoreFolder) -> None:
        model = store.open("a", "first")
        folder = store.folder / "a"
        note = folder / "model.json"
        assert read_note(folder) == ModelNote("first", NOW)
        assert stat.S_IMODE(note.stat().st_mode) == 0o600
        note.write_text('{"model": "first", "made": 3}')
        store.close(model)
        store.open("a", "second")
        assert read_note(folder) == ModelNote("second", 3.0)
        assert names(folder) == {"lock", "model.json"}

    @rows("text", ["", "[", "[]", "{}", '{"model": "a", "made": null}'])
    def test_a_damaged_note_says_nothing(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "model.json").write_text(text)
        assert read_note(tmp_path) == ModelNote()

    def test_where_a_note_cannot_be_written_none_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "rename", fail)
        write_note(tmp_path, "model")
        assert names(tmp_path) == set()

    def test_a_folder_of_others_is_refused(self, store: StoreFolder) -> None:
        store.folder.chmod(0o777)
        with pytest.raises(PermissionError):
            stored_caches(store.folder)
        with pytest.raises(PermissionError):
            stored_bytes(store.folder)
        with pytest.raises(PermissionError):
            delete_cache(store.folder, "a")
        with pytest.raises(PermissionError):
            list(check_caches(store.folder))


class TestDelete:
    def test_all_of_a_model_is_deleted(self, store: StoreFolder) -> None:
        model, other = store.open("a"), store.open("b")
        path = put_file(model, entry_with([1, 2]))
        # What a server that was killed has begun.
        begun = path.with_name(f".{path.name}.7")
        begun.write_bytes(b"123")
        size = path.stat().st_size + 3
        kept = put_file(other, entry_with([1, 2]))
        for each in (model, other):
            store.close(each)
        assert delete_cache(store.folder, "a") == size
        assert [cache.identity for cache in stored_caches(store.folder)] == ["b"]
        assert kept.exists()
        assert not (store.folder / "a").exists()

    def test_one_that_is_loaded_stays(self, store: StoreFolder) -> None:
        model = store.open("a")
        path = put_file(model, entry_with([1, 2]))
        with pytest.raises(CacheInUse):
            delete_cache(store.folder, "a")
        assert path.exists()
        store.close(model)
        delete_cache(store.folder, "a")
        assert not path.exists()

    def test_files_of_others_stay(self, store: StoreFolder, tmp_path: Path) -> None:
        model = store.open("a")
        path = put_file(model, entry_with([1, 2]))
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / path.name).touch()
        (store.folder / "a" / "link").symlink_to(outside)
        (path.parent / "notes.txt").touch()
        (path.parent / ".hidden").touch()
        (store.folder / "a" / "empty").mkdir()
        store.close(model)
        delete_cache(store.folder, "a")
        in_it = path.parent.name
        assert names(store.folder / "a") == {
            *("link", "empty", in_it, f"{in_it}/notes.txt", f"{in_it}/.hidden")
        }
        assert (outside / path.name).exists()
        # It is a model's folder no longer.
        assert stored_caches(store.folder) == []
        with pytest.raises(CacheInUse):
            delete_cache(store.folder, "a")

    def test_a_server_that_waits_for_the_lock_has_a_folder(
        self, store: StoreFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.close(store.open("a"))
        flock = fcntl.flock
        waits: list[int] = []

        def delete_first(lock: int, kind: int) -> None:
            if kind == fcntl.LOCK_EX | fcntl.LOCK_NB and not waits:
                waits.append(lock)
                delete_cache(store.folder, "a")
            flock(lock, kind)

        monkeypatch.setattr(fcntl, "flock", delete_first)
        model = store.open("a", "model")
        assert waits
        put_file(model, entry_with([1, 2]))
        (cache,) = stored_caches(store.folder)
        assert (cache.model, cache.num_entries, cache.is_loaded) == ("model", 1, True)


class TestCheck:
    def test_what_was_written_is_good(self, store: StoreFolder) -> None:
        model = store.open("a")
        paths = {put_file(model, entry_with([1, 2])), put_file(model, entry_with([3, 4]))}
        next(iter(paths)).with_name("a file of others").touch()
        checked = list(check_caches(store.folder, delete=True))
        assert {file.path for file in checked} == paths
        assert not any(file.problem or file.is_deleted for file in checked)

    @rows("at", [0, 9, 20, 150, -20, -1])
    def test_a_flipped_bit_is_found(self, at: int, store: StoreFolder) -> None:
        path = put_file(store.open("a"), entry_with([1, 2]))
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
        assert list(problems(store.folder)) == [path.name]
        assert path.exists()
        assert list(problems(store.folder, delete=True)) == [path.name]
        assert not path.exists()
        assert problems(store.folder) == {}

    @pytest.mark.parametrize("place", ["zz/{name}", "{name}"])
    def test_a_file_in_another_place_is_found(self, place: str, store: StoreFolder) -> None:
        path = put_file(store.open("a"), entry_with([1, 2]))
        moved = store.folder / "a" / place.format(name=path.name)
        moved.parent.mkdir(exist_ok=True)
        path.rename(moved)
        found = {moved.name: "it is not where one of its name belongs"}
        assert problems(store.folder) == found

    def test_a_file_of_another_model_is_found(self, store: StoreFolder) -> None:
        entry = entry_with([1, 2])
        path, other = put_file(store.open("a"), entry), store.open("b").path_of(entry.key)
        other.parent.mkdir()
        path.rename(other)
        assert problems(store.folder) == {path.name: "it belongs to another model or prefix"}

    def test_a_name_that_is_not_the_hash_of_the_tokens_is_found(self, store: StoreFolder) -> None:
        model, entry = store.open("a"), entry_with([1, 2])
        path = put_file(model, type(entry)(entry.key, entry.parent, [1, 3], entry.contents))
        assert problems(store.folder) == {path.name: "its name is not the hash of its tokens"}

    def test_what_cannot_be_read_is_told_and_stays(
        self, store: StoreFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = put_file(store.open("a"), entry_with([1, 2]))

        def fail(_: Path) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr("batching.block_store.inventory.check", fail)
        told = "it cannot be read: Input/output error"
        assert problems(store.folder, delete=True) == {path.name: told}
        assert path.exists()

    def test_what_is_deleted_meanwhile_is_left_out(
        self, store: StoreFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put_file(store.open("a"), entry_with([1, 2]))

        def delete_first(path: Path) -> None:
            path.unlink()
            check(path)

        monkeypatch.setattr("batching.block_store.inventory.check", delete_first)
        assert list(check_caches(store.folder)) == []
