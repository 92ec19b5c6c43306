"""Digests of files: remembered while their state is the same, and computed again else."""

import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import xxhash

from batching.block_store.file_digests import FileDigests
from tests.support.rows import rows


def digest_of(store: Path, path: Path) -> str:
    return FileDigests(store).of([path])[path.name]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"some weights")
    return path


def test_a_digest_is_that_of_the_contents(tmp_path: Path, weights: Path) -> None:
    other = tmp_path / "config.json"
    other.write_bytes(b"")
    assert FileDigests(tmp_path / "store").of([weights, other]) == {
        "model.safetensors": xxhash.xxh3_128_hexdigest(b"some weights"),
        "config.json": xxhash.xxh3_128_hexdigest(b""),
    }


def test_a_file_is_not_read_again_while_it_seems_the_same(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = digest_of(tmp_path / "store", weights)

    def no_reading(*_: Any) -> None:
        raise AssertionError("it is known")

    monkeypatch.setattr(xxhash, "xxh3_128", no_reading)
    assert digest_of(tmp_path / "store", weights) == first
    link = tmp_path / "link.safetensors"
    link.symlink_to(weights)
    assert digest_of(tmp_path / "store", link) == first


STATE: Final = {"st_size": 12, "st_mtime_ns": 5, "st_ctime_ns": 6, "st_ino": 7, "st_dev": 8}


@pytest.mark.parametrize("changed", [None, *STATE])
def test_a_change_is_noticed_unless_all_of_a_files_state_is_the_same(
    changed: str | None, tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests, state = FileDigests(tmp_path / "store"), SimpleNamespace(**STATE)
    monkeypatch.setattr(Path, "stat", lambda *_, **__: state)
    (first,) = digests.of([weights]).values()
    assert first == xxhash.xxh3_128_hexdigest(b"some weights")
    weights.write_bytes(b"SOME WEIGHTS")
    if changed is not None:
        setattr(state, changed, STATE[changed] + 1)
    expected = first if changed is None else xxhash.xxh3_128_hexdigest(b"SOME WEIGHTS")
    assert digests.of([weights]) == {weights.name: expected}


def test_a_model_that_is_moved_keeps_its_digest(tmp_path: Path, weights: Path) -> None:
    first = digest_of(tmp_path / "store", weights)
    moved = weights.rename(tmp_path / "moved.safetensors")
    assert digest_of(tmp_path / "store", moved) == first


@rows("text", ["", "[", "[1]", "null", "5", '{"x": 5}', '{"x": []}', "\xff"])
def test_a_damaged_file_of_digests_is_none(tmp_path: Path, weights: Path, text: str) -> None:
    store = tmp_path / "store"
    store.mkdir(mode=0o700, exist_ok=True)
    text = text.replace('"x"', f'"{weights}"')
    (store / "digests.json").write_bytes(text.encode("latin1"))
    assert digest_of(store, weights) == xxhash.xxh3_128_hexdigest(b"some weights")


def test_digests_that_cannot_be_kept_are_computed_each_time(tmp_path: Path, weights: Path) -> None:
    store = tmp_path / "store"
    (store / "digests.json").mkdir(parents=True)
    for _ in range(2):
        assert digest_of(store, weights) == xxhash.xxh3_128_hexdigest(b"some weights")


def test_the_names_of_models_are_for_this_user_alone(tmp_path: Path, weights: Path) -> None:
    digest_of(tmp_path / "store", weights)
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    assert [each.name for each in (tmp_path / "store").iterdir()] == ["digests.json"]
    assert stat.S_IMODE((tmp_path / "store" / "digests.json").stat().st_mode) == 0o600


def test_a_file_that_is_not_there_has_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        digest_of(tmp_path / "store", tmp_path / "gone")


def test_a_folder_that_others_can_write_to_has_no_digests(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError):
        FileDigests(tmp_path)
