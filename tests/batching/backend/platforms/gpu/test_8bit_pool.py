"""Keys and values in 8 bits on the pool of kernels, by the kernels' own sources on the CPU."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import save_config, save_model

from batching.backend.builder import platforms, startup_lines
from batching.backend.builder.engine import build_engine
from batching.backend.devices import Gpu
from batching.backend.paged.kv_cache import PagedKVCache
from batching.backend.paged.layout import LayerShape
from batching.backend.paged.mlx_attention import SlidingWindow
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.gpu.kernel_pool import KernelLayerCache, kernel_cache
from batching.backend.platforms.gpu.kernels.sources import KernelSource, Target
from batching.backend.platforms.gpu.pool_kernels import PoolKernels
from batching.backend.platforms.gpu.source_kernels import Kernel, SourceKernels
from batching.backend.runner.mlx_runner import MLXRunner
from batching.backend.self_check.checked_model import CheckedModel
from batching.block_manager import BlockCopy, BlockTable
from batching.config import EngineConfig, GpuKernelsMode
from batching.engine.loaded_engine import LoadedEngine
from batching.errors import ModelLoadError, UnsupportedKVDType
from batching.inputs.sampling_params import SamplingParams
from batching.request import BatchRequest
from batching.steps.step_plan import Slice, StepPlan
from tests.support.cpu_kernels import cpu_kernels
from tests.support.host_kernels import HostKernels
from tests.support.model_files import write_model
from tests.support.model_zoo import make_tiny, tiny_config
from tests.support.platforms import check_model, gpu_of, on_kernels, why_none
from tests.support.requests import make_request, slice_of
from tests.support.serving import TIGHT, limits, make_runner, serve
from tests.support.tiny_models import VOCAB_SIZE, tiny_model
from tests.support.weekly import weekly

BLOCK_SIZE: Final = 4
NUM_BLOCKS: Final = 32
SHAPE: Final = LayerShape(2, 16, 24, mx.int8, soft_cap=3.0)


@cache
def kernels_of_cpu(native: Native) -> SourceKernels:
    return cpu_kernels(native)


def pool_of(native: Native, shape: LayerShape = SHAPE) -> tuple[PagedKVCache, KernelLayerCache]:
    pool = kernel_cache(kernels_of_cpu(native), [shape], NUM_BLOCKS, BLOCK_SIZE)
    [layer] = pool.layers
    assert isinstance(layer, KernelLayerCache)
    return pool, layer


def tokens_of(num_tokens: int, blocks: Sequence[int], num_rows: int) -> Slice:
    """Return the last rows of a request."""
    request = make_request(0, [0] * num_tokens, max_tokens=1)
    request.block_table = BlockTable(blocks)
    return slice_of(request, num_tokens - num_rows, num_tokens)


def write(pool: PagedKVCache, layer: KernelLayerCache, s: Slice) -> mx.array:
    """Write and attend, with random numbers, larger ones in some rows; return attention's output."""
    pool.begin([s])
    shape = layer.shape
    sizes = mx.exp(mx.random.normal((len(s), shape.num_heads, 1, 1)))
    keys = sizes * mx.random.normal((len(s), shape.num_heads, 1, shape.key_dim))
    values = mx.random.normal((len(s), shape.num_heads, 1, shape.value_dim))
    layer.update_and_fetch(keys, values)
    queries = mx.random.normal((len(s), 6, 1, shape.key_dim))
    return layer.attend(queries, scale=0.3, mask=SlidingWindow(20), sinks=None)


