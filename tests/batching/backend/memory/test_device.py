"""What fits into the memory is served, and nothing that does not is begun."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import quantize_model, save_config, save_model

from batching.backend.builder import opening
from batching.backend.builder.engine import build_engine
from batching.backend.gguf.model import arrays_of
from batching.backend.loader import load_model
from batching.backend.memory import device as memory
from batching.backend.memory.device import MIB, bytes_within, free_buffers, free_memory
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.weights.storage import stored_tensors
from batching.config import EngineConfig
from batching.errors import ModelLoadError, PoolTooLarge, UnsupportedKVDType
from tests.support.gguf_models import (
    BPE,
    blocks,
    metadata_of,
    random_model,
    tensors_of,
)
from tests.support.gguf_writer import Q4_0, Q8_0, write_gguf
from tests.support.model_files import CONFIG, rejection, write_model
from tests.support.model_zoo import make_tiny, tiny_config
from tests.support.platforms import replace_modules
from tests.support.weekly import weekly_pairs


def test_a_share_of_the_memory_is_less_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "device_memory", lambda: 1000)
    monkeypatch.setattr(memory, "memory_in_use", lambda: 200)
    assert [bytes_within(0.5), bytes_within(0.1)] == [300, 0]


def test_what_is_free_is_no_more_than_the_system_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    have_memory(monkeypatch, 5000)
    monkeypatch.setattr(memory, "available_memory", lambda **_: 4000)
    assert free_memory() == 4000
    monkeypatch.setattr(memory, "available_memory", lambda **_: 6000)
    assert free_memory() <= 5000
    monkeypatch.setattr(memory, "available_memory", lambda **_: None)
    assert 0 < free_memory() <= 5000


def write_quantized_gguf(directory: Path) -> Path:
    model, config = random_model("llama", vocab_size=262)
    tensors = tensors_of(model, config)
    for name, kind in {"token_embd.weight": Q8_0, "blk.0.ffn_up.weight": Q4_0}.items():
        rows, columns = tensors[name].shape
        tensors[name], _ = blocks(kind, (rows, columns), 1)
    return write_gguf(directory / "q.gguf", BPE | metadata_of(config), tensors)


def write_float_gguf(directory: Path) -> Path:
    model, config = random_model("llama", vocab_size=262)
    return write_gguf(directory / "f.gguf", BPE | metadata_of(config), tensors_of(model, config))


FILES: Final = (write_model, write_quantized_gguf, write_float_gguf)
every_file = pytest.mark.parametrize("write", FILES, ids=lambda write: write.__name__)


def have_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Let the device have some bytes more than are in use now, without what other tests left."""
    gc.collect()
    total = memory.memory_in_use() + num_bytes
    monkeypatch.setattr(memory, "device_memory", lambda: total)


@pytest.mark.parametrize(("write", "dtype"), weekly_pairs(FILES, [None, mx.float32, mx.bfloat16]))
def test_weights_that_fit_to_the_byte_are_loaded_and_others_are_not_begun(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Path], Path],
    dtype: mx.Dtype | None,
) -> None:
    path = str(write(tmp_path))
    needed = sum(array.nbytes for array in arrays_of(load_model(path, dtype=dtype).model))
    have_memory(monkeypatch, needed)
    load_model(path, dtype=dtype)
    have_memory(monkeypatch, needed - 1)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    line = rejection(path, dtype)
    assert "of weights" in line
    assert ("stored" if dtype is None else str(dtype).removeprefix("mlx.core.")) in line
    # Nothing but what mlx-lm keeps as it builds the model.
    assert mx.get_peak_memory() - before < 4096


def test_a_rejection_names_the_sizes_and_what_to_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_model(tmp_path)
    monkeypatch.setattr(memory, "device_memory", lambda: 3 << 20)
    monkeypatch.setattr(mx, "get_active_memory", lambda: (3 << 20) - 5)
    monkeypatch.setattr(memory, "_others", {})
    assert rejection(tmp_path, mx.float32) == (
        "1 MiB of weights (float32) do not fit into the 0 MiB that are left of 3 MiB: "
        "take a smaller model, or a dtype that takes less"
    )


def config(directory: Path, num_blocks: int | None) -> EngineConfig:
    return EngineConfig(
        model=str(directory),
        model_id="tiny",
        num_blocks=num_blocks,
        device="cpu",
        dtype="float32",
        cpu_precision="exact",
    )


