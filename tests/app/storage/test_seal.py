"""Sealed values: what clients send back must be what they got."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from app.storage.disk.data_dir import default_data_dir, default_state_dir
from app.storage.disk.database import StorageError
from app.storage.seal import ForgedValue, SealedTooLong, Sealer, load_key
from tests.support.rows import rows

SEALER = Sealer(b"k" * 32)


@given(st.text(), st.text(max_size=8))
def test_a_sealed_text_comes_back(text: str, purpose: str) -> None:
    try:
        text.encode(), purpose.encode()
    except UnicodeEncodeError:
        return
    assert SEALER.unseal(purpose, SEALER.seal(purpose, text)) == text


@given(st.text(max_size=200))
def test_no_other_text_is_accepted(forged: str) -> None:
    with pytest.raises(ForgedValue):
        SEALER.unseal("reasoning", forged)


def test_each_changed_character_is_noticed() -> None:
    sealed = SEALER.seal("reasoning", "seven times six")
    for index, character in enumerate(sealed.rstrip("=")[:-1]):
        other = "A" if character != "A" else "B"
        with pytest.raises(ForgedValue):
            SEALER.unseal("reasoning", sealed[:index] + other + sealed[index + 1 :])


def test_a_value_serves_one_purpose_and_one_key() -> None:
    sealed = SEALER.seal("reasoning", "text")
    with pytest.raises(ForgedValue):
        SEALER.unseal("thinking", sealed)
    with pytest.raises(ForgedValue):
        Sealer(b"o" * 32).unseal("reasoning", sealed)


@rows("text", ["a" * 10, "\U0001f600" * 10, "\u00e9" * 9 + "a"])
def test_a_text_may_have_so_many_characters(text: str) -> None:
    sealed = SEALER.seal("reasoning", text)
    assert SEALER.unseal("reasoning", sealed, 10) == text
    with pytest.raises(SealedTooLong):
        SEALER.unseal("reasoning", sealed, 9)


def test_a_text_without_end_is_not_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Decompressor:
        def decompress(self, content: bytes, max_length: int) -> bytes:
            sizes.append(max_length)
            return b"a" * max_length

    monkeypatch.setattr("app.storage.seal.zlib.decompressobj", Decompressor)
    with pytest.raises(SealedTooLong):
        SEALER.unseal("reasoning", SEALER.seal("reasoning", "a" * 1000), 10)
    assert sizes == [41]


def test_a_folder_keeps_its_key_which_others_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "signing.key.new").write_bytes(b"of a start that was killed")
    key = load_key(tmp_path)
    assert load_key(tmp_path) == key != load_key(None)
    assert [path.name for path in tmp_path.iterdir()] == ["signing.key"]
    assert (tmp_path / "signing.key").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", [b"", b"short", b"k" * 33])
def test_a_file_that_is_no_key_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "signing.key"
    path.write_bytes(content)
    expected = f"{path} has {len(content)} bytes, and a key has 32; move the file away, "
    with pytest.raises(StorageError) as refused:
        load_key(tmp_path)
    assert str(refused.value).startswith(expected)
    path.unlink()
    assert len(load_key(tmp_path)) == 32


def test_a_key_is_on_the_disk_before_it_has_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[str] = []
    rename, fsync = os.rename, os.fsync

    def sync(descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else f"{size} bytes")
        fsync(descriptor)

    def name(draft: Path, path: Path) -> None:
        done.append("name")
        rename(draft, path)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", name)
    load_key(tmp_path)
    assert done == ["32 bytes", "name", "folder"]


@pytest.mark.parametrize(
    ("platform", "configured", "expected"),
    [
        ("linux", "", "/home/u/.local/share/mlx-batch-server"),
        ("linux", "relative", "/home/u/.local/share/mlx-batch-server"),
        ("linux", "/data", "/data/mlx-batch-server"),
        ("darwin", "/data", "/home/u/Library/Application Support/mlx-batch-server"),
    ],
)
def test_the_default_folder_is_the_platforms(
    monkeypatch: pytest.MonkeyPatch, platform: str, configured: str, expected: str
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setenv("HOME", "/home/u")
    monkeypatch.setenv("XDG_DATA_HOME", configured)
    assert default_data_dir() == Path(expected)
    monkeypatch.setenv("XDG_STATE_HOME", configured)
    assert default_state_dir() == Path(expected.replace("/share/", "/state/"))
