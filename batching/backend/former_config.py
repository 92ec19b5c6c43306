"""What a config lacks for mlx-lm and mlx-vlm, where transformers knows it: defaults, and values that it has renamed."""

from collections.abc import Mapping
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from batching.backend.rotation import rotation_of

Config = Mapping[str, Any]


def former_values(config: Config) -> dict[str, Any]:
    """Return what a config lacks of what both libraries read, its `text_config` as a whole.

    Raises:
        ValueError: its rotations differ from layer to layer, and mlx-lm's model would not read them.
    """
    text = config.get("text_config")
    lacks = {"text_config": text | inner} if isinstance(text, dict) and (inner := _of(text)) else {}
    return lacks | rotation_of({**config, **lacks})


def _of(text: Config) -> dict[str, Any]:
    """Return what the values of a text model lack.

    LLaVA 1.5 leaves sizes to the defaults of Llama; transformers 5 has a new name for the number of experts.
    """
    if (model_type := str(text.get("model_type"))) not in CONFIG_MAPPING:
        return {}
    kind = CONFIG_MAPPING[model_type]
    values = {former: text.get(name) for former, name in kind.attribute_map.items()}
    if "hidden_size" not in text:
        values |= kind().to_dict()
    return {k: v for k, v in values.items() if v is not None and k not in text}
