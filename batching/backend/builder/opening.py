"""Opens a model: on the platform that is chosen, or on those that follow where it is not right or does not run."""

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from batching.adapters.adapter import NO_ADAPTERS, NoAdapters
from batching.backend.adapters.survey import Survey, survey
from batching.backend.builder.adapters import AdaptedModel, OpenAdapters, open_adapters
from batching.backend.builder.block_store import open_store
from batching.backend.builder.sizing import Sizes, sizes_of
from batching.backend.exceptions import forget_locals, one_line
from batching.backend.execution_mode import CheckResult, ExecutionMode
from batching.backend.hooks.changes import Changes
from batching.backend.hooks.rows import hidden_size_of
from batching.backend.loader import LoadedModel, load_model
from batching.backend.platform import Instead, Platform, PreparedModel
from batching.backend.pooling.head import PoolingHead
from batching.backend.pooling.uses import embeddings_of, may_embed
from batching.backend.ranks.chunks import check_chunks
from batching.backend.ranks.rank import ONLY_RANK, Rank
from batching.backend.runner.executor import Executor, release
from batching.backend.runner.mlx_runner import MLXRunner
from batching.backend.runner.stored_blocks import StoredBlocks
from batching.backend.self_check.check import check_model
from batching.backend.self_check.checked_model import CheckedModel
from batching.backend.vision.opening import OpenVision, open_vision
from batching.backend.weights.storage import dtype_name
from batching.block_manager import BlockTable
from batching.block_store.store import BlockStore
from batching.config import UNKNOWN_CONTEXT, EngineConfig, SchedulerConfig
from batching.engine.load_slices import ONE_SLICE, LoadSlices
from batching.errors import ModelLoadError, RankLost
from batching.inputs.sequence_spec import SequenceSpec
from batching.model_info.vision import TEXT_ONLY, NoVision
from batching.pooling import Embeddings, NoEmbeddings
from batching.ranks.lockstep.consensus import smallest
from batching.steps.step_plan import Slice, StartedSequence, StepPlan

logger = logging.getLogger(__name__)

# How a model is served for which a faster mode was tried.
_SLOWER: Final = {
    ExecutionMode.PIECES: "its attention reads keys and values that are gathered",
    ExecutionMode.ONE_BY_ONE: "its attention runs for one request at a time",
    ExecutionMode.WHOLE: "it runs for one request at a time",
    ExecutionMode.OWN: "it runs for one request at a time, on caches of its own",
}


@dataclass(frozen=True)
class OpenModel:
    """A model that can run steps, with its pool.

    executor: owns the model, and is to be closed.
    store: of its blocks, and is to be closed, too; None keeps none.
    """

    prepared: PreparedModel
    executor: Executor
    platform: Platform
    checked: CheckResult
    sizes: Sizes
    embeddings: Embeddings | NoEmbeddings
    vision: OpenVision | NoVision
    adapters: OpenAdapters | NoAdapters
    store: BlockStore | None

    @property
    def loaded(self) -> LoadedModel:
        return self.prepared.loaded

    @property
    def num_bytes(self) -> int:
        """The bytes of all weights."""
        of_vision = self.vision.num_bytes if isinstance(self.vision, OpenVision) else 0
        return self.prepared.num_bytes + of_vision


def open_model(
    config: EngineConfig,
    platform: Platform,
    slices: LoadSlices = ONE_SLICE,
    rank: Rank = ONLY_RANK,
) -> OpenModel:
    """Open a model on a platform, or on one that the platform names instead.

    slices: is called between the parts of the load.
    rank: this process among others that open their parts of the model.

    Raises:
        ModelLoadError: the model cannot be found, read or run, or does not fit in memory.
    """
    rank.consensus.check_same("the numerics", _numerics(platform))
    while True:
        try:
            opened = _try(config, platform, slices, rank)
        except BaseException as error:
            forget_locals(error)
            release(platform)
            raise
        if isinstance(opened, OpenModel):
            return opened
        if opened.reason:
            logger.warning("%s", opened.reason)
        # There may be no room for another model beside the one that was loaded.
        release(platform)
        platform = opened.platform


def _numerics(platform: Platform) -> str:
    """Return what ranks must compute alike: what they add up has to be of one type, and the checks have to be the same."""
    weights, kv = (
        "auto" if dtype is None else dtype_name(dtype)
        for dtype in (platform.weights_dtype, platform.kv_dtype)
    )
    kernels = "kernels" if platform.compiles_kernels else "no kernels"
    return f"({platform.identity['platform']}, {kernels}, weights {weights}, keys and values {kv})"


