"""Checks at load whether a model can be served from the paged pool."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from batching.backend.choose_pool import is_on_host, kv_cache
from batching.backend.cpu.modules import replace_modules
from batching.backend.mlx_runner import MLXRunner
from batching.backend.model_hooks import RowSelection, hook_attention, select_rows
from batching.backend.native.modules import min_input_bits
from batching.backend.native_loader import Native
from batching.backend.paged.kv_cache import LayerShape, PagedKVCache
from batching.backend.sampling.sampler import ArgMax
from batching.block_manager import BlockTable
from batching.request import BatchRequest
from batching.scheduling.step_plan import Slice

_BLOCK_SIZE: Final = 4
_PROBE_LENGTHS: Final = (11, 6)
# Of the largest logit: rounding differs with the shape of a product, outputs do not.
_TOLERANCE: Final[dict[mx.Dtype, float]] = {mx.float32: 1e-3}
_COARSE_TOLERANCE: Final = 6e-2
# A value midway between two steps of 8 bits rounds either way, and that grows in later layers.
_TOLERANCE_OF_8_BITS: Final = 0.3


@dataclass(frozen=True)
class Batchable:
    """What the paged runner needs to know; `selection` is hooked into the model already.

    native: the kernels that the model's modules and its pool use.
    """

    shapes: tuple[LayerShape, ...]
    selection: RowSelection
    native: Native | None = None

    def cache(self, num_blocks: int, block_size: int) -> PagedKVCache:
        """Return an empty pool."""
        return kv_cache(self.shapes, num_blocks, block_size, self.native)

    @property
    def arg_max(self) -> ArgMax | None:
        """What finds the highest logits, if not MLX."""
        return self.native.module.arg_max if self.native else None


@dataclass(frozen=True)
class NotBatchable:
    """Why the model is served one request at a time, for the operator to read."""

    reason: str


def check_model(
    model: nn.Module,
    vocab_size: int,
    native: Native | None = None,
    kv_dtype: mx.Dtype | None = None,
) -> Batchable | NotBatchable:
    """Compare a ragged batch over the pool with mlx-lm's own single requests.

    Two unlike prompts are prefilled in chunks, mixed with a decode, over scattered blocks; the
    logits of their last tokens must be those of a plain forward pass.  Keys and values are
    kept in `kv_dtype`; None is the type in which the model makes them.
    """
    prompts = [_probe_tokens(n, salt, vocab_size) for salt, n in enumerate(_PROBE_LENGTHS)]
    cache = make_prompt_cache(model)
    expected = [_last_logits(model, prompts[0], cache)]
    shapes = _shapes(cache)
    if isinstance(shapes, NotBatchable):
        return shapes
    if kv_dtype is not None:
        shapes = tuple(shape._replace(dtype=kv_dtype) for shape in shapes)
    expected += [_last_logits(model, p, make_prompt_cache(model)) for p in prompts[1:]]
    hook_attention(model)
    if native is None and is_on_host(shapes):
        replace_modules(model)
    batchable = Batchable(shapes, RowSelection(), native)
    select_rows(model, batchable.selection)
    try:
        actual = _ragged_logits(model, vocab_size, batchable, prompts)
    except Exception as error:
        # A model's code can do anything with a cache, so it can raise anything.
        return NotBatchable(f"its attention does not run over a paged cache ({error})")
    difference = max(_difference(a, e) for a, e in zip(actual, expected, strict=True))
    tolerance = _TOLERANCE.get(shapes[0].dtype, _COARSE_TOLERANCE)
    if not difference <= (_TOLERANCE_OF_8_BITS if min_input_bits(model) == 8 else tolerance):
        return NotBatchable(f"a batch changes its logits by {difference:.2g} of the largest one")
    return batchable


def _probe_tokens(num_tokens: int, salt: int, vocab_size: int) -> list[int]:
    return [(7919 * (i + 1) + 104729 * salt) % vocab_size for i in range(num_tokens)]


def _last_logits(model: nn.Module, tokens: Sequence[int], cache: list[Any]) -> mx.array:
    logits: mx.array = model(mx.array([list(tokens)]), cache=cache)
    mx.eval(logits)
    return logits[0, -1]


def _shapes(cache: Sequence[Any]) -> tuple[LayerShape, ...] | NotBatchable:
    """Read from a filled cache of mlx-lm what each layer keeps."""
    shapes: list[LayerShape] = []
    for layer in cache:
        if type(layer) not in (KVCache, RotatingKVCache) or getattr(layer, "keep", False):
            return NotBatchable(f"it keeps its state in a {type(layer).__name__}")
        if layer.keys is None:
            return NotBatchable("a layer keeps no keys")
        _, num_heads, _, key_dim = layer.keys.shape
        window = layer.max_size if isinstance(layer, RotatingKVCache) else None
        value_dim, dtype = layer.values.shape[-1], layer.keys.dtype
        shapes.append(LayerShape(num_heads, key_dim, value_dim, dtype, window))
    return tuple(shapes)


def _ragged_logits(
    model: nn.Module,
    vocab_size: int,
    batchable: Batchable,
    prompts: Sequence[Sequence[int]],
) -> list[mx.array]:
    cache = batchable.cache(num_blocks=8, block_size=_BLOCK_SIZE)
    runner = MLXRunner(model, vocab_size, batchable.selection, cache)
    requests = [BatchRequest(i, p, max_tokens=1) for i, p in enumerate(prompts)]
    tables = ([5, 1, 2], [7, 4])
    for request, table in zip(requests, tables, strict=True):
        request.block_table = BlockTable(table)
    first, second = (len(p) for p in prompts)
    steps = (
        [Slice(requests[0], 0, first - 6)],
        [Slice(requests[0], first - 6, first - 1), Slice(requests[1], 0, second - 1)],
        [Slice(requests[0], first - 1, first), Slice(requests[1], second - 1, second)],
    )
    for slices in steps:
        step = cache.begin(slices)
        logits = runner.logits(step)
        mx.eval(logits, cache.arrays)
    return [
        logits[i] for r in requests for i, s in enumerate(step.logit_rows.samples) if s.request is r
    ]


def _difference(actual: mx.array, expected: mx.array) -> float:
    """Return the largest difference, as a share of the largest logit."""
    scale = mx.abs(expected).max()
    return float(mx.abs(actual - expected).max() / scale)
