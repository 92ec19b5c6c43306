"""Engines as the server builds them, on models with random weights that are made in memory."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from logging import Logger
from typing import Any, Final
from unittest.mock import patch

import batching.backend  # noqa: F401  # its BLAS has to come before MLX

# isort: split
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.utils import _get_classes

from batching.adapters.adapter import AdaptableLayers, NoAdapters
from batching.backend.builder import opening
from batching.backend.builder.engine import build_engine
from batching.backend.loader import LoadedModel
from batching.backend.runner.executor import Executor
from batching.backend.runner.mlx_runner import MLXRunner
from batching.batch_inference import BatchInferenceEngine
from batching.config import EngineConfig, SchedulerConfig
from batching.model_info.sampling_defaults import SamplingDefaults
from batching.scheduler import ContinuousBatchingScheduler
from scripts.gpu_check.record import Skipped
from scripts.make_model.random_weights import randomise
from scripts.make_model.tiny_configs import (
    COMMON,
    DENSE_FIRST,
    EXPERTS,
    LATENT,
    Config,
    gated_delta_net,
    nested,
    windowed,
)

# As the published models have it, and as MLX's attention kernels take it.
_HEAD_DIM: Final = {"head_dim": 64}
FAMILIES: Final[Mapping[str, Config]] = {
    "llama": _HEAD_DIM,
    "qwen3": _HEAD_DIM,
    "gemma3_text": {
        **_HEAD_DIM,
        "sliding_window": 12,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 64,
        "rope_local_base_freq": 10000.0,
    },
    "gpt_oss": {**_HEAD_DIM, **EXPERTS, **windowed(1)},
    "qwen3_5": nested("qwen3_5_text", **gated_delta_net(head_dim=64)),
    "deepseek_v3": {**DENSE_FIRST, **LATENT, "topk_method": "noaux_tc"},
    "qwen3_moe": {**_HEAD_DIM, **EXPERTS},
}
# How those are quantized that are published so, and the size of the groups.
QUANTIZED: Final = {"gpt_oss": ("mxfp4", 32, 4)}


class _InMemory(LoadedModel):
    """A model without files and without a tokenizer."""

    @property
    def has_jinja_template(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Served:
    """What serves a model, taken apart: steps are run one by one here.

    lines: what the server says when it starts.
    """

    engine: BatchInferenceEngine
    scheduler: ContinuousBatchingScheduler
    runner: MLXRunner
    adapters: AdaptableLayers | NoAdapters
    lines: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def limits(self) -> SchedulerConfig:
        return self.scheduler.config


def tiny_model(family: str, dtype: mx.Dtype) -> nn.Module:
    """Return a small model of a family, which has experts in 4 bits where the published ones have."""
    model = make_model({**COMMON, "model_type": family, **FAMILIES[family]})
    randomise(model, seed=0)
    model.set_dtype(dtype)
    if family in QUANTIZED:
        mode, group_size, bits = QUANTIZED[family]
        quantize(model, group_size, bits, mode, only="experts")
    model.eval()
    mx.eval(model.parameters())
    return model


def make_model(config: Config) -> nn.Module:
    """Build a model as mlx-lm does; nothing of it is computed yet."""
    model_class, arguments_class = _get_classes(config)
    model: nn.Module = model_class(arguments_class.from_dict(config))
    return model


def large_model(config: Config, bits: int | None) -> nn.Module:
    """Return a model in bfloat16 or in groups of 64, made on the device, layer by layer."""
    model = make_model(config)
    for layer in [*model.layers, model]:
        key = mx.random.key(0)

        def random(value: mx.array, key: mx.array = key) -> mx.array:
            deviation = value.shape[-1] ** -0.5
            if value.ndim == 1:
                return mx.ones(value.shape, mx.bfloat16)
            return mx.random.normal(value.shape, mx.bfloat16, scale=deviation, key=key)

        if layer is not model:
            layer.update(tree_map(random, layer.parameters()))
        else:
            # The layers are made already.
            inner = model.model
            for name in ("embed_tokens", "norm"):
                inner[name].update(tree_map(random, inner[name].parameters()))
            if "lm_head" in model:
                model.lm_head.update(tree_map(random, model.lm_head.parameters()))
        if bits is not None:
            quantize(layer, 64, bits, "affine")
        mx.eval(layer.parameters())
        mx.clear_cache()
    model.eval()
    return model


def quantize(model: nn.Module, group_size: int, bits: int, mode: str, only: str = "") -> None:
    """Quantize what mlx-lm quantizes, of which `only` is a part of the path."""

    def is_quantized(path: str, module: nn.Module) -> bool:
        fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0
        return fits and only in path

    nn.quantize(model, group_size, bits, mode=mode, class_predicate=is_quantized)


def serve(model: nn.Module, config: Config, **limits: Any) -> Served:
    """Build the engine of a model as the server does, its check at load included.

    Raises:
        Skipped: `gpu_kernels` is asked for, and this server has none.
        ModelLoadError: the model cannot be served.
    """
    if "gpu_kernels" in limits and "gpu_kernels" not in {f.name for f in fields(EngineConfig)}:
        raise Skipped("this server has no setting for GPU kernels")
    text = {**config, **config.get("text_config", {})}
    unused: Any = _NoTokenizer()
    loaded = _InMemory(
        model=model,
        tokenizer=unused,
        eos_token_ids=frozenset(),
        vocab_size=text["vocab_size"],
        max_model_len=text["max_position_embeddings"],
        model_type=config["model_type"],
        source="random weights",
        sampling_defaults=SamplingDefaults(),
    )
    engine_config = EngineConfig(
        model="random",
        model_id=config["model_type"],
        # Without native kernels a CPU takes the way of the GPUs.
        native="off",
        # The kernels are what a report is about, though a server leaves them off by default.
        **{"num_blocks": 64, "state_cache_mib": 64, "gpu_kernels": "auto", **limits},
    )
    warnings: list[str] = []
    with (
        patch.object(opening, "load_model", lambda *_, **__: loaded),
        patch.object(Logger, "warning", lambda _, text, *a: warnings.append(text % a)),
    ):
        built = build_engine(engine_config)
    # The parts of the engine, which it keeps to itself.
    scheduler, executor = built.engine._scheduler, built.engine._runner
    assert isinstance(executor, Executor)
    return Served(
        built.engine,
        scheduler,
        executor.runner,
        built.model.adapters,
        built.startup_lines,
        tuple(warnings),
    )


def serve_tiny(family: str, dtype: mx.Dtype, **limits: Any) -> Served:
    config = {**COMMON, "model_type": family, **FAMILIES[family]}
    return serve(tiny_model(family, dtype), config, **limits)


class _NoTokenizer:
    chat_template = None
