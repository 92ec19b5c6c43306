"""What sampling and one layer's attention cost, on the device that MLX takes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Final

import mlx.core as mx

from batching.backend.paged.kv_cache import PagedKVCache
from batching.backend.paged.layout import LayerShape
from batching.backend.paged.mlx_pool import device_cache
from batching.backend.platforms.cpu.native_loader import NoNative, load_native
from batching.backend.platforms.cpu.sampling import native_sampler
from batching.backend.sampling.logit_rows import Sample
from batching.backend.sampling.sampler import Sampler
from batching.block_manager import BlockTable
from batching.config import BLOCK_SIZE
from batching.inputs.sampling_params import GREEDY, SamplingParams
from batching.inputs.sequence_spec import SequenceSpec
from batching.steps.sequences import SequenceState
from batching.steps.step_plan import Slice, StartedSequence
from scripts.microbench.timing import QUICK, Pace, Result, Timing, compare

# Sizes of the bundled model.
_VOCAB_SIZE: Final = 49152
_NUM_QUERY_HEADS, _NUM_HEADS, _DIM = 9, 3, 64
_SCALE: Final = _DIM**-0.5

_SAMPLING: Final = {
    "greedy": GREEDY,
    "temperature": SamplingParams(temperature=0.8, seed=0),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9, seed=0),
    "top-k": SamplingParams(temperature=0.8, top_k=40, seed=0),
    "penalties": SamplingParams(temperature=0, presence_penalty=0.5, repetition_penalty=1.1),
}
# What penalties look back at.
_PROMPT, _OUTPUT = range(100), range(100, 300)


def run_sampler(pace: Pace) -> Result:
    """Time the choice of a token for each row of logits that are there."""
    timings: list[Timing] = []
    for num_rows in (1,) if pace == QUICK else (1, 16, 64):
        logits = 3 * mx.random.normal((num_rows, _VOCAB_SIZE))
        mx.eval(logits)
        title = f"{num_rows} x {_VOCAB_SIZE}"
        cases = {
            f"{title}, {name}{of}": _sampling(sampler, logits, params)
            for name, params in _SAMPLING.items()
            for of, sampler in _samplers().items()
        }
        timings += compare(cases, pace)
    return Result(timings)


def _samplers() -> dict[str, Sampler]:
    native = load_native("auto")
    if isinstance(native, NoNative):
        return {"": Sampler()}
    return {"": Sampler(), ", native": native_sampler(native.module)}


def _sampling(sampler: Sampler, logits: mx.array, params: SamplingParams) -> Callable[[], None]:
    spec = SequenceSpec(prompt=tuple(_PROMPT), max_tokens=len(_OUTPUT) + 1, sampling=params)
    started = [StartedSequence(row, spec, row, tuple(_OUTPUT)) for row in range(len(logits))]
    states = {each.sequence_id: SequenceState(each) for each in started}
    samples = [Sample(row, len(states[row].token_ids)) for row in states]
    return lambda: mx.eval(sampler.sample(logits, samples, states))


def run_attention(pace: Pace) -> Result:
    """Time the reading of a layer's pool, beside MLX's attention over contiguous arrays."""
    timings: list[Timing] = []
    for title, slices in islice(_steps(), 1 if pace == QUICK else None):
        cases = {
            f"{title}, paged": _paged(device_cache, slices),
            f"{title}, dense": _dense(slices),
        }
        timings += compare(cases, pace)
    return Result(timings)


def _steps() -> Iterator[tuple[str, list[Slice]]]:
    for num_rows, context in ((1, 128), (16, 128), (32, 128), (16, 512), (1, 2048)):
        yield f"{num_rows} x {context}", _slices(num_rows, context - 1, context)
    for start in (0, 1500):
        yield f"256 tokens at {start}", _slices(1, start, start + 256)
    yield "8 x 512, 480 of them shared", _slices(8, 511, 512, num_shared=480)


def _slices(num_rows: int, start: int, stop: int, num_shared: int = 0) -> list[Slice]:
    """Return the tokens `[start, stop)` of requests whose own blocks lie side by side."""
    num_shared //= BLOCK_SIZE
    num_own = -(-stop // BLOCK_SIZE) - num_shared
    slices: list[Slice] = []
    for row in range(num_rows):
        first = num_shared + row * num_own
        blocks = BlockTable([*range(num_shared), *range(first, first + num_own)]).value
        slices.append(Slice(row, start, (0,) * (stop - start), blocks))
    return slices


def _paged(
    make: Callable[[list[LayerShape], int, int], PagedKVCache], slices: list[Slice]
) -> Callable[[], None]:
    num_blocks = 1 + slices[-1].blocks.block_ids[-1]
    cache = make([LayerShape(_NUM_HEADS, _DIM, _DIM, mx.float32)], num_blocks, BLOCK_SIZE)
    (layer,) = cache.layers
    for s in slices:
        cache.begin([replace(s, start=0, token_ids=(0,) * s.stop)])
        layer.update_and_fetch(*(_random(s.stop, _NUM_HEADS, 1) for _ in range(2)))
        cache.flush()
        mx.eval(cache.arrays)
    cache.begin(slices)
    queries = _random(sum(map(len, slices)), _NUM_QUERY_HEADS, 1)
    return lambda: mx.eval(layer.attend(queries, scale=_SCALE, mask=None, sinks=None))


def _dense(slices: list[Slice]) -> Callable[[], None]:
    """Return the same with keys of its own for each row."""
    num_rows, num_queries, stop = len(slices), len(slices[0]), slices[0].stop
    queries = _random(num_rows, _NUM_QUERY_HEADS, num_queries)
    keys, values = (_random(num_rows, _NUM_HEADS, stop) for _ in range(2))
    mask = "causal" if num_queries > 1 else None
    attend = mx.fast.scaled_dot_product_attention
    return lambda: mx.eval(attend(queries, keys, values, scale=_SCALE, mask=mask))


def _random(num_rows: int, num_heads: int, num_tokens: int) -> mx.array:
    array = mx.random.normal((num_rows, num_heads, num_tokens, _DIM))
    mx.eval(array)
    return array
