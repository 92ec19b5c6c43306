"""Builds the engine of an encoder: the scheduler of all models, over prompts that are read whole."""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from batching.adapters.adapter import NoAdapters
from batching.backend.encoders.encoder import Encoder, PlainTrunk, Trunk, load_encoder
from batching.backend.encoders.runner import EncoderRunner
from batching.backend.encoders.tokens import cross_encoder_of, longest_text
from batching.backend.exceptions import forget_locals, one_line
from batching.backend.gguf.model import arrays_of, evaluate
from batching.backend.loader import resolve
from batching.backend.memory.device import MIB, check_room
from batching.backend.platform import Platform
from batching.backend.pooling.description import describe_directory
from batching.backend.pooling.head import NO_HEAD, PoolingHead
from batching.backend.pooling.uses import embeddings_of
from batching.backend.runner.executor import release
from batching.backend.weights.storage import dtype_name
from batching.batch_inference import BatchInferenceEngine
from batching.config import EngineConfig, SchedulerConfig
from batching.engine.load_slices import LoadCancelled, LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.engine.memory_use import MemoryUse
from batching.errors import ModelLoadError
from batching.model_files.model_types import ENCODER_TYPES
from batching.model_files.references import BUNDLED_MODEL
from batching.model_info.model import ModelInfo
from batching.pooling import Embeddings, NoEmbeddings
from batching.scheduler import ContinuousBatchingScheduler

logger = logging.getLogger(__name__)

# Texts are short: so many tokens of a step have room for one.
_TOKENS_PER_TEXT: Final = 16
_NO_ADAPTERS: Final = NoAdapters("is an encoder, which takes no adapters")
_IS_CROSS_ENCODER: Final = NoEmbeddings("is a cross-encoder, and makes no embeddings")


def encoder_directory(config: EngineConfig, slices: LoadSlices) -> Path | None:
    """Return the directory of a model that is an encoder; None if it is another one, or cannot be read."""
    if config.model == BUNDLED_MODEL:
        return None
    find = partial(resolve, config.model, trust_remote_code=config.trust_remote_code)
    try:
        path = slices.in_thread(find)
        model_type = _config_of(path)["model_type"]
    except (ModelLoadError, OSError, ValueError, LookupError, TypeError):
        # The loader of other models says what is wrong with it.
        return None
    return path if model_type in ENCODER_TYPES else None


def build_encoder(
    config: EngineConfig, path: Path, platform: Platform, slices: LoadSlices
) -> LoadedEngine:
    """Load an encoder and build the engine that serves it; see `build_engine`.

    Raises:
        ModelLoadError: it cannot be read, or does not fit in memory.
    """
    try:
        return _built(config, path, platform, slices)
    except (LoadCancelled, KeyboardInterrupt, SystemExit):
        raise
    except ModelLoadError as error:
        raise ModelLoadError(f"cannot load {config.model}: {error}") from error
    except BaseException as error:
        # As of other models: tokenizers and readers raise whatever they meet in a foreign file.
        raise ModelLoadError(f"cannot load {config.model}: {one_line(error)}") from error


def _built(
    config: EngineConfig, path: Path, platform: Platform, slices: LoadSlices
) -> LoadedEngine:
    declared = _config_of(path)
    # On a CPU, MLX multiplies other types than these through no BLAS.
    dtype = mx.float32 if mx.default_device() == mx.cpu else platform.weights_dtype
    encoder, num_bytes = _read(path, declared, dtype, slices)
    tokenizer = slices.in_thread(partial(load_tokenizer, path))
    embeddings, head = _embeddings(config, path, encoder)
    info = _info(config, encoder, tokenizer, embeddings)
    limits = _limits(config, info.max_model_len)
    trunk, kernels = _fastest(config, encoder.plain, platform, limits)
    engine = BatchInferenceEngine(
        ContinuousBatchingScheduler(limits),
        EncoderRunner(replace(encoder, trunk=trunk), head),
        max_stall=config.max_stall_ms / 1000,
        min_chunk=platform.min_chunk,
    )
    lines = {
        "model": f"{config.model_id} ({declared['model_type']}, an encoder, {path})",
        "device": platform.device_line("as stored" if dtype is None else dtype_name(dtype)),
        "kernels": kernels,
        "context": f"{info.max_model_len} tokens a text",
        "batch": f"up to {limits.max_num_seqs} texts, {limits.max_num_batched_tokens} tokens a step",
        "memory": f"{num_bytes // MIB} MiB of weights",
    }
    startup_lines = tuple(f"{name:<10}{line}" for name, line in lines.items() if line)
    close = partial(release, platform)
    return LoadedEngine(engine, info, startup_lines, MemoryUse(num_bytes), close)


