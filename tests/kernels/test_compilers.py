"""The kernels through compilers of CUDA and, for their address spaces, of Metal; neither needs a GPU."""

from dataclasses import replace
from typing import Final

import pytest

from batching.backend.platforms.gpu.kernels.definitions import (
    MAX_SHARED_BYTES,
    KVWrite,
    MergeSplits,
    NormRopeWrite,
    PagedDecode,
    PoolShape,
)
from batching.backend.platforms.gpu.kernels.sources import DType, Target
from tests.kernels import metal, nvrtc
from tests.kernels.cases import Kernel

pytestmark = pytest.mark.kernels

BF16, F16, F32, INT8 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.INT8
# A100, H100, B200, RTX 50.
ARCHITECTURES: Final = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
# Of a thread: twice 256 threads, a multiprocessor's least, have so many.
MAX_REGISTERS: Final = 128
# Once 256 threads.
MAX_REGISTERS_LATENT: Final = 192

needs_nvrtc = pytest.mark.skipif(
    nvrtc.home() is None, reason="no NVRTC: make test-kernels installs it, on Linux"
)
needs_clang = pytest.mark.skipif(
    metal.python() is None, reason="no libclang: make test-kernels installs it"
)


def pool(num_kv_heads: int, dim: int, dtype: DType) -> PoolShape:
    return PoolShape(num_kv_heads, dim, dim, dtype)


def decode(num_heads: int, num_kv_heads: int, dim: int, dtype: DType) -> PagedDecode:
    return PagedDecode(pool(num_kv_heads, dim, dtype), dtype, num_heads, 16, 0.1, soft_cap=30.0)


LATENT: Final = PoolShape(1, 576, 512, BF16, values_in_keys=True)
KERNELS: Final[dict[str, Kernel]] = {
    "decode, 1 head of 96": decode(8, 8, 96, F32),
    "decode, 4 heads of 64, float16": decode(32, 8, 64, F16),
    "decode, 4 heads of 128, bfloat16": decode(32, 8, 128, BF16),
    "decode, 8 heads of 128, bfloat16": decode(64, 8, 128, BF16),
    "decode, 8 heads of 128, float32": decode(64, 8, 128, F32),
    "decode, 2 heads of 256, bfloat16": decode(16, 8, 256, BF16),
    "decode, 5 heads of 80, float16": decode(20, 4, 80, F16),
    "decode, 8 bits": PagedDecode(PoolShape(8, 128, 128, INT8), BF16, 32, 16, 0.1),
    "decode, latent": PagedDecode(LATENT, BF16, 128, 16, 1.0),
    "merge": MergeSplits(BF16, 32, 128),
    "merge with sinks": MergeSplits(F16, 64, 64, has_sinks=True),
    "write": KVWrite(pool(8, 128, BF16), BF16),
    "write, 8 bits": KVWrite(PoolShape(8, 128, 128, INT8), BF16),
    "write, rounded to 8 bits before": KVWrite(PoolShape(8, 128, 128, INT8), INT8),
    "write, latent": KVWrite(LATENT, BF16),
    "write into another type": KVWrite(pool(8, 128, F16), F32),
    "norm, rope, write": NormRopeWrite(pool(8, 128, BF16), BF16, 32, 128, norm_eps=1e-6),
    "rope, write": NormRopeWrite(pool(4, 80, F16), F16, 20, 32, traditional=True),
}


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_cuda_keeps_all_of_a_thread_in_registers(name: str, architecture: str) -> None:
    found = nvrtc.compile_kernel(KERNELS[name].source(Target.CUDA), architecture)
    assert found.registers <= (MAX_REGISTERS_LATENT if "latent" in name else MAX_REGISTERS)
    assert found.stack_bytes == found.spill_bytes == 0
    assert found.shared_bytes <= MAX_SHARED_BYTES


@needs_nvrtc
def test_the_shared_memory_is_what_the_definition_says() -> None:
    kernel = decode(32, 8, 128, BF16)
    found = nvrtc.compile_kernel(kernel.source(Target.CUDA), "sm_80")
    assert found.shared_bytes == kernel.shared_bytes


@needs_nvrtc
@pytest.mark.parametrize("fault", ["int i = undeclared;", "queries[0] = 0;"])
def test_what_is_no_cuda_does_not_compile(fault: str) -> None:
    source = decode(4, 4, 64, F32).source(Target.CUDA)
    with pytest.raises(nvrtc.DoesNotCompile, match="error"):
        nvrtc.compile_kernel(replace(source, source=source.source + fault), "sm_80")


@needs_clang
@pytest.mark.parametrize("name", KERNELS)
def test_metal_would_accept_each_address_space(name: str) -> None:
    metal.check(KERNELS[name].source(Target.METAL))


@needs_clang
def test_a_tiny_models_statistics_may_be_in_constant_memory() -> None:
    metal.check(MergeSplits(BF16, 2, 64).source(Target.METAL), small=["stats"])


@needs_clang
@pytest.mark.parametrize(
    "fault",
    [
        "float* p = scores;",
        "device float* p = scores;",
        "const float* p = queries;",
        "float x; device float* p = &x;",
        "key_pool[0] = 0.0f;",
        "float thread = 0.0f;",
    ],
)
def test_a_wrong_address_space_is_rejected(fault: str) -> None:
    source = decode(4, 4, 64, F32).source(Target.METAL)
    with pytest.raises(metal.DoesNotCompile):
        metal.check(replace(source, source=source.source + fault))
