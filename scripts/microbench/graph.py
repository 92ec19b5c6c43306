"""What Python and MLX take to build the graph of a decode step on the pool of a GPU's kernels; nothing is computed.

Where there is no GPU, an operation of the same inputs and outputs stands for each kernel, and one for each norm and
rotation, which MLX makes of several on a CPU.
"""

import cProfile
import pstats
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import thread_time
from typing import Any, Final, TypeAlias
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3

from batching.backend.devices import Gpu, default_gpu
from batching.backend.execution_mode import CheckResult, ExecutionMode
from batching.backend.hooks.changes import Changes
from batching.backend.memory.limits import GpuMemory
from batching.backend.numerics import NOTHING_SET
from batching.backend.platforms.cpu.native_loader import Native, NoNative, load_native
from batching.backend.platforms.gpu.kernel_pool import KernelLayerCache
from batching.backend.platforms.gpu.kernels.sources import Target
from batching.backend.platforms.gpu.platform import GPUPlatform
from batching.backend.platforms.gpu.pool_kernels import PoolKernels
from batching.backend.platforms.gpu.source_kernels import SourceKernels, load_kernels
from batching.backend.platforms.gpu.step_graphs import COMPILE_AT
from batching.backend.runner.mlx_runner import MLXRunner
from batching.backend.self_check.check import check_model
from batching.block_manager import BlockTable
from batching.config import BLOCK_SIZE
from batching.errors import ModelLoadError
from batching.inputs.sequence_spec import SequenceSpec
from batching.steps.step_plan import Slice, StartedSequence, StepPlan
from scripts.microbench.timing import QUICK, Pace, Result, Timing

# Qwen3-4B's layers, and widths with which there is next to nothing to keep.
_NUM_LAYERS, _NUM_QUICK_LAYERS = 36, 4
_VOCAB_SIZE: Final = 256
_SIZES: Final[dict[str, Any]] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": _VOCAB_SIZE,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
_NUM_ROWS: Final = (1, 8, 32)
_CONTEXT: Final = 100
_NUM_BLOCKS: Final = max(_NUM_ROWS) * -(-_CONTEXT // BLOCK_SIZE)
_NUM_PROFILED: Final = 30
_NUM_WARM_UP: Final = COMPILE_AT + 1
# By file, line and name.
_Function: TypeAlias = tuple[str, int, str]
_MODEL, _KERNELS, _POOL, _REST = "the model's code", "calls of kernels", "pool and hooks", "others"


def run_graph(pace: Pace) -> Result:
    """Time steps of some rows, and profile those of the most.

    Raises:
        ModelLoadError: neither a GPU nor the native kernels, whose module has the operation that stands in.
    """
    rows = _NUM_ROWS[:1] if pace == QUICK else _NUM_ROWS
    num_layers = _NUM_QUICK_LAYERS if pace == QUICK else _NUM_LAYERS
    device = _device()
    benches = {
        keeps_graphs: GraphBench(num_layers, *device, keeps_graphs=keeps_graphs)
        for keeps_graphs in (False, True)
    }
    samples: dict[tuple[int, bool], list[float]] = {
        (num_rows, keeps_graphs): [] for num_rows in rows for keeps_graphs in benches
    }
    for _ in range(pace.num_rounds):
        for (num_rows, keeps_graphs), times in samples.items():
            # The first ones trace a graph that is kept, and find the caches as the steps before left them.
            seconds = [
                benches[keeps_graphs].seconds(num_rows)
                for _ in range(_NUM_WARM_UP + pace.num_samples)
            ]
            times += seconds[_NUM_WARM_UP:]
    timings = [
        Timing.of(f"{num_rows} rows{', kept' if keeps_graphs else ''}", times, rows=num_rows)
        for (num_rows, keeps_graphs), times in samples.items()
    ]
    notes = (f"{timing.seconds / num_layers * 1e6:.1f} µs a layer" for timing in timings)
    timings = [replace(timing, note=note) for timing, note in zip(timings, notes, strict=True)]
    return Result(timings, benches[False].shares(rows[-1]))


class GraphBench:
    """A model on the pool of kernels, and decode steps that are never evaluated."""

    def __init__(
        self,
        num_layers: int,
        gpu: Gpu,
        kernels: PoolKernels,
        stand_ins: Mapping[str, Callable[..., mx.array]],
        *,
        keeps_graphs: bool,
    ) -> None:
        self._stand_ins = stand_ins
        model = _model(num_layers)
        # As if a check had found it right: there is nothing that computes it.
        right = CheckResult(ExecutionMode.RAGGED, gathers_all=False)
        platform = GPUPlatform(gpu, GpuMemory(gpu, 0), NOTHING_SET, kernels)
        checked = check_model(model, _VOCAB_SIZE, platform, Changes(), known=right)
        self._cache = checked.cache(_NUM_BLOCKS, BLOCK_SIZE)
        self._cache.reset()
        self._runner = MLXRunner(
            model,
            _VOCAB_SIZE,
            checked.selection,
            self._cache,
            checked.platform.sampler(),
            graphs=checked.graphs(self._cache) if keeps_graphs else None,
        )
        self._plans = {num_rows: _decodes(num_rows) for num_rows in _NUM_ROWS}

    def seconds(self, num_rows: int) -> float:
        """Return the processor time of one step."""
        with self._unevaluated():
            began = thread_time()
            step = self._runner.submit(self._plans[num_rows])
            ended = thread_time()
            del step
        return ended - began

    def shares(self, num_rows: int) -> dict[str, float]:
        """Return whose functions the time of steps goes to, those of MLX they call included, in percent."""
        profile = cProfile.Profile(thread_time)
        for _ in range(_NUM_PROFILED):
            with self._unevaluated():
                step = profile.runcall(self._runner.submit, self._plans[num_rows])
                del step
        times = dict.fromkeys((_MODEL, _KERNELS, _POOL, _REST), 0.0)
        # Of each function: counts, its own time, that with what it calls, and the same by caller.
        stats: dict[_Function, tuple[Any, ...]] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
        for function, (_, _, own, _, callers) in stats.items():
            if (whose := _whose(function)) is not None:
                times[whose] += own
                continue
            for caller, (_, _, of_caller, _) in callers.items():
                times[_whose(caller) or _REST] += of_caller
        whole = sum(times.values())
        return {f"{name}, of {num_rows} rows": 100 * own / whole for name, own in times.items()}

    @contextmanager
    def _unevaluated(self) -> Iterator[None]:
        """Let a step be built and not computed; the next one begins where it began."""
        layers = [layer for layer in self._cache.layers if isinstance(layer, KernelLayerCache)]
        # What orders the kernels, which a layer keeps to itself.
        tokens = [layer._token for layer in layers]
        with (
            patch.object(mx, "async_eval", lambda *_: None),
            patch.dict(vars(mx.fast), self._stand_ins),
        ):
            yield
        for layer, token in zip(layers, tokens, strict=True):
            layer._token = token


def _model(num_layers: int) -> nn.Module:
    model = qwen3.Model(qwen3.ModelArgs.from_dict({**_SIZES, "num_hidden_layers": num_layers}))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=32, bits=4)
    mx.eval(model.parameters())
    return model


