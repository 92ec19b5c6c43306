"""The folder of packed weights: bounded, the least recently used files leave, the disk is not filled."""

import os
import shutil
from pathlib import Path
from typing import Final, NamedTuple

import huggingface_hub.constants
import mlx.core as mx
import pytest

from batching.backend.weights_cache.cache import GIB, NotKept, WeightsCache, default_folder
from batching.backend.weights_cache.weights_file import AlreadyWritten, opened, write


def make(folder: Path, name: str, size: int, used: int) -> Path:
    path = folder / name
    path.write_bytes(bytes(size))
    os.utime(path, (used, used))
    return path


def test_what_was_used_least_recently_makes_room(tmp_path: Path) -> None:
    old, middle, new = (make(tmp_path, f"{n}.safetensors", 10, n) for n in (1, 2, 3))
    other = make(tmp_path, "notes.txt", 100, 0)
    WeightsCache(tmp_path, 35).make_room(10, tmp_path / "another.safetensors")
    assert [path.exists() for path in (old, middle, new, other)] == [False, True, True, True]


def test_a_file_that_is_replaced_needs_no_room_beside_itself(tmp_path: Path) -> None:
    old, new = (make(tmp_path, f"{n}.safetensors", 10, n) for n in (1, 2))
    WeightsCache(tmp_path, 20).make_room(10, new)
    assert old.exists()
    assert new.exists()


def test_a_file_that_goes_meanwhile_is_no_obstacle(tmp_path: Path) -> None:
    """Another process makes room, too."""
    (tmp_path / "1.safetensors").symlink_to("gone")
    old = make(tmp_path, "2.safetensors", 10, 2)
    WeightsCache(tmp_path, 15).make_room(10, tmp_path / "3.safetensors")
    assert not old.exists()


def test_what_is_more_than_all_deletes_nothing(tmp_path: Path) -> None:
    old = make(tmp_path, "1.safetensors", 10, 1)
    with pytest.raises(NotKept, match="are more than the 0 MiB allowed"):
        WeightsCache(tmp_path, 20).make_room(21, tmp_path / "2.safetensors")
    assert old.exists()


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize(
    ("total", "free", "fits"),
    [(100, 16, True), (100, 14, False), (1000, 19, True), (1000, 17, False)],
)
def test_a_part_of_the_disk_stays_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, free: int, fits: bool
) -> None:
    """A twentieth of a small one, 8 GiB of a large one."""
    usage = Usage(total * GIB, 0, free * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    weights = WeightsCache(tmp_path, 64 * GIB)
    if fits:
        weights.make_room(10 * GIB, tmp_path / "a.safetensors")
        return
    with pytest.raises(NotKept, match=r"10\.0 GiB would fill the disk"):
        weights.make_room(10 * GIB, tmp_path / "a.safetensors")


def test_what_was_left_half_written_is_deleted(tmp_path: Path) -> None:
    part = make(tmp_path, "a.safetensors.part", 10, 1)
    WeightsCache(tmp_path, GIB).make_room(1, tmp_path / "b.safetensors")
    assert not part.exists()


def test_a_file_that_is_being_written_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"

    def meanwhile(_: int) -> None:
        make(tmp_path, "b.safetensors.part", 1, 1)
        with pytest.raises(AlreadyWritten):
            write(path, "other", {}, {})
        WeightsCache(tmp_path, GIB).make_room(1, tmp_path / "c.safetensors")

    monkeypatch.setattr(os, "fsync", meanwhile)
    write(path, "key", {}, {})
    assert [each.name for each in tmp_path.iterdir()] == ["a.safetensors"]


TYPES: Final = [
    *(mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64),
    *(mx.float16, mx.bfloat16, mx.float32, mx.complex64),
]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_arrays_beside_packed_weights_can_be_of_any_type(tmp_path: Path, dtype: mx.Dtype) -> None:
    path = tmp_path / "a.safetensors"
    array = mx.arange(3).astype(dtype, stream=mx.cpu)
    write(path, "key", {}, {"a": array})
    with opened(path, "key") as file:
        assert file is not None
        found = file.others["a"]
        assert (found.dtype, found.tolist()) == (dtype, array.tolist())


def test_a_note_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(tmp_path, "model.gguf", 1, 1)
    entry = WeightsCache(tmp_path / "weights", GIB).entry(model, "model")
    entry.path.parent.mkdir()
    entry.path.touch()
    entry.keep_note("check", 1)

    def fail(self: Path, _: str) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fail)
        entry.keep_note("check", 2)
    assert entry.note("check") == 1
    assert len(list(entry.path.parent.iterdir())) == 2


def test_the_folder_is_beside_the_hubs_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "/var/cache/models/hub")
    assert default_folder() == Path("/var/cache/models/mlx-batch-server")


@pytest.mark.parametrize("name", ["org/model", "../../x", "..", "a b\n"])
def test_a_files_name_stays_in_the_folder(tmp_path: Path, name: str) -> None:
    model = make(tmp_path, "model.gguf", 1, 1)
    entry = WeightsCache(tmp_path / "weights", 1).entry(model, name, isa="any")
    assert entry.path.resolve().parent == (tmp_path / "weights").resolve()
    assert entry.path.name.isprintable()
