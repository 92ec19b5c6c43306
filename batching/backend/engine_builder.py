"""Builds an engine in the thread that will own it: device, model, self-check, KV pool."""

import gc
import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import mlx.core as mx

from batching.backend import BLAS, precision
from batching.backend.devices import Gpu, select_device
from batching.backend.exceptions import forget_locals, one_line
from batching.backend.hooks.rows import hidden_size_of
from batching.backend.loader import LoadedModel, load_model
from batching.backend.memory.device import MIB, device_memory, free_buffers, memory_in_use
from batching.backend.memory.limits import GpuMemory
from batching.backend.memory.pool_size import BlockBytes, PoolSize, least_window_blocks, pool_size
from batching.backend.memory.state_size import state_size
from batching.backend.mlx_runner import MLXRunner
from batching.backend.packed_model import CannotUseFile, PackedModel
from batching.backend.paged.layout import CacheLayout
from batching.backend.platforms.cpu.native_loader import Native, NoNative, load_native
from batching.backend.platforms.gpu.pool_kernels import NoKernels, PoolKernels
from batching.backend.platforms.gpu.source_kernels import load_kernels, required
from batching.backend.pooling.uses import embeddings_of, may_embed, reranker_of
from batching.backend.processor.blas import NoBlas
from batching.backend.processor.core_lending import NO_LENDING, CoreLending
from batching.backend.self_check.check import check_model
from batching.backend.self_check.verdict import CheckedModel, Way
from batching.backend.weights.storage import dtype_name
from batching.batch_inference import BatchInferenceEngine
from batching.block_manager import BlockTable
from batching.config import UNKNOWN_CONTEXT, EngineConfig, SchedulerConfig
from batching.engine.loaded_engine import LoadedEngine
from batching.errors import ModelLoadError, UnsupportedKVDType
from batching.inputs.sequence_spec import SequenceSpec
from batching.model_info import ModelInfo, SamplingDefaults
from batching.pooling import Embeddings, NoEmbeddings
from batching.scheduler import ContinuousBatchingScheduler
from batching.scheduling.stall_budget import MIN_CHUNK
from batching.steps.step_plan import Slice, StartedSequence, StepPlan

logger = logging.getLogger(__name__)

# In place of MIN_CHUNK: a matrix unit multiplies 32 rows at a time, and 32 tokens and the streams' own rows would
# take it as long as 64 rows.
_MIN_CHUNK_OF_UNIT: Final = 48
# A copy of a block takes a CPU about as long as a token or two of a prompt.
_MIN_COPIED_TOKENS: Final = 4
# How a model is served for which a faster way was tried.
_SLOWER: Final = {
    Way.PIECES: "its attention reads keys and values that are gathered",
    Way.ONE_BY_ONE: "its attention runs for one request at a time",
    Way.WHOLE: "it runs for one request at a time",
    Way.OWN: "it runs for one request at a time, on caches of its own",
}


@dataclass(frozen=True)
class _Backend:
    """A runner with the limits and the choices that belong to it.

    config: the configuration with the changes that this model needed.
    limits: the scheduler's limits within which the runner is correct.
    pool_line, packed_line: lines of the start-up banner.
    scales_inputs: as of PackedModel.
    kernels: the kernels of a GPU's pool, or why there are none.
    """

    config: EngineConfig
    runner: MLXRunner
    limits: SchedulerConfig
    pool_line: str
    embeddings: Embeddings | NoEmbeddings
    kernels: PoolKernels | NoKernels
    packed_line: str = ""
    scales_inputs: bool = False


class _CannotRun(ModelLoadError):
    """The model was loaded but its first forward pass failed."""


class _IsNotInvariant(Exception):
    """The last bits of the logits depend on the rest of the batch, and rounding would amplify that."""


