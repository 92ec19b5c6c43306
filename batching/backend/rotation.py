"""What transformers 5 writes of a rotation, for the models of mlx-lm that read it as it was before."""

from collections.abc import Mapping
from typing import Any, Final

_SINGLE: Final = ("rope_theta", "partial_rotary_factor")


def rotation_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config lacks that its `rope_parameters` have.

    Those that differ from layer to layer are left to the model, which must know them.
    """
    found = config.get("rope_parameters")
    if not isinstance(found, dict) or any(isinstance(value, dict) for value in found.values()):
        return {}
    parts = {name: found[name] for name in _SINGLE if name in found}
    if found.get("rope_type", "default") != "default":
        parts["rope_scaling"] = found
    return {name: value for name, value in parts.items() if config.get(name) is None}
