"""Digests of files: remembered while size, time and inode are the same, and computed again else."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import xxhash

from batching.block_store.file_digests import FileDigests
from tests.support.rows import rows


def digest_of(store: Path, path: Path) -> str:
    return FileDigests(store).of([path])[path.name]


def put_back_time(path: Path, before: os.stat_result) -> None:
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


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


def test_a_change_is_not_noticed_only_if_size_time_and_inode_are_the_same(
    tmp_path: Path, weights: Path
) -> None:
    store, before = tmp_path / "store", weights.stat()
    first = digest_of(store, weights)
    weights.write_bytes(b"SOME WEIGHTS")
    put_back_time(weights, before)
    assert digest_of(store, weights) == first
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    second = digest_of(store, weights)
    assert second == xxhash.xxh3_128_hexdigest(b"SOME WEIGHTS")
    weights.write_bytes(b"some weights!")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert digest_of(store, weights) == xxhash.xxh3_128_hexdigest(b"some weights!")
    replacement = tmp_path / "new"
    replacement.write_bytes(b"Some weights!")
    os.utime(replacement, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    replacement.rename(weights)
    assert digest_of(store, weights) == xxhash.xxh3_128_hexdigest(b"Some weights!")


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