def bits_of(layer: KernelLayerCache, block: int) -> list[bytes]:
    """Return a block's part of each of the pool's arrays."""
    heads, at = layer.shape.num_heads, slice(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
    by_head = [np.array(array).reshape(heads, layer.num_slots, -1) for array in layer.pool]
    return [np.ascontiguousarray(array[:, at]).tobytes() for array in by_head]


@pytest.mark.parametrize("num_rows", [1, 20])
def test_attention_is_near_that_of_a_float32_pool(native: Native, num_rows: int) -> None:
    """Of decodes, which read integers, and of chunks, which gather: over scattered blocks, in a window."""
    outputs: list[list[mx.array]] = []
    for dtype in (mx.int8, mx.float32):
        pool, layer = pool_of(native, SHAPE.with_dtype(dtype))
        mx.random.seed(5)
        whole = tokens_of(60, range(30, 0, -2), 60)
        outputs.append(
            [
                write(pool, layer, s)
                for s in (whole, replace(whole, start=60 - num_rows, token_ids=(0,) * num_rows))
            ]
        )
        mx.eval(pool.arrays)
    for rounded, exact in zip(*outputs, strict=True):
        off = np.abs(np.array(rounded) - np.array(exact)).max()
        assert 0 < off < 0.06


def test_chunks_and_decodes_read_the_same_numbers(native: Native) -> None:
    pool, layer = pool_of(native)
    write(pool, layer, tokens_of(60, range(15), 60))
    queries = mx.random.normal((20, 6, 1, 16))
    outputs = []
    for slices in (
        [tokens_of(60, range(15), 20)],
        [tokens_of(n, range(15), 1) for n in range(41, 61)],
    ):
        pool.begin(slices)
        outputs.append(np.array(layer.attend(queries, scale=0.3, mask=None, sinks=None)))
    by_chunk, by_decodes = outputs
    assert np.allclose(by_chunk, by_decodes, atol=1e-5)


@pytest.mark.parametrize("num_heads", [1, 2])
def test_a_copy_is_one_bit_by_bit(native: Native, num_heads: int) -> None:
    """With its scales, which rounding once more would change: these are not 127 times themselves / 127."""
    pool, layer = pool_of(native, SHAPE._replace(num_heads=num_heads))
    write(pool, layer, tokens_of(8, [5, 9], 8))
    mx.eval(pool.arrays)
    num_rows = num_heads * layer.num_slots
    scales = (1.5 + 2.0**-23 * (64 + 128 * np.arange(num_rows))).astype(np.float32)
    assert (scales * np.float32(127) / np.float32(127) != scales).all()
    np.array(layer.pool[2], copy=False)[:] = scales
    before = {block: bits_of(layer, block) for block in (5, 9, 20)}
    assert len({tuple(bits) for bits in before.values()}) == 3
    pool.copy_blocks([BlockCopy(5, 7)])
    mx.eval(pool.arrays)
    assert bits_of(layer, 7) == before[5]
    # What is overwritten may be what another copy reads.
    pool.copy_blocks([BlockCopy(9, 20), BlockCopy(5, 9)])
    mx.eval(pool.arrays)
    assert (bits_of(layer, 20), bits_of(layer, 9), bits_of(layer, 5)) == (
        before[9],
        before[5],
        before[5],
    )


def test_a_block_that_is_used_again_shows_nothing_of_its_last_request(native: Native) -> None:
    """Not even where that left a row that is not a number."""
    outputs: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = []
    for is_used in (False, True):
        pool, layer = pool_of(native)
        if is_used:
            pool.begin([tokens_of(12, [3, 8, 1], 12)])
            layer.update_and_fetch(mx.full((12, 2, 1, 16), mx.nan), mx.full((12, 2, 1, 24), mx.inf))
            pool.flush()
            mx.eval(pool.arrays)
            assert np.isnan(np.array(layer.pool[2])).any()
        mx.random.seed(2)
        outputs += [np.array(write(pool, layer, tokens_of(n, [8, 1, 3], n))) for n in (11, 3)]
    for fresh, used in zip(outputs[:2], outputs[2:], strict=True):
        assert np.isfinite(used).all()
        assert np.array_equal(fresh, used)


def test_a_reset_makes_other_arrays(native: Native) -> None:
    pool, layer = pool_of(native)
    before = layer.pool
    write(pool, layer, tokens_of(8, [5, 9], 8))
    pool.reset()
    assert [array.dtype for array in layer.pool] == [mx.int8, mx.int8, mx.float32, mx.float32]
    assert sum(array.nbytes for array in layer.pool) == layer.num_slots * SHAPE.bytes_per_token
    assert not any(np.array(array).any() for array in layer.pool)
    assert not {*map(id, layer.pool)} & {*map(id, before)}


def checked_in_8_bits(native: Native, model: nn.Module) -> CheckedModel:
    kernels = kernels_of_cpu(native)
    checked = check_model(model, VOCAB_SIZE, kv_dtype=mx.int8, gpu=Gpu.CUDA, kernels=kernels)
    assert gpu_of(checked).kernels is kernels, gpu_of(checked).reason
    assert {shape.dtype for shape in checked.layout.shapes} == {mx.int8}
    return checked


@pytest.mark.parametrize(
    ("family", "dtype"),
    weekly([("qwen3", mx.bfloat16), ("gemma2", mx.float16), ("gpt_oss", mx.float32)], 1),
)
def test_the_check_at_load_finds_them_right(native: Native, family: str, dtype: mx.Dtype) -> None:
    """Norms of heads, soft caps, and windows with blocks of their own, whose dropped rows are NaN."""
    model = tiny_model(family)
    model.set_dtype(dtype)
    checked_in_8_bits(native, model)


@cache
def served(native: Native) -> tuple[nn.Module, CheckedModel]:
    model = tiny_model("qwen3")
    return model, checked_in_8_bits(native, model)


def test_logits_are_near_those_of_a_float32_pool(native: Native) -> None:
    model, checked = served(native)
    plain = replace(checked, layout=checked.layout.with_dtype(mx.float32))
    tokens = np.random.default_rng(1).integers(0, VOCAB_SIZE, 48).tolist()
    logits: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = []
    for each in (checked, plain):
        runner = make_runner(model, VOCAB_SIZE, each)
        request = make_request(0, tokens, max_tokens=1)
        request.block_table = BlockTable(range(28, 4, -2))
        found = []
        for start, stop in ((0, 30), (30, 46), (46, 47), (47, 48)):
            step = runner.cache.begin([slice_of(request, start, stop)])
            found.append(np.array(runner.logits(step)))
            runner.cache.flush()
        logits.append(np.concatenate(found))
    off = np.abs(logits[0] - logits[1]).max() / np.abs(logits[1]).max()
    assert 0 < off < 0.02


def requests() -> list[BatchRequest]:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB_SIZE, size).tolist() for size in (19, 23, 40)]
    made: list[BatchRequest] = []
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0.0 if i % 2 else 0.7, seed=i)
        request = make_request(2 * i, prompt, max_tokens=8, sampling=sampling)
        made += [request, request.fork(2 * i + 1)]
    return made


