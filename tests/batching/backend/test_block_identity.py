"""The folder of a model in the store: named by all that its keys and values depend on.

The table in docs/operations.md has the parts by the names that they have here.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import pytest

from batching.backend.builder import block_store
from batching.backend.builder.engine import build_engine
from batching.backend.devices import Gpu
from batching.backend.execution_mode import ExecutionMode
from batching.backend.memory.limits import GpuMemory
from batching.backend.numerics import NUMERICS_VERSION, Numerics
from batching.backend.paged.layout import CacheLayout, LayerLayout, LayerShape, StateShape
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.cpu.platform import CPUPlatform
from batching.backend.platforms.mlx import MLXPlatform
from batching.backend.self_check.checked_model import CheckedModel
from batching.block_store import entry_file
from batching.config import EngineConfig
from tests.support.host_kernels import HostKernels
from tests.support.model_files import edit_config, write_model, write_tiny
from tests.support.platforms import check_model, platform_of
from tests.support.tiny_models import VOCAB_SIZE, tiny_model

BLOCK_SIZE: Final = 8
WEIGHTS: Final = {"model.safetensors": "1", "model.safetensors.index.json": "2", "config.json": "3"}


class Identified:
    """A checked model, and what its identity is made of beside it."""

    def __init__(self, checked: CheckedModel, patch: pytest.MonkeyPatch) -> None:
        self.checked = checked
        self.patch = patch

    def identity(
        self,
        checked: CheckedModel | None = None,
        weights: Mapping[str, str] = WEIGHTS,
        note: str = "",
        block_size: int = BLOCK_SIZE,
    ) -> str:
        return block_store.identity(weights, note, checked or self.checked, block_size)

    def patched(self, target: object, name: str, value: object) -> str:
        """Return the identity with something else in its place, for once."""
        with self.patch.context() as patch:
            patch.setattr(target, name, value)
            return self.identity()


def of_weights(model: Identified) -> Iterator[str]:
    for name in (*WEIGHTS, "model.py"):
        yield model.identity(weights={**WEIGHTS, name: "other"})


def of_note(model: Identified) -> Iterator[str]:
    yield model.identity(note="other")


def of_dtype(model: Identified) -> Iterator[str]:
    for dtype in (mx.bfloat16, mx.float16):
        platform = MLXPlatform(Numerics(dtype=dtype))
        yield model.identity(replace(model.checked, platform=platform))


def of_platform(model: Identified) -> Iterator[str]:
    """Each part of any platform; which these are is for another test."""
    kind, parts = type(model.checked.platform), model.checked.platform.identity
    yield from (model.patched(kind, "identity", {**parts, name: "other"}) for name in parts)
    yield model.patched(kind, "identity", {**parts, "another": "part"})


def of_packages(model: Identified) -> Iterator[str]:
    for name in ("mlx", "mlx-lm", "mlx-vlm"):
        plain = block_store._version

        def version(package: str, other: str = name, plain: Any = plain) -> str:
            return "other" if package == other else str(plain(package))

        yield model.patched(block_store, "_version", version)


def of_mode(model: Identified) -> Iterator[str]:
    for mode in ExecutionMode:
        if mode is not model.checked.mode:
            result = model.checked.result._replace(mode=mode)
            yield model.identity(replace(model.checked, result=result))


def of_layers(model: Identified) -> Iterator[str]:
    first, *others = model.checked.layout.layers
    assert isinstance(first, LayerShape)
    changes: dict[str, Any] = {
        "num_heads": 9,
        "key_dim": 24,
        "value_dim": 24,
        "dtype": mx.int8,
        "window": 12,
        "is_gathered": True,
        "is_shared": True,
        "latent_dim": 8,
        "soft_cap": 30.0,
        "is_chunked": True,
        "sees_ahead": True,
    }
    assert changes.keys() == set(LayerShape._fields)
    layers: list[list[LayerLayout]] = [
        [first._replace(**{name: value}), *others] for name, value in changes.items()
    ]
    layers += [[first], [first, *others, first], [StateShape(2, 64), *others]]
    layers += [[StateShape(3, 64), *others], [StateShape(2, 96), *others]]
    for each in layers:
        yield model.identity(replace(model.checked, layout=CacheLayout(tuple(each))))


def of_block_size(model: Identified) -> Iterator[str]:
    yield model.identity(block_size=2 * BLOCK_SIZE)


def of_format(model: Identified) -> Iterator[str]:
    """To an older server the files of a newer one would be damaged, and it deletes such ones."""
    yield model.patched(entry_file, "VERSION", entry_file.VERSION + 1)


def of_numerics(model: Identified) -> Iterator[str]:
    yield model.patched(block_store, "NUMERICS_VERSION", NUMERICS_VERSION + 1)


PARTS: Final[Mapping[str, Callable[[Identified], Iterator[str]]]] = {
    "weights": of_weights,
    "note": of_note,
    "dtype": of_dtype,
    "platform": of_platform,
    "packages": of_packages,
    "mode": of_mode,
    "layers": of_layers,
    "block size": of_block_size,
    "format": of_format,
    "numerics": of_numerics,
}


@pytest.fixture(scope="module")
def checked() -> CheckedModel:
    return check_model(tiny_model("llama"), VOCAB_SIZE)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_alone(part: str, checked: CheckedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever changes of one part of the identity, it is another one."""
    model = Identified(checked, monkeypatch)
    before, found = model.identity(), list(PARTS[part](model))
    assert len({before, *found}) == 1 + len(found) > 1
    assert model.identity() == before