def _try(
    config: EngineConfig, platform: Platform, slices: LoadSlices, rank: Rank
) -> OpenModel | Instead:
    """Load a model for a platform and open it there; leave nothing behind unless it is open."""
    load = partial(
        load_model,
        config.model,
        dtype=platform.weights_dtype,
        trust_remote_code=config.trust_remote_code,
        chat_template=config.chat_template,
        has_kernels=platform.packs_weights,
        divide=None if rank.is_alone else rank.divide,
        slices=slices,
    )
    loaded = rank.consensus.each(load)
    if loaded.max_model_len is None and config.max_model_len is None:
        logger.warning(
            "%s declares no context length: %d tokens are served, MLX_SERVER_MAX_MODEL_LEN sets another",
            config.model_id,
            UNKNOWN_CONTEXT,
        )
    changes = Changes()
    opened: OpenModel | Instead | None = None
    try:
        opened = _opened(config, platform, loaded, changes, slices, rank)
    except (ModelLoadError, RankLost):
        raise
    except Exception as error:
        # The code of a model can raise anything.
        forget_locals(error)
        reason = f"cannot run {config.model}: {one_line(error)}"
        opened = platform.fallback(reason)
        if opened is None:
            raise ModelLoadError(reason) from error
    finally:
        if not isinstance(opened, OpenModel):
            changes.undo()
    return opened


def _opened(
    config: EngineConfig,
    platform: Platform,
    loaded: LoadedModel,
    changes: Changes,
    slices: LoadSlices,
    rank: Rank,
) -> OpenModel | Instead:
    # Before the kernels take its parts; with them it cannot be called without their caches.
    hidden_size = hidden_size_of(loaded.model) if may_embed(config, loaded.description) else None
    found = survey(loaded.model) if config.max_adapters else Survey()
    prepared = platform.prepare(loaded, config.model_id, changes, slices)
    if isinstance(prepared, Instead):
        return prepared
    checked = _checked(config, platform, prepared, changes, slices, rank)
    if isinstance(checked, Instead):
        return checked
    loaded = prepared.loaded
    if not checked.selection.is_hooked:
        hidden_size = None
    vision, checked = _vision(config, loaded, checked, changes, slices, rank)
    adapters = _adapters(config, found, prepared, checked, changes)
    if not rank.is_alone:
        check_chunks(config, loaded, checked, rank.consensus, slices)
    sizes = _agreed(
        rank.consensus.each(partial(_sizes, config, prepared, checked, vision, adapters)), rank
    )
    embeddings, head = embeddings_of(config, loaded.description, hidden_size)
    runner = _runner(loaded, checked, sizes.limits, head, vision, adapters)
    store = open_store(config, prepared, checked, sizes, runner.cache, slices)
    if store is not None:
        runner.stored = StoredBlocks(runner.cache, store)
    executor = Executor(checked.platform, runner, changes)
    return OpenModel(
        prepared,
        executor,
        checked.platform,
        checked.result,
        sizes,
        embeddings,
        vision,
        adapters,
        store,
    )


def _checked(
    config: EngineConfig,
    platform: Platform,
    prepared: PreparedModel,
    changes: Changes,
    slices: LoadSlices,
    rank: Rank,
) -> CheckedModel | Instead:
    """Return the model as the self-check lets it run here, or where else it has to run."""
    loaded = prepared.loaded
    checked = check_model(
        loaded.model,
        loaded.vocab_size,
        platform,
        changes,
        known=prepared.known_result,
        max_model_len=config.model_context(loaded.max_model_len),
        consensus=rank.consensus,
        slices=slices,
    )
    instead = prepared.finish(checked.result, is_invariant=checked.is_invariant)
    if instead is not None:
        return instead
    _warn(config, checked)
    return checked


def _sizes(
    config: EngineConfig,
    prepared: PreparedModel,
    checked: CheckedModel,
    vision: OpenVision | NoVision,
    adapters: OpenAdapters | NoAdapters,
) -> Sizes:
    num_bytes, max_span = prepared.num_bytes, 0
    if isinstance(vision, OpenVision):
        num_bytes += vision.num_bytes
        max_span = vision.model.max_span
    of_slots = adapters.num_bytes if isinstance(adapters, OpenAdapters) else 0
    max_model_len = prepared.loaded.max_model_len
    return sizes_of(config, checked, max_model_len, num_bytes, max_span, of_slots)


