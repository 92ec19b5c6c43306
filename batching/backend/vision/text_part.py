"""The text part of a model whose type mlx-lm does not have, while it has that of its `text_config`."""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any, Final

import mlx.core as mx
from mlx_lm.utils import _get_classes

from batching.model_files.model_types import module_of

Config = Mapping[str, Any]

_TABLE: Final = "embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
_TRUNK: Final = "model."


def has_text_part(config: Config) -> bool:
    """Return whether mlx-lm reads a model by its `text_config` only."""
    text = config.get("text_config")
    has_type = isinstance(text, Mapping) and _is_known(str(text.get("model_type")))
    return has_type and not _is_known(str(config.get("model_type")))


def text_part_classes(config: Config) -> tuple[type, type]:
    """Return mlx-lm's classes of the text part; they take the config and the weights of the whole."""
    plain, arguments = _get_classes(dict(config["text_config"]))

    class Arguments(arguments):  # type: ignore[misc, valid-type]
        @classmethod
        def from_dict(cls, params: Config) -> Any:
            tied = {k: params[k] for k in ("tie_word_embeddings",) if k in params}
            return arguments.from_dict(tied | params["text_config"])

    class Model(plain):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            own = _text_weights(weights)
            sanitize = getattr(super(), "sanitize", None)
            result: dict[str, mx.array] = sanitize(own) if sanitize else own
            return result

    return Model, Arguments


def _is_known(model_type: str) -> bool:
    return find_spec(f"mlx_lm.models.{module_of(model_type)}") is not None


def _text_weights(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return the text part's weights by its own names: the trunk is where the table of embeddings is."""
    trunk, head = (_prefix_of(last, weights) for last in (_TABLE, _HEAD))
    own: dict[str, mx.array] = {}
    for name, array in weights.items():
        if head is not None and name.startswith(f"{head}lm_head."):
            own[name.removeprefix(head)] = array
        elif trunk is not None and name.startswith(trunk):
            own[f"{_TRUNK}{name.removeprefix(trunk)}"] = array
    return own


def _prefix_of(last: str, names: Iterable[str]) -> str | None:
    return next((name.removesuffix(last) for name in names if name.endswith(last)), None)
