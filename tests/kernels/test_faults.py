"""Kernels under ASan, UBSan and TSan, and faults planted in them, each of which must be found."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest

from batching.backend.platforms.gpu.kernels.definitions import (
    KVWrite,
    MergeSplits,
    NormRopeWrite,
    PoolShape,
)
from batching.backend.platforms.gpu.kernels.sources import DType, KernelSource, Launch, Target
from tests.kernels.cases import decode_case, no_token, pad, stored
from tests.kernels.cpu_target import ORDERS, Array, Build, KernelFailed, run_watched

pytestmark = pytest.mark.kernels

BF16, F16, F32 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32
BARRIER: Final = "BARRIER();"
Case = tuple[KernelSource, list[Array], list[Array], Launch]


# TSan keeps apart 255 threads: small groups, and few of them.
THREADS: Final = 64


def decode(
    num_heads: int = 2, dim: int = 64, dtype: DType = F16, ranges: int = 1, **options: Any
) -> Case:
    """Return a decode of two splits for each of one KV head's rows."""
    some = [(0, 513), (3, 40), (0, 0)][:ranges]
    case = decode_case(num_heads, 1, dim, dtype, ranges=some, threads=THREADS, **options)
    return case.kernel.source(Target.CPU), case.inputs, case.outputs(), case.launch


def merge() -> Case:
    kernel = MergeSplits(BF16, 4, 80, has_sinks=True)
    shape = 2, 4, 3
    inputs = [
        np.ones((*shape, 80), np.float32),
        np.ones((*shape, 2), np.float32),
        pad(np.ones(4, np.float32)),
        no_token(),
    ]
    outputs = [np.zeros((2, 4, 80), np.uint16), no_token()]
    return kernel.source(Target.CPU), inputs, outputs, kernel.launch(2)


def write(slots: tuple[int, ...] = (5, 0, 15)) -> Case:
    pool = PoolShape(2, 64, 80, F16)
    kernel = KVWrite(pool, F16, THREADS)
    inputs = [
        np.zeros((len(slots), 2, 64), np.float16),
        np.ones((len(slots), 2, 80), np.float16),
        pad(np.array(slots, np.uint32)),
        *(np.zeros((32, dim), np.float16) for dim in (64, 80)),
        no_token(),
    ]
    return kernel.source(Target.CPU), inputs, [no_token()], kernel.launch(len(slots))


def write_8bit() -> Case:
    kernel = KVWrite(PoolShape(2, 64, 80, DType.INT8), F16, THREADS)
    inputs = [
        np.ones((3, 2, 64), np.float16),
        np.ones((3, 2, 80), np.float16),
        pad(np.array([5, 0, 15], np.uint32)),
        *(np.zeros((32, dim), np.int8) for dim in (64, 80)),
        *(np.zeros(32, np.float32) for _ in range(2)),
        no_token(),
    ]
    return kernel.source(Target.CPU), inputs, [no_token()], kernel.launch(3)


def write_rounded() -> Case:
    kernel = KVWrite(PoolShape(2, 64, 80, DType.INT8), DType.INT8, THREADS)
    inputs: list[Array] = [
        *(np.ones((3, 2, dim), np.int8) for dim in (64, 80)),
        *(np.ones(8, np.float32) for _ in range(2)),
        pad(np.array([5, 0, 15], np.uint32)),
        *(np.zeros((32, dim), np.int8) for dim in (64, 80)),
        *(np.zeros(32, np.float32) for _ in range(2)),
        no_token(),
    ]
    return kernel.source(Target.CPU), inputs, [no_token()], kernel.launch(3)


def norm_rope_write() -> Case:
    pool = PoolShape(2, 80, 64, BF16)
    kernel = NormRopeWrite(pool, BF16, 5, rotary_dim=32, norm_eps=1e-6, threads=THREADS)
    ones = [np.ones(shape) for shape in ((2, 5, 80), (2, 2, 80), (2, 2, 64), (80,), (80,))]
    inputs = [
        *(stored(array, BF16) for array in ones),
        np.ones(16, np.float32),
        pad(np.array([3, 9], np.int32)),
        pad(np.array([15, 0], np.uint32)),
        *(np.zeros((32, dim), np.uint16) for dim in (80, 64)),
        no_token(),
    ]
    outputs = [np.zeros((2, 5, 80), np.uint16), no_token()]
    return kernel.source(Target.CPU), inputs, outputs, kernel.launch(2)


