"""What a step would take if nothing but its matrix products had to be computed."""

from dataclasses import replace
from functools import partial
from typing import Final

import mlx.core as mx
import mlx.nn as nn

from batching.backend.loader import load_model
from scripts.microbench.timing import QUICK, Pace, Result, Timing, compare

_NUM_ROWS: Final = (1, 2, 4, 8, 16, 32, 72, 256)


def run_products(model: str, pace: Pace) -> Result:
    """Time all linear layers and the head in float32, one after the other as in a step.

    Raises:
        ModelLoadError: the model cannot be found or read.
    """
    loaded = load_model(model, dtype=mx.float32).model
    layers = [module for module in loaded.modules() if isinstance(module, nn.Linear)]
    embeddings = [module for module in loaded.modules() if isinstance(module, nn.Embedding)]
    # Without a head of its own, a model has the embedding for one.
    heads = [] if any("lm_head" in module for module in loaded.modules()) else embeddings
    num_weights = sum(module.weight.size for module in layers + heads)
    timings: list[Timing] = []
    for num_rows in _NUM_ROWS[:1] if pace == QUICK else _NUM_ROWS:
        title = f"{num_rows} rows"
        multiply = partial(_multiply, layers, heads, num_rows)
        timings += [
            replace(timing, note=_rates(timing.seconds, num_rows, num_weights))
            for timing in compare({title: multiply}, pace)
        ]
    return Result(timings)


def _multiply(layers: list[nn.Linear], heads: list[nn.Embedding], num_rows: int) -> None:
    rows = {
        size: mx.ones((num_rows, 1, size))
        for size in {module.weight.shape[1] for module in [*layers, *heads]}
    }
    mx.eval(list(rows.values()))
    # One evaluation for all: a step has more, which cost what a product does not.
    products = [layer(rows[layer.weight.shape[1]]) for layer in layers]
    mx.eval(products, [head.as_linear(rows[head.weight.shape[1]]) for head in heads])


def _rates(seconds: float, num_rows: int, num_weights: int) -> str:
    gigabytes = num_weights * mx.float32.size / seconds / 1e9
    gigaflops = 2 * num_rows * num_weights / seconds / 1e9
    return f"{gigabytes:.0f} GB/s, {gigaflops:.0f} GFLOP/s"