def _read(
    path: Path, declared: Mapping[str, Any], dtype: mx.Dtype | None, slices: LoadSlices
) -> tuple[Encoder, int]:
    """Read an encoder; return it, and the bytes of its weights."""
    encoder = load_encoder(path, declared, dtype)
    num_bytes = sum(a.nbytes for module in encoder.modules for a in arrays_of(module))
    check_room(num_bytes, "weights", "take a smaller model")
    for module in encoder.modules:
        evaluate(module, slices)
    return encoder, num_bytes


def _fastest(
    config: EngineConfig, plain: PlainTrunk, platform: Platform, limits: SchedulerConfig
) -> tuple[Trunk, str]:
    """Return a trunk as it runs fastest on a platform, and a line that says how.

    Raises:
        ModelLoadError: the kernels are required, and it does not run on them.
    """
    # A long text may be in a step with as many tokens of others as the step may have.
    max_tokens = limits.max_model_len + limits.max_num_batched_tokens
    try:
        trunk = platform.encoder_trunk(plain, max_tokens, limits.max_num_seqs)
        return trunk, platform.kernels_line("")
    except Exception as error:
        forget_locals(error)
        reason = one_line(error)
        instead = platform.fallback(reason)
        if instead is None:
            raise ModelLoadError(
                f"the kernels are required, and do not run it: {reason}"
            ) from error
        logger.warning("%s: %s", config.model_id, instead.reason)
        return plain, instead.platform.kernels_line("")


def _config_of(path: Path) -> Mapping[str, Any]:
    config: Mapping[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return config


def _embeddings(
    config: EngineConfig, path: Path, encoder: Encoder
) -> tuple[Embeddings | NoEmbeddings, PoolingHead]:
    if encoder.classifier is not None:
        return _IS_CROSS_ENCODER, NO_HEAD
    return embeddings_of(config, describe_directory(path), encoder.hidden_size)


def _info(
    config: EngineConfig,
    encoder: Encoder,
    tokenizer: TokenizerWrapper,
    embeddings: Embeddings | NoEmbeddings,
) -> ModelInfo:
    context = longest_text(tokenizer, encoder.plain.context)
    if isinstance(embeddings, Embeddings) and embeddings.max_tokens is not None:
        context = min(context, embeddings.max_tokens)
    return ModelInfo(
        model_id=config.model_id,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        vocab_size=encoder.vocab_size,
        max_model_len=min(config.max_model_len or context, context),
        embeddings=embeddings,
        reranker=None if encoder.classifier is None else cross_encoder_of(tokenizer),
        generates=False,
        adapters=_NO_ADAPTERS,
    )


def _limits(config: EngineConfig, max_model_len: int) -> SchedulerConfig:
    """Return limits for prompts that are read whole and leave nothing behind: each has one block, of no bytes."""
    num_texts = max(config.max_num_seqs, config.max_num_batched_tokens // _TOKENS_PER_TEXT)
    return replace(
        config.scheduler_config(num_texts, max_model_len),
        block_size=max_model_len,
        max_num_seqs=num_texts,
        prefill_chunk=max_model_len,
        enable_prefix_cache=False,
        max_draft_tokens=0,
        reads_whole=True,
    )