def _agreed(sizes: Sizes, rank: Rank) -> Sizes:
    """Return the sizes for which all ranks have room."""
    limits = sizes.limits
    # Negative is None, on all ranks or on none.
    checkpoints = -1 if limits.num_checkpoints is None else limits.num_checkpoints
    least = rank.consensus.choose(
        [limits.num_blocks, limits.num_window_blocks, limits.max_num_seqs, checkpoints], smallest
    )
    num_blocks, num_window_blocks, max_num_seqs, checkpoints = least
    return replace(
        sizes,
        limits=replace(
            limits,
            num_blocks=num_blocks,
            num_window_blocks=num_window_blocks,
            max_num_seqs=max_num_seqs,
            num_checkpoints=None if checkpoints < 0 else checkpoints,
        ),
    )


def _adapters(
    config: EngineConfig,
    found: Survey,
    prepared: PreparedModel,
    checked: CheckedModel,
    changes: Changes,
) -> OpenAdapters | NoAdapters:
    if not config.max_adapters:
        return NO_ADAPTERS
    loaded = prepared.loaded
    packed = prepared.packed_linears(found.layers.keys())
    adapted = AdaptedModel(loaded.model, loaded.vocab_size, found, packed)
    return open_adapters(config, adapted, checked, changes)


def _vision(
    config: EngineConfig,
    loaded: LoadedModel,
    checked: CheckedModel,
    changes: Changes,
    slices: LoadSlices,
    rank: Rank,
) -> tuple[OpenVision | NoVision, CheckedModel]:
    """Open the vision part of a model; return it, and the model with the layers in which images see ahead."""
    vision = open_vision(
        loaded.source,
        loaded.model,
        checked.platform.weights_dtype,
        changes,
        slices,
        config.scheduler_config(1, 1).least_prompt_tokens,
        is_divided=not rank.is_alone,
    )
    if isinstance(vision, NoVision):
        if vision != TEXT_ONLY:
            logger.warning("%s %s", config.model_id, vision.reason)
    elif vision.seeing_ahead is not None:
        layout = checked.layout.seeing_ahead(only_windowed=vision.seeing_ahead.only_windowed)
        checked = replace(checked, layout=layout)
    return vision, checked


def _warn(config: EngineConfig, checked: CheckedModel) -> None:
    """Tell the operator what of the settings a model does not follow; raise if it has to."""
    if checked.reason:
        logger.warning("%s: %s, since %s", config.model_id, _SLOWER[checked.mode], checked.reason)
    checked.platform.confirm(config.model_id, checked.layout)
    dtypes = [dtype_name(dtype) for dtype in checked.layout.dtypes]
    if config.kv_cache_dtype != "auto" and config.kv_cache_dtype not in dtypes:
        logger.warning(
            "kv_cache_dtype: %s reads its keys, values or states itself, and keeps none in %s",
            config.model_id,
            config.kv_cache_dtype,
        )


def _runner(
    loaded: LoadedModel,
    checked: CheckedModel,
    limits: SchedulerConfig,
    head: PoolingHead,
    vision: OpenVision | NoVision,
    adapters: OpenAdapters | NoAdapters,
) -> MLXRunner:
    """Return what runs steps of a checked model on a pool of its own."""
    cache = checked.cache(
        limits.num_blocks, limits.block_size, num_window_blocks=limits.num_window_blocks
    )
    cache.reset()
    runner = MLXRunner(
        loaded.model,
        loaded.vocab_size,
        checked.selection,
        cache,
        sampler=checked.platform.sampler(),
        head=head,
        graphs=checked.graphs(cache),
        images=vision.images if isinstance(vision, OpenVision) else None,
        adapters=adapters.model if isinstance(adapters, OpenAdapters) else None,
    )
    if checked.platform.compiles_kernels:
        _compile_kernels(runner)
    return runner


def _compile_kernels(runner: MLXRunner) -> None:
    """Run a step: those of the check were for blocks of another size."""
    block = BlockTable([0]).value
    started = StartedSequence(0, SequenceSpec(prompt=(0,), max_tokens=1), seed=0)
    read = Slice(0, 0, (0,), block, block, state_slot=0, num_samples=1)
    runner.run(StepPlan((read,), started=(started,)))
    runner.reset()
