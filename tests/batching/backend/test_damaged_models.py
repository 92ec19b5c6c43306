"""Damaged and hostile model files: one line, soon, and without the memory that they claim."""

import json
import re
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.support.damaged_files import outcome
from tests.support.gguf_bytes import (
    HOSTILE,
    HUGE,
    check_inside,
    gguf,
    read_or_reject,
    tensor,
    text,
    value,
)
from tests.support.gguf_models import (
    BPE,
    blocks,
    metadata_of,
    random_model,
    tensors_of,
)
from tests.support.gguf_writer import Q8_0, write_gguf
from tests.support.model_files import edit_config, rejection, write_model
from tests.support.weekly import weekly


def write_file(directory: Path) -> Path:
    """Write a whole model as one GGUF file, with a quantized tensor."""
    model, config = random_model("llama", vocab_size=262)
    tensors = tensors_of(model, config)
    tensors["token_embd.weight"], _ = blocks(Q8_0, (262, 128), 1)
    return write_gguf(directory / "m.gguf", BPE | metadata_of(config), tensors)


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Fail if a test takes more memory than its files are large, many times over."""
    tracemalloc.start()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 26
    assert mx.get_peak_memory() - before < 1 << 25


@pytest.mark.parametrize("what", HOSTILE)
def test_a_header_that_lies_is_rejected(tmp_path: Path, what: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(HOSTILE[what])
    assert str(path) in rejection(path)


def test_what_a_file_says_does_nothing_to_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(tensors=(tensor("a\nb\x1b[2J" + "c" * 999, (4,), kind=99),)))
    message = rejection(path)
    assert "tensor a b?[2Jccc" in message
    assert len(message) < 400


@pytest.mark.parametrize("is_tensors", [False, True])
def test_more_entries_than_any_model_has_are_not_read(tmp_path: Path, is_tensors: bool) -> None:
    path = tmp_path / "m.gguf"
    names = [str(i) for i in range(70_000)]
    if is_tensors:
        path.write_bytes(gguf(tensors=tuple(tensor(name, (1,)) for name in names)))
    else:
        path.write_bytes(gguf(*(value(name, 0, b"0") for name in names)))
    assert "claims more than any model has" in rejection(path)


def test_a_header_larger_than_any_models_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1))
        file.write(text("a")[:8] + b"a" + struct.pack("<IQ", 8, 1 << 34))
        file.truncate(1 << 35)
    assert "claims more than any model has" in rejection(path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"llama.block_count": 1 << 30}, "tensors for 1073741824 layers"),
        ({"llama.attention.head_count": 0}, "it has 0 attention heads"),
        ({"llama.embedding_length": (1 << 31) - 1}, "disagree"),
        ({"llama.feed_forward_length": -5}, ""),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, ""),
        ({"llama.context_length": float("inf")}, "OverflowError"),
        ({"tokenizer.ggml.tokens": ["a" * 5000]}, "a token of 5000 characters"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, ""),
        ({"tokenizer.ggml.merges": ["no such"]}, ""),
        ({"tokenizer.ggml.eos_token_id": 1 << 30}, ""),
    ],
)
def test_values_that_cannot_be_are_rejected_or_harmless(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    model, config = random_model("llama", vocab_size=262)
    metadata = BPE | metadata_of(config) | changes
    path = write_gguf(tmp_path / "m.gguf", metadata, tensors_of(model, config))
    if reason:
        assert reason in rejection(path)
    else:
        assert outcome(path) in ("loaded", "rejected")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_file(tmp_path_factory.mktemp("whole")).read_bytes()


FIELDS: Final = st.one_of(
    st.integers(0, 255).map(lambda n: struct.pack("<B", n)),
    st.integers(0, 2**32 - 1).map(lambda n: struct.pack("<I", n)),
    st.sampled_from([0, 1, 31, *HUGE, 2**63]).map(lambda n: struct.pack("<Q", n)),
)


# `make fuzz` searches further.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 6000), FIELDS), min_size=1, max_size=3), st.data())
def test_a_header_with_other_bytes_in_it_is_read_or_rejected(
    tmp_path: Path, whole: bytes, changes: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    content = whole[: data.draw(st.sampled_from([len(whole), len(whole) - 1, 6000, 5000]))]
    for at, field in changes:
        content = content[:at] + field + content[at + len(field) :]
    if (header := read_or_reject(tmp_path / "m.gguf", content)) is not None:
        check_inside(header, len(content))


# Safetensors


def rewrite(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of a model's weights."""
    path = directory / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[8 + size :])


