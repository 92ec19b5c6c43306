"""A tiny random model of each model type that mlx-lm has a file for."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import batching.backend  # noqa: F401  # its BLAS has to come before MLX

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx_lm.utils import _get_classes

from scripts.make_model.random_weights import randomise
from scripts.make_model.tiny_configs import COMMON, Config
from tests.support.zoo.dense import DENSE
from tests.support.zoo.latent import LATENT_MODELS
from tests.support.zoo.mixtures import MIXTURES
from tests.support.zoo.recurrent import RECURRENT
from tests.support.zoo.variants import VARIANTS

CONFIGS: Final[dict[str, Config]] = {**RECURRENT, **DENSE, **MIXTURES, **LATENT_MODELS}
ZOO: Final[dict[str, Config]] = {**CONFIGS, **VARIANTS}

# Types that cannot be made or run here, and why.
UNAVAILABLE: Final[dict[str, str]] = {
    "bitnet": "its linear layers are a Metal kernel",
    "muse_spark": "its attention and experts are Metal kernels",
    "olmo": "needs the package ai2-olmo and ends the interpreter without it",
}

# Types whose logits depend on how mlx-lm's own forward pass is cut into pieces, and why.
INCONSISTENT: Final[dict[str, str]] = {
    "phi3small": "it adds a boolean mask to its scores, so tokens attend to later ones",
    "plamo3": "its mask lets a token attend to one position more than its cache keeps",
}

# Types whose logits the last bit may change, so that how they are served depends on the process.
LEAPING: Final[dict[str, str]] = {
    "deepseek_v41": "it rounds to 8 bits in its own code, and chooses keys by what it gets",
}

# Types that mlx-lm cannot quantize, and why.
UNQUANTIZABLE: Final[dict[str, str]] = {
    "afm7": "its fused layers do not take the mode that nn.quantize passes",
}


def _model_types() -> tuple[str, ...]:
    """Names of the files that define, or import, a model and its arguments."""
    (folder,) = mlx_lm.models.__path__
    texts = {path.stem: path.read_text() for path in Path(folder).glob("*.py")}
    names = (r"^(class|from .* import .*\b)\s*Model\b", r"\bModelArgs\b")
    return tuple(
        sorted(t for t in texts if all(re.search(n, texts[t], re.MULTILINE) for n in names))
    )


MODEL_TYPES: Final = _model_types()


def tiny_config(name: str) -> Config:
    """Return what the config.json of a model type, or of a variant, would hold."""
    return deepcopy({**COMMON, "model_type": name, **ZOO[name]})


def make_tiny(
    name: str, *, seed: int = 0, bits: int | None = None, mode: str = "affine"
) -> nn.Module:
    """Build a model as mlx-lm does, with random weights, in evaluation mode."""
    config = tiny_config(name)
    model_class, args_class = _get_classes(config)
    mx.random.seed(seed)
    model: nn.Module = model_class(args_class.from_dict(config))
    randomise(model, seed)
    if bits is not None or mode != "affine":
        quantize(model, bits or 4, mode)
    model.eval()
    return model


def quantize(model: nn.Module, bits: int, mode: str) -> None:
    """Quantize in groups of 32 what mlx-lm quantizes.

    Embeddings stay as they are where they would be looked up in bfloat16: the rest would be so, too.
    """
    keeps = getattr(model, "quant_predicate", None)

    def predicate(path: str, module: nn.Module) -> Any:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % 32:
            return False
        if mode != "affine" and isinstance(module, nn.Embedding):
            return False
        return keeps(path, module) if keeps else True

    nn.quantize(model, 32, bits, mode=mode, class_predicate=predicate)
    mx.eval(model.parameters())
