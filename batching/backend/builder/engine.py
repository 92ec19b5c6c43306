"""Builds an engine in the thread that will own it: platform, model, self-check, KV pool."""

from batching.backend.builder.opening import OpenModel, open_model
from batching.backend.builder.platforms import choose_platform
from batching.backend.builder.sizing import sizes_of
from batching.backend.builder.startup_lines import startup_lines
from batching.backend.pooling.head import PoolingHead
from batching.backend.pooling.uses import embeddings_of, reranker_of
from batching.backend.runner.executor import Executor
from batching.backend.runner.mlx_runner import MLXRunner
from batching.batch_inference import BatchInferenceEngine
from batching.block_manager import BlockTable
from batching.config import EngineConfig, SchedulerConfig
from batching.engine.loaded_engine import LoadedEngine
from batching.inputs.sequence_spec import SequenceSpec
from batching.model_info import ModelInfo, SamplingDefaults
from batching.pooling import Embeddings, NoEmbeddings
from batching.scheduler import ContinuousBatchingScheduler
from batching.steps.step_plan import Slice, StartedSequence, StepPlan


def build_engine(config: EngineConfig) -> LoadedEngine:
    """Load a model and build the engine that serves it; call it in the engine's thread.

    If the model cannot run on the native kernels, it is loaded again without them, unless they are
    required.

    Raises:
        ModelLoadError: the model cannot be found, read or run, or does not fit in memory.
    """
    model = open_model(config, choose_platform(config))
    sizes = sizes_of(config, model)
    embeddings, head = embeddings_of(config, model.loaded.description, model.hidden_size)
    executor = _executor(model, sizes.limits, head)
    engine = BatchInferenceEngine(
        ContinuousBatchingScheduler(sizes.limits),
        executor,
        max_stall=config.max_stall_ms / 1000,
        min_chunk=model.platform.min_chunk,
        pipeline=executor if config.async_scheduling and executor.takes_queued_steps else None,
    )
    info = _info(config, model, sizes.limits, embeddings)
    lines = startup_lines(config.model_id, model, sizes, embeddings)
    return LoadedEngine(engine, info, lines, executor.close)


def _executor(model: OpenModel, limits: SchedulerConfig, head: PoolingHead) -> Executor:
    checked = model.checked
    cache = checked.cache(
        limits.num_blocks, limits.block_size, num_window_blocks=limits.num_window_blocks
    )
    cache.reset()
    runner = MLXRunner(
        model.loaded.model,
        model.loaded.vocab_size,
        checked.selection,
        cache,
        model.platform.sampler(),
        head,
        checked.graphs(cache),
        model.platform.lending(),
    )
    if model.platform.compiles_kernels:
        _compile_kernels(runner)
    return Executor(model.platform, runner, model.changes)


def _compile_kernels(runner: MLXRunner) -> None:
    """Run a step: those of the check were for blocks of another size."""
    block = BlockTable([0]).value
    started = StartedSequence(0, SequenceSpec(prompt=(0,), max_tokens=1), seed=0)
    read = Slice(0, 0, (0,), block, block, state_slot=0, num_samples=1)
    runner.run(StepPlan((read,), started=(started,)))
    runner.reset()


def _info(
    config: EngineConfig,
    model: OpenModel,
    limits: SchedulerConfig,
    embeddings: Embeddings | NoEmbeddings,
) -> ModelInfo:
    loaded = model.loaded
    has_defaults = config.generation_config == "auto"
    return ModelInfo(
        model_id=config.model_id,
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        vocab_size=loaded.vocab_size,
        max_model_len=limits.max_request_tokens,
        sampling_defaults=loaded.sampling_defaults if has_defaults else SamplingDefaults(),
        has_jinja_template=loaded.has_jinja_template,
        embeddings=embeddings,
        reranker=reranker_of(config, loaded.description, loaded.tokenizer, loaded.vocab_size),
    )
