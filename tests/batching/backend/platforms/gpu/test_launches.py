"""How many kernels a step launches, counted in its graph.

MLX's fused operations and ours are one node each, as they are one kernel on a GPU; on a CPU MLX would compute the
former by several.  What changes a shape only launches nothing.
"""

import ctypes
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from batching.backend.devices import Gpu
from batching.backend.execution_mode import CheckResult, ExecutionMode
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.gpu.kernels.sources import KernelSource, Target
from batching.backend.platforms.gpu.pool_kernels import PoolKernels
from batching.backend.platforms.gpu.source_kernels import Kernel, SourceKernels
from batching.backend.runner.mlx_runner import MLXRunner
from batching.backend.sampling.logit_rows import LogitRows
from batching.backend.sampling.sampler import Sampler, draw_on_device
from batching.backend.sampling.slice_sampler import SliceSampler
from batching.backend.self_check.checked_model import CheckedModel
from batching.block_manager import BlockTable
from batching.request import BatchRequest
from batching.steps.step_plan import Slice
from tests.support.platforms import check_model, on_kernels as with_kernels
from tests.support.requests import make_request, slice_of, states_of
from tests.support.tiny_models import VOCAB_SIZE, tiny_model

# Views of what is there, as long as it is contiguous.
VIEWS: Final = {
    "Broadcast",
    "Reshape",
    "Transpose",
    "Squeeze",
    "ExpandDims",
    "Slice",
    "Unflatten",
    "Flatten",
    "View",
}
BLOCK_SIZE: Final = 32
NUM_BLOCKS: Final = 128
HEAD_DIM: Final = 32


