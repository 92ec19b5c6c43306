"""The kernels' sources behind the pool, compiled for the CPU: what a GPU is given but for its compiler."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest

from batching.backend.devices import Gpu
from batching.backend.paged.layout import LayerShape
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.gpu.kernels.sources import KernelSource, Target
from batching.backend.platforms.gpu.pool_kernels import (
    DecodeRows,
    HeadNorms,
    KernelPool,
    PoolKernels,
    Rotation,
)
from batching.backend.platforms.gpu.source_kernels import Kernel, SourceKernels, load_kernels
from tests.support.cpu_kernels import cpu_kernels
from tests.support.host_kernels import HostKernels
from tests.support.model_zoo import make_tiny
from tests.support.platforms import check_model, gpu_of
from tests.support.requests import make_request
from tests.support.serving import TIGHT, limits, make_runner, serve
from tests.support.tiny_models import VOCAB_SIZE, tiny_model
from tests.support.weekly import weekly
from tests.support.zoo.latent import LATENT_MODELS

HEADS: Final = 4
KV_HEADS: Final = 2
KEY_DIM: Final = 16
VALUE_DIM: Final = 24
BLOCK_SIZE: Final = 32
NUM_SLOTS: Final = 1024
NUM_TOKENS: Final = 5


@cache
def kernels_of_cpu(native: Native) -> SourceKernels:
    return cpu_kernels(native)


def random(*shape: int) -> mx.array:
    made = mx.random.normal(shape)
    mx.eval(made)
    return made


def full_pool() -> KernelPool:
    mx.random.seed(3)
    rows = KV_HEADS * NUM_SLOTS
    arrays = random(rows, KEY_DIM), random(rows, VALUE_DIM)
    return KernelPool(arrays, KV_HEADS, VALUE_DIM, BLOCK_SIZE)


def alike(found: Sequence[mx.array], expected: Sequence[mx.array]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.allclose(np.array(a), np.array(b), atol=1e-5)


@pytest.fixture
def both(native: Native) -> list[PoolKernels]:
    return [kernels_of_cpu(native), HostKernels(native)]


TOKEN: Final = mx.zeros(8, mx.uint32)
SLOTS: Final = mx.array([3, 1000, 77, 4, 5, *[2**32 - 1] * 3], mx.uint32)


def test_a_write(both: list[PoolKernels]) -> None:
    keys, values = random(NUM_TOKENS, KV_HEADS, KEY_DIM), random(NUM_TOKENS, KV_HEADS, VALUE_DIM)
    results = []
    for kernels in both:
        pool = full_pool()
        token = kernels.write([keys, values], SLOTS, pool, TOKEN)
        mx.eval(token)
        results.append([token, *pool.arrays])
    alike(*results)
    # Gathers add it to their indices.
    assert not np.array(results[0][0]).any()


@pytest.mark.parametrize("num_dims", [KEY_DIM, 8])
@pytest.mark.parametrize("is_traditional", [False, True])
@pytest.mark.parametrize("has_norms", [False, True])
def test_a_rotation_and_a_write(
    both: list[PoolKernels], num_dims: int, is_traditional: bool, has_norms: bool
) -> None:
    queries = random(NUM_TOKENS, HEADS, KEY_DIM)
    keys, values = random(NUM_TOKENS, KV_HEADS, KEY_DIM), random(NUM_TOKENS, KV_HEADS, VALUE_DIM)
    norms = HeadNorms(random(KEY_DIM), random(KEY_DIM), 1e-5) if has_norms else None
    rotation = Rotation(0.3 ** mx.arange(8.0), num_dims, 1.25, is_traditional)
    positions = mx.array([0, 9, 40, 3, 511, 0, 0, 0], mx.int32)
    results = []
    for kernels in both:
        pool = full_pool()
        rows = (queries, keys, values)
        rotated, token = kernels.rotate_and_write(
            *rows, rotation, norms, positions, SLOTS, pool, TOKEN
        )
        mx.eval(token)
        results.append([rotated, token, *pool.arrays])
    alike(*results)
    assert not np.array(results[0][1]).any()


def test_what_a_kernel_takes_in_one_type_may_come_in_several(native: Native) -> None:
    kernels = kernels_of_cpu(native)
    keys, values = random(NUM_TOKENS, KV_HEADS, KEY_DIM), random(NUM_TOKENS, KV_HEADS, VALUE_DIM)
    queries = random(NUM_TOKENS, HEADS, KEY_DIM)
    keys, values = keys.astype(mx.float16), values.astype(mx.bfloat16)
    rotation = Rotation(mx.zeros(8), KEY_DIM, 1.0, False)
    norms = HeadNorms(mx.ones(KEY_DIM, mx.bfloat16), mx.ones(KEY_DIM, mx.float16), 1e-5)
    positions = mx.zeros(8, mx.int32)
    written, rotated = full_pool(), full_pool()
    token = kernels.write([keys, values], SLOTS, written, TOKEN)
    rows = (queries, keys, values, rotation, norms, positions, SLOTS, rotated, TOKEN)
    mx.eval(token, kernels.rotate_and_write(*rows))
    for pool in (written, rotated):
        by_head = np.array(pool.arrays[1]).reshape(KV_HEADS, NUM_SLOTS, VALUE_DIM)
        found = by_head[:, np.array(SLOTS)[:NUM_TOKENS]].swapaxes(0, 1)
        assert np.allclose(found, np.array(values.astype(mx.float32)), atol=1e-2)


@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_decode(both: list[PoolKernels], soft_cap: float, has_sinks: bool) -> None:
    """Of one split and of two, of a window that begins within a block, and of one key."""
    queries = random(4, HEADS, KEY_DIM)
    tables = np.zeros((4, 32), np.uint32)
    tables[:] = np.random.default_rng(1).permutation(32)
    ranges = mx.array([[0, 900], [31, 512], [5, 70], [0, 1]], mx.int32)
    rows = DecodeRows(mx.array(tables), ranges)
    sinks = mx.array(np.pad(np.array(random(HEADS)), (0, 8 - HEADS))) if has_sinks else None
    results = [
        kernels.decode(queries, rows, full_pool(), TOKEN, scale=0.3, soft_cap=soft_cap, sinks=sinks)
        for kernels in both
    ]
    alike(*results)


def test_latents_are_keys_whose_first_numbers_are_the_values(both: list[PoolKernels]) -> None:
    queries, new = random(4, HEADS, 80), random(NUM_TOKENS, 1, 80)
    rows = DecodeRows(
        mx.arange(32, dtype=mx.uint32)[None] + mx.zeros((4, 1), mx.uint32),
        mx.array([[0, 900], [31, 512], [5, 70], [0, 1]], mx.int32),
    )
    results = []
    for kernels in both:
        mx.random.seed(4)
        pool = KernelPool((random(NUM_SLOTS, 80),), 1, 64, BLOCK_SIZE)
        token = kernels.write([new], SLOTS, pool, TOKEN)
        attended = kernels.decode(queries, rows, pool, token, scale=1.0, soft_cap=0.0, sinks=None)
        results.append([*attended, *pool.arrays])
    alike(*results)


def test_each_kernel_is_made_once_whatever_the_step(native: Native) -> None:
    """Metal and CUDA compile for seconds."""
    made: list[str] = []
    inner = cpu_kernels(native)

    def make(target: Target, source: KernelSource) -> Kernel:
        made.append(source.name)
        return inner.make(target, source)

    model = tiny_model("qwen3")
    kernels = SourceKernels(Target.CPU, make)
    checked = check_model(model, VOCAB_SIZE, gpu=Gpu.METAL, kernels=kernels)
    assert gpu_of(checked).kernels is kernels
    assert len(set(made)) == len(made)
    # The pool has another size than those of the check, and perhaps other blocks.
    for block_size, names in ((TIGHT.block_size, []), (8, ["paged_decode"])):
        made.clear()
        config = replace(limits(checked), block_size=block_size)
        for size in (3, 40):
            requests = [make_request(i, [i] * size, max_tokens=8) for i in range(3)]
            serve(make_runner(model, VOCAB_SIZE, checked, config), config, requests)
        assert [name.rsplit("_", 1)[0] for name in made] == names


@pytest.mark.parametrize(
    ("family", "dtype"),
    weekly(
        [
            ("qwen3", mx.bfloat16),
            ("qwen3", mx.float16),
            ("gemma2", mx.bfloat16),
            ("gpt_oss", mx.float32),
            ("mistral", mx.float32),
            ("deepseek_v3", mx.float32),
        ],
        2,
    ),
)
def test_the_check_at_load_finds_them_right(native: Native, family: str, dtype: mx.Dtype) -> None:
    """Windows and sinks, soft caps, norms of heads, 16 bits, and latents."""
    model = make_tiny(family) if family in LATENT_MODELS else tiny_model(family)
    model.set_dtype(dtype)
    kernels = kernels_of_cpu(native)
    checked = check_model(model, VOCAB_SIZE, gpu=Gpu.CUDA, kernels=kernels)
    assert gpu_of(checked).kernels is kernels, gpu_of(checked).reason
    assert all(shape.dtype == dtype for shape in checked.layout.shapes)


def test_keys_and_values_of_another_type_than_the_models(native: Native) -> None:
    kernels = kernels_of_cpu(native)
    checked = check_model(
        tiny_model("qwen3"), VOCAB_SIZE, kv_dtype=mx.bfloat16, gpu=Gpu.CUDA, kernels=kernels
    )
    assert gpu_of(checked).kernels is kernels, gpu_of(checked).reason
    assert all(shape.dtype == mx.bfloat16 for shape in checked.layout.shapes)


def test_what_no_kernel_can_keep_has_a_reason() -> None:
    kernels = load_kernels(Gpu.METAL)
    assert isinstance(kernels, SourceKernels)
    shape = LayerShape(2, 64, 64, mx.bfloat16)
    assert kernels.why_not(shape) == ""
    assert kernels.why_not(shape._replace(key_dim=60)) == "key_dim 60 is not a multiple of 8"
    assert kernels.why_not(shape.with_dtype(mx.int8)) == ""
    assert kernels.why_not(shape.with_dtype(mx.int32)) == "they keep no keys and values in int32"


@pytest.mark.parametrize("gpu", Gpu)
def test_mlx_is_given_the_sources_as_they_are(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    given: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []

    def make(**options: Any) -> Any:
        given.append(options)

        def call(**arguments: Any) -> list[mx.array]:
            calls.append(arguments)
            return [TOKEN]

        return call

    name = {Gpu.METAL: "metal_kernel", Gpu.CUDA: "cuda_kernel"}[gpu]
    monkeypatch.setattr(mx.fast, name, make)
    kernels = load_kernels(gpu)
    assert isinstance(kernels, SourceKernels)
    assert str(kernels) == f"on, for {gpu.lower()}"
    keys, values = random(NUM_TOKENS, KV_HEADS, KEY_DIM), random(NUM_TOKENS, KV_HEADS, VALUE_DIM)
    pool = full_pool()
    for _ in range(2):
        assert kernels.write([keys, values], SLOTS, pool, TOKEN) is TOKEN
    [options] = given
    assert set(options) == {"name", "input_names", "output_names", "source", "header"}
    assert len(calls) == 2
    assert len(calls[0]["inputs"]) == len(options["input_names"])
    assert calls[0]["output_dtypes"] == [mx.uint32]
    assert calls[0]["grid"][0] == NUM_TOKENS * calls[0]["threadgroup"][0]