def _decodes(num_rows: int) -> StepPlan:
    blocks = iter(range(_NUM_BLOCKS))
    slices: list[Slice] = []
    for row in range(num_rows):
        table = BlockTable(next(blocks) for _ in range(-(-_CONTEXT // BLOCK_SIZE)))
        slices.append(Slice(row, _CONTEXT - 1, (1,), table.value, num_samples=1))
    spec = SequenceSpec(prompt=(1,) * _CONTEXT, max_tokens=9)
    started = tuple(StartedSequence(row, spec, seed=row) for row in range(num_rows))
    return StepPlan(tuple(slices), started=started)


def _whose(function: _Function) -> str | None:
    """Return whose a function is; None if its caller's, as Python's own are."""
    file, name = Path(function[0]), function[2]
    if "mlx_lm" in file.parts or "mlx" in file.parts or name == _StandIn.like_first.__name__:
        return _MODEL
    if file.name == "source_kernels.py" or file.parent.name == "kernels" or name == "kernel":
        return _KERNELS
    if file.parent.name in ("gpu", "paged", "hooks"):
        return _POOL
    return _REST if file.is_absolute() else None


def _device() -> tuple[Gpu, PoolKernels, Mapping[str, Callable[..., mx.array]]]:
    """Return the GPU and its kernels, or what stands for them, and for which of MLX's functions."""
    gpu = default_gpu()
    if gpu is not None:
        return gpu, load_kernels(gpu), {}
    native = load_native("auto")
    if isinstance(native, NoNative):
        raise ModelLoadError(f"neither a GPU nor native kernels: {native.reason}")
    stand_in = _StandIn(native)
    functions = dict.fromkeys(("rms_norm", "rope"), stand_in.like_first)
    return Gpu.METAL, SourceKernels(Target.METAL, lambda *_: stand_in.kernel), functions


class _StandIn:
    """Operations that are never evaluated."""

    def __init__(self, native: Native) -> None:
        self._make = native.module.host_kernel

    def kernel(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
    ) -> list[mx.array]:
        made: list[mx.array] = self._make(_compute, inputs, output_shapes, output_dtypes)
        return made

    def like_first(self, *inputs: Any, **options: Any) -> mx.array:
        """Stand for an operation whose output is like its first input."""
        arrays = [each for each in (*inputs, *options.values()) if isinstance(each, mx.array)]
        made: mx.array = self._make(_compute, arrays, [inputs[0].shape], [inputs[0].dtype])[0]
        return made


def _compute(*_: object) -> None:
    raise AssertionError("a step is built, and not evaluated")