def standing_in(
    native: Native,
    inputs: Sequence[mx.array],
    outputs: Any,
    note: Callable[[Sequence[int]], None] = lambda _: None,
) -> list[mx.array]:
    """Return an operation that is counted, and whose outputs are zeros, as the token of the order must be."""
    shapes, dtypes = zip(*outputs, strict=True)
    sizes = [dtype.size * prod(shape) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def run(sources: Sequence[int], targets: Sequence[int]) -> None:
        note(sources)
        for address, size in zip(targets, sizes, strict=True):
            ctypes.memset(address, 0, size)

    made: list[mx.array] = native.module.host_kernel(
        run, list(inputs), list(map(list, shapes)), list(dtypes)
    )
    return made


class Counted:
    """Kernels of which only the launches count, and what they are given.

    given: arrays and the addresses at which kernels get them.
    """

    def __init__(self, native: Native) -> None:
        self.names: list[str] = []
        self.given: list[tuple[mx.array, int]] = []
        self._native = native
        self.kernels = SourceKernels(Target.CPU, self._make)

    def _make(self, _: Target, source: KernelSource) -> Kernel:
        def call(**given: Any) -> list[mx.array]:
            self.names.append(source.name.rsplit("_", 1)[0])
            inputs: list[mx.array] = given["inputs"]
            outputs = zip(given["output_shapes"], given["output_dtypes"], strict=True)

            def note(addresses: Sequence[int]) -> None:
                self.given += zip(inputs, addresses, strict=True)

            return standing_in(self._native, inputs, outputs, note)

        return call


def fuse(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what MLX has one kernel for on a GPU be one node."""

    def alike(x: mx.array, *inputs: Any, **_: Any) -> mx.array:
        arrays = [x, *(each for each in inputs if isinstance(each, mx.array))]
        return standing_in(native, arrays, [(x.shape, x.dtype)])[0]

    def attention(queries: mx.array, keys: mx.array, values: mx.array, **_: Any) -> mx.array:
        shape = (*queries.shape[:3], values.shape[-1])
        return standing_in(native, [queries, keys, values], [(shape, queries.dtype)])[0]

    # Compiled by MLX, unless tests before this one have put a CPU's there.
    for model in ("qwen3", "llama"):
        monkeypatch.setattr(f"mlx_lm.models.{model}.swiglu", alike)
    monkeypatch.setattr(mx.fast, "rms_norm", alike)
    monkeypatch.setattr(mx.fast, "rope", alike)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attention)


@cache
def checked_model(
    native: Native,
    num_layers: int,
    family: str = "qwen3",
    *,
    on_kernels: bool = True,
    kv_dtype: mx.Dtype | None = None,
) -> tuple[nn.Module, CheckedModel]:
    model = tiny_model(
        family,
        num_hidden_layers=num_layers,
        hidden_size=64,
        intermediate_size=64,
        head_dim=HEAD_DIM,
    )
    nn.quantize(model, group_size=32, bits=4)
    mx.eval(model.parameters())
    kernels: PoolKernels | None = Counted(native).kernels if on_kernels else None
    # Other tests hold it against the right logits, which takes seconds.
    known = CheckResult(ExecutionMode.RAGGED, gathers_all=False)
    return model, check_model(
        model, VOCAB_SIZE, kv_dtype=kv_dtype, known=known, gpu=Gpu.METAL, kernels=kernels
    )


def requests(lengths: Sequence[int]) -> list[BatchRequest]:
    """Return requests in scattered blocks."""
    free = np.random.default_rng(0).permutation(NUM_BLOCKS).tolist()
    made = [make_request(i, [i] * length, max_tokens=9) for i, length in enumerate(lengths)]
    for request in made:
        num_blocks = -(-len(request.token_ids) // BLOCK_SIZE)
        request.block_table = BlockTable(free.pop() for _ in range(num_blocks))
    return made


def step(
    model: nn.Module, checked: CheckedModel, slices: Sequence[Slice], *, is_kept: bool = False
) -> tuple[mx.array, list[mx.array]]:
    """Return the logits of a step, and what it writes, not computed yet; by a graph that was kept, or not."""
    cache = checked.cache(NUM_BLOCKS, BLOCK_SIZE)
    mx.eval(cache.arrays)
    graphs = checked.graphs(cache, is_check=True) if is_kept else None
    runner = MLXRunner(model, VOCAB_SIZE, checked.selection, cache, graphs=graphs)
    for _ in range(2 if is_kept else 0):
        runner.logits(cache.begin(slices))
        cache.reset()
    logits = runner.logits(cache.begin(slices))
    cache.flush()
    return logits, cache.arrays


def launches(directory: Path, logits: mx.array, written: Sequence[mx.array]) -> Counter[str]:
    path = directory / "graph.dot"
    mx.export_to_dot(str(path), logits, *written)
    return Counter(re.findall(r'label ?="(\w+)", shape=rectangle', path.read_text()))


def of_a_layer(
    native: Native,
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    slices: Sequence[Slice],
    family: str = "qwen3",
    *,
    on_kernels: bool = True,
    kv_dtype: mx.Dtype | None = None,
    is_kept: bool = False,
) -> Counter[str]:
    """Return what a layer adds to a step."""
    counts: list[Counter[str]] = []
    for num_layers in (2, 3):
        model, checked = checked_model(
            native, num_layers, family, on_kernels=on_kernels, kv_dtype=kv_dtype
        )
        with monkeypatch.context() as patched:
            fuse(native, patched)
            if on_kernels:
                checked = with_kernels(checked, Counted(native).kernels)
            counts.append(launches(directory, *step(model, checked, slices, is_kept=is_kept)))
    counts[1].subtract(counts[0])
    return Counter({kind: n for kind, n in counts[1].items() if n and kind not in VIEWS})


def decodes(num: int) -> list[Slice]:
    made = requests([41 + i for i in range(num)])
    return [slice_of(r, len(r.token_ids) - 1, len(r.token_ids)) for r in made]


def decodes_and_a_chunk() -> list[Slice]:
    *others, last = requests([*range(41, 48), 290])
    slices = [slice_of(r, len(r.token_ids) - 1, len(r.token_ids)) for r in others]
    return [*slices, slice_of(last, 34, 290)]


@pytest.mark.parametrize("num_rows", [1, 8, 32])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_layer_of_decodes_has_fifteen(
    native: Native, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_rows: int, family: str
) -> None:
    """The norms of heads cost none: two norms, seven products, three of ours, two sums and SwiGLU."""
    counted = of_a_layer(native, monkeypatch, tmp_path, decodes(num_rows), family)
    assert counted["QuantizedMatmul"] == 7
    assert counted["HostKernel"] == 2 + 3 + 1
    assert counted.total() == 15


def test_greedy_tokens_take_three_and_no_copy_of_the_logits(tmp_path: Path) -> None:
    """The arg-max, the logits of the tokens, and the type in which these are looked at on the host."""
    logits = mx.zeros((8, VOCAB_SIZE), mx.bfloat16)
    mx.eval(logits)
    made = requests([41 + i for i in range(8)])
    rows = LogitRows.of([slice_of(r, r.num_tokens - 1, r.num_tokens) for r in made])
    sampler = SliceSampler(VOCAB_SIZE, Sampler(draw_on_device))
    sampled = sampler.sample(rows, states_of(made), logits, None)
    counted = launches(tmp_path, sampled.tokens, [sampled.logits])
    assert counted.keys() - VIEWS == {"ArgReduce", "GatherAxis", "AsType"}
    assert sum(n for kind, n in counted.items() if kind not in VIEWS) == 3
    assert sampled.logits.shape == (8,)


def test_a_graph_that_was_kept_has_as_many(
    native: Native, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counted = of_a_layer(native, monkeypatch, tmp_path, decodes(8), is_kept=True)
    assert counted == of_a_layer(native, monkeypatch, tmp_path, decodes(8))


@pytest.mark.parametrize(("family", "num_norms"), [("qwen3", 2), ("llama", 0)])
def test_in_8_bits_mlx_norms_and_rotates_heads(
    native: Native,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    family: str,
    num_norms: int,
) -> None:
    counted = of_a_layer(native, monkeypatch, tmp_path, decodes(8), family, kv_dtype=mx.int8)
    assert counted["HostKernel"] == 2 + 3 + num_norms + 2 + 1
    assert counted.total() == 15 + num_norms + 2


def test_a_chunk_in_8_bits_gathers_scales_too_and_multiplies_once(
    native: Native, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counted = of_a_layer(
        native, monkeypatch, tmp_path, decodes_and_a_chunk(), "llama", kv_dtype=mx.int8
    )
    assert (counted["Gather"], counted["Multiply"], counted["AsType"]) == (4, 2, 2)
    assert counted.total() == 17 + 4 + 4 + 2 + 2 + 1 + 1 + 1


def test_the_portable_pool_has_more(
    native: Native, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counted = of_a_layer(native, monkeypatch, tmp_path, decodes(8), on_kernels=False)
    assert counted.total() > 20


def test_a_chunk_adds_what_gathers_and_attends(
    native: Native, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two gathers and the sums by which they wait, attention, the next token, and what joins the outputs."""
    counted = of_a_layer(native, monkeypatch, tmp_path, decodes_and_a_chunk())
    assert counted["Gather"] == 2
    assert counted.total() == 15 + 2 + 2 + 1 + 1 + 1


def test_what_orders_the_kernels_are_their_own_inputs_and_outputs(
    native: Native, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An edge of the graph that no kernel reads, as of mx.depends, is no barrier on a GPU."""
    model, checked = checked_model(native, 2)
    counted = launches(tmp_path, *step(model, checked, decodes_and_a_chunk()))
    assert "Gather" in counted
    assert "Depends" not in counted


@pytest.mark.parametrize("make", [lambda: decodes(3), decodes_and_a_chunk])
def test_no_input_is_copied_for_a_kernel(native: Native, make: Callable[[], list[Slice]]) -> None:
    """MLX copies what is not contiguous, beside what is counted."""
    model, checked = checked_model(native, 2)
    counted = Counted(native)
    mx.eval(*step(model, with_kernels(checked, counted.kernels), make()))
    assert counted.names == ["norm_rope_write", "paged_decode", "merge_splits"] * 2
    assert len(counted.given) == 2 * (11 + 6 + 3)
    for array, address in counted.given:
        assert np.asarray(array).ctypes.data == address
