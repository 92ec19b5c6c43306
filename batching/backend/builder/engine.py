"""Builds an engine in the thread that will own it: platform, model, self-check, KV pool."""

from dataclasses import replace
from functools import partial

from batching.backend.builder.adapters import OpenAdapters
from batching.backend.builder.encoder import build_encoder, encoder_directory
from batching.backend.builder.opening import OpenModel, open_model
from batching.backend.builder.platforms import choose_platform
from batching.backend.builder.startup_lines import startup_lines
from batching.backend.memory.device import MIB
from batching.backend.pooling.uses import reranker_of
from batching.backend.ranks.rank import ONLY_RANK, Rank
from batching.backend.runner.executor import Executor
from batching.backend.vision.opening import OpenVision
from batching.batch_inference import BatchInferenceEngine
from batching.block_store.store import BlockStore
from batching.config import EngineConfig, SchedulerConfig
from batching.engine.load_slices import ONE_SLICE, LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.engine.memory_use import MemoryUse
from batching.model_info.model import ModelInfo
from batching.model_info.sampling_defaults import SamplingDefaults
from batching.ranks.lockstep.steps import Lockstep
from batching.scheduler import ContinuousBatchingScheduler


def build_engine(
    config: EngineConfig, slices: LoadSlices = ONE_SLICE, rank: Rank = ONLY_RANK
) -> LoadedEngine:
    """Load a model and build the engine that serves it; call it in the MLX thread.

    If the model cannot run on the native kernels, it is loaded again without them, unless they are
    required.

    slices: is called between the parts of the load.
    rank: the first of those that serve the model; the others are in `run_member`.

    Raises:
        ModelLoadError: the model cannot be found, read or run, or does not fit in memory.
    """
    platform = choose_platform(config, is_divided=not rank.is_alone)
    if (path := encoder_directory(config, slices)) is not None:
        return build_encoder(config, path, platform, slices)
    model = open_model(config, platform, slices, rank)
    try:
        return _engine(config, model, rank)
    except BaseException:
        _close(model.executor, model.store)
        raise


def _engine(config: EngineConfig, model: OpenModel, rank: Rank) -> LoadedEngine:
    executor = model.executor
    # A token that is still being sampled could not be sent.
    is_async = config.async_scheduling and executor.takes_queued_steps and rank.is_alone
    engine = BatchInferenceEngine(
        ContinuousBatchingScheduler(_limits(config, model), model.store),
        executor,
        max_stall=config.max_stall_ms / 1000,
        min_chunk=model.platform.min_chunk,
        pipeline=executor if is_async else None,
    )
    if rank.leader is not None:
        executor.lead(Lockstep(rank.leader))
    memory_limits = model.platform.wire()
    lines = startup_lines(config.model_id, model, memory_limits, rank)
    sizes = model.sizes
    adapters = model.adapters
    of_slots = adapters.num_bytes if isinstance(adapters, OpenAdapters) else 0
    memory = MemoryUse(model.num_bytes, sizes.kv_cache, sizes.states, of_slots)
    close = partial(_close, executor, model.store)
    return LoadedEngine(engine, _info(config, model), lines, memory, close, model.store)


def _close(executor: Executor, store: BlockStore | None) -> None:
    executor.close()
    if store is not None:
        store.close()


def _limits(config: EngineConfig, model: OpenModel) -> SchedulerConfig:
    """Return the scheduler's limits, with those of images."""
    if not isinstance(model.vision, OpenVision):
        return model.sizes.limits
    max_rows = config.vision_cache_mib * MIB // model.vision.row_bytes
    return replace(
        model.sizes.limits, max_image_rows=max_rows, num_image_pieces=model.vision.num_pieces
    )


def _info(config: EngineConfig, model: OpenModel) -> ModelInfo:
    loaded, vision, adapters = model.loaded, model.vision, model.adapters
    has_defaults = config.generation_config == "auto"
    return ModelInfo(
        model_id=config.model_id,
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        vocab_size=loaded.vocab_size,
        max_model_len=model.sizes.limits.max_request_tokens,
        sampling_defaults=config.sampling_defaults.or_else(
            loaded.sampling_defaults if has_defaults else SamplingDefaults()
        ),
        has_jinja_template=loaded.has_jinja_template,
        embeddings=model.embeddings,
        reranker=reranker_of(config, loaded.description, loaded.tokenizer, loaded.vocab_size),
        vision=vision.model if isinstance(vision, OpenVision) else vision,
        mode=model.checked.mode,
        mode_reason=model.checked.reason,
        adapters=adapters.model.layers if isinstance(adapters, OpenAdapters) else adapters,
    )
