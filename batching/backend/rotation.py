"""Translates a rotation that transformers 5 wrote, for the models of mlx-lm that read the form before it."""

import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any, Final

from mlx_lm.utils import _get_classes

Config = Mapping[str, Any]

_SINGLE: Final = ("rope_theta", "partial_rotary_factor")
_NEW: Final = "rope_parameters"
# The base of windowed layers, beside the `rope_theta` and `rope_scaling` of the others.
_WINDOWED_BASE: Final = "rope_local_base_freq"


def rotation_of(config: Config) -> dict[str, Any]:
    """Return what a config lacks that its `rope_parameters` have, its `text_config` as a whole.

    Raises:
        ValueError: they differ from layer to layer, and mlx-lm's model would not read them.
    """
    lacks = _lacking(config, config)
    text_config = config.get("text_config")
    if isinstance(text_config, dict) and (inner := _lacking(text_config, config)):
        lacks["text_config"] = text_config | inner
    return lacks


def _lacking(part: Config, config: Config) -> dict[str, Any]:
    found = part.get(_NEW)
    if not isinstance(found, dict):
        return {}
    differs = any(isinstance(value, dict) for value in found.values())
    former = _by_layer(found, part, config) if differs else _former(found)
    return {name: value for name, value in former.items() if part.get(name) is None}


def _former(rope: Config) -> dict[str, Any]:
    """Name the parameters of one rotation as they were named before."""
    former = {name: rope[name] for name in _SINGLE if name in rope}
    if rope.get("rope_type", "default") != "default":
        former["rope_scaling"] = rope
    return former


def _by_layer(found: Config, part: Config, config: Config) -> dict[str, Any]:
    """Name the parameters of each kind of layer as before, if the model reads those names alone."""
    if config.get("model_file") is not None or _NEW in (known := _names_read(config)):
        return {}
    if _WINDOWED_BASE in known and found.keys() == {"full_attention", "sliding_attention"}:
        windowed = _former(found["sliding_attention"])
        if windowed.keys() == {"rope_theta"}:
            return _former(found["full_attention"]) | {_WINDOWED_BASE: windowed["rope_theta"]}
    if part.get("rope_theta") is None:
        raise ValueError(
            f"its rotation differs from layer to layer (rope_parameters), which mlx-lm's {config['model_type']} does not "
            "read; it needs rope_theta, and rope_scaling where it has one, in its config.json"
        )
    return {}


def _names_read(config: Config) -> set[str]:
    """Return what mlx-lm's model reads of a config and of its parts, whose classes may be another model's."""
    _, arguments = _get_classes(dict(config))
    own = sys.modules[arguments.__module__]
    modules = [own, *(value for value in vars(own).values() if isinstance(value, ModuleType))]
    values = [value for module in modules for value in vars(module).values()]
    return {field.name for value in values if is_dataclass(value) for field in fields(value)}