def test_the_parts_of_a_platform(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed otherwise, and what is kept in another layout, is another platform; threads change nothing."""
    rounded = Numerics()
    plain = CPUPlatform(native, Numerics(is_exact=True))
    wide = replace(native, min_input_bits=16, supports_bfloat16=False)
    kernels = HostKernels(native)
    platforms = {
        "as it is": plain,
        "instructions": replace(plain, native=replace(native, isa="other")),
        "rounded": CPUPlatform(wide, rounded),
        "scaled": CPUPlatform(replace(wide, min_input_bits=8), rounded),
        "bfloat16": CPUPlatform(replace(wide, supports_bfloat16=True), rounded),
        "attention": replace(plain, rounds_attention=True),
        "none": platform_of(),
        "a GPU": platform_of(gpu=Gpu.METAL),
        "its kernels": platform_of(gpu=Gpu.METAL, kernels=kernels),
        "another kind": platform_of(gpu=Gpu.CUDA),
    }
    found = {name: str(platform.identity) for name, platform in platforms.items()}
    gpu = platforms["a GPU"]
    monkeypatch.setattr(GpuMemory, "device_line", lambda _: "another GPU")
    found["another GPU"] = str(gpu.identity)
    monkeypatch.setattr(
        "batching.backend.platforms.cpu.platform.INTERFACE_VERSION", "another layout"
    )
    found["interface"] = str(plain.identity)
    monkeypatch.setattr(
        "batching.backend.platforms.gpu.platform.sources_digest", lambda: "other kernels"
    )
    found["other kernels"] = str(platforms["its kernels"].identity)
    assert len({*found.values()}) == len(found), found
    monkeypatch.undo()
    more = replace(plain, native=replace(native, num_threads=99, cores="other", nodes=()))
    assert str(more.identity) == found["as it is"]


def test_how_weights_are_quantized_is_of_the_identity(tmp_path: Path) -> None:
    found = []
    for bits in (4, 8):
        write_model(tmp_path / "model", bits=bits)
        found.append(identity_of(tmp_path))
    assert found[0] != found[1]


def identity_of(folder: Path, **config: Any) -> str:
    """Open a model, and return the name of its folder in the store."""
    store = folder / "identities"
    limits = {"num_blocks": 4, "block_size": BLOCK_SIZE, "max_num_seqs": 4, "native": "off"}
    settings = {"model": str(folder / "model"), "model_id": "tiny", "device": "cpu", **limits}
    loaded = build_engine(
        EngineConfig(kv_cache_dir=store, weights_cache_gib=0, **{**settings, **config})
    )
    assert loaded.store is not None
    name = loaded.store.identity
    loaded.close()
    assert (store / name).is_dir()
    return name


def touch(folder: Path) -> None:
    """Change no more than the times and places of its files."""
    for path in [*folder.iterdir()]:
        contents = path.read_bytes()
        path.unlink()
        path.write_bytes(contents)


def test_the_identity_is_that_of_the_contents(tmp_path: Path) -> None:
    model = write_tiny("llama", tmp_path / "model")
    before = identity_of(tmp_path)
    touch(model)
    assert identity_of(tmp_path, model_id="other", num_blocks=5, max_num_seqs=2) == before
    path = model / "model.safetensors"
    weights, status = bytearray(path.read_bytes()), path.stat()
    weights[-1] ^= 1
    path.write_bytes(weights)
    found = {"weights": identity_of(tmp_path)}
    weights[-1] ^= 1
    path.write_bytes(weights)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert identity_of(tmp_path) == before
    found["block size"] = identity_of(tmp_path, block_size=4)
    found["dtype"] = identity_of(tmp_path, dtype="bfloat16")
    found["type of keys"] = identity_of(tmp_path, kv_cache_dtype="bfloat16")
    config = (model / "config.json").read_text()
    edit_config(model, rope_theta=20000.0)
    found["rotation"] = identity_of(tmp_path)
    (model / "config.json").write_text(config)
    (model / "model.py").write_text("")
    found["its own code"] = identity_of(tmp_path)
    (model / "model.py").unlink()
    assert identity_of(tmp_path) == before
    assert len({before, *found.values()}) == 1 + len(found), found


def test_windows_are_of_the_identity(tmp_path: Path) -> None:
    model = write_tiny("gemma3_text", tmp_path / "model")
    before = identity_of(tmp_path)
    edit_config(model, sliding_window=12)
    assert identity_of(tmp_path) != before


def test_kernels_and_how_they_round_are_of_the_identity(native: Native, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    found = {
        "off": identity_of(tmp_path),
        "on": identity_of(tmp_path, native="auto"),
        "exact": identity_of(tmp_path, native="auto", cpu_precision="exact"),
        "int8": identity_of(tmp_path, native="auto", kv_cache_dtype="int8"),
    }
    assert len({*found.values()}) == len(found), found
    assert found == {name: each for name, each in found.items() if len(each) == 32}


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert block_store._version("no-such-package") == ""
