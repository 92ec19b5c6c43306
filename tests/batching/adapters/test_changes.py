"""An open adapter is what it was, whatever happens to its files; another one in its place is seen."""

import gc
import os
import shutil
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from batching.adapters.adapter import Adapter
from batching.adapters.files import adapter_file
from batching.adapters.files.adapter_file import AdapterFile, opened
from batching.adapters.files.kept_file import ContentsChanged, KeptFile
from batching.errors import AdapterChanged, AdapterError
from tests.support.adapter_files import Q_PROJ, peft_tensors, random_layers, write_peft

OF_PEFT = "adapter_model.safetensors"


def write(folder: Path, seed: int = 1) -> Path:
    return write_peft(folder, peft_tensors(random_layers(seed)))


def assert_reads(file: AdapterFile, seed: int = 1) -> None:
    a, b = random_layers(seed)[Q_PROJ]
    numbers = file.read()[Q_PROJ]
    np.testing.assert_array_equal(numbers.a, a)
    np.testing.assert_array_equal(numbers.b, 3 * b)


def test_a_deleted_folder(tmp_path: Path) -> None:
    file = AdapterFile(write(tmp_path / "style"), "style")
    shutil.rmtree(tmp_path / "style")
    assert_reads(file)
    assert_reads(file)
    assert opened(file.adapter) is file


def test_files_that_are_replaced_by_others(tmp_path: Path) -> None:
    file = AdapterFile(write(tmp_path / "style"), "style")
    (write(tmp_path / "other", seed=2) / OF_PEFT).rename(tmp_path / "style" / OF_PEFT)
    assert_reads(file)
    new = AdapterFile(tmp_path / "style", "style")
    assert new.adapter != file.adapter
    assert opened(file.adapter) is file
    assert opened(new.adapter) is new
    assert_reads(new, seed=2)


def test_files_that_are_touched(tmp_path: Path) -> None:
    file = AdapterFile(write(tmp_path), "style")
    os.utime(tmp_path / OF_PEFT, (1, 1))
    (tmp_path / OF_PEFT).chmod(0o400)
    assert_reads(file)


def test_files_that_are_overwritten(tmp_path: Path) -> None:
    path = write(tmp_path, seed=6) / OF_PEFT
    file = AdapterFile(tmp_path, "style")
    times = path.stat()
    with path.open("r+b") as other:
        other.seek(-4, os.SEEK_END)
        other.write(b"\0\0\0\x40")
    # As `cp -p` does, for one.
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.fault is None
    changed = "the files of the adapter 'style' have changed since it was loaded; load it again"
    for attempt in file.read, partial(opened, file.adapter):
        with pytest.raises(AdapterChanged) as caught:
            attempt()
        assert str(caught.value) == changed
    # Another copy of it is as good.
    copy = AdapterFile(write(tmp_path / "copy", seed=6), "style")
    assert copy.adapter == file.adapter
    assert opened(file.adapter) is copy


def test_what_could_not_be_had_is_at_fault_until_it_is_written_again(tmp_path: Path) -> None:
    path = write(tmp_path, seed=16) / OF_PEFT
    contents = path.read_bytes()
    file = AdapterFile(tmp_path, "style")
    path.write_bytes(contents[:-4] + b"\0\0\0\x40")
    # Whether it is needed is not known: it may be in the device's memory.
    assert file.fault is None
    with pytest.raises(AdapterChanged):
        opened(file.adapter)
    assert file.fault == str(AdapterChanged(file.adapter.name))
    path.write_bytes(contents)
    assert file.fault is None
    assert opened(file.adapter) is file
    os.truncate(path, 8)
    with pytest.raises(AdapterError, match="cut off"):
        opened(file.adapter)
    assert file.fault == str(AdapterChanged(file.adapter.name))
    file.close()
    assert file.fault is None


@pytest.mark.parametrize("size", [0, 8, 600])
def test_files_that_are_cut_off(size: int, tmp_path: Path) -> None:
    file = AdapterFile(write(tmp_path), "style")
    os.truncate(tmp_path / OF_PEFT, size)
    with pytest.raises(AdapterChanged):
        file.read()


def test_a_file_that_is_cut_off_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(100))
    file = KeptFile(path, tmp_path, 100)
    os.truncate(path, 50)
    with pytest.raises(ContentsChanged):
        file.read(0, 100)


def test_a_file_that_is_written_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path) / OF_PEFT

    def write_meanwhile(*_: object) -> bool:
        os.truncate(path, 50)
        return True

    monkeypatch.setattr(adapter_file, "_are_finite", write_meanwhile)
    with pytest.raises(AdapterError, match="it is being written"):
        AdapterFile(tmp_path, "style")


def test_a_closed_file(tmp_path: Path) -> None:
    file = AdapterFile(write(tmp_path), "style")
    file.close()
    file.close()
    assert not file.is_open
    with pytest.raises(AdapterError, match="it is closed"):
        file.read()
    again = opened(file.adapter)
    assert again is not file
    assert_reads(again)


def test_a_file_is_closed_when_nothing_refers_to_it(tmp_path: Path) -> None:
    # Exceptions of other tests refer to some.
    gc.collect()
    before = len(os.listdir("/dev/fd"))
    files = [AdapterFile(write(tmp_path, seed=3), "style") for _ in range(3)]
    assert len(os.listdir("/dev/fd")) == before + 3
    adapter = files[0].adapter
    assert opened(adapter) in files
    files.clear()
    gc.collect()
    assert len(os.listdir("/dev/fd")) == before
    assert_reads(opened(adapter), seed=3)


def test_another_adapter_at_the_path(tmp_path: Path) -> None:
    adapter = AdapterFile(write(tmp_path, seed=4), "style").adapter
    gc.collect()
    write(tmp_path, seed=5)
    with pytest.raises(AdapterChanged):
        opened(adapter)
    shutil.rmtree(tmp_path)
    with pytest.raises(AdapterError, match="there is no such folder"):
        opened(adapter)


def test_many_threads_read_and_one_closes(tmp_path: Path) -> None:
    file = AdapterFile(write(tmp_path / "style"), "style")
    adapters: list[Adapter] = [file.adapter] * 200
    messages: set[str] = set()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            for adapter in adapters:
                try:
                    assert_reads(opened(adapter))
                except AdapterError as error:
                    messages.add(str(error))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    file.close()
    # Others get its descriptor.
    others = [AdapterFile(write(tmp_path / str(i), seed=2), "other") for i in range(4)]
    for thread in threads:
        thread.join()
    assert failures == []
    assert messages <= {f"cannot load the adapter {file.adapter.path}: it is closed"}
    assert all(other.is_open for other in others)
