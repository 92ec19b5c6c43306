"""Latent attention: its pool, its products with a matrix for each head, and what no bit depends on."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.mla import MultiLinear

from batching.backend.execution_mode import ExecutionMode
from batching.backend.platforms.cpu.layers.per_head import HeadLinear
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.cpu.pools.cache import NativeLatentCache
from batching.backend.runner.mlx_runner import MLXRunner
from batching.backend.self_check.checked_model import CheckedModel
from batching.block_manager import BlockTable
from scripts.make_model.tiny_configs import VOCAB_SIZE
from tests.support.model_zoo import make_tiny
from tests.support.platforms import check_model, replace_modules, use_kernels
from tests.support.requests import make_request, slice_of
from tests.support.weekly import weekly

PROMPTS = [[(7 * i + size) % VOCAB_SIZE for i in range(size)] for size in (37, 14)]
KEPT = ["deepseek_v3", "glm4_moe_lite", "kimi_linear", "kimi_vl", "longcat_flash", "mistral4"]
EXPANDED = ["deepseek_v2", "minicpm3", "youtu_llm"]


def checked(
    name: str, native: Native, dtype: mx.Dtype | None = None
) -> tuple[nn.Module, CheckedModel]:
    model = use_kernels(make_tiny(name), native)
    return model, check_model(model, VOCAB_SIZE, native, dtype)


def last_logits(
    model: nn.Module, check: CheckedModel, steps: list[list[tuple[int, int, int]]]
) -> mx.array:
    """Return those of the last step, whose slices are of prompts, from and to a position."""
    cache = check.cache(24, 4)
    runner = MLXRunner(model, VOCAB_SIZE, check.selection, cache)
    requests = [make_request(i, prompt, max_tokens=1) for i, prompt in enumerate(PROMPTS)]
    for request, first in zip(requests, (0, 12), strict=True):
        request.block_table = request.window_table = BlockTable(list(range(first, first + 11)))
        request.state_slot = request.request_id
    for step in steps:
        logits = runner.logits(cache.begin([slice_of(requests[i], a, b) for i, a, b in step]))
        mx.eval(logits, cache.arrays)
        cache.flush()
    return logits[-1]


@pytest.mark.parametrize("name", weekly(KEPT, 2))
def test_latents_are_kept_once_in_a_pool_of_the_kernels(native: Native, name: str) -> None:
    _, check = checked(name, native)
    assert check.mode in (ExecutionMode.RAGGED, ExecutionMode.PIECES)
    shapes = [shape for shape in check.layout.shapes if shape.is_latent]
    layers = [x for x in check.cache(3, 4).layers if isinstance(x, NativeLatentCache)]
    assert len(layers) == len(shapes) > 0
    # Keys of a block of 4 tokens are padded to whole vectors.
    assert [len(layer.pool.regions) for layer in layers] == [1] * len(layers)


@pytest.mark.parametrize(
    "name", weekly([*KEPT[:2], *EXPANDED, "ministral3", "phi", "starcoder2"], 3)
)
def test_no_bit_of_a_row_depends_on_chunks_or_on_other_rows(native: Native, name: str) -> None:
    model, check = checked(name, native)
    alone = last_logits(model, check, [[(1, 0, 14)]])
    beside = last_logits(model, check, [[(0, 0, 30), (1, 0, 14)]])
    cut = last_logits(
        model, check, [[(1, 0, 5), (0, 0, 7)], [(0, 7, 37), (1, 5, 13)], [(1, 13, 14)]]
    )
    assert mx.array_equal(alone, beside)
    assert mx.array_equal(alone, cut)


@pytest.mark.parametrize("name", weekly([*KEPT, *EXPANDED], 2, always=["deepseek_v3"]))
def test_logits_are_those_of_the_model_without_kernels(native: Native, name: str) -> None:
    plain = make_tiny(name)
    expected = plain(mx.array([PROMPTS[1]]))[0, -1]
    model, check = checked(name, native)
    computed = last_logits(model, check, [[(0, 0, 9)], [(0, 9, 37), (1, 0, 14)]])
    assert mx.allclose(computed, expected, rtol=0, atol=1e-5 * float(mx.abs(expected).max()) + 1e-5)


@pytest.mark.parametrize("name", KEPT[:2])
def test_latents_in_16_bits(native: Native, name: str) -> None:
    model, check = checked(name, native)
    rounded, rounded_check = checked(name, native, mx.bfloat16)
    exact = last_logits(model, check, [[(1, 0, 14)]])
    off = mx.abs(last_logits(rounded, rounded_check, [[(1, 0, 14)]]) - exact).max()
    assert 0 < float(off) < 0.02 * float(mx.abs(exact).max())


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_a_matrix_for_each_head(native: Native, bits: int) -> None:
    heads: nn.Module = MultiLinear(64, 96, 3)
    if bits:
        heads = heads.to_quantized(32, bits)
    queries, latents = mx.random.normal((5, 3, 1, 64)), mx.random.normal((2, 1, 7, 96))
    expected = heads(queries), heads(latents, transpose=False)
    model = replace_modules(nn.Sequential(heads), native)
    [replaced] = model.layers
    assert isinstance(replaced, HeadLinear)
    for computed, right in zip(
        (replaced(queries), replaced(latents, transpose=False)), expected, strict=True
    ):
        assert mx.allclose(computed, right, rtol=1e-5, atol=1e-4)