NAME: Final = "model.layers.0.mlp.up_proj.weight"


def with_tensor(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[NAME].update(changes)


@pytest.mark.parametrize(
    "change",
    [
        with_tensor(shape=[1 << 20, 1 << 20]),
        with_tensor(shape=[1 << 40]),
        with_tensor(shape=[]),
        with_tensor(shape=[0, 0], data_offsets=[0, 0]),
        with_tensor(shape=[-96, -8]),
        with_tensor(shape=[-96, 8]),
        with_tensor(shape=[96, 8, 1]),
        with_tensor(shape="96"),
        with_tensor(data_offsets=[0, 1 << 62]),
        with_tensor(data_offsets=[1 << 62, (1 << 62) + 3072]),
        with_tensor(data_offsets=[-3072, 0]),
        with_tensor(data_offsets=[3072]),
        with_tensor(dtype="F64", shape=[48, 8]),
        with_tensor(dtype="F99"),
        with_tensor(dtype=None),
        lambda header: header.pop(NAME),
        lambda header: header.clear(),
        lambda header: header.update(extra=header[NAME]),
        lambda header: header.update({NAME: []}),
    ],
)
def test_weights_that_are_not_what_they_say_are_rejected(
    directory: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    rewrite(directory, change)
    assert str(directory) in rejection(directory)


@pytest.mark.parametrize("length", [0, 7, 8, 100, 6000, -4096, -1])
def test_weights_that_end_too_soon_are_rejected(directory: Path, length: int) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    assert str(directory) in rejection(directory)


@pytest.mark.parametrize("length", HUGE)
def test_a_header_of_weights_without_end_is_rejected(directory: Path, length: int) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    assert str(directory) in rejection(directory)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"[" * 100_000),
        (
            "tokenizer.json",
            b'{"version": "1.0", "model": {"type": "BPE", "vocab": [], "merges": 7}}',
        ),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"\xff\xfe"),
        ("config.json", b"[]"),
        ("config.json", b"\xff"),
        ("config.json", b'{"model_type": 7}'),
    ],
)
def test_a_damaged_text_file_is_rejected(directory: Path, name: str, content: bytes) -> None:
    (directory / name).write_bytes(content)
    assert str(directory) in rejection(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"intermediate_size": 1},
        {
            "quantization": {
                "group_size": 32,
                "bits": 4,
                "model.layers.0.mlp.up_proj": {"group_size": 0, "bits": 4},
            }
        },
    ],
)
def test_groups_of_no_weights_are_rejected(directory: Path, changes: dict[str, Any]) -> None:
    """MLX divides by the size of a group, which would end this process."""
    edit_config(directory, **changes)
    assert "weights in groups of 0" in rejection(directory)


# Whatever was not thought of


@pytest.mark.timeout(120)
@pytest.mark.parametrize("write", weekly([write_file, write_model], 1))
def test_no_damage_ends_the_process(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    """`mx.load` reads safetensors that have passed as valid without a look at where they end."""
    path = write(tmp_path)
    command = [sys.executable, "-m", "tests.support.damaged_files", str(path), "5", "60"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"(\d+ loaded, )?\d+ rejected", done.stdout)
    assert np.sum([int(n) for n in re.findall(r"\d+", done.stdout)]) == 60
