"""Opens the store of a model's blocks: a folder by all that keys and values depend on."""

import hashlib
import json
import logging
from collections.abc import Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from batching.backend.builder.sizing import Sizes
from batching.backend.numerics import NUMERICS_VERSION
from batching.backend.paged.kv_cache import PagedKVCache
from batching.backend.platform import PreparedModel
from batching.backend.self_check.checked_model import CheckedModel
from batching.backend.weights.storage import dtype_name
from batching.block_store import entry_file
from batching.block_store.file_digests import FileDigests
from batching.block_store.store import BlockStore, shared_store
from batching.config import EngineConfig
from batching.engine.load_slices import LoadSlices

logger = logging.getLogger(__name__)

GIB: Final = 1 << 30
_PACKAGES: Final = ("mlx", "mlx-lm", "mlx-vlm")
_MODEL_PATTERNS: Final = ("*.safetensors", "*.safetensors.index.json", "config.json", "*.py")


def open_store(
    config: EngineConfig,
    prepared: PreparedModel,
    checked: CheckedModel,
    sizes: Sizes,
    cache: PagedKVCache,
    slices: LoadSlices,
) -> BlockStore | None:
    """Open the store of a model, as far as one is set; where it cannot be used, the log says why."""
    if config.kv_cache_dir is None and not config.kv_host_gib:
        return None
    if not sizes.limits.enable_prefix_cache:
        logger.warning("%s: without a prefix cache nothing is stored", config.model_id)
        return None
    if not cache.can_be_stored:
        logger.warning("%s keeps caches of its own, which cannot be stored", config.model_id)
        return None
    store = None
    if config.kv_cache_dir is not None:
        store = _on_disk(config, config.kv_cache_dir, prepared, checked, sizes, slices)
    if store is None and config.kv_host_gib:
        return BlockStore(max_host_bytes=_host_bytes(config))
    return store


def _host_bytes(config: EngineConfig) -> int:
    return int(config.kv_host_gib * GIB)


def _on_disk(
    config: EngineConfig,
    folder: Path,
    prepared: PreparedModel,
    checked: CheckedModel,
    sizes: Sizes,
    slices: LoadSlices,
) -> BlockStore | None:
    try:
        digests, files = FileDigests(folder), _files(Path(prepared.loaded.source))
        weights = slices.in_thread(partial(digests.of, files))
        most = config.kv_cache_max_write_gib_per_day
        max_written = None if most is None else int(most * GIB)
        of_model = identity(weights, prepared.note, checked, sizes.limits.block_size)
        return shared_store(
            folder,
            int(config.kv_cache_gib * GIB),
            max_written,
            of_model,
            config.model_id,
            _host_bytes(config),
            slices.in_thread,
        )
    except OSError as error:
        logger.warning(
            "%s: keys and values are not kept in %s: %s",
            config.model_id,
            folder,
            error.strerror or error,
        )
        return None


def identity(weights: Mapping[str, str], note: str, checked: CheckedModel, block_size: int) -> str:
    """Return a digest of all that the files of a model depend on, but for tokens and images.

    weights: the digests of its files by their names.
    note: how products round.
    """
    platform = checked.platform
    dtype = platform.weights_dtype
    parts = {
        "format": entry_file.VERSION,
        "numerics": NUMERICS_VERSION,
        "weights": weights,
        "note": note,
        "dtype": None if dtype is None else dtype_name(dtype),
        "platform": platform.identity,
        "packages": {name: _version(name) for name in _PACKAGES},
        "mode": checked.mode,
        "layers": [str(layer) for layer in checked.layout.layers],
        "block_size": block_size,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _files(model: Path) -> list[Path]:
    if model.is_file():
        return [model]
    return [path for pattern in _MODEL_PATTERNS for path in sorted(model.glob(pattern))]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
