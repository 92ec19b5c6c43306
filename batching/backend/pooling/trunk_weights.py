"""Checkpoints of embedding models that are saved without what is around the trunk.

Their names lack the prefix `model.`, and there is no head.  Nothing here changes other checkpoints.
"""

from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx_lm.utils import _get_classes

_TRUNK: Final = ("embed_tokens.", "layers.", "norm.")
_HEAD: Final = "lm_head."


def trunk_classes(config: dict[str, Any]) -> tuple[type, type]:
    """Return mlx-lm's classes for a config, whose model also takes names without the prefix."""
    plain, arguments = _get_classes(config)

    class Model(plain):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            named = {_with_prefix(name): array for name, array in weights.items()}
            sanitize = getattr(super(), "sanitize", None)
            result: dict[str, mx.array] = sanitize(named) if sanitize else named
            return result

    return Model, arguments


def trunk_config(path: Path) -> dict[str, Any]:
    """Return what a checkpoint without a head needs in its config; its logits mean nothing."""
    names = {name for file in path.glob("model*.safetensors") for name in _names(file)}
    is_trunk = any(name.startswith(_TRUNK) for name in names)
    has_head = any(name.startswith(_HEAD) for name in names)
    return {"tie_word_embeddings": True} if is_trunk and not has_head else {}


def _names(file: Path) -> list[str]:
    arrays: Any = mx.load(str(file))  # none of them is read
    return list(arrays)


def _with_prefix(name: str) -> str:
    return f"model.{name}" if name.startswith(_TRUNK) else name
