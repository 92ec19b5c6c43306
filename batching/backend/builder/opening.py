"""Opens a model: on the platform that is chosen, or on those that follow where it is not right or does not run."""

import logging
from dataclasses import dataclass
from typing import Final

from batching.backend.exceptions import forget_locals, one_line
from batching.backend.execution_mode import ExecutionMode
from batching.backend.hooks.changes import Changes
from batching.backend.hooks.rows import hidden_size_of
from batching.backend.loader import LoadedModel, load_model
from batching.backend.platform import Instead, Platform, PreparedModel
from batching.backend.pooling.uses import may_embed
from batching.backend.runner.executor import release
from batching.backend.self_check.check import check_model
from batching.backend.self_check.checked_model import CheckedModel
from batching.backend.weights.storage import dtype_name
from batching.config import UNKNOWN_CONTEXT, EngineConfig
from batching.errors import ModelLoadError

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
    """A model that is loaded, prepared and checked.

    changes: all that were made for it.
    hidden_size: of the states that the head gets; None if they cannot be seen, or are not needed.
    """

    prepared: PreparedModel
    checked: CheckedModel
    changes: Changes
    hidden_size: int | None

    @property
    def loaded(self) -> LoadedModel:
        return self.prepared.loaded

    @property
    def platform(self) -> Platform:
        return self.checked.platform


def open_model(config: EngineConfig, platform: Platform) -> OpenModel:
    """Open a model on a platform, or on one that the platform names instead.

    Raises:
        ModelLoadError: the model cannot be found, read or run, or does not fit in memory.
    """
    while isinstance(opened := _open(config, platform), Instead):
        if opened.reason:
            logger.warning("%s", opened.reason)
        # The model that was loaded: there may be no room for another beside it.
        release(platform)
        platform = opened.platform
    return opened


def _open(config: EngineConfig, platform: Platform) -> OpenModel | Instead:
    loaded = load_model(
        config.model,
        dtype=platform.weights_dtype,
        trust_remote_code=config.trust_remote_code,
        chat_template=config.chat_template,
        has_kernels=platform.packs_weights,
    )
    if loaded.max_model_len is None and config.max_model_len is None:
        logger.warning(
            "%s declares no context length: %d tokens are served, MLX_SERVER_MAX_MODEL_LEN sets another",
            config.model_id,
            UNKNOWN_CONTEXT,
        )
    changes = Changes()
    try:
        opened = _opened(config, platform, loaded, changes)
        if isinstance(opened, Instead):
            changes.undo()
        return opened
    except ModelLoadError:
        changes.undo()
        raise
    except Exception as error:
        # The code of a model can raise anything.
        changes.undo()
        forget_locals(error)
        other = platform.fallback()
        if other is None:
            raise ModelLoadError(f"cannot run {config.model}: {one_line(error)}") from error
        reason = (
            f"without the native kernels: with them, cannot run {config.model}: {one_line(error)}"
        )
        return Instead(other, reason)


def _opened(
    config: EngineConfig, platform: Platform, loaded: LoadedModel, changes: Changes
) -> OpenModel | Instead:
    # Before the kernels take its parts; with them it cannot be called without their caches.
    hidden_size = hidden_size_of(loaded.model) if may_embed(config, loaded.description) else None
    prepared = platform.prepare(loaded, config.model_id, changes)
    if isinstance(prepared, Instead):
        return prepared
    loaded = prepared.loaded
    checked = check_model(
        loaded.model,
        loaded.vocab_size,
        platform,
        changes,
        known=prepared.known_result,
        max_model_len=config.model_context(loaded.max_model_len),
    )
    instead = prepared.finish(checked.result, is_invariant=checked.is_invariant)
    if instead is not None:
        return instead
    _warn(config, checked)
    if not checked.selection.is_hooked:
        hidden_size = None
    return OpenModel(prepared, checked, changes, hidden_size)


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