CASES: Final[dict[str, Callable[[], Case]]] = {
    "decode": lambda: decode(ranges=3),
    "decode of 8 heads": lambda: decode(8, 128, BF16),
    "decode of dims that leave threads idle": lambda: decode(3, 80, F32),
    "decode of latents": lambda: decode(4, 576, BF16, value_dim=512, values_in_keys=True),
    "decode of 8 bits": lambda: decode(pool_dtype=DType.INT8),
    "merge": merge,
    "write": write,
    "write of 8 bits": write_8bit,
    "write of rounded rows": write_rounded,
    "norm, rope, write": norm_rope_write,
}


@pytest.mark.parametrize("name", CASES)
def test_memory_is_used_as_it_may_be_and_the_order_of_threads_changes_nothing(name: str) -> None:
    source, inputs, outputs, launch = CASES[name]()
    run_watched(source, Build.MEMORY, inputs, outputs, launch, ORDERS)


@pytest.mark.parametrize("name", CASES)
def test_there_are_no_races(name: str) -> None:
    source, inputs, outputs, launch = CASES[name]()
    # TSan finds a race in any order.
    run_watched(source, Build.THREADS, inputs, outputs, launch, [2])


def planted(case: Case, old: str, new: str, occurrence: int = 0) -> Case:
    """Return a case whose source has `new` instead of `old`."""
    source, *rest = case
    places = [match.start() for match in re.finditer(re.escape(old), source.source)]
    place = places[occurrence]
    text = source.source[:place] + new + source.source[place + len(old) :]
    return replace(source, source=text), *rest  # type: ignore[return-value]


def found(case: Case, watch: Build, orders: tuple[int, ...] = ORDERS) -> str:
    """Return what was found in a case with a fault."""
    source, inputs, outputs, launch = case
    with pytest.raises(KernelFailed) as failure:
        run_watched(source, watch, inputs, outputs, launch, orders)
    return str(failure.value)


@pytest.mark.parametrize("number", range(5))
def test_each_missing_barrier_is_a_race(number: int) -> None:
    case = planted(CASES["decode"](), BARRIER, "", number)
    assert "data race" in found(case, Build.THREADS, (0,))


def test_the_tests_know_of_each_barrier() -> None:
    assert decode()[0].source.count(BARRIER) == 5
    assert not any(BARRIER in case()[0].source for case in (merge, write, norm_rope_write))


def test_a_missing_barrier_shows_in_another_order() -> None:
    case = planted(decode(), BARRIER, "", occurrence=1)
    assert "changes buffer" in found(case, Build.MEMORY)


def test_two_tokens_of_one_slot_are_a_race_between_groups() -> None:
    assert "data race" in found(write((5, 0, 5)), Build.THREADS, (0,))


def test_groups_that_write_one_result_are_a_race() -> None:
    case = planted(decode(), "* groups.z + group.z", "* groups.z")
    assert "data race" in found(case, Build.THREADS, (0,))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("decode", BARRIER, "if (thread_id == 9) return; BARRIER();"),
        ("decode", BARRIER, "if (thread_id % 2) { BARRIER(); } else {\n BARRIER(); }"),
        ("decode", "team_max<", "if (lane < 16) team_max<"),
        ("norm, rope, write", "team_sum<", "if (lane != 31) team_sum<"),
    ],
)
def test_a_divergent_collective_is_found(name: str, old: str, new: str) -> None:
    case = planted(CASES[name](), old, new)
    assert "divergent collective" in found(case, Build.MEMORY)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # Beyond a shared array, beyond a key's row in the pool, and before the pool.
        ("slots[key] = block", "slots[key + SPLIT_KEYS] = block"),
        ("from + dim, part", "from + dim + key_pool_shape[0] * KEY_DIM, part"),
        ("key_pool + (kv_head", "key_pool - KEY_DIM * 40 + (0 * kv_head"),
    ],
)
def test_what_lies_beyond_an_array_is_not_touched(old: str, new: str) -> None:
    assert "AddressSanitizer" in found(planted(decode(), old, new), Build.MEMORY)


def test_undefined_arithmetic_is_found() -> None:
    case = planted(
        decode(), "const int row = group.y;", "const int row = group.y + 2147483647 * groups.x;"
    )
    assert "runtime error" in found(case, Build.MEMORY)


def test_more_shared_memory_than_every_gpu_has_is_found() -> None:
    case = planted(decode(), "SHARED(unsigned, slots, SPLIT_KEYS)", "SHARED(unsigned, slots, 9000)")
    assert "bytes of shared memory" in found(case, Build.MEMORY)
