"""Files that a server reads: of a model's makers, and beside other users of the machine."""

import itertools
import os
import stat
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Final

import mlx.core as mx
import pytest

from batching.backend.gguf.tokenizer import build_tokenizer
from batching.backend.weights_cache import cache
from batching.backend.weights_cache.cache import GIB, CacheEntry, NotKept, WeightsCache
from batching.errors import ModelLoadError
from batching.model_files.gguf_header import read_header
from batching.sandbox import child
from tests.support.gguf_writer import Value, write_gguf

# Vocabularies in which each token can be cut at every place.
EXPLODING: Final = {
    "one long token, again and again": [
        *("a" * length for length in range(1, 257)),
        *["a" * 256] * 500,
    ],
    "each token a prefix of the next": ["a" * length for length in range(1, 301)],
    "all texts of two letters": [
        "".join(letters) for n in range(1, 14) for letters in itertools.product("ab", repeat=n)
    ],
}


@pytest.mark.parametrize("kind", EXPLODING)
def test_a_vocabulary_is_not_multiplied(tmp_path: Path, kind: str) -> None:
    tokens = EXPLODING[kind]
    vocabulary: dict[str, Value] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
    }
    path = write_gguf(tmp_path / "model.gguf", vocabulary, {})
    header = read_header(path)
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError, match=f"its {len(tokens)} tokens .*merges"):
            build_tokenizer(header)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 * path.stat().st_size + (8 << 20)


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CacheEntry:
    """Return the place of a model's weights, which are kept there."""
    monkeypatch.setattr(cache, "MIN_BYTES", 0)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"model")
    entry = WeightsCache(tmp_path / "weights", GIB).entry(model, "model")
    keep(entry)
    entry.keep_note("check", "well")
    with entry.opened() as file:
        assert file is not None
    assert entry.note("check") == "well"
    return entry


def keep(entry: CacheEntry) -> None:
    entry.keep({}, {"norm": mx.ones(8)})


def file_of_mode(mode: int) -> Callable[[Path], None]:
    return lambda path: path.chmod(mode)


def folder_of_mode(mode: int) -> Callable[[Path], None]:
    return lambda path: path.parent.chmod(mode)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def link_elsewhere(path: Path) -> None:
    """As a link in place of the folder, to one that others write to."""
    path.parent.chmod(0o777)
    path.parent.rename(path.parent.with_name("elsewhere"))
    path.parent.symlink_to("elsewhere")


@pytest.mark.parametrize(
    "spoil",
    [
        *(file_of_mode(mode) for mode in (0o666, 0o620, 0o602)),
        *(folder_of_mode(mode) for mode in (0o777, 0o770, 0o1777)),
        link,
        link_elsewhere,
    ],
)
def test_weights_that_another_user_could_change_are_not_read(
    entry: CacheEntry, spoil: Callable[[Path], None]
) -> None:
    spoil(entry.path)
    with entry.opened() as file:
        assert file is None


def test_weights_of_another_user_are_not_read(
    entry: CacheEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with entry.opened() as file:
        assert file is None
    assert entry.note("check") is None
    with pytest.raises(NotKept, match="another user can write to it"):
        keep(entry)


@pytest.mark.parametrize("mode", [0o666, 0o620])
def test_notes_that_another_user_could_change_are_not_believed(
    entry: CacheEntry, mode: int
) -> None:
    entry.path.with_suffix(".json").chmod(mode)
    assert entry.note("check") is None
    entry.keep_note("check", "again")
    assert entry.note("check") == "again"


def test_nothing_is_written_where_another_user_could_place_links(
    entry: CacheEntry, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("text", encoding="utf-8")
    entry.path.with_name(f"{entry.path.name}.part").symlink_to(precious)
    with pytest.raises(NotKept):
        keep(entry)
    entry.path.parent.chmod(0o777)
    with pytest.raises(NotKept, match="another user can write to it"):
        keep(entry)
    assert precious.read_text(encoding="utf-8") == "text"


def test_a_file_that_is_read_is_replaced_and_never_changed(entry: CacheEntry) -> None:
    with entry.opened() as file:
        assert file is not None
        before = os.fstat(file.descriptor)
        keep(entry)
        after = os.fstat(file.descriptor)
        assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
        assert entry.path.stat().st_ino != after.st_ino
    assert stat.S_IMODE(entry.path.stat().st_mode) == 0o400


# What a template would run that has escaped from Jinja's sandbox.
ESCAPED: Final = """
import importlib.util, os, socket, sys
spec = importlib.util.spec_from_file_location("child", sys.argv[1])
child = importlib.util.module_from_spec(spec)
spec.loader.exec_module(child)
child.limit_process(512 << 20)
os.close(2)
tried = [
    lambda: os.open(sys.argv[1], os.O_RDONLY),
    lambda: socket.socket(),
    lambda: os.dup(1),
    lambda: os.dup2(1, 2),
    lambda: os.pipe(),
]
for attempt in tried:
    try:
        attempt()
    except OSError:
        continue
    os.write(1, b"opened")
os.write(1, sys.stdin.buffer.readline())
# At its end Python writes what is left to what is closed.
os._exit(0)
"""


def test_a_number_that_a_template_frees_opens_nothing() -> None:
    """What is open goes on to be read and written."""
    command = [sys.executable, "-I", "-c", ESCAPED, child.__file__]
    done = subprocess.run(command, input=b"a line\n", capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"a line\n"), done.stderr