def test_tokens_depend_on_nothing_but_the_request(native: Native) -> None:
    """Alone or together, in chunks, with copies on write, preempted, in queued steps or not."""
    model, checked = served(native)
    copies: list[BlockCopy] = []

    class Watched:
        """Steps that are not queued."""

        def __init__(self, runner: MLXRunner) -> None:
            self._runner, self.reset = runner, runner.reset

        def run(self, plan: StepPlan) -> object:
            copies.extend(plan.copies)
            return self._runner.run(plan)

    outputs: list[list[list[int]]] = []
    for config, is_queued in (
        (replace(TIGHT, num_blocks=200, max_num_seqs=1, prefill_chunk=64), True),
        (replace(TIGHT, num_blocks=200), True),
        (replace(TIGHT, num_blocks=24), True),
        (TIGHT, False),
    ):
        config = limits(checked, config)
        runner = make_runner(model, VOCAB_SIZE, checked, config)
        assert runner.takes_queued_steps
        made = requests()
        stats = serve(runner if is_queued else Watched(runner), config, made).stats  # type: ignore[arg-type]
        assert (stats.num_preemptions > 0) == (config.num_blocks < 100)
        outputs.append([request.output_token_ids for request in made])
    assert copies
    assert outputs[1:] == outputs[:1] * 3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A server on a GPU, but that the CPU computes."""
    monkeypatch.setattr(platforms, "select_device", lambda _: Gpu.CUDA)
    monkeypatch.setattr(startup_lines, "device_memory", lambda: 2 << 30)
    for name in ("set_cache_limit", "set_wired_limit"):
        monkeypatch.setattr(mx, name, lambda _: 0)
    return Gpu.CUDA


def build(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    kernels: PoolKernels,
    mode: GpuKernelsMode = "auto",
) -> LoadedEngine:
    monkeypatch.setattr(platforms, "load_kernels", lambda _: kernels)
    return build_engine(
        EngineConfig(
            model=str(directory),
            model_id="tiny",
            num_blocks=256,
            native="off",
            gpu_kernels=mode,
            kv_cache_dtype="int8",
            max_num_seqs=4,
        )
    )


def test_the_setting_makes_a_pool_of_8_bits(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    gpu: Gpu,
    native: Native,
) -> None:
    with caplog.at_level(logging.WARNING):
        loaded = build(directory, monkeypatch, kernels_of_cpu(native))
    assert not caplog.records
    lines = "".join(loaded.startup_lines)
    assert "of the KV cache: on, for cpu" in lines
    # Two layers of 2 heads: 16 bytes and a scale of a key, and of a value.
    assert 256 * 32 * 2 * 2 * 2 * (16 + 4) >> 20 == 1
    assert "256 blocks of 32 tokens (1 MiB, int8)" in lines


class Wrong(HostKernels):
    """In 8 bits only."""

    def why_not(self, shape: LayerShape) -> str:
        return ""

    def write(
        self, rows: Sequence[mx.array], slots: mx.array, pool: object, token: mx.array
    ) -> mx.array:
        raise RuntimeError("no such type")


class Unable(HostKernels):
    def why_not(self, shape: LayerShape) -> str:
        return "they keep no such keys" if shape.dtype == mx.int8 else ""


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Unable, "they keep no such keys"),
        (Wrong, r"they do not run \(RuntimeError: no such type\)"),
    ],
)
def test_without_kernels_that_are_right_it_is_rejected(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpu: Gpu,
    native: Native,
    kind: type[HostKernels],
    reason: str,
) -> None:
    with pytest.raises(UnsupportedKVDType, match=rf"^int8 needs the GPU kernels.* off: {reason}$"):
        build(directory, monkeypatch, kind(native))
    with pytest.raises(ModelLoadError, match=rf"the GPU kernels are required, and {reason}: set"):
        build(directory, monkeypatch, kind(native), "require")


def test_with_kernels_switched_off_it_is_rejected_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, gpu: Gpu, native: Native
) -> None:
    with pytest.raises(
        UnsupportedKVDType, match=r"^int8 needs the GPU kernels.* off: switched off$"
    ):
        build(Path("/no/such/model"), monkeypatch, HostKernels(native), "off")


def test_without_right_kernels_a_model_is_checked_as_it_makes_them(native: Native) -> None:
    for length in (20, 600):
        checked = check_model(
            tiny_model("qwen3"),
            VOCAB_SIZE,
            kv_dtype=mx.int8,
            gpu=Gpu.METAL,
            kernels=Unable(native),
            max_model_len=length,
        )
        assert why_none(checked) == "they keep no such keys"
        assert {shape.dtype for shape in checked.layout.shapes} == {mx.float32}


def test_latents_are_not_kept_in_8_bits_and_a_warning_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    gpu: Gpu,
    native: Native,
) -> None:
    """As on the native kernels: a latent's numbers are values and keys, and one scale would not do for both."""
    write_model(tmp_path)
    save_model(tmp_path, make_tiny("deepseek_v3"))
    save_config(tiny_config("deepseek_v3"), tmp_path / "config.json")
    kernels = kernels_of_cpu(native)
    lines = "".join(build(tmp_path, monkeypatch, kernels).startup_lines)
    assert "of the KV cache: on, for cpu" in lines
    assert "float32), prefix cache" in lines
    assert "kv_cache_dtype: tiny reads" in caplog.text
    latent = LayerShape(1, 576, 0, mx.int8, latent_dim=512)
    assert kernels.why_not(latent) == "latents are not kept in 8 bits"


def test_mlx_rotates_what_is_rounded(native: Native) -> None:
    made: list[str] = []

    def make(target: Target, source: KernelSource) -> Kernel:
        made.append(source.name)
        return kernels_of_cpu(native).make(target, source)

    kernels = SourceKernels(Target.CPU, make)
    model, checked = served(native)
    request = make_request(0, [1, 2, 3], max_tokens=4)
    serve(
        make_runner(model, VOCAB_SIZE, on_kernels(checked, kernels)),
        limits(checked),
        [request],
    )
    assert {name.rsplit("_", 1)[0] for name in made} == {
        "kv_write_8bit",
        "paged_decode",
        "merge_splits",
    }
