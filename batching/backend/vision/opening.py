"""Opens the vision part of a model that has one."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from batching.backend.hooks.changes import Changes
from batching.backend.vision.image_rows import ImageRows, hook_image_rows
from batching.backend.vision.images import Images
from batching.backend.vision.mlx_vlm_models import NoVisionModel
from batching.backend.vision.rotate_axes import hook_axes
from batching.backend.vision.tower import Tower, UnfitTower, load_tower
from batching.engine.load_slices import LoadSlices
from batching.model_files.seeing_ahead import SeeingAhead, seeing_ahead_of
from batching.model_files.vision import declared_vision, without_processor, without_tower
from batching.model_info.vision import NoVision, VisionModel


@dataclass(frozen=True)
class OpenVision:
    """The vision part of a model: what runs it, and what it takes.

    row_bytes: of an encoded row.
    num_pieces: in which an image can be encoded.
    num_bytes: of the weights.
    seeing_ahead: in which layers rows of an image see each other; None if they are causal.
    """

    images: Images
    model: VisionModel
    row_bytes: int
    num_pieces: int
    num_bytes: int
    seeing_ahead: SeeingAhead | None


def open_vision(
    source: str,
    model: nn.Module,
    dtype: mx.Dtype | None,
    changes: Changes,
    slices: LoadSlices,
    most_uncut: int,
    *,
    is_divided: bool = False,
) -> OpenVision | NoVision:
    """Load the tower of a model, and hook its rows into the text model.

    source: the directory of the model, or a file, which has none.
    dtype: of the tower's weights; None keeps them as they are stored.
    most_uncut: how many tokens of one prompt any step has room for.
    is_divided: other ranks have parts of the text model, and would need the tower's rows, too.

    Raises:
        ModelLoadError: weights are missing.
    """
    folder = Path(source)
    config = _config(folder)
    declared = declared_vision(config, folder)
    if isinstance(declared, NoVision):
        return declared
    if reason := _why_not_here(declared.max_span, most_uncut, is_divided=is_divided):
        return NoVision(f"is served without its vision part{reason}")
    tower = _tower(folder, config, dtype, changes)
    if isinstance(tower, NoVision):
        return tower
    for array in tower.weights:
        mx.eval(array)
        slices.pause()
    image_rows = ImageRows()
    try:
        hook_image_rows(model, image_rows, tower.num_added, changes)
    except LookupError as error:
        return NoVision(f"is served without its vision part: {error.args[0]}")
    if tower.pair_axes is not None:
        hook_axes(model, changes)
    return OpenVision(
        Images(tower, image_rows),
        declared,
        _row_bytes(tower),
        tower.num_pieces,
        sum(array.nbytes for array in tower.weights),
        seeing_ahead_of(config),
    )


def _why_not_here(max_span: int, most_uncut: int, *, is_divided: bool) -> str:
    """Return why this server cannot serve the vision part of a model that has one; empty if it can."""
    if is_divided:
        return ", which is not divided among ranks"
    if max_span > most_uncut:
        return (
            f": {max_span} tokens of an image see each other, and a step has room for {most_uncut} of a prompt: a "
            "larger max_num_batched_tokens would do"
        )
    return ""


def _tower(
    folder: Path, config: dict[str, Any], dtype: mx.Dtype | None, changes: Changes
) -> Tower | NoVision:
    if (lacking := without_processor(folder)) is not None:
        return lacking
    try:
        return load_tower(folder, config, dtype, changes)
    except NoVisionModel as error:
        return without_tower(str(error))
    except UnfitTower as error:
        return NoVision(f"is served without its vision part: {error}")


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        return {}
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return config


def _row_bytes(tower: Tower) -> int:
    """Return the bytes of a row and of what is added behind layers; they are computed in 32 bits at most."""
    return tower.hidden_size * (1 + tower.num_added) * mx.float32.size