def build_engine(config: EngineConfig) -> LoadedEngine:
    """Load a model and build the engine that serves it; call it in the engine's thread.

    If the model cannot run on the native kernels, it is loaded again without them, unless they are
    required.

    Raises:
        ModelLoadError: the model cannot be found, read or run, or does not fit in memory.
    """
    gpu = select_device(config.device)
    memory = GpuMemory(gpu, config.mlx_cache_mib, config.wired_limit_mib) if gpu else None
    if memory:
        memory.prepare()
    kernels = load_kernels(config.gpu_kernels, gpu)
    if isinstance(BLAS, NoBlas) and BLAS.is_slow and mx.default_device() == mx.cpu:
        logger.warning("the model will be very slow: %s", BLAS)
    native = load_native(config.native, config.cpu_threads)
    try:
        loaded, backend = _load(config, native, gpu, kernels)
    except _CannotRun as error:
        if isinstance(native, NoNative) or config.native == "require":
            raise
        # It may reach into modules that the kernels have replaced.
        logger.warning("without the native kernels: with them, %s", error)
        # The model that failed: there may be no room for another beside it.
        forget_locals(error)
        native = NoNative("the model does not run on them")
        loaded, backend = _load(config, native, gpu, kernels)
    config = backend.config
    scheduler = ContinuousBatchingScheduler(backend.limits)
    runner = backend.runner
    engine = BatchInferenceEngine(
        scheduler,
        runner,
        max_stall=config.max_stall_ms / 1000,
        min_chunk=_MIN_CHUNK_OF_UNIT if precision.uses_bfloat16(config, native) else MIN_CHUNK,
        pipeline=runner if config.async_scheduling and runner.takes_queued_steps else None,
    )
    model = ModelInfo(
        model_id=config.model_id,
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        vocab_size=loaded.vocab_size,
        max_model_len=backend.limits.max_request_tokens,
        sampling_defaults=(
            loaded.sampling_defaults if config.generation_config == "auto" else SamplingDefaults()
        ),
        has_jinja_template=loaded.has_jinja_template,
        embeddings=backend.embeddings,
        reranker=reranker_of(config, loaded.description, loaded.tokenizer, loaded.vocab_size),
    )
    lines = _startup_lines(config, loaded, backend, native, memory, memory.wire() if memory else 0)
    return LoadedEngine(engine, model, lines, partial(_release, native))


def _release(native: Native | NoNative) -> None:
    """Give the memory of an engine that is gone back to the system."""
    free_buffers()
    if isinstance(native, Native):
        native.module.release_freed()


def _load(
    config: EngineConfig,
    native: Native | NoNative,
    gpu: Gpu | None,
    kernels: PoolKernels | NoKernels,
) -> tuple[LoadedModel, _Backend]:
    try:
        return _load_as(config, native, gpu, kernels)
    except _IsNotInvariant as error:
        logger.warning(
            "%s is computed as with MLX_SERVER_CPU_PRECISION=exact: its attention is its own code, whose "
            "last bits depend on how a prompt is cut and on who else is in a step",
            config.model_id,
        )
        # There may be no room for the model twice.
        forget_locals(error)
        gc.collect()
        return _load_as(replace(config, cpu_precision="exact"), native, gpu, kernels)


def _load_as(
    config: EngineConfig,
    native: Native | NoNative,
    gpu: Gpu | None,
    kernels: PoolKernels | NoKernels,
) -> tuple[LoadedModel, _Backend]:
    if (
        config.kv_cache_dtype == "int8"
        and isinstance(native, NoNative)
        and isinstance(kernels, NoKernels)
    ):
        raise UnsupportedKVDType(
            "int8", *(("GPU", str(kernels)) if gpu else ("native", str(native)))
        )
    dtype = precision.weights_dtype(config, native)
    loaded = load_model(
        config.model,
        dtype=dtype,
        trust_remote_code=config.trust_remote_code,
        chat_template=config.chat_template,
        has_kernels=isinstance(native, Native),
    )
    if loaded.max_model_len is None and config.max_model_len is None:
        logger.warning(
            "%s declares no context length: %d tokens are served, MLX_SERVER_MAX_MODEL_LEN sets another",
            config.model_id,
            UNKNOWN_CONTEXT,
        )
    # Before the kernels take its parts; with them it cannot be called without their caches.
    size = hidden_size_of(loaded.model) if may_embed(config, loaded.description) else None
    packed: PackedModel | None = None
    packed_line = ""
    try:
        if isinstance(native, Native):
            packed = PackedModel(
                config,
                native,
                loaded,
                input_bits=precision.input_bits(config, native),
                further_rounding=precision.further_rounding(config, native),
                dtype=dtype,
            )
            loaded, packed_line = packed.on_kernels()
        backend = _backend(config, loaded, native, gpu, kernels, packed, size)
        return loaded, replace(
            backend,
            packed_line=packed_line,
            scales_inputs=packed is not None and packed.scales_inputs,
        )
    except CannotUseFile:
        # It is gone now, if it can be deleted.
        return _load_as(replace(config, weights_cache_gib=0), native, gpu, kernels)
    except (ModelLoadError, _IsNotInvariant):
        raise
    except Exception as error:
        raise _CannotRun(f"cannot run {config.model}: {one_line(error)}") from error


