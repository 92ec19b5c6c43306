"""What `adapter_config.json` says of an adapter: its format, and how its layers are scaled."""

import math
import re
from dataclasses import dataclass
from typing import Any, Final, Protocol

from batching.adapters.files import tensor_names
from batching.adapters.files.module_patterns import ModulePatterns
from batching.model_files.strict_json import read_object

CONFIG: Final = "adapter_config.json"
MLX_LM_WEIGHTS: Final = "adapters.safetensors"
PEFT_WEIGHTS: Final = "adapter_model.safetensors"

Config = dict[str, Any]

# Half of the exponents of float32.
_MAX_NUMBER: Final = 1e19

# Those with which the layers of the base stay as they are.
_PLAIN_STARTS: Final = (True, False, None, "gaussian", "eva", "orthogonal")
# By what each says of an adapter if it is set.
_REFUSED: Final = {
    "use_dora": "DoRA is not served",
    "lora_bias": "biases are not served",
    "modules_to_save": "modules_to_save are not served",
    "target_parameters": "adapters of experts are not served",
    "trainable_token_indices": "adapters of embeddings are not served",
    "layer_replication": "layers that are replicated are not served",
    "use_qalora": "QA-LoRA is not served",
    "alora_invocation_tokens": "activated LoRA is not served",
}


class AdapterConfig(Protocol):
    """A format, and the values in it that matter.

    weights: the name of the file of weights.
    names: matches the names of its tensors.
    is_transposed: whether A is `[rank, inputs]` and B `[outputs, rank]`.
    """

    @property
    def weights(self) -> str: ...
    @property
    def names(self) -> re.Pattern[str]: ...
    @property
    def is_transposed(self) -> bool: ...

    def scale(self, layer: str, rank: int) -> float:
        """Return what x A B is multiplied with.

        Raises:
            ValueError: the layer should have another rank.
        """
        ...


@dataclass(frozen=True, slots=True)
class _MlxLmConfig:
    of_all: float
    weights: str = MLX_LM_WEIGHTS
    names: re.Pattern[str] = tensor_names.MLX_LM
    is_transposed: bool = False

    def scale(self, layer: str, rank: int) -> float:
        return self.of_all


@dataclass(frozen=True, slots=True)
class _PeftConfig:
    rank: int
    alpha: float
    ranks: ModulePatterns[int]
    alphas: ModulePatterns[float]
    is_stabilized: bool
    weights: str = PEFT_WEIGHTS
    names: re.Pattern[str] = tensor_names.PEFT
    is_transposed: bool = True

    def scale(self, layer: str, rank: int) -> float:
        declared = self.ranks.get(layer, self.rank)
        if declared != rank:
            raise ValueError(f"has {layer} with rank {rank}, and {CONFIG} says {declared}")
        alpha = self.alphas.get(layer, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_stabilized else rank)


def parse_config(text: bytes) -> AdapterConfig:
    """Return what a config says.

    Raises:
        ValueError: it is damaged, or describes an adapter that is not served; the text follows the file's name.
    """
    config = read_object(text)
    if "peft_type" in config:
        return _of_peft(config)
    if "lora_parameters" in config or "fine_tune_type" in config:
        return _of_mlx_lm(config)
    raise ValueError("has neither PEFT's peft_type nor mlx-lm's lora_parameters")


def _of_mlx_lm(config: Config) -> AdapterConfig:
    match config.get("fine_tune_type", "lora"):
        case "lora":
            pass
        case "dora":
            raise ValueError("has fine_tune_type dora: DoRA is not served")
        case "full":
            raise ValueError("has fine_tune_type full: full fine-tunes are not served as adapters")
        case other:
            raise ValueError(f"has fine_tune_type {other!r:.50}; only lora is served")
    # As mlx-lm, which takes no scale for granted when it loads an adapter.
    return _MlxLmConfig(_number(_table(config, "lora_parameters"), "scale"))


def _of_peft(config: Config) -> AdapterConfig:
    if (kind := config["peft_type"]) != "LORA":
        raise ValueError(f"has peft_type {kind!r:.50}; only LORA is served")
    for key, reason in _REFUSED.items():
        if config.get(key):
            raise ValueError(f"has {key}: {reason}")
    if (bias := config.get("bias", "none")) != "none":
        raise ValueError(f"has bias {bias!r:.50}: biases are not served")
    if (start := config.get("init_lora_weights")) not in _PLAIN_STARTS:
        raise ValueError(
            f"has init_lora_weights {start!r:.50}: adapters for a base that was changed are not served"
        )
    ranks, alphas = _table(config, "rank_pattern"), _table(config, "alpha_pattern")
    return _PeftConfig(
        rank=_rank(config, "r", 8),
        alpha=_number(config, "lora_alpha", 8),
        ranks=ModulePatterns({key: _rank(ranks, key) for key in ranks}),
        alphas=ModulePatterns({key: _number(alphas, key) for key in alphas}),
        is_stabilized=config.get("use_rslora") is True,
    )


def _table(config: Config, key: str) -> Config:
    table = config.get(key)
    if not isinstance(table, dict | None):
        raise ValueError(f"has {key} {table!r:.50}, which is not an object")
    return table or {}


def _number(config: Config, key: str, default: float | None = None) -> float:
    value: Any = config.get(key, default)
    if type(value) in (int, float) and abs(value) <= _MAX_NUMBER:
        return float(value)
    raise ValueError(f"has {key} {value!r:.50}, which is not a number that can be used")


def _rank(config: Config, key: str, default: int | None = None) -> int:
    value: Any = config.get(key, default)
    if type(value) is int and value >= 1:
        return value
    raise ValueError(f"has {key} {value!r:.50}, which is not a rank")