def test_a_pool_beside_the_weights_fits_or_is_rejected(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 32 tokens of two layers, keys and values of 2 heads of 16 numbers: 16 KiB a block.
    monkeypatch.setattr(memory, "available_memory", lambda **_: 4 << 20)
    assert "  256 blocks" in "".join(build_engine(config(directory, 256)).startup_lines)
    with pytest.raises(PoolTooLarge, match=r"^a KV pool of 257 blocks needs 5 MiB; 4 MiB are free"):
        build_engine(config(directory, 257))
    lines = "".join(build_engine(config(directory, None)).startup_lines)
    assert "  128 blocks of 32 tokens (2 MiB, float32), prefix cache on; not 1024, " in lines
    have_memory(monkeypatch, 600_000)
    with pytest.raises(ModelLoadError, match=r"^the least KV pool, \d+ blocks, needs 1 MiB"):
        build_engine(replace(config(directory, None), max_blocks=None))


def test_a_model_that_cannot_run_is_rejected_in_one_line(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("[metal::malloc] no memory\nat all")

    monkeypatch.setattr(opening, "check_model", fail)
    with pytest.raises(ModelLoadError, match=r"^cannot run .*: RuntimeError: .*no memory at all$"):
        build_engine(config(directory, 8))


def test_a_pool_of_16_bits_takes_half_the_memory(directory: Path) -> None:
    lines = "".join(build_engine(config(directory, 128)).startup_lines)
    assert "128 blocks of 32 tokens (2 MiB, float32)" in lines
    halves = replace(config(directory, 256), kv_cache_dtype="bfloat16")
    lines = "".join(build_engine(halves).startup_lines)
    assert "256 blocks of 32 tokens (2 MiB, bfloat16)" in lines


def test_a_pool_of_8_bits_takes_a_quarter_and_the_scales(directory: Path, native: Native) -> None:
    eighths = replace(config(directory, 256), kv_cache_dtype="int8")
    lines = "".join(build_engine(eighths).startup_lines)
    # Two layers of 2 heads: 16 bytes and a scale of a key, and of a value.
    assert 256 * 32 * 2 * 2 * 2 * (16 + 4) // MIB == 1
    assert "256 blocks of 32 tokens (1 MiB, int8)" in lines


def test_without_the_kernels_a_pool_of_8_bits_is_rejected(directory: Path) -> None:
    plain = replace(config(directory, 256), kv_cache_dtype="int8", native="off")
    with pytest.raises(UnsupportedKVDType, match=r"^int8 needs the native kernels, .* off: switch"):
        build_engine(plain)


def test_a_model_that_the_kernels_cannot_run_has_no_pool_of_8_bits(
    directory: Path, native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("it reaches into modules")

    monkeypatch.setattr(opening, "check_model", fail)
    with pytest.raises(UnsupportedKVDType, match="off: the model does not run on them"):
        build_engine(replace(config(directory, 8), kv_cache_dtype="int8"))


def test_latent_keys_are_not_kept_in_8_bits_and_a_warning_says_so(
    tmp_path: Path, native: Native, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path)
    save_model(tmp_path, make_tiny("deepseek_v3"))
    save_config(tiny_config("deepseek_v3"), tmp_path / "config.json")
    lines = build_engine(replace(config(tmp_path, 8), kv_cache_dtype="int8")).startup_lines
    assert "float32), prefix cache" in "".join(lines)
    assert "kv_cache_dtype: tiny reads" in caplog.text


NAMES: Final = {
    "float16": ("float32", 32),
    "bfloat16": ("bfloat16", 16),
    "mxfp8": ("bfloat16", 16),
    "nvfp4": ("bfloat16", 16),
    "mxfp4": ("mxfp4", 4),
    "1 bits": ("4 bits", 4),
    "3 bits": ("4 bits", 4),
    "4 bits": ("4 bits", 4),
    "6 bits": ("8 bits", 8),
}


@pytest.mark.parametrize("name", NAMES)
def test_experts_are_named_with_what_the_kernels_keep_them_as(native: Native, name: str) -> None:
    experts: nn.Module = SwitchLinear(128, 64, 4, bias=False)
    experts.set_dtype(mx.bfloat16 if name == "bfloat16" else mx.float16)
    if "float" not in name:
        mode = "affine" if "bits" in name else name
        bits = int(name[0]) if mode == "affine" else int(name[-1])
        experts = experts.to_quantized(16 if name == "nvfp4" else 32, bits, mode)
    model = nn.Sequential(experts)
    [stored] = stored_tensors(model, None, has_kernels=True)
    kept, bits = NAMES[name]
    assert (stored.name, stored.kept, stored.is_rounded) == (name, kept, False)
    assert stored.num_bytes == sum(array.nbytes for array in arrays_of(model))
    [replaced] = replace_modules(model, native).layers
    assert replaced.layer.nbytes >= bits * 4 * 64 * 128 // 8
    # Of a group 4 bytes, or 2 if its bias is a multiple of its scale.
    assert 0 <= stored.kept_bytes - replaced.layer.nbytes <= 4 * 64 * 128 // 32 * 2


def write_nvfp4(directory: Path) -> Path:
    write_model(directory)
    model, config = quantize_model(
        llama.Model(llama.ModelArgs.from_dict(CONFIG)), CONFIG, 16, 4, "nvfp4"
    )
    save_model(directory, model)
    save_config(config, directory / "config.json")
    return directory


def test_the_start_names_quantizations_that_no_kernel_knows_and_what_they_cost(
    tmp_path: Path, native: Native
) -> None:
    lines = build_engine(replace(config(write_nvfp4(tmp_path), 8), dtype="auto")).startup_lines
    [line] = [line for line in lines if line.startswith("weights")]
    assert line == (
        "weights   nvfp4 (16 tensors, 1 MiB) as bfloat16 (exact, 1 MiB): "
        "3.6 times the bytes in each decode step"
    )


def test_a_model_that_does_not_fit_as_the_kernels_keep_it_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_nvfp4(tmp_path)
    size = sum(array.nbytes for array in arrays_of(load_model(str(path), dtype=None).model))
    have_memory(monkeypatch, size)
    load_model(str(path), dtype=None)
    have_memory(monkeypatch, 3 * size)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with pytest.raises(
        ModelLoadError,
        match=r"^1 MiB of weights \(as stored, but nvfp4 .* as bfloat16 .*\) do not fit into the",
    ):
        load_model(str(path), dtype=None, has_kernels=True)
    assert mx.get_peak_memory() - before < 4096


def test_buffers_are_freed_after_a_device_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [RuntimeError("[METAL] Command buffer execution failed")]
    waits: list[str] = []

    def synchronize() -> None:
        if failures:
            raise failures.pop()
        waits.append("waited")

    monkeypatch.setattr(mx, "synchronize", synchronize)
    monkeypatch.setattr(mx, "clear_cache", lambda: waits.append("cleared"))
    free_buffers()
    assert waits == ["waited", "cleared"]