def _backend(
    config: EngineConfig,
    loaded: LoadedModel,
    native: Native | NoNative,
    gpu: Gpu | None,
    kernels: PoolKernels | NoKernels,
    packed: PackedModel | None,
    hidden_size: int | None,
) -> _Backend:
    kv_dtype = precision.kv_dtype(config, native)
    known = packed.verdict(kv_dtype) if packed else None
    checked = check_model(
        loaded.model,
        loaded.vocab_size,
        native if isinstance(native, Native) else None,
        kv_dtype,
        known,
        gpu=gpu,
        kernels=kernels,
        max_model_len=config.model_context(loaded.max_model_len),
    )
    if packed and known is None:
        packed.keep_verdict(kv_dtype, checked.verdict)
    if packed and config.cpu_precision == "auto" and not checked.is_invariant:
        packed.drop()
        raise _IsNotInvariant
    if packed:
        # Not before: the check would take what that loses for a fault.
        packed.round_further()
    if checked.reason:
        logger.warning("%s: %s, since %s", config.model_id, _SLOWER[checked.way], checked.reason)
    required(config.gpu_kernels, checked.kernels)
    # Where the kernels are not right, layers that they would have kept so are as the model makes them.
    if config.kv_cache_dtype == "int8" and checked.layout.with_dtype(mx.int8) != checked.layout:
        raise UnsupportedKVDType("int8", "GPU", str(checked.kernels))
    if gpu and config.gpu_kernels != "off" and isinstance(checked.kernels, NoKernels):
        logger.warning("%s: the GPU kernels are off: %s", config.model_id, checked.kernels.reason)
    if not isinstance(checked.kernels, NoKernels) and not checked.keeps_graphs:
        logger.warning(
            "%s: the graph of each decode step is built each time: kept ones are not right",
            config.model_id,
        )
    if config.kv_cache_dtype != "auto" and kv_dtype not in _dtypes(checked.layout):
        logger.warning(
            "kv_cache_dtype: %s reads its keys, values or states itself, and keeps none in %s",
            config.model_id,
            config.kv_cache_dtype,
        )
    if not checked.selection.is_hooked:
        hidden_size = None
    return _paged(config, loaded, checked, hidden_size, _lending(native))


def _paged(
    config: EngineConfig,
    loaded: LoadedModel,
    checked: CheckedModel,
    hidden_size: int | None,
    lending: CoreLending,
) -> _Backend:
    layout = checked.layout
    model_context = config.model_context(loaded.max_model_len)
    context = min(config.max_model_len or model_context, model_context)
    states = state_size(config, layout.state_bytes(context), has_state=layout.has_state)
    limits = replace(
        config.scheduler_config(1, model_context),
        max_num_seqs=states.num_running,
        num_checkpoints=states.num_checkpoints,
        # On a GPU some tokens more take hardly any time, and copies wait for the step in flight.
        min_copied_tokens=_MIN_COPIED_TOKENS if mx.default_device() == mx.cpu else None,
    )
    if layout.has_own:
        # A draft that is wrong would cost a copy of all that the request keeps.
        limits = replace(limits, max_draft_tokens=0)
    block = _block_bytes(layout, limits)
    size = pool_size(config, block, model_context, reserved=states.num_bytes)
    limits = replace(
        limits,
        num_blocks=size.num_blocks,
        window=layout.window if size.num_window_blocks else None,
        num_window_blocks=size.num_window_blocks,
    )
    cache = checked.cache(
        size.num_blocks, config.block_size, num_window_blocks=size.num_window_blocks
    )
    cache.reset()
    embeddings, head = embeddings_of(config, loaded.description, hidden_size)
    runner = MLXRunner(
        loaded.model,
        loaded.vocab_size,
        checked.selection,
        cache,
        checked.sampler(),
        head,
        checked.graphs(cache),
        lending,
    )
    if not isinstance(checked.kernels, NoKernels):
        _compile_kernels(runner)
    return _Backend(
        config,
        runner,
        limits,
        "; ".join(filter(None, [_pool_line(config, layout, size, block), states.note])),
        embeddings,
        checked.kernels,
    )


