"""Whether a model takes images, by its config."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from batching.model_files.model_types import VISION_TYPES
from batching.model_files.seeing_ahead import seeing_ahead_of
from batching.model_info.vision import TEXT_ONLY, NoVision, VisionModel

HOW_TO_SEE: Final = "pip install --no-deps mlx-vlm==0.7.10"

_PACKAGE: Final = "mlx_vlm"
# Of which a directory has one at least.
_PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json")
_TOKEN_IDS: Final = ("image_token_id", "image_token_index")


def declared_vision(config: Mapping[str, Any], folder: Path) -> VisionModel | NoVision:
    """Return what a config says of a model's vision part; whether it can be loaded is not looked at.

    folder: the directory of the model.
    """
    ids = [config[name] for name in _TOKEN_IDS if isinstance(config.get(name), int)]
    if not isinstance(config.get("vision_config"), Mapping) or not ids:
        return TEXT_ONLY
    if (model_type := str(config.get("model_type"))) not in VISION_TYPES:
        return NoVision(
            f"is served without its vision part: images of the type {model_type} are not supported; those of "
            f"{', '.join(VISION_TYPES)} are"
        )
    seeing = seeing_ahead_of(config)
    return VisionModel(folder, model_type, ids[0], seeing.max_rows if seeing else 0)


def expected_vision(config: Mapping[str, Any], folder: Path) -> VisionModel | NoVision:
    """Return what a load of a model is expected to find of its vision part."""
    declared = declared_vision(config, folder)
    if isinstance(declared, VisionModel) and find_spec(_PACKAGE) is None:
        return without_tower("mlx-vlm is not installed")
    return declared


def without_processor(folder: Path) -> NoVision | None:
    """Return how a model is served whose directory lacks the files of an image processor; None if it has them."""
    if any((folder / name).is_file() for name in _PROCESSOR_FILES):
        return None
    return NoVision(
        f"is served without its vision part: its directory has no {_PROCESSOR_FILES[0]}"
    )


def without_tower(reason: str) -> NoVision:
    """Return how a model is served whose tower mlx-vlm does not load; `reason` says why."""
    return NoVision(f"is served without its vision part: {reason}; {HOW_TO_SEE} adds it")
