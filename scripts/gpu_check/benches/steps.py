"""Decode steps and prefills of the engine, beside the least time that the machine needs for them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from time import perf_counter
from typing import Final, NamedTuple

import mlx.core as mx

from batching.backend.exceptions import one_line
from batching.backend.runner.mlx_runner import MLXRunner
from batching.batch_inference import BatchInferenceEngine
from batching.config import BLOCK_SIZE, SchedulerConfig
from batching.inputs.sequence_spec import SequenceSpec
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from scripts.gpu_check.benches.shape import (
    Cost,
    Point,
    bytes_for_pool,
    config,
    kv_bytes,
    load,
)
from scripts.gpu_check.benches.timed_runner import Launches, NoRunner, TimedRunner
from scripts.gpu_check.models import serve
from scripts.gpu_check.record import Options, Record, Skipped
from scripts.gpu_check.serving import prompt

_POINTS: Final = [
    Point(rows, context) for context in (128, 2048, 16384) for rows in (1, 8, 32, 128)
]
_QUICK_POINTS: Final = [Point(1, 40), Point(4, 40), Point(4, 400)]
_NUM_WARM_UP: Final = 4
_NUM_STEPS: Final = 32
# Of one point, of which slow ones get fewer steps.
_SECONDS: Final = 4.0
_MAX_TOKENS: Final = 2 * (_NUM_WARM_UP + _NUM_STEPS) + 8
_GIB: Final = 1 << 30
_IDS: Final = count()
# What the server says when it starts, as far as it depends on the device.
_LINES: Final = ("kernels", "kv cache", "memory")


class StepTimes(NamedTuple):
    """Seconds of a decode step, and of that without waiting for the device; bytes at the peak."""

    whole: float
    python: float
    peak: int


def run_4bit(options: Options, record: Record) -> None:
    run(options, record, 4)


def run_bf16(options: Options, record: Record) -> None:
    run(options, record, None)


def run(options: Options, record: Record, bits: int | None) -> None:
    """Measure all points that fit into memory and time."""
    record.table(
        *("requests x context", "queued steps", "tokens/s", "step, ms", "Python, ms"),
        *("launches a step", "peak, GiB", "share of the roof", "attention, of the bandwidth"),
    )
    if "bandwidth" not in options.roofs or "flops bfloat16" not in options.roofs:
        raise Skipped("the roofs are not measured: with --only, add --only roofs")
    points = _QUICK_POINTS if options.is_quick else _POINTS
    chosen = config(options)
    room = bytes_for_pool(chosen, bits) / kv_bytes(chosen)
    fitting = [point for point in points if _num_tokens(point) <= room]
    if not fitting:
        raise Skipped("needs more memory than this device has, for the weights and a few requests")
    _, model, cost = load(options, bits)
    served = serve(
        model,
        chosen,
        max_num_seqs=max(point.rows for point in fitting),
        max_num_batched_tokens=2048,
        num_blocks=max(map(_num_tokens, fitting)) // BLOCK_SIZE,
        enable_prefix_cache=False,
        max_draft_tokens=0,
    )
    for line in served.lines:
        if line.startswith(_LINES):
            record.note(f"`{line}`")
    for warning in served.warnings:
        record.note(warning)
    bench = StepBench(served.runner, served.limits, cost, options, record)
    bench.run(points, fitting)
    record.note(
        "Contexts are not read before: keys and values are zero, which changes no kernel. Python is the time of "
        "a step in which Python does not wait for the device. Launches are primitives that do more than change a "
        "shape. Prefills are rows `prefill TOKENS, chunks of N`. Attention reads what a context has more than the "
        "shortest one at that share of the memory's bandwidth, in the time that a step takes longer."
    )


def _num_tokens(point: Point) -> int:
    """Return the tokens of a pool that holds the requests to their ends, in whole blocks."""
    blocks = -(-(point.context + _MAX_TOKENS) // BLOCK_SIZE) + 1
    return point.rows * blocks * BLOCK_SIZE


class StepBench:
    def __init__(
        self,
        runner: MLXRunner,
        limits: SchedulerConfig,
        cost: Cost,
        options: Options,
        record: Record,
    ) -> None:
        self._runner, self._limits, self._cost = runner, limits, cost
        self._options, self._record = options, record
        # The first point of so many rows, and its seconds.
        self._shortest: dict[tuple[int, bool], tuple[Point, float]] = {}

    def run(self, points: Sequence[Point], fitting: Sequence[Point]) -> None:
        for num_tokens in (32,) if self._options.is_quick else (512, 4096):
            for chunk in (16,) if self._options.is_quick else (256, 2048):
                self.prefill(num_tokens, chunk)
        for point in points:
            if point in fitting:
                self.decode(point, is_queued=False)
                self.decode(point, is_queued=True)
            else:
                needed = self._cost.weight_bytes + _num_tokens(point) * self._cost.token_bytes
                self.skip(point, f"skipped: needs {needed / _GIB:.0f} GiB")

    def skip(self, point: Point, why: str) -> None:
        self._record.row(str(point), why, "", "", "", "", "", "", "")

    def decode(self, point: Point, *, is_queued: bool) -> None:
        name = "on" if is_queued else "off"
        if is_queued and not self._runner.takes_queued_steps:
            self.skip(point, "on: this pool takes none")
            return
        if self._record.seconds_left < _SECONDS:
            self.skip(point, f"{name}: skipped, no time left")
            return
        try:
            launches, times = self._decode(point, is_queued)
        except Exception as error:
            # The next points are smaller in one direction or the other.
            self._record.failures.append(f"{point}: {one_line(error)}")
            self.skip(point, f"{name}: failed")
            mx.clear_cache()
            return
        least = self._cost.decode_seconds(point, self._options.roofs)
        self._record.row(
            *(str(point), name, f"{point.rows / times.whole:.1f}", f"{1e3 * times.whole:.2f}"),
            *(f"{1e3 * times.python:.2f}", launches, f"{times.peak / _GIB:.2f}"),
            *(f"{100 * least / times.whole:.0f} %", self._attention(point, times.whole, is_queued)),
        )

    def _attention(self, point: Point, seconds: float, is_queued: bool) -> str:
        """Return the share of the bandwidth at which a longer context is read: the rest of a step is the same."""
        shortest, before = self._shortest.setdefault((point.rows, is_queued), (point, seconds))
        if shortest is point or seconds <= before:
            return ""
        num_bytes = point.rows * (point.context - shortest.context) * self._cost.token_bytes
        return f"{100 * num_bytes / (seconds - before) / self._options.roofs['bandwidth']:.0f} %"

    def prefill(self, num_tokens: int, chunk: int) -> None:
        """Read a prompt twice; the first time kernels are compiled."""
        limits = replace(self._limits, prefill_chunk=chunk, max_num_batched_tokens=max(chunk, 128))
        seconds = []
        mx.reset_peak_memory()
        for _ in range(2):
            engine = BatchInferenceEngine(
                ContinuousBatchingScheduler(limits), self._runner, max_stall=1e9
            )
            began = perf_counter()
            engine.add(
                BatchRequest(
                    next(_IDS), SequenceSpec(prompt=tuple(prompt(1, num_tokens, 100)), max_tokens=1)
                )
            )
            while engine.has_work:
                engine.step()
            seconds.append(perf_counter() - began)
        least = self._cost.prefill_seconds(num_tokens, self._options.roofs)
        peak = mx.get_peak_memory() / _GIB
        self._record.row(
            *(f"prefill {num_tokens}, chunks of {chunk}", "", f"{num_tokens / seconds[1]:.0f}"),
            *("", "", "", f"{peak:.2f}", f"{100 * least / seconds[1]:.0f} %", ""),
        )

    def _decode(self, point: Point, is_queued: bool) -> tuple[int, StepTimes]:
        timed = TimedRunner(self._runner)
        scheduler = ContinuousBatchingScheduler(self._limits)
        # The contexts are there at once, and no model has read them.
        engine = BatchInferenceEngine(scheduler, NoRunner(), max_stall=1e9)
        requests = [
            BatchRequest(
                next(_IDS),
                SequenceSpec(prompt=tuple(prompt(row, point.context, 100)), max_tokens=_MAX_TOKENS),
            )
            for row in range(point.rows)
        ]
        engine.add(*requests)
        while not all(request.num_output_tokens for request in requests):
            engine.step()
        assert not any(request.num_preemptions for request in requests), "the pool holds all"
        # Its parts, which the engine keeps to itself.
        engine._runner = timed
        with Launches() as launches:
            engine.step()
        engine._pipeline = timed if is_queued else None
        for _ in range(_NUM_WARM_UP):
            engine.step()
        mx.reset_peak_memory()
        times = self._steps(engine, timed)
        for request in requests:
            engine.abort(request.request_id)
        engine.drain()
        return launches.count, times

    def _steps(self, engine: BatchInferenceEngine, timed: TimedRunner) -> StepTimes:
        timed.waited = 0.0
        began = perf_counter()
        num_steps = 0
        limit = min(_SECONDS, self._record.seconds_left)
        while num_steps < (4 if self._options.is_quick else _NUM_STEPS):
            engine.step()
            num_steps += 1
            if perf_counter() - began > limit:
                break
        whole = perf_counter() - began
        python = max(0.0, whole - timed.waited)
        return StepTimes(whole / num_steps, python / num_steps, mx.get_peak_memory())