def _compile_kernels(runner: MLXRunner) -> None:
    """Run a step: those of the check were for blocks of another size."""
    block = BlockTable([0]).value
    started = StartedSequence(0, SequenceSpec(prompt=(0,), max_tokens=1), seed=0)
    read = Slice(0, 0, (0,), block, block, state_slot=0, num_samples=1)
    runner.run(StepPlan((read,), started=(started,)))
    runner.reset()


def _lending(native: Native | NoNative) -> CoreLending:
    if isinstance(native, Native) and native.lends_core:
        return CoreLending(native.module)
    return NO_LENDING


def _block_bytes(layout: CacheLayout, limits: SchedulerConfig) -> BlockBytes:
    total, windowed = layout.bytes_per_token, layout.window_bytes_per_token
    least_windowed = 0 if layout.window is None else least_window_blocks(limits, layout.window)
    return BlockBytes(limits.block_size * total, limits.block_size * windowed, least_windowed)


def _dtypes(layout: CacheLayout) -> list[mx.Dtype]:
    """Return the types of keys and values, that of the first layer first."""
    return list(dict.fromkeys(shape.dtype for shape in layout.shapes))


def _pool_line(config: EngineConfig, layout: CacheLayout, size: PoolSize, block: BlockBytes) -> str:
    prefix_cache = f"prefix cache {'on' if config.enable_prefix_cache else 'off'}{size.note}"
    if not layout.shapes:
        return f"no keys and values, {prefix_cache}"
    in_windows = size.num_window_blocks
    windows = f", {in_windows} in windows of {layout.window}" if in_windows else ""
    num_mib = block.of(size.num_blocks, in_windows) // MIB
    dtype = " and ".join(map(dtype_name, _dtypes(layout)))
    return (
        f"{size.num_blocks} blocks of {config.block_size} tokens{windows} ({num_mib} MiB, {dtype}), "
        f"{prefix_cache}"
    )


def _precision_note(config: EngineConfig, native: Native | NoNative, *, scales_inputs: bool) -> str:
    if config.cpu_precision == "exact" or isinstance(native, NoNative):
        return ""
    if precision.uses_bfloat16(config, native):
        return "; auto: weights and activations are multiplied in bfloat16"
    bits = precision.input_bits(config, native)
    if bits == 32:
        return "; auto: this processor multiplies no integers, activations are not rounded"
    line = f"; auto: quantized weights are multiplied with activations of {bits} bits"
    return f"{line}, 4-bit ones with 8 bits, scaled by channel" if scales_inputs else line


def _kernels_line(
    config: EngineConfig, native: Native | NoNative, memory: GpuMemory | None, backend: _Backend
) -> str:
    if memory is None:
        note = _precision_note(config, native, scales_inputs=backend.scales_inputs)
        return f"kernels   {native}{note}"
    return f"kernels   of the KV cache: {backend.kernels}"


def _embeddings_line(embeddings: Embeddings | NoEmbeddings) -> list[str]:
    if isinstance(embeddings, NoEmbeddings):
        return []
    return [f"vectors   of {embeddings.size} numbers, pooling: {embeddings.pooling}"]


def _device_line(memory: GpuMemory | None, weights: str) -> str:
    if memory is not None:
        return f"device    {memory.device_line()}, weights {weights}"
    return f"device    cpu, weights {weights}, BLAS: {BLAS}"


def _memory_line(memory: GpuMemory | None, wired: int) -> str:
    line = f"memory    {memory_in_use() // MIB} MiB in use"
    if memory is None:
        return line
    return f"{line} of {device_memory() // MIB} MiB; {memory.limits_line(wired)}"


def _startup_lines(
    config: EngineConfig,
    loaded: LoadedModel,
    backend: _Backend,
    native: Native | NoNative,
    memory: GpuMemory | None,
    wired: int,
) -> tuple[str, ...]:
    limits = backend.limits
    dtype = precision.weights_dtype(config, native)
    weights = "as stored" if dtype is None else dtype_name(dtype)
    return (
        f"model     {config.model_id} ({loaded.model_type}, {loaded.source})",
        _device_line(memory, weights),
        *([f"weights   {loaded.storage}"] if loaded.storage else []),
        _kernels_line(config, native, memory, backend),
        *([f"packed    {backend.packed_line}"] if backend.packed_line else []),
        f"context   {limits.max_request_tokens} tokens a request",
        f"kv cache  {backend.pool_line}",
        *_embeddings_line(backend.embeddings),
        f"batch     up to {limits.max_num_seqs} requests, {limits.max_num_batched_tokens} tokens a step",
        _memory_line(memory, wired),
    )
