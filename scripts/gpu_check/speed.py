"""Tokens a second of the engine, beside those of mlx-lm's own generators on the same model."""

from collections.abc import Callable
from itertools import count
from time import perf_counter
from typing import Final, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, generate_step

from batching.backend.exceptions import one_line
from batching.backend.memory.device import device_memory
from batching.batch_inference import BatchInferenceEngine
from batching.config import BLOCK_SIZE
from batching.inputs.sequence_spec import SequenceSpec
from batching.request import BatchRequest
from scripts.gpu_check.models import large_model, serve
from scripts.gpu_check.record import Options, Record, Skipped
from scripts.gpu_check.serving import prompt
from scripts.make_model.shapes import SHAPES
from scripts.make_model.tiny_configs import COMMON, Config

_TINY: Final = {**COMMON, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True}
_GIB: Final = 1 << 30
# Of the device's memory; the rest is for what steps need, and for the system.
_SHARE: Final = 0.75
_NUM_STEPS: Final = 64
# While the prompts of others are read, the first requests have written as much.
_MAX_TOKENS: Final = 4 * _NUM_STEPS
_IDS: Final = count()


class Point(NamedTuple):
    """Requests, and the tokens of the prompt of each."""

    rows: int
    context: int

    @property
    def num_tokens(self) -> int:
        """Return the tokens of a pool that holds the requests to their ends, in whole blocks."""
        return self.rows * -(-(self.context + _MAX_TOKENS) // BLOCK_SIZE) * BLOCK_SIZE


class Rates(NamedTuple):
    """Tokens a second: of the prompts, and of the steps in which all requests decode."""

    prompt: float
    output: float


Measure = Callable[[Point], Rates]
_POINTS: Final = [Point(1, 128), Point(1, 8192), *(Point(n, 2048) for n in (1, 8, 32, 128))]
_QUICK_POINTS: Final = [Point(1, 20), Point(4, 20)]


def run_4bit(options: Options, record: Record) -> None:
    _run(options, record, 4)


def run_bf16(options: Options, record: Record) -> None:
    _run(options, record, None)


def _run(options: Options, record: Record, bits: int | None) -> None:
    """Measure the points that fit into memory and time; mlx-lm first, while the model is its own."""
    record.table("server", "requests x context", "prompt tokens/s", "tokens/s", "peak, GiB")
    config: Config = _TINY if options.is_quick else SHAPES["qwen3-4b"].full_config
    if (needed := _weight_bytes(config, bits)) > (room := _SHARE * device_memory()):
        raise Skipped(f"needs {needed / _GIB:.1f} GiB for the weights alone")
    points = [
        point
        for point in (_QUICK_POINTS if options.is_quick else _POINTS)
        # mlx-lm keeps keys and values twice while a batch grows.
        if needed + 2 * point.num_tokens * _kv_bytes(config) <= room
    ]
    if not points:
        raise Skipped("needs more memory than this device has, for the weights and a request")
    model = large_model(config, bits)
    _measure_all(record, "mlx-lm", points, lambda point: _of_mlx_lm(model, point))
    served = serve(
        model,
        config,
        max_num_seqs=max(point.rows for point in points),
        max_num_batched_tokens=2048,
        num_blocks=max(point.num_tokens for point in points) // BLOCK_SIZE,
        enable_prefix_cache=False,
        max_draft_tokens=0,
    )
    for line in (*served.lines, *served.warnings):
        record.note(f"`{line}`")
    _measure_all(record, "this one", points, lambda point: _of_engine(served.engine, point))
    record.note(
        "Random weights of the shape of Qwen3-4B. `generate_step` of mlx-lm for one request and `BatchGenerator` "
        "for several, in-process, as the engine here."
    )


def _measure_all(record: Record, name: str, points: list[Point], measure: Measure) -> None:
    """Measure each point once its kernels are compiled, for as long as there is time."""
    slowest = 0.0
    for point in points:
        cells = (name, f"{point.rows} x {point.context}")
        if record.seconds_left < 5 + point.rows * point.context * slowest:
            record.row(*cells, "skipped, no time left", "", "")
            continue
        try:
            measure(Point(point.rows, min(point.context, 64)))
            mx.reset_peak_memory()
            rates = measure(point)
        except Exception as error:
            record.failures.append(f"{name}, {cells[1]}: {one_line(error)}")
            record.row(*cells, "failed", "", "")
            mx.clear_cache()
            continue
        slowest = max(slowest, 1 / rates.prompt)
        peak = mx.get_peak_memory() / _GIB
        record.row(*cells, f"{rates.prompt:.0f}", f"{rates.output:.1f}", f"{peak:.2f}")


def _of_engine(engine: BatchInferenceEngine, point: Point) -> Rates:
    """Read all prompts, and decode some steps with all of them."""
    requests = [
        BatchRequest(
            next(_IDS),
            SequenceSpec(prompt=tuple(prompt(row, point.context, 100)), max_tokens=_MAX_TOKENS),
        )
        for row in range(point.rows)
    ]
    began = perf_counter()
    engine.add(*requests)
    while not all(request.num_output_tokens for request in requests):
        engine.step()
    started, before = perf_counter(), _num_output_tokens(requests)
    for _ in range(_NUM_STEPS):
        engine.step()
    ended, num_tokens = perf_counter(), _num_output_tokens(requests) - before
    for request in requests:
        engine.abort(request.request_id)
    engine.drain()
    assert not any(request.num_preemptions for request in requests), "the pool holds all"
    return Rates(point.rows * point.context / (started - began), num_tokens / (ended - started))


def _num_output_tokens(requests: list[BatchRequest]) -> int:
    return sum(request.num_output_tokens for request in requests)


def _of_mlx_lm(model: nn.Module, point: Point) -> Rates:
    seconds, num_tokens, ended = (_one if point.rows == 1 else _batch)(model, point)
    return Rates(point.rows * point.context / seconds, num_tokens / ended)


def _one(model: nn.Module, point: Point) -> tuple[float, int, float]:
    """Return the seconds of the prompt, and the tokens after it with their seconds."""
    began, first = perf_counter(), 0.0
    tokens = mx.array(prompt(0, point.context, 100))
    for _ in generate_step(tokens, model, max_tokens=_NUM_STEPS):
        first = first or perf_counter()
    return first - began, _NUM_STEPS - 1, perf_counter() - first


def _batch(model: nn.Module, point: Point) -> tuple[float, int, float]:
    """Return the same of a batch, from when all of it decodes."""
    generator = BatchGenerator(model, max_tokens=_MAX_TOKENS, completion_batch_size=point.rows)
    try:
        began = perf_counter()
        generator.insert([prompt(row, point.context, 100) for row in range(point.rows)])
        while len(generator.next_generated()) < point.rows:
            pass
        started = perf_counter()
        for _ in range(_NUM_STEPS):
            generator.next_generated()
        return started - began, point.rows * _NUM_STEPS, perf_counter() - started
    finally:
        generator.close()


def _kv_bytes(config: Config) -> int:
    """Return the bytes of a token's keys and values in bfloat16."""
    heads = config["num_key_value_heads"] * config["head_dim"]
    return int(2 * config["num_hidden_layers"] * heads * mx.bfloat16.size)


def _weight_bytes(config: Config, bits: int | None) -> int:
    width, head_dim = config["hidden_size"], config["head_dim"]
    heads = 2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    layer = width * head_dim * heads + 3 * width * config["intermediate_size"]
    num_weights = config["num_hidden_layers"] * layer + config["vocab_size"] * width
    # Groups of 64 have half a bit of scales each.
    return int(num_weights * (bits + 0.5 if bits else 16) / 8)
